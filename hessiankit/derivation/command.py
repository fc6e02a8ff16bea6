"""``hessiankit derive``: print a derivative as a formula, in one of four forms."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from hessiankit.commands.exit_codes import OK
from hessiankit.derivation.derive import derive
from hessiankit.derivation.result import Derivation
from hessiankit.files import write_json, write_text
from hessiankit.module_options import block_of
from hessiankit.tables import as_text

FORMATS: dict[str, Callable[[Derivation], str]] = {
    "text": lambda found: f"{found.table()}\n",
    "explain": lambda found: as_text(found.explain()) + "\n",
    "latex": lambda found: found.latex(document=True),
    "json": lambda found: found.json(),
}


def run_derive(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or the file cannot be used.
    """
    torch.manual_seed(0)
    block = block_of(args, 4 * args.heads, 5)
    found = derive(block, wrt=args.wrt, loss=args.loss)
    text = FORMATS[args.format](found)
    if args.out is None:
        print(text, end="")
    write_text("derive", args.out, text)
    if args.json is not None:
        write_json("derive", args.json, found.to_dict())
    return OK
