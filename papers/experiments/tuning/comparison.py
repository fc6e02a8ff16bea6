"""The protocol: tune the baseline, tune the alternatives alike, then run all arms with seeds that no search has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hessiankit.training.optim import measured_ratios
from hessiankit.training.sharpness import sharpness
from papers.experiments.tuning.experiment import (
    PAPER,
    Ratios,
    RunResult,
    RunSpec,
    Setting,
    entries_by_type,
    model_of,
    one_thread,
    ratios_of,
    texts,
    training,
    warm_up_steps,
    weighted_ratio,
)
from papers.experiments.tuning.store import Runs
from papers.experiments.tuning.sweep import Arm, Asking, SearchResult, at_baseline_lr, lowered, runs_expected, sweep, together

BATCHES, DRAWS = 8, 8


@dataclass(frozen=True)
class Pilot:
    """Ratios from a measurement.

    Attributes:
        ratios: Factors by block type.
        sharpness: Mean sharpness (eq. 4) by block type, with its standard error.
        step: The step after which it was measured.
    """

    ratios: Ratios
    sharpness: dict[str, tuple[float, float]]
    step: int

    @property
    def order(self) -> str:
        """The block types from flat to sharp.

        >>> Pilot((), {"Norm": (2.0, 0.1), "Emb": (1.0, 0.1)}, 40).order
        'Emb < Norm'
        """
        return " < ".join(sorted(self.sharpness, key=lambda kind: self.sharpness[kind][0]))


def measure(setting: Setting, lr: float, seed: int) -> Pilot:
    """Train the baseline to the end of its warm-up, measure the sharpness there, and return the ratios that follow.

    The warm-up's end is where the paper switches from one learning rate to several (App. A.2). The sharpness is eq. (4) with
    labels drawn from the model, on batches of the training text that the run has not read.
    """
    step = max(1, warm_up_steps(setting))
    text, _ = texts(setting.text)
    with one_thread():
        model = model_of(setting, seed)
        for done in training(model, text, RunSpec(setting, lr, (), seed)):
            if done == step:
                break
        generator = torch.Generator().manual_seed(seed + 1)
        data = [text.batch(setting.batch_size, setting.length, generator) for _ in range(BATCHES)]
        report = sharpness(model, data, draws=DRAWS, seed=seed)
    found = {kind: (one.value, one.standard_error) for kind, one in report.types.items()}
    ratios = {kind: ratio.value for kind, ratio in measured_ratios(report).items()}
    return Pilot(ratios_of(ratios), found, step)


TUNING_SEED = 1000
"""The first of the seeds of the searches; the comparison's start at 0, so that no arm is chosen by the runs that judge it."""


@dataclass(frozen=True)
class TuningComparison:
    """All that was run.

    Attributes:
        sweeps: The searches: the baseline's first.
        pilot: Where the measured ratios come from.
        arms: The arms, the baseline first, each with one run a seed, in the order of the seeds.
        seeds: The comparison's seeds.
    """

    sweeps: tuple[SearchResult, ...]
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
) -> TuningComparison:
    """Run the whole protocol, with ``seeds`` 0, 1, ... of the comparison and other ones of the searches."""
    tuning = tuple(range(TUNING_SEED, TUNING_SEED + tuning_seeds))
    own = tuple(range(seeds))
    entries = entries_by_type(model_of(setting, 0))

    def search(name: str, ratios: Ratios) -> Asking[SearchResult]:
        return sweep(name, RunSpec(setting, 0.0, ratios), lowered(grid, weighted_ratio(ratios, entries)), tuning)

    searches = [search("AdamW", ()), search("Blockwise eq (5)", PAPER)]
    adamw, paper = together(searches, lambda specs: runs(specs, "tuning AdamW and Blockwise"))
    measured, tuned = pilot(setting, adamw.best, tuning[0]), "tuned like the baseline"
    fixed = [
        Arm(adamw.name, adamw.best, (), "the baseline, tuned first"),
        Arm(f"{paper.name} at its own lr", paper.best, PAPER, tuned),
        *at_baseline_lr(adamw.best, entries, measured.ratios),
    ]

    def all_of(arms: Sequence[Arm]) -> Asking[None]:
        yield [spec_of(setting, arm, seed) for seed in own for arm in arms]

    name = "Blockwise measured"
    searched, _ = together([search(name, measured.ratios), all_of(fixed)], lambda specs: runs(specs, "comparing"))
    assert isinstance(searched, SearchResult)
    arms = [*fixed[:2], Arm(f"{name} at its own lr", searched.best, measured.ratios, tuned), *fixed[2:]]
    return TuningComparison((adamw, paper, searched), measured, run_arms(runs, setting, arms, own), own)


def run_arms(
    runs: Runs, setting: Setting, arms: Sequence[Arm], seeds: Sequence[int]
) -> tuple[tuple[Arm, tuple[RunResult, ...]], ...]:
    """Return every arm with a run a seed, doing those that are not known yet."""
    known = runs([spec_of(setting, arm, seed) for seed in seeds for arm in arms], "comparing")
    return tuple((arm, tuple(known[spec_of(setting, arm, seed)] for seed in seeds)) for arm in arms)


def spec_of(setting: Setting, arm: Arm, seed: int) -> RunSpec:
    """Return the run of an arm with a seed; the seed alone decides the initial parameters and the batches."""
    return RunSpec(setting, arm.lr, arm.ratios, seed)


def expected_runs(grid: Sequence[float], seeds: int, tuning_seeds: int) -> int:
    """Return how many runs the protocol takes, give or take a few.

    >>> expected_runs([1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2], 5, 3)
    84
    """
    return 3 * runs_expected(grid, range(tuning_seeds)) + 9 * seeds
