"""``hessiankit check`` on the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from hessiankit.cli.parsing import (
    FAILED,
    OK,
    Commands,
    Parser,
    add_block_options,
    add_command,
    add_json,
    add_own_model,
    add_table,
    positive,
    refuse,
    seed,
)
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json

EXAMPLES = (
    ("hessiankit check", "the main job, a minute; report and heat maps in results/check"),
    ("hessiankit check --model my_models:make --shape 10,6", "your own model on ten drawn inputs of width 6"),
    ("hessiankit check --placements --placement hybridnorm --sample 8", "eight tiny language models of one norm placement"),
)


def add_check(commands: Commands) -> None:
    """Add the command to the parser."""
    check = add_command(
        commands,
        "check",
        runner="hessiankit.cli.check:run_check",
        help="check the exact Hessian of the paper's classifier, or of your own model, against automatic differentiation",
        description="Train one post-norm transformer block on images, compute the exact Hessian of a batch at initialisation and "
        "after training, for squared error and cross entropy, and compare it block pair by block pair with references that take "
        "other routes. Prints a table, writes heat maps and a JSON report. With --model, check a model of your own instead; with "
        "--placement, one transformer block; with --placements, every norm placement.",
        examples=EXAMPLES,
        failed="something disagrees",
    )
    add = check.add_argument
    add("--data", help="'digits' (default), or a path to MNIST's IDX files or the Python version of CIFAR")
    add("--d-model", type=positive, help="width of a token (default 16; --quick 8; --placement 4)")
    add("--d-ff", type=positive, help="hidden width of the feed-forward network (default 64; --quick 16; --placement 6)")
    add(
        "--seq-len",
        type=positive,
        help="tokens an image is cut into (default: patches of 2 x 2, of 4 x 4 beyond 16 pixels; --quick 4)",
    )
    add(
        "--loss",
        choices=("both", "mse", "cross_entropy"),
        help="default: both; of --model and --placement mse, of text cross_entropy, of the next token",
    )
    add("--steps", type=positive, help="training steps (default 300; --quick 40)")
    add(
        "--batch",
        type=positive,
        help="images of the Hessian's batch (default 32; --quick 16), or sequences (default 1; of text 2)",
    )
    add("--dtype", choices=("float64", "float32"), default="float64", help="arithmetic (default float64)")
    add("--device", default="cpu", help="where to compute, e.g. cuda (default cpu)")
    add("--seed", type=seed, default=0, help="of initialisation, batches and directions (default 0)")
    add(
        "--directions",
        type=positive,
        help="generic directions a parameter for the comparison (default 1; of --model and --placement by size)",
    )
    add(
        "--full",
        action=argparse.BooleanOptionalAction,
        help="compare and time every entry at the end (default only with --quick)",
    )
    add(
        "--exact",
        action="store_true",
        default=None,
        help="also check every formula, and whole blocks of every norm placement (of --model and --placement the blocks in it), "
        "in exact arithmetic (about two minutes)",
    )
    add("--out", type=Path, help="folder for the report and the heat maps (default results/check)")
    add("--quick", action="store_true", help="a small model and batch: a few seconds; other options still count")
    add_json(add)
    add_table(add)
    add_own_model(check.add_argument_group("a model of your own").add_argument)
    _add_placements(check)
    add_block_options(
        check.add_argument_group("one transformer block").add_argument,
        default=None,
        action="append",
        help="check one block of this placement, e.g. pre; with --placements its part of the grid (may be repeated)",
    )


def _add_placements(check: Parser) -> None:
    add = check.add_argument_group(
        "every norm placement",
        "Instead of the study above: the exact Hessian of tiny language models for every norm placement, combined with every "
        "kind of norm, activation, heads, mask, depth and loss (half an hour on one core). Interrupted, the same command goes "
        "on. Of the other options, --placement, --seed, --json and --out (default results/placements) count.",
    ).add_argument
    add("--placements", action="store_true", help="check the grid of placements")
    add("--sample", type=positive, metavar="N", help="only N cases, drawn by --seed, the placements taking turns")
    add("--jobs", type=positive, metavar="N", help="processes that share the work (default 1)")


OF_THE_STUDY = ("data", "seq_len", "steps", "full", "out", "quick")
OF_THE_GRID = ("sample", "jobs")
OF_ONE = ("tokens", "params")


def run_check(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    from hessiankit.cli.module_options import SHAPE_OF_A_BLOCK
    from hessiankit.support.tables import say

    if args.placements:
        return _placements(args)
    refuse(args, OF_THE_GRID, "is of the grid of norm placements; add --placements")
    if args.model is not None or args.placement is not None:
        return _one(args)
    refuse(args, ("text", "shape"), "is of a model; add --model")
    refuse(args, (*OF_ONE, *SHAPE_OF_A_BLOCK), "is of one model or block; add --model, or --placement")
    from hessiankit.studies.classifier import QUICK, StudyOptions, run_study
    from hessiankit.support.environment import take_free_cores

    take_free_cores()
    given = {f.name: getattr(args, f.name) for f in fields(StudyOptions) if getattr(args, f.name, None) is not None}
    losses = ("mse", "cross_entropy") if args.loss in (None, "both") else (args.loss,)
    study = run_study(StudyOptions(**{**(QUICK if args.quick else {}), **given, "losses": losses}), say, every=args.table)
    if args.json is not None:
        write_json("check", args.json, study.to_dict())
    return OK if study.passed else FAILED


def _one(args: argparse.Namespace) -> int:
    """Check the model of --model, or one block of a placement."""
    from hessiankit.cli.module_options import asked_of
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.tables import say, show
    from hessiankit.verify.check import check

    refuse(args, OF_THE_STUDY, "is of the study, not of one model or block; drop it")
    if args.loss == "both":
        raise InputError("check: --loss both is of the study; take mse or cross_entropy")
    if args.model is None:
        if len(args.placement) > 1:
            raise InputError("check: --placement several times is of the grid of norm placements; add --placements, or name one")
        (args.placement,) = args.placement
    asked = asked_of(args)
    say(str(asked))
    options = {"seed": args.seed, "directions": args.directions, "exact": bool(args.exact), "params": args.params}
    with progress_bar() as tell:
        report = check(asked.model, asked.inputs, asked.target, loss=asked.loss, dtype=None, progress=tell, **options)
    show(report, args.table)
    found = {**asked.to_dict(), "seed": args.seed, "report": report.to_dict(), "environment": environment()}
    write_json("check", args.json, found)
    return OK if report else FAILED


def _placements(args: argparse.Namespace) -> int:
    from hessiankit.cli.module_options import SHAPE_OF_A_BLOCK
    from hessiankit.studies.placement_grid import run_placements

    other = (
        "d_model",
        "d_ff",
        "loss",
        "batch",
        "dtype",
        "device",
        "directions",
        "exact",
        "model",
        "text",
        "shape",
        *OF_ONE,
        *SHAPE_OF_A_BLOCK,
    )
    fixed = "does not go with --placements, whose sizes are fixed; drop it, or see --sample"
    refuse(args, {*OF_THE_STUDY, *other} - {"out"}, fixed)
    words = ["hessiankit check --placements", *(f"--placement '{name}'" for name in args.placement or ())]
    words += [f"--sample {args.sample} --seed {args.seed}"] if args.sample else []
    out = args.out or Path("results/placements")
    options = {"sample": args.sample, "seed": args.seed, "jobs": args.jobs or 1, "out": out, "command": " ".join(words)}
    found = run_placements(args.placement, **options)
    write_json("check", args.json, found)
    return FAILED if found["failed"] else OK
