"""The pages of a derivation: LaTeX, HTML and text, with the legend of its symbols."""

from __future__ import annotations

import fnmatch
import html
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from derivations.matrix import Matrix, Named, definitions, dimensions
from derivations.stage import Stage, Term
from hessiankit.theory.formulas.latex import WIDTH, broken, plain, read, symbols, words
from hessiankit.theory.formulas.symbols import SizeName

_HEAD = r"""\documentclass[fleqn]{article}
\usepackage{amsmath,amssymb}
\usepackage[landscape,margin=1.5cm]{geometry}
\allowdisplaybreaks
\setlength{\parindent}{0pt}
\pagestyle{empty}
\begin{document}
"""


def align(rows: Iterable[tuple[str, str]], environment: str = "align*", width: float = WIDTH) -> str:
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
_DERIVED = "[AFMOPQRSTUXYZ]_[!a-z]* [A-Z][\u0302\u0303\u0304\u030c]*_[!a-z]*"
_SYMBOLS = [  # (patterns of its text, accents apart; symbol; meaning)
    ("vec_r", r"\operatorname{vec}_r(M)", "the rows of $M$ one after the other, as a column"),
    ("⊗", r"M\otimes N", "the Kronecker product"),
    ("⊙", r"M\odot N", "the product entry by entry"),
    ("I_*", "I_n", "the identity of size $n$"),
    ("𝟏*", r"\mathbf{1}_n", "the column of $n$ ones"),
    ("K_{*,*}", "K_{m,n}", r"the permutation $x\otimes y\mapsto y\otimes x$ for $n$ entries of $x$ and $m$ of $y$"),
    ("E_*", "E_n", r"the matrix with $E_n v = \operatorname{vec}_r(\operatorname{diag}(v))$"),
    ("C_*d*", "C_d", r"$I_d - \frac{1}{d}\mathbf{1}_d\mathbf{1}_d^\top$, which takes the mean off a row"),
    ("blockdiag*", r"\operatorname{blockdiag}_i(M_i)", "the matrix of the blocks $M_i$ on its diagonal"),
    ("diag*", r"\operatorname{diag}(v)", "the diagonal matrix of $v$"),
    ("ρ_*", r"\rho_N", r"what the norm $N$ divides by: $\sqrt{\mathrm{var}+\varepsilon}$, for RMSNorm of the mean square"),
    ("V_[!a-z0-9]*", "V_N", r"the rows $\mathring{n}_i$ of the norm $N$, block diagonal"),
    ("?\u030a*", r"\mathring{N}", r"$N$, rows $\mathring{n}_i$ centred (LayerNorm) and divided, without gain and shift"),
    ("Π*", r"\Pi", r"the probabilities: by rows $\pi_i$ the softmax of $Z$"),
    ("σ*", r"\sigma,\ \sigma',\ \sigma''", "the activation and its derivatives, entry by entry"),
    ("R_l", "R_l", "the rotation of the features of token $l$"),
    ("a_i", "a_i", "row $i$ of the attention weights $A$, as a column"),
    ("A", "A", "the attention weights, by rows the softmax of the logits"),
    ("J_*", r"J_{N M}", "the first derivative of $N$ with respect to $M$; $J_N$ for a norm and its input"),
    ("H_*", r"H_{N,M M'}", "the second derivative of $N$ with respect to $M$ and $M'$; $H_N$ for a norm and its input"),
    (_DERIVED, r"N_i,\ N_{i,j}", r"the derivatives $\partial N/\partial W_i$ and $\partial N_i/\partial W_j$ of a value $N$"),
    ("ξ_*", r"\xi_{i,j}", r"$\partial B_i/\partial W_j$"),
    ("B_*", "B_i", r"$\partial S/\partial W_i$"),
    ("G_*", "G_k", r"$\partial F/\partial W_k$"),
    ("Φ*", r"\Phi_{k,l}", r"$\partial G_k/\partial W_l$"),
    ("ℒ", r"\mathcal{L}", "the loss of the output $Z$"),
    ("Target Labels", r"\mathrm{Target},\ \mathrm{Labels}", "what the output is compared with"),
    ("T_k", r"\mathcal{T}_k[M]", "each of the $k$ slices of the stack $M$ transposed"),
]  # fmt: skip


def legend(text: str, sizes: set[str]) -> list[tuple[str, str]]:
    """Return (symbol, meaning), in LaTeX and in words with LaTeX between dollars, of the symbols and sizes in formulas.

    >>> [symbol for symbol, _ in legend(r"(J_Z I_{Ld}) K_{L,d}", {"L", "d"})]
    ['I_n', 'K_{m,n}', 'J_{N M}', 'L', 'd']
    """
    names = {unicodedata.normalize("NFD", name) for name in symbols(read(text))}
    entries = [entry[1:] for entry in _SYMBOLS if any(fnmatch.filter(names, pattern) for pattern in entry[0].split())]
    return entries + [(symbol, meaning) for symbol, meaning in SIZES.items() if symbol in sizes]


@dataclass(frozen=True)
class Line:
    """``symbol = formula`` in LaTeX, and its rule, in words with LaTeX between dollars."""

    symbol: str
    formula: str
    rule: str


@dataclass(frozen=True)
class Story:
    """The printed content of a derivation."""

    values: list[tuple[str, str]]  # (symbol, formula) of the block's values, in the order of the computation
    lines: list[Line]  # the result first, then the objects that it refers to
    terms: list[tuple[str, str]]  # (formula, meaning) of the summands of the result
    legend: list[tuple[str, str]] = field(default_factory=list)  # (symbol, meaning) of the symbols that no line defines

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
    """Return the story of a derivation ``left = matrix``, the sum of ``terms``, by a rule, for the output Z of a block.

    ``known`` are letters of numbers, each with its value, and ``names`` those of the sizes.
    """
    top = matrix.matrix if isinstance(matrix, Named) else matrix
    with dimensions(names):
        lines = [Line(left, top.latex(), rule), *(Line(d.symbol, d.matrix.latex(), d.reason) for d in definitions(top))]
        meanings = [(term.matrix.latex(), term.meaning) for term in terms]
    values = [*known, *((stage.symbol, stage.rule) for stage in Z.story if stage.rule)]
    text = " ".join(piece for line in lines for piece in (line.symbol, line.formula))
    content = text + " " + " ".join(rule for _, rule in values)
    return Story(values, lines, meanings, legend(content, names.used))


def explained(story: Story) -> str:
    """Return a story as text: the block's values, each line with the rule that made it, the terms and the symbols."""
    derived = [[*text_lines([(line.symbol, line.formula)]), f"    {words(line.rule)}"] for line in story.lines]
    derived[0] += [f"    {plain(formula)}: {words(meaning)}" for formula, meaning in story.terms]
    symbols_used = [f"{plain(symbol)}: {words(meaning)}" for symbol, meaning in story.legend]
    return "\n".join([*text_lines(story.values), "", *chain.from_iterable(derived), "", *symbols_used])


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
