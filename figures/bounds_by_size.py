"""Bound over truth against one size at a time: tokens, samples, width and depth of self-attention and of a post-norm block.

Modules, weights and data are those of ``bounds_over_truth``: weights N(0, 1/d_in), input and target N(0, 1), one head, relu,
LayerNorm without gain and eps. All sizes but one are fixed: 4 tokens, 1 sample, width 4 (d_K = d_ff = 4). The loss is the mean
over samples. At depth l the input of a block has passed through l - 1 others; attention alone is not stacked, since it makes
tokens equal. Medians over seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

import hessiankit as hk
from figures._kit import INK, MACHINE, METHOD_COLOURS, METHOD_MARKS, heading, page, save, style, write_json, write_rows
from figures.bounds_over_truth import DASHES, MODULES, make, normal
from hessiankit.support.environment import environment
from hessiankit.support.progress import progress_bar

NAME = Path(__file__).stem
KINDS = {"a_priori": "a priori", "structured": "structured"}
FACTORS = {"tokens": "tokens", "samples": "samples", "width": "width", "depth": "depth of the module"}


@dataclass(frozen=True)
class Settings:
    """Values of each size, and the number of seeds."""

    tokens: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    samples: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    width: tuple[int, ...] = (3, 4, 6, 8, 12, 16)
    depth: tuple[int, ...] = (1, 2, 4, 8, 16)
    seeds: int = 12


FULL = Settings()
QUICK = Settings((2, 4), (1, 2), (3, 4), (1, 2), 2)


def ratios(kind: str, seed: int, *, tokens: int = 4, samples: int = 1, width: int = 4, depth: int = 1) -> dict[str, float]:
    """Return bound / norm of the whole Hessian by kind of bound."""
    layers = [make(kind, (tokens, width, width, width), seed + 1000 * k) for k in range(depth)]
    x, t = (normal(samples, tokens, width, seed=seed + shift) for shift in (10_000, 20_000))
    with torch.no_grad():
        for layer in layers[1:]:
            x = layer(x)
    report = hk.bounds(layers[0], x, t)
    return {bound: report.ratio(bound) for bound in KINDS}


def modules(factor: str) -> tuple[str, ...]:
    """Return the modules that a size is varied of."""
    return ("block",) if factor == "depth" else MODULES


def measure(settings: Settings) -> Iterator[dict[str, object]]:
    """Yield a row for every module, size and seed."""
    columns = [(m, f, v) for f in FACTORS for m in modules(f) for v in getattr(settings, f)]
    jobs = [(*column, seed) for column in columns for seed in range(settings.seeds)]
    with progress_bar() as tell:
        for k, (module, factor, value, seed) in enumerate(jobs):
            tell(f"{module}, {factor}", k, len(jobs))
            yield {"module": module, "factor": factor, "value": value, "seed": seed, **ratios(module, seed, **{factor: value})}


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Measure, write the ratios, and draw a panel for each size; ``quick`` takes two values of each and two seeds."""
    settings = QUICK if quick else FULL
    rows = list(measure(settings))
    with style():
        figure = page(8.6, 2.9)
        for axes, (factor, words) in zip(figure.subplots(1, len(FACTORS), sharey=True), FACTORS.items(), strict=True):
            heading(axes, f"by {factor}", words, "bound / norm" if factor == "tokens" else "")
            values = getattr(settings, factor)
            for module in modules(factor):
                for (bound, label), colour, mark in zip(KINDS.items(), METHOD_COLOURS[2:0:-1], METHOD_MARKS, strict=False):
                    own = [
                        [r[bound] for r in rows if (r["module"], r["factor"], r["value"]) == (module, factor, v)] for v in values
                    ]
                    look = {"color": colour, "marker": mark, "linestyle": DASHES[module], "label": f"{label}, {module}"}
                    axes.plot(values, [median(x) for x in own], **look)  # type: ignore[type-var]
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [str(v) for v in values], minor=False)
            axes.set_yscale("log")
            axes.axhline(1.0, color=INK, linewidth=0.6)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="upper center", ncols=4)
        figure.subplots_adjust(left=0.07, right=0.99, top=0.8, bottom=0.17, wspace=0.08)
        picture = save(figure, out / f"{NAME}{suffix}")
    about = {"environment": environment(*MACHINE), "settings": asdict(settings)}
    return [picture, write_rows(out / f"{NAME}.csv", rows), write_json(out / f"{NAME}.json", about)]
