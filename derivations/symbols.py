"""The letters that a chapter's matrices are printed with: its own, or those of the layer that it is a part of.

One chapter serves Q = X W_Q and K = X W_K. Its formulas are written in its own letters (X, W), and a caller who puts it
into a layer gives ``symbols``, a mapping from the chapter's arguments to the layer's LaTeX. For letters that are no argument
(a norm's scales s), and for a whole formula at once, there is ``derivations.matrix.letters``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from derivations.arrays import Array
from derivations.matrix import Dense, Matrix

_INDEXED = re.compile(r"(?P<base>.+)_(\{(?P<long>[^{}]*)\}|(?P<short>[A-Za-z0-9]))")
_PLAIN = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def expect_symbols(owner: str, symbols: Mapping[str, str], arguments: Mapping[str, object]) -> None:
    """Check that symbols are given to arguments that exist: a misspelt one would be ignored.

    Raises:
        ValueError: naming the first unknown name and the arguments that exist.
    """
    for name in symbols:
        if name not in arguments:
            raise ValueError(f"{owner}: symbols names {name!r}, which is no argument. The arguments are {', '.join(arguments)}.")


def letter(symbols: Mapping[str, str], name: str) -> str:
    """Return the symbol that an argument is printed with: the caller's, or else the argument's name.

    >>> letter({"W": "W_Q"}, "W"), letter({"W": "W_Q"}, "X")
    ('W_Q', 'X')
    """
    return symbols.get(name, name)


def leaf(array: Array, symbols: Mapping[str, str], name: str) -> Matrix:
    """Return a two-dimensional argument as a matrix with its letter.

    >>> import torch
    >>> leaf(torch.ones(2, 3), {"W": "W_Q"}, "W")
    Dense(2x3: W_Q)
    """
    return Dense(array, letter(symbols, name))


def with_index(symbol: str, index: str) -> str:
    r"""Return a symbol with one more index.

    >>> with_index("K", "h"), with_index("K_{rot}", "h"), with_index("XW", "h")
    ('K_h', 'K_{rot,h}', '\\left(XW\\right)_h')
    """
    indexed = _INDEXED.fullmatch(symbol)
    if indexed and _PLAIN.fullmatch(indexed["base"]):
        return f"{indexed['base']}_{{{indexed['long'] or indexed['short']},{index}}}"
    return f"{symbol}_{index}" if _PLAIN.fullmatch(symbol) else rf"\left({symbol}\right)_{index}"
