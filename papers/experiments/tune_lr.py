"""``python -m papers tune-lr``."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from hessiankit.cli.options import File, Flag, Output, Positive, PositiveNumber, Probability
from hessiankit.cli.program import INTERRUPTED, OK, command

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
app = command("tune-lr", EXAMPLES)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What decides the numbers.

    Attributes:
        steps: Updates of a run, the budget (default 400; --quick 60).
        seeds: Seeds of the comparison (default 5; --quick 3).
        tuning_seeds: Other seeds, of the searches (default 3; --quick 2).
        grid: AdamW's learning rates, rising (default 1e-3 to 1.6e-2).
        text: stdlib, or a text file, or a folder of them.
        confidence: Confidence level of each interval.
        quick: A tiny model and budget, less than a minute: shows the tables, decides nothing.
    """

    steps: Positive | None = None
    seeds: Positive | None = None
    tuning_seeds: Positive | None = None
    grid: Annotated[list[PositiveNumber], Parameter(consume_multiple=1)] | None = None
    text: str = "stdlib"
    confidence: Probability = 0.95
    quick: Flag = False


@app.default
def run(
    *,
    setup: Comparison = Comparison(),
    jobs: Positive | None = None,
    out: Path = Path("results/tune-lr"),
    markdown: File | None = None,
    output: Output = Output(),
) -> int:
    """Compare learning rates by block type with tuned AdamW, at equal budget, with intervals.

    Train small byte-level language models on Python's standard library. First tune AdamW's learning rate, then the base rate of
    each scheme by block type. Then train all of them, and controls with one change each, on the same batches with seeds that no
    search used. Print the held-out losses, the paired differences from AdamW and the steps to equal loss, with intervals.
    Finished runs are kept in --out; after an interrupt the same command continues. The exit code is 0 whatever the table says.

    Args:
        jobs: Processes that share the work, each with one thread (default: one per core, 8 at most).
        out: Folder for the runs and the picture.
        markdown: Also write the tables into this page (docs/learning_rates.md is made so).
    """
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.tables import as_text, say
    from papers.experiments.tuning.comparison import compare, expected_runs
    from papers.experiments.tuning.comparison_report import TuneReport, draw, write_page
    from papers.experiments.tuning.experiment import QUICK, Setting, digest_of
    from papers.experiments.tuning.store import Runs

    setting = replace(QUICK if setup.quick else Setting(), text=setup.text)
    setting = replace(setting, digest=digest_of(setup.text), steps=setup.steps or setting.steps)
    grid = tuple(setup.grid or (QUICK_GRID if setup.quick else GRID))
    seeds, tuning_seeds = setup.seeds or (3 if setup.quick else 5), setup.tuning_seeds or (2 if setup.quick else 3)
    jobs = jobs or min(os.cpu_count() or 1, 8)
    lines = out / "runs.jsonl"
    expected = expected_runs(grid, seeds, tuning_seeds)
    try:
        with progress_bar() as tell, Runs(lines, jobs=jobs, tell=tell, expected=expected) as runs:
            print(as_text(forecast(runs, setting, expected, jobs, lines)), file=sys.stderr, flush=True)
            comparison = compare(runs, setting, grid=grid, seeds=seeds, tuning_seeds=tuning_seeds)
            done = runs.used
    except KeyboardInterrupt:
        print(f"papers: interrupted; finished runs are kept in {lines}, the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    report = TuneReport(comparison, setting, setup.confidence, len(done), math.fsum(run.seconds for run in done))
    output.finish(report)
    if setup.quick:
        say("--quick: the tables' form on a model that has hardly begun to learn, not a result.")
    pictures = [out / "learning_rates.png"]
    if markdown is not None:
        pictures.append(markdown.with_suffix(".png"))
        write_page(markdown, report, command_of(setup, markdown), pictures[1].name)
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


def command_of(setup: Comparison, markdown: Path) -> str:
    """Return the command that makes the page's section, without what does not change its numbers."""
    words = ["python -m papers tune-lr"]
    for field in fields(setup):
        value = getattr(setup, field.name)
        if value != field.default:
            numbers = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{field.name.replace('_', '-')}", *(f"{n:g}" if isinstance(n, float) else str(n) for n in numbers)]
    return " ".join([*words, f"--markdown {markdown}"])
