"""What attacks on the bounds find: attempts, the largest ratio of each bound, violations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hessiankit.tables import Piece, Printed, table


@dataclass(frozen=True)
class Attempt:
    """One norm beside one bound.

    Attributes:
        bound: The name of the bound.
        true: The norm.
        limit: What the bound says it does not exceed.
        rows: Where the block stands in the Hessian; None if the norm is not of a block.
        columns: The same.
        vector: The block's right singular vector.
    """

    bound: str
    true: float
    limit: float
    rows: slice | None = None
    columns: slice | None = None
    vector: Tensor | None = None

    @property
    def ratio(self) -> float:
        """true / limit, at most 1 unless the bound is violated."""
        return self.true / self.limit if self.limit else (float("inf") if self.true else 0.0)


@dataclass(frozen=True)
class Found:
    """The largest ratio of a bound, and the problem that has it."""

    ratio: float
    seed: int
    problem: str


@dataclass(frozen=True)
class Violation:
    """A bound that was exceeded.

    Attributes:
        bound: Its name.
        seed: Of the problem.
        problem: In words.
        ratio: true / bound in float64.
        refereed: The same in 80 digits; None if the norm is not of a block of the Hessian.
    """

    bound: str
    seed: int
    problem: str
    ratio: float
    refereed: float | None


@dataclass(repr=False)
class AttackReport(Printed):
    """What a campaign found.

    Attributes:
        seed: The first problem's.
        asked: Problems asked for.
        problems: Problems tried.
        attempts: Norms compared with bounds.
        climbed: Steps of ascents.
        undefined: Problems of which a Hessian or a bound is not defined, such as rows of variance 0 with eps = 0.
        refereed: Excesses in float64 that were decided in 80 digits.
        largest: Bound -> its largest ratio; what the referee lowered counts as lowered.
        violations: Those that remain.
        seconds: Time.
        interrupted: Whether the campaign was cut short.
    """

    seed: int
    asked: int
    problems: int = 0
    attempts: int = 0
    climbed: int = 0
    undefined: int = 0
    refereed: int = 0
    largest: dict[str, Found] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    def __bool__(self) -> bool:
        return not self.violations

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data."""
        largest = {name: vars(found) for name, found in sorted(self.largest.items())}
        return {**vars(self), "largest": largest, "violations": [vars(v) for v in self.violations]}

    def _headline(self) -> str:
        found = f"VIOLATED: {len(self.violations)} times" if self.violations else "no bound is violated"
        done = f"{self.problems} of {self.asked} problems, interrupted" if self.interrupted else f"{self.problems} problems"
        return f"{found}; largest norm / bound of {done} ({self.attempts} comparisons, {self.climbed} steps of ascents)"

    def _parts(self) -> Iterator[Piece]:
        rows = [(name, f"{f.ratio:.10g}", str(f.seed), f.problem) for name, f in sorted(self.largest.items())]
        yield self._headline()
        yield table(("bound", "norm / bound", "seed", "problem"), rows, prose=("problem",), drop=("problem",))
        yield (f"{self.undefined} problems without a defined Hessian or bound; {self.refereed} excesses decided in 80 digits")
        yield from (
            f"VIOLATED: {v.bound} by {v.ratio:.6g} (80 digits: {v.refereed}), --attack 1 --seed {v.seed}" for v in self.violations
        )
