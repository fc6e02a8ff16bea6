"""``hessiankit derive`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from hessiankit.block_options import add_block_options, block_of
from hessiankit.derivation.derive import derive
from hessiankit.derivation.result import Derivation
from hessiankit.files import write_text

FORMATS: dict[str, Callable[[Derivation], str]] = {
    "text": lambda found: f"{found}\n",
    "explain": lambda found: found.explain() + "\n",
    "latex": lambda found: found.latex(document=True),
    "json": lambda found: found.json(),
}


def add_derive(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "derive",
        help="print the Jacobian or second derivative of a transformer block as a formula",
        description="Derive the Jacobian of a block's output (one name in --wrt) or its second derivative (two), or those of a "
        "loss, for any placement of the norms. Sizes print by their letters. Exit code 0: printed; 2: an option or a file cannot "
        "be used; 130: interrupted.",
    )
    add = command.add_argument
    add_block_options(add)
    add("--wrt", nargs="+", default=["query", "value"], metavar="NAME", help="one or two parameters (default: query value)")
    add("--loss", help="mse or cross_entropy; without it, derivatives of the output")
    add("--format", choices=FORMATS, default="text", help="text (default), explain (with the rules), latex (a file), json")
    add("--out", type=Path, metavar="PATH", help="write to this file in place of printing")


def run_derive(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or the file cannot be used.
    """
    torch.manual_seed(0)
    block = block_of(args, 4 * args.heads, 5)
    text = FORMATS[args.format](derive(block, wrt=args.wrt, loss=args.loss))
    if args.out is None:
        print(text, end="")
        return 0
    write_text("derive", args.out, text)
    return 0
