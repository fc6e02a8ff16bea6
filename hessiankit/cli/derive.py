"""Print the Jacobian or second derivative of a block, a layer or a theorem as a formula.

Derive the Jacobian of an output (one name in --wrt) or its second derivative (two), or those of a loss: of a transformer block of
any placement, of a chapter, or as a paper's theorem states it. Sizes print by their letters.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import LOSSES, SHAPE_OF_A_BLOCK, Parser, add_block_options, add_json, check_block, refuse
from hessiankit.formulas.theorems import CHAPTER_NAMES, THEOREMS, statement
from hessiankit.support.errors import InputError
from hessiankit.support.files import check_writable, write_json, write_text
from hessiankit.support.tables import as_text, say

EXAMPLES = (
    ("hessiankit derive curvature-gap/thm3", "a paper's theorem, corrected, with the ledger's verdict on its print"),
    ("hessiankit derive layernorm --wrt X --format explain", "the Jacobian of a layer, with the rules that give it and a legend"),
    (
        "hessiankit derive --placement hybridnorm --wrt query value --format latex --out query_value.tex",
        "a block, as a LaTeX file",
    ),
)
FORMATS = ("text", "explain", "latex", "json")


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("what", nargs="?", help="a chapter or a statement of a paper; without it, the block that the options describe")
    add("--list", action="store_true", help="print the chapters and the papers' statements and exit")
    add_block_options(add)
    add("--wrt", nargs="+", metavar="NAME", help="one or two arguments (default: query value of a block, else the theorem's)")
    add("--loss", choices=LOSSES, help="mse or cross_entropy; without it, derivatives of the output")
    add("--format", choices=FORMATS, default="text", help="text (default), explain (with the rules), latex (a file), json")
    add("--out", type=Path, metavar="PATH", help="write to this file in place of printing")
    add_json(add)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.list:
        from hessiankit.formulas.chapters import CHAPTERS

        say(*(f"{name:<28}{', '.join(chapter.shapes)}" for name, chapter in CHAPTERS.items()))
        rows = {f"{paper}/{number}": row for paper, of_paper in THEOREMS.items() for number, row in of_paper.items()}
        say(*(f"{name:<28}{row.place}, {row.chapter}, in {', '.join(row.wrt)}" for name, row in rows.items()))
        return
    if args.what is not None:
        if args.what.lower() not in CHAPTER_NAMES:
            statement(args.what)
        why = f"describes a block and {args.what!r} is none; drop one of the two"
        refuse(args, ("placement", *SHAPE_OF_A_BLOCK), why)
    check_block(args)
    check_writable("derive", args.out)
    if args.wrt is not None and len(args.wrt) > 2:
        why = "is not one or two names; pass one for a Jacobian, two for a Hessian block"
        raise InputError(f"derive: --wrt {' '.join(args.wrt)} {why}")

    import torch

    from hessiankit.cli.module_options import block_of
    from hessiankit.formulas.derive import derive

    torch.manual_seed(0)
    if args.what is None:
        derivation = derive(block_of(args, 4 * args.heads, 5), wrt=args.wrt, loss=args.loss)
    else:
        derivation = derive(args.what, wrt=args.wrt, loss=args.loss)
    if args.format == "text":
        text = f"{derivation.table()}\n" + "".join(f"    python -m papers show {name}\n" for name in derivation.claims)
    elif args.format == "explain":
        text = as_text(derivation.explain()) + "\n"
    else:
        text = derivation.latex(document=True) if args.format == "latex" else derivation.json()
    if args.out is None:
        print(text, end="")
    write_text("derive", args.out, text)
    write_json("derive", args.json, derivation)
