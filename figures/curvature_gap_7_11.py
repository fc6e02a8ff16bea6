"""Figures 7 to 11 of Closing the Curvature Gap: entries, norms and Hessians of the blocks over the first 1000 steps.

The paper (App. A.1): for Queries, Keys, Values, LayerNorm and FeedForward of the classifier of Table 1's first row, their
entries, norm and Hessian over the first 1000 training steps; optimiser, norm and batch are not stated. Figure 10 follows gamma
and beta, which the paper's theory fixes at 1 and 0.

Here: the same model on scikit-learn's digits (AdamW, 3e-3), the norm and 12 evenly chosen entries every 20 steps, the exact
Hessian of one fixed batch of 128 images every 100. One row a figure: left entries, middle spectral norms (of a vector: its
length), right the norms of the diagonal blocks of the Hessian.

What came out: most of what moves does so in the first 200 steps. Norms of the weights grow by 1.3 to 2.2 times, that of gamma_1
hardly. The Hessian's blocks of Queries, Keys, Values, W_1, W_2 and the first norm grow by one to two orders of magnitude (Keys
from 0.006 to 0.8, Values from 0.37 to 13 at step 200 and 6.5 at last, W_2 from 2 to 19), those of the last norm shrink (gamma_2
from 0.18 to 0.02). At last the Values' is 8 times the Keys' and 29 times the Queries', and W_2's 3 times the Values'.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from figures._digits import MEASURED_BY, ImageSpec, block_norms, classifiers, scale_of_images, snapshots
from figures._kit import FAINT, METHOD_COLOURS, METHOD_MARKS, cached, heading, page, save, style, write_rows, write_verdicts
from figures._verdicts import Verdict, in_every
from hessiankit.curvature.plot_frame import short_labels
from hessiankit.support.progress import progress_bar

NAME = Path(__file__).stem
ENTRIES = 12
"""Entries drawn of each figure's parameters."""
FIGURES = {
    "7: Queries": ("attention.W_Q",),
    "8: Keys": ("attention.W_K",),
    "9: Values": ("attention.W_V",),
    "10: LayerNorm": ("norm_1.weight", "norm_1.bias", "norm_2.weight", "norm_2.bias"),
    "11: FeedForward": ("feedforward.W_1", "feedforward.W_2"),
}
"""The paper's number and name -> the parameters of the first block."""
Row: TypeAlias = dict[str, Any]


def measure(out: Path, spec: ImageSpec, steps: Sequence[int], curved: Sequence[int], size: int) -> tuple[list[Row], list[Row]]:
    """Return the rows of norms (the Hessian's are None but at some steps) and the rows of entries."""
    batch = spec.data(count=size)
    wanted = [f"blocks.0.{name}" for names in FIGURES.values() for name in names]
    norms: list[Row] = []
    entries: list[Row] = []
    with progress_bar() as tell:
        for step, model in snapshots(out, spec, steps):
            tell(f"step {step}", step, steps[-1])
            curvature: dict[str, list[float]] = {}
            if step in curved:
                key = {"spec": spec, "step": step, "size": size}
                make = partial(block_norms, model, batch, wanted)
                curvature = cached(out, NAME, key, make, code=MEASURED_BY)
            parameters = dict(model.named_parameters())
            for name in wanted:
                W = parameters[name].detach()
                own = float(torch.linalg.matrix_norm(W, 2)) if W.ndim == 2 else float(W.norm())
                spectral, frobenius = curvature[name][2:] if curvature else (None, None)
                row = {"step": step, "block": name, "spectral": own, "frobenius": float(W.norm())}
                norms.append({**row, "hessian_spectral": spectral, "hessian_frobenius": frobenius})
                chosen = np.linspace(0, W.numel() - 1, ENTRIES).astype(int)
                entries += [
                    {"step": step, "block": name, "index": int(i), "entry": float(W.reshape(-1)[i])}
                    for i in dict.fromkeys(chosen)
                ]
    return norms, entries


def series(rows: list[Row], block: str, what: str) -> tuple[list[int], list[float]]:
    """Return the steps at which a number of a block is there, and the numbers.

    >>> series([{"step": 0, "block": "a", "n": 2.0}, {"step": 1, "block": "a", "n": None}], "a", "n")
    ([0], [2.0])
    """
    found = [(row["step"], row[what]) for row in rows if row["block"] == block and row[what] is not None]
    return [step for step, _ in found], [value for _, value in found]


def row_of(axes: tuple[Axes, Axes, Axes], title: str, names: list[str], norms: list[Row], entries: list[Row]) -> None:
    """Draw one of the paper's figures."""
    letters = short_labels(names)
    for k, (name, letter) in enumerate(zip(names, letters, strict=True)):
        colour, mark = METHOD_COLOURS[k + 1], METHOD_MARKS[k]
        own = [row for row in entries if row["block"] == name]
        for index in dict.fromkeys(row["index"] for row in own):
            line = [(row["step"], row["entry"]) for row in own if row["index"] == index]
            axes[0].plot(*zip(*line, strict=True), color=colour, linewidth=0.6)
        axes[1].plot(*series(norms, name, "spectral"), color=colour, label=letter, marker=mark, markevery=10)
        axes[2].plot(*series(norms, name, "hessian_spectral"), color=colour, marker=mark, label=letter)
        axes[2].plot(*series(norms, name, "hessian_frobenius"), color=colour, linestyle="--", linewidth=0.9)
    heading(axes[0], f"Figure {title}", "", f"{ENTRIES} entries")
    heading(axes[1], "", "", r"$\|W\|_2$")
    heading(axes[2], "", "", r"$\|H_{WW}\|$")
    axes[2].set_yscale("log")
    axes[2].yaxis.set_minor_locator(LogLocator(10, subs=(2, 5)))
    axes[2].yaxis.set_major_formatter("{x:g}")
    axes[2].yaxis.set_minor_formatter("{x:g}")
    axes[2].tick_params(which="minor", labelsize=7.5)
    axes[2].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.5)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", images: str = "digits", run: Path | None = None) -> list[Path]:
    """Train 1000 steps, eleven Hessians, draw (about 100 s of CPU); ``quick`` takes 762 parameters, 100 steps, six Hessians."""
    steps, every, hessian_every, size = (100, 10, 20, 32) if quick else (1000, 20, 100, 128)
    (spec, *_), wanted = classifiers("curvature-gap/mnist", range(0, steps + 1, every), images=images, quick=quick, run=run)
    steps = wanted[-1]
    curved = wanted if run else wanted[:: hessian_every // every]
    norms, entries = measure(out, spec, wanted, curved, size)
    with style():
        figure = page(7.8, 7.4)
        for k, (title, names) in enumerate(FIGURES.items()):
            axes = [figure.add_subplot(5, 3, 3 * k + j + 1) for j in range(3)]
            row_of((axes[0], axes[1], axes[2]), title, [f"blocks.0.{name}" for name in names], norms, entries)
            for one in axes:
                one.set_xlim(0, steps)
                if k == len(FIGURES) - 1:
                    one.set_xlabel("step", fontsize=8, labelpad=1)
                else:
                    one.tick_params(labelbottom=False)
        foot = f"left: {ENTRIES} entries of each parameter, evenly spaced from the first to the last of vec_r"
        figure.text(0.012, 0.018, foot, fontsize=7.5, color=FAINT)
        foot = f"right: diagonal blocks of the Hessian on {spec.shown(size)}; solid: spectral norm, dashed: Frobenius norm"
        figure.text(0.012, 0.003, foot, fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.075, right=0.93, top=0.97, bottom=0.09, wspace=0.36, hspace=0.3)
        said = [verdict(norms, spec, steps, size)]
        picture = save(figure, out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", norms), write_rows(out / f"{NAME}_entries.csv", entries)]
    return [picture, *numbers, write_verdicts(out, NAME, said)]


def verdict(norms: list[Row], spec: ImageSpec, steps: int, size: int) -> Verdict:
    """Return what the run shows of the text of Figures 4 and 5, over training: the Values' Hessian block is the largest."""
    last = {row["block"]: row["hessian_spectral"] for row in norms if row["step"] == steps}
    first = {row["block"]: row["hessian_spectral"] for row in norms if row["step"] == 0}
    order = sorted(last, key=lambda name: -last[name])
    values = next(name for name in last if name.endswith("W_V"))
    seen = ", ".join(f"{name.rpartition('.')[2]} {last[name]:.2g}" for name in order[:3])
    grown = [name.removeprefix("blocks.0.") for name in last if last[name] <= first[name]]
    return Verdict(
        "curvature-gap/fig4",
        "over training every Hessian block grows, the Values' to be the largest",
        scale_of_images(spec, 1, steps, size),
        (
            in_every("the Values have the largest Hessian block at the end (text of Figure 4)", [order[0] == values], seen),
            in_every("every Hessian block grows (text of Figure 4)", [not grown], f"smaller: {', '.join(grown) or 'none'}"),
        ),
    )
