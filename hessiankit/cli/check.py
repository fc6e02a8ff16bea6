"""Check the exact Hessian of your own model, or of a transformer block, against automatic differentiation.

Compute the exact Hessian of the model of --model, or of the transformer block of --placement, and compare it block pair by block
pair with references that take other routes. Prints a table. A demonstration on a classifier is hessiankit study.
"""

from __future__ import annotations

import argparse

from hessiankit.cli.parsing import SHAPE_OF_A_BLOCK, Parser, add_output, add_problem, check_problem, finish, positive, refuse
from hessiankit.support.errors import InputError
from hessiankit.support.tables import say

EXAMPLES = (
    ("hessiankit check --model my_models:make --shape 10,6", "your own model on ten drawn inputs of width 6"),
    ("hessiankit check --placement hybridnorm --heads 2 --exact", "one transformer block, its formulas in exact arithmetic too"),
)
FAILS = "something disagrees"


def options(command: Parser) -> None:
    """Add the options."""
    placement = {"default": None, "help": "check one block of this placement, e.g. pre"}
    add_problem(command, "one transformer block", **placement)
    command.add_argument(
        "--directions", type=positive, help="generic directions a parameter for the comparison (default: by size)"
    )
    command.add_argument("--exact", action="store_true", help="also check the formulas of the blocks in it in exact arithmetic")
    add_output(command.add_argument)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if args.model is None and args.placement is None:
        refuse(args, ("text", "shape"), "is of a model; add --model")
        refuse(args, ("tokens", "params", *SHAPE_OF_A_BLOCK), "is of one model or block; add --model, or --placement")
        raise InputError("check: no model; add --model, or --placement for one block; hessiankit study checks a classifier")
    check_problem(args)

    from hessiankit.cli.module_options import asked_of
    from hessiankit.support.environment import environment
    from hessiankit.verify.check import check

    asked = asked_of(args)
    say(str(asked))
    options = {"seed": args.seed, "directions": args.directions, "exact": args.exact, "params": args.params}
    report = check(asked.model, asked.inputs, asked.target, loss=asked.loss, dtype=None, **options)
    numbers = {**asked.to_dict(), "seed": args.seed, "report": report, "environment": environment()}
    finish(args, report, numbers)
    return int(not report)
