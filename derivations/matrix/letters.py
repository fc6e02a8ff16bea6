"""Letters of leaves and sizes in printed expressions, where one chapter is used in several places.

A chapter prints its own letters: the input of a norm is X, its row scales are s. Where one formula holds several norms
each needs letters of its own. ``letters`` gives them while an expression is being built, ``dimensions`` gives sizes a
name while one is being printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Protocol

_LETTER = re.compile(r"\\?[A-Za-z]+(?:_(?:\{[^{}]*\}|\\?[A-Za-z]+|[0-9]))?")
_ONE_LETTER = re.compile(
    r"(?P<base>(?:\\[A-Za-z]+(?:\{[^{}]*\})?|[A-Za-z])'*)"
    r"(?:_(?:\{(?P<long>[^{}]*)\}|(?P<short>[A-Za-z0-9])))?"
    r"(?P<upper>\^(?:\{[^{}]*\}|[A-Za-z0-9]))?"
)
_LETTERS: ContextVar[Mapping[str, str]] = ContextVar("letters", default=MappingProxyType({}))
_SIZES: ContextVar[SizeNames | None] = ContextVar("sizes", default=None)


class SizeNames(Protocol):
    """Names for sizes and for the numbers made of them, in LaTeX."""

    def __call__(self, n: int) -> str:
        """Return the name of a size."""

    def scalar(self, c: Any) -> str | None:
        """Return the name of a factor such as 1/d, or None where it is to be printed as a number."""


@contextmanager
def letters(names: Mapping[str, str]) -> Iterator[None]:
    """Give the leaves that are built inside other letters, e.g. ``{"X": "R", "s": "s_1"}``.

    Where one ``letters`` is inside another, the inner names are read in the outer letters: a chapter that is made of
    others names theirs in its own letters, and its caller names these.

    >>> import torch
    >>> from derivations.matrix.diagonal import Diagonal
    >>> with letters({"s": "s_1"}):
    ...     P = Diagonal(torch.ones(2), "s^{-1}")
    >>> P.latex()
    '\\\\operatorname{diag}(s_1^{-1})'
    """
    token = _LETTERS.set({**_LETTERS.get(), **{old: in_letters(new) for old, new in names.items()}})
    try:
        yield
    finally:
        _LETTERS.reset(token)


def in_letters(symbol: str) -> str:
    """Return a leaf's symbol in the letters that are in force."""
    names = _LETTERS.get()
    if not names:
        return symbol
    return names.get(symbol) or _LETTER.sub(lambda match: _renamed(match[0], names), symbol)


def _renamed(letter: str, names: Mapping[str, str]) -> str:
    """Return a letter's new name; a letter with an index that has none keeps the index: P_h becomes Q_h."""
    base, _, index = letter.partition("_")
    if letter in names or not index or base not in names:
        return names.get(letter, letter)
    return with_index(names[base], index.strip("{}"))


def with_index(symbol: str, index: str) -> str:
    r"""Return a symbol with one more index, in brackets if it is more than one letter.

    >>> with_index("K", "h"), with_index("W_Q", "h"), with_index(r"\tilde{K}^{(2)}", "h"), with_index("XW", "h")
    ('K_h', 'W_{Q,h}', '\\tilde{K}_h^{(2)}', '\\left(XW\\right)_h')
    """
    one = _ONE_LETTER.fullmatch(symbol)
    known = one and (one["long"] or one["short"])
    below = f"{known},{index}" if known else index
    below = below if len(below) == 1 else f"{{{below}}}"
    return f"{one['base']}_{below}{one['upper'] or ''}" if one else rf"\left({symbol}\right)_{below}"


@contextmanager
def dimensions(names: SizeNames) -> Iterator[None]:
    """Print the sizes of matrices by name in place of their digits."""
    token = _SIZES.set(names)
    try:
        yield
    finally:
        _SIZES.reset(token)


def dimension(n: int) -> str:
    """Return a size as it is to be printed: in digits, unless ``dimensions`` gives it a name.

    >>> dimension(12)
    '12'
    """
    names = _SIZES.get()
    return str(n) if names is None else names(n)


def named_scalar(c: Any) -> str | None:
    """Return a factor that is made of sizes by their names, or None where it is to be printed as a number."""
    names = _SIZES.get()
    return None if names is None else names.scalar(c)
