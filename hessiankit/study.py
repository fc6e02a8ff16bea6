"""The main job: train the classifier of Closing the Curvature Gap and check its Hessian before and after.

Patches of images, a linear embedding, one post-norm block, mean over tokens, class logits; squared error and cross
entropy; the exact Hessian of one batch at initialisation and after training, compared block pair by block pair.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from hessiankit.blocks import VisionTransformer
from hessiankit.curvature import Hessian, hessian
from hessiankit.data import load_images, one_hot_target, patch_for, patchify
from hessiankit.drawing.plots import side_by_side
from hessiankit.environment import environment
from hessiankit.errors import InputError
from hessiankit.files import write_json
from hessiankit.progress import Tell, progress_bar
from hessiankit.tables import table
from hessiankit.training import train
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import block_errors
from hessiankit.verify.exact import ExactRow, check_exact
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES

DTYPES = {"float64": torch.float64, "float32": torch.float32}
LOSS_NAMES = {"mse": "squared error", "cross_entropy": "cross entropy"}


@dataclass(frozen=True)
class StudyOptions:
    """What the main job is asked to do; the defaults are the MNIST row of the paper's Table 1 on scikit-learn's digits."""

    data: str = "digits"
    d_model: int = 16
    d_ff: int = 64
    seq_len: int | None = None
    losses: tuple[str, ...] = ("mse", "cross_entropy")
    steps: int = 300
    batch: int = 128
    dtype: str = "float64"
    device: str = "cpu"
    seed: int = 0
    directions: int = 1
    full: bool = False
    exact: bool = False
    out: Path = Path("results/check")


QUICK: dict[str, Any] = {"d_model": 8, "d_ff": 16, "seq_len": 4, "steps": 40, "batch": 16, "full": True}
"""What ``--quick`` takes in place of the defaults: a few seconds."""


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


@dataclass(frozen=True)
class Study:
    """What the main job found: a report for each loss at initialisation and after training."""

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


def run_study(options: StudyOptions, console: Console | None = None) -> Study:
    """Run the main job, print its tables, and write the heat maps and the JSON report into ``options.out``.

    Raises:
        InputError: If an option cannot be used, or the output folder cannot be written.
    """
    start = time.perf_counter()
    say = console or Console(stderr=True, quiet=True)
    _make_folder(options.out)
    patches, labels, n_classes, held_out, name = _load(options)
    length, patch_dim = int(patches.shape[1]), int(patches.shape[2])
    batch, batch_labels = patches[: options.batch], labels[: options.batch]
    say.print(f"{name}: {len(patches)} images, {length} patches of {patch_dim} pixels; a batch of {len(batch)} for the Hessians")
    reports: dict[tuple[str, str], CheckReport] = {}
    accuracy: dict[str, float | None] = {}
    timing = None
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
                say.print(f"trained with {LOSS_NAMES[loss]}: {result}")
            with progress_bar() as tell:
                report = check(
                    model, batch, targets, loss=loss, directions=options.directions, dtype=None, seed=options.seed, progress=tell
                )
            reports[loss, stage] = report
            say.print(f"{LOSS_NAMES[loss]}, {stage}: {report.verdict}")
        last = reports[loss, "trained"]
        say.print("")
        say.print(_block_table(reports[loss, "initialisation"], last, loss))
        say.print(f"The references, {LOSS_NAMES[loss]}, trained:")
        for line in last.health_lines():
            say.print("  " + line)
        say.print("")
    if options.full:
        with progress_bar() as tell:
            timing = _time(model, batch, targets, loss, last.hessian, tell)
        say.print(
            f"\nevery entry, {LOSS_NAMES[loss]}, trained: closed form {timing.closed_form_seconds:.2f} s, reverse-over-reverse "
            f"{timing.reverse_over_reverse_seconds:.2f} s ({timing.ratio:.1f} x), agreement {timing.max_rel_error:.1e}"
        )
    exact = check_exact(seed=options.seed) if options.exact else ()
    if exact:
        equal = sum(row.passed for row in exact)
        say.print(f"exact arithmetic: {equal} of {len(exact)} sets of formulas equal entry by entry, without any tolerance")
    pictures = {loss: options.out / f"hessian_{loss}.png" for loss in options.losses}
    study = Study(options, reports, accuracy, timing, exact, time.perf_counter() - start, list(pictures.values()))
    target = options.out / "report.json"
    say.print(_summary(study))
    write_json("check", target, study.to_dict())  # before the pictures, which take more room
    for loss, path in pictures.items():
        _draw(reports[loss, "initialisation"].hessian, reports[loss, "trained"].hessian, loss, path)
    say.print(f"wrote {target} and {', '.join(str(path) for path in study.pictures)}")
    return study


def _load(options: StudyOptions) -> tuple[Tensor, Tensor, int, tuple[Tensor, Tensor], str]:
    dtype = DTYPES[options.dtype]
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"check: --device {options.device} cannot be used: {str(error).splitlines()[0]}") from error
    splits = [load_images(options.data, split=split, seed=options.seed, dtype=dtype) for split in ("train", "test")]
    size = splits[0].image_size
    patch = (2 if max(size) <= 16 else 4) if options.seq_len is None else patch_for(size, options.seq_len)
    (x, y), held_out = ((patchify(s.images, patch).to(options.device), s.labels.to(options.device)) for s in splits)
    if options.batch > len(x):
        raise InputError(f"check: --batch {options.batch} asks for more than the {len(x)} training images of {splits[0].name}")
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


def _draw(before: Hessian, after: Hessian, loss: str, path: Path) -> None:
    side_by_side(
        [before.matrix, after.matrix],
        before.names,
        before.slices,
        titles=["initialisation", "trained"],
        title=f"Hessian of the {LOSS_NAMES[loss]}",
        path=path,
    )


def _block_table(before: CheckReport, after: CheckReport, loss: str) -> Any:
    """Return one row a block pair: its size, its norms before and after training, its worst error by reference."""
    references = [r for r in after.references if r in before.references]
    worst: dict[tuple[str, str], float] = {}
    for row in (*before.rows, *after.rows):
        key = (row.name, row.reference)
        worst[key] = max(worst.get(key, 0.0), row.max_rel_error)
    labels = dict(zip(after.hessian.names, after.hessian.short_names, strict=True))
    rows = []
    for i, j in after.hessian.pairs():
        H, K = before.hessian, after.hessian
        norms = (H.spectral_norm(i, j), H.frobenius_norm(i, j), K.spectral_norm(i, j), K.frobenius_norm(i, j))
        size = "{} x {}".format(*K.block(i, j).shape)
        errors = (f"{worst[f'{i} x {j}', r]:.1e}" for r in references)
        rows.append((f"{labels[i]} x {labels[j]}", size, *(f"{n:.3g}" for n in norms), *errors))
    headers = ("block pair", "size", "init. 2-norm", "F-norm", "trained 2-norm", "F-norm", *references)
    return table(
        headers,
        rows,
        left=2,
        title=f"Hessian of the {LOSS_NAMES[loss]}; largest error of both, relative to the block's largest entry",
    )


def _summary(study: Study) -> Any:
    references = list(dict.fromkeys(r for report in study.reports.values() for r in report.references))
    rows = []
    for (loss, stage), report in study.reports.items():
        worst = {r: max((row.max_rel_error for row in report.rows if row.reference == r), default=0.0) for r in references}
        norms = (f"{report.hessian.loss:.4g}", f"{report.hessian.spectral_norm():.4g}")
        verdict = "passed" if report else "FAILED"
        rows.append((f"{LOSS_NAMES[loss]}, {stage}", *norms, *(f"{worst[r]:.1e}" for r in references), verdict))
    title = f"{'PASSED' if study.passed else 'FAILED'} in {study.seconds:.0f} s; largest error against each healthy reference:"
    return table(("Hessian", "loss", "||H||_2", *references, "verdict"), rows, title=title)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"check: cannot write into --out {out}: {error.strerror or error}; choose another folder") from error
