"""Approximations of curvature against the exact matrix, by norm placement, before and after training.

A classifier of scikit-learn's digits (patches of 4 x 4, one block, d_model 8, d_ff 16, biases, cross entropy, float64, AdamW 3e-3
for 300 steps of 128 images) in four norm placements and three seeds. For 64 images the exact Gauss-Newton matrix, which is the
Fisher information here, and after training the exact Hessian; each approximation of :func:`hessiankit.approximations` with its
relative error in the Frobenius norm, the cosine of its damped step with the exact damped step, and the condition number that it
leaves. Damping: 1 % of the spectral norm, and minus the least eigenvalue where that is negative.

Points are means over the seeds, bars go from the least to the largest; dotted lines: the gradient itself, without a
preconditioner. Adam, Shampoo and Muon approximate the matrix up to scale at best, so that their errors are not drawn. Finished
cells are kept: an interrupted run goes on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import hessiankit as hk
from figures._digits import LOSS, ImageSpec
from figures._kit import MACHINE, METHOD_COLOURS, cached, heading, page, save, style, write_json, write_rows
from hessiankit.blocks import VisionTransformer
from hessiankit.support.environment import environment
from hessiankit.support.progress import progress_bar
from hessiankit.support.tables import as_markdown
from papers.experiments.store import put
from papers.experiments.training import train

NAME = Path(__file__).stem
CODE = (
    "hessiankit/curvature/approximating", "hessiankit/curvature", "hessiankit/engine", "derivations", "figures/_digits.py",
    "figures/approximations.py",
)  # fmt: skip
METHODS = ("diagonal", "tensor", "type", "layer", "kfac", "ekfac", "adam", "shampoo", "muon", "low-rank")
CURVATURE = METHODS[:6] + METHODS[9:]
"""Approximations of the matrix itself; the others approximate it up to scale at best."""
STAGES = ("initialisation", "trained")
MEASURES = ("frobenius", "spectral", "alignment", "step_cosine", "condition")


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and the data, and the values that vary."""

    placements: tuple[str, ...] = ("pre", "post", "sandwich", "hybridnorm")
    seeds: tuple[int, ...] = (0, 1, 2)
    d_model: int = 8
    d_ff: int = 16
    images: int = 64
    steps: int = 300


FULL = Settings()
QUICK = Settings(("pre", "post"), (0, 1), 4, 4, 8, 10)


@dataclass(frozen=True)
class Cell:
    """One measurement: placement, seed, stage and the exact matrix."""

    placement: str
    seed: int
    stage: str
    against: str


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield the Gauss-Newton matrix at both stages, and the Hessian of the trained model."""
    for placement in settings.placements:
        for seed in settings.seeds:
            yield from (Cell(placement, seed, stage, "ggn") for stage in STAGES)
            yield Cell(placement, seed, "trained", "hessian")


def problem(cell: Cell, settings: Settings) -> tuple[VisionTransformer, Tensor, Tensor]:
    """Return the classifier of a cell, trained if its stage says so, and the images that it is measured on."""
    spec = ImageSpec(4, settings.d_model, settings.d_ff, seed=cell.seed, placement=cell.placement)
    model = spec.model()
    if cell.stage == "trained":
        train(model, *spec.data(), steps=settings.steps, seed=cell.seed, progress=False)
    return model, *spec.data(count=settings.images)


def measured(cell: Cell, settings: Settings) -> dict[str, Any]:
    """Return the report of a cell as plain data, without the errors by pair."""
    found = hk.approximations(*problem(cell, settings), loss=LOSS, against=cell.against).to_dict()
    return {name: part for name, part in found.items() if name not in ("pairs", "errors_by_pair", "names", "seconds")}


def measure_all(out: Path, settings: Settings) -> dict[Cell, dict[str, Any]]:
    """Return the reports of all cells; those that are kept are not made again."""
    every, found = list(cells(settings)), {}
    with progress_bar() as tell:
        for done, cell in enumerate(every):
            key = {**asdict(cell), **asdict(settings)}
            found[cell] = cached(out, NAME, key, partial(measured, cell, settings), code=CODE)
            tell("cells", done + 1, len(every))
    return found


def value(report: dict[str, Any], method: str, measure: str) -> float:
    """Return a measure of an approximation; NaN where it is not known."""
    found = report["approximations"][method][measure]
    found = found["value"] if isinstance(found, dict) else found
    return math.nan if found is None else float(found)


def spread(reports: Iterable[dict[str, Any]], method: str, measure: str) -> tuple[float, float, float]:
    """Return mean, least and largest over the seeds."""
    values = [value(report, method, measure) for report in reports]
    return statistics.fmean(values), min(values), max(values)


def of(found: dict[Cell, dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    """Return the reports of some cells, one a seed."""
    return [report for cell, report in found.items() if all(getattr(cell, name) == x for name, x in wanted.items())]


PANELS = (
    ("frobenius", "error in Frobenius norm"),
    ("step_cosine", "cosine with the exact step"),
    ("condition", "condition number"),
)


def draw_panels(found: dict[Cell, dict[str, Any]], settings: Settings, path: Path) -> Path:
    """Draw the measures against the Gauss-Newton matrix, a column a placement, and return the path."""
    with style():
        figure = page(8.0, 6.6)
        grid = figure.subplots(len(PANELS), len(settings.placements), sharey="row", sharex="row", squeeze=False)
        for row, (measure, words) in enumerate(PANELS):
            methods = (CURVATURE if measure == "frobenius" else METHODS)[::-1]
            for column, placement in enumerate(settings.placements):
                axes = grid[row, column]
                heading(axes, placement if row == 0 else "", words)
                for shift, stage, colour in zip((0.14, -0.14), STAGES, METHOD_COLOURS[1:3], strict=True):
                    reports = of(found, placement=placement, stage=stage, against="ggn")
                    for y, method in enumerate(methods):
                        mean, low, high = spread(reports, method, measure)
                        axes.plot([low, high], [y + shift] * 2, color=colour, linewidth=1)
                        axes.plot([mean], [y + shift], "o", color=colour, label=stage if y == 0 else None)
                axes.set_yticks(range(len(methods)), methods)
                if measure == "condition":
                    axes.set_xscale("log")
                else:
                    axes.set_xlim(0, 1.05)
                    axes.set_xticks([0, 0.5, 1])
                for stage, colour in zip(STAGES, METHOD_COLOURS[1:3], strict=True):
                    if measure != "frobenius":
                        plain = spread(of(found, placement=placement, stage=stage, against="ggn"), "identity", measure)[0]
                        axes.axvline(plain, color=colour, linewidth=0.7, linestyle=":", label=f"gradient, {stage}")
        figure.legend(*grid[1, 0].get_legend_handles_labels(), loc="upper right", ncols=4, bbox_to_anchor=(0.99, 1.0))
        figure.subplots_adjust(left=0.1, right=0.99, top=0.93, bottom=0.07, hspace=0.35, wspace=0.08)
        return save(figure, path)


def shown(found: tuple[float, float, float]) -> str:
    """Return mean and range in three digits.

    >>> shown((0.5, 0.25, 0.75))
    '0.5 (0.25 to 0.75)'
    """
    return "{:.3g} ({:.3g} to {:.3g})".format(*found)


def findings(found: dict[Cell, dict[str, Any]], settings: Settings) -> list[str]:
    """Return what holds in every cell, and where methods are best, as sentences with the numbers that decide."""
    lines = []
    ggn = [(cell, report) for cell, report in found.items() if cell.against == "ggn"]
    better = sum(value(r, "ekfac", "frobenius") <= value(r, "kfac", "frobenius") for _, r in ggn)
    closer = sum(value(r, "ekfac", "step_cosine") > value(r, "kfac", "step_cosine") for _, r in ggn)
    lines.append(
        f"EKFAC is at least as close as KFAC in the Frobenius norm in {better} of {len(ggn)} cells, as it has to be; its step is "
        f"closer to the exact one in {closer} of them."
    )
    for stage in STAGES:
        reports = [r for cell, r in ggn if cell.stage == stage]
        best = {m: statistics.fmean(value(r, m, "step_cosine") for r in reports) for m in METHODS}
        order = sorted(METHODS, key=lambda m: -best[m])
        ranked = ", ".join(f"{m} {best[m]:.2f}" for m in order)
        lines.append(f"Cosine of the step with the natural step, {stage}, mean over placements and seeds: {ranked}.")
    for method in ("kfac", "layer"):
        both = [statistics.fmean(value(r, method, "frobenius") for c, r in ggn if c.stage == stage) for stage in STAGES]
        lines.append(f"Frobenius error of {method}: {both[0]:.2f} at initialisation, {both[1]:.2f} after training.")
    for stage in STAGES:
        reports = [r for cell, r in ggn if cell.stage == stage]
        plain = statistics.fmean(value(r, "identity", "condition") for r in reports)
        left = {m: statistics.fmean(value(r, m, "condition") for r in reports) for m in METHODS}
        lower = ", ".join(f"{m} {left[m]:.0f}" for m in METHODS if left[m] < plain)
        higher = ", ".join(f"{m} {left[m]:.0f}" for m in METHODS if left[m] >= plain)
        lines.append(
            f"Condition number of the damped matrix, {stage}: {plain:.0f} without a preconditioner; lower with {lower}; not "
            f"lower with {higher}."
        )
    least = [report["least_eigenvalue"] / report["spectral_norm"] for cell, report in found.items() if cell.against == "hessian"]
    lines.append(
        f"The trained Hessian is indefinite in {sum(x < -1e-10 for x in least)} of {len(least)} cells: its least eigenvalue is "
        f"{min(least):.2g} to {max(least):.2g} of its spectral norm, which the damping has to outweigh."
    )
    return lines


def tables(found: dict[Cell, dict[str, Any]], settings: Settings) -> str:
    """Return the findings and a table for each exact matrix and stage as Markdown."""
    texts = ["\n".join(f"- {line}" for line in findings(found, settings)), ""]
    for against, stage in (("ggn", STAGES[0]), ("ggn", STAGES[1]), ("hessian", STAGES[1])):
        name = "Gauss-Newton matrix" if against == "ggn" else "Hessian"
        for measure, words in PANELS:
            methods = CURVATURE if measure == "frobenius" else ("identity", *METHODS)
            rows = [
                [
                    m,
                    *(
                        shown(spread(of(found, placement=p, stage=stage, against=against), m, measure))
                        for p in settings.placements
                    ),
                ]
                for m in methods
            ]
            texts += [f"### {name}, {stage}: {words}\n", as_markdown(["approximation", *settings.placements], rows), ""]
    return "\n".join(texts)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Train and measure every cell, write the numbers, the tables and the findings, and draw the panels.

    ``quick`` takes two placements, two seeds, d_model 4 and ten steps of training.
    """
    settings = QUICK if quick else FULL
    found = measure_all(out, settings)
    for line in findings(found, settings):
        print(f"  {line}")
    rows = [
        {**asdict(cell), "approximation": method, **{m: value(report, method, m) for m in MEASURES}}
        for cell, report in found.items()
        for method in ("identity", *METHODS)
    ]
    text = put(out / f"{NAME}_tables.md", tables(found, settings).encode())
    about = {"environment": environment(*MACHINE), "settings": asdict(settings)}
    data = [{**asdict(cell), **report} for cell, report in found.items()]
    return [
        draw_panels(found, settings, out / f"{NAME}{suffix}"), write_rows(out / f"{NAME}.csv", rows),
        write_json(out / f"{NAME}.json", {**about, "cells": data}), text,
    ]  # fmt: skip
