"""Bulk and outliers of a digits classifier: one outlier less than classes, densities, and how far the quadratic model holds.

A perceptron 64 - 16 - 10 with relu on scikit-learn's digits (mean image subtracted), trained by full-batch gradient descent at
rate 0.3 on the mean cross entropy; Gauss-Newton matrix and Hessian of the loss over all training images, in float64.

Top: the 20 largest eigenvalues of both matrices during training, each with the widest gap, the largest ratio of neighbours. The
second derivative of a softmax's loss in its C logits, diag(p) - p p^T, has rank C - 1. Sagun, Evci, Guney, Dauphin and Bottou,
"Empirical analysis of the Hessian of over-parametrized neural networks", 2017, and Papyan, "Measurements of three-level
hierarchical structure in the outliers in the spectrum of deepnet Hessians", 2019, count about as many outliers as classes.
Bottom: the spectral density by Lanczos quadrature with two standard errors beside that of all eigenvalues; the ratio of the
9th to the 10th eigenvalue at every seed; the loss along the eigenvector of the largest eigenvalue, and where its quadratic
model is off by at most 10 % of its largest change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

import hessiankit as hk
from figures._kit import (
    FAINT,
    INK,
    MACHINE,
    METHOD_COLOURS,
    METHOD_MARKS,
    differentiable,
    heading,
    page,
    save,
    style,
    write_json,
    write_rows,
)
from hessiankit.landscape import LossSlice, Spectrum
from hessiankit.landscape.plots import draw_slice
from hessiankit.support.environment import environment
from hessiankit.support.progress import progress_bar
from hessiankit.support.tables import as_text, table
from papers.experiments.images import load_images

NAME = Path(__file__).stem
KINDS = {"ggn": "Gauss-Newton matrix", "hessian": "Hessian"}


@dataclass(frozen=True)
class Settings:
    """The runs: sizes, steps at which spectra are taken, seeds of the initial weights."""

    hidden: int = 16
    rate: float = 0.3
    steps: tuple[int, ...] = (0, 20, 50, 100, 200, 400)
    shown: int = 100
    seeds: tuple[int, ...] = (0, 1, 2)
    images: int = 1437
    k: int = 20
    directions: int = 10
    lanczos_steps: int = 60


QUICK = Settings(hidden=3, steps=(0, 60), shown=60, seeds=(0,), images=60, k=10, directions=4, lanczos_steps=12)


@dataclass(frozen=True)
class Measured:
    """The spectra at one step of one run.

    Attributes:
        seed: Of the initial weights.
        step: Updates before.
        loss: Mean cross entropy over all images.
        accuracy: Share of them that are classified right.
        found: Kind -> spectrum.
    """

    seed: int
    step: int
    loss: float
    accuracy: float
    found: dict[str, Spectrum]


def run(settings: Settings, x: Tensor, y: Tensor, seed: int) -> Iterator[tuple[int, nn.Sequential]]:
    """Yield the classifier after each number of steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(x.shape[1], settings.hidden), nn.ReLU(), nn.Linear(settings.hidden, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate)
    done = 0
    for step in settings.steps:
        with differentiable():
            for _ in range(step - done):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        done = step
        yield step, model


def measure(settings: Settings) -> tuple[list[Measured], Spectrum, Spectrum, LossSlice]:
    """Return all measurements, and of the first seed at the step shown the density's spectrum, all eigenvalues, and the slice."""
    images = load_images("digits", dtype=torch.float64).first(settings.images)
    x = images.images.reshape(len(images), -1)
    x, y = x - x.mean(0), images.labels
    measured: list[Measured] = []
    several = len(settings.steps) * len(settings.seeds)
    with progress_bar() as tell:
        for seed in settings.seeds:
            for step, model in run(settings, x, y, seed):
                with torch.no_grad():
                    accuracy = float((model(x).argmax(1) == y).double().mean())
                found = {}
                for kind in KINDS:
                    operator = hk.hessian_operator(model, x, y, loss="cross_entropy", kind=kind)
                    here = seed == settings.seeds[0] and step == settings.shown and kind == "hessian"
                    own = (settings.directions, settings.lanczos_steps) if here else (0, 2)
                    options: dict[str, Any] = {"k": settings.k, "bottom": 5 if here else 0, "method": "lanczos"}
                    found[kind] = hk.spectrum(operator, directions=own[0], steps=own[1], **options)
                    if here:
                        density, every = found[kind], hk.spectrum(operator, method="full")
                        along = found[kind].eigenvectors[:, 0]
                        line = hk.loss_slices(model, x, y, loss="cross_entropy", along=along, span=(-2.0, 2.0))[0]
                measured.append(Measured(seed, step, found["ggn"].loss, accuracy, found))
                tell("spectra", len(measured), several)
    return measured, density, every, line


def draw_values(axes: Axes, measured: list[Measured], kind: str, settings: Settings) -> None:
    """Draw the largest eigenvalues of the first seed in their order, with a bar at the widest gap."""
    heading(axes, KINDS[kind], "index, from the largest", "eigenvalue")
    own = [one for one in measured if one.seed == settings.seeds[0]]
    for one, colour, mark in zip(own, METHOD_COLOURS, METHOD_MARKS, strict=False):
        found = one.found[kind]
        values = found.eigenvalues[: found.top].numpy()
        n = found.outliers
        label = f"step {one.step} (accuracy {one.accuracy:.0%}): λ$_{{{n}}}$ / λ$_{{{n + 1}}}$ = {found.gap:.2f}"
        axes.plot(np.arange(1, len(values) + 1), values, color=colour, marker=mark, markersize=2.5, linewidth=0.7, label=label)
        axes.plot([n + 0.5] * 2, [values[n - 1], values[n]], color=colour, linewidth=2.4)
    axes.axvline(9.5, color=FAINT, linewidth=0.7, linestyle=":", label="after 9, one less than the classes")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.9)  # room for the key
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=6, title="widest gap (bar)", title_fontsize=6.5, loc="upper right", frameon=True, edgecolor="none")


def draw_density(axes: Axes, density: Spectrum, every: Spectrum) -> None:
    """Draw the density of the Hessian by quadrature beside that of all its eigenvalues."""
    true = every.density()
    found = density.density(width=true.width, points=true.points)
    floor = 1e-4 * float(true.values.max())
    x, y, error = (t.numpy() for t in (true.points, found.values, 2 * found.standard_errors))
    heading(axes, "density of the Hessian, trained", "eigenvalue", "eigenvalues per unit")
    axes.fill_between(
        x, np.maximum(y - error, floor), np.maximum(y + error, floor), color=METHOD_COLOURS[1], alpha=0.3, linewidth=0
    )
    axes.plot(x, np.maximum(y, floor), color=METHOD_COLOURS[1], label="quadrature, 2 standard errors")
    axes.plot(x, np.maximum(true.values.numpy(), floor), color=INK, linewidth=0.7, linestyle="--", label="all eigenvalues")
    found_values = density.eigenvalues.numpy()
    axes.plot(
        found_values, np.full(len(found_values), 1.5 * floor), "o", color=METHOD_COLOURS[2], markersize=2.5, label="eigenpairs"
    )
    axes.set_yscale("log")
    axes.legend(fontsize=6)


def draw_ratios(axes: Axes, measured: list[Measured], settings: Settings) -> None:
    """Draw the ratio of the 9th to the 10th eigenvalue of both matrices over the accuracy, all seeds."""
    heading(axes, "9th over 10th eigenvalue", "step", "ratio")
    for (kind, label), colour, mark in zip(KINDS.items(), METHOD_COLOURS[1:], METHOD_MARKS, strict=False):
        for seed in settings.seeds:
            own = [one for one in measured if one.seed == seed]
            values = [float(one.found[kind].eigenvalues[8] / one.found[kind].eigenvalues[9]) for one in own]
            first = label if seed == settings.seeds[0] else None
            axes.plot(range(len(own)), values, color=colour, marker=mark, linewidth=0.8, label=first)
    axes.set_xticks(range(len(settings.steps)), [str(step) for step in settings.steps])
    axes.axhline(1.0, color=FAINT, linewidth=0.7, linestyle=":")
    axes.legend(fontsize=6)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train, take the spectra, print how many outliers there are, and write the picture, its eigenvalues and a summary."""
    settings = QUICK if quick else Settings()
    measured, density, every, line = measure(settings)
    rows = []
    for one in measured:
        cells = [f"{one.found[kind].outliers} (x {one.found[kind].gap:.2f})" for kind in KINDS]
        rows.append((str(one.seed), str(one.step), f"{one.loss:.3f}", f"{one.accuracy:.3f}", *cells))
    print(as_text(table(("seed", "step", "loss", "accuracy", *KINDS.values()), rows, title="eigenvalues above the widest gap")))
    with style():
        figure = page(7.6, 5.2)
        for k, kind in enumerate(KINDS):
            draw_values(figure.add_axes((0.075 + 0.5 * k, 0.585, 0.41, 0.365)), measured, kind, settings)
        draw_density(figure.add_axes((0.075, 0.085, 0.245, 0.365)), density, every)
        draw_ratios(figure.add_axes((0.415, 0.085, 0.225, 0.365)), measured, settings)
        last = figure.add_axes((0.745, 0.085, 0.235, 0.365))
        heading(last, "loss along the top eigenvector")
        draw_slice(last, line)
        last.legend(fontsize=6)
        picture = save(figure, out / f"{NAME}{suffix}")
    values = [
        {
            "seed": one.seed, "step": one.step, "matrix": kind, "number": n + 1, "eigenvalue": float(value),
            "residual": float(residual),
        }
        for one in measured
        for kind, found in one.found.items()
        for n, (value, residual) in enumerate(zip(found.eigenvalues[: found.top], found.residuals, strict=False))
    ]  # fmt: skip
    summary = {
        "environment": environment(*MACHINE),
        "settings": asdict(settings),
        "runs": [
            {"seed": m.seed, "step": m.step, "loss": m.loss, "accuracy": m.accuracy,
             **{kind: {"outliers": s.outliers, "gap": s.gap, "converged": s.converged} for kind, s in m.found.items()}}
            for m in measured
        ],
        "density": coverage(density, every),
        "trace": {"quadrature": density.trace.value, "half_width": density.trace.half_width, "all": every.trace.value},
        "slice": {"eigenvalue": line.curvature, "radius": line.radius, "tolerance": line.tolerance},
    }  # fmt: skip
    return [picture, write_rows(out / f"{NAME}.csv", values), write_json(out / f"{NAME}.json", summary)]


def coverage(density: Spectrum, every: Spectrum) -> dict[str, float]:
    """Return the share of the axis on which the density of all eigenvalues is within 2 and 3 standard errors, where it counts."""
    true = every.density()
    found = density.density(width=true.width, points=true.points)
    counts = true.values > 1e-3 * true.values.max()
    off = (found.values - true.values).abs()[counts]
    return {f"within_{n}": float((off <= n * found.standard_errors[counts] + 1e-12).double().mean()) for n in (2, 3)}
