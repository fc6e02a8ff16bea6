"""Health of references: symmetry, precision, and agreement with independent ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.verify.comparison import RESOLVED, BlockMaxima, RoundingNoise, Route, Worst
from hessiankit.verify.probes import Probes, products_along
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported
from hessiankit.verify.traits import Traits, known_defect, traits

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Relative to the largest entry of a block, for routes without an error estimate of their own.

Measured on transformer blocks: 2e-15 in float64, 2e-6 in float32.
"""

UNDER_TEST = "under test"
ALONE = "no other independent reference"

_WITNESS = {"jacfwd(jacrev)": "forward-over-reverse"}
"""Groups that vote together: both push forward mode through a reverse sweep, and where neither is defective they agree
to the last bit, so that the two alone confirm nothing.
"""


@dataclass(frozen=True)
class Health:
    """Result of the examination of one reference.

    Args:
        reference: Its name.
        group: Its independent group; ``"under test"`` for a result that is not a reference.
        symmetry_error: Largest |H - H^T|, relative to the largest entry of the block pair.
        worst_parameter: The parameter whose gradient is differentiated worst (the first of ``worst_pair``).
        deviation: Largest difference from the consensus of the other references, relative to the block pair's largest
            entry; nan without a consensus.
        worst_pair: The block pair (i, j), derivative of i's gradient along j, of the largest error.
        attainable: The relative tolerance that the route can reach for this problem.
        healthy: Finite, symmetric, precise enough and in agreement with a consensus of two independent groups.
        seconds: Its time.
        reason: Why it is healthy or not.
        alone: Nothing speaks against it, and no reference by another path gave a result to compare it with.
    """

    reference: str
    group: str
    symmetry_error: float
    worst_parameter: str
    deviation: float
    worst_pair: tuple[str, str] | None
    attainable: float
    healthy: bool
    seconds: float
    reason: str
    alone: bool = False

    @property
    def state(self) -> str:
        """One word: healthy, unhealthy, or unconfirmed."""
        return "healthy" if self.healthy else "unconfirmed" if self.alone else "unhealthy"

    def __str__(self) -> str:
        return f"{self.reference}: {self.state}: {self.reason}"


def examine(
    results: Mapping[str, Outcome | Tensor | Unsupported],
    problem: Problem,
    *,
    probes: Probes | None = None,
    tolerance: float | None = None,
    noise: RoundingNoise | None = None,
) -> dict[str, Health]:
    """Test every result for symmetry and against the others.

    A witness must be finite, symmetric and, by its own estimate, precise. The consensus is the set of witnesses that
    agree with each other and come from the most independent groups, at least two (the two groups that run forward mode
    over a reverse sweep count once); without one, none is healthy. Every result is compared with the members of the
    consensus from groups other than its own. A result that is no reference (a closed form under test) is compared too,
    but never judges.

    All comparisons are block pair by block pair, relative to the block's largest entry (for zero blocks see
    ``BlockMaxima``), within the tolerance of the arithmetic plus the two routes' estimates of their own error.

    Args:
        results: Name -> Hessian (P, P), or products (k, P) where ``probes`` are given; ``run_references`` returns it.
        problem: What was differentiated.
        probes: The directions of the products; a result with directions of its own is compared along those.
        tolerance: Relative tolerance of a route without an error estimate; by default that of the lowest precision that
            the module computes in (float64: 1e-10, float32: 1e-4).

    Raises:
        InputError: A result of the wrong shape.

    >>> from hessiankit.verify.references import run_references
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x, t = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    >>> problem = Problem(layer, x, t)
    >>> results = run_references(problem, names=["reverse-over-reverse", "jvp(grad)"])
    >>> twice = 2 * results["jvp(grad)"].value
    >>> [health.healthy for health in examine({**results, "mine": twice}, problem).values()]
    [True, True, False]
    """
    found = traits(problem)
    tolerance = TOLERANCE[found.precision] if tolerance is None else tolerance
    noise = noise or rounding_noise(results, problem, found.precision)
    layouts: dict[int, BlockMaxima] = {}

    def blocks(result: Outcome | Tensor | Unsupported) -> BlockMaxima:
        own = result.probes if isinstance(result, Outcome) and result.probes is not None else probes
        return layouts.setdefault(id(own), BlockMaxima(problem, own, found.precision, noise))

    cases = {name: _Case.of(name, result, blocks(result), tolerance) for name, result in results.items()}
    sound = [case for case in cases.values() if case.products is not None and case.symmetric and case.resolves]
    witnesses = [case for case in sound if case.group != UNDER_TEST]
    consensus = _consensus(witnesses)
    return {name: case.health(consensus, witnesses, found) for name, case in cases.items()}


def rounding_noise(
    results: Mapping[str, Outcome | Tensor | Unsupported],
    problem: Problem,
    precision: torch.dtype,
    others: Mapping[str, Route] | None = None,
) -> RoundingNoise:
    """Return the rounding noise of the references that gave a result, and of other routes."""
    ran = [n for n, x in results.items() if n in REFERENCES and not isinstance(x, Unsupported) and not REFERENCES[n].many_calls]
    ran = ran or ["reverse-over-reverse"]
    routes = {n: REFERENCES[n].products for n in ran} | dict(others or {})
    return RoundingNoise(problem, routes, torch.finfo(precision).eps)


@dataclass(frozen=True, eq=False)
class _Case:
    """One result: its symmetry, its own error, and whether it may judge others."""

    name: str
    group: str
    blocks: BlockMaxima
    products: Tensor | None
    own_error: Tensor | None
    tolerance: float
    symmetry: Worst
    symmetric: bool
    attainable: float
    seconds: float
    note: str

    @classmethod
    def of(cls, name: str, result: Outcome | Tensor | Unsupported, blocks: BlockMaxima, tolerance: float) -> _Case:
        group = REFERENCES[name].independent_group if name in REFERENCES else UNDER_TEST
        if isinstance(result, Unsupported):
            nothing = Worst(math.nan, math.nan, None)
            return cls(name, group, blocks, None, None, tolerance, nothing, False, math.inf, 0.0, result.reason)
        outcome = result if isinstance(result, Outcome) else Outcome(result, None, math.nan)
        whole = blocks.probes is None
        expected = (blocks.shape[1], blocks.shape[1]) if whole else blocks.shape
        if tuple(outcome.value.shape) != expected:
            raise InputError(f"examine: '{name}' has shape {tuple(outcome.value.shape)}; expected {expected}.")
        products = outcome.value.T if whole else outcome.value
        own, attainable = None, tolerance
        if outcome.error is not None:
            own = blocks.largest(outcome.error.T if whole else outcome.error)
            attainable = max(tolerance, blocks.attainable(own, blocks.largest(products)))
        symmetry, symmetric = _judge(blocks, tolerance, *blocks.asymmetry(products, own))
        return cls(name, group, blocks, products, own, tolerance, symmetry, symmetric, attainable, outcome.seconds, outcome.note)

    @property
    def resolves(self) -> bool:
        """Whether it is precise enough to judge by: as far as its own arithmetic can be, where that is of half precision."""
        return self.attainable <= max(RESOLVED, self.tolerance)

    def compare(self, other: _Case) -> tuple[Worst, bool]:
        """Return the worst disagreement and whether it lies within the two errors in every block."""
        blocks, mine, reference = self._side_by_side(other)
        difference, scales = blocks.difference(mine, reference)
        slack = torch.zeros_like(scales)
        for case in (self, other):
            slack = slack if case.own_error is None else slack + case.own_error
        return _judge(blocks, self.tolerance, difference, scales, slack)

    def _side_by_side(self, other: _Case) -> tuple[BlockMaxima, Tensor, Tensor]:
        """Return both results in one layout: products along the directions of whichever has some, else every entry."""
        if self.products is None or other.products is None:
            raise InputError(f"examine: '{self.name}' and '{other.name}' cannot be compared, one of them has no values.")
        mine, reference = self.products, other.products
        if self.blocks is other.blocks:
            return self.blocks, mine, reference
        own, others = self.blocks.probes, other.blocks.probes
        if own is None or (others is not None and others.rows is not None):
            assert others is not None
            return other.blocks, products_along(mine, own, others), reference
        return self.blocks, mine, products_along(reference, others, own)

    def health(self, consensus: list[_Case], witnesses: list[_Case], found: Traits) -> Health:
        """Judge this result against the members of the consensus from other groups."""
        if self.products is None:
            return self._report(self.symmetry, math.nan, False, f"unsupported: {self.note}")
        others = [case for case in consensus if case.group != self.group]
        comparisons = [(*self.compare(case), case) for case in others]
        # The most precise witness tells most about this one: a coarse one adds its own error to the deviation.
        judged = min(comparisons, key=lambda c: c[2].attainable, default=None)
        agrees = bool(comparisons) and all(agreed for _, agreed, _ in comparisons)
        deviation = judged[0] if judged else Worst(math.nan, math.nan, None)
        healthy = agrees and self.symmetric and self.resolves
        alone = self in witnesses and all(case.group == self.group for case in witnesses)
        reason = ALONE if alone else self._reason(judged[2] if judged else None, deviation, agrees, found)
        if agrees:
            reason += "".join(f"; {text}" for text in (self.note,) if text)
        return self._report(deviation if others else self.symmetry, deviation.error, healthy, reason, alone)

    def _reason(self, judge: _Case | None, deviation: Worst, agrees: bool, found: Traits) -> str:
        defect = known_defect(self.group, found)
        tail = f"; {defect}" if defect else ""
        if not math.isfinite(self.symmetry.error):
            return "not finite"
        if not self.resolves:
            return f"resolves some block to {self.attainable:.1e} only{'; ' if self.note else ''}{self.note}"
        if not self.symmetric:
            return f"not symmetric ({self._turned(judge)}){tail}"
        if judge is None:
            return "not confirmed: no two independent references agree"
        if not agrees:
            return f"disagrees with {judge.name} ({deviation}){tail}"
        floor = f"; precision floor: {found.lowered_by} computes in {found.precision}" if found.lowered_by else ""
        return f"agrees with {judge.name} to {deviation.error:.1e}{floor}"

    def _turned(self, judge: _Case | None) -> Worst:
        """Return the worst asymmetry with its pair so turned that it names the wrong block and not its transpose."""
        pair = self.symmetry.pair
        if judge is None or pair is None or self.products is None or judge.products is None:
            return self.symmetry
        blocks, mine, reference = self._side_by_side(judge)
        errors = blocks.relative(*blocks.difference(mine, reference))
        here, there = (float(errors[blocks.names.index(i), blocks.along.index(j)]) for i, j in (pair, pair[::-1]))
        return self.symmetry if here >= there else replace(self.symmetry, pair=pair[::-1])

    def _report(self, worst: Worst, deviation: float, healthy: bool, reason: str, alone: bool = False) -> Health:
        return Health(
            reference=self.name,
            group=self.group,
            symmetry_error=self.symmetry.error,
            worst_parameter=worst.pair[0] if worst.pair else "",
            deviation=deviation,
            worst_pair=worst.pair,
            attainable=self.attainable,
            healthy=healthy,
            seconds=self.seconds,
            reason=reason,
            alone=alone,
        )


def _judge(blocks: BlockMaxima, tolerance: float, difference: Tensor, scales: Tensor, slack: Tensor) -> tuple[Worst, bool]:
    """Return the worst difference and whether each lies within the tolerance plus what the two sides admit."""
    allowed = tolerance + slack / scales.clamp_min(torch.finfo(scales.dtype).tiny)
    within = bool((blocks.relative(difference, scales, slack) <= allowed).all())
    return blocks.worst(difference, scales, slack), within


def _consensus(witnesses: list[_Case]) -> list[_Case]:
    """Return the agreeing witnesses of the most independent groups; none where fewer than two groups or a tie."""
    agree = {frozenset((a.name, b.name)) for a, b in combinations(witnesses, 2) if a.compare(b)[1]}
    chosen = agreeing({case.name: case.group for case in witnesses}, agree)
    return [case for case in witnesses if case.name in chosen]


def agreeing(groups: Mapping[str, str], agree: Collection[frozenset[str]]) -> tuple[str, ...]:
    """Return the names that agree with each other and come from the most independent groups, at least two.

    Args:
        groups: Name -> independent group.
        agree: The pairs of names that agree.

    >>> agreeing({"a": "reverse", "b": "differences", "c": "reverse"}, {frozenset("ab"), frozenset("bc")})
    ()
    >>> agreeing({"a": "reverse", "b": "differences", "c": "reverse"}, {frozenset("ab")})
    ('a', 'b')
    """
    best: list[tuple[int, int, tuple[str, ...]]] = []
    for size in range(2, len(groups) + 1):
        for members in combinations(groups, size):
            count = len({_WITNESS.get(groups[name], groups[name]) for name in members})
            if count >= 2 and all(frozenset(pair) in agree for pair in combinations(members, 2)):
                best.append((count, size, members))
    if not best:
        return ()
    most = max(count for count, _, _ in best)
    widest = max(size for count, size, _ in best if count == most)
    top = [members for count, size, members in best if (count, size) == (most, widest)]
    return top[0] if len(top) == 1 else ()
