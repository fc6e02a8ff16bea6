"""Is a transformer's Hessian block-diagonal? Squares in diagonal blocks by neuron, head, tensor and layer along training.

Reads docs/block_diagonal.json, the finished cases of ``python -m papers block-diagonal --data``: language models on the words of
Python's standard library, exact Hessian and Gauss-Newton matrix. First picture: the share of the squares of all entries that lies
in the diagonal blocks, for the largest vocabulary and depth, mean and 95 % interval over seeds; dashed, the share of the area.
Second picture: the initial and the trained Hessian against the vocabulary; of the squares within tensors those within neurons;
the cosine of the block-diagonal with the full damped Gauss-Newton step; and the held-out loss of such steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from figures._kit import FAINT, METHOD_COLOURS, METHOD_MARKS, heading, page, save, style, write_rows
from papers.block_diagonal.models import STAGES, Case
from papers.block_diagonal.study import PARTITIONS, BlockDiagonalReport, interval, read

NAME = Path(__file__).stem
DATA = Path(__file__).parents[1] / "docs" / f"{NAME}.json"
KINDS = {"hessian": "Hessian", "ggn": "Gauss-Newton matrix"}
LOOK = dict(zip((*PARTITIONS, "AdamW", "full"), zip(METHOD_COLOURS, METHOD_MARKS, strict=False), strict=False))


def curve(
    axes: Axes, name: str, x: Sequence[float], seeds: Sequence[Sequence[float]], label: str, dashes: str | None = None
) -> None:
    """Draw means over seeds with their 95 % intervals."""
    found = [interval(values) for values in seeds]
    colour, mark = LOOK[name]
    means, widths = (np.array([getattr(one, what) for one in found]) for what in ("mean", "half_width"))
    line = dashes or ("--" if name == "head" else "-")  # the curve of tensors lies under that of heads
    axes.plot(x, means, color=colour, marker=mark, label=label, linestyle=line)
    axes.fill_between(x, means - widths, means + widths, color=colour, alpha=0.15, linewidth=0)


def draw_training(axes: Axes, report: BlockDiagonalReport, case: Case, kind: str) -> None:
    """Draw the share of each partition along training."""
    heading(axes, KINDS[kind], "training", "share of squares in diagonal blocks")
    for name in reversed(PARTITIONS):
        curve(axes, name, range(len(STAGES)), [report.values(case, stage, kind, "share", name) for stage in STAGES], f"by {name}")
        axes.axhline(report.about(case)["area"][name], color=LOOK[name][0], linewidth=0.7, linestyle=":")
    axes.set_xticks(range(len(STAGES)), STAGES)
    axes.set_ylim(0, 1.02)


def draw_vocabulary(axes: Axes, report: BlockDiagonalReport, cases: Sequence[Case], stage: str) -> None:
    """Draw the share of each partition against the vocabulary, and of the squares within tensors those within neurons."""
    heading(axes, f"Hessian, {stage}", "vocabulary", "share of squares")
    words = [case.vocabulary for case in cases]
    shares = {name: [report.values(case, stage, "hessian", "share", name) for case in cases] for name in PARTITIONS}
    for name in reversed(PARTITIONS):
        curve(axes, name, words, shares[name], f"by {name}")
    pairs = zip(shares["neuron"], shares["tensor"], strict=True)
    ratios = [[a / b for a, b in zip(neuron, tensor, strict=True)] for neuron, tensor in pairs]
    curve(axes, "neuron", words, ratios, "by neuron, within tensors", "--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(words, [str(word) for word in words])
    axes.set_ylim(0, 1.02)


def draw_steps(axes: Axes, report: BlockDiagonalReport, case: Case) -> None:
    """Draw the cosine of the block-diagonal damped Gauss-Newton step with the full one along training."""
    heading(axes, "damped Gauss-Newton step", "training", "cosine with the full step")
    for name in reversed(PARTITIONS):
        curve(axes, name, range(len(STAGES)), [report.values(case, stage, "ggn", "cosine", name) for stage in STAGES], name)
    axes.set_xticks(range(len(STAGES)), STAGES)
    axes.set_ylim(0, 1.02)


def draw_losses(axes: Axes, report: BlockDiagonalReport) -> None:
    """Draw the held-out loss of each arm, mean over seeds."""
    heading(axes, "optimiser's consequence", "step", "held-out loss, nats")
    for arm, runs in report.losses().items():
        means = np.mean(runs, 0)
        axes.plot(means, color=LOOK[arm][0], label=arm, linestyle="--" if arm == "AdamW" else "-")
    axes.legend(fontsize=6.5)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Draw both pictures from the stored measures, and write their numbers."""
    report = read(DATA)
    cases = report.settings()
    depth = max(case.layers for case in cases)
    tied = [case for case in cases if case.tied and case.layers == depth]
    with style():
        figure = page(7.2, 2.9)
        for k, kind in enumerate(KINDS):
            axes = figure.add_axes((0.075 + 0.5 * k, 0.16, 0.40, 0.73))
            draw_training(axes, report, tied[-1], kind)
        figure.axes[0].legend(fontsize=6.5, ncols=2, loc="upper right")
        figure.text(0.99, 0.01, "dotted: share of the area", color=FAINT, fontsize=6.5, ha="right")
        first = save(figure, out / f"{NAME}{suffix}")
        figure = page(7.2, 5.4)
        places = [figure.add_axes((0.075 + 0.5 * (k % 2), 0.58 - 0.49 * (k // 2), 0.40, 0.36)) for k in range(4)]
        draw_vocabulary(places[0], report, tied, "initial")
        draw_vocabulary(places[1], report, tied, "trained")
        places[0].legend(fontsize=6)
        draw_steps(places[2], report, tied[-1])
        draw_losses(places[3], report)
        second = save(figure, out / f"{NAME}_trend{suffix}")
    rows = [
        {"vocabulary": case.vocabulary, "tied": case.tied, "layers": case.layers, "stage": stage, "matrix": kind,
         "partition": name, "mean": one.mean, "half_width": one.half_width}
        for case in cases for stage in STAGES for kind in KINDS for name in PARTITIONS
        for one in [interval(report.values(case, stage, kind, "share", name))]
    ]  # fmt: skip
    return [first, second, write_rows(out / f"{NAME}.csv", rows)]
