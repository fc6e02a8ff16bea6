"""Check the exact Hessian of every norm placement, in every combination of options.

Compute the exact Hessian of tiny language models for every norm placement, combined with every kind of norm, activation, heads,
mask, depth and loss (half an hour on one core), and compare it block pair by block pair with references that take other routes.
After an interruption the same command goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import Parser, add_json, positive, seed
from hessiankit.support.files import write_json

EXAMPLES = (
    ("python -m papers placements --placement hybridnorm --sample 8", "eight tiny language models of one norm placement"),
    ("python -m papers placements --sample 1078", "22 of each placement; docs/placement_grid.md is made so"),
)
FAILS = "something disagrees"


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--placement", metavar="NAME", action="append", help="only this placement's part of the grid (may be repeated)")
    add("--sample", type=positive, metavar="N", help="only N cases, drawn by --seed, the placements taking turns")
    add("--seed", type=seed, default=0, help="random seed of the sample (default 0)")
    add("--jobs", type=positive, default=1, metavar="N", help="processes that share the work (default 1)")
    add("--out", type=Path, default=Path("results/placements"), help="folder for the results (default results/placements)")
    add_json(add)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from papers.experiments.placement_grid import run_placements

    words = ["python -m papers placements", *(f"--placement '{name}'" for name in args.placement or ())]
    words += [f"--sample {args.sample} --seed {args.seed}"] if args.sample else []
    found = run_placements(
        args.placement, sample=args.sample, seed=args.seed, jobs=args.jobs, out=args.out, command=" ".join(words)
    )
    write_json("placements", args.json, found)
    return int(bool(found["failed"]))
