"""The arms of a comparison, and the search for the learning rate of each.

Several searches can share the worker processes (:func:`together`); the order in which runs finish does not affect the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from hessiankit.support.errors import InputError
from papers.experiments.tuning.experiment import PAPER, Ratios, RunResult, RunSpec, ratios_of, weighted_ratio

T = TypeVar("T")
Asking: TypeAlias = Generator[list[RunSpec], dict[RunSpec, RunResult], T]
"""Yields the runs it needs, is sent all that are known by then, returns its answer."""

ROOT = math.sqrt(2)
SAME = 0.02
"""Learning rates that differ by less than this fraction are one: sqrt 2 twice is 2 but for rounding."""
EXTENSIONS = 6
"""How many times a grid may grow beyond what was asked for, on each way."""


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        name: What was tuned.
        best: Learning rate with the lowest mean loss over all the tuning seeds.
        losses: Final losses by learning rate and tuning seed; infinite where a run diverged.
        seeds: The tuning seeds; the comparison uses others.
        extended: Learning rates that had to be added to the grid that was asked for.
        inside: Whether the neighbours of the best, a factor sqrt 2 away on both sides, were run with all seeds and are worse.
    """

    name: str
    best: float
    losses: dict[float, dict[int, float]]
    seeds: tuple[int, ...]
    extended: tuple[float, ...]
    inside: bool

    @property
    def means(self) -> dict[float, float]:
        """Mean loss of the learning rates that were run with all seeds, rising."""
        return {lr: _mean(of) for lr, of in sorted(self.losses.items()) if len(of) == len(self.seeds)}

    def __str__(self) -> str:
        lines = f"{self.name}: best learning rate {self.best:.3g}"
        lines += f" of {min(self.losses):.2g} to {max(self.losses):.2g}"
        lines += f", grid extended by {', '.join(f'{lr:.3g}' for lr in self.extended)}" if self.extended else ""
        return lines if self.inside else f"{lines}; NOT inside the grid: no worse neighbour was found on both sides"


def sweep(name: str, base: RunSpec, grid: Sequence[float], seeds: Sequence[int]) -> Asking[SearchResult]:
    """Search the learning rate of a run: a coarse grid, then steps of sqrt 2 around the best until both neighbours are worse.

    The coarse grid (factors of 2) is run with the first tuning seed. Where its best lies at an end, the grid grows by a factor of
    2. Then the best and its neighbours at sqrt 2 are run with all tuning seeds, and while one of the neighbours has the lower
    mean, the search moves on to it.

    Raises:
        InputError: The grid has fewer than two learning rates, or one that is not positive; or all of them diverge.
    """
    if len(grid) < 2 or not all(0 < lr < math.inf for lr in grid) or list(grid) != sorted(set(grid)):
        raise InputError(f"tune-lr: grid={list(grid)}; expected two or more learning rates, positive and rising")
    losses: dict[float, dict[int, float]] = {}
    extended: list[float] = []

    def at(lr: float) -> float:
        return next((known for known in losses if abs(known / lr - 1) < SAME), rounded(lr))

    def ask(lrs: Sequence[float], of: Sequence[int]) -> Asking[None]:
        specs = [replace(base, lr=at(lr), seed=seed) for lr in lrs for seed in of]
        known = yield specs
        for spec in specs:
            result = known[spec]
            losses.setdefault(spec.lr, {})[spec.seed] = math.inf if result.diverged else result.final

    first = seeds[:1]
    yield from ask(grid, first)
    for _ in range(EXTENSIONS):
        best = _lowest(losses, seeds[0])
        if math.isinf(losses[best][seeds[0]]):
            new = min(losses) / 2
        elif best == min(losses):
            new = best / 2
        elif best == max(losses):
            new = best * 2
        else:
            break
        extended.append(at(new))
        yield from ask([new], first)
    best = _lowest(losses, seeds[0])
    if math.isinf(losses[best][seeds[0]]):
        raise InputError(f"tune-lr: {name} diverges at every learning rate from {max(losses):.2g} to {min(losses):.2g}")
    yield from ask([best / ROOT, best, best * ROOT], seeds)
    for moves in range(EXTENSIONS + 1):
        means = {lr: _mean(of) for lr, of in losses.items() if len(of) == len(seeds)}
        best = min(means, key=lambda lr: means[lr])
        missing = [lr for lr in (at(best / ROOT), at(best * ROOT)) if lr not in means]
        if not missing or moves == EXTENSIONS:
            break
        extended += [lr for lr in missing if not min(grid) <= lr <= max(grid)]
        yield from ask(missing, seeds)
    return SearchResult(name, best, losses, tuple(seeds), tuple(extended), inside=not missing)


def together(asking: Sequence[Asking[T]], run_all: Callable[[list[RunSpec]], dict[RunSpec, RunResult]]) -> list[T]:
    """Lead several conversations at once: what all of them ask for is run as one list; return their answers in order."""
    answers: dict[int, T] = {}
    asked = {k: next(one) for k, one in enumerate(asking)}
    while asked:
        known = run_all(list(dict.fromkeys(spec for specs in asked.values() for spec in specs)))
        waiting, asked = asked, {}
        for k, specs in waiting.items():
            try:
                asked[k] = asking[k].send({spec: known[spec] for spec in specs})
            except StopIteration as end:
                answers[k] = end.value
    return [answers[k] for k in range(len(asking))]


def runs_expected(grid: Sequence[float], seeds: Sequence[int]) -> int:
    """Return how many runs a search takes that need not be extended, give or take a few.

    >>> runs_expected([1e-3, 2e-3, 4e-3], [7, 8, 9])  # 3 coarse, 2 new neighbours, then 3 rates with two more seeds
    11
    """
    return len(grid) + 2 + 3 * (len(seeds) - 1)


def lowered(grid: Sequence[float], ratio: float) -> list[float]:
    """Return a grid a power of 2 lower, so that most parameters' learning rates stay about where they were.

    >>> lowered([0.002, 0.004], 5.5)
    [0.0005, 0.001]
    """
    return [rounded(lr / 2 ** math.floor(math.log2(ratio))) for lr in grid]


def rounded(lr: float) -> float:
    """Return a learning rate to three digits, which a table can show.

    >>> rounded(0.004 * ROOT)
    0.00566
    """
    return float(f"{lr:.3g}")


def _lowest(losses: dict[float, dict[int, float]], seed: int) -> float:
    return min(losses, key=lambda lr: losses[lr][seed])


def _mean(of: dict[int, float]) -> float:
    return math.fsum(of.values()) / len(of)


@dataclass(frozen=True)
class Arm:
    """One way to set the learning rates.

    Attributes:
        name: As the tables print it.
        lr: Learning rate of the norms, and of all block types without a ratio.
        ratios: Factors by block type.
        why: What it is there for.
    """

    name: str
    lr: float
    ratios: Ratios = ()
    why: str = ""

    def __str__(self) -> str:
        factors = ", ".join(f"{kind} x{factor:.3g}" for kind, factor in self.ratios)
        return f"{self.name}: lr {self.lr:.3g}{f' ({factors})' if factors else ''}"


def at_baseline_lr(lr: float, entries: dict[str, int], measured: Ratios) -> tuple[Arm, ...]:
    """Return the arms that take the baseline's learning rate over, as the paper does, and its missing controls.

    >>> [arm.name for arm in at_baseline_lr(0.004, {"Emb": 1, "Norm": 1}, ())][2:]
    ['Norm x 2', 'Emb x 10 only', 'all x 2', 'all x 5.5']
    """
    uniform = float(f"{weighted_ratio(PAPER, entries):.2g}")
    return (
        Arm("Blockwise eq (5) at AdamW's lr", lr, PAPER, "the paper's protocol"),
        Arm("Blockwise measured at AdamW's lr", lr, measured, "the same with measured ratios"),
        Arm("Norm x 2", lr, ratios_of({"Norm": 2.0}), "the paper's Table 2: the sharpest type faster"),
        Arm("Emb x 10 only", lr, ratios_of({"Emb": dict(PAPER)["Emb"]}), "the paper's Table 2: the first type alone"),
        Arm("all x 2", rounded(2 * lr), (), "control: a larger learning rate for all"),
        Arm(f"all x {uniform:g}", rounded(uniform * lr), (), "control: the integrated learning rate of eq (5), without blocks"),
    )
