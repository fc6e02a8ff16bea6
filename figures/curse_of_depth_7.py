"""Table 7 and Figure 7 of The Curse of Depth: other normalisations, and LayerNorm Scaling in a vision transformer.

Table 7 trains LLaMA-130M once with six normalisations: perplexities of 26.73 (Pre-LN), 27.91 (Admin), 28.01 (Group-LN), 26.51
(Sandwich-LN), 26.07 (Mix-LN) and 25.76 (LNS). Table 5 and Figure 7 train ViT-S on ImageNet without LayerScale: the accuracy is
67.91 %, 66.43 with LNS after the norm, as in language models, and 68.75 with LNS after attention and MLP, which keeps the
variance of the deepest block at 150 instead of 3000.

Here: Table 7 with twelve blocks of width 64 on the bytes of Python's standard library, 400 steps, two seeds
(``papers.experiments.catalogue``), each seed's loss minus that of Pre-LN; Figure 7 with a vision transformer of twelve pre-norm
blocks of width 32 on scikit-learn's digits in patches of 2 x 2, the runs of Table 5: AdamW at 1e-3 with warm-up and cosine, 150
steps of 32 images, two seeds; the variance over features of each block's output, a mean over the tokens of 64 held-out images,
and the accuracy on all 360 of them. The criterion on the variance is Sec. 5.6's: more than 3000 without LNS, below 150 with it
after attention and MLP, a twentieth.

What came out: LNS is the worst of the six after 400 steps, 0.15 nats a byte above Pre-LN in both seeds, Mix-LN the only one
below Pre-LN in both, by 0.01. In the vision transformer LNS after attention and MLP keeps the last block's variance at 3
instead of 7, and has an accuracy of 77 and 71 %, Pre-LN 85 and 74 %; LNS after the norm is lower in both seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from figures._kit import FAINT, METHOD_COLOURS, METHOD_MARKS, each, heading, page, save, style, write_rows, write_verdicts
from figures._trained import PRINTED_STEPS, Arms, arms, over_training, seeds_of, spec_of
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.training.monitoring.log import layer_key
from papers.experiments.spec import scale_of
from papers.experiments.tokens import data_of
from papers.experiments.training import accuracy

NAME = Path(__file__).stem
TABLE_7 = {"Pre-LN": 26.73, "Admin": 27.91, "Group-LN": 28.01, "Sandwich-LN": 26.51, "Mix-LN": 26.07, "LNS": 25.76}
"""Printed perplexities."""
PRINTED = {"Pre-LN": 67.91, "LNS after the norm": 66.43, "LNS after attention and MLP": 68.75}
"""Table 5: accuracy in %."""
HELD_OUT = 50_000
"""Images that the accuracy is measured on, at most: all of ImageNet's validation split."""
Seen = dict[str, list[dict[str, Any]]]
"""Variant -> steps, variances (steps, blocks) and accuracy, one a seed."""


def vision(runs: Arms) -> Seen:
    """Return the variances of the blocks' outputs and the accuracy on the held-out images of vision transformers."""
    seen: Seen = {}
    for name, own in runs.items():
        for run in own:
            assert run.log is not None
            right = accuracy(run.model(), *data_of(run.spec)[1].windows(run.spec.length, HELD_OUT))
            variances = run.log.series("depth", "stream", "variance")[:, 1:]
            seen.setdefault(name, []).append({"steps": run.log.steps, "variances": variances, "accuracy": right})
    return seen


def verdicts(runs: Arms, images: Arms, seen: Seen) -> list[Verdict]:
    """Return what the runs show of Table 7, and of Table 5 with Figure 7; one outcome a seed."""
    size = spec_of(runs)
    last = {method: [run.losses[-1] for run in own] for method, own in runs.items()}
    less = {method: [a - b for a, b in zip(own, last["Pre-LN"], strict=True)] for method, own in last.items()}
    early = unreached(steps=(size.steps, PRINTED_STEPS))  # LNS is slower at first: Figure 5
    table_7 = [
        in_every(
            f"{method}'s loss is {'above' if sign > 0 else 'below'} Pre-LN's",
            (sign * x > 0 for x in less[method]),
            each(less[method]),
            early if method == "LNS" else "",
        )
        for method, sign in (("Admin", 1), ("Group-LN", 1), ("Sandwich-LN", -1), ("Mix-LN", -1), ("LNS", -1))
    ]
    lowest = [min(last, key=lambda method: last[method][k]) for k in range(len(last["Pre-LN"]))]
    seen_lowest = f"lowest {' and '.join(lowest)}"
    table_7.append(in_every("LNS has the lowest loss", (one == "LNS" for one in lowest), seen_lowest, early))
    deep = {name: [run["variances"][-1][-1] for run in own] for name, own in seen.items()}
    right = {name: [run["accuracy"] for run in own] for name, own in seen.items()}
    base, norm, branch = PRINTED
    table_5 = (
        in_every(
            "LNS after attention and MLP: the last block's variance ends at a twentieth of Pre-LN's (in print 150 of 3000)",
            (a > 20 * b for a, b in zip(deep[base], deep[branch], strict=True)),
            f"{each(deep[branch])} against {each(deep[base])}",
            direction=(a > b for a, b in zip(deep[base], deep[branch], strict=True)),
        ),
        in_every(
            "LNS after attention and MLP: the accuracy is above Pre-LN's",
            (b > a for a, b in zip(right[base], right[branch], strict=True)),
            f"{each(right[branch])} against {each(right[base])}",
        ),
        in_every(
            "LNS after the norm: the accuracy is below Pre-LN's",
            (b < a for a, b in zip(right[base], right[norm], strict=True)),
            each(right[norm]),
        ),
    )  # fmt: skip
    return [
        Verdict(
            "curse-of-depth/table7", "LNS has the lowest loss; Mix-LN and Sandwich-LN beat Pre-LN, Admin and Group-LN do not",
            scale_of(size, len(seeds_of(runs))), tuple(table_7),
        ),
        Verdict(
            "curse-of-depth/table5", "LNS after attention and MLP lowers a vision transformer's variance and raises its accuracy",
            scale_of(spec_of(images), len(seeds_of(images))), table_5,
        ),
    ]  # fmt: skip


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train twelve language models and six vision transformers (about 7 minutes of one core), draw, and write the numbers.

    ``quick`` takes four blocks of width 16 and 30 steps, and three blocks of width 8 and 20 steps.
    """
    runs = arms("curse-of-depth/table7", out, quick=quick, run=run, text=text)
    images = arms("curse-of-depth/table5", out, quick=quick, run=run)
    seen = vision(images)
    said = verdicts(runs, images, seen)
    losses = [
        {"method": method, "seed": seed, "held-out loss": run.losses[-1], "paper's perplexity": TABLE_7[method]}
        for method, own in runs.items()
        for seed, run in enumerate(own)
    ]
    variances = [
        {"variant": name, "seed": seed, "accuracy": run["accuracy"], "step": step, "block": block, "variance": value}
        for name, own in seen.items()
        for seed, run in enumerate(own)
        for step, row in zip(run["steps"], run["variances"], strict=True)
        for block, value in enumerate(row, start=1)
    ]
    with style():
        figure = page(8.2, 6.0)
        table_7(figure.add_axes((0.13, 0.62, 0.6, 0.33)), runs)
        whole = np.concatenate([run["variances"].ravel() for own in seen.values() for run in own])
        for k, (name, own) in enumerate(seen.items()):
            axes = figure.add_axes((0.085 + 0.295 * k, 0.08, 0.24, 0.37))
            over_training(axes, own[0]["steps"], own[0]["variances"], (0.8 * whole.min(), 1.25 * whole.max()))
            right = each(100 * run["accuracy"] for run in own)
            heading(
                axes, f"{name}\naccuracy {right} % (print {PRINTED[name]})", "step", "" if k else "variance of block's output"
            )
        layer_key(figure.axes[-1], 1, len(seen["Pre-LN"][0]["variances"][0]))
        picture = save(figure, out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", losses), write_rows(out / f"{NAME}_variances.csv", variances)]
    return [picture, *numbers, write_verdicts(out, NAME, said)]


def table_7(axes: Axes, runs: Arms) -> None:
    """Each seed's loss minus that of Pre-LN with that seed; at the right the printed perplexity."""
    base = [run.losses[-1] for run in runs["Pre-LN"]]
    for y, (method, own) in enumerate(runs.items()):
        for k, run in enumerate(own):
            axes.plot(run.losses[-1] - base[k], y, METHOD_MARKS[k], color=METHOD_COLOURS[1], markersize=5)
        text = f"loss {each(run.losses[-1] for run in own)}; printed perplexity {TABLE_7[method]}"
        axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color=FAINT)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_ylim(len(runs) - 0.5, -0.5)
    heading(axes, "Table 7: held-out loss minus that of Pre-LN, one mark per seed", "difference in nats per token")
