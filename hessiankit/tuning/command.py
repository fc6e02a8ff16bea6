"""``hessiankit tune-lr``: compare learning rates by block type with tuned AdamW."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from hessiankit.commands.exit_codes import INTERRUPTED, OK
from hessiankit.files import write_json
from hessiankit.progress import progress_bar
from hessiankit.tables import as_text, say, show
from hessiankit.tuning.comparison import compare, expected_runs
from hessiankit.tuning.experiment import RunSpec, Setting, digest_of, held_out_loss, model_of, one_thread, texts, training
from hessiankit.tuning.page import write_page
from hessiankit.tuning.report import TuneReport
from hessiankit.tuning.store import Runs

GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
QUICK = Setting(steps=60, batch_size=8, length=32, layers=2, d_model=32, heads=2, evaluations=10, windows=64)
QUICK_GRID = (4e-3, 8e-3, 1.6e-2)
TRIAL = 6
"""Steps that are timed for the estimate."""


def run_tune(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    setting = replace(QUICK if args.quick else Setting(), text=args.text)
    setting = replace(setting, digest=digest_of(args.text), steps=args.steps or setting.steps)
    grid = tuple(args.grid or (QUICK_GRID if args.quick else GRID))
    seeds, tuning_seeds = args.seeds or (3 if args.quick else 5), args.tuning_seeds or (2 if args.quick else 3)
    jobs = args.jobs or min(os.cpu_count() or 1, 8)
    lines = args.out / "runs.jsonl"
    expected = expected_runs(grid, seeds, tuning_seeds)
    try:
        with progress_bar() as tell, Runs(lines, jobs=jobs, tell=tell, expected=expected) as runs:
            print(as_text(forecast(runs, setting, expected, jobs, lines)), file=sys.stderr, flush=True)
            comparison = compare(runs, setting, grid=grid, seeds=seeds, tuning_seeds=tuning_seeds)
            done = runs.used
    except KeyboardInterrupt:
        print(f"hessiankit: interrupted; finished runs are kept in {lines}, the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    report = TuneReport(comparison, setting, args.confidence, len(done), math.fsum(run.seconds for run in done))
    show(report, args.table)
    if args.quick:
        say("--quick: the tables' form on a model that has hardly begun to learn, not a result.")
    _write(args, report)
    return OK


def forecast(runs: Runs, setting: Setting, expected: int, jobs: int, lines: Path) -> str:
    """Return how long it will take, from finished runs of this setting or from a few timed steps."""
    finished = runs.finished(setting)
    seconds = sorted(run.seconds for run in finished)[len(finished) // 2] if finished else seconds_of_a_run(setting)
    left = max(expected - len(finished), 0)
    minutes = left * seconds / min(jobs, max(left, 1)) / 60
    return (
        f"tune-lr: about {expected} runs, {len(finished)} of this setting done; {seconds:.1f} s each, {jobs} at a time: about "
        f"{minutes:.1f} min. Finished runs are kept in {lines}; after Ctrl-C the same command goes on."
    )


def seconds_of_a_run(setting: Setting) -> float:
    """Return an estimate of the time of a run on one thread."""
    text, held_out = texts(setting.text)
    with one_thread():
        model = model_of(setting, 0)
        windows = held_out.windows(setting.length, setting.windows)
        held_out_loss(model, windows)
        began = time.perf_counter()
        held_out_loss(model, windows)
        evaluation = time.perf_counter() - began
        stamps = []
        for step in training(model, text, RunSpec(replace(setting, steps=10**6), 1e-3)):
            stamps.append(time.perf_counter())
            if step > TRIAL:  # the first step, in which torch loads what it needs, is not timed
                break
    return (1 + min(setting.evaluations, setting.steps)) * evaluation + setting.steps * (stamps[-1] - stamps[0]) / TRIAL


def command_of(args: argparse.Namespace) -> str:
    """Return the command that makes the page's section, without what does not change its numbers."""
    words = ["hessiankit tune-lr"]
    for name in ("steps", "seeds", "tuning_seeds"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')} {value}"] if value is not None else []
    words += [f"--grid {' '.join(f'{lr:g}' for lr in args.grid)}"] if args.grid else []
    words += [f"--text {args.text}"] if args.text != "stdlib" else []
    words += [f"--confidence {args.confidence:g}"] if args.confidence != 0.95 else []
    words += ["--quick"] if args.quick else []
    return " ".join([*words, f"--markdown {args.markdown}"])


def _write(args: argparse.Namespace, report: TuneReport) -> None:
    from hessiankit.tuning.picture import draw  # Matplotlib takes a second that the other commands need not wait for

    pictures = [args.out / "learning_rates.png"]
    if args.markdown is not None:
        beside = args.markdown.with_suffix(".png")
        write_page(args.markdown, report, command_of(args), beside.name)
        pictures.append(beside)
    for path in pictures:
        draw(report, path)
    write_json("tune-lr", args.json, report.to_dict())
