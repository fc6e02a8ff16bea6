"""Health of references: symmetry, precision, and agreement with independent ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.verify.comparison import NOTHING, RESOLVED, Gaps, Judge, Layout, RoundingNoise, Route, Worst
from hessiankit.verify.probes import Probes, products_along
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported
from hessiankit.verify.traits import Traits, known_defect, traits

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Relative to the largest entry of a block, for routes without an error estimate of their own.

Measured on transformer blocks: 2e-15 in float64, 2e-6 in float32.
"""

UNDER_TEST = "under test"

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
        symmetry_error: Largest |H - H^T|, relative to the largest entry of the block pair; nan for products of a large module.
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
    ``Judge``), within the tolerance of the arithmetic plus the two routes' estimates of their own error.

    Args:
        results: Name -> Hessian (P, P), or products (k, P) where ``probes`` are given; ``run_references`` returns it.
        problem: What was differentiated.
        probes: The directions of the products; a result with directions of its own is compared along those.
        tolerance: Relative tolerance of a route without an error estimate; by default that of the lowest precision that
            the module computes in (float64: 1e-10, float32: 1e-4).
        noise: The rounding errors of each block.

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
    judge = Judge(tuple(problem.params), found.precision, noise or rounding_noise(results, problem, found.precision))
    outcomes = {n: Outcome(x, None, math.nan) if isinstance(x, Tensor) else x for n, x in results.items()}
    beside = SideBySide(problem, outcomes, probes)
    cases = {}
    for name, result in outcomes.items():
        if isinstance(result, Unsupported):
            cases[name] = Case(name, tolerance=tolerance, failed=True, note=result.reason)
            continue
        V, layout, products, error = beside.of(name)
        asymmetry = layout.asymmetry(products, error, V)
        own = 0.0 if error is None else judge.attainable(error, layout.largest(products))
        cases[name] = Case(
            name,
            tolerance,
            max(tolerance, own),
            judge.worst(asymmetry),
            judge.within(asymmetry, tolerance),
            result.seconds,
            result.note,
        )
    return healths(cases, beside.gaps, judge, found)


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


class SideBySide:
    """Results of one problem in common layouts: matrices, products along directions, or along some of these.

    Args:
        problem: What was differentiated.
        outcomes: Name -> matrix (P, P), or products (k, P) where there are ``probes``.
        probes: The directions; a result may have its own.
    """

    def __init__(self, problem: Problem, outcomes: Mapping[str, Outcome | Unsupported], probes: Probes | None) -> None:
        self._layouts: dict[int, Layout] = {}
        self._problem, self._own = problem, dict[str, Probes | None]()
        self._products, self._errors = dict[str, Tensor](), dict[str, Tensor | None]()
        for name, outcome in outcomes.items():
            if isinstance(outcome, Unsupported):
                continue
            own = outcome.probes or probes
            size = problem.size
            expected = (size, size) if own is None else (len(own.owners), size)
            if tuple(outcome.value.shape) != expected:
                raise InputError(f"examine: '{name}' has shape {tuple(outcome.value.shape)}; expected {expected}.")
            self._own[name] = own
            self._products[name] = outcome.value.T if own is None else outcome.value
            error = outcome.error.T if own is None and outcome.error is not None else outcome.error
            self._errors[name] = None if error is None else self._layout(own).largest(error)

    def of(self, name: str) -> tuple[Tensor | None, Layout, Tensor, Tensor | None]:
        """Return a result's directions, its layout, its products, and the largest of its own errors in every cell."""
        own = self._own[name]
        return None if own is None else own.V, self._layout(own), self._products[name], self._errors[name]

    def gaps(self, a: str, b: str) -> Gaps:
        """Return two results side by side, along the directions of whichever has some, or fewer, else every entry."""
        ours, theirs = self._own[a], self._own[b]
        along = theirs if ours is None or (theirs is not None and theirs.rows is not None) else ours
        both = []
        for name, own in ((a, ours), (b, theirs)):
            products = self._products[name]
            both.append(products if own is along or along is None else products_along(products, own, along))
        return self._layout(along).gaps(*both, self._errors[a], self._errors[b])

    def _layout(self, probes: Probes | None) -> Layout:
        return self._layouts.setdefault(id(probes), Layout(self._problem, None if probes is None else probes.owners))


# Judgement --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One result: its symmetry, its own error, and whether it may judge others; ``note`` says why it failed, if it did."""

    name: str
    tolerance: float
    attainable: float = math.inf
    symmetry: Worst = NOTHING
    symmetric: bool = False
    seconds: float = 0.0
    note: str = ""
    failed: bool = False

    @property
    def group(self) -> str:
        """Its independent group."""
        return REFERENCES[self.name].independent_group if self.name in REFERENCES else UNDER_TEST

    @property
    def resolves(self) -> bool:
        """Whether it is precise enough to judge by: as far as its own arithmetic can be, where that is of half precision."""
        return self.attainable <= max(RESOLVED, self.tolerance)

    @property
    def judges(self) -> bool:
        """Whether it may be part of the consensus."""
        return not self.failed and self.symmetric and self.resolves and self.group != UNDER_TEST


def healths(cases: Mapping[str, Case], gaps: Callable[[str, str], Gaps], judge: Judge, found: Traits) -> dict[str, Health]:
    """Judge results against the consensus of the witnesses among them; ``gaps`` returns two of them side by side."""
    witnesses = {name: case for name, case in cases.items() if case.judges}
    agree = {frozenset((a, b)) for a, b in combinations(witnesses, 2) if judge.within(gaps(a, b), witnesses[a].tolerance)}
    consensus = agreeing({name: case.group for name, case in witnesses.items()}, agree)
    return {name: _health(case, witnesses, consensus, gaps, judge, found) for name, case in cases.items()}


def _health(
    case: Case,
    witnesses: Mapping[str, Case],
    consensus: Collection[str],
    gaps: Callable[[str, str], Gaps],
    judge: Judge,
    found: Traits,
) -> Health:
    def report(worst: Worst, deviation: float, healthy: bool, reason: str, alone: bool = False) -> Health:
        symmetry, parameter = case.symmetry.error, worst.pair[0] if worst.pair else ""
        numbers = (deviation, worst.pair, case.attainable, healthy, case.seconds)
        return Health(case.name, case.group, symmetry, parameter, *numbers, reason, alone)

    if case.failed:
        return report(NOTHING, math.nan, False, f"unsupported: {case.note}")
    others = [name for name in consensus if witnesses[name].group != case.group]
    compared = {name: gaps(case.name, name) for name in others}
    agrees = bool(others) and all(judge.within(compared[name], case.tolerance) for name in others)
    # The most precise witness tells most about this one: a coarse one adds its own error to the deviation.
    nearest = min(others, key=lambda name: witnesses[name].attainable, default=None)
    deviation = NOTHING if nearest is None else judge.worst(compared[nearest])
    symmetry = (
        case.symmetry if nearest is None else _turned(case.symmetry, judge.relative(compared[nearest], admitted=False), judge)
    )
    defect = known_defect(case.group, found)
    tail = f"; {defect}" if defect else ""
    alone = case.name in witnesses and all(other.group == case.group for other in witnesses.values())
    if alone:
        reason = "no other independent reference"
    elif not math.isfinite(case.symmetry.error) and case.symmetry is not NOTHING:
        reason = "not finite"
    elif not case.resolves:
        reason = f"resolves some block to {case.attainable:.1e} only{'; ' if case.note else ''}{case.note}"
    elif not case.symmetric:
        reason = f"not symmetric ({symmetry}){tail}"
    elif nearest is None:
        reason = "not confirmed: no two independent references agree"
    elif not agrees:
        reason = f"disagrees with {nearest} ({deviation}){tail}"
    else:
        floor = f"; precision floor: {found.lowered_by} computes in {found.precision}" if found.lowered_by else ""
        reason = f"agrees with {nearest} to {deviation.error:.1e}{floor}"
    if agrees and case.note:
        reason += f"; {case.note}"
    healthy = agrees and case.symmetric and case.resolves
    return report(deviation if others else case.symmetry, deviation.error, healthy, reason, alone)


def _turned(symmetry: Worst, errors: Tensor, judge: Judge) -> Worst:
    """Return the worst asymmetry with its pair so turned that it names the wrong block and not its transpose."""
    if symmetry.pair is None:
        return symmetry
    here, there = (float(errors[judge.names.index(i), judge.names.index(j)]) for i, j in (symmetry.pair, symmetry.pair[::-1]))
    return symmetry if here >= there else replace(symmetry, pair=symmetry.pair[::-1])


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
    most = max((count, size) for count, size, _ in best)
    top = [members for count, size, members in best if (count, size) == most]
    return top[0] if len(top) == 1 else ()
