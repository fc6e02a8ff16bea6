"""``hessiankit check``: the exact Hessian of a model of your own, or of one transformer block, against its references."""

from __future__ import annotations

import argparse

from hessiankit.cli.parsing import (
    FAILED,
    OK,
    Commands,
    add_block_options,
    add_command,
    add_json,
    add_problem,
    add_table,
    positive,
    refuse,
)
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json

EXAMPLES = (
    ("hessiankit check --model my_models:make --shape 10,6", "your own model on ten drawn inputs of width 6"),
    ("hessiankit check --placement hybridnorm --heads 2 --exact", "one transformer block, its formulas in exact arithmetic too"),
)


def add_check(commands: Commands) -> None:
    """Add the command to the parser."""
    check = add_command(
        commands,
        "check",
        run_check,
        help="check the exact Hessian of your own model, or of a transformer block, against automatic differentiation",
        description="Compute the exact Hessian of the model of --model, or of the transformer block of --placement, and compare "
        "it block pair by block pair with references that take other routes. Prints a table. The whole study of the paper's "
        "classifier is hessiankit study.",
        examples=EXAMPLES,
        failed="something disagrees",
    )
    add = check.add_argument
    block = check.add_argument_group("one transformer block").add_argument
    add_problem(add, block)
    add("--directions", type=positive, help="generic directions a parameter for the comparison (default: by size)")
    add("--exact", action="store_true", help="also check the formulas of the blocks in it in exact arithmetic")
    add_json(add)
    add_table(add)
    add_block_options(block, default=None, action="append", help="check one block of this placement, e.g. pre")


def run_check(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    from hessiankit.cli.module_options import SHAPE_OF_A_BLOCK, asked_of
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.tables import say, show
    from hessiankit.verify.check import check

    if args.model is None and args.placement is None:
        refuse(args, ("text", "shape"), "is of a model; add --model")
        refuse(args, ("tokens", "params", *SHAPE_OF_A_BLOCK), "is of one model or block; add --model, or --placement")
        raise InputError("check: no model; add --model, or --placement for one block (the study of the paper: hessiankit study)")
    if args.placement is not None:
        if len(args.placement) > 1:
            raise InputError("check: --placement several times; name one, or check a grid: hessiankit study --placements")
        (args.placement,) = args.placement
    asked = asked_of(args)
    say(str(asked))
    options = {"seed": args.seed, "directions": args.directions, "exact": args.exact, "params": args.params}
    with progress_bar() as tell:
        report = check(asked.model, asked.inputs, asked.target, loss=asked.loss, dtype=None, progress=tell, **options)
    show(report, args.table)
    write_json(
        "check", args.json, {**asked.to_dict(), "seed": args.seed, "report": report.to_dict(), "environment": environment()}
    )
    return OK if report else FAILED
