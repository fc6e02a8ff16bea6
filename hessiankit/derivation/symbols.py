r"""The letters of a derivation: of parameters, of normed and rotated values, of rows, with the number of the block."""

from __future__ import annotations

import re

_GREEK = ("lambda", "omega", "alpha", "gamma", "beta")


def symbol_of(dotted: str) -> str:
    r"""Return the letter of a parameter.

    >>> symbol_of("attention.W_Q"), symbol_of("norm_1.weight"), symbol_of("attention.norm_q.weight"), symbol_of("lambda_1")
    ('W_Q', '\\gamma_1', '\\gamma_q', '\\lambda_1')
    """
    *path, last = dotted.split(".")
    if last in ("weight", "bias") and path and path[-1].startswith("norm"):
        return (r"\gamma" if last == "weight" else r"\beta") + path[-1].removeprefix("norm")
    return rf"\{last}" if last.split("_")[0] in _GREEK else last


def index_of(symbol: str) -> str:
    """Return how a parameter is written as an index: Q for W_Q."""
    return symbol.removeprefix("W_")


def upper(symbol: str) -> str:
    """Return the upper index of a symbol with its sign, or nothing.

    >>> upper("F^{(2)}"), upper("F")
    ('^{(2)}', '')
    """
    _, sign, index = symbol.partition("^")
    return sign + index


def marked(accent: str, symbol: str) -> str:
    r"""Return a symbol with an accent.

    >>> marked("tilde", "Q^{(2)}")
    '\\tilde{Q}^{(2)}'
    """
    return rf"\{accent}{{{symbol.partition('^')[0]}}}{upper(symbol)}"


def hat(symbol: str) -> str:
    r"""Return the symbol of a normed value.

    >>> hat("Y")
    '\\hat{Y}'
    """
    return marked("hat", symbol)


def bar(symbol: str) -> str:
    r"""Return the symbol of a value times a number or a vector.

    >>> bar("F"), bar(r"\hat{X}")
    ('\\bar{F}', '\\bar{X}')
    """
    inner = re.sub(r"\\(check|hat|tilde|bar)\{([^{}]*)\}", r"\2", symbol)
    return marked("bar", inner)


def ring(symbol: str) -> str:
    r"""Return the symbol of a value whose rows a norm has centred and divided, before its gain and shift.

    >>> ring(r"\check{Q}")
    '\\mathring{Q}'
    """
    return bar(symbol).replace("bar", "mathring", 1)


def row_of(symbol: str) -> str:
    r"""Return the letter of a row of a value.

    >>> row_of(r"\check{Q}"), row_of(r"\hat{Y}")
    ('q_i', 'y_i')
    """
    letters = [c for c in re.sub(r"\\(check|hat|tilde|bar)", "", symbol) if c.isalpha()]
    return (letters[0].lower() if letters else "x") + "_i"


def plus(bias: str | None) -> str:
    r"""Return the summand of a bias, or nothing.

    >>> plus("b_1"), plus(None)
    (' + \\mathbf{1}\\,b_1^\\top', '')
    """
    return "" if bias is None else rf" + \mathbf{{1}}\,{bias}^\top"
