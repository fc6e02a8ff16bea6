"""Figures 4 and 5 of HybridNorm: the definition of its first block, and gradients by layer under three placements.

Figure 4 trains a 550M model with four first blocks: HybridNorm, HybridNorm*, First-QKV-Pre, a norm after the embedding; all
but the last help. Figure 5 shows the gradient's norm by layer at steps 1 and 100; its text: Pre-Norm explodes in deep models,
Post-Norm vanishes, HybridNorm is balanced. Both are single runs. HybridNorm* and First-QKV-Pre are one class of functions, equal
at initialisation but for eps (docs/claims.md): what tells their curves apart is how a gain learns, and noise.

Here: eight blocks of width 64 on the bytes of Python's standard library, 240 steps, four seeds
(``papers.experiments.catalogue``). Above: held-out loss, and its difference to HybridNorm's of the same seed with
Student's 95 % interval. Below: the norm of the loss's gradient with respect to all parameters of each block, at
initialisation (the gradient of step 1) and after 100 steps, sixteen blocks as in the paper's model, two seeds; and, against
the number of blocks, the last block's gradient over the first's at initialisation, three seeds. A gradient that explodes on
its way down to the first block makes a ratio far below 1, one that vanishes a ratio far above. The paper names two
initialisations for Pre-Norm, normal (Section 4.4) and Megatron (Table 7): both are drawn; and "Post-Norm" in two forms, the
authors' code's (Appendix E, shifted) and Equations 3-4.

What came out, Figure 4: no first block is told apart from HybridNorm after 240 steps (HybridNorm* -0.025 [-0.080, 0.029],
First-QKV-Pre -0.023 [-0.074, 0.028], EmbedNorm -0.008 [-0.049, 0.034]); HybridNorm* and First-QKV-Pre differ by 0.002.
Figure 5: Post-Norm is level at initialisation (last over first block 0.9 to 1.3 at any depth) and rises to 2 after 100 steps,
nothing vanishes. Pre-Norm's gradient grows towards the first block, and more so with depth (normal: ratio 0.30 at 4 blocks, 0.10
at 32). HybridNorm is level from block 2 on, and its first block has nine times the gradient of the others: the ratio, 0.15 to
0.11, is no better balanced than Pre-Norm's. HybridNorm* lifts the first two blocks, and after 100 steps one of its two seeds has
a gradient of 20 in the first block, against 0.5 of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

from figures._kit import (
    DASHES,
    FAINT,
    METHOD_COLOURS,
    METHOD_MARKS,
    cached,
    each,
    heading,
    page,
    save,
    style,
    write_rows,
    write_verdicts,
)
from figures._trained import Arms, arms, seeds_of, spec_of
from figures._verdicts import Verdict, above_zero, in_every, negative
from hessiankit.curvature.plot_frame import Picture
from hessiankit.training.depth import depth_diagnostics
from papers.experiments.catalogue.hybridnorm import FIRST_BLOCKS, FLOWS
from papers.experiments.runs import measured_on
from papers.experiments.spec import Spec, model_of, scale_of
from papers.experiments.tuning.verdict import Interval, paired_difference

NAME = Path(__file__).stem
LOOKS = {
    name: {"color": METHOD_COLOURS[k], "marker": METHOD_MARKS[k], "linestyle": DASHES[k]}
    for k, name in enumerate(dict.fromkeys((*FLOWS, *FIRST_BLOCKS)))
}


DEPTHS, QUICK_DEPTHS, RATIO_SEEDS = (4, 8, 16, 32), (2, 4, 8), (0, 1, 2)
"""Numbers of blocks, and seeds, of the ratios at initialisation."""


def differences(runs: Arms) -> Iterator[tuple[str, int, Interval]]:
    """Yield (name, step, loss minus that of HybridNorm with the same seed), where no run has diverged."""
    base = runs["HybridNorm"]
    for name, own in runs.items():
        for k, step in enumerate(own[0].steps):
            losses, others = ([run.losses[k] for run in group] for group in (own, base))
            if name != "HybridNorm" and np.isfinite([*losses, *others]).all():
                yield name, step, paired_difference(losses, others)


def flows(runs: Arms) -> dict[str, np.ndarray]:
    """Return gradient norms of Figure 5 by name: (seeds, 2, blocks), at first and at last; NaN where a run broke off."""
    found = {}
    for name, own in runs.items():
        norms = np.full((len(own), 2, own[0].spec.layers), np.nan)
        for k, run in enumerate(own):
            assert run.log is not None
            measured = run.log.series("depth", "gradient")[[0, -1]]
            norms[k, : len(measured)] = measured
        found[name] = norms
    return found


def ratios(deep: Spec, depths: Sequence[int], seeds: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """Return rows: the last block's gradient norm over the first's, at initialisation, by number of blocks and seed."""
    rows = []
    for name, (placement, initialisation) in FLOWS.items():
        for layers in depths:
            for seed in seeds:
                spec = replace(deep, placement=placement, initialisation=initialisation, layers=layers, seed=seed)

                def gradient(spec: Any = spec) -> list[float]:
                    found = depth_diagnostics(model_of(spec), measured_on(spec), what="gradient").gradient
                    return list(found or ())

                norms = cached(
                    out,
                    NAME,
                    spec,
                    gradient,
                    code=("hessiankit/training/depth", "hessiankit/blocks", "hessiankit/cli/text.py"),
                )
                rows.append({"model": name, "blocks": layers, "seed": seed, "last / first": norms[-1] / norms[0]})
    return rows


def depths_of(at_start: Sequence[dict[str, Any]]) -> list[int]:
    """Return the numbers of blocks of the ratios, rising."""
    return sorted({row["blocks"] for row in at_start})


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train sixteen models of eight blocks and twelve of sixteen (about 7 minutes of one core), draw, and write the numbers.

    ``quick`` takes at most eight blocks of width 16, 30 steps and two seeds: seconds.
    """
    options: Any = {"quick": quick, "run": run, "text": text, "seeds": (0, 1) if quick else None}
    runs, deep = arms("hybridnorm/fig4", out, **options), arms("hybridnorm/fig5", out, **options)
    depths = QUICK_DEPTHS if quick else DEPTHS if run is None else (spec_of(deep).layers,)
    gradients, at_start = flows(deep), ratios(spec_of(deep), depths, RATIO_SEEDS[:2] if quick else RATIO_SEEDS, out)
    apart = list(differences(runs))
    losses = [
        {"first block": name, "seed": run.spec.seed, "step": step, "held-out loss": loss, "diverged": run.diverged}
        for name, own in runs.items()
        for run in own
        for step, loss in zip(run.steps, run.losses, strict=True)
    ]
    by_block = [
        {"model": name, "seed": seed, "step": step, "block": k + 1, "gradient norm": float(value)}
        for name, values in gradients.items()
        for seed, both in zip(seeds_of(deep), values, strict=True)
        for step, row in zip((0, spec_of(deep).steps), both, strict=True)
        for k, value in enumerate(row)
    ]
    paired = [{"first block": n, "step": s, "difference": i.value, "low": i.low, "high": i.high} for n, s, i in apart]
    said = verdicts(apart, gradients, at_start, runs, deep)
    with style():
        drawn = save(picture(runs, deep, apart, gradients, at_start), out / f"{NAME}{suffix}", said)
    return [
        drawn,
        write_rows(out / f"{NAME}_losses.csv", losses),
        write_rows(out / f"{NAME}_differences.csv", paired),
        write_rows(out / f"{NAME}_gradients.csv", by_block),
        write_rows(out / f"{NAME}_ratios.csv", at_start),
        write_verdicts(out, NAME, said),
    ]


def verdicts(
    apart: Sequence[tuple[str, int, Interval]],
    gradients: dict[str, np.ndarray],
    at_start: Sequence[dict[str, Any]],
    runs: Arms,
    deep: Arms,
) -> list[Verdict]:
    """Return what the runs show of Figures 4 and 5."""
    depths, steps = depths_of(at_start), spec_of(deep).steps
    last = {name: interval for name, _, interval in apart}
    criteria = {
        "HybridNorm*": "HybridNorm*'s loss is below HybridNorm's",
        "First-QKV-Pre": "First-QKV-Pre's loss is below HybridNorm's",
        "EmbedNorm": "EmbedNorm's loss is above HybridNorm's",
    }
    fig4 = []
    for name, text in criteria.items():
        if name in last:
            gain = last[name] if name == "EmbedNorm" else negative(last[name])
            fig4.append(above_zero(text, gain, str(last[name])))
    deepest = depths[-1]
    ends = {name: [r["last / first"] for r in at_start if (r["model"], r["blocks"]) == (name, deepest)] for name in FLOWS}
    by_depth = {
        name: [np.mean([r["last / first"] for r in at_start if (r["model"], r["blocks"]) == (name, n)]) for n in depths]
        for name in FLOWS
    }
    pre, post = ([name for name in FLOWS if name.startswith(kind)] for kind in ("Pre-Norm", "Post-Norm"))
    amplifies = in_every(
        f"Pre-Norm: at {deepest} blocks the last block's gradient is below half the first's",
        (x < 0.5 for name in pre for x in ends[name]),
        "mean quotient by depth " + "; ".join(each(by_depth[name], 2) for name in pre),
    )
    vanishes = in_every(
        f"Post-Norm: at {deepest} blocks the first block's gradient is below half the last's",
        (x > 2 for name in post for x in ends[name]),
        "; ".join(each(by_depth[name], 2) for name in post),
    )
    spread = {
        name: [at[-1].max() / at[-1].min() for at in gradients[name]] for name in FLOWS if np.isfinite(gradients[name]).all()
    }
    balanced = [
        in_every(
            f"after {steps} steps {name}'s largest over smallest gradient is below that of every other placement",
            (x < min(min(spread[other]) for other in spread if not other.startswith("HybridNorm")) for x in spread[name]),
            f"{each(spread[name], 2)} against "
            + ", ".join(f"{other} {each(spread[other], 2)}" for other in spread if not other.startswith("HybridNorm")),
        )
        for name in ("HybridNorm", "HybridNorm*")
        if name in spread
    ]
    scales = [scale_of(spec_of(one), len(seeds_of(one))) for one in (runs, deep)]
    return [
        Verdict(
            "hybridnorm/fig4",
            "a special first block lowers the loss, a norm after the embedding does not",
            scales[0],
            tuple(fig4),
        ),
        Verdict(
            "hybridnorm/fig5-pre", "at initialisation Pre-Norm's gradient grows towards the first block", scales[1], (amplifies,)
        ),
        Verdict("hybridnorm/fig5-post", "at initialisation Post-Norm's gradient vanishes", scales[1], (vanishes,)),
        Verdict("hybridnorm/fig5-step-100", "after 100 steps HybridNorm's gradient is the most even", scales[1], tuple(balanced)),
    ]


def picture(
    runs: Arms, deep: Arms, apart: Sequence[tuple[str, int, Interval]], gradients: dict[str, np.ndarray],
    at_start: Sequence[dict[str, Any]],
) -> Picture:  # fmt: skip
    """Draw Figure 4 above and Figure 5 below."""
    depths, steps = depths_of(at_start), spec_of(runs).steps
    with style():
        figure = page(7.6, 6.7)
        figure.text(0.08, 0.972, "First blocks, and gradients by layer (HybridNorm, Figures 4 and 5)", fontsize=10)
        above = figure.add_gridspec(1, 2, left=0.08, right=0.83, top=0.915, bottom=0.595, wspace=0.32)
        losses, less = (figure.add_subplot(above[0, k]) for k in range(2))
        heading(losses, f"Held-out loss after {steps} steps, one mark per seed", "", "loss (nats per token)")
        heading(less, "Loss minus that of HybridNorm, 95 %", "step", "nats per token")
        lowest = steps / 10
        for k, (name, own) in enumerate(runs.items()):
            look: Any = LOOKS[name]
            for j, run in enumerate(own):
                shift = 0.1 * (j - (len(own) - 1) / 2)
                losses.plot(k + shift, run.losses[-1], marker=look["marker"], color=look["color"], markersize=4)
            losses.plot([], [], label=name, **look)
            losses.plot([k - 0.3, k + 0.3], [np.mean([run.losses[-1] for run in own])] * 2, color=look["color"], linewidth=1)
            there = [(step + lowest * 0.15 * (k - 2), i) for n, step, i in apart if n == name and step >= lowest]
            if there:
                bars = [[i.value - i.low for _, i in there], [i.high - i.value for _, i in there]]
                less.errorbar([x for x, _ in there], [i.value for _, i in there], yerr=bars, elinewidth=0.8, **look)
        losses.set_xticks(range(len(runs)), [name.replace("-QKV", "\n-QKV") for name in runs], fontsize=7)
        losses.set_xlim(-0.5, len(runs) - 0.5)
        less.axhline(0, color=FAINT, linewidth=0.6)
        figure.legend(*losses.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(0.84, 0.92))
        below = figure.add_gridspec(1, 3, left=0.08, right=0.985, top=0.415, bottom=0.065, wspace=0.36)
        panels = [figure.add_subplot(below[0, k]) for k in range(3)]
        heading(panels[0], "Gradient at initialisation", "block", "gradient norm (thin lines: seeds)")
        heading(panels[1], f"Gradient after {spec_of(deep).steps} steps", "block")
        heading(panels[2], "Last over first block, initial", "number of blocks", "ratio of gradient norms")
        for name, values in gradients.items():
            look = {**LOOKS[name], "markersize": 2.5}
            blocks = range(1, values.shape[-1] + 1)
            for at in range(2):
                panels[at].plot(blocks, np.exp(np.log(values[:, at]).mean(0)), label=name, **look)
                for one in values[:, at]:
                    panels[at].plot(blocks, one, color=look["color"], linewidth=0.4)
            own_ratios = [[r["last / first"] for r in at_start if (r["model"], r["blocks"]) == (name, n)] for n in depths]
            panels[2].plot(depths, np.mean(own_ratios, axis=1), **look)
        _scales(panels, depths)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.53, 0.525), ncols=3, handlelength=3)
    return figure


def _scales(panels: Sequence[Axes], depths: Sequence[int]) -> None:
    for axes in panels:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(FixedLocator([a * 10.0**b for b in range(-4, 4) for a in (1, 2, 5)]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    for axes in panels[:2]:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    panels[2].set_xscale("log", base=2)
    panels[2].set_xticks(depths, [str(n) for n in depths])
    panels[2].axhline(1, color=FAINT, linewidth=0.6)
