"""The classifier of Closing the Curvature Gap, trained, and its Hessian checked before and after.

Patches of images, a linear embedding, one post-norm block, mean over tokens, class logits; squared error and cross
entropy; the exact Hessian of one batch at initialisation and after training, compared block pair by block pair.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessiankit.blocks import VisionTransformer
from hessiankit.curvature.dense import Hessian, hessian
from hessiankit.curvature.plots import side_by_side
from hessiankit.studies.images import load_images, one_hot_target, patch_for, patchify
from hessiankit.studies.training import train
from hessiankit.support.environment import environment
from hessiankit.support.errors import InputError
from hessiankit.support.files import check_writable, make_folder, write_json
from hessiankit.support.progress import Tell, progress_bar, silent
from hessiankit.support.tables import Table, table
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport, CheckRow
from hessiankit.verify.comparison import block_errors
from hessiankit.verify.exact import ExactRow, check_exact
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES

DTYPES = {"float64": torch.float64, "float32": torch.float32}
LOSS_NAMES = {"mse": "squared error", "cross_entropy": "cross entropy"}


@dataclass(frozen=True)
class StudyOptions:
    """Options of the study; the defaults are the MNIST row of the paper's Table 1 on scikit-learn's digits."""

    data: str = "digits"
    d_model: int = 16
    d_ff: int = 64
    seq_len: int | None = None
    losses: tuple[str, ...] = ("mse", "cross_entropy")
    steps: int = 300
    batch: int = 32
    dtype: str = "float64"
    device: str = "cpu"
    seed: int = 0
    directions: int = 1
    full: bool = False
    exact: bool = False
    out: Path = Path("results/study")


QUICK: dict[str, Any] = {"d_model": 8, "d_ff": 16, "seq_len": 4, "steps": 40, "batch": 16, "full": True}
"""Options of ``--quick``, a few seconds."""


@dataclass(frozen=True)
class Timing:
    """The closed form beside reverse-over-reverse on the same problem, in the same process, every entry compared."""

    parameters: int
    batch: int
    closed_form_seconds: float
    reverse_over_reverse_seconds: float
    max_rel_error: float

    @property
    def ratio(self) -> float:
        """How many times faster the closed form was."""
        return self.reverse_over_reverse_seconds / self.closed_form_seconds


SHOWN = 10
"""Block pairs that are printed without ``--table``: those with the largest errors."""


@dataclass(frozen=True)
class Study:
    """The result of the study: a report for each loss at initialisation and after training."""

    options: StudyOptions
    reports: dict[tuple[str, str], CheckReport]
    accuracy: dict[str, float | None]
    timing: Timing | None
    exact: tuple[ExactRow, ...]
    seconds: float
    pictures: list[Path] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything that was compared agrees."""
        compared = all(self.reports.values()) and all(row.passed for row in self.exact)
        return compared and (self.timing is None or self.timing.max_rel_error <= self.tolerance)

    @property
    def tolerance(self) -> float:
        """The tolerance of the comparisons."""
        return next(iter(self.reports.values())).rtol

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data."""
        return {
            "passed": self.passed,
            "options": {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self.options).items()},
            "environment": environment(),
            "validation_accuracy": self.accuracy,
            "timing": None if self.timing is None else {**asdict(self.timing), "ratio": self.timing.ratio},
            "exact": [asdict(row) for row in self.exact],
            "seconds": self.seconds,
            "reports": [{"loss": loss, "stage": stage, **report.to_dict()} for (loss, stage), report in self.reports.items()],
            "pictures": [path.name for path in self.pictures],
        }


def run_study(options: StudyOptions, say: Callable[..., None] = silent, *, every: bool = False) -> Study:
    """Run the study, print its tables, and write the heat maps and the JSON report into ``options.out``.

    Without ``every``, the block pairs of the largest errors are printed alone, and not the health of each reference.
    """
    start = time.perf_counter()
    target = options.out / "report.json"
    make_folder("study", options.out)
    check_writable("study", target)
    patches, labels, n_classes, held_out, name = _load(options)
    length, patch_dim = int(patches.shape[1]), int(patches.shape[2])
    batch, batch_labels = patches[: options.batch], labels[: options.batch]
    say(f"{name}: {len(patches)} images, {length} patches of {patch_dim} pixels; a batch of {len(batch)} for the Hessians")
    reports: dict[tuple[str, str], CheckReport] = {}
    accuracy: dict[str, float | None] = {}
    timing = None
    stages = [(loss, stage) for loss in options.losses for stage in ("initialisation", "trained")]
    for loss in options.losses:
        torch.manual_seed(options.seed)
        model = VisionTransformer(patch_dim, length, n_classes, d_model=options.d_model, d_ff=options.d_ff, bias=True)
        model.to(options.device, DTYPES[options.dtype])
        targets = one_hot_target(batch_labels, n_classes, DTYPES[options.dtype]) if loss == "mse" else batch_labels
        for stage in ("initialisation", "trained"):
            if stage == "trained":
                result = train(model, patches, labels, loss=loss, steps=options.steps, seed=options.seed, validation=held_out)
                if result.interrupted:
                    raise KeyboardInterrupt
                accuracy[loss] = result.validation_accuracy
                say(f"trained with {LOSS_NAMES[loss]}: {result}")
            with progress_bar("Hessian", of=len(stages), before=[r.seconds for r in reports.values()]) as tell:
                report = check(
                    model, batch, targets, loss=loss, directions=options.directions, dtype=None, seed=options.seed, progress=tell
                )
            reports[loss, stage] = report
            say(f"{LOSS_NAMES[loss]}, {stage}: {report.verdict}")
        if every:
            last = reports[loss, "trained"]
            say("", _block_table({loss: (reports[loss, "initialisation"], last)}), whole=True)
            say(f"The references, {LOSS_NAMES[loss]}, trained:", *(f"  {line}" for line in last.health_lines()), "")
    if options.full:
        with progress_bar() as tell:
            timing = _time(model, batch, targets, loss, reports[loss, "trained"].hessian, tell)
        say(
            f"every entry, {LOSS_NAMES[loss]}, trained: closed form {timing.closed_form_seconds:.2f} s, reverse-over-reverse "
            f"{timing.reverse_over_reverse_seconds:.2f} s ({timing.ratio:.1f} x), agreement {timing.max_rel_error:.1e}"
        )
    exact = check_exact(seed=options.seed) if options.exact else ()
    if exact:
        equal = sum(row.passed for row in exact)
        say(f"exact arithmetic: {equal} of {len(exact)} sets of formulas equal entry by entry, without any tolerance")
    pictures = {loss: options.out / f"hessian_{loss}.png" for loss in options.losses}
    study = Study(options, reports, accuracy, timing, exact, time.perf_counter() - start, list(pictures.values()))
    if not every:
        pairs = {loss: (reports[loss, "initialisation"], reports[loss, "trained"]) for loss in options.losses}
        say("", _block_table(pairs).top(SHOWN))
    say("", _summary(study))
    write_json("study", target, study.to_dict())  # before the pictures, which take more room
    for loss, path in pictures.items():
        titles, title = ["initialisation", "trained"], f"Hessian of the {LOSS_NAMES[loss]}"
        before, after = (reports[loss, stage].hessian for stage in titles)
        side_by_side([before.matrix, after.matrix], before.names, before.slices, titles=titles, title=title, path=path)
    say(f"wrote {target} and {', '.join(str(path) for path in study.pictures)}")
    if not every:
        say(f"every row: --table; every number: {target}, or --json")
    return study


def _load(options: StudyOptions) -> tuple[Tensor, Tensor, int, tuple[Tensor, Tensor], str]:
    dtype = DTYPES[options.dtype]
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"study: --device {options.device} cannot be used: {str(error).splitlines()[0]}") from error
    splits = [load_images(options.data, split=split, seed=options.seed, dtype=dtype) for split in ("train", "test")]
    size = splits[0].image_size
    patch = (2 if max(size) <= 16 else 4) if options.seq_len is None else patch_for(size, options.seq_len)
    (x, y), held_out = ((patchify(s.images, patch).to(options.device), s.labels.to(options.device)) for s in splits)
    if options.batch > len(x):
        raise InputError(f"study: --batch {options.batch} asks for more than the {len(x)} training images of {splits[0].name}")
    return x, y, splits[0].n_classes, held_out, splits[0].name


def _time(model: torch.nn.Module, inputs: Tensor, target: Tensor, loss: str, found: Hessian, tell: Tell) -> Timing:
    """Compare every entry with reverse-over-reverse, and time both in this process."""
    again = hessian(model, inputs, target, loss=loss)
    problem = Problem(model, inputs, target, loss)
    name = "reverse-over-reverse"
    reference = REFERENCES[name].measure(problem, progress=lambda done, total: tell(f"{name}, every column", done, total))
    error = float(block_errors(again.matrix, reference.value, problem).max())
    seconds = min(found.seconds, again.seconds)
    return Timing(problem.size, int(inputs.shape[0]), seconds, reference.seconds, error)


def _block_table(pairs: Mapping[str, tuple[CheckReport, CheckReport]]) -> Table:
    """Return one row a block pair of each loss: its norms before and after training, its worst error by reference."""
    references = list(dict.fromkeys(r for both in pairs.values() for report in both for r in report.references))
    rows: list[tuple[str, ...]] = []
    rank: list[float] = []
    names: list[str] = []
    for loss, (before, after) in pairs.items():
        found: dict[tuple[str, str], list[CheckRow]] = {}
        for row in (*before.rows, *after.rows):
            found.setdefault((row.name, row.reference), []).append(row)
        worst = {key: max(of, key=lambda row: (not row.passed, row.max_rel_error, not row.zero)) for key, of in found.items()}
        H, K = before.hessian, after.hessian
        names += K.names
        for i, j in K.pairs():
            cells = [worst.get((f"{i} x {j}", r)) for r in references]
            norms = (H.spectral_norm(i, j), H.frobenius_norm(i, j), K.spectral_norm(i, j), K.frobenius_norm(i, j))
            size = "{} x {}".format(*K.block(i, j).shape)
            own = (loss,) if len(pairs) > 1 else ()
            rows.append((f"{i} x {j}", *own, size, *(f"{n:.3g}" for n in norms), *(c.shown if c else "" for c in cells)))
            rank.append(max((c.max_rel_error if c.passed else math.inf) for c in cells if c is not None))
    own = ("loss",) if len(pairs) > 1 else ()
    of = "the losses" if own else f"the {LOSS_NAMES[next(iter(pairs))]}"
    return table(
        ("block pair", *own, "size", "init. 2-norm", "init. F-norm", "trained 2-norm", "trained F-norm", *references),
        rows,
        title=f"Hessian of {of}; largest error of both stages, relative to the block's largest entry",
        left=2 + len(own),
        names=names,
        drop=("size", "init. F-norm", "trained F-norm", "init. 2-norm", "trained 2-norm"),
        rank=rank,
        ranked="largest error",
    )


def _summary(study: Study) -> Table:
    references = list(dict.fromkeys(r for report in study.reports.values() for r in report.references))
    rows = []
    for (loss, stage), report in study.reports.items():
        worst = {r: max((row.max_rel_error for row in report.rows if row.reference == r), default=0.0) for r in references}
        norms = (f"{report.hessian.loss:.4g}", f"{report.hessian.spectral_norm():.4g}")
        verdict = "passed" if report else "FAILED"
        rows.append((f"{LOSS_NAMES[loss]}, {stage}", *norms, *(f"{worst[r]:.1e}" for r in references), verdict))
    title = f"{'PASSED' if study.passed else 'FAILED'} in {study.seconds:.0f} s; largest error against each healthy reference:"
    return table(("Hessian", "loss", "||H||_2", *references, "verdict"), rows, title=title, drop=("loss", "||H||_2"))
