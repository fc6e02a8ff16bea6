"""The protocol: tune the baseline, tune the alternatives alike, then run all arms with seeds that no search has seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hessiankit.tuning.arms import Arm, at_baseline_lr, at_own_lr, baseline
from hessiankit.tuning.experiment import RunResult, RunSpec, Setting, model_of
from hessiankit.tuning.pilot import Pilot, measure
from hessiankit.tuning.ratios import PAPER, Ratios, entries_by_type, weighted_ratio
from hessiankit.tuning.store import Runs
from hessiankit.tuning.sweep import Asking, Sweep, rounded, runs_expected, sweep, together

TUNING_SEED = 1000
"""The first of the seeds of the searches; the comparison's start at 0, so that no arm is chosen by the runs that judge it."""


@dataclass(frozen=True)
class Comparison:
    """All that was run.

    Attributes:
        sweeps: The searches: the baseline's first.
        pilot: Where the measured ratios come from.
        arms: The arms, the baseline first, each with one run a seed, in the order of the seeds.
        seeds: The comparison's seeds.
    """

    sweeps: tuple[Sweep, ...]
    pilot: Pilot
    arms: tuple[tuple[Arm, tuple[RunResult, ...]], ...]
    seeds: tuple[int, ...]


def compare(
    runs: Runs,
    setting: Setting,
    *,
    grid: Sequence[float],
    seeds: int = 5,
    tuning_seeds: int = 3,
    pilot: Callable[[Setting, float, int], Pilot] = measure,
) -> Comparison:
    """Run the whole protocol.

    Args:
        runs: Does runs and remembers them.
        setting: What all runs share.
        grid: Coarse learning rates of the baseline; the blockwise searches have a power of 2 less.
        seeds: Seeds of the comparison, 0, 1, ...
        tuning_seeds: Seeds of the searches.
        pilot: Measures the sharpness for the measured ratios: (setting, learning rate, seed) -> :class:`Pilot`.

    Raises:
        InputError: As :func:`hessiankit.tuning.sweep.sweep`.
    """
    tuning = tuple(range(TUNING_SEED, TUNING_SEED + tuning_seeds))
    own = tuple(range(seeds))
    entries = entries_by_type(model_of(setting, 0))

    def lowered(ratios: Ratios) -> list[float]:
        """Return the grid a power of 2 lower, so that the learning rates of most parameters stay about where they were."""
        return [rounded(lr / 2 ** math.floor(math.log2(weighted_ratio(ratios, entries)))) for lr in grid]

    adamw, paper = together(
        [
            sweep("AdamW", RunSpec(setting, 0.0), grid, tuning),
            sweep("Blockwise eq (5)", RunSpec(setting, 0.0, PAPER), lowered(PAPER), tuning),
        ],
        lambda specs: runs(specs, "tuning AdamW and Blockwise"),
    )
    measured = pilot(setting, adamw.best, tuning[0])
    fixed = [
        baseline(adamw.best),
        at_own_lr(paper.name, paper.best, PAPER),
        *at_baseline_lr(adamw.best, entries, measured.ratios),
    ]

    def all_of(arms: Sequence[Arm]) -> Asking[None]:
        yield [spec_of(setting, arm, seed) for seed in own for arm in arms]

    name = "Blockwise measured"
    searched, _ = together(
        [sweep(name, RunSpec(setting, 0.0, measured.ratios), lowered(measured.ratios), tuning), all_of(fixed)],
        lambda specs: runs(specs, "comparing"),
    )
    assert isinstance(searched, Sweep)
    arms = [*fixed[:2], at_own_lr(name, searched.best, measured.ratios), *fixed[2:]]
    known = runs([spec_of(setting, arm, seed) for seed in own for arm in arms], "comparing")
    results = tuple((arm, tuple(known[spec_of(setting, arm, seed)] for seed in own)) for arm in arms)
    return Comparison((adamw, paper, searched), measured, results, own)


def spec_of(setting: Setting, arm: Arm, seed: int) -> RunSpec:
    """Return the run of an arm with a seed; the seed alone decides the initial parameters and the batches."""
    return RunSpec(setting, arm.lr, arm.ratios, seed)


def expected_runs(grid: Sequence[float], seeds: int, tuning_seeds: int) -> int:
    """Return how many runs the protocol takes, give or take a few.

    >>> expected_runs([1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], 5, 3)
    84
    """
    return 3 * runs_expected(grid, range(tuning_seeds)) + 9 * seeds
