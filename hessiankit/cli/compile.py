"""Build the kernels that make dense Hessians on a processor faster; optional.

Compile the toolkit's kernels for this machine, which takes a few seconds, and keep them in the user's cache
(TORCH_EXTENSIONS_DIR, or ~/.cache/torch_extensions). Needs g++ or clang++, ninja and setuptools. Without them plain torch
computes the same, to rounding; the environment variable HESSIANKIT_COMPILED=0 turns them off.
"""

from __future__ import annotations

import argparse

from hessiankit.cli.parsing import Parser, add_json
from hessiankit.support.files import write_json

EXAMPLES = (
    ("hessiankit compile", "once; every dense Hessian on a processor is faster from then on"),
    ("hessiankit compile --verbose", "with what the compiler says"),
)


def options(command: Parser) -> None:
    """Add the options."""
    command.add_argument("--verbose", action="store_true", help="print what the compiler says")
    add_json(command.add_argument)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    from hessiankit.support.kernels import build, built, kernels

    before = built().exists()
    path, used = build(verbose=args.verbose), kernels() is not None
    print(f"{'compiled before' if before else 'compiled'}: {path}{'' if used else ' (turned off by HESSIANKIT_COMPILED=0)'}")
    write_json("compile", args.json, {"path": str(path), "used": used, "compiled_before": before})
