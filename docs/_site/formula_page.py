"""The page docs/derivations.md: every chapter, and the theorems of the post-norm block and of HybridNorm, as ``derive`` has them.

python docs/_site/formula_page.py        # writes the formulas again
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from derivations.matrix import Zero  # noqa: E402
from hessiankit.blocks import TransformerBlock  # noqa: E402
from hessiankit.theory.formulas.chapters import CHAPTERS  # noqa: E402
from hessiankit.theory.formulas.derive import derive  # noqa: E402
from hessiankit.theory.formulas.result import Derivation  # noqa: E402
from hessiankit.theory.formulas.typesetting import align  # noqa: E402

PAGE = ROOT / "docs" / "derivations.md"
_MADE = re.compile(r"(<!-- (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""A formula of the page, or a list of them, between the comment with its name and the one that ends it."""


def examples() -> dict[str, Derivation]:
    """Return the two derivations of the page."""
    hybridnorm = TransformerBlock(
        8, 5, 4, "hybridnorm", "rmsnorm", "swiglu", n_kv_heads=2, causal=True, rotary=True, affine=False
    ).double()
    return {"post": derive(TransformerBlock(4, 5).double()), "hybridnorm": derive(hybridnorm)}


def page(text: str) -> str:
    """Return the Markdown of the page with its formulas made anew."""
    pieces: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for key, derivation in examples().items():
        story = derivation.story
        pieces[f"{key}_block"], pieces[f"{key}_top"], pieces[f"{key}_rest"] = map(as_math, (story.values, *story.parts))
        pieces[f"{key}_terms"] = "\n".join(f"- {_inline(formula)}: {_words(meaning)}" for formula, meaning in story.terms)
        symbols.update(story.legend)
    pieces["chapters"] = "\n\n".join(chapter(name, symbols) for name in CHAPTERS)
    table = [f"| {_inline(symbol)} | {_words(meaning)} |" for symbol, meaning in symbols.items()]
    pieces["symbols"] = "\n".join(["| symbol | meaning |", "|---|---|", *table])
    return _MADE.sub(lambda found: found[1] + pieces[found[2]] + found[3], text)


def chapter(name: str, symbols: dict[str, str]) -> str:
    """Return a chapter: its value, its Jacobians, and its second derivative as ``derive(name)`` gives it."""
    row = CHAPTERS[name]
    lines = chapter_lines(name, [(argument,) for argument in row.shapes] + [row.wrt] * (len(row.wrt) == 2), symbols)
    call = f"`derive({name!r}, wrt=...)`".replace("'", '"')
    return f"**{name}**: {call}\n\n{as_math(list(lines.items()))}"


def chapter_lines(name: str, wanted: Iterable[tuple[str, ...]], symbols: dict[str, str]) -> dict[str, str]:
    """Return symbol -> formula of a chapter's values, of the derivatives that do not vanish, and of what these refer to.

    Args:
        name: of the chapter.
        wanted: what is differentiated.
        symbols: is given the legend.
    """
    lines: dict[str, str] = {}
    for wrt in wanted:
        found = derive(name, wrt=wrt)
        if not isinstance(found.matrix, Zero):
            lines |= dict(found.story.values) | dict(found.story.rows)
            symbols.update(found.story.legend)
    return lines


def as_math(rows: list[tuple[str, str]]) -> str:
    """Return (symbol, formula) rows as a fence named math."""
    return f"```math\n{_allowed(align(rows, 'aligned', 75)).rstrip()}\n```"


def _inline(latex: str) -> str:
    """LaTeX in a line of Markdown: between $` and `$ GitHub leaves the backslashes alone."""
    return f"$`{_allowed(latex)}`$"


def _words(text: str) -> str:
    return re.sub(r"\$([^$]*)\$", lambda found: _inline(found[1]), text)


def _allowed(latex: str) -> str:
    r"""GitHub refuses the command \operatorname."""
    return re.sub(r"\\operatorname\{(\w+)\}", r"\\mathrm{\1}\\,", latex).replace(r"\,_", "_").replace(r"\,(", "(")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
