"""A derivation set in lines: LaTeX broken at its sums, plain text for a terminal, the legend and the explanation."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from sympy.printing.pretty.pretty_symbology import greek_unicode

from derivations.matrix import Matrix, Named, definitions, dimensions
from derivations.stage import Stage, Term
from hessiankit.formulas.symbols import SizeName

_WORDS = {
    **{rf"\{name}": sign for name, sign in greek_unicode.items()},
    r"\varepsilon": "ε",
    r"\otimes": "⊗",
    r"\odot": "⊙",
    r"\top": "ᵀ",
    r"\partial": "∂",
    r"\cdot": "·",
    r"\bullet": "•",
    r"\,": " ",
    r"\left": "",
    r"\right": "",
    r"\displaystyle": "",
    r"\quad": " ",
    r"\ell": "ℓ",
    r"\mapsto": "↦",
    r"\ ": " ",
    r"\times": "×",
    r"\|": "‖",
    r"\max": "max",
}
_ACCENTS = {
    r"\hat": "\u0302",
    r"\tilde": "\u0303",
    r"\bar": "\u0304",
    r"\check": "\u030c",
    r"\mathring": "\u030a",
}
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"


def words(text: str) -> str:
    r"""Return words with LaTeX between dollars as text.

    >>> words("feed-forward $J_Z$")
    'feed-forward J_Z'
    """
    return "".join(piece if k % 2 == 0 else plain(piece) for k, piece in enumerate(text.split("$")))


def plain(latex: str) -> str:
    r"""Return LaTeX as text.

    >>> plain(r"\left(J_Z\otimes I_{Ld}\right)\,\xi_{Q,V}^\top"), plain(r"\frac{2}{Ld}\,\hat{Y}")
    ('(J_Z ⊗ I_Ld) ξ_{Q,V}ᵀ', '2/(Ld) Ŷ')
    """
    text = latex.replace(r"^\top", "ᵀ").replace(r"\mathcal{T}", "T").replace(r"\mathcal{L}", "ℒ").replace(r"\mathbf{1}", "𝟏")
    text = re.sub(r"\{(a_i|p_i|\\pi_i)\}", r"\1", text).replace(r"^{\circ 2}", "∘²").replace(r"^{\circ -1/2}", "^{∘-1/2}")
    text = text.replace(r"^{\circ 1/2}", "^{∘1/2}")
    for accent, mark in 2 * list(_ACCENTS.items()):  # of two on one letter the inner one first
        text = re.sub(re.escape(accent) + r"(?:\{([^{}]*)\}|\s*(\w))", partial(_accented, mark), text)
    text = re.sub(r"\\(?:operatorname|mathrm|text|mathit)" + _GROUP, r"\1", text)
    text = re.sub(r"\\partial\s*(\^2)?\s*", lambda m: "∂²" if m[1] else "∂", text)
    text = re.sub(r"\\t?frac(\d)(\w)", r"\1/\2", text)
    for _ in range(3):
        text = re.sub(r"\\sqrt" + _GROUP, r"√(\1)", text)
        text = re.sub(r"\\frac" + _GROUP + _GROUP, lambda m: f"{m[1]}/{_whole(m[2])}", text)
    for word, sign in sorted(_WORDS.items(), key=lambda item: -len(item[0])):
        text = text.replace(word, f" {sign} " if sign in "⊗⊙" and sign else sign)
    text = re.sub(r"([_^])\{([^{}]*)\}", lambda m: f"{m[1]}{{{m[2].replace(' ', '')}}}", text)
    text = re.sub(r"([_^])\{(-?(?:[^\W_][\u0300-\u036f]*){1,2})\}", r"\1\2", text)
    text = re.sub(r"(?<=[\w)ᵀ\]}])\s*([+-])\s*(?=[\w(\[])", r" \1 ", text)
    for power, raised in (("{-1}", "⁻¹"), ("-1", "⁻¹"), ("{-2}", "⁻²"), ("-2", "⁻²"), ("2", "²"), ("3", "³")):
        text = re.sub(rf"\^{re.escape(power)}(?!\d)", raised, text)
    return re.sub(r"\s+", " ", text).replace("$", "").strip()


def _accented(mark: str, found: re.Match[str]) -> str:
    letter, rest = re.fullmatch(r"(.[\u0300-\u036f]*)(.*)", found[1] or found[2]).groups()  # type: ignore[union-attr]
    return unicodedata.normalize("NFC", letter + mark) + rest


def _whole(text: str) -> str:
    return text if re.fullmatch(r"∂?\w(²|_\w)?|√\([^()]*\)", text) else f"({text})"


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


def in_math(text: str) -> str:
    r"""Return words with LaTeX between dollars as LaTeX for text mode: the words themselves hold underscores.

    >>> in_math("derivative of $J_Z$ (layer_norm)")
    'derivative of $J_Z$ (layer\\_norm)'
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
    pieces, start, inner, rest = [], 0, False, [*_places(formula), (len(formula), -1, "")]
    while start < len(formula):
        if signs(formula[start:]) <= width:
            pieces.append(formula[start:])
            break
        ahead = [(at, depth, kind) for at, depth, kind in rest if at > start]
        fitting = [place for place in ahead if signs(formula[start : place[0]]) <= width and place[0] < len(formula)]
        far = [place for place in fitting if signs(formula[start : place[0]]) >= 0.35 * width]
        at, depth, _ = _best(far) if far else max(fitting) if fitting else ahead[0]
        pieces.append(formula[start:at])
        start, inner = at, inner or depth > 0
    if inner:  # brackets of one size: those of \left and \right cannot be in different lines
        pieces = [piece.replace(r"\left", r"\bigl").replace(r"\right", r"\bigr") for piece in pieces]
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
    """Where a formula can be broken: (position, depth of brackets, "+" for a sum or "*" for a product)."""
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


def _continued(piece: str) -> str:
    return piece if piece[0] in "+-" else r"\cdot " + piece.removeprefix(r"\,")


def text_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return (symbol, formula) rows for a terminal."""
    return [f"{plain(symbol)} = {plain(formula)}" for symbol, formula in rows]


SIZES = {
    "L": "tokens",
    "d": "features of a token",
    "d_K": "features of a query and a key (of one head)",
    "d_v": "features of a value (of one head)",
    r"d_{ff}": "hidden features of the feed-forward network",
    "H": "heads of queries",
    r"H_{KV}": "heads of keys and values",
    "r": "queries for each head of keys and values",
    "g": "groups of features in a norm",
    "d_g": "features of a group",
    "d_V": "features of a token",
    "S": "entries of a row of logits",
    r"d_o": "features of the output",
    "C": "classes",
    "V": "tokens of the vocabulary",
}
_SWAP = r"(?<![A-Za-z\\])K_\{(?:[^{},]|\{[^{}]*\})*,"
_DERIVED = r"(?<![A-Za-z\\_{])(?:\\(?:hat|tilde|check|bar)\{[A-Z]\}|[AFMOPQRSTUXYZ])_\{"
_SYMBOLS = [  # (pattern of its LaTeX, symbol, meaning)
    (r"\\operatorname\{vec\}_r", r"\operatorname{vec}_r(M)", "the rows of $M$ one after the other, as a column"),
    (r"\\otimes", r"M\otimes N", "the Kronecker product"),
    (r"\\odot", r"M\odot N", "the product entry by entry"),
    (r"(?<![A-Za-z\\}])I_", "I_n", "the identity of size $n$"),
    (r"\\mathbf\{1\}", r"\mathbf{1}_n", "the column of $n$ ones"),
    (_SWAP, "K_{m,n}", r"the permutation $x\otimes y\mapsto y\otimes x$ for $n$ entries of $x$ and $m$ of $y$"),
    (r"(?<![A-Za-z\\])E_", "E_n", r"the matrix with $E_n v = \operatorname{vec}_r(\operatorname{diag}(v))$"),
    (r"(?<![A-Za-z\\])C_\{?d", "C_d", r"$I_d - \frac{1}{d}\mathbf{1}_d\mathbf{1}_d^\top$, which takes the mean off a row"),
    (r"\\operatorname\{blockdiag\}", r"\operatorname{blockdiag}_i(M_i)", "the matrix of the blocks $M_i$ on its diagonal"),
    (r"\\operatorname\{diag\}", r"\operatorname{diag}(v)", "the diagonal matrix of $v$"),
    (r"\\rho_", r"\rho_N", r"what the norm $N$ divides by: $\sqrt{\mathrm{var}+\varepsilon}$, for RMSNorm of the mean square"),
    (r"(?<![A-Za-z\\])V_[\\{A-Z]", "V_N", r"the rows $\mathring{n}_i$ of the norm $N$, block diagonal"),
    (r"\\mathring", r"\mathring{N}", r"$N$, rows $\mathring{n}_i$ centred (LayerNorm) and divided, without gain and shift"),
    (r"\\Pi", r"\Pi", r"the probabilities: by rows $\pi_i$ the softmax of $Z$"),
    (r"\\sigma", r"\sigma,\ \sigma',\ \sigma''", "the activation and its derivatives, entry by entry"),
    (r"R_l\b", "R_l", "the rotation of the features of token $l$"),
    (r"\ba_i\b", "a_i", "row $i$ of the attention weights $A$, as a column"),
    (r"(?<![A-Za-z\\])A(?![A-Za-z_'])", "A", "the attention weights, by rows the softmax of the logits"),
    (r"J_", r"J_{N M}", "the first derivative of $N$ in $M$; $J_N$ for a norm $N$ in its input"),
    (r"(?<![A-Za-z\\])H_", r"H_{N,M M'}", "the second derivative of $N$ in $M$ and $M'$; $H_N$ for a norm $N$ in its input"),
    (_DERIVED, r"N_i,\ N_{i,j}", r"the derivatives $\partial N/\partial W_i$ and $\partial N_i/\partial W_j$ of a value $N$"),
    (r"\\xi_", r"\xi_{i,j}", r"$\partial B_i/\partial W_j$"),
    (r"B_\{", "B_i", r"$\partial S/\partial W_i$"),
    (r"G_\{", "G_k", r"$\partial F/\partial W_k$"),
    (r"\\Phi", r"\Phi_{k,l}", r"$\partial G_k/\partial W_l$"),
    (r"\\mathcal\{L\}", r"\mathcal{L}", "the loss of the output $Z$"),
    (r"Target|Labels", r"\mathrm{Target},\ \mathrm{Labels}", "what the output is compared with"),
    (r"\\mathcal\{T\}", r"\mathcal{T}_k[M]", "each of the $k$ slices of the stack $M$ transposed"),
]  # fmt: skip


def legend(text: str, sizes: set[str]) -> list[tuple[str, str]]:
    """Return (symbol, meaning), in LaTeX and in words with LaTeX between dollars, of the symbols that occur in a derivation.

    Args:
        text: the LaTeX of all its formulas.
        sizes: the letters of the sizes in it.

    >>> [symbol for symbol, _ in legend(r"(J_Z I_{Ld}) K_{L,d}", {"L", "d"})]
    ['I_n', 'K_{m,n}', 'J_{N M}', 'L', 'd']
    """
    found = [(symbol, meaning) for pattern, symbol, meaning in _SYMBOLS if re.search(pattern, text)]
    return found + [(symbol, meaning) for symbol, meaning in SIZES.items() if symbol in sizes]


@dataclass(frozen=True)
class Line:
    """``symbol = formula`` in LaTeX, and the rule that made it, in words with LaTeX between dollars."""

    symbol: str
    formula: str
    rule: str


@dataclass(frozen=True)
class Story:
    """The printed content of a derivation.

    Args:
        values: (symbol, formula) of the block's values, in the order of the computation.
        lines: the result first, then the objects that it refers to.
        terms: (formula, meaning) of the summands of the result.
        legend: (symbol, meaning) of the symbols that no line defines.
    """

    values: list[tuple[str, str]]
    lines: list[Line]
    terms: list[tuple[str, str]]
    legend: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """(symbol, formula) of the lines."""
        return [(line.symbol, line.formula) for line in self.lines]

    @property
    def parts(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        """The row of the result, and the rows of the objects that it refers to."""
        return self.rows[:1], self.rows[1:]


def story_of(
    left: str, matrix: Matrix, terms: Sequence[Term], rule: str, Z: Stage, known: Sequence[tuple[str, str]], names: SizeName
) -> Story:
    """Return the story of a derivation.

    Args:
        left: LaTeX of the derivative.
        matrix: the expression.
        terms: its summands.
        rule: which rule gave the result.
        Z: the output of the block as a stage.
        known: letters of numbers, each with its value.
        names: of the sizes.
    """
    top = matrix.matrix if isinstance(matrix, Named) else matrix
    with dimensions(names):
        lines = [Line(left, top.latex(), rule), *(Line(d.symbol, d.matrix.latex(), d.reason) for d in definitions(top))]
        said = [(term.matrix.latex(), term.meaning) for term in terms]
    values = [*known, *((stage.symbol, stage.rule) for stage in Z.story if stage.rule)]
    text = " ".join(piece for line in lines for piece in (line.symbol, line.formula))
    shown = text + " " + " ".join(rule for _, rule in values)
    return Story(values, lines, said, legend(shown, names.used))


def explained(story: Story) -> str:
    """Return a story as text: the block's values, each line with the rule that made it, the terms and the symbols."""
    lines = text_lines(story.values)
    for k, line in enumerate(story.lines):
        lines += [*([""] if k == 0 else []), *text_lines([(line.symbol, line.formula)]), f"    {words(line.rule)}"]
        lines += [f"    {plain(formula)}: {words(meaning)}" for formula, meaning in story.terms] if k == 0 else []
    return "\n".join([*lines, "", *(f"{plain(symbol)}: {words(meaning)}" for symbol, meaning in story.legend)])


def html_of(story: Story, shape: tuple[int, int]) -> str:
    """Return a story as HTML for a notebook, formulas between dollars."""
    values, top, rest = (_safe(align(rows, "aligned")) if rows else "" for rows in (story.values, *story.parts))
    terms, meanings = (
        "".join(f"<li>${_safe(latex)}$: {_safe(meaning)}</li>" for latex, meaning in rows) for rows in (story.terms, story.legend)
    )
    with_ = f"<p>with</p>$$\n{rest}$$" if rest else ""
    return (
        f"<div>$$\n{top}$$<p>{shape[0]} x {shape[1]}, the sum of</p><ul>{terms}</ul>{with_}"
        f"<details><summary>Values</summary>$$\n{values}$$</details>"
        f"<details><summary>Symbols</summary><ul>{meanings}</ul></details></div>"
    )


def latex_file(story: Story, title: str) -> str:
    """Return a story as a LaTeX file that compiles."""
    top, rest = story.parts
    sections = [
        ("Values", align(story.values) if story.values else ""),
        ("The result", align(top) + _described(story.terms)),
        ("What it refers to", align(rest) if rest else ""),
        ("Symbols", _described(story.legend)),
    ]
    body = "\n".join(rf"\subsection*{{{heading}}}" + f"\n{text}" for heading, text in sections if text)
    return f"{_HEAD}\\section*{{${top[0][0]}$ {in_math(title)}}}\n{body}\n\\end{{document}}\n"


def _described(rows: Iterable[tuple[str, str]]) -> str:
    """Return (symbol, meaning) rows as a two-column list; the meaning's words hold underscores."""
    lines = [rf"${symbol}$ & {in_math(meaning)} \\" for symbol, meaning in rows]
    return "\\begin{tabular}{@{}ll}\n" + "\n".join(lines) + "\n\\end{tabular}\n"


def _safe(latex: str) -> str:
    return html.escape(latex, quote=False)
