"""Figure 5 of Closing the Curvature Gap: norms of the parameter blocks and of their Hessian blocks.

The paper: the classifier of Table 1's first row, one batch of 128 MNIST images, one bar a block, one run; the norm, the state of
training and the spread over seeds are not stated. Its text finds Keys and Values to have the largest norms and Hessians, where
the text of Figures 3 and 4 names the Values alone.

Here: the same model on scikit-learn's digits (16 tokens, not 49), cross entropy, the first 128 training images, at the initial
weights and after 1000 steps of AdamW, three seeds; the spectral norm as a filled mark and the Frobenius norm as a hollow one,
medians over the seeds with bars from the smallest to the largest. Left the parameters, right the diagonal blocks of the exact
Hessian. Biases that are 0 at first are left out there.

What came out, spectral norms, medians: inside the block W_2's Hessian is the largest at both points (2.5, then 25); after
training the Values' and W_1's come next (10 and 6.4), the Keys' lies far below (1.3; Queries 0.5). Over all parameters the
embedding's bias has the largest then (37). Of the parameters the gains are the longest vectors; W_1, Queries and Keys are the
largest matrices of the block after training (3.6, 3.5, 3.5), the Values the smallest (2.3). So the text's "Keys and Values" holds
of neither panel here, and "the Values" of Figures 3 and 4 only among the matrices of attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from figures._digits import MEASURED_BY, ImageSpec, block_norms, classifiers, scale_of_images, snapshots
from figures._kit import FAINT, METHOD_COLOURS, cached, heading, page, save, style, write_rows, write_verdicts
from figures._verdicts import Verdict, in_every
from hessiankit.curvature.plot_frame import short_labels
from hessiankit.support.progress import progress_bar

NAME = Path(__file__).stem
NORMS = ("parameter_spectral", "parameter_frobenius", "hessian_spectral", "hessian_frobenius")
Row: TypeAlias = dict[str, Any]
"""seed, step, block, and the four norms."""


def measure(out: Path, specs: Sequence[ImageSpec], *, steps: int, size: int) -> list[Row]:
    """Return a row for each seed, point (step 0 and the last) and parameter."""
    rows: list[Row] = []
    with progress_bar() as tell:
        for seed, one in enumerate(specs):
            batch = one.data(count=size)
            for step, model in snapshots(out, one, (0, steps)):
                tell(f"seed {seed}, step {step}", 2 * seed + (step > 0), 2 * len(specs))
                key = {"spec": one, "step": step, "size": size}
                make = partial(block_norms, model, batch)
                norms = cached(out, NAME, key, make, code=MEASURED_BY)
                rows += [
                    {"seed": seed, "step": step, "block": name, **dict(zip(NORMS, x, strict=True))} for name, x in norms.items()
                ]
    return rows


def of(rows: list[Row], step: int, block: str, norm: str) -> list[float]:
    """Return a norm of a block at a step, one number a seed."""
    return [row[norm] for row in rows if row["step"] == step and row["block"] == block]


def largest(rows: list[Row], step: int, norm: str, within: str = "") -> str:
    """Return the block with the largest median norm, among those whose name contains ``within``.

    >>> rows = [{"step": 0, "block": b, "n": x} for b, x in (("a.u", 1.0), ("a.v", 2.0), ("c", 9.0))]
    >>> largest(rows, 0, "n"), largest(rows, 0, "n", within="a.")
    ('c', 'a.v')
    """
    blocks = dict.fromkeys(row["block"] for row in rows if within in row["block"])
    return max(blocks, key=lambda block: statistics.median(of(rows, step, block, norm)))


def verdict(rows: list[Row], spec: ImageSpec, seeds: int, last: int, size: int) -> Verdict:
    """Return whether Keys and Values are the two largest of the transformer block, by spectral norm, at either point."""
    parts = []
    for kind, what in (("parameter", "parameters"), ("hessian", "Hessian blocks")):
        for step in (0, last):
            orders = [ranked(rows, seed, step, f"{kind}_spectral") for seed in range(seeds)]
            when = f"after {step} steps" if step else "at the initial weights"
            parts.append(
                in_every(
                    f"Keys and Values are the two largest {what} {when}",
                    ({"attention.W_K", "attention.W_V"} == set(one[:2]) for one in orders),
                    "largest " + " or ".join(dict.fromkeys(one[0] for one in orders))
                    + "; ranks of Keys and Values " + ", ".join(
                        f"{one.index('attention.W_K') + 1} and {one.index('attention.W_V') + 1}" for one in orders
                    ),
                )
            )  # fmt: skip
    words = "Keys and Values have the largest norms, of parameters and of Hessian blocks"
    return Verdict("curvature-gap/fig5", words, scale_of_images(spec, seeds, last, size), tuple(parts))


def ranked(rows: list[Row], seed: int, step: int, norm: str) -> list[str]:
    """Return the first block's parameters of one seed at one step, the largest first, without ``blocks.0.``.

    >>> rows = [{"seed": 0, "step": 0, "block": f"blocks.0.{b}", "n": x} for b, x in (("u", 1.0), ("v", 2.0))]
    >>> ranked(rows, 0, 0, "n")
    ['v', 'u']
    """
    own = [row for row in rows if (row["seed"], row["step"]) == (seed, step) and row["block"].startswith("blocks.0.")]
    return [row["block"].removeprefix("blocks.0.") for row in sorted(own, key=lambda row: -row[norm])]


def panel(axes: Axes, rows: list[Row], step: int, kind: str, names: list[str], labels: list[str]) -> None:
    """Draw the two norms of every block at one step; a block that is 0 has a 0 at the lower edge."""
    for shift, norm, face in ((-0.14, "spectral", METHOD_COLOURS[1]), (0.14, "frobenius", "white")):
        for i, name in enumerate(names):
            values = of(rows, step, name, f"{kind}_{norm}")
            colour = METHOD_COLOURS[1]
            if max(values) == 0:
                if norm == "spectral":
                    axes.text(i, 0.02, "0", transform=axes.get_xaxis_transform(), ha="center", fontsize=8, color=colour)
                continue
            axes.plot([i + shift] * 2, [min(values), max(values)], color=colour, linewidth=1.0)
            axes.plot(i + shift, statistics.median(values), "o", markersize=4, color=colour, markerfacecolor=face)
    for face, label in ((METHOD_COLOURS[1], "spectral norm, median"), ("white", "Frobenius norm, median")):
        axes.plot([], [], "o", markersize=4, color=METHOD_COLOURS[1], markerfacecolor=face, label=label)
    axes.plot([], [], color=METHOD_COLOURS[1], linewidth=1.0, label="smallest to largest seed")
    axes.set_xticks(range(len(names)), labels)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(LogLocator(10, subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize=7.5)
    axes.set_xlim(-0.6, len(names) - 0.4)
    inside = [i for i, name in enumerate(names) if name.startswith("blocks")]
    axes.axvspan(min(inside) - 0.5, max(inside) + 0.5, color="#f1f1f1", zorder=0, linewidth=0)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", images: str = "digits", run: Path | None = None) -> list[Path]:
    """Train three seeds 1000 steps and draw (about 2 minutes of CPU); ``quick`` takes two seeds, 60 steps, 762 parameters."""
    seeds, steps, size = (2, 60, 64) if quick else (3, 1000, 128)
    specs, (*_, steps) = classifiers("curvature-gap/mnist", (0, steps), images=images, quick=quick, run=run, seeds=seeds)
    spec, seeds = specs[0], len(specs)
    rows = measure(out, specs, steps=steps, size=size)
    names = list(dict.fromkeys(row["block"] for row in rows))
    labels = dict(zip(names, short_labels(names), strict=True))
    said = [verdict(rows, spec, seeds, steps, size)]
    with style():
        figure = page(10.0, 6.2)
        for k, step in enumerate((0, steps)):
            for j, (kind, shown) in enumerate((("parameter", "Parameters"), ("hessian", "Hessian blocks"))):
                axes = figure.add_subplot(2, 2, 2 * k + j + 1)
                panel(axes, rows, step, kind, names, list(labels.values()))
                when = f"after {step} steps" if step else "initial weights"
                best = labels[largest(rows, step, f"{kind}_spectral", "blocks")]
                heading(axes, f"{shown}, {when} (largest in the block: {best})", "", r"$\|W\|$" if j == 0 else r"$\|H_{WW}\|$")
                if k == j == 0:
                    figure.legend(*axes.get_legend_handles_labels(), loc="lower right", ncols=3, bbox_to_anchor=(0.99, -0.005))
        foot = f"{seeds} seeds, {spec.shown(size)}; grey ground: the transformer block; 0: exactly zero in every seed"
        figure.text(0.012, 0.006, foot, fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.065, right=0.99, top=0.955, bottom=0.085, wspace=0.16, hspace=0.3)
        picture = save(figure, out / f"{NAME}{suffix}", said)
    return [picture, write_rows(out / f"{NAME}.csv", rows), write_verdicts(out, NAME, said)]
