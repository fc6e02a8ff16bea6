"""Compare learning rates by block type with tuned AdamW, at equal budget, with intervals.

Train small byte-level language models on Python's standard library. First tune AdamW's learning rate, then the base rate of each
scheme by block type. Then train all of them, and controls with one change each, on the same batches with seeds that no search
used. Print the held-out losses, the paired differences from AdamW and the steps to equal loss, with intervals. Finished runs are
kept in --out; after an interrupt the same command continues. The exit code is 0 whatever the table says.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hessiankit.cli.parsing import INTERRUPTED, OK, Parser, add_output, finish, positive, positive_number, probability

if TYPE_CHECKING:
    from papers.experiments.tuning.experiment import Setting
    from papers.experiments.tuning.store import Runs

EXAMPLES = (
    ("python -m papers tune-lr --quick", "the tables' form in less than a minute; decides nothing"),
    ("python -m papers tune-lr --steps 200 --seeds 8 --jobs 4", "a real comparison; after Ctrl-C the same command goes on"),
    ("python -m papers tune-lr --text notes.txt --json learning_rates.json", "on a text of your own"),
)
GRID = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
QUICK_GRID = (4e-3, 8e-3, 1.6e-2)
TRIAL = 6
"""Steps that are timed for the estimate."""


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--steps", type=positive, help="updates of a run, the budget (default 400; --quick 60)")
    add("--seeds", type=positive, help="seeds of the comparison (default 5; --quick 3)")
    add("--tuning-seeds", type=positive, help="other seeds, of the searches (default 3; --quick 2)")
    add("--grid", type=positive_number, nargs="+", metavar="LR", help="AdamW's learning rates, rising (default 1e-3 to 1.6e-2)")
    add("--text", default="stdlib", metavar="PATH", help="'stdlib' (default), or a text file, or a folder of them")
    add("--confidence", type=probability, default=0.95, help="confidence level of each interval (default 0.95)")
    add("--jobs", type=positive, help="processes that share the work, each with one thread (default: one a core, 8 at most)")
    add("--quick", action="store_true", help="a tiny model and budget, less than a minute: shows the tables, decides nothing")
    add("--out", type=Path, default=Path("results/tune-lr"), help="folder for the runs and the picture (default results/tune-lr)")
    add_output(add)
    add("--markdown", type=Path, metavar="PATH", help="also write the tables into this page (docs/learning_rates.md is made so)")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.tables import as_text, say
    from papers.experiments.tuning.comparison import compare, expected_runs
    from papers.experiments.tuning.comparison_report import TuneReport, draw, write_page
    from papers.experiments.tuning.experiment import QUICK, Setting, digest_of
    from papers.experiments.tuning.store import Runs

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
        print(f"papers: interrupted; finished runs are kept in {lines}, the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    report = TuneReport(comparison, setting, args.confidence, len(done), math.fsum(run.seconds for run in done))
    finish(args, report)
    if args.quick:
        say("--quick: the tables' form on a model that has hardly begun to learn, not a result.")
    pictures = [args.out / "learning_rates.png"]
    if args.markdown is not None:
        pictures.append(args.markdown.with_suffix(".png"))
        write_page(args.markdown, report, command_of(args), pictures[1].name)
    for path in pictures:
        draw(report, path)
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
    from papers.experiments.tuning.experiment import RunSpec, held_out_loss, model_of, one_thread, texts, training

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
    words = ["python -m papers tune-lr"]
    for name in ("steps", "seeds", "tuning_seeds"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')} {value}"] if value is not None else []
    words += [f"--grid {' '.join(f'{lr:g}' for lr in args.grid)}"] if args.grid else []
    words += [f"--text {args.text}"] if args.text != "stdlib" else []
    words += [f"--confidence {args.confidence:g}"] if args.confidence != 0.95 else []
    words += ["--quick"] if args.quick else []
    return " ".join([*words, f"--markdown {args.markdown}"])
