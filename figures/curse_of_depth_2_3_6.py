"""Figures 2 (below), 3 and 6 of The Curse of Depth: angles between layers, and the damage of removing a block.

The paper measures d(x_l, x_{l+n}) = arccos(cos) / pi of the hidden states and what a benchmark loses without block l: in Pre-LN
models deep layers resemble their neighbours and can go, in Post-LN models they matter most, and with LayerNorm Scaling (LNS) they
contribute again (Figure 6: angles above 0.6 to the next layer). Its protocol cannot show the last: the authors' code stretches
each row of the heat map to [0, 1], so that 0.6 is no angle (a cosine below -0.3 would have every block reverse the stream); it
reads the last, possibly padded, token of three windows, takes the final norm's output for the last state, and renumbers LNS's
1 / sqrt(l) behind a removed block.

Here: twelve blocks of width 64 on the bytes of Python's standard library, 400 steps, two seeds
(``papers.experiments.catalogue``), 2048 held-out tokens. First row: the angles as they are, one colour scale, a mean over
tokens and seeds. Second row, the control: the same with each row stretched as the authors do. Third row: the rise of the loss
without one block, every factor of LNS staying with its block (crosses: renumbered); the angle to the next layer, and, dotted,
what it was before training.

What came out: Post-LN as the paper says, its deeper half takes 87 and 91 % of the damage. Pre-LN not: its deeper half takes 60
and 63 %, block 9 most of all, though its angles do shrink with depth (rank correlation -0.76 and -0.69). LNS is the contrary of
Figure 6: 66 and 78 % of the damage fall on block 1, 4 % on the deeper half, and the angle to the next layer falls from 0.30 to
0.013, as it did before training, since the factor 1 / sqrt(l) makes deep branches small. No angle to the next layer is above
0.30, where Figure 6 shows 0.6; stretching the rows makes 1 of any largest angle. At 400 steps LNS also has the largest loss
(2.28; Pre-LN 2.11 and 2.15, Post-LN 2.11 and 2.12, on these windows); in the paper LNS overtakes Pre-LN after thousands of steps
(Figure 5), which this budget does not reach. Renumbering changes the damage by at most 0.02.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter
from scipy.stats import spearmanr
from torch import Tensor

from figures._kit import FAINT, cached, each, heading, page, save, style, write_rows, write_verdicts
from figures._trained import CURSE_COLOURS, CURSE_MARKS, PRINTED_STEPS, Arms, arms, seeds_of, spec_of
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.blocks import Transformer, TransformerBlock
from hessiankit.curvature.plot_frame import Picture
from hessiankit.support.progress import progress_bar
from hessiankit.training.depth import AngularDistances, depth_diagnostics
from hessiankit.training.sharpness.batches import BatchedLoss, micro_batches
from papers.experiments.runs import Run
from papers.experiments.spec import Spec, model_of, scale_of
from papers.experiments.tokens import data_of

NAME = Path(__file__).stem
METHODS = ("Post-LN", "Pre-LN", "LNS")
TICKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
WINDOWS = 32
"""Held-out sequences that are measured on."""


@dataclass(frozen=True)
class Measured:
    """One trained model; L blocks.

    Attributes:
        method: Its method.
        seed: Its seed.
        angles: Angular distances of all pairs of states, (L + 1, L + 1).
        before: The same of the untrained model.
        drop: Rise of the loss without block l, (L,).
        accuracy: Change of the accuracy, (L,).
        renumbered: Rise of the loss where later blocks take over the factors of the layers before.
    """

    method: str
    seed: int
    angles: np.ndarray
    before: np.ndarray
    drop: np.ndarray
    accuracy: np.ndarray
    renumbered: np.ndarray


def measure(runs: Arms, out: Path) -> list[Measured]:
    """Measure what is not kept in ``out/cache``."""
    found = []
    for method, own in runs.items():
        for run in own:
            key = [run.folder.name, run.losses[-1], WINDOWS]
            answer = cached(out, NAME, key, partial(diagnose, run), code=("hessiankit/training/depth",))
            found.append(Measured(method, run.spec.seed, **{name: np.array(x) for name, x in answer.items()}))
    return found


def diagnose(run: Run) -> dict[str, Any]:
    """Return what a :class:`Measured` holds of a run."""
    inputs, targets = data_of(run.spec)[1].windows(run.spec.length, WINDOWS)
    model = run.model()
    with progress_bar() as tell:
        after = depth_diagnostics(model, inputs, targets, what=("angles", "drop"), progress=tell)
        before = depth_diagnostics(model_of(run.spec), inputs, targets, what="angles", progress=tell)
    assert after.drop is not None
    assert after.angles is not None
    assert before.angles is not None
    is_scaled = run.spec.placement == "lns"
    again = renumbered(model, inputs, targets, after.drop.loss) if is_scaled else after.drop.loss_change
    return {
        "angles": after.angles.all, "before": before.angles.all, "drop": after.drop.loss_change,
        "accuracy": after.drop.accuracy_change, "renumbered": again,
    }  # fmt: skip


def renumbered(model: Transformer, inputs: Tensor, targets: Tensor, loss: float) -> tuple[float, ...]:
    """Return the rise of the loss of a model with LayerNorm Scaling without each block, where later blocks move up."""
    rises = []
    for k in range(len(model.blocks)):
        shorter = copy.deepcopy(model).eval()
        del shorter.blocks[k]
        for layer, block in enumerate(shorter.blocks, start=1):
            assert isinstance(block, TransformerBlock)
            assert block.own_placement.factor is not None
            block.factor = block.own_placement.factor(layer, len(shorter.blocks))
        batches = tuple(micro_batches(NAME, shorter, inputs, targets))
        rises.append(BatchedLoss(NAME, shorter, batches).evaluate()[0] - loss)
    return tuple(rises)


def next_layer(angles: np.ndarray) -> np.ndarray:
    """Return d(x_l, x_{l+1}), (L,).

    >>> next_layer(np.array([[0.0, 0.1, 0.3], [0.1, 0.0, 0.2], [0.3, 0.2, 0.0]])).tolist()
    [0.1, 0.2]
    """
    return np.diagonal(angles, 1).copy()


def rank_correlation(values: np.ndarray) -> float:
    """Return Spearman's correlation of a quantity by block with the block's number.

    >>> rank_correlation(np.array([3.0, 2.0, 1.0]))
    -1.0
    """
    return round(float(spearmanr(np.arange(len(values)), values).statistic), 12)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train six models (about 4 minutes of one core, less if other figures trained some before), draw, and write the numbers.

    ``quick`` takes four blocks of width 16 and 30 steps: seconds.
    """
    runs = arms("curse-of-depth/fig3", out, quick=quick, run=run, text=text)
    size, found = spec_of(runs), measure(runs, out)
    by_block = [
        {
            "method": one.method, "seed": one.seed, "block": k + 1, "loss rise without it": one.drop[k],
            "accuracy change": one.accuracy[k], "loss rise, renumbered": one.renumbered[k],
            "angle to the next layer": next_layer(one.angles)[k], "before training": next_layer(one.before)[k],
        }
        for one in found
        for k in range(size.layers)
    ]  # fmt: skip
    by_pair = [
        {"method": method, "l": layer + 1, "n": n + 1, "angular distance": raw[n, layer], "row rescaled": rescaled[n, layer]}
        for method in METHODS
        for raw, rescaled in [maps(found, method)]
        for n in range(size.layers)
        for layer in range(size.layers - n)
    ]
    said = verdicts(found, size, len(seeds_of(runs)))
    with style():
        drawn = save(picture(found, size), out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", by_block), write_rows(out / f"{NAME}_angles.csv", by_pair)]
    return [drawn, *numbers, write_verdicts(out, NAME, said)]


def verdicts(found: Sequence[Measured], size: Spec, seeds: int) -> list[Verdict]:
    """Return what the runs show of Figures 3 and 6: one outcome a seed."""
    scale = scale_of(size, seeds)
    fig3 = []
    for method, direction, sign in (("Pre-LN", "falls", -1), ("Post-LN", "rises", 1)):
        runs = [one for one in found if one.method == method]
        for what, values in (("damage", [one.drop for one in runs]), ("angle", [next_layer(one.angles) for one in runs])):
            r = [rank_correlation(one) for one in values]
            criterion = f"{method}'s {what} {direction} with depth in every seed"
            fig3.append(in_every(criterion, (sign * x > 0 for x in r), f"rank correlation {each(r)}"))
    shares = {
        method: [(one.drop.max() / one.drop.sum(), deeper(one.drop)) for one in found if one.method == method]
        for method in ("LNS", "Pre-LN")
    }
    fig6 = []
    for k, (criterion, sign) in enumerate(
        (
            ("LNS's worst block takes a smaller share of the damage than Pre-LN's", -1),
            ("LNS's deeper half takes a larger share than Pre-LN's", 1),
        )
    ):
        lns, pre = ([shares_of[k] for shares_of in shares[method]] for method in ("LNS", "Pre-LN"))
        outcomes = (sign * (a - b) > 0 for a, b in zip(lns, pre, strict=True))
        missing = unreached(steps=(size.steps, PRINTED_STEPS))
        fig6.append(in_every(criterion, outcomes, f"{each(lns)} against {each(pre)}", missing))
    return [
        Verdict(
            "curse-of-depth/fig3", "angle and damage fall with depth with Pre-LN and rise with Post-LN", scale, tuple(fig3)
        ),
        Verdict("curse-of-depth/fig6", "with LNS the damage is more uniform, and deep blocks matter more", scale, tuple(fig6)),
    ]  # fmt: skip


def deeper(drop: np.ndarray) -> float:
    """Return the share of the damage that the deeper half of the blocks takes.

    >>> deeper(np.array([1.0, 0.0, 2.0, 1.0]))
    0.75
    """
    return float(drop[len(drop) // 2 :].sum() / drop.sum())


def maps(found: Sequence[Measured], method: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a method's heat maps (row n - 1, column l - 1), NaN where there is no pair: as they are, and with rescaled rows."""
    mean = torch.tensor(np.mean([one.angles for one in found if one.method == method], axis=0))
    distances = AngularDistances(mean, mean)
    raw = distances.by_distance().numpy()
    return raw, rescaled(raw)


def rescaled(distances: np.ndarray) -> np.ndarray:
    """Return each row clipped to its percentiles 1 and 99 and rescaled to [0, 1], as the authors' code draws it.

    Rows are then no angles, and cannot be compared. A constant row becomes 0.

    >>> rescaled(np.array([[0.1, 0.3], [0.2, np.nan]])).round(12).tolist()
    [[0.0, 1.0], [0.0, nan]]
    """
    out = distances.copy()
    for row in out:
        known = row[np.isfinite(row)]
        low, high = np.percentile(known, [1, 99])
        row[np.isfinite(row)] = (known.clip(low, high) - low) / (high - low) if high > low else 0.0
    return out


def picture(found: Sequence[Measured], size: Spec) -> Picture:
    """Draw the angles as they are and rescaled, and under them damage and angle by block."""
    drawn = {method: maps(found, method) for method in METHODS}
    highest = max(float(np.nanmax(raw)) for raw, _ in drawn.values())
    with style():
        figure = page(7.6, 7.4)
        title = "Angles between layers, and the damage of removing one (The Curse of Depth, Figures 2, 3, 6)"
        figure.text(0.075, 0.975, title, fontsize=10)
        grid = figure.add_gridspec(2, 3, left=0.075, right=0.89, top=0.925, bottom=0.41, hspace=0.36, wspace=0.2)
        for k, method in enumerate(METHODS):
            for row, (top, name) in enumerate(((highest, method), (1.0, f"{method}, each row rescaled"))):
                axes = figure.add_subplot(grid[row, k])
                shown = heat_map(axes, drawn[method][row], top, name, first=k == 0, size=size)
                if k == len(METHODS) - 1:
                    label = ("angular distance $d(x_l, x_{l+n})$", "each row rescaled to 0 to 1")[row]
                    bar = figure.colorbar(shown, cax=axes.inset_axes((1.06, 0, 0.06, 1)))
                    bar.set_label(label, fontsize=7.5)
                    bar.ax.tick_params(labelsize=7, length=2)
        below = figure.add_gridspec(1, 2, left=0.075, right=0.89, top=0.295, bottom=0.06, wspace=0.24)
        left, right = (figure.add_subplot(below[0, k]) for k in range(2))
        heading(left, "Without one block (linear below 0.01)", "block removed", "rise of the loss (nats per token)")
        heading(right, "Angle to the next layer", "layer $l$", "$d(x_l, x_{l+1})$")
        for method in METHODS:
            runs = [one for one in found if one.method == method]
            _lines(left, [one.drop for one in runs], method)
            _lines(right, [next_layer(one.angles) for one in runs], method)
            _dots(right, [next_layer(one.before) for one in runs], method)
        renumbered = np.mean([one.renumbered for one in found if one.method == "LNS"], axis=0)
        marks = np.arange(1, size.layers + 1)
        left.plot(marks, renumbered, "x", color=CURSE_COLOURS["LNS"], markersize=5, label="LNS, renumbered")
        left.axhline(0, color=FAINT, linewidth=0.6)
        left.set_yscale("symlog", linthresh=0.01, linscale=0.4)
        left.yaxis.set_major_locator(FixedLocator([0.0, *(sign * x for sign in (-1, 1) for x in TICKS)]))
        left.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        right.set_ylim(bottom=0)
        left.plot([], [], ":", color=FAINT, linewidth=1.0, label="before training")
        handles, _ = left.get_legend_handles_labels()
        figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.4825, 0.36), ncols=len(handles))
    return figure


def heat_map(axes: Axes, values: np.ndarray, highest: float, title: str, *, first: bool, size: Spec) -> Any:
    """Draw n upwards and l to the right, yellow small and purple large as in the paper."""
    heading(axes, title, "layer $l$", "distance $n$" if first else "")
    axes.grid(False)
    extent = (0.5, size.layers + 0.5, 0.5, size.layers + 0.5)
    shown = axes.imshow(
        values, cmap=mpl.colormaps["viridis_r"], origin="lower", aspect="auto", extent=extent, vmin=0.0, vmax=highest
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
    return shown


def _lines(axes: Axes, values: Sequence[np.ndarray], method: str) -> None:
    """The mean of the seeds with its marks, and each seed as a thin line."""
    layers = np.arange(1, len(values[0]) + 1)
    for one in values:
        axes.plot(layers, one, color=CURSE_COLOURS[method], linewidth=0.5)
    axes.plot(layers, np.mean(values, axis=0), color=CURSE_COLOURS[method], marker=CURSE_MARKS[method], label=method)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))


def _dots(axes: Axes, values: Sequence[np.ndarray], method: str) -> None:
    layers = np.arange(1, len(values[0]) + 1)
    axes.plot(layers, np.mean(values, axis=0), color=CURSE_COLOURS[method], linestyle=":", linewidth=1.0)
