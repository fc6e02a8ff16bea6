"""Analytic minus empirical Hessian, entry by entry, beside the Hessian itself, and a popular route that is wrong.

Ours. The classifier of Closing the Curvature Gap's Table 1 (scikit-learn's digits, one post-norm block with gains and biases in
its norms), cross entropy, initial weights, float64. Left |H| from the closed forms (``hessiankit.hessian``). Middle its distance
from the empirical Hessian by reverse over reverse, ``torch.autograd.grad`` twice, which shares no code with it; right the
distance from jacfwd(jacrev), which is what ``torch.func.hessian`` runs, here in chunks of columns. Each difference is relative to
the largest entry of its block; a block that is 0 to rounding is measured against the largest entry of all. Central differences of
the gradient judge between the three; gelu stands in place of the paper's relu, across whose kinks such differences jump.

What came out (3466 parameters, 32 images): closed forms and reverse over reverse agree to 7e-15 of each block's largest entry.
The other route is off by up to 0.30 in 18 of 256 blocks: the rows of each gain gamma against every parameter before its norm, in
one triangle only, so that its matrix is not symmetric. Central differences side with the first two (2e-13; the third is off by
3e-2 of the largest entry of all).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from torch import Tensor

import hessiankit
from figures._digits import LOSS, ImageSpec
from figures._kit import FAINT, METHOD_COLOURS, heading, page, save, style, write_json, write_rows
from hessiankit.curvature.plot_frame import ZERO, pooled, short_labels
from hessiankit.verify import REFERENCES, Problem

NAME = Path(__file__).stem
FLOOR = 1e-12
"""A block below this part of the largest entry is 0 to rounding."""
PIXELS = 144
"""Of a map: nine a block, which keeps the file small."""


def relative(difference: Tensor, H: Tensor, slices: dict[str, slice]) -> Tensor:
    """Return |difference| over the largest |entry| of each block of H.

    >>> H = torch.tensor([[4.0, 0.0], [0.0, 2.0]])
    >>> relative(torch.ones(2, 2), H, {"a": slice(0, 1), "b": slice(1, 2)}).tolist()
    [[0.25, 0.25], [0.25, 0.5]]
    """
    found, top = difference.abs().clone(), float(H.abs().max())
    for rows in slices.values():
        for columns in slices.values():
            largest = float(H[rows, columns].abs().max())
            found[rows, columns] /= largest if largest > FLOOR * top else top
    return found


def panel(
    axes: Axes, values: Tensor, slices: dict[str, slice], labels: list[str], norm: LogNorm, colours: str, unit: str
) -> None:
    """Draw entries by block, all blocks equally large; a pixel shows the largest entry that it covers, grey is 0."""
    sizes = [s.stop - s.start for s in slices.values()]
    cell = PIXELS // len(sizes)
    image = pooled(values.numpy(), sizes, cell)
    edges = cell * np.arange(len(sizes) + 1)
    shown = axes.imshow(
        np.ma.masked_less_equal(image, 0.0),
        norm=norm,
        cmap=mpl.colormaps[colours].resampled(18).with_extremes(bad=ZERO),
        interpolation="nearest",
    )
    for edge in edges[1:-1] - 0.5:
        axes.axhline(edge, color="white", linewidth=0.4)
        axes.axvline(edge, color="white", linewidth=0.4)
    centres = (edges[1:] + edges[:-1]) / 2 - 0.5
    axes.set_xticks(centres, labels, rotation=90)
    axes.set_yticks(centres, labels)
    axes.tick_params(length=0, pad=2)
    bar = axes.figure.colorbar(shown, ax=axes, fraction=0.046, pad=0.03)
    bar.ax.tick_params(labelsize=7.5)
    bar.set_label(unit, fontsize=8)


def judge(axes: Axes, differences: dict[str, float], columns: int) -> None:
    """Draw how far each Hessian is from central differences."""
    axes.plot(list(differences.values()), range(len(differences)), "o", color=METHOD_COLOURS[0], clip_on=False)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.set_ylim(len(differences) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(1e-15, 10.0)
    for k, value in enumerate(differences.values()):
        axes.annotate(f"{value:.1e}", (value, k), (0, 7), textcoords="offset points", ha="center", fontsize=7.5)
    heading(axes, f"Against central differences, {columns} columns", "largest difference / largest $|H|$")


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", images: str = "digits") -> list[Path]:
    """Compute the Hessian in all ways and draw (about 40 s of CPU); ``quick`` takes 762 parameters and 8 images."""
    spec, size = replace(ImageSpec.of(images, quick=quick), activation="gelu"), 8 if quick else 32
    tokens, targets = spec.data(count=size)
    model = spec.model()
    hessian = hessiankit.hessian(model, tokens, targets, loss=LOSS)
    H, slices = hessian.matrix, hessian.slices
    problem = Problem(model, tokens, targets, LOSS)
    empirical, warned = (REFERENCES[name].measure(problem).value for name in ("reverse-over-reverse", "torch.func.hessian"))
    columns = [s.start + (s.stop - s.start) // 2 for s in slices.values()]
    measured = REFERENCES["central-differences"].products(problem, torch.eye(len(H), dtype=H.dtype)[columns]).T
    errors = {"reverse over reverse": relative(H - empirical, H, slices), "jacfwd(jacrev)": relative(H - warned, H, slices)}
    top = float(H.abs().max())
    differences = {
        name: float((matrix[:, columns] - measured).abs().max()) / top
        for name, matrix in (("closed forms", H), ("reverse over reverse", empirical), ("jacfwd(jacrev)", warned))
    }
    labels = short_labels(list(slices))
    with style(**{"axes.spines.top": True, "axes.spines.right": True}):
        figure = page(8.4, 7.8)
        scale = LogNorm(1e-18, 1.0)
        axes = [
            figure.add_axes(place) for place in ((0.05, 0.575, 0.36, 0.385), (0.56, 0.575, 0.36, 0.385), (0.05, 0.1, 0.36, 0.385))
        ]
        panel(axes[0], H, slices, labels, LogNorm(1e-8 * top, top), "viridis", "$|H_{ij}|$")
        axes[0].set_title("Hessian by closed forms", fontsize=9)
        for one, (name, error) in zip(axes[1:], errors.items(), strict=True):
            panel(one, error, slices, labels, scale, "cividis", "difference / largest of the block")
            one.set_title(f"Closed forms minus {name}: at most {float(error.max()):.1e}", fontsize=9)
        judge(figure.add_axes((0.68, 0.14, 0.29, 0.28)), differences, len(columns))
        foot = (
            f"{len(H)} parameters, {spec.shown(size)}, float64; blocks drawn equally large; "
            "a pixel is the largest of the entries that it covers; grey: exactly 0"
        )
        figure.text(0.012, 0.012, foot, fontsize=7.5, color=FAINT)
        picture = save(figure, out / f"{NAME}{suffix}")
    rows: list[dict[str, Any]] = [
        {
            "row": i, "column": j, "largest_entry": float(H[slices[i], slices[j]].abs().max()),
            **{name: float(error[slices[i], slices[j]].max()) for name, error in errors.items()},
        }
        for i in slices for j in slices
    ]  # fmt: skip
    worst = {name: float(error.max()) for name, error in errors.items()}
    asymmetry = float((warned - warned.T).abs().max()) / top
    wrong = sum(row["jacfwd(jacrev)"] > 1e-10 for row in rows)
    print(f"  largest difference {worst}; wrong blocks of jacfwd(jacrev): {wrong} of {len(rows)}; its asymmetry {asymmetry:.2g}")
    summary = {
        "parameters": len(H), "images": size, "largest_relative_difference": worst, "wrong_blocks": wrong, "blocks": len(rows),
        "asymmetry_of_jacfwd_jacrev": asymmetry, "against_central_differences": differences,
    }  # fmt: skip
    return [picture, write_rows(out / f"{NAME}.csv", rows), write_json(out / f"{NAME}.json", summary)]
