"""``hessiankit check``: run the main job, or the grid of norm placements."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from hessiankit.commands.exit_codes import FAILED, OK
from hessiankit.errors import InputError
from hessiankit.files import write_json
from hessiankit.tables import say


def run_check(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    if args.placements:
        return _placements(args)
    alone = [name for name in ("placement", "sample", "jobs") if getattr(args, name) is not None]
    if alone:
        raise InputError(f"check: --{alone[0]} is of the grid of norm placements; add --placements")
    from hessiankit.study import QUICK, StudyOptions, run_study

    given = {f.name: getattr(args, f.name) for f in fields(StudyOptions) if getattr(args, f.name, None) is not None}
    losses = ("mse", "cross_entropy") if args.loss == "both" else (args.loss,)
    study = run_study(StudyOptions(**{**(QUICK if args.quick else {}), **given, "losses": losses}), say, every=args.table)
    if args.json is not None:
        write_json("check", args.json, study.to_dict())
    return OK if study.passed else FAILED


def _placements(args: argparse.Namespace) -> int:
    from hessiankit.placement_report import run_placements

    study = ("data", "d_model", "d_ff", "seq_len", "steps", "batch", "dtype", "device", "directions", "full", "exact")
    other = [name for name in study if getattr(args, name) is not None]
    other += [name for name in ("quick",) if getattr(args, name)] + (["loss"] if args.loss != "both" else [])
    if other:
        named = f"--{other[0].replace('_', '-')}"
        raise InputError(f"check: {named} does not go with --placements, whose sizes are fixed; drop it, or see --sample")
    words = ["hessiankit check --placements", *(f"--placement '{name}'" for name in args.placement or ())]
    words += [f"--sample {args.sample} --seed {args.seed or 0}"] if args.sample else []
    out = args.out or Path("results/placements")
    options = {"sample": args.sample, "seed": args.seed or 0, "jobs": args.jobs or 1, "out": out, "command": " ".join(words)}
    found = run_placements(args.placement, **options)
    write_json("check", args.json, found)
    return FAILED if found["failed"] else OK
