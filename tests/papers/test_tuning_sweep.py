"""The search for a learning rate, on losses that are formulas, so that its answer is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from hessiankit.support.errors import InputError
from papers.experiments.tuning.experiment import RunResult, RunSpec, Setting
from papers.experiments.tuning.sweep import sweep, together

GRID = [1e-3, 2e-3, 4e-3, 8e-3]
BASE = RunSpec(Setting(), 0.0)


class Counter:
    """Stands for the runs: a loss by learning rate and seed, and what was asked for."""

    def __init__(self, loss: Callable[[float, int], float]) -> None:
        self.loss, self.asked = loss, []

    def __call__(self, specs: list[RunSpec]) -> dict[RunSpec, RunResult]:
        self.asked.append(specs)
        return {s: RunResult(s, (0, 9), (5.0, self.loss(s.lr, s.seed)), 0.0) for s in specs}

    @property
    def runs(self) -> set[RunSpec]:
        return {spec for specs in self.asked for spec in specs}


def parabola(best: float, noise: float = 0.0) -> Callable[[float, int], float]:
    return lambda lr, seed: 2 + 0.1 * math.log2(lr / best) ** 2 + noise * math.sin(1000 * lr + seed)


@pytest.mark.parametrize(("best", "found"), [(2.1e-3, 2e-3), (2.7e-3, 2.83e-3), (5.6e-3, 5.66e-3), (1.5e-3, 1.41e-3)])
def test_the_optimum_is_refined_inside_the_grid(best, found):
    (result,) = together([sweep("x", BASE, GRID, [7, 8, 9])], counter := Counter(parabola(best)))
    assert result.best == found
    assert result.inside
    assert not result.extended
    assert set(result.means) >= {found}
    assert all(len(result.losses[lr]) == 3 for lr in result.means)
    assert len(counter.runs) <= 16


@pytest.mark.parametrize("best", [1.3e-4, 0.06])
def test_a_grid_that_ends_too_early_grows(best):
    (result,) = together([sweep("x", BASE, GRID, [7, 8])], Counter(parabola(best)))
    assert result.inside
    assert result.extended
    assert abs(math.log2(result.best / best)) < 0.3
    assert "grid extended by" in str(result)


def test_rates_are_met_again_and_not_run_twice():
    """sqrt 2 twice is 2: steps that come back to the coarse grid use its runs."""
    together([sweep("x", BASE, GRID, [7, 8])], counter := Counter(parabola(7.5e-3)))
    lrs = sorted({spec.lr for spec in counter.runs})
    assert min(b / a for a, b in itertools.pairwise(lrs)) > 1.3


def test_one_seed_does_not_decide():
    """Seed 7 alone prefers 8e-3; over all the seeds 4e-3 is better, and the search moves there."""

    def loss(lr, seed):
        return parabola(4e-3)(lr, seed) - (0.5 if seed == 7 and lr > 7e-3 else 0.0) + (0.5 if seed != 7 and lr > 7e-3 else 0.0)

    (result,) = together([sweep("x", BASE, GRID, [7, 8, 9])], Counter(loss))
    assert result.best == 4e-3
    assert result.inside


def test_divergence_is_no_optimum():
    def loss(lr, seed):
        return math.inf if lr > 3e-3 else parabola(8e-3)(lr, seed)

    (result,) = together([sweep("x", BASE, GRID, [7])], Counter(loss))
    assert result.best == 2.83e-3
    assert math.isinf(result.losses[4e-3][7])
    with pytest.raises(InputError, match="diverges at every learning rate"):
        together([sweep("x", BASE, GRID, [7])], Counter(lambda lr, seed: math.inf))


def test_an_optimum_without_an_end_is_said_to_be_none():
    (result,) = together([sweep("x", BASE, GRID, [7])], Counter(lambda lr, seed: 2 - lr / 1000))
    assert not result.inside
    assert "NOT inside the grid" in str(result)


def test_searches_together_find_what_they_find_alone():
    asking = [parabola(3e-3), parabola(9e-3)]
    alone = [together([sweep("x", BASE, GRID, [7, 8])], Counter(loss))[0] for loss in asking]
    ratios = [(), (("Emb", 10.0),)]
    both = Counter(lambda lr, seed: 0.0)

    def answer(specs):
        both.asked.append(specs)
        return {s: RunResult(s, (0, 9), (5.0, asking[ratios.index(s.ratios)](s.lr, s.seed)), 0.0) for s in specs}

    found = together([sweep("x", RunSpec(Setting(), 0.0, r), GRID, [7, 8]) for r in ratios], answer)
    assert [one.best for one in found] == [one.best for one in alone]
    assert [one.losses for one in found] == [one.losses for one in alone]
    assert len(both.asked[0]) == 8  # one list for both


@pytest.mark.parametrize("grid", [[1e-3], [2e-3, 1e-3], [0.0, 1e-3], [1e-3, 1e-3], [1e-3, math.nan]])
def test_grids_that_cannot_be_searched(grid):
    with pytest.raises(InputError, match="two or more learning rates, positive and rising"):
        together([sweep("x", BASE, grid, [7])], Counter(parabola(1e-3)))
