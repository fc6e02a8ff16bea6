"""Table 1 of Closing the Curvature Gap: both its classifiers, their sizes, and their Hessians' diagonal blocks at initialisation.

The paper's first row (MNIST: patches of 4 x 4, d_model 16, d_ff 64, one block) is small enough for the whole Hessian. The second
(CIFAR-100: d_model 128, d_ff 512, eight blocks) is not: its matrix has the bytes that are printed below, and no figure of the
paper shows it. Here both rows on the same images, scikit-learn's digits in patches of 2 x 2: the eigenvalue of largest magnitude
of the Hessian's diagonal block of each kind of parameter, all blocks together, by Lanczos on products with the exact Hessian, to
1/100 of it; cross entropy, initial weights, two seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

import hessiankit as hk
from figures._digits import LOSS, MEASURED_BY, ImageSpec, scale_of_images
from figures._kit import METHOD_COLOURS, METHOD_MARKS, cached, heading, page, save, style, write_rows, write_verdicts
from figures._lanczos import extremes
from figures._verdicts import Verdict, in_every
from hessiankit.support.progress import progress_bar

NAME = Path(__file__).stem
CODE = (*MEASURED_BY, "figures/_lanczos.py", f"figures/{NAME}.py")
KINDS = {
    "W_Q": "$W_Q$", "W_K": "$W_K$", "W_V": "$W_V$", "norm_1.weight": r"$\gamma_1$", "norm_1.bias": r"$\beta_1$", "W_1": "$W_1$",
    "b_1": "$b_1$", "W_2": "$W_2$", "b_2": "$b_2$", "norm_2.weight": r"$\gamma_2$", "norm_2.bias": r"$\beta_2$",
}  # fmt: skip
"""Ends of the parameters' names, and their letters."""


@dataclass(frozen=True)
class Row:
    """A row of Table 1: the data set that the paper has, patch side, hidden and feed-forward width, blocks."""

    name: str
    patch: int
    d_model: int
    d_ff: int
    n_blocks: int

    def spec(self, seed: int) -> ImageSpec:
        """Return the classifier on digits."""
        return ImageSpec(d_model=self.d_model, d_ff=self.d_ff, n_blocks=self.n_blocks, seed=seed)


FULL = (Row("MNIST's sizes", 4, 16, 64, 1), Row("CIFAR-100's sizes", 4, 128, 512, 8))
QUICK = (Row("MNIST's sizes", 4, 4, 8, 1), Row("CIFAR-100's sizes", 4, 8, 16, 2))
SEEDS = (0, 1)
IMAGES = 4


def measure(row: Row, seed: int) -> dict[str, float]:
    """Return the spectral norm of the Hessian's diagonal block of each kind of parameter."""
    spec = row.spec(seed)
    model = spec.model()
    operator = hk.hessian_operator(model, *spec.data(count=IMAGES), loss=LOSS)
    groups = {
        kind: torch.cat([torch.arange(s.start, s.stop) for name, s in operator.slices.items() if name.endswith(f".{kind}")])
        for kind in KINDS
    }
    found = extremes(operator.__matmul__, operator.shape[0], groups, tol=1e-2, most=40, seed=seed)
    return {kind: abs(one.value) for kind, one in found.items()}


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Measure both rows and draw (about 2 minutes of one core); ``quick`` takes widths of 4 and 8."""
    rows = QUICK if quick else FULL
    norms: dict[str, list[dict[str, float]]] = {}
    with progress_bar() as tell:
        for k, row in enumerate(rows):
            for seed in SEEDS:
                tell(f"{row.name}, seed {seed}", len(SEEDS) * k + seed, len(SEEDS) * len(rows))
                norms.setdefault(row.name, []).append(
                    cached(out, NAME, [row, seed, IMAGES], partial(measure, row, seed), code=CODE)
                )
    parts = [
        in_every(
            f"{name}: the Values' block is larger than the Queries' and the Keys'",
            (one["W_V"] > max(one["W_Q"], one["W_K"]) for one in each),
            "; ".join(f"{one['W_V']:.2g} against {one['W_Q']:.2g}, {one['W_K']:.2g}" for one in each),
        )
        for name, each in norms.items()
    ]
    scale = " and ".join(scale_of_images(row.spec(0), len(SEEDS), 0, IMAGES) for row in rows)
    said = [Verdict("curvature-gap/fig3", "the Values' block is larger than the Queries' and the Keys'", scale, tuple(parts))]
    table: list[dict[str, Any]] = [
        {
            "row": row.name, "patch in print": row.patch, "hidden dim": row.d_model, "ff dim": row.d_ff, "blocks": row.n_blocks,
            "parameters on digits": size, "bytes of the dense Hessian": 8 * size**2,
        }
        for row in rows
        for size in [sum(p.numel() for p in row.spec(0).model().parameters())]
    ]  # fmt: skip
    lines = [
        {"row": name, "seed": seed, "parameter": kind, "spectral norm": value}
        for name, each in norms.items()
        for seed, one in zip(SEEDS, each, strict=True)
        for kind, value in one.items()
    ]
    with style():
        figure = page(8.2, 3.6)
        axes = figure.add_axes((0.09, 0.26, 0.89, 0.64))
        panel(axes, norms)
        heading(axes, "Diagonal blocks of the Hessian on digits, initial weights", "", r"$\|H_{WW}\|_2$, one mark per seed")
        for k, one in enumerate(table):
            shape = f"patch {one['patch in print']}, hidden {one['hidden dim']}, ff {one['ff dim']}, blocks {one['blocks']}"
            dense = f"dense Hessian {one['bytes of the dense Hessian'] / 1e9:,.1f} GB"
            text = f"{one['row']} ({shape}): on digits {one['parameters on digits']:,} parameters, {dense}"
            figure.text(0.09, 0.09 - 0.055 * k, text, fontsize=8, color=METHOD_COLOURS[k + 1])
        picture = save(figure, out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", table), write_rows(out / f"{NAME}_norms.csv", lines)]
    return [picture, *numbers, write_verdicts(out, NAME, said)]


def panel(axes: Axes, norms: dict[str, list[dict[str, float]]]) -> None:
    """Draw each seed's norms, a column a kind of parameter."""
    for k, (name, each) in enumerate(norms.items()):
        for j, one in enumerate(each):
            x = np.arange(len(KINDS)) + 0.2 * (k - 0.5) + 0.06 * (j - 0.5)
            look: Any = {"marker": METHOD_MARKS[k], "color": METHOD_COLOURS[k + 1], "markersize": 5}
            axes.plot(x, [one[kind] for kind in KINDS], linestyle="", label=name if j == 0 else None, **look)
    axes.set_yscale("log")
    axes.set_xticks(range(len(KINDS)), list(KINDS.values()))
    axes.legend(loc="lower right", ncols=2)
