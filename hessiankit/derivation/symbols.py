r"""The letters of a derivation: of parameters, of normed and rotated values, of rows, with the number of the block."""

from __future__ import annotations

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


def row_of(symbol: str) -> str:
    r"""Return the letter of a row of a value.

    >>> row_of("Q'"), row_of(r"\hat{Y}")
    ('q_i', 'y_i')
    """
    letters = [c for c in symbol.replace(r"\hat", "").replace(r"\tilde", "") if c.isalpha()]
    return (letters[0].lower() if letters else "x") + "_i"


def plus(bias: str | None) -> str:
    r"""Return the summand of a bias, or nothing.

    >>> plus("b_1"), plus(None)
    (' + \\mathbf{1}\\,b_1^\\top', '')
    """
    return "" if bias is None else rf" + \mathbf{{1}}\,{bias}^\top"
