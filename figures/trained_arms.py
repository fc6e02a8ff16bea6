"""Losses of the methods of any experiment: Tables 6 and 8 of The Curse of Depth, experts of HybridNorm, a scaling law.

With ``--run DIR`` the experiments whose finished runs are in the folder: whatever ``python -m papers train`` made, at whatever
size. Without, four experiments whose rows of the ledger lack only a run, at the small preset (``papers.experiments.catalogue``):
Tables 6 and 8 of The Curse of Depth (LayerScale, SkipInit, two initialisations, seven positions of the factor of LNS; models of
12 and 16 blocks of width 64), Figure 3 of HybridNorm (8 experts a block, 2 of them for each token), and Figure 5 of The Sharpness
Disparity Principle (Blockwise LR on three sizes). Left of each panel: held-out losses at the end less those of the first method
with the same seed, a mark a seed; for the scaling law the losses over the parameters.

What came out after 200 steps: LNS ends 0.09 to 0.12 nats a byte above Pre-LN, as in ``curse_of_depth_4_8``; LayerScale 0.06 to
0.11, SkipInit 0.02 to 0.06, and the two initialisations are within 0.02 of Pre-LN. "Before LN" is Pre-LN to five digits, since
a norm undoes the factor: the 0.24 of Table 8 between them is the difference of two runs. After the residual the loss stays at
3.2, where the others reach 2.3 to 2.5, without a number that is not finite. With experts HybridNorm ends 0.02 and 0.10 above
Pre-Norm after 0.12 of 400,000 million tokens. Blockwise LR gains nothing on one block and loses 0.14 nats on four blocks of
width 48 at AdamW's learning rate, which is not tuned here; so the gap grows in the other direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from figures._kit import DASHES, FAINT, METHOD_COLOURS, METHOD_MARKS, each, heading, page, save, style, write_rows, write_verdicts
from figures._trained import PRINTED_STEPS, Arms, models, seeds_of, short_of, spec_of
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.curvature.plot_frame import Picture
from hessiankit.support.errors import InputError
from papers.experiments.catalogue import EXPERIMENTS, name_of
from papers.experiments.runs import finished_in
from papers.experiments.spec import counted, scale_of

NAME = Path(__file__).stem
SMALL = ("curse-of-depth/table6", "curse-of-depth/table8", "hybridnorm/fig3", "sharpness-disparity/fig5")
"""Experiments that are drawn without ``--run``."""
PRINTED = {
    "curse-of-depth/table6": {
        "130M": (26.73, 27.93, 27.41, 26.95, 26.04, 25.76, 25.80), "250M": (21.92, 23.45, 22.29, 21.50, 20.98, 20.35, 20.79),
    },
    "curse-of-depth/table8": {"130M": (26.73, 26.97, 26.53, 1358.11, 26.89, 26.43, 25.76)},
}  # fmt: skip
"""Printed perplexities by model, in the order of the methods."""

MINI_PILE_STEPS = 30_000
"""Steps of Figure 5 on MiniPile (App. A.1); the paper's gain comes "from the mid-to-late stages of training" (Sec. 6.1)."""
Sizes = dict[str, Arms]
"""Model -> method -> runs, one a seed."""


def names_in(folder: Path) -> list[str]:
    """Return the experiments whose finished runs are in a folder.

    Raises:
        InputError: There are none.
    """
    names = {name_of(one.spec) for one in finished_in(folder)}
    found = [name for name in EXPERIMENTS if name in names]
    if not found:
        raise InputError(f"figures: {folder} has no finished run; python -m papers train --list names what makes them")
    return found


def less(arms: Arms, arm: str) -> list[float]:
    """Return a method's last losses minus those of the first method with the same seed."""
    base = next(iter(arms.values()))
    return [run.losses[-1] - other.losses[-1] for run, other in zip(arms[arm], base, strict=False)]


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train 62 models (about 20 minutes of one core) or read those of a folder, draw, and write the numbers.

    ``quick`` takes the tiny presets.
    """
    names = SMALL if run is None else names_in(run)
    found = {name: models(name, out, quick=quick, run=run, text=None if run else text) for name in names}
    said = [verdict for name, sizes in found.items() for verdict in verdicts(name, sizes)]
    rows = [
        {
            "experiment": name, "model": size, "method": arm, "seed": one.spec.seed, "held-out loss": one.losses[-1],
            "diverged": one.diverged,
        }
        for name, sizes in found.items()
        for size, arms in sizes.items()
        for arm, own in arms.items()
        for one in own
    ]  # fmt: skip
    with style():
        drawn = save(picture(found), out / f"{NAME}{suffix}", said)
    return [drawn, write_rows(out / f"{NAME}.csv", rows), write_verdicts(out, NAME, said)]


def verdicts(name: str, sizes: Sizes) -> list[Verdict]:
    """Return what the runs show of the rows that they are of; one outcome a seed, and a model."""
    arms = next(iter(sizes.values()))
    spec = spec_of(arms)
    size = scale_of(spec, len(seeds_of(arms))) + (f"; of {len(sizes)} models the first" if len(sizes) > 1 else "")
    early = unreached(steps=(spec.steps, PRINTED_STEPS))

    def below(criterion: str, low: str, high: str, missing: str = "") -> Any:
        pairs = [(a.losses[-1], b.losses[-1]) for one in sizes.values() for a, b in zip(one[low], one[high], strict=True)]
        return in_every(criterion, (a < b for a, b in pairs), each(a - b for a, b in pairs), missing)

    if name == "curse-of-depth/table6":
        others = [arm for arm in arms if not arm.startswith("LNS")]
        parts = [below(f"LNS's loss is below that of {arm}", "LNS", arm, early) for arm in others]
        parts.append(below("LNS alone is below LNS with scaled initialisation", "LNS", "LNS, scaled init", early))
        return [Verdict("curse-of-depth/table6", "LNS is better than the other scalings, alone too", size, tuple(parts))]
    if name == "curse-of-depth/table8":
        lowest = [min(arms, key=lambda arm: arms[arm][k].losses[-1]) for k in range(len(arms["LNS"]))]
        best = in_every(
            "after the norm the loss is the lowest", (arm == "LNS" for arm in lowest), f"lowest {', '.join(lowest)}", early
        )
        ends = [run.losses[-1] for run in arms["After Residual"]]
        apart = in_every("after the residual it diverges", (run.diverged for run in arms["After Residual"]), each(ends), early)
        return [
            Verdict("curse-of-depth/table8", "of seven positions of the factor, after the norm is the best", size, (best,)),
            Verdict("curse-of-depth/after-residual", "with the factor after the residual training diverges", size, (apart,)),
        ]
    if name == "hybridnorm/fig3":
        part = below("HybridNorm's held-out loss is below Pre-Norm's", "HybridNorm", "Pre-Norm", short_of(spec))
        return [Verdict("hybridnorm/fig3", "with experts HybridNorm has a lower loss than Pre-Norm", size, (part,))]
    if name == "sharpness-disparity/fig5":
        gains = [[-x for x in less(one, "Blockwise LR")] for one in sizes.values()]
        seen, late = "; ".join(map(each, gains)), unreached(steps=(spec.steps, MINI_PILE_STEPS))
        lower = in_every("Blockwise LR's loss is below AdamW's", (x > 0 for one in gains for x in one), seen, late)
        rising = (all(a[k] < b[k] for a, b in pairwise(gains)) for k in range(len(gains[0])))
        grows = in_every("the gap is larger for each larger model", rising, seen, late)
        return [Verdict("sharpness-disparity/fig5", "the gain of Blockwise LR grows with the model", size, (lower, grows))]
    return []


def picture(found: Mapping[str, Sizes]) -> Picture:
    """Draw a row a model of each experiment, or the scaling law of one with many."""
    rows = math.ceil(len(found) / 2)
    figure = page(8.2, 2.9 * rows)
    for k, (name, sizes) in enumerate(found.items()):
        axes = figure.add_subplot(rows, 2, k + 1)
        if len(sizes) > 2:
            law(axes, sizes)
            heading(axes, name, "parameters", "held-out loss (nats/token)")
        else:
            differences(axes, name, sizes)
            heading(axes, name, f"held-out loss minus that of {next(iter(next(iter(sizes.values()))))} (nats per token)")
    figure.tight_layout(w_pad=2.5)
    return figure


def differences(axes: Axes, name: str, sizes: Sizes) -> None:
    """A row a method: a mark a seed, a colour a model; at the right the printed perplexities."""
    labels: Sequence[str] = list(next(iter(sizes.values())))
    for k, (size, arms) in enumerate(sizes.items()):
        for y, arm in enumerate(labels):
            for seed, value in enumerate(less(arms, arm)):
                label = size if y == seed == 0 else None
                axes.plot(
                    value, y + 0.2 * (k - 0.5 * (len(sizes) - 1)), METHOD_MARKS[seed], color=METHOD_COLOURS[k + 1], label=label
                )
    for y in range(len(labels)):
        printed = [f"{values[y]:g}" for values in PRINTED.get(name, {}).values()]
        axes.text(1.01, y, ", ".join(printed), transform=axes.get_yaxis_transform(), va="center", fontsize=6.5, color=FAINT)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.legend(loc="best", fontsize=6.5)


def law(axes: Axes, sizes: Sizes) -> None:
    """Mean losses over the parameters, a line a method, with each seed."""
    counts = [sum(p.numel() for p in counted(spec_of(arms)).parameters()) for arms in sizes.values()]
    for k, arm in enumerate(next(iter(sizes.values()))):
        losses = [[run.losses[-1] for run in arms[arm]] for arms in sizes.values()]
        look: Any = {"color": METHOD_COLOURS[2 * k], "marker": METHOD_MARKS[k]}
        axes.plot(counts, [math.fsum(own) / len(own) for own in losses], linestyle=DASHES[k], label=arm, **look)
        for count, own in zip(counts, losses, strict=True):
            axes.plot([count] * len(own), own, linestyle="", markersize=2.5, **look)
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="best")
