"""The page docs/derivations.md: the theorem of the post-norm block and that of HybridNorm, as ``derive`` prints them.

python -m hessiankit.formulas.page docs        # makes the formulas anew, and with pdflatex and pdftoppm its two pictures
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hessiankit.blocks import TransformerBlock
from hessiankit.formulas.derive import derive
from hessiankit.formulas.result import Derivation
from hessiankit.formulas.typesetting import align

_COMMANDS = ("pdflatex -interaction=batchmode -halt-on-error page.tex", "pdftoppm -r 130 -singlefile -png page.pdf page")
PAGE = "derivations.md"
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
        pieces[f"{key}_block"], pieces[f"{key}_top"], pieces[f"{key}_rest"] = map(_math, (story.values, *story.parts))
        pieces[f"{key}_terms"] = "\n".join(f"- {_inline(formula)}: {_words(meaning)}" for formula, meaning in story.terms)
        symbols.update(story.legend)
    table = [f"| {_inline(symbol)} | {_words(meaning)} |" for symbol, meaning in symbols.items()]
    pieces["symbols"] = "\n".join(["| symbol | meaning |", "|---|---|", *table])
    return _MADE.sub(lambda found: found[1] + pieces[found[2]] + found[3], text)


def _math(rows: list[tuple[str, str]]) -> str:
    return f"```math\n{_allowed(align(rows, 'aligned', 75)).rstrip()}\n```"


def _inline(latex: str) -> str:
    """LaTeX in a line of Markdown: between $` and `$ GitHub leaves the backslashes alone."""
    return f"$`{_allowed(latex)}`$"


def _words(text: str) -> str:
    return re.sub(r"\$([^$]*)\$", lambda found: _inline(found[1]), text)


def _allowed(latex: str) -> str:
    r"""GitHub refuses the command \operatorname."""
    return re.sub(r"\\operatorname\{(\w+)\}", r"\\mathrm{\1}\\,", latex).replace(r"\,_", "_").replace(r"\,(", "(")


def write(folder: Path) -> None:
    """Make the formulas of the page anew, and its pictures where pdflatex and pdftoppm are installed."""
    (folder / PAGE).write_text(page((folder / PAGE).read_text(encoding="utf-8")), encoding="utf-8")
    if shutil.which("pdflatex") and shutil.which("pdftoppm"):
        for name, derivation in examples().items():
            _picture(derivation.latex(document=True), folder / f"derivation_{name}.png")


def _picture(latex: str, path: Path) -> None:
    """Typeset a document on one tall page and save it without its margins."""
    import matplotlib.image
    import numpy as np

    tall = latex.replace("landscape,margin=1.5cm", "paperwidth=28cm,paperheight=56cm,margin=1.5cm")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.tex").write_text(tall, encoding="utf-8")
        for command in _COMMANDS:
            subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
        pixels = matplotlib.image.imread(Path(folder) / "page.png")[..., :3]
    inked = np.argwhere(pixels.min(axis=2) < 0.99)
    (top, left), (bottom, right) = inked.min(axis=0), inked.max(axis=0) + 1
    matplotlib.image.imsave(path, pixels[max(top - 20, 0) : bottom + 20, max(left - 20, 0) : right + 20])


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
