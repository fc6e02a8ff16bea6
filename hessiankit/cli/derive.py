"""``hessiankit derive`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from hessiankit.cli.parsing import OK, Commands, add_block_options, add_command, add_json
from hessiankit.support.files import write_json, write_text

EXAMPLES = (
    ("hessiankit derive --placement hybridnorm --wrt query value", "a mixed second derivative of the block's output"),
    ("hessiankit derive --wrt down --format explain", "a Jacobian, with the rules that give it and a legend"),
    ("hessiankit derive --placement pre --loss cross_entropy --format latex --out query_value.tex", "a LaTeX file"),
)


def add_derive(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "derive",
        run_derive,
        help="print the Jacobian or second derivative of a transformer block as a formula",
        description="Derive the Jacobian of a block's output (one name in --wrt) or its second derivative (two), or those of a "
        "loss, for any placement of the norms. Sizes print by their letters.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add_block_options(add)
    add("--wrt", nargs="+", default=["query", "value"], metavar="NAME", help="one or two parameters (default: query value)")
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
    from hessiankit.support.tables import as_text

    torch.manual_seed(0)
    block = block_of(args, 4 * args.heads, 5)
    found = derive(block, wrt=args.wrt, loss=args.loss)
    written: dict[str, Callable[[], str]] = {
        "text": lambda: f"{found.table()}\n",
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
