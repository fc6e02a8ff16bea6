"""``python -m papers block-diagonal``: how block-diagonal the curvature of small language models is, along training.

Finished cases are lines of a file, so that an interrupted study resumes. The page and the file of the preset ``tiny`` are
docs/block_diagonal.md and docs/block_diagonal.json.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import t as student

from hessiankit.cli.options import File, NonNegative, Output, Positive
from hessiankit.cli.program import OK, command
from hessiankit.support.environment import environment
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict, fill, write_json, write_text
from hessiankit.support.tables import Piece, Printed, Table, as_markdown, table
from papers.block_diagonal.models import STAGES, Case

EXAMPLES = (
    ("python -m papers block-diagonal", "the preset tiny: minutes"),
    ("python -m papers block-diagonal --preset small --jobs 2", "two hours on two cores; after Ctrl-C it continues"),
    ("python -m papers block-diagonal --preset paper --dry-run", "the runs that are missing, and the hours they take"),
)
PARTITIONS = ("neuron", "head", "tensor", "layer")
app = command("block-diagonal", EXAMPLES)


@dataclass(frozen=True)
class Preset:
    """Cases of a study: each vocabulary with the depths, tied and untied.

    Attributes:
        vocabularies: Numbers of tokens.
        depths: Numbers of blocks of tied models.
        untied: Numbers of blocks of untied models.
        d_model: Width of a token.
        steps: Updates of a run.
        seeds: Seeds of every case.
        optimiser_steps: Updates of the comparison of Gauss-Newton steps.
        optimiser_seeds: Seeds of that comparison.
    """

    vocabularies: tuple[int, ...]
    depths: tuple[int, ...]
    untied: tuple[int, ...]
    d_model: int
    steps: int
    seeds: int
    optimiser_steps: int
    optimiser_seeds: int = 5

    def cases(self) -> list[Case]:
        """Return the runs whose curvature is measured."""
        found = []
        for vocabulary in self.vocabularies:
            for tied, depths in ((True, self.depths), (False, self.untied)):
                found += [Case(vocabulary, tied, depth, self.d_model, steps=self.steps) for depth in depths]
        return [replace(case, seed=seed) for case in found for seed in range(self.seeds)]


PRESETS = {
    "tiny": Preset((16, 64, 256), (1, 2), (2,), 8, 200, 3, 15),
    "small": Preset((16, 128, 1024), (1, 2, 4), (2,), 16, 1000, 3, 50),
    "paper": Preset((16, 128, 1024, 4096), (1, 2, 3, 4), (1, 2, 3, 4), 16, 1000, 3, 50),
}
"""On two cores half an hour, two hours and a night; ``paper`` contains the cases of ``small``."""


@dataclass(frozen=True)
class Task:
    """One piece of work: a case whose curvature is measured, or whose optimisers are compared."""

    what: Literal["curvature", "optimiser"]
    case: Case


@dataclass(frozen=True)
class Result:
    """A finished task: for curvature, what ``measures.measured`` returns by stage; losses by arm of an optimiser's."""

    task: Task
    found: dict[str, Any]
    seconds: float


@cache
def parameters(case: Case) -> int:
    """Return the number of parameters of a case.

    >>> parameters(Case(4096, d_model=16, layers=1))
    68960
    """
    from papers.block_diagonal.models import model_of

    return sum(p.numel() for p in model_of(replace(case, seed=0)).parameters())


def forecast(task: Task) -> float:
    """Return the seconds of a task on one core, by the time per entry of the matrix that cases of its kind took.

    A streamed matrix takes 0.1 us per entry, by products with unit vectors; there are two at each of four stages. Above
    :data:`~.measures.LARGE` parameters it is one at two stages, and the rows are about those of a vocabulary of the batch's
    tokens. The measures of a matrix that is formed take 2.5 us per entry in all.
    """
    from papers.block_diagonal.measures import DENSE, LARGE

    if task.what == "optimiser":
        return 2.0 * task.case.steps  # a step factorises the whole matrix of 832 parameters with four dampings
    size = parameters(task.case)
    if size > LARGE:
        return 2e-7 * size * parameters(replace(task.case, vocabulary=task.case.sequences * task.case.length))
    return 1e-7 * (25 if size <= DENSE else 8) * size**2


def fitting(tasks: Sequence[Task], seconds: float) -> list[Task]:
    """Return the first tasks whose forecasts add up to no more than some seconds."""
    ends = accumulate(map(forecast, tasks))
    return [task for task, end in zip(tasks, ends, strict=True) if end <= seconds]


def forecast_table(tasks: Sequence[Task], missing: Sequence[Task]) -> Table:
    """Return tasks, those without a result, and their hours on one core, by setting."""
    settings = dict.fromkeys(Task(task.what, replace(task.case, seed=0)) for task in tasks)
    rows = []
    for setting in settings:
        every, rest = ([t for t in of if Task(t.what, replace(t.case, seed=0)) == setting] for of in (tasks, missing))
        hours = f"{sum(map(forecast, rest)) / 3600:.2f}"
        size = f"{parameters(setting.case):,}"
        rows.append((setting.what, *described(setting.case), size, str(len(every)), str(len(rest)), hours))
    total = ("all", "", "", "", "", str(len(tasks)), str(len(missing)), f"{sum(map(forecast, missing)) / 3600:.2f}")
    return table(("work", "words", "head", "blocks", "parameters", "runs", "missing", "hours"), [*rows, total], left=1)


def run(task: Task) -> Result:
    """Do one task on one thread."""
    from papers.block_diagonal.measures import LARGE, measured
    from papers.block_diagonal.models import probe, trained
    from papers.block_diagonal.optimiser import losses

    start = time.perf_counter()
    if task.what == "optimiser":
        found: dict[str, Any] = losses(task.case)
    else:
        x, y = probe(task.case)
        found = {}
        for stage, model, adamw in trained(task.case):
            if stage in (STAGES[0], STAGES[-1]) or parameters(task.case) <= LARGE:
                found[stage] = measured(model, adamw, x, y, seed=task.case.seed)
    return Result(task, found, time.perf_counter() - start)


def encode(result: Result) -> dict[str, Any]:
    """Return a result as JSON knows it."""
    return {"what": result.task.what, "case": asdict(result.task.case), "found": result.found, "seconds": result.seconds}


def decode(line: dict[str, Any]) -> Result:
    """Return the result of a line."""
    return Result(Task(line["what"], Case(**line["case"])), line["found"], line["seconds"])


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with the half width of its 95 % interval, Student's."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ± {self.half_width:.2f}" if math.isfinite(self.half_width) else "")


def interval(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of some values.

    >>> str(interval([0.4, 0.5, 0.6]))
    '0.50 ± 0.25'
    """
    x = torch.tensor(values, dtype=torch.float64)
    if len(x) < 2:
        return Interval(float(x.mean()), math.nan)
    return Interval(float(x.mean()), float(student.ppf(0.975, len(x) - 1) * x.std() / math.sqrt(len(x))))


@dataclass(frozen=True, repr=False)
class BlockDiagonalReport(Printed, WithDict):
    """Measures over seeds.

    Attributes:
        preset: Name of the preset.
        results: Finished tasks.
    """

    preset: str
    results: tuple[Result, ...]

    def settings(self) -> list[Case]:
        """Return the cases whose curvature was measured, seed aside, in their order."""
        cases = [replace(r.task.case, seed=0) for r in self.results if r.task.what == "curvature"]
        return sorted(set(cases), key=lambda case: (case.vocabulary, not case.tied, case.layers))

    def values(self, case: Case, stage: str, kind: str, measure: str, partition: str) -> list[float]:
        """Return a measure of each seed of a case; empty where it was not taken."""
        found = []
        for r in self.results:
            if r.task.what == "curvature" and replace(r.task.case, seed=0) == case:
                value = r.found.get(stage, {}).get("matrices", {}).get(kind, {}).get(measure, {}).get(partition)
                found += [] if value is None else [value]
        return found

    def about(self, case: Case) -> dict[str, Any]:
        """Return what one seed of a case says of itself when trained."""
        runs = [r for r in self.results if r.task.what == "curvature"]
        return next(r.found["trained"] for r in runs if replace(r.task.case, seed=0) == case)

    def measure_table(self, kind: str, measure: str) -> Table:
        """Return a measure by case, stage and partition."""
        rows = []
        for case in self.settings():
            for stage in STAGES:
                seeds = [self.values(case, stage, kind, measure, name) for name in PARTITIONS]
                if all(seeds):
                    rows.append(
                        (*described(case), f"{self.about(case)['parameters']:,}", stage, *(str(interval(x)) for x in seeds))
                    )
        return table(("words", "head", "blocks", "parameters", "stage", *PARTITIONS), rows, left=2)

    def area_table(self) -> Table:
        """Return the share of equal entries by case and partition."""
        rows = [(*described(c), *(f"{self.about(c)['area'][name]:.3f}" for name in PARTITIONS)) for c in self.settings()]
        return table(("words", "head", "blocks", *PARTITIONS), rows, left=2)

    def losses(self) -> dict[str, list[list[float]]]:
        """Return the held-out losses by arm, seed and step."""
        runs = [r.found for r in self.results if r.task.what == "optimiser"]
        return {arm: [found[arm] for found in runs] for arm in (runs[0] if runs else ())}

    def optimiser_table(self) -> Table:
        """Return the last held-out loss by arm, and its difference from the full matrix's on the same seed."""
        arms = self.losses()
        last = {arm: [run[-1] for run in runs] for arm, runs in arms.items()}
        rows = []
        for arm, values in last.items():
            difference = [a - b for a, b in zip(values, last["full"], strict=True)]
            rows.append((arm, f"{interval(values).mean:.3f}", "" if arm == "full" else _signed(interval(difference))))
        return table(("blocks of the step", "held-out loss", "above full"), rows)

    @property
    def row_error(self) -> float:
        """The largest error of sampled rows against jvp(grad), of a matrix's largest entry."""
        return max(
            (found.get("row_error", 0.0) for r in self.results if r.task.what == "curvature" for found in r.found.values()),
            default=math.nan,
        )

    def _headline(self) -> str:
        seconds = math.fsum(r.seconds for r in self.results)
        return f"{len(self.results)} runs of the preset {self.preset}, {seconds:.0f} s; rows to {self.row_error:.1e} of jvp(grad)"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield self.measure_table("hessian", "share")
        yield self.optimiser_table()


def _signed(x: Interval) -> str:
    return f"{x.mean:+.3f} ± {x.half_width:.3f}"


def described(case: Case) -> tuple[str, str, str]:
    """Return vocabulary, head and depth in words."""
    return str(case.vocabulary), "tied" if case.tied else "untied", str(case.layers)


SECTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tiny": ("", ()),
    "small": ("larger-", ("runs", "hessian-share", "losses")),
    "paper": ("paper-", ("runs", "hessian-share", "adamw-share")),
}
"""Prefix of the names of a preset's tables on the page, and the tables; () for all."""


def sections(report: BlockDiagonalReport) -> dict[str, str]:
    """Return the page's tables by the name of their section; stages between the first and the last are in the picture.

    :data:`SECTIONS` has those of each preset.
    """
    wanted = {
        "hessian-share": ("hessian", "share"),
        "ggn-share": ("ggn", "share"),
        "adamw-share": ("hessian in AdamW's metric", "share"),
        "hessian-top": ("hessian", "top"),
        "ggn-cosine": ("ggn", "cosine"),
    }
    pieces = {name: report.measure_table(*what) for name, what in wanted.items()}
    pieces |= {"area": report.area_table(), "losses": report.optimiser_table()}
    prefix, shown = SECTIONS[report.preset]
    found = {"runs": f"{report._headline()}."}
    for name, piece in pieces.items():
        rows = [row for row in piece.rows if not {"1 %", "10 %"} & set(row)]
        found[name] = as_markdown(piece.headers, rows)
    return {f"{prefix}{name}": found[name] for name in shown or found}


@app.default
def study(
    *,
    preset: Literal["tiny", "small", "paper"] = "tiny",
    words: Positive | None = None,
    hours: NonNegative | None = None,
    dry_run: bool = False,
    jobs: Positive | None = None,
    out: Path = Path("results/block-diagonal"),
    data: File | None = None,
    markdown: File | None = None,
    output: Output = Output(),
) -> int:
    """Measure how block-diagonal the exact Hessian of small language models is, by neuron, head, tensor and layer.

    Train models on the words of Python's standard library. At four stages of training compute the exact Hessian and
    Gauss-Newton matrix, compare sampled rows with jvp(grad), and measure their diagonal blocks. Then compare damped Gauss-Newton
    steps with the whole matrix and with diagonal blocks. Finished cases are kept in --out.

    Args:
        preset: tiny: half an hour on two cores; small: two hours; paper: a night.
        words: Only cases with this vocabulary.
        hours: Only as many missing cases as the forecast has for this many hours, in their order; 0 reports the finished ones.
        dry_run: Print the forecast of the missing cases and run none.
        jobs: Processes that share the work, each with one thread (default: one per core, 8 at most).
        out: Folder for the finished cases.
        data: Also write all measures as JSON (docs/block_diagonal.json is written so).
        markdown: Also write the tables into this page (docs/block_diagonal.md is written so).
    """
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.tables import say
    from papers.experiments.resumable import Resumable
    from papers.experiments.tuning.experiment import one_thread

    chosen = PRESETS[preset]
    tasks = [Task("curvature", case) for case in chosen.cases()]
    comparison = Case(32, d_model=4, steps=chosen.optimiser_steps)  # small: a step factorises the whole matrix
    tasks += [Task("optimiser", replace(comparison, seed=seed)) for seed in range(chosen.optimiser_seeds)]
    tasks = [task for task in tasks if words in (None, task.case.vocabulary)]
    out.mkdir(parents=True, exist_ok=True)
    jobs = jobs or min(os.cpu_count() or 1, 8)
    store = Resumable("block-diagonal", out / f"{preset}.jsonl", run, lambda r: r.task, encode, decode, jobs=jobs)
    if dry_run:
        say(forecast_table(tasks, store.missing(tasks)))
        return OK
    with progress_bar() as tell, store as results, one_thread():
        wanted = store.missing(tasks) if hours is None else fitting(store.missing(tasks), 3600 * hours * jobs)
        for n, _ in enumerate(results.finish(wanted), start=1):
            tell("cases", n, len(wanted))
        report = BlockDiagonalReport(preset, tuple(results.known[task] for task in tasks if task in results.known))
    if not report.results:
        raise InputError(f"block-diagonal: no case fits in hours={hours:g} and none is finished; pass more (--dry-run tells)")
    output.finish(report, [encode(r) for r in report.results])
    about = {"preset": preset, "environment": environment("date", "python", "torch", "processor", "cores", "system")}
    write_json("block-diagonal", data, about | {"results": [encode(r) for r in report.results]})
    if markdown is not None:
        write_text("block-diagonal", markdown, fill(markdown.read_text(encoding="utf-8"), sections(report)))
    return OK


def read(path: Path) -> BlockDiagonalReport:
    """Return the report of a file that ``--data`` wrote."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return BlockDiagonalReport(stored["preset"], tuple(map(decode, stored["results"])))
