"""The page docs/derivations.md: the theorem of the post-norm block and that of HybridNorm, as ``derive`` prints them.

python -m hessiankit.formulas.page docs        # writes the page, and with pdflatex and pdftoppm its two pictures
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
_TEXT = """# Derivations you can read

`hessiankit.derive` composes the chapters of `derivations` by the chain rule to second order and prints the result with a name
for each object, for every placement in `hessiankit.blocks.PLACEMENTS`. The expression that is printed is the one that is
computed: `.dense()` gives its numbers, `.norm_bound()` a bound on its spectral norm. Sizes print by their letters.

This page is made by `python -m hessiankit.formulas.page docs`; a test keeps it equal to what `derive` prints.

## From a formula to numbers

```python
import torch
import hessiankit as hk

torch.manual_seed(0)
block = hk.TransformerBlock(d_model=4, d_ff=5, d_k=2).double()  # post-norm
X = torch.randn(3, 4).double()
second = hk.derive(block, wrt=("query", "value"), inputs=X)

print(second)  # the formula, then every object that it refers to
print(second.explain())  # with the rule that made each line, and the meaning of the symbols
print(second.dense().shape)  # (L d n_Q) x n_V, as torch.Size([96, 16])
assert torch.linalg.matrix_norm(second.dense(), 2) <= second.norm_bound()

loss = hk.derive(block, wrt=("query", "value"), inputs=X, loss="mse", target=torch.zeros(3, 4).double())
H = hk.hessian(block, X, torch.zeros(3, 4).double(), loss="mse")
assert torch.allclose(loss.dense(), H.block("attention.W_Q", "attention.W_V"))  # a formula for a block of the Hessian
```

`.latex()` is an `align*` environment, `.latex(document=True)` a file for pdflatex, `.to_dict()` everything for JSON, `.sympy()`
a matrix of symbols (for tiny blocks); a notebook typesets the result of `derive`. On the command line:

```bash
hessiankit derive --placement hybridnorm --wrt query value --heads 4 --kv-heads 2 --rotary --format explain
hessiankit derive --placement pre --wrt up key --loss mse --format latex --out pre.tex
```

One name in `wrt` gives the Jacobian, two the second derivative. Names are those of the parameters (`attention.W_Q`), the papers'
letters (`W_Q`, `Q`, `1`, `gamma_1`) or words: query, key, value, output, up, down, gate, input.

## The post-norm block

{post_block}

The second derivative in W_Q and W_V is the theorem of *Closing the Curvature Gap* (Eqs. 6 and 12), corrected as in
`derivations/transformer.py`. The chain rule alone gives it: `derive` does not know the theorem.

{post_top}

{post_terms}

{post_rest}

![The same, typeset](derivation_post.png)

## HybridNorm

Grouped queries, rotary positions, SwiGLU: the norms of queries, keys and values are inside the attention, one norm before
the network.

{hybridnorm_block}

{hybridnorm_top}

{hybridnorm_terms}

{hybridnorm_rest}

![The same, typeset](derivation_hybridnorm.png)

## Objects and their names

{symbols}
"""


def examples() -> dict[str, Derivation]:
    """Return the two derivations of the page."""
    hybridnorm = TransformerBlock(
        8, 5, 4, "hybridnorm", "rmsnorm", "swiglu", n_kv_heads=2, causal=True, rotary=True, affine=False
    ).double()
    return {"post": derive(TransformerBlock(4, 5).double()), "hybridnorm": derive(hybridnorm)}


def page() -> str:
    """Return the Markdown of docs/derivations.md."""
    pieces: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for key, derivation in examples().items():
        story = derivation.story
        pieces[f"{key}_block"], pieces[f"{key}_top"], pieces[f"{key}_rest"] = map(_math, (story.values, *story.parts))
        pieces[f"{key}_terms"] = "\n".join(f"- {_inline(formula)}: {_words(meaning)}" for formula, meaning in story.terms)
        symbols.update(story.legend)
    table = [f"| {_inline(symbol)} | {_words(meaning)} |" for symbol, meaning in symbols.items()]
    pieces["symbols"] = "\n".join(["| symbol | meaning |", "|---|---|", *table])
    text = _TEXT
    for name, piece in pieces.items():
        text = text.replace(f"{{{name}}}", piece)
    return text


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
    """Write the page, and its pictures where pdflatex and pdftoppm are installed."""
    (folder / "derivations.md").write_text(page(), encoding="utf-8")
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
