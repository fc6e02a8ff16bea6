"""Figures 6, 7 and 11 of The Sharpness Disparity Principle: Blockwise LR with Adam-mini, with Lion, and with another schedule.

The paper finds Blockwise LR twice as fast with Adam-mini (ratios 4, 1, 4, 4 of Emb, QK, FFN, VO; Figure 6), with Lion (eq. 5;
Figure 7, left) and with AdamW whose schedule is warm-up, stable, decay (Figure 7, right), single runs of 0.25 and 0.5 billion
parameters, and the order of eq. 1 under Lion from 2 % of the steps on (Figure 11).

Here: the three experiments at the small preset (``papers.experiments.catalogue``): a LLaMA-like model of two blocks of width 32,
300 steps of 512 bytes, three seeds. As in App. A.3, AdamW's learning rate is tuned with the cosine schedule (seed 1000, which
the comparison does not have) and taken for Adam-mini and for the other schedule, and Lion takes the best of 1/3, 1/5 and 1/10
of it with weight decays of 0.3, 0.5 and 1. Lion has beta 0.9 and 0.99; Adam-mini one second moment for each row of the
embeddings, each head of W_Q and W_K, and each other tensor. Above: held-out losses, means over the seeds, bands from the lowest
to the highest. Below: S by block type under Lion with eq. 5, 8 label draws.

What came out: with Lion Blockwise LR ends lower by 0.25 [0.01, 0.49] nats a byte and reaches the last loss of one learning rate
after 118 to 173 of 300 steps. With Adam-mini it ends 0.40 [0.21, 0.59] above one learning rate, at AdamW's tuned rate of 4e-3;
with the other schedule three seeds do not decide. Under Lion Emb < QK and FFN < VO < Norm are there at the end, QK < FFN is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from figures._kit import DASHES, METHOD_COLOURS, TYPE_COLOURS, TYPE_MARKS, heading, page, save, style, write_rows, write_verdicts
from figures._order import PRINTED, diluted
from figures._trained import Arms, arms, spec_of
from figures._verdicts import OPEN, Part, Verdict, above_zero, in_every
from papers.experiments.catalogue import specs
from papers.experiments.runs import Run, kept_run
from papers.experiments.spec import scale_of
from papers.experiments.tuning.verdict import first_step, paired_difference

NAME = Path(__file__).stem
GRID, LION, TUNING_SEED = (2e-3, 4e-3, 8e-3), ((1 / 3, 0.3), (1 / 5, 0.5), (1 / 10, 1.0)), 1000
DECAY = 0.1
CASES = {
    "Adam-mini": ("fig6", "Figure 6"), "Lion": ("fig7-lion", "Figure 7, left"), "AdamW, wsd": ("fig7-wsd", "Figure 7, right"),
}  # fmt: skip
"""Title -> experiment, which is a row of the ledger too, and figure of the paper."""
Cases = dict[str, Arms]
"""Title -> one learning rate for all, by block type -> runs, one a seed."""


def trained(out: Path, quick: bool, text: str) -> Cases:
    """Search the rates with one learning rate for all, and return the runs of all cases at the rates found."""

    def best(name: str, options: Sequence[tuple[float, float]]) -> dict[str, float]:
        ends = {}
        for lr, decay in options:
            changes: Any = {"lr": lr, "weight_decay": decay, "every": 0, "text": text}
            ((spec,), *_) = specs(name, "tiny" if quick else "small", seeds=(TUNING_SEED,), **changes).values()
            ends[lr, decay] = final(kept_run(spec, out))
        lr, decay = min(ends, key=ends.__getitem__)
        return {"lr": lr, "weight_decay": decay}

    tuned = best("sharpness-disparity/table2", [(lr, DECAY) for lr in GRID])
    rates = dict.fromkeys(CASES, tuned)
    rates["Lion"] = best("sharpness-disparity/fig7-lion", [(float(f"{part * tuned['lr']:.3g}"), decay) for part, decay in LION])
    return {
        case: arms(f"sharpness-disparity/{name}", out, quick=quick, text=text, **rates[case]) for case, (name, _) in CASES.items()
    }


def final(run: Run) -> float:
    """Return the last held-out loss, infinite where the run diverged."""
    return math.inf if run.diverged else run.losses[-1]


def verdicts(found: Cases) -> list[Verdict]:
    """Return what the runs show of Figures 6, 7 and 11."""
    said = []
    for case, (name, _) in CASES.items():
        one, by_type = found[case].values()
        base, own = ([final(run) for run in runs] for runs in (one, by_type))
        finite = all(map(math.isfinite, base + own))
        diverged = f"{sum(map(math.isinf, base))} and {sum(map(math.isinf, own))} of {len(base)} runs diverged"
        lower = above_zero("Blockwise LR ends lower", paired_difference(base, own) if finite else [], "" if finite else diverged)
        order = order_parts(by_type) if case == "Lion" else []
        same = ", and the order of the types is the same" if order else ""
        words = f"Blockwise LR ends lower and is twice as fast with {case}{same}"
        parts = (lower, faster(one, by_type), *order)
        said.append(Verdict(f"sharpness-disparity/{name}", words, scale_of(one[0].spec, len(one)), parts))
    return said


def faster(one: Sequence[Run], by_type: Sequence[Run]) -> Part:
    """Return whether Blockwise LR reaches the other arm's last loss in half of the steps; one budget cannot refute it."""
    at = [
        first_step(other.steps, other.losses, final(run)) if math.isfinite(final(run)) else None
        for run, other in zip(one, by_type, strict=True)
    ]
    seen = "the other's last loss is reached at step " + ", ".join("none" if x is None else f"{x:.0f}" for x in at)
    soon = (True if x is not None and x <= one[0].spec.steps / 2 else None for x in at)
    return in_every("it is twice as fast (one budget cannot refute it)", soon, seen)


def order_parts(runs: Sequence[Run]) -> list[Part]:
    """Return whether each step of eq. 1 is there at the end under Lion; one outcome a seed."""
    if any(run.log is None or run.log.steps[-1] < run.spec.steps for run in runs):
        return [Part("the order of eq. 1 at the end under Lion", OPEN, "a run broke off, or was not measured")]
    ends = [{kind: one.value[-1] for kind, one in run.log.sharpness.items()} for run in runs if run.log is not None]
    return [
        in_every(
            f"under Lion S({low}) < S({high}) at the end", (one[low] < one[high] for one in ends),
            "quotients " + ", ".join(f"{one[high] / one[low]:.2g}" for one in ends), diluted(low, runs[0].spec),
        )
        for low, high in pairwise(PRINTED)
    ]  # fmt: skip


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Do 24 runs (about 3 minutes of one core) or read those of a folder, draw, and write the numbers.

    ``quick`` takes two blocks of width 16 and 30 steps.
    """
    if run is None:
        found = trained(out, quick, text)
    else:
        found = {case: arms(f"sharpness-disparity/{name}", out, run=run) for case, (name, _) in CASES.items()}
    said = verdicts(found)
    rows = [
        {
            "case": case, "arm": arm, "lr": one.spec.lr, "decay": one.spec.weight_decay, "seed": one.spec.seed, "step": step,
            "loss": loss,
        }
        for case, both in found.items()
        for arm, runs in both.items()
        for one in runs
        for step, loss in zip(one.steps, one.losses, strict=True)
    ]  # fmt: skip
    logs = [(one.spec.seed, one.log) for one in found["Lion"]["Blockwise LR"] if one.log is not None]
    sharp = [
        {"seed": seed, "step": int(step), "type": kind, "sharpness": one.value[k], "low": one.low[k], "high": one.high[k]}
        for seed, log in logs
        for k, step in enumerate(log.steps)
        for kind, one in log.sharpness.items()
    ]
    with style():
        figure = page(8.4, 6.2)
        for k, (case, both) in enumerate(found.items()):
            axes = figure.add_axes((0.075 + 0.315 * k, 0.57, 0.27, 0.37))
            curves(axes, both)
            spec = spec_of(both)
            heading(axes, f"{CASES[case][1]}: {case}, lr {spec.lr:.2g}", "step", "" if k else "held-out loss (nats per token)")
        eq_1(figure.add_axes((0.075, 0.075, 0.585, 0.375)), sharp)
        picture = save(figure, out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", rows), write_rows(out / f"{NAME}_sharpness.csv", sharp)]
    return [picture, *numbers, write_verdicts(out, NAME, said)]


def curves(axes: Axes, both: Arms) -> None:
    """Held-out losses of both arms from a fifth of the steps on, means over the seeds with their range."""
    for k, (arm, runs) in enumerate(both.items()):
        values, steps = np.array([one.losses for one in runs]), np.array(runs[0].steps)
        late = steps >= runs[0].spec.steps / 5
        look: Any = {"color": METHOD_COLOURS[(0, 2)[k]], "linestyle": DASHES[k]}
        axes.plot(steps[late], values.mean(0)[late], label=arm, **look)
        axes.fill_between(steps[late], values.min(0)[late], values.max(0)[late], alpha=0.15, linewidth=0, color=look["color"])
    axes.legend(loc="upper right")


def eq_1(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Figure 11: S by block type over the steps, means over the seeds with their range."""
    steps = sorted({row["step"] for row in rows})
    for kind in PRINTED:
        values = np.array([[row["sharpness"] for row in rows if (row["type"], row["step"]) == (kind, step)] for step in steps])
        axes.plot(steps, values.mean(1), marker=TYPE_MARKS[kind], color=TYPE_COLOURS[kind], label=kind)
        axes.fill_between(steps, values.min(1), values.max(1), color=TYPE_COLOURS[kind], alpha=0.15, linewidth=0)
    heading(axes, "Figure 11: under Lion, eq. (5)", "step (log scale from 1)", "average sharpness $S$")
    axes.set_xscale("symlog", linthresh=1, linscale=0.4)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(
        loc="center left", bbox_to_anchor=(1.01, 0.5), title="in print, from flat\nto sharp: this order", title_fontsize=7.5
    )
