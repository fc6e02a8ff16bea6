"""``hessiankit derive`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from hessiankit.cli.parsing import OK, Commands, add_block_options, add_command, add_json
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json, write_text

BLOCK_OPTIONS = (
    "placement", "norm", "no_affine", "activation", "heads", "kv_heads", "bias", "causal", "rotary", "layer", "layers",
)  # fmt: skip
EXAMPLES = (
    ("hessiankit derive curvature-gap/thm3", "a paper's theorem, corrected, with the ledger's verdict on its print"),
    ("hessiankit derive layernorm --wrt X --format explain", "the Jacobian of a layer, with the rules that give it and a legend"),
    (
        "hessiankit derive --placement hybridnorm --wrt query value --format latex --out query_value.tex",
        "a block, as a LaTeX file",
    ),
)


def add_derive(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "derive",
        run_derive,
        help="print the Jacobian or second derivative of a block, a layer or a theorem as a formula",
        description="Derive the Jacobian of an output (one name in --wrt) or its second derivative (two), or those of a "
        "loss: of a transformer block of any placement, of a chapter, or as a paper's theorem states it. Sizes print by their "
        "letters.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add("what", nargs="?", help="a chapter or a statement of a paper; without it, the block that the options describe")
    add("--list", action="store_true", help="print the chapters and the papers' statements and exit")
    add_block_options(add)
    add("--wrt", nargs="+", metavar="NAME", help="one or two arguments (default: query value of a block, else the theorem's)")
    add("--loss", help="mse or cross_entropy; without it, derivatives of the output")
    formats = ("text", "explain", "latex", "json")
    add("--format", choices=formats, default="text", help="text (default), explain (with the rules), latex (a file), json")
    add("--out", type=Path, metavar="PATH", help="write to this file in place of printing")
    add_json(add)


def run_derive(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or the file cannot be used.
    """
    import torch

    from hessiankit.cli.module_options import block_of
    from hessiankit.formulas.derive import derive
    from hessiankit.support.tables import as_text, say

    if args.list:
        say(*_names())
        return OK
    torch.manual_seed(0)
    if args.what is None:
        found = derive(block_of(args, 4 * args.heads, 5), wrt=args.wrt, loss=args.loss)
    else:
        given = [name for name in BLOCK_OPTIONS if getattr(args, name) != args.parser.get_default(name)]
        if given:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InputError(f"derive: {options} describes a block and {args.what!r} is none; drop one of the two")
        found = derive(args.what, wrt=args.wrt, loss=args.loss)
    written: dict[str, Callable[[], str]] = {
        "text": lambda: f"{found.table()}\n" + _verdicts(found.claims),
        "explain": lambda: as_text(found.explain()) + "\n",
        "latex": lambda: found.latex(document=True),
        "json": found.json,
    }
    text = written[args.format]()
    if args.out is None:
        print(text, end="")
    write_text("derive", args.out, text)
    if args.json is not None:
        write_json("derive", args.json, found.to_dict())
    return OK


def _names() -> list[str]:
    """Return the chapters and the papers' statements, one a line."""
    from hessiankit.formulas.chapters import CHAPTERS
    from hessiankit.formulas.theorems import THEOREMS

    lines = [f"{name:<28}{', '.join(chapter.shapes)}" for name, chapter in CHAPTERS.items()]
    for paper, rows in THEOREMS.items():
        lines += [f"{f'{paper}/{number}':<28}{row.place}, {row.chapter}, in {', '.join(row.wrt)}" for number, row in rows.items()]
    return lines


def _verdicts(ids: Sequence[str]) -> str:
    """Return the ledger's rows on a theorem: id, verdict, correction."""
    from hessiankit.ledger.ledger import claims
    from hessiankit.ledger.pages import plain

    rows = [claims(id=name)[0] for name in ids]
    lines = [f"    {row.id}: {row.verdict}" + (f"; correct: {plain(row.corrected)}" if row.corrected else "") for row in rows]
    return "".join(f"{line}\n" for line in lines)
