"""Figures 6, 7 and 11 of The Sharpness Disparity Principle: Blockwise LR with Adam-mini, with Lion, and with another schedule.

The paper finds Blockwise LR twice as fast with Adam-mini (ratios 4, 1, 4, 4 of Emb, QK, FFN, VO; Figure 6), with Lion (eq. 5;
Figure 7, left) and with AdamW whose schedule is warm-up, stable, decay (Figure 7, right), single runs of 0.25 and 0.5 billion
parameters, and the order of eq. 1 under Lion from 2 % of the steps on (Figure 11).

Here: the model and budget of ``sharpness_disparity_4_10_table_2``, 300 steps, three seeds. As in App. A.3, AdamW's learning
rate is tuned with the cosine schedule (seed 1000, which the comparison does not have) and taken for Adam-mini and for the other
schedule, and Lion takes the best of 1/3, 1/5 and 1/10 of it with weight decays of 0.3, 0.5 and 1. Lion has beta 0.9 and 0.99;
Adam-mini one second moment for each row of the embeddings, each head of W_Q and W_K, and each other tensor. Above: held-out
losses, means over the seeds, bands from the lowest to the highest. Below: S by block type under Lion with eq. 5, 8 label draws.

What came out: Blockwise LR ends lower with the other schedule (0.109 [0.075, 0.144] nats a byte) and reaches AdamW's last loss
after 200 to 230 of 300 steps, not after half of them. With Adam-mini and with Lion the three seeds do not decide about the last
loss; with Lion the curve of one rate is reached within 60 steps, in a model whose rate of 1/3 of AdamW's is the largest of the
three that are tried. Under Lion FFN < VO < Norm is there at the end, Emb < QK is not. AdamW's tuned rate, 2e-3, is the smallest
that was tried.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

import hessiankit as hk
from figures._kit import CODE as TOOLKIT
from figures._kit import (
    DASHES,
    METHOD_COLOURS,
    TYPE_COLOURS,
    TYPE_MARKS,
    cached,
    heading,
    page,
    save,
    style,
    write_rows,
    write_verdicts,
)
from figures._order import PRINTED, diluted
from figures._verdicts import OPEN, Part, Verdict, above_zero, in_every
from figures.sharpness_disparity_4_10_table_2 import FULL as TABLE_2
from figures.sharpness_disparity_4_10_table_2 import QUICK as TINY
from hessiankit.support.progress import progress_bar
from papers.experiments.catalogue import MINI
from papers.experiments.optimizers import optimizer_of, schedule_of
from papers.experiments.spec import scale_of
from papers.experiments.training import updates
from papers.experiments.tuning.experiment import (
    BETAS,
    CLIP,
    PAPER,
    Setting,
    cross_entropy,
    digest_of,
    evaluated_at,
    has_diverged,
    held_out_loss,
    model_of,
    one_thread,
    texts,
    warm_up_steps,
)
from papers.experiments.tuning.verdict import first_step, paired_difference

NAME = Path(__file__).stem
CODE = (*TOOLKIT, f"figures/{NAME}.py")
GRID, LION, TUNING_SEED = (2e-3, 4e-3, 8e-3), ((1 / 3, 0.3), (1 / 5, 0.5), (1 / 10, 1.0)), 1000
DECAY = 0.1
CASES = {"Adam-mini": ("adam_mini", "cosine"), "Lion": ("lion", "cosine"), "AdamW, wsd": ("adamw", "wsd")}
"""Title -> optimizer, schedule."""
CLAIMS = {"Adam-mini": "fig6", "Lion": "fig7-lion", "AdamW, wsd": "fig7-wsd"}
ARMS = ("one rate", "by block type")


@dataclass(frozen=True)
class Spec:
    """One run: optimizer, schedule, arm, rate, decay, seed, and the steps at which the sharpness is measured."""

    setting: Setting
    kind: str
    schedule: str
    arm: str
    lr: float
    decay: float
    seed: int
    measured: tuple[int, ...] = ()


def run(spec: Spec) -> dict[str, Any]:
    """Train; return steps and held-out losses (None from where one was no number), and S by type at the measured steps."""
    setting = spec.setting
    text, held_out = texts(setting.text)
    generator, steps = torch.Generator().manual_seed(spec.seed), evaluated_at(setting.steps, setting.evaluations)
    with one_thread():
        model = model_of(setting, spec.seed)
        windows = held_out.windows(setting.length, setting.windows)
        ratios = () if spec.arm == ARMS[0] else {"adam_mini": MINI}.get(spec.kind, PAPER)
        betas = (0.9, 0.99) if spec.kind == "lion" else BETAS
        optimizer = optimizer_of(model, spec.kind, spec.lr, ratios, spec.decay, betas, setting.heads)
        schedule = schedule_of(optimizer, warmup=warm_up_steps(setting), steps=setting.steps, kind=spec.schedule)
        losses, sharp = {0: held_out_loss(model, windows)}, {}
        batch = partial(text.batch, setting.batch_size, setting.length, generator)
        if 0 in spec.measured:
            sharp[0] = sharpness_by_type(model, windows, spec.seed)
        for step, loss in updates(
            model, optimizer, batch, cross_entropy, range(1, setting.steps + 1), clip=CLIP, schedule=schedule
        ):
            if not math.isfinite(loss):
                break
            if step in steps:
                losses[step] = held_out_loss(model, windows)
            if step in spec.measured:
                sharp[step] = sharpness_by_type(model, windows, spec.seed)
    return {"steps": steps, "losses": [losses.get(step) for step in steps], "sharpness": sharp}


def sharpness_by_type(model: nn.Module, windows: tuple[Tensor, Tensor], seed: int) -> dict[str, list[float]]:
    """Return S, low and high by block type of a copy in float64."""
    report = hk.sharpness(copy.deepcopy(model).double(), (windows[0][:32], windows[1][:32]), draws=8, seed=seed)
    return {kind: [one.value, one.low, one.high] for kind, one in report.types.items()}


def final(found: dict[str, Any]) -> float:
    """Return the last held-out loss, infinite where the run broke off or ended half a nat above its best."""
    losses = [math.inf if x is None else x for x in found["losses"]]
    return math.inf if has_diverged(losses) else losses[-1]


@dataclass(frozen=True)
class Found:
    """The rates that were chosen, and the runs: case -> arm -> one a seed."""

    setting: Setting
    rates: dict[str, tuple[float, float]]
    runs: dict[str, dict[str, list[dict[str, Any]]]]

    def losses(self, case: str, arm: str) -> list[float]:
        """Return the last losses of an arm."""
        return [final(one) for one in self.runs[case][arm]]


def measure(setting: Setting, seeds: int, out: Path) -> Found:
    """Search the rates and do all runs that are not kept."""
    with progress_bar() as tell:
        total, done = len(GRID) + len(LION) + len(CASES) * len(ARMS) * seeds, 0

        def kept(spec: Spec) -> dict[str, Any]:
            nonlocal done
            tell(f"{spec.kind}, {spec.schedule}, {spec.arm}", done, total)
            done += 1
            return cached(out, NAME, spec, partial(run, spec), code=CODE)

        def best(kind: str, options: Sequence[tuple[float, float]]) -> tuple[float, float]:
            ends = {one: final(kept(Spec(setting, kind, "cosine", ARMS[0], *one, TUNING_SEED))) for one in options}
            return min(ends, key=ends.__getitem__)

        tuned = best("adamw", [(lr, DECAY) for lr in GRID])
        rates = dict.fromkeys(CASES, tuned)
        rates["Lion"] = best("lion", [(float(f"{part * tuned[0]:.3g}"), decay) for part, decay in LION])
        last = setting.steps
        looked_at = sorted({0, 1, 2, 5, 10, 20, 50, last // 3, last} & set(range(last + 1)))
        measured: dict[str, tuple[int, ...]] = {ARMS[0]: (), ARMS[1]: tuple(looked_at)}
        runs = {
            case: {
                arm: [
                    kept(Spec(setting, kind, schedule, arm, *rates[case], seed, measured[arm] if case == "Lion" else ()))
                    for seed in range(seeds)
                ]
                for arm in ARMS
            }
            for case, (kind, schedule) in CASES.items()
        }
    return Found(setting, rates, runs)


def verdicts(found: Found) -> list[Verdict]:
    """Return what the runs show of Figures 6, 7 and 11."""
    setting = found.setting
    seeds = len(next(iter(found.runs.values()))[ARMS[0]])
    size = scale_of(setting, seeds)
    found_verdicts = []
    for case, claim in CLAIMS.items():
        base, own = (found.losses(case, arm) for arm in ARMS)
        finite = all(map(math.isfinite, base + own))
        lower = above_zero(
            "Blockwise LR ends lower", paired_difference(base, own) if finite else [],
            "" if finite else f"{sum(map(math.isinf, base))} and {sum(map(math.isinf, own))} of {seeds} runs diverged",
        )  # fmt: skip
        parts = [lower, faster(found, case)]
        if case == "Lion":
            parts += order_parts(found.runs[case][ARMS[1]], setting.steps)
        order = ", and the order of the types is the same" if case == "Lion" else ""
        words = f"Blockwise LR ends lower and is twice as fast with {case}{order}"
        found_verdicts.append(Verdict(f"sharpness-disparity/{claim}", words, size, tuple(parts)))
    return found_verdicts


def faster(found: Found, case: str) -> Part:
    """Return whether Blockwise LR reaches the other arm's last loss in half of the steps; one budget cannot refute it."""
    at = []
    for one, other in zip(*(found.runs[case][arm] for arm in ARMS), strict=True):
        curve = [math.inf if x is None else x for x in other["losses"]]
        at.append(first_step(other["steps"], curve, final(one)) if math.isfinite(final(one)) else None)
    seen = "the other's last loss is reached at step " + ", ".join("none" if x is None else f"{x:.0f}" for x in at)
    soon = (True if x is not None and x <= found.setting.steps / 2 else None for x in at)
    return in_every("it is twice as fast (one budget cannot refute it)", soon, seen)


def order_parts(runs: Sequence[dict[str, Any]], last: int) -> list[Part]:
    """Return whether each step of eq. 1 is there at the end under Lion; one outcome a seed."""
    ends = [one["sharpness"].get(str(last)) for one in runs]
    seen = [one for one in ends if one is not None]
    if len(seen) < len(runs):
        return [Part("the order of eq. 1 at the end under Lion", OPEN, "a run broke off")]
    return [
        in_every(
            f"under Lion S({low}) < S({high}) at the end", (one[low][0] < one[high][0] for one in seen),
            "quotients " + ", ".join(f"{one[high][0] / one[low][0]:.2g}" for one in seen), diluted(low),
        )
        for low, high in pairwise(PRINTED)
    ]  # fmt: skip


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib") -> list[Path]:
    """Do 24 runs (about 3 minutes of one core), draw loss curves and the sharpness under Lion, and write the numbers.

    ``quick`` takes one block of width 16, 40 steps and two seeds.
    """
    setting, seeds = (TINY.setting, 2) if quick else (TABLE_2.setting, 3)
    found = measure(replace(setting, text=text, digest=digest_of(text)), seeds, out)
    said = verdicts(found)
    rows = [
        {
            "case": case, "arm": arm, "lr": found.rates[case][0], "decay": found.rates[case][1], "seed": seed, "step": step,
            "loss": loss,
        }
        for case, arms in found.runs.items()
        for arm, runs in arms.items()
        for seed, one in enumerate(runs)
        for step, loss in zip(one["steps"], one["losses"], strict=True)
    ]  # fmt: skip
    sharp = [
        {"seed": seed, "step": int(step), "type": kind, "sharpness": value, "low": low, "high": high}
        for seed, one in enumerate(found.runs["Lion"][ARMS[1]])
        for step, types in one["sharpness"].items()
        for kind, (value, low, high) in types.items()
    ]
    with style():
        figure = page(8.4, 6.2)
        for k, case in enumerate(CASES):
            axes = figure.add_axes((0.075 + 0.315 * k, 0.57, 0.27, 0.37))
            curves(axes, found, case)
        eq_1(figure.add_axes((0.075, 0.075, 0.585, 0.375)), sharp)
        picture = save(figure, out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", rows), write_rows(out / f"{NAME}_sharpness.csv", sharp)]
    return [picture, *numbers, write_verdicts(out, NAME, said)]


def curves(axes: Axes, found: Found, case: str) -> None:
    """Held-out losses of both arms from a fifth of the steps on."""
    number = {"Adam-mini": "Figure 6", "Lion": "Figure 7, left", "AdamW, wsd": "Figure 7, right"}[case]
    for k, arm in enumerate(ARMS):
        runs = found.runs[case][arm]
        values = np.array([[math.nan if x is None else x for x in one["losses"]] for one in runs])
        steps = np.array(runs[0]["steps"])
        late = steps >= found.setting.steps / 5
        look: Any = {"color": METHOD_COLOURS[(0, 2)[k]], "linestyle": DASHES[k]}
        axes.plot(steps[late], values.mean(0)[late], label=arm, **look)
        axes.fill_between(steps[late], values.min(0)[late], values.max(0)[late], alpha=0.15, linewidth=0, color=look["color"])
    heading(
        axes,
        f"{number}: {case}, lr {found.rates[case][0]:.2g}",
        "step",
        "held-out loss (nats/byte)" if case == "Adam-mini" else "",
    )
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
