"""Health of references: symmetry, precision, and agreement with independent ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product

import torch
from torch import Tensor

from hessiankit.support.errors import InputError
from hessiankit.verify.comparison import (
    HESSIANKIT,
    NO_COMPARISON,
    RESOLVED,
    Gaps,
    Judge,
    Layout,
    RoundingNoise,
    Route,
    Worst,
    joined,
)
from hessiankit.verify.probes import Direction, Probes
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported
from hessiankit.verify.traits import Traits, known_defect, traits

AGREEMENT = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Tolerances relative to the largest entry of a block, for routes without an error estimate of their own.

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
        reference: Name of the reference.
        group: Independent group; ``"under test"`` for a result that is not a reference.
        symmetry_error: Largest |H - H^T|, relative to the largest entry of the block pair; nan for products of a large module.
        worst_parameter: The parameter whose gradient is differentiated worst (the first of ``worst_pair``).
        deviation: Largest difference from the consensus of the other references, relative to the block pair's largest
            entry; nan without a consensus.
        worst_pair: The block pair (i, j), derivative of i's gradient along j, of the largest error.
        attainable: The relative tolerance that the route can reach for this problem.
        healthy: Whether the result is finite, symmetric, precise enough, and agrees with a consensus of two independent groups.
        seconds: Time of the reference.
        reason: Reason why it is healthy or not.
        alone: Whether no test failed, but no reference by another path gave a result for comparison.
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
    noise: RoundingNoise | None = None,
) -> dict[str, Health]:
    """Test every result for symmetry and against the others; a result that is no reference is compared but does not judge others.

    A witness must be finite, symmetric and, by its own estimate, precise. The consensus is the set of witnesses that
    agree with each other and come from the most independent groups, at least two (the two groups that run forward mode
    over a reverse sweep count once); without one, none is healthy. Every result is compared with the members of the
    consensus from groups other than its own, block pair by block pair (see ``Judge``), within the tolerance of the lowest
    precision that the module computes in (:data:`AGREEMENT`) plus the two routes' estimates of their own error.

    Args:
        results: Name -> Hessian (P, P), or products (k, P) where ``probes`` are given; ``run_references`` returns it.
        problem: Problem that was differentiated.
        probes: The directions of the products; a result with directions of its own is compared along those.
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
    module_traits = traits(problem)
    judge = Judge(noise or rounding_noise(problem, results, module_traits.precision))
    comparison = SideBySide(judge, module_traits, AGREEMENT[module_traits.precision])
    comparison.add({n: Outcome(x, seconds=math.nan) if isinstance(x, Tensor) else x for n, x in results.items()}, probes)
    return comparison.health(results)


def rounding_noise(
    problem: Problem,
    names: Iterable[str],
    precision: torch.dtype,
    closed_form: Route | None = None,
    directions: Mapping[str, Direction] | None = None,
) -> RoundingNoise:
    """Return the rounding noise of the closed form and of references, except those that call the module many times."""
    routes: dict[str, Route] = {n: REFERENCES[n].products for n in names if n in REFERENCES and not REFERENCES[n].many_calls}
    routes = routes or {"reverse-over-reverse": REFERENCES["reverse-over-reverse"].products}
    routes |= {} if closed_form is None else {HESSIANKIT: closed_form}
    return RoundingNoise(problem, routes, precision, directions)


@dataclass
class Case:
    """One result: its symmetry, its error estimate, and whether it may judge others; ``note`` says why it failed, if it did."""

    name: str
    tolerance: float
    attainable: float
    note: str
    failed: bool = False
    symmetry: Worst = NO_COMPARISON
    symmetric: bool = True
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """Independent group of the route."""
        return REFERENCES[self.name].independent_group if self.name in REFERENCES else UNDER_TEST

    @property
    def resolves(self) -> bool:
        """Whether the result is precise enough to judge others; in half precision, as precise as its own arithmetic can be."""
        return self.attainable <= max(RESOLVED, self.tolerance)

    @property
    def judges(self) -> bool:
        """Whether the result may be part of the consensus."""
        return not self.failed and self.symmetric and self.resolves and self.group != UNDER_TEST


class SideBySide:
    """Results of one problem side by side, over one or several sets of directions.

    Whole matrices are one set, along all unit vectors. Where no matrix fits, each direction is a set of its own, of which only
    the largest entries and differences of every cell are kept. ``tolerance`` is that of a route without an error estimate.
    """

    def __init__(self, judge: Judge, module_traits: Traits, tolerance: float) -> None:
        self.problem, self.judge, self.module_traits, self.tolerance = judge.noise.problem, judge, module_traits, tolerance
        self._cases: dict[str, Case] = {}
        self._gaps: dict[frozenset[str], list[Gaps]] = defaultdict(list)

    def add(self, results: Mapping[str, Outcome | Unsupported], probes: Probes | None = None) -> None:
        """Compare results along the same directions with each other: matrices (P, P), or with ``probes`` products (k, P).

        A result with directions of its own, some of these, is compared along those.
        """
        common, individual = dict[str, Outcome](), dict[str, Outcome]()
        for name, result in results.items():
            if isinstance(result, Unsupported):
                self._cases[name] = Case(name, self.tolerance, math.inf, result.reason, failed=True)
                continue
            result_probes, size = result.probes or probes, self.problem.size
            shape = (size, size) if result_probes is None else (len(result_probes.owners), size)
            if tuple(result.value.shape) != shape:
                raise InputError(f"examine: '{name}' has shape {tuple(result.value.shape)}; expected {shape}.")
            collection = common if result_probes is probes else individual
            collection[name] = result if result_probes is not None else result.mapped(torch.t)  # products, one a row
        self._compare({}, common, probes)
        for name, result in individual.items():
            assert result.probes is not None
            self._compare({n: _along(x, probes, result.probes) for n, x in common.items()}, {name: result}, result.probes)

    def _compare(self, partners: Mapping[str, Outcome], new: Mapping[str, Outcome], probes: Probes | None) -> None:
        """Compare new results with each other and with the earlier ones."""
        layout = Layout(self.problem, None if probes is None else probes.owners)
        errors = {n: None if x.error is None else layout.largest(x.error) for n, x in {**partners, **new}.items()}
        for (a, first), (b, second) in [*product(partners.items(), new.items()), *combinations(new.items(), 2)]:
            self._gaps[frozenset((a, b))].append(layout.gaps(first.value, second.value, errors[a], errors[b]))
        for name, result in new.items():
            is_new, error = name not in self._cases, errors[name]
            case = self._cases.setdefault(name, Case(name, self.tolerance, self.tolerance, result.note))
            if is_new and name != HESSIANKIT and layout.labels == self.judge.names:  # the directions lie on every parameter
                pairs = layout.asymmetry(result.value, error, None if probes is None else probes.V)
                case.symmetry, case.symmetric = self.judge.worst(pairs), self.judge.within(pairs, self.tolerance)
            precision = 0.0 if error is None else self.judge.attainable(error, layout.largest(result.value))
            case.attainable, case.seconds = max(case.attainable, precision), case.seconds + result.seconds

    def gaps(self, a: str, b: str) -> Gaps:
        """Return two results side by side; the one that was added first is first."""
        return joined(self._gaps[frozenset((a, b))])

    def health(self, names: Iterable[str]) -> dict[str, Health]:
        """Judge each result against the consensus of those that may judge."""
        cases = {name: self._cases[name] for name in names}
        witnesses = {name: case for name, case in cases.items() if case.judges}
        agree = {frozenset(ab) for ab in combinations(witnesses, 2) if self.judge.within(self.gaps(*ab), self.tolerance)}
        consensus = agreeing({name: case.group for name, case in witnesses.items()}, agree)
        dissent = next((name for name, case in cases.items() if consensus and self._dissents(case, consensus)), "")
        return {name: self._health(case, witnesses, () if dissent else consensus, dissent) for name, case in cases.items()}

    def _dissents(self, case: Case, consensus: Collection[str]) -> bool:
        """Tell whether differences of the gradient, within their own error estimate, contradict routes that differentiate it.

        These share torch's formulas, and may share their error: which side is wrong is not known.
        """
        if case.failed or case.name in consensus or case.name not in REFERENCES or not REFERENCES[case.name].many_calls:
            return False
        return case.resolves and not all(self.judge.within(self.gaps(case.name, name), case.tolerance) for name in consensus)

    def _health(self, case: Case, witnesses: Mapping[str, Case], consensus: Collection[str], dissent: str) -> Health:
        judge, module_traits = self.judge, self.module_traits
        peers = [name for name in consensus if witnesses[name].group != case.group and not case.failed]
        gaps = {name: self.gaps(case.name, name) for name in peers}
        agrees = bool(peers) and all(judge.within(gaps[name], case.tolerance) for name in peers)
        # The most precise witness tells most about this one: a coarse one adds its own error to the deviation.
        nearest = min(peers, key=lambda name: witnesses[name].attainable, default=None)
        deviation = NO_COMPARISON if nearest is None else judge.worst(gaps[nearest])
        symmetry, defect = case.symmetry, known_defect(case.group, module_traits)
        if nearest is not None and symmetry.pair is not None:  # let it name the wrong block and not its transpose
            errors, pair = judge.relative(gaps[nearest], admitted=False), [judge.names.index(n) for n in symmetry.pair]
            if float(errors[pair[0], pair[1]]) < float(errors[pair[1], pair[0]]):
                symmetry = replace(symmetry, pair=symmetry.pair[::-1])
        tail = f"; {defect}" if defect else ""
        is_alone = case.name in witnesses and all(witness.group == case.group for witness in witnesses.values())
        if case.failed:
            reason = f"unsupported: {case.note}"
        elif is_alone:
            reason = "no other independent reference"
        elif not math.isfinite(case.symmetry.error) and case.symmetry is not NO_COMPARISON:
            reason = "not finite"
        elif not case.resolves:
            reason = f"resolves some block to {case.attainable:.1e} only{'; ' if case.note else ''}{case.note}"
        elif not case.symmetric:
            reason = f"not symmetric ({symmetry}){tail}"
        elif dissent and case.name != dissent:
            reason = f"not confirmed: {dissent} contradict it, and resolve every block: which of the two is wrong is not known"
        elif nearest is None:
            reason = "not confirmed: no two independent references agree"
        elif not agrees:
            reason = f"disagrees with {nearest} ({deviation}){tail}"
        else:
            lowered_by = module_traits.lowered_by
            floor = f"; precision floor: {lowered_by} computes in {module_traits.precision}" if lowered_by else ""
            reason = f"agrees with {nearest} to {deviation.error:.1e}{floor}"
        if agrees and case.note:
            reason += f"; {case.note}"
        worst = (deviation if peers else case.symmetry).pair
        return Health(
            case.name,
            case.group,
            symmetry_error=case.symmetry.error,
            worst_parameter=worst[0] if worst else "",
            deviation=deviation.error,
            worst_pair=worst,
            attainable=case.attainable,
            healthy=agrees and case.symmetric and case.resolves,
            seconds=case.seconds,
            reason=reason,
            alone=is_alone,
        )


def _along(result: Outcome, source: Probes | None, probes: Probes) -> Outcome:
    """Return products along ``probes`` from those along every unit vector (``source`` None), or along more directions."""
    if source is None:
        error = None if result.error is None else probes.V.abs().to(result.error) @ result.error
        return replace(result, value=probes.V.to(result.value) @ result.value, error=error)
    if probes.rows is None:
        raise InputError("examine: products along other directions; pass those of the others, or some of them.")
    rows = list(probes.rows)
    return result.mapped(lambda x: x[rows])


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
    ranked: list[tuple[int, int, tuple[str, ...]]] = []
    for size in range(2, len(groups) + 1):
        for members in combinations(groups, size):
            count = len({_WITNESS.get(groups[name], groups[name]) for name in members})
            if count >= 2 and all(frozenset(pair) in agree for pair in combinations(members, 2)):
                ranked.append((count, size, members))
    top = [members for count, size, members in ranked if (count, size) == max(ranked)[:2]]
    return top[0] if len(top) == 1 else ()
