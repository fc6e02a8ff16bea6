"""Try to violate the bounds of hessiankit bounds.

Draw N problems of all norm placements and scales, climb from a tenth of them towards a bound, and print the largest norm / bound
by bound. Problem k is drawn from --seed + k alone. An interrupt keeps the results so far.
"""

from __future__ import annotations

import argparse

from hessiankit.cli.parsing import INTERRUPTED, Parser, add_output, finish, positive, seed

EXAMPLES = (
    ("python -m papers attack 100 --seed 7", "the largest norm / bound of problems 7 to 106"),
    ("python -m papers attack 1000 --json attack.json", "a campaign; all numbers in a file"),
)
FAILS = "a bound is exceeded"


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("problems", type=positive, metavar="N", help="problems")
    add("--seed", type=seed, default=0, help="random seed of the first problem (default 0)")
    add_output(add)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from hessiankit.support.progress import progress_bar
    from papers.curvature_gap.attack import attack

    with progress_bar() as tell:
        report = attack(args.problems, seed=args.seed, tell=tell)
    finish(args, report)
    return INTERRUPTED if report.interrupted else int(not report)
