"""``hessiankit check``: run the main job, check one model or block, or the grid of norm placements."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from hessiankit.commands.exit_codes import FAILED, OK
from hessiankit.commands.parsing import refuse
from hessiankit.environment import environment
from hessiankit.errors import InputError
from hessiankit.files import write_json
from hessiankit.module_options import SHAPE_OF_A_BLOCK, asked_of
from hessiankit.progress import progress_bar
from hessiankit.tables import say, show
from hessiankit.verify.check import check

OF_THE_STUDY = ("data", "seq_len", "steps", "full", "out", "quick")
OF_THE_GRID = ("sample", "jobs")
OF_ONE = ("tokens", "params", *SHAPE_OF_A_BLOCK)


def run_check(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    if args.placements:
        return _placements(args)
    refuse(args, OF_THE_GRID, "is of the grid of norm placements; add --placements")
    if args.model is not None or args.placement is not None:
        return _one(args)
    refuse(args, ("text", "shape"), "is of a model; add --model")
    refuse(args, OF_ONE, "is of one model or block; add --model, or --placement")
    from hessiankit.environment import take_free_cores
    from hessiankit.study import QUICK, StudyOptions, run_study

    take_free_cores()
    given = {f.name: getattr(args, f.name) for f in fields(StudyOptions) if getattr(args, f.name, None) is not None}
    losses = ("mse", "cross_entropy") if args.loss in (None, "both") else (args.loss,)
    study = run_study(StudyOptions(**{**(QUICK if args.quick else {}), **given, "losses": losses}), say, every=args.table)
    if args.json is not None:
        write_json("check", args.json, study.to_dict())
    return OK if study.passed else FAILED


def _one(args: argparse.Namespace) -> int:
    """Check the model of --model, or one block of a placement."""
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
    from hessiankit.placement_report import run_placements

    other = ("d_model", "d_ff", "loss", "batch", "dtype", "device", "directions", "exact", "model", "text", "shape", *OF_ONE)
    fixed = "does not go with --placements, whose sizes are fixed; drop it, or see --sample"
    refuse(args, {*OF_THE_STUDY, *other} - {"out"}, fixed)
    words = ["hessiankit check --placements", *(f"--placement '{name}'" for name in args.placement or ())]
    words += [f"--sample {args.sample} --seed {args.seed}"] if args.sample else []
    out = args.out or Path("results/placements")
    options = {"sample": args.sample, "seed": args.seed, "jobs": args.jobs or 1, "out": out, "command": " ".join(words)}
    found = run_placements(args.placement, **options)
    write_json("check", args.json, found)
    return FAILED if found["failed"] else OK
