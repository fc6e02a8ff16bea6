"""Figures 3 and 8 of The Sharpness Disparity Principle: sharpness by block type over training, and norms of the parameters.

The paper follows S of GPT-2 small and LLaMA 0.25B over 50 000 steps on OpenWebText (Figure 3): the order Emb << QK < FFN < VO
<< Norm is there after 2 % of the steps and stays. Figure 8 has the norms of the network's and attention's matrices, of the
centred embedding rows, and of the norms' gains gamma, to support its Theorems 4.1 to 4.3: these bound the gradients by Psi /
||W|| and Psi / ||gamma|| with one Psi, so that with d_ff D entries of W and D of gamma the bounds have the quotient

    S(gamma) / S(W) = d_ff ||W||^2 / ||gamma||^2        (Theorem 4.1 with exact counts, claim sharpness-disparity/thm4.1-s-w).

Bounds need not be in the quotient of what they bound, and the theorem is for ReLU, not for the GELU and SwiGLU that are
trained. So the last column of Figure 8 here, which the paper does not have, puts that quotient beside the measured one, for the
gain before each network.

Here: the two runs of ``sharpness_disparity_1_2_9``, 1000 steps of byte-level models with d_model 64, measured at steps 0, 1, 2,
5, 10, ... and every 100 with 8 label draws; bands are 95 % intervals of the label draws. Norms are means over the layers, bands
their range; those of embedding rows are of the bytes that occur in the training text.

What came out: the printed order at none of the 17 checkpoints of either model. Step by step, GPT-2-like and LLaMA-like: Emb <
QK at 0 and 0, QK < FFN at 8 and 16, FFN < VO at 14 and 17, VO < Norm at 0 and 0 of 17. At a learning rate of 4e-3 and one seed.
The quotient of the bounds rises with the measured one, and is 30 to 63 times as large at the end.

``--quick`` takes 60 steps of smaller models. Full: about 3 minutes of one core, all of them the two training runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from figures._kit import DASHES, METHOD_MARKS, TYPE_COLOURS, each, heading, page, save, style, write_rows, write_verdicts
from figures._order import PRINTED, agreements, diluted, order_by_values, scale_of_both
from figures._trained import models
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.curvature.plot_frame import dress
from hessiankit.training.monitoring import MonitorLog
from hessiankit.training.monitoring import log as panels
from papers.experiments.runs import Run
from papers.experiments.spec import Spec
from papers.experiments.tokens import data_of

NAME = Path(__file__).stem
STEP = "step (log scale from 1)"
NETWORK = {"W_1": "feedforward.W_1", "W_2": "feedforward.W_2", "W_G": "feedforward.W_G"}
ATTENTION = {"W_Q": "attention.W_Q", "W_K": "attention.W_K", "W_V": "attention.W_V", "W_O": "attention.W_O"}
LETTERS = {
    "W_1": ("$W_1$", "#009e73"), "W_2": ("$W_2$", "#56b4e9"), "W_G": ("$W_G$", "#cc79a7"), "W_Q": ("$W_Q$", "#e69f00"),
    "W_K": ("$W_K$", "#56b4e9"), "W_V": ("$W_V$", "#d55e00"), "W_O": ("$W_O$", "#cc79a7"), "gamma": (r"$\gamma$", "#000000"),
    "median row": (r"median $\|\tilde w_i\|$", "#0072b2"), "smallest row": (r"min $\|\tilde w_i\|$", "#56b4e9"),
}  # fmt: skip

Lines = dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]
"""Panel -> line -> (steps, (steps, 3) of mean, lowest and highest)."""

UNDER = ("W_1", "W_Q", "W_V", "median row")
"""Drawn as wide, pale lines, since another line may lie on them."""
MARKS = dict(zip(LETTERS, (*METHOD_MARKS, "<", ">"), strict=True))


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train or read the two runs, draw S and the norms over the steps, and write the numbers."""
    both = models("sharpness-disparity/fig3", out, quick=quick, run=run, text=text)
    runs = {title: one["AdamW"][0] for title, one in both.items()}
    logs = {title: run.log for title, run in runs.items() if run.log is not None}
    numbers = {title: norms(runs[title], log) for title, log in logs.items()}
    quotients = {title: quotient_of_bounds(runs[title].spec, log) for title, log in logs.items()}
    files = [
        write_rows(out / f"{NAME}_sharpness.csv", _sharpness_rows(logs)),
        write_rows(out / f"{NAME}_norms.csv", _norm_rows(numbers)),
        write_rows(out / f"{NAME}_quotients.csv", _quotient_rows(quotients)),
    ]
    specs = {title: run.spec for title, run in runs.items()}
    said = [verdict_of_orders(logs, specs), verdict_of_norms(numbers, specs)]
    with style():
        files.append(_draw_sharpness(logs, runs, out / f"{NAME}_sharpness{suffix}", said[:1]))
        files.append(_draw_norms(numbers, quotients, out / f"{NAME}_norms{suffix}", said[1:]))
    return [*files, write_verdicts(out, NAME, said)]


def verdict_of_orders(logs: Mapping[str, MonitorLog], specs: Mapping[str, Spec]) -> Verdict:
    """Return what the models show of Figure 3: whether the printed order is there at the end, and since when."""
    every = [list(orders_of(log).values()) for log in logs.values()]
    parts = [
        in_every(
            f"S({low}) < S({high}) at the last checkpoint",
            (one[-1].index(low) < one[-1].index(high) for one in every),
            seen,
            diluted(low, next(iter(specs.values()))),
        )
        for (low, high), seen in zip(
            pairwise(PRINTED),
            (", ".join(f"at {agreements(one)[step]} of {len(one)}" for one in every) for step in agreements(every[0])),
            strict=True,
        )
    ]
    words = "the order of the types emerges early in training and persists"
    return Verdict("sharpness-disparity/fig3", words, scale_of_both(specs), tuple(parts))


def verdict_of_norms(numbers: Mapping[str, Lines], specs: Mapping[str, Spec]) -> Verdict:
    """Return what the models show of Figure 8: whether gains shrink, and matrices stay longer than gains."""
    gains = [found[panel]["gamma"][1][:, 0] for found in numbers.values() for panel in ("FFN", "QK and VO")]
    shrinks = in_every(
        "the gains' norm is smaller at the end than at the start (before FFN and before attention)",
        (gain[-1] < gain[0] for gain in gains),
        ", ".join(f"{gain[0]:.3g} to {gain[-1]:.3g}" for gain in gains),
    )
    least = [
        min(
            float((line[1][:, 0] / found[panel]["gamma"][1][:, 0]).min())
            for name, line in found[panel].items()
            if name != "gamma"
        )
        for found in numbers.values()
        for panel in ("FFN", "QK and VO")
    ]
    seen = f"smallest quotient {each(least)}"
    missing = unreached(
        width=(min(spec.d_model for spec in specs.values()), 1024)
    )  # a matrix's norm grows with the width, a gain's with its root
    longer = in_every("every matrix's norm is above the gain's at every checkpoint", (x > 1 for x in least), seen, missing)
    words = "the gains' norms shrink, and the matrices' stay above them"
    return Verdict("sharpness-disparity/fig8", words, scale_of_both(specs), (shrinks, longer))


def orders_of(log: MonitorLog) -> dict[int, tuple[str, ...]]:
    """Return step -> the types that the paper orders, from flat to sharp, by their values."""
    series = log.sharpness
    return {int(step): order_by_values({name: one.value[k] for name, one in series.items()}) for k, step in enumerate(log.steps)}


def norms(run: Run, log: MonitorLog) -> Lines:
    """Return the norms of Figure 8: of each layer's matrices and gains from the monitor, of embedding rows from kept models."""
    layers = range(run.spec.layers)

    def over_layers(tensor: str) -> tuple[np.ndarray, np.ndarray] | None:
        names = [f"blocks.{layer}.{tensor}" for layer in layers]
        if not log.has("norms", "tensors", names[0]):
            return None
        own = np.stack([log.series("norms", "tensors", name) for name in names])
        return log.steps, np.stack([own.mean(0), own.min(0), own.max(0)], 1)

    found: Lines = {}
    panels_of = {"FFN": {**NETWORK, "gamma": "norm_2.weight"}, "QK and VO": {**ATTENTION, "gamma": "norm_1.weight"}}
    for panel, tensors in panels_of.items():
        lines = {letter: over_layers(tensor) for letter, tensor in tensors.items()}
        found[panel] = {letter: line for letter, line in lines.items() if line is not None}
    steps = np.array(sorted({*run.spec.kept, run.spec.steps}))
    rows = [row_norms(run, int(step)) for step in steps]
    gain = log.series("norms", "tensors", "blocks.0.norm_1.weight")
    found["Emb"] = {
        "median row": (steps, np.array([[np.median(r), *np.quantile(r, (0.25, 0.75))] for r in rows])),
        "smallest row": (steps, np.array([[r.min()] * 3 for r in rows])),
        "gamma": (log.steps, np.stack([gain] * 3, 1)),
    }
    return found


def row_norms(run: Run, step: int) -> np.ndarray:
    """Return ||w_i - mean(w_i)|| of the embedding's rows whose bytes occur in the training text (Theorem 4.3's w~_i)."""
    W = run.model(step).embedding.W_E.detach().double()
    seen = data_of(run.spec)[0].tokens.long().bincount(minlength=W.shape[0]) > 0
    W = W[seen]
    return (W - W.mean(1, keepdim=True)).norm(dim=1).numpy()


def quotient_of_bounds(spec: Spec, log: MonitorLog) -> Lines:
    """Return S(gamma) / S(W) for the gain before each network, measured and of the bounds of Theorem 4.1, a panel a matrix.

    Geometric mean, lowest and highest over the layers.
    """
    d_ff = spec.d_ff or 4 * spec.d_model
    found: Lines = {}
    for letter in ("W_1", "W_2"):
        measured, bounds = [], []
        for layer in range(spec.layers):
            W, gamma = f"blocks.{layer}.{NETWORK[letter]}", f"blocks.{layer}.norm_2.weight"
            sharp = {name: log.series("sharpness", "tensors", name)[:, 0] for name in (W, gamma)}
            norm = {name: log.series("norms", "tensors", name) for name in (W, gamma)}
            measured.append(sharp[gamma] / sharp[W])
            bounds.append(d_ff * norm[W] ** 2 / norm[gamma] ** 2)
        found[letter] = {
            name: (log.steps, _geometric(np.stack(own))) for name, own in (("measured", measured), ("bounds", bounds))
        }
    return found


def _geometric(own: np.ndarray) -> np.ndarray:
    """Return (steps, 3): geometric mean, lowest, highest of (layers, steps)."""
    return np.stack([np.exp(np.log(own).mean(0)), own.min(0), own.max(0)], 1)


def _sharpness_rows(logs: Mapping[str, MonitorLog]) -> Iterator[dict[str, Any]]:
    for title, log in logs.items():
        orders = orders_of(log)
        for k, step in enumerate(log.steps):
            said = {"printed_order": orders[int(step)] == PRINTED, "order": log.entries("sharpness", "ordering")[k]}
            for name, one in log.sharpness.items():
                numbers = {"sharpness": one.value[k], "low": one.low[k], "high": one.high[k]}
                yield {"model": title, "step": step, "loss": log.series("loss")[k], "type": name, **numbers, **said}


def _norm_rows(numbers: Mapping[str, Lines]) -> Iterator[dict[str, Any]]:
    for title, found in numbers.items():
        for panel, lines in found.items():
            for line, (steps, values) in lines.items():
                for step, (mean, low, high) in zip(steps, values, strict=True):
                    yield {"model": title, "panel": panel, "norm_of": line, "step": step, "norm": mean, "low": low, "high": high}


def _quotient_rows(quotients: Mapping[str, Lines]) -> Iterator[dict[str, Any]]:
    for title, found in quotients.items():
        for letter, lines in found.items():
            for line, (steps, values) in lines.items():
                for step, (mean, low, high) in zip(steps, values, strict=True):
                    quotient = {"S(gamma)/S(W)": mean, "low": low, "high": high}
                    yield {"model": title, "matrix": letter, "of": line, "step": step, **quotient}


def _draw_sharpness(logs: Mapping[str, MonitorLog], runs: Mapping[str, Run], path: Path, said: Sequence[Verdict]) -> Path:
    """Figure 3: a panel a model, names at the right ends."""
    figure = page(8.4, 3.3)
    grid = figure.add_gridspec(1, 2, left=0.075, right=0.935, top=0.9, bottom=0.14, wspace=0.38)
    for k, (title, log) in enumerate(logs.items()):
        axes = figure.add_subplot(grid[0, k])
        dress(axes)
        panels.sharpness(axes, log)
        axes.set_title(f"{title}, to {runs[title].losses[-1]:.2f} nats/byte", fontsize=9, loc="left")
        axes.set_xlabel(STEP, fontsize=8)
        axes.set_ylabel("average sharpness $S$, 95 % interval", fontsize=8)
    return save(figure, path, said)


def _draw_norms(numbers: Mapping[str, Lines], quotients: Mapping[str, Lines], path: Path, said: Sequence[Verdict]) -> Path:
    """Figure 8 and the quotient of the bounds: a column a model."""
    figure = page(8.2, 9.4)
    grid = figure.add_gridspec(4, 2, left=0.075, right=0.975, top=0.97, bottom=0.045, hspace=0.42, wspace=0.2)
    for k, (title, found) in enumerate(numbers.items()):
        last = int(found["FFN"]["gamma"][0].max())
        for column, (panel, lines) in enumerate(found.items()):
            axes = figure.add_subplot(grid[column, k])
            what = {"FFN": "network", "QK and VO": "attention", "Emb": "embedding rows"}[panel]
            heading(axes, f"{title}: {what}", STEP, "Frobenius norm" if k == 0 else "")
            for letter, line in lines.items():
                label, colour = LETTERS[letter]
                _band(axes, line, colour, DASHES[1 if letter == "gamma" else 0], label, MARKS[letter])
            _over_steps(axes, last)
        axes = figure.add_subplot(grid[3, k])
        heading(axes, title + r": $S(\gamma)\,/\,S(W)$, measured and of the bounds", STEP, "quotient" if k == 0 else "")
        for letter, pair in quotients[title].items():
            label, colour = LETTERS[letter]
            _band(axes, pair["measured"], colour, DASHES[0], label, MARKS[letter])
            _band(axes, pair["bounds"], colour, DASHES[3], f"{label}, bounds", MARKS[letter])
        axes.axhline(1.0, color=TYPE_COLOURS["Other"], linewidth=0.6)
        _over_steps(axes, last)
    return save(figure, path, said)


def _band(axes: Axes, line: tuple[np.ndarray, np.ndarray], colour: str, dash: Any, label: str, mark: str) -> None:
    steps, values = line
    axes.fill_between(steps, values[:, 1], values[:, 2], color=colour, alpha=0.15, linewidth=0)
    wide: Any = {"linewidth": 3.0, "alpha": 0.5, "markersize": 5.5} if mark in {MARKS[name] for name in UNDER} else {}
    axes.plot(
        steps, values[:, 0], color=colour, linestyle=dash, marker=mark, **{"markersize": 2.8, "linewidth": 1.0} | wide,
        label=label,
    )  # fmt: skip


def _over_steps(axes: Axes, last: int) -> None:
    """Log scales; the key is above the lines."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_xlim(0, last)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.35)
    axes.legend(loc="upper left", ncols=3, columnspacing=1.0, handlelength=1.6, borderaxespad=0.2, labelspacing=0.2)
