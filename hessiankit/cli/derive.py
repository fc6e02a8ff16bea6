"""``hessiankit derive``."""

from __future__ import annotations

from typing import Literal

from hessiankit.cli.options import BlockOptions, File, Flag, Json, Loss, Names, refuse
from hessiankit.cli.program import command
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json, write_text
from hessiankit.support.tables import as_text, say
from hessiankit.theory.formulas.theorems import CHAPTER_NAMES, THEOREMS, statement

EXAMPLES = (
    ("hessiankit derive curvature-gap/thm3", "a paper's theorem, corrected, with the ledger's verdict on its print"),
    ("hessiankit derive layernorm --wrt X --format explain", "the Jacobian of a layer, with the rules that give it and a legend"),
    (
        "hessiankit derive --placement hybridnorm --wrt query value --format latex --out query_value.tex",
        "a block, as a LaTeX file",
    ),
)
app = command("derive", EXAMPLES)


@app.default
def run(
    what: str | None = None,
    /,
    *,
    list: Flag = False,
    block: BlockOptions = BlockOptions(),
    wrt: Names | None = None,
    loss: Loss | None = None,
    format: Literal["text", "explain", "latex", "json"] = "text",
    out: File | None = None,
    output: Json = Json(),
) -> None:
    """Print the Jacobian or second derivative of a block, a layer or a theorem as a formula.

    Derive the Jacobian of an output (one name in --wrt) or its second derivative (two), or those of a loss: of a transformer
    block of any placement, of a chapter, or as a paper's theorem states it. Sizes print by their letters.

    Args:
        what: A chapter or a statement of a paper; without it, the block that the options describe.
        list: Print the chapters and the papers' statements and exit.
        wrt: One or two arguments (default: query value of a block, else the theorem's).
        loss: Loss of the output; without it, derivatives of the output.
        format: Text, explain (with the rules), latex (a file) or json.
        out: Write to this file in place of printing.
    """
    if list:
        from hessiankit.theory.formulas.chapters import CHAPTERS

        say(*(f"{name:<28}{', '.join(chapter.shapes)}" for name, chapter in CHAPTERS.items()))
        rows = {f"{paper}/{number}": row for paper, of_paper in THEOREMS.items() for number, row in of_paper.items()}
        say(*(f"{name:<28}{row.place}, {row.chapter}, in {', '.join(row.wrt)}" for name, row in rows.items()))
        return
    if what is not None:
        if what.lower() not in CHAPTER_NAMES:
            statement(what)
        refuse(block, None, f"describes a block and {what!r} is none; drop one of the two")
    block.check(4 * block.heads)
    if wrt is not None and len(wrt) > 2:
        raise InputError(f"--wrt {' '.join(wrt)} is not one or two names; pass one for a Jacobian, two for a Hessian block")

    import torch

    from hessiankit.cli.loss_problem import block_of
    from hessiankit.theory.formulas.derive import derive

    torch.manual_seed(0)
    derivation = derive(block_of(block, 4 * block.heads, 5) if what is None else what, wrt=wrt, loss=loss)
    if format == "text":
        text = f"{derivation.table()}\n" + "".join(f"    python -m papers show {name}\n" for name in derivation.claims)
    elif format == "explain":
        text = as_text(derivation.explain()) + "\n"
    else:
        text = derivation.latex(document=True) if format == "latex" else derivation.json()
    if out is None:
        print(text, end="")
    write_text("derive", out, text)
    write_json("derive", output.json, derivation)
