"""Tables 4 and 5 of HybridNorm: sixteen norm placements at one depth, and four at two depths.

Table 4 trains a 550M model once with each of sixteen placements of the norms: losses from 2.73 (HybridNorm*, QKC-Post) to 2.76,
and QK-Post diverges. Table 5 has 29 layers beside 16 at about the same size: Post-Norm diverges, both HybridNorms stay lowest.

Here: eight blocks of width 64 on the bytes of Python's standard library, 240 steps, two seeds
(``papers.experiments.catalogue``, Megatron initialisation), and for Table 5 sixteen and 29 blocks of the same width after 100
steps; the paper keeps the size, here the width is kept. A run counts as diverged that ends half a nat above its own best
evaluation, or with no number. Left: each seed's held-out loss, a bar through the mean, and what the paper prints, nats a token
of another model and data. Right: the two depths.

What came out: nothing diverges, neither QK-Post nor Post-Norm at 29 blocks, and neither HybridNorm is among the first: ranks 8
and 9, and 10 and 6, of sixteen in the two seeds; the lowest are Pre-Norm and Post-Pre. At 29 blocks, after 100 steps, Post-Norm
has 2.45 and 2.44 nats a byte, Pre-Norm 2.56 and 2.57, HybridNorm 2.91 and 2.66 and HybridNorm* 2.86 and 3.23. A few hundred
steps at width 64 are the beginning of training, where the paper's differences of 0.01 to 0.03 nats cannot be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from figures._kit import DASHES, FAINT, METHOD_COLOURS, METHOD_MARKS, each, heading, page, save, style, write_rows, write_verdicts
from figures._trained import Arms, arms, models, seeds_of, short_of, spec_of
from figures._verdicts import Verdict, in_every
from papers.experiments.runs import Run
from papers.experiments.spec import Spec, scale_of

NAME = Path(__file__).stem
PRINTED = {
    "QKVC-Post": 2.74, "QKC-Post": 2.73, "QK-Post": None, "KV-Post": 2.74, "KC-Post": 2.75, "Pre-QKV-Post": 2.74,
    "Pre-QKV-Pre": 2.74, "Pre-QK-Pre": 2.75, "QKV-Pre": 2.74, "Post-Norm": 2.76, "Pre-Norm": 2.75, "Mix-LN": 2.76,
    "Post-Pre": 2.75, "Pre-Post": 2.74, "HybridNorm": 2.74, "HybridNorm*": 2.73,
}  # fmt: skip
"""Table 4: placement -> training loss; None where it diverges."""
DEEP = {"Post-Norm": None, "Pre-Norm": 2.73, "HybridNorm": 2.72, "HybridNorm*": 2.71}
"""Table 5: the loss at 29 layers."""
OURS = ("HybridNorm", "HybridNorm*")


def verdicts(shallow: Arms, deep: Mapping[int, Arms], specs: tuple[Spec, Spec]) -> list[Verdict]:
    """Return what the runs show of the rows on Tables 4 and 5; one outcome a seed, or a seed and depth."""
    seeds = seeds_of(shallow)
    scales, missing = [scale_of(spec, len(seeds)) for spec in specs], [short_of(spec) for spec in specs]

    def diverges(claim: str, what: str, runs: Sequence[Run], k: int) -> Verdict:
        seen = f"{sum(run.diverged for run in runs)} of {len(runs)} do, losses {each(run.losses[-1] for run in runs)}"
        part = in_every(f"{what} diverges", (run.diverged for run in runs), seen, missing[k])
        return Verdict(claim, f"{what} diverges", scales[k], (part,))

    orders = [sorted(shallow, key=lambda one: shallow[one][k].losses[-1]) for k in range(len(seeds))]
    surpass = in_every(
        "HybridNorm and HybridNorm* have the two lowest losses of the sixteen",
        (set(order[:2]) == set(OURS) for order in orders),
        "lowest " + " and ".join(dict.fromkeys(order[0] for order in orders)) + "; ranks of HybridNorm and HybridNorm* "
        + ", ".join(f"{order.index(OURS[0]) + 1} and {order.index(OURS[1]) + 1}" for order in orders), missing[0],
    )  # fmt: skip
    consistently = [
        in_every(
            f"at {depth} blocks both are below Post-Norm and Pre-Norm",
            (
                max(runs[one][k].losses[-1] for one in OURS) < min(runs[one][k].losses[-1] for one in DEEP if one not in OURS)
                for k in range(len(seeds))
            ),
            "; ".join(f"{one} {each(run.losses[-1] for run in own)}" for one, own in runs.items()),
            missing[1],
        )
        for depth, runs in deep.items()
    ]
    last = max(deep)
    return [
        Verdict("hybridnorm/table4-surpass", "both HybridNorms have the lowest losses of the placements", scales[0], (surpass,)),
        diverges("hybridnorm/table4-qk-post", "QK-Post", shallow["QK-Post"], 0),
        diverges("hybridnorm/table5-post-diverges", f"Post-Norm at {last} blocks", deep[last]["Post-Norm"], 1),
        Verdict(
            "hybridnorm/table5-consistently",
            "both HybridNorms have lower losses than Pre- and Post-Norm",
            scales[1],
            tuple(consistently),
        ),
    ]


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train 32 models of eight blocks and sixteen deeper ones (about 8 minutes of one core), draw, and write the numbers.

    ``quick`` takes four blocks of width 16 and 30 steps, and two and four blocks for Table 5.
    """
    options: Any = {"quick": quick, "run": run, "text": text}
    shallow = arms("hybridnorm/table4", out, **options)
    deep = {spec_of(one).layers: one for one in models("hybridnorm/table5", out, **options).values()}
    size, deeper = spec_of(shallow), spec_of(deep[max(deep)])
    said = verdicts(shallow, deep, (size, deeper))
    rows = [
        {
            "table": table, "blocks": blocks, "placement": one, "seed": run.spec.seed, "held-out loss": run.losses[-1],
            "diverged": run.diverged,
        }
        for table, blocks, runs in ((4, size.layers, shallow), *((5, depth, own) for depth, own in deep.items()))
        for one, own in runs.items()
        for run in own
    ]  # fmt: skip
    with style():
        figure = page(8.2, 4.6)
        left, right = figure.add_axes((0.12, 0.1, 0.45, 0.82)), figure.add_axes((0.68, 0.1, 0.3, 0.62))
        table_4(left, shallow)
        table_5(right, deep)
        heading(
            left,
            f"Table 4: {size.layers} blocks, {size.steps} steps; marks: seeds, bars: means",
            "held-out loss (nats per token)",
        )
        heading(right, f"Table 5: after {deeper.steps} steps", "blocks", "held-out loss (nats per token)")
        figure.legend(*right.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.64, 0.97), ncols=1, handlelength=3)
        picture = save(figure, out / f"{NAME}{suffix}", said)
    return [picture, write_rows(out / f"{NAME}.csv", rows), write_verdicts(out, NAME, said)]


def table_4(axes: Axes, runs: Arms) -> None:
    """A row a placement: each seed, the mean, and the printed loss at the right."""
    for y, (one, own) in enumerate(runs.items()):
        losses = [run.losses[-1] for run in own]
        colour = METHOD_COLOURS[2] if one in OURS else METHOD_COLOURS[1]
        for run, mark in zip(own, METHOD_MARKS, strict=False):
            if np.isfinite(run.losses[-1]):
                axes.plot(run.losses[-1], y, "x" if run.diverged else mark, color=colour, markersize=4)
        if np.isfinite(losses).all():
            axes.plot([np.mean(losses)] * 2, [y - 0.3, y + 0.3], color=colour, linewidth=1.5)
        printed = "diverges" if PRINTED[one] is None else f"{PRINTED[one]:.2f}"
        axes.text(1.01, y, printed, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color=FAINT)
    axes.text(1.0, -0.95, "in print", transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color=FAINT)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_ylim(len(runs) - 0.4, -0.6)


def table_5(axes: Axes, deep: Mapping[int, Arms]) -> None:
    """A line a placement over the depths, with each seed."""
    for k, one in enumerate(DEEP):
        printed = "diverges" if DEEP[one] is None else f"{DEEP[one]:.2f}"
        values = np.array([[run.losses[-1] for run in deep[depth][one]] for depth in deep])
        x = np.arange(len(deep)) + 0.06 * (k - 1.5)
        look: Any = {"color": METHOD_COLOURS[k], "marker": METHOD_MARKS[k]}
        axes.plot(x, values.mean(1), linestyle=DASHES[k], label=f"{one} (in print, 29 layers: {printed})", **look)
        axes.plot(np.repeat(x, values.shape[1]), values.ravel(), linestyle="", markersize=2.5, **look)
    axes.set_xticks(range(len(deep)), [str(depth) for depth in deep])
    axes.set_xlim(-0.4, len(deep) - 0.6)
