"""Formulas set in lines: a long one is broken at its sums, and inside brackets only where nothing else is left."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hessiankit.derivation.plain import plain

WIDTH = 92
"""Signs in a line: what fits a landscape page at ten points."""

_NO_WIDTH = r"\\(operatorname|mathrm|text|mathcal|mathbf|hat|tilde|bar|check|mathring|left|right|bigl|bigr|quad)\b"
_TOKEN = re.compile(r"\\left[(\[|]|\\right[)\]|]|\\[A-Za-z]+|\\.|[^\\]")
_HEAD = r"""\documentclass[fleqn]{article}
\usepackage{amsmath,amssymb}
\usepackage[landscape,margin=1.5cm]{geometry}
\allowdisplaybreaks
\setlength{\parindent}{0pt}
\pagestyle{empty}
\begin{document}
"""


def align(rows: Iterable[tuple[str, str]], environment: str = "align*", width: int = WIDTH) -> str:
    """Return (symbol, formula) rows in an environment with aligned signs of equality, long formulas in several lines."""
    lines = [rf"{symbol} &= " + " \\\\\n&\\quad ".join(broken(formula, width)) for symbol, formula in rows]
    return f"\\begin{{{environment}}}\n" + " \\\\\n".join(lines) + f"\n\\end{{{environment}}}\n"


def document(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a LaTeX file with a title and (heading, body) sections."""
    body = "\n".join(rf"\subsection*{{{heading}}}" + f"\n{text}" for heading, text in sections)
    return f"{_HEAD}\\section*{{{title}}}\n{body}\n\\end{{document}}\n"


def described(rows: Iterable[tuple[str, str]]) -> str:
    """Return (symbol, meaning) rows as a two-column list."""
    lines = [rf"${symbol}$ & {meaning} \\" for symbol, meaning in rows]
    return "\\begin{tabular}{@{}ll}\n" + "\n".join(lines) + "\n\\end{tabular}\n"


def in_math(text: str) -> str:
    r"""Return words with LaTeX between dollars as LaTeX for text mode: the words themselves hold underscores.

    >>> in_math("slope of $J_Z$ (layer_norm)")
    'slope of $J_Z$ (layer\\_norm)'
    """
    parts = text.split("$")
    return "$".join(part.replace("_", r"\_") if k % 2 == 0 else part for k, part in enumerate(parts))


def broken(formula: str, width: int = WIDTH) -> list[str]:
    r"""Return a formula in pieces of at most ``width`` signs where it has places to break.

    >>> broken(r"A\,B+C\,D", 4)
    ['A\\,B', '{}+C\\,D']
    """
    if signs(formula) <= width:
        return [formula]
    pieces, start, rest = [], 0, [*_places(formula), (len(formula), -1, "")]
    while start < len(formula):
        if signs(formula[start:]) <= width:
            pieces.append(formula[start:])
            break
        ahead = [(at, depth, kind) for at, depth, kind in rest if at > start]
        fitting = [place for place in ahead if signs(formula[start : place[0]]) <= width and place[0] < len(formula)]
        far = [place for place in fitting if signs(formula[start : place[0]]) >= 0.35 * width]
        at = _best(far)[0] if far else max(fitting)[0] if fitting else ahead[0][0]
        pieces.append(formula[start:at])
        start = at
    if len(pieces) > 1 and any(depth for at, depth, _ in rest if depth > 0 and at in _ends(pieces)):
        pieces = [_fixed(piece) for piece in pieces]
    return [pieces[0], *("{}" + _continued(piece) for piece in pieces[1:])]


def signs(latex: str) -> float:
    r"""Return about how many signs wide a formula is; an index counts two thirds.

    >>> signs(r"J_Z\otimes I_{Ld}"), signs(r"\operatorname{diag}(v)")
    (5.0, 7.0)
    """
    text = re.sub(_NO_WIDTH, "", latex)
    text = re.sub(r"\\(frac)(\{[^{}]*\})\{[^{}]*(\{[^{}]*\})*[^{}]*\}", r"\2", text)
    text = re.sub(r"\\[A-Za-z]+|\\.", "x", text.replace(r"\,", ""))
    small = sum(len(found.group(2) or found.group(1)) for found in re.finditer(r"[_^](\{((?:[^{}]|\{[^{}]*\})*)\}|.)", text))
    full = len(re.sub(r"[_^](\{(?:[^{}]|\{[^{}]*\})*\}|.)|[{}\s]", "", text))
    return float(round(full + 2 * small / 3))


def _places(formula: str) -> Iterator[tuple[int, int, str]]:
    """Where a formula can be broken: (position, depth of brackets, what stands there)."""
    depth = braces = 0
    before = ""
    for found in _TOKEN.finditer(formula):
        token = found[0]
        if token in "{}":
            braces += 1 if token == "{" else -1
        elif not braces:
            if token in ("+", "-") and before not in ("", "(", "["):
                yield found.start(), depth, "+"
            elif token == r"\,":
                yield found.start(), depth, "*"
            elif token.startswith(r"\left") or token in "([":
                depth += 1
            elif token.startswith(r"\right") or token in ")]":
                depth -= 1
        before = token[-1] if token.startswith(r"\left") else token


def _best(places: list[tuple[int, int, str]]) -> tuple[int, int, str]:
    """The outermost place, a sum before a product, the last of equals."""
    return min(places, key=lambda place: (place[1], place[2] != "+", -place[0]))


def _ends(pieces: list[str]) -> set[int]:
    found, at = set(), 0
    for piece in pieces:
        at += len(piece)
        found.add(at)
    return found


def _fixed(piece: str) -> str:
    """Brackets of one size: those of \\left and \\right cannot stand in different lines."""
    return re.sub(r"\\right\s*([)\]|])", r"\\bigr\1", re.sub(r"\\left\s*([(\[|])", r"\\bigl\1", piece))


def _continued(piece: str) -> str:
    return piece if piece[0] in "+-" else r"\cdot " + piece.removeprefix(r"\,")


def text_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return (symbol, formula) rows for a terminal."""
    return [f"{plain(symbol)} = {plain(formula)}" for symbol, formula in rows]
