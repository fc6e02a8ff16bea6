"""Figures 4 and 10 and Table 2 of The Sharpness Disparity Principle: learning rates by block type against tuned AdamW.

The paper takes AdamW's tuned learning rate as that of the norms, multiplies it by 10 for Emb, 8 for QK, 6 for FFN and 4 for VO
(eq. 5), and reports half the steps to the same loss on models of 0.07 to 2 billion parameters (Figure 4), the largest of three
settings of the ratios as the best one (Figure 10: 0.25 billion, MiniPile), and, for one seed, how the final loss falls block by
block while Norm x 2 raises it (Table 2: 2.834 nats a token, less 0.016, 0.043, 0.050, more 0.003). No run there is merely
faster, so that a baseline whose learning rate is too small would show the same.

Here every setting of the ratios has its own search besides, and two controls multiply the learning rate of all blocks: by 2,
and by the mean of eq. (5) over the parameters. Searches use seeds that the comparison does not. A byte-level GPT-2-like model
(two blocks, d_model 32, 35 thousand parameters), 300 steps of 512 bytes of Python's standard library, warm-up and cosine to
1/20; five seeds; criteria are Sec. 6.1's (a lower terminal loss; nearly twice as fast, 1.92 times in Figure 1) and App. A.2's
(the third setting has "the largest improvement in terminal loss", all accelerate; only ratios are tuned, so at AdamW's learning
rate). How fast is read off runs of one budget, where the paper also compares budgets. The same code as
``python -m papers tune-lr``, which asks the question at five times the size (docs/learning_rates.md). Bands and bars are 95 %
intervals over the seeds, differences are paired by seed.

What came out, in nats a byte less than AdamW tuned (learning rate 2.8e-3, 2.63): Emb 0.146, Emb and FFN 0.158, all of eq. (5)
0.083 at AdamW's learning rate and 0.133 at its own, 2e-3; the smaller ratios 0.140 to 0.166. All of these but the 0.083 hold
for the eleven comparisons together. Multiplying all learning rates, by 2 or by 7, gains nothing, so that AdamW's was not simply
too small. Unlike Table 2, QK and VO take away from what Emb and FFN gain, the largest ratios are not the best ones, and Norm x
2 is not told apart from AdamW (-0.049 +- 0.054), where the paper has it worse by 0.003. Most of the gain is that of Emb x 10
alone, in a model whose embedding is 8 of 35 thousand parameters and starts at 0.02. The same question at five times the size
(docs/learning_rates.md) had another answer: eq. (5) at AdamW's learning rate worse than tuned AdamW, at its own not told apart,
Emb x 10 alone better. The width makes the difference, as that page shows.

What a protocol of 300 steps and 256 kinds of tokens cannot show is the paper's claim itself: its gain comes after tens of
thousands of steps. ``--quick`` decides nothing. Full: about 3 minutes of CPU, shared among the cores there are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from figures._kit import DASHES, FAINT, METHOD_COLOURS, heading, page, save, style, write_rows, write_verdicts
from figures._trained import arms
from figures._verdicts import Part, Verdict, above_zero, in_every, negative
from hessiankit.support.progress import progress_bar
from papers.experiments.catalogue.sharpness_disparity import SETTINGS
from papers.experiments.runs import Run
from papers.experiments.spec import Spec, scale_of
from papers.experiments.tuning.comparison import TUNING_SEED, run_arms
from papers.experiments.tuning.comparison_report import draw_differences, draw_searches
from papers.experiments.tuning.experiment import (
    PAPER,
    RunResult,
    RunSpec,
    Setting,
    digest_of,
    entries_by_type,
    model_of,
    ratios_of,
    weighted_ratio,
)
from papers.experiments.tuning.store import Runs
from papers.experiments.tuning.sweep import Arm, SearchResult, lowered, rounded, runs_expected, sweep, together
from papers.experiments.tuning.verdict import ArmResult, first_step, judge, mean_interval, paired_difference

NAME = Path(__file__).stem
ADAMW = "AdamW"
SPEEDUP = 1.92
"""Of LLaMA 1.1B in print (Figure 1, right); Sec. 6.1 says nearly 2 for all models."""
TABLE_2 = {"Emb": -0.016, "Emb, FFN": -0.043, "Emb, FFN, QK, VO": -0.050, "Norm x 2": 0.003}
"""Differences from AdamW that the paper prints, nats a token, one seed."""


@dataclass(frozen=True)
class Protocol:
    """What is run: the model and budget, the coarse learning rates, and how many seeds compare and search."""

    setting: Setting
    grid: tuple[float, ...]
    seeds: int
    tuning_seeds: int


FULL = Protocol(
    Setting(steps=300, batch_size=16, length=32, layers=2, d_model=32, heads=2, evaluations=15, windows=128),
    (2e-3, 4e-3, 8e-3, 1.6e-2), 5, 2,
)  # fmt: skip
QUICK = Protocol(
    Setting(steps=40, batch_size=8, length=16, layers=1, d_model=16, heads=2, evaluations=8, windows=32), (8e-3, 1.6e-2), 3, 1
)


@dataclass(frozen=True)
class Found:
    """What was run.

    Attributes:
        setting: The model and budget.
        searches: By name of the setting of the ratios, :data:`ADAMW` first; none where runs were read.
        arms: The baseline first, each with a run a seed.
        rows: The same, judged.
    """

    setting: Setting | Spec
    searches: dict[str, SearchResult]
    arms: tuple[tuple[Arm, tuple[RunResult | Run, ...]], ...]
    rows: tuple[ArmResult, ...]


def arms_at(lr: float, uniform: float, best: Mapping[str, float]) -> tuple[Arm, ...]:
    """Return the arms: AdamW, Table 2, the settings of Figure 10 at AdamW's and at their own learning rates, and the controls.

    Args:
        lr: AdamW's tuned learning rate.
        uniform: Mean of eq. (5) over the parameters.
        best: Tuned learning rate of each setting.
    """
    paper = dict(PAPER)
    return (
        Arm(ADAMW, lr),
        Arm("Emb", lr, ratios_of({"Emb": paper["Emb"]})),
        Arm("Emb, FFN", lr, ratios_of({kind: paper[kind] for kind in ("Emb", "FFN")})),
        Arm("Emb, FFN, QK, VO", lr, PAPER),
        Arm("Norm x 2", lr, ratios_of({"Norm": 2.0})),
        *(Arm(at_adamws(name), lr, ratios) for name, ratios in SETTINGS.items() if ratios != PAPER),
        *(Arm(f"({name}) at its own lr", best[name], ratios) for name, ratios in SETTINGS.items()),
        Arm("all x 2", rounded(2 * lr)),
        Arm(f"all x {uniform:.2g}", rounded(float(f"{uniform:.2g}") * lr)),
    )


def train(protocol: Protocol, lines: Path, jobs: int) -> Found:
    """Search the learning rates, run all arms with other seeds; finished runs are lines of a file."""
    setting = protocol.setting
    entries = entries_by_type(model_of(setting, 0))
    tuning = tuple(range(TUNING_SEED, TUNING_SEED + protocol.tuning_seeds))
    expected = 4 * runs_expected(protocol.grid, tuning) + 12 * protocol.seeds
    with progress_bar() as tell, Runs(lines, jobs=jobs, tell=tell, expected=expected) as runs:
        searches = [
            sweep(name, RunSpec(setting, 0.0, ratios), lowered(protocol.grid, weighted_ratio(ratios, entries)), tuning)
            for name, ratios in {ADAMW: (), **SETTINGS}.items()
        ]
        found = {one.name: one for one in together(searches, lambda specs: runs(specs, "searching learning rates"))}
        best = {name: one.best for name, one in found.items()}
        arms = arms_at(best[ADAMW], weighted_ratio(PAPER, entries), best)
        results = run_arms(runs, setting, arms, range(protocol.seeds))
    return Found(setting, found, results, judge(results))


def finished(folder: Path) -> Found:
    """Return the runs of Table 2 and of Figure 10 in a folder, each compared with the AdamW of its own experiment."""
    groups = []
    for name in ("table2", "fig10"):
        runs = arms(f"sharpness-disparity/{name}", folder, run=folder)
        names = [ADAMW if not k else at_adamws(arm) if arm in SETTINGS else arm for k, arm in enumerate(runs)]
        specs = [own[0].spec for own in runs.values()]
        each_arm = [Arm(arm, spec.lr, spec.ratios) for arm, spec in zip(names, specs, strict=True)]
        groups.append(tuple(zip(each_arm, map(tuple, runs.values()), strict=True)))
    table2, fig10 = groups
    return Found(table2[0][1][0].spec, {}, (*table2, *fig10[1:]), (*judge(table2), *judge(fig10)[1:]))


def at_adamws(name: str) -> str:
    """Return the name of the arm with a setting of the ratios at AdamW's learning rate."""
    return f"({name}) at AdamW's lr"


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Do the runs that are missing or read those of a folder, draw loss curves, searches and differences, write the numbers."""
    if run is None:
        protocol = QUICK if quick else FULL
        protocol = replace(protocol, setting=replace(protocol.setting, text=text, digest=digest_of(text)))
        jobs = 1 if quick else min(os.cpu_count() or 1, 8)
        found = train(protocol, out / "cache" / f"{NAME}.jsonl", jobs)
    else:
        found = finished(run)
    for one in found.searches.values():
        print(f"  {one}")
    for row in found.rows[1:]:
        print(f"  {row.arm.name}: {row.verdict}")
    files = [write_rows(out / f"{NAME}.csv", table(found)), write_rows(out / f"{NAME}_curves.csv", curves(found))]
    if found.searches:
        files.append(write_rows(out / f"{NAME}_searches.csv", searched(found)))
    said = verdicts(found)
    files.append(write_verdicts(out, NAME, said))
    return [*files, picture(found, said, out / f"{NAME}{suffix}")]


def picture(found: Found, said: Sequence[Verdict], path: Path) -> Path:
    """Draw loss curves, searches and differences."""
    with style():
        figure = page(8.2, 7.0)
        title = "Learning rates by block type (The Sharpness Disparity Principle, Figures 4 and 10, Table 2)"
        figure.text(0.075, 0.975, title, fontsize=10)
        _draw_curves(figure.add_axes((0.075, 0.565, 0.395, 0.355)), found, "Figure 4: loss curves", CURVES)
        right = figure.add_axes((0.585, 0.565, 0.395, 0.355))
        if found.searches:
            _draw_searches(right, found)
        else:
            _draw_curves(right, found, "Figure 10: ratios of Emb, QK, FFN, VO", {at_adamws(name): name for name in SETTINGS})
        _draw_differences(figure.add_axes((0.24, 0.065, 0.48, 0.4)), found)
        return save(figure, path, said)


def verdicts(found: Found) -> list[Verdict]:
    """Return what the arms show of Figures 4 and 10 and of Table 2: 95 % intervals of differences paired by seed."""
    less = {row.arm.name: row.difference for row in found.rows if row.difference is not None}
    scale_here = scale_of(found.setting, len(found.arms[0][1]))

    def gain(criterion: str, *arms: str, above: bool = False) -> Part:
        """An arm that diverged is left out of the intervals; without any the part is open."""
        seen = ", ".join(f"{arm} {less[arm]}" if arm in less else f"{arm} diverged" for arm in arms)
        turned = [less[arm] if above else negative(less[arm]) for arm in arms if arm in less]
        return above_zero(criterion, turned if len(turned) == len(arms) else [], seen)

    whole, own = "Emb, FFN, QK, VO", "(10, 8, 6, 4) at its own lr"
    blocks = ("Emb", "Emb, FFN", whole)
    steps = list(pairwise(blocks))
    losses = {arm.name: [one.losses[-1] for one in runs] for arm, runs in found.arms}
    added = [
        above_zero(
            f"adding {b.removeprefix(a + ', ')} to {a} lowers the loss",
            paired_difference(losses[a], losses[b]) if all(map(math.isfinite, losses[a] + losses[b])) else [],
        )
        for a, b in steps
    ]
    settings = tuple(f"({name}) at its own lr" for name in SETTINGS)
    as_printed = tuple(at_adamws(name) if at_adamws(name) in less else whole for name in SETTINGS)

    def best(criterion: str, arms: Sequence[str]) -> Part:
        """Eq. (5) is the last of the arms; an interval that holds 0 does not decide against it."""
        means = {arm: math.fsum(losses[arm]) / len(losses[arm]) for arm in arms}
        lowest = min(arms, key=means.__getitem__)
        seen = ", ".join(f"{mean:.3f}" for mean in means.values())
        if lowest == arms[-1] or not all(map(math.isfinite, losses[lowest] + losses[arms[-1]])):
            return in_every(criterion, [lowest == arms[-1]], seen)
        less = paired_difference(losses[lowest], losses[arms[-1]])
        return above_zero(criterion, less, f"{seen}; the lowest minus eq. (5) {less}")

    runs = {arm.name: each_seed for arm, each_seed in found.arms}

    def fast(criterion: str, arm: str) -> Part:
        """A run that is not there in time decides nothing: the paper compares budgets, and here is one, whose rate ends low."""
        reached = [first_step(b.steps, b.losses, a.losses[-1]) for a, b in zip(runs[ADAMW], runs[arm], strict=True)]
        at = ", ".join("none" if step is None else f"{step:.0f}" for step in reached)
        soon = (True if step is not None and step <= found.setting.steps / SPEEDUP else None for step in reached)
        return in_every(criterion, soon, f"its last loss is reached at step {at} of {found.setting.steps}")

    fig4 = [
        gain("eq. (5) at AdamW's learning rate, as in print, ends below tuned AdamW", whole),
        fast(f"it is {SPEEDUP} times as fast (LLaMA 1.1B in print; one budget cannot refute it)", whole),
    ]
    fig10 = [best(f"at AdamW's learning rate, as in print, the third of ({'), ('.join(SETTINGS)}) ends lowest", as_printed)]
    if found.searches:
        fig4 += [
            gain("eq. (5) at its own learning rate ends below tuned AdamW", own),
            fast(f"eq. (5) at its own learning rate is {SPEEDUP} times as fast", own),
        ]
        fig10.append(best("each at its own learning rate, the third ends lowest", settings))
    fig10.append(gain("all of them end below AdamW", *(settings if found.searches else as_printed)))
    faster = "Blockwise LR ends lower than tuned AdamW and is nearly twice as fast"
    third = "of three settings eq. (5) is the best, and all of them help"
    return [
        Verdict("sharpness-disparity/fig4", faster, scale_here, tuple(fig4)),
        Verdict("sharpness-disparity/eq5-best", third, scale_here, tuple(fig10)),
        Verdict("sharpness-disparity/table2", "Blockwise LR helps on every block, twice the rate of Norm hurts", scale_here, (
            gain("ratios on Emb; on Emb and FFN; on all four end below AdamW", *blocks),
            gain("Norm x 2 ends above AdamW", "Norm x 2", above=True))),
        Verdict("sharpness-disparity/table2-each", "Blockwise LR on any block helps", scale_here, (
            gain("Emb alone ends below AdamW", "Emb"), *added)),
    ]  # fmt: skip


def table(found: Found) -> Iterator[dict[str, Any]]:
    """Yield a row an arm: learning rate, final loss, paired difference with its intervals, what the paper prints, the verdict."""
    for row in found.rows:
        loss, one, all_of = row.loss, row.difference, row.together
        yield {
            "arm": row.arm.name, "lr": row.arm.lr,
            **{f"ratio_{kind}": dict(row.arm.ratios).get(kind, 1.0) for kind in ("Emb", "QK", "FFN", "VO", "Norm")},
            **_interval("loss", loss), **_interval("difference", one), "low_with_all": all_of and all_of.low,
            "high_with_all": all_of and all_of.high, "paper_difference": TABLE_2.get(row.arm.name), "verdict": row.verdict,
        }  # fmt: skip


def searched(found: Found) -> Iterator[dict[str, Any]]:
    """Yield a row a run of the searches; the loss is infinite where it diverged."""
    for name, one in found.searches.items():
        for lr, losses in sorted(one.losses.items()):
            for seed, loss in losses.items():
                yield {"ratios": name, "lr": lr, "seed": seed, "loss": loss, "chosen": lr == one.best}


def curves(found: Found) -> Iterator[dict[str, Any]]:
    """Yield a row an evaluation of a run of the comparison."""
    for arm, runs in found.arms:
        for one in runs:
            for step, loss in zip(one.steps, one.losses, strict=True):
                yield {"arm": arm.name, "seed": one.spec.seed, "step": step, "loss": loss}


def _interval(name: str, one: Any) -> dict[str, Any]:
    return {name: one and one.value, f"{name}_low": one and one.low, f"{name}_high": one and one.high}


CURVES = {ADAMW: "AdamW, tuned", "Emb, FFN, QK, VO": "eq. (5) at AdamW's lr", "(10, 8, 6, 4) at its own lr": "eq. (5), tuned"}
"""Arm -> its label in Figure 4."""


def _draw_curves(axes: Axes, found: Found, title: str, names: Mapping[str, str]) -> None:
    """Draw the mean over the seeds with its interval, from the first fifth of the steps on."""
    heading(axes, title, "step", "held-out loss (nats per token)")
    shown = {arm.name: runs for arm, runs in found.arms if arm.name in names}
    first, means = found.setting.steps / 5, []
    colours = [METHOD_COLOURS[k] for k in (0, 4, 3)]  # eq. (5) tuned: that of the ratios 10, 8, 6, 4 in the next picture
    drawn = [(name, label) for name, label in names.items() if name in shown]
    for (name, label), colour, dash in zip(drawn, colours, DASHES, strict=False):
        steps, columns = shown[name][0].steps, zip(*(one.losses for one in shown[name]), strict=True)
        points = [(s, mean_interval(c)) for s, c in zip(steps, columns, strict=True) if s >= first and all(map(math.isfinite, c))]
        x = [s for s, _ in points]
        axes.plot(x, [m.value for _, m in points], color=colour, linestyle=dash, label=label)
        axes.fill_between(x, [m.low for _, m in points], [m.high for _, m in points], color=colour, alpha=0.15, linewidth=0)
        means += [m.value for _, m in points]
    room = max(means) - min(means)
    axes.set_ylim(min(means) - 0.1 * room, max(means) + 0.25 * room)
    axes.set_xlim(first, found.setting.steps)
    axes.legend(loc="upper right", handlelength=2.2)


def _draw_searches(axes: Axes, found: Found) -> None:
    """Figure 10, at every learning rate."""
    heading(axes, "Figure 10: ratios of Emb, QK, FFN, VO", "learning rate of the norms", "held-out loss (nats per token)")
    chosen = found.searches[ADAMW].best
    axes.axvline(chosen, color=FAINT, linewidth=0.6, linestyle=":")
    draw_searches(axes, list(found.searches.values()))
    axes.annotate("AdamW's", (chosen, axes.get_ylim()[0]), (3, 3), textcoords="offset points", fontsize=7, color=FAINT)


def _draw_differences(axes: Axes, found: Found) -> None:
    """Table 2 and the controls; hollow: what the paper prints."""
    heading(axes, "Table 2: difference from tuned AdamW", "nats per token, paired by seed, 95 % intervals")
    rows = found.rows[1:]
    draw_differences(axes, rows)
    own = [(TABLE_2[row.arm.name], k - 0.28) for k, row in enumerate(rows) if row.arm.name in TABLE_2]
    label = "in print (one seed)"
    axes.plot(*zip(*own, strict=True), "D", color=METHOD_COLOURS[2], fillstyle="none", markersize=3.5, label=label)
    axes.set_ylim(len(rows) + 0.5, -0.6)  # room for the legend
    axes.legend(loc="lower right", handlelength=1.0, borderaxespad=0.1)
