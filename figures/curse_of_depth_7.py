"""Table 7 and Figure 7 of The Curse of Depth: other normalisations, and LayerNorm Scaling in a vision transformer.

Table 7 trains LLaMA-130M once with six normalisations: perplexities of 26.73 (Pre-LN), 27.91 (Admin), 28.01 (Group-LN), 26.51
(Sandwich-LN), 26.07 (Mix-LN) and 25.76 (LNS). Table 5 and Figure 7 train ViT-S on ImageNet without LayerScale: the accuracy is
67.91 %, 66.43 with LNS after the norm, as in language models, and 68.75 with LNS after attention and MLP, which keeps the
variance of the deepest block at 150 instead of 3000.

Here: Table 7 with twelve blocks of width 64 on the bytes of Python's standard library, 400 steps, two seeds
(``papers.experiments.catalogue``), each seed's loss less Pre-LN's; Figure 7 with a vision transformer of twelve pre-norm
blocks of width 32 on scikit-learn's digits in patches of 2 x 2, AdamW at 1e-3, 150 steps of 32 images, two seeds: the variance
over features of each block's output, a mean over the tokens of 64 test images. The criterion on the variance is Sec. 5.6's:
more than 3000 without LNS, below 150 with it after attention and MLP, a twentieth.

What came out: LNS is the worst of the six after 400 steps, 0.15 nats a byte above Pre-LN in both seeds, Mix-LN the only one
below Pre-LN in both, by 0.01. In the vision transformer LNS after attention and MLP keeps the last block's variance at 4
instead of 20 (a fifth) and has an accuracy of 87 %, Pre-LN 86 %; LNS after the norm is lower in one seed and equal in the
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from figures._digits import ImageSpec, images_of
from figures._kit import FAINT, METHOD_COLOURS, METHOD_MARKS, cached, each, heading, page, save, style, write_rows, write_verdicts
from figures._trained import PRINTED_STEPS, Arms, arms, over_training, seeds_of, spec_of
from figures._verdicts import Verdict, in_every, unreached
from hessiankit.blocks import VisionTransformer
from hessiankit.training.depth import depth_diagnostics
from hessiankit.training.monitoring.log import layer_key
from papers.experiments.spec import Spec, scale, scale_of
from papers.experiments.tokens import data_of
from papers.experiments.training import accuracy, updates

NAME = Path(__file__).stem
CODE = (
    "hessiankit/blocks", "hessiankit/cli/study.py", "hessiankit/training/depth", "papers/experiments/images.py",
    "papers/experiments/training.py", f"figures/{NAME}.py",
)  # fmt: skip
TABLE_7 = {
    "Pre-LN": ("pre", 26.73), "Admin": ("admin", 27.91), "Group-LN": ("group-ln", 28.01), "Sandwich-LN": ("sandwich", 26.51),
    "Mix-LN": ("mix-ln", 26.07), "LNS": ("lns", 25.76),
}  # fmt: skip
"""Method -> placement, printed perplexity."""
VARIANTS = {"Pre-LN": "pre", "LNS after the norm": "lns", "LNS after attention and MLP": "lns-after-branch"}
PRINTED = {"Pre-LN": 67.91, "LNS after the norm": 66.43, "LNS after attention and MLP": 68.75}
"""Table 5: accuracy in %."""
SEEDS = (0, 1)


@dataclass(frozen=True)
class Vision:
    """The vision transformer and its budget."""

    blocks: int = 12
    d_model: int = 32
    d_ff: int = 64
    n_heads: int = 4
    steps: int = 150
    every: int = 10
    batch_size: int = 32
    lr: float = 1e-3
    patch: int = 2


TINY_VISION = Vision(blocks=3, d_model=8, d_ff=16, n_heads=2, steps=20, every=5, batch_size=16, patch=4)


def vision_run(vision: Vision, placement: str, seed: int) -> dict[str, Any]:
    """Train one vision transformer; return steps, variances (steps, blocks) and the test accuracy.

    Raises:
        InputError: The digits cannot be read.
    """
    spec = ImageSpec(patch=vision.patch)
    (tokens, labels), (test, answers) = spec.data(), spec.data("test")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = VisionTransformer(
            tokens.shape[2], tokens.shape[1], images_of("digits").n_classes, d_model=vision.d_model, d_ff=vision.d_ff,
            n_heads=vision.n_heads, n_blocks=vision.blocks, placement=placement, activation="gelu", final_norm=True,
        )  # fmt: skip
    tokens, test = tokens.float(), test.float()
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        chosen = torch.randint(0, len(labels), (vision.batch_size,), generator=generator)
        return tokens[chosen], labels[chosen]

    steps, variances = [0], [variance_by_block(model, test[:64])]
    optimizer = torch.optim.AdamW(model.parameters(), lr=vision.lr, weight_decay=0.05)
    for step, _ in updates(model, optimizer, batch, F.cross_entropy, range(1, vision.steps + 1), clip=1.0):
        if step % vision.every == 0:
            steps.append(step)
            variances.append(variance_by_block(model, test[:64]))
    with torch.no_grad():
        right = float((model(test).argmax(-1) == answers).float().mean())
    return {"steps": steps, "variances": variances, "accuracy": right}


def vision_scale(vision: Vision) -> str:
    """Return the size of the vision transformers in words."""
    data = f"{vision.steps} steps of {vision.batch_size} digits"
    tokens = 64 // vision.patch**2
    model = VisionTransformer(
        vision.patch**2, tokens, 10, d_model=vision.d_model, d_ff=vision.d_ff, n_heads=vision.n_heads, n_blocks=vision.blocks
    )
    return scale(len(SEEDS), vision.blocks, vision.d_model, sum(p.numel() for p in model.parameters()), data)


def variance_by_block(model: VisionTransformer, inputs: Tensor) -> list[float]:
    """Return the variance over features of each block's output, a mean over tokens and images."""
    stream = depth_diagnostics(model, inputs, what="variance").stream
    return [] if stream is None else list(stream.variance[1:])


def vision_from(runs: Arms) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Return what :func:`vision_run` does of runs of Table 5, by variant, and their size in words."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for name, own in runs.items():
        for run in own:
            assert run.log is not None
            right = accuracy(run.model(), *data_of(run.spec)[1].windows(run.spec.length, run.spec.windows))
            variances = run.log.series("depth", "stream", "variance")[:, 1:]
            one = {"steps": run.log.steps.tolist(), "variances": variances.tolist(), "accuracy": right}
            seen.setdefault(name, []).append(one)
    return seen, scale_of(spec_of(runs), len(seeds_of(runs)))


def verdicts(runs: Arms, seen: dict[str, list[dict[str, Any]]], size: Spec, size_of: str) -> list[Verdict]:
    """Return what the runs show of Table 7, and of Table 5 with Figure 7; one outcome a seed."""
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
    base, norm, branch = VARIANTS
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
            size_of, table_5,
        ),
    ]  # fmt: skip


def draw(out: Path, *, quick: bool = False, suffix: str = ".png", text: str = "stdlib", run: Path | None = None) -> list[Path]:
    """Train twelve language models and six vision transformers (about 7 minutes of one core), draw, and write the numbers.

    ``quick`` takes four blocks of width 16 and 30 steps, and three blocks of width 8 and 20 steps.
    """
    vision = TINY_VISION if quick else Vision()
    runs = arms("curse-of-depth/table7", out, quick=quick, run=run, text=text)
    if run is None:
        seen = {
            name: [
                cached(out, NAME, [vision, placement, seed], partial(vision_run, vision, placement, seed), code=CODE)
                for seed in SEEDS
            ]
            for name, placement in VARIANTS.items()
        }
        size_of = vision_scale(vision)
    else:
        seen, size_of = vision_from(arms("curse-of-depth/table5", out, run=run))
    said = verdicts(runs, seen, spec_of(runs), size_of)
    losses = [
        {"method": method, "seed": seed, "held-out loss": run.losses[-1], "paper's perplexity": TABLE_7[method][1]}
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
        highest = max(max(map(max, run["variances"])) for own in seen.values() for run in own)
        lowest = min(min(map(min, run["variances"])) for own in seen.values() for run in own)
        for k, (name, own) in enumerate(seen.items()):
            axes = figure.add_axes((0.085 + 0.295 * k, 0.08, 0.24, 0.37))
            over_training(axes, own[0]["steps"], np.array(own[0]["variances"]), (0.8 * lowest, 1.25 * highest))
            right = each(100 * run["accuracy"] for run in own)
            heading(
                axes, f"{name}\naccuracy {right} % (print {PRINTED[name]})", "step", "" if k else "variance of block's output"
            )
        layer_key(figure.axes[-1], 1, len(seen["Pre-LN"][0]["variances"][0]))
        picture = save(figure, out / f"{NAME}{suffix}", said)
    numbers = [write_rows(out / f"{NAME}.csv", losses), write_rows(out / f"{NAME}_variances.csv", variances)]
    return [picture, *numbers, write_verdicts(out, NAME, said)]


def table_7(axes: Axes, runs: Arms) -> None:
    """Each seed's loss less Pre-LN's of that seed; at the right the printed perplexity."""
    base = [run.losses[-1] for run in runs["Pre-LN"]]
    for y, (method, own) in enumerate(runs.items()):
        for k, run in enumerate(own):
            axes.plot(run.losses[-1] - base[k], y, METHOD_MARKS[k], color=METHOD_COLOURS[1], markersize=5)
        text = f"loss {each(run.losses[-1] for run in own)}; printed perplexity {TABLE_7[method][1]}"
        axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color=FAINT)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.set_ylim(len(runs) - 0.5, -0.5)
    heading(axes, "Table 7: loss less Pre-LN's, a mark a seed", "loss difference (nats/byte)")
