"""Train the paper's classifier and check its exact Hessian before and after.

Train one post-norm transformer block on images, compute the exact Hessian of a batch at initialisation and after training, for
squared error and cross entropy, and compare it block pair by block pair with references that take other routes. Prints a table,
writes heat maps and a JSON report.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from hessiankit.cli.parsing import Parser, add_arithmetic, add_output, positive, seed
from hessiankit.support.files import write_json

EXAMPLES = (
    ("hessiankit study", "about a minute; report and heat maps in results/study"),
    ("hessiankit study --data path/to/mnist --loss cross_entropy --steps 1000", "on MNIST's files, one loss, longer training"),
)
FAILS = "something disagrees"


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--data", help="'digits' (default), or a path to MNIST's IDX files or the Python version of CIFAR")
    add("--d-model", type=positive, help="width of a token (default 16; --quick 8)")
    add("--d-ff", type=positive, help="hidden width of the feed-forward network (default 64; --quick 16)")
    tokens = "tokens an image is cut into (default: patches of 2 x 2, of 4 x 4 beyond 16 pixels; --quick 4)"
    add("--seq-len", type=positive, help=tokens)
    add("--loss", choices=("both", "mse", "cross_entropy"), help="default: both")
    add("--steps", type=positive, help="training steps (default 300; --quick 40)")
    add("--batch", type=positive, help="images of the Hessian's batch (default 32; --quick 16)")
    add_arithmetic(add)
    add("--seed", type=seed, default=0, help="random seed of initialisation, batches and directions (default 0)")
    add("--directions", type=positive, help="generic directions a parameter for the comparison (default 1)")
    full = "compare and time every entry at the end (default only with --quick)"
    add("--full", action=argparse.BooleanOptionalAction, help=full)
    exact = "also check every formula, and whole blocks of every norm placement, in exact arithmetic (about two minutes)"
    add("--exact", action="store_true", default=None, help=exact)
    add("--out", type=Path, help="folder for the report and the heat maps (default results/study)")
    add("--quick", action="store_true", help="a small model and batch: a few seconds; other options still count")
    add_output(add)


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from hessiankit.studies import classifier
    from hessiankit.support.environment import take_free_cores
    from hessiankit.support.tables import say

    take_free_cores()
    given = {f.name: getattr(args, f.name) for f in fields(classifier.StudyOptions) if getattr(args, f.name, None) is not None}
    losses = ("mse", "cross_entropy") if args.loss in (None, "both") else (args.loss,)
    chosen = classifier.StudyOptions(**{**(classifier.QUICK if args.quick else {}), **given, "losses": losses})
    study = classifier.run_study(chosen, say, every=args.table)
    if args.json is not None:
        write_json("study", args.json, study.to_dict())
    return int(not study.passed)
