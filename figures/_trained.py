"""Runs of a paper's experiment, as figures read them: trained at a small size and kept, or those in the folder of ``--run``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from figures._verdicts import unreached
from hessiankit.support.errors import InputError
from hessiankit.training.monitoring.log import shades
from papers.experiments.catalogue import experiment_of, name_of, specs
from papers.experiments.runs import Run, finished_in, kept_run
from papers.experiments.spec import Spec

QUICK: dict[str, Any] = {}
"""Attributes of quick runs on top of the tiny preset's."""
PRINTED_STEPS = 10_000
"""Steps of LLaMA-130M in The Curse of Depth, Figure 4. Claims that LNS is better need them: in Figure 5 it is slower at first."""
CURSE_COLOURS = {"Pre-LN": "#000000", "LNS": "#0072b2", "Post-LN": "#d55e00", "Pre-LN, scaled init": "#009e73"}
CURSE_MARKS = {"Pre-LN": "o", "LNS": "s", "Post-LN": "^", "Pre-LN, scaled init": "D"}

Arms = dict[str, list[Run]]
"""Method -> its runs, one a seed."""


def models(
    name: str,
    out: Path,
    *,
    quick: bool = False,
    run: Path | None = None,
    seeds: tuple[int, ...] | None = None,
    text: str | None = None,
    **changes: Any,
) -> dict[str, Arms]:
    """Return the runs of an experiment by model and method.

    Args:
        name: A key of ``papers.experiments.catalogue.EXPERIMENTS``.
        out: The figures' folder, where small runs are kept.
        quick: The tiny preset in place of the small one.
        run: Folder that ``python -m papers train`` wrote, read in place of training.
        seeds: Seeds of what is trained; by default those of the experiment.
        text: Data of what is trained; by default the preset's.
        **changes: Attributes of what is trained that are other than the preset's.

    Raises:
        InputError: The folder lacks a method of the experiment.
    """
    changes |= {**(QUICK if quick else {}), **({} if text is None else {"text": text})}
    wanted = specs(name, "tiny" if quick else "small", seeds=seeds, **changes)
    found: dict[str, Arms] = {size: {} for size, _ in wanted}
    finished = [] if run is None else [one for one in finished_in(run) if name_of(one.spec) == name]
    for (size, arm), own in wanted.items():
        runs = [one for one in finished if (one.spec.size, one.spec.arm) == (size, arm)]
        found[size][arm] = [kept_run(spec, out) for spec in own] if run is None else sorted(runs, key=lambda one: one.spec.seed)
    found = {size: arms for size, arms in found.items() if any(arms.values())}
    missing = [arm for one in found.values() for arm, own in one.items() if not own] if found else list(experiment_of(name).arms)
    if missing:
        raise InputError(f"figures: {run} has no finished run of {', '.join(missing)}; python -m papers train {name} makes them")
    return found


def arms(name: str, out: Path, **options: Any) -> Arms:
    """Return the runs of an experiment's first model by method, with the options of :func:`models`."""
    return next(iter(models(name, out, **options).values()))


def spec_of(runs: Arms) -> Spec:
    """Return the description of the first run, for what all share."""
    return next(iter(runs.values()))[0].spec


def seeds_of(runs: Mapping[str, Sequence[Run]]) -> tuple[int, ...]:
    """Return the seeds of the first method."""
    return tuple(run.spec.seed for run in next(iter(runs.values())))


def short_of(spec: Spec) -> str:
    """Return how many of the tokens of HybridNorm's Tables 3 to 5 a run reads, whose placements differ by 0.01 to 0.03 nats.

    >>> short_of(Spec("x", steps=240, batch_size=8, length=64))
    'million tokens: 0.123 here, 400 000 in print'
    """
    return unreached(million_tokens=(spec.tokens / 1e6, 400_000))


def over_training(axes: Axes, steps: Sequence[int] | np.ndarray, variance: np.ndarray, limits: tuple[float, float]) -> None:
    """Draw variances (steps, layers), one line a layer, pale and shallow to dark and deep."""
    for values, colour in zip(variance.T, shades(variance.shape[1]), strict=True):
        axes.plot(steps, values, color=colour)
    axes.set_yscale("log")
    axes.set_ylim(*limits)
    axes.set_xlim(steps[0], steps[-1])
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
