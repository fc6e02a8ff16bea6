"""``check`` by products, where P x P does not fit: H v along generic directions, by the closed form and by references."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from hessiankit.curvature.operator import HessianOperator
from hessiankit.verify.check_report import MODULE, ROUNDING, ZERO, CheckRow
from hessiankit.verify.comparison import FLOOR, RESOLVED, SAFETY, perturbed
from hessiankit.verify.health import ALONE, Health, agreeing
from hessiankit.verify.probes import Direction
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Unsupported
from hessiankit.verify.rows import gradient_errors, loss_row

CLOSED = "closed form"
SMALL = 1e-2
"""Differences need not resolve a product's part below this share of its largest entry."""
ENTRIES = 2
"""Entries of each parameter at which a diagonal is compared, each by a product along a unit vector."""
Key = tuple[str, str]
"""(a parameter whose gradient is differentiated, the label of a direction)."""


@dataclass
class _Gaps:
    """Differences of two results: for each parameter and direction difference, entry, own error, entry of the smaller."""

    entries: dict[Key, tuple[float, float, float, float]] = field(default_factory=dict)

    def note(self, label: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], slack: Mapping[str, float]) -> None:
        for n, x in a.items():
            gap = float((x - b[n]).abs().max())
            small, scale = sorted((float(x.abs().max()), float(b[n].abs().max())))
            new = (gap, scale, slack.get(n, 0.0), small)
            old = self.entries.get((n, label), new)
            self.entries[n, label] = max(old, new, key=lambda e: e[0] / e[1] if e[1] else e[0]) if math.isfinite(gap) else new


@dataclass
class Products:
    """Products of one operator and of references along the same directions, compared one direction at a time.

    Only what one direction needs is in memory: about five vectors of the parameters' size, and a graph. Of ``along``, the last
    direction, on everything, is the one of central differences; ``make_operator`` makes the closed form again, at parameters
    moved by rounding; ``progress`` is called with (reference, directions done, directions in all).
    """

    problem: Problem
    operator: HessianOperator
    names: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    along: list[Direction]
    rtol: float
    precision: torch.dtype
    make_operator: Callable[[], HessianOperator]
    progress: Callable[[str, int, int], None] | None = None
    gaps: dict[frozenset[str], _Gaps] = field(default_factory=dict)
    failed: dict[str, Unsupported] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _noise: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def _method(self) -> str:
        return str(self.precision).removeprefix("torch.")

    def run(self) -> None:
        """Compute and compare all products."""
        for at, direction in enumerate(self.along):
            v = direction.parts(self.problem.params)
            results: dict[str, dict[str, Tensor]] = {CLOSED: self._closed(self.operator, v)}
            errors: dict[str, dict[str, float]] = {CLOSED: {}}
            for name in self.names:
                if name in self.failed or (REFERENCES[name].many_calls and at < len(self.along) - 1):
                    continue
                start = time.perf_counter()
                try:
                    results[name], error = self._reference(name, self.problem, v)
                except Unsupported as reason:
                    self.failed[name] = reason
                    continue
                errors[name] = error or {}
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
                for other in [x for x in results if x != name]:
                    slack = {n: errors[name].get(n, 0.0) + errors[other].get(n, 0.0) for n in v.keys() | results[name].keys()}
                    self.gaps.setdefault(frozenset((name, other)), _Gaps()).note(
                        direction.label, results[name], results[other], slack
                    )
                if name != self.names[0] and at < len(self.along) - 1:
                    del results[name]  # a vector of the parameters' size; along the last direction all are compared with all
            if self.progress is not None:
                self.progress("products", at + 1, len(self.along))

    def _closed(self, operator: HessianOperator, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.zeros(self.problem.size, dtype=self.problem.dtype, device=self.problem.device)
        for n, x in v.items():
            flat[self.problem.slices[n]] = x.reshape(-1)
        return self.problem.unflatten(operator @ flat)

    @staticmethod
    def _reference(name: str, problem: Problem, v: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float] | None]:
        with REFERENCES[name].along(problem) as product:
            found, error = product(v)
            return {n: x.detach() for n, x in found.items()}, error

    # Comparison ----------------------------------------------------------------------------------------------------------

    def errors(self, a: str, b: str) -> dict[Key, tuple[float, bool, str]]:
        """Return of each parameter and direction: the relative error, whether the two results admit it, and ``CheckRow.zero``."""
        gaps = self.gaps[frozenset((a, b))].entries
        largest = {label: max(scale for (_, at), (_, scale, _, _) in gaps.items() if at == label) for _, label in gaps}
        found = {}
        for (n, label), (gap, scale, slack, small) in gaps.items():
            error = gap / scale if scale else gap
            floor = FLOOR * torch.finfo(self.precision).eps * largest[label]
            if error > self.rtol and scale <= floor and gap <= slack + floor and gap <= slack + self._rounding(label)[n]:
                error = 0.0
            passed = error <= self.rtol + slack / scale if scale else gap == 0
            zero = passed and small <= floor and (error == 0 or error > self.rtol)
            found[n, label] = (0.0, True, ROUNDING if scale else ZERO) if zero else (error, passed, "")
        return found

    def _rounding(self, label: str) -> dict[str, float]:
        """Return the rounding noise of the products along a direction: their change at parameters moved by a few ulps."""
        if label not in self._noise:
            direction = next(d for d in self.along if d.label == label)
            v, near = direction.parts(self.problem.params), self._near
            with near.at():
                there = [self._closed(self._near_operator, v)]
            here = [self._closed(self.operator, v)]
            for name in [n for n in self.names if n not in self.failed and not REFERENCES[n].many_calls]:
                here.append(self._reference(name, self.problem, v)[0])
                there.append(self._reference(name, near, v)[0])
            changes = [{n: float((x - b[n]).abs().max()) for n, x in a.items()} for a, b in zip(here, there, strict=True)]
            self._noise[label] = {n: SAFETY * max(c[n] for c in changes) for n in self.problem.params}
        return self._noise[label]

    def health(self) -> dict[str, Health]:
        """Return the health of the references, from their comparison with each other."""
        ran = [n for n in self.names if n not in self.failed]
        groups = {n: REFERENCES[n].independent_group for n in self.names}
        found = {(a, b): self.errors(a, b) for a, b in combinations(ran, 2) if frozenset((a, b)) in self.gaps}
        pairs = {frozenset(k) for k, e in found.items() if all(passed for _, passed, _ in e.values())}
        trusted = agreeing({n: groups[n] for n in ran if self._attainable(n) <= RESOLVED}, pairs)
        reports = {}
        for name in self.names:
            if name in self.failed:
                reports[name] = self._report(name, None, math.nan, False, f"unsupported: {self.failed[name].reason}")
                continue
            judges = [n for n in trusted if n != name and frozenset((n, name)) in self.gaps and groups[n] != groups[name]]
            seen = [(max(self.errors(name, n).items(), key=lambda e: e[1][0]), n) for n in judges]
            if not seen:
                alone = len({groups[n] for n in ran}) == 1
                reason = ALONE if alone else "not confirmed: no two independent references agree"
                reports[name] = replace(self._report(name, None, math.nan, False, reason), alone=alone)
                continue
            (at, (error, *_)), judge = min(seen, key=lambda s: self._attainable(s[1]))
            agrees = name in trusted
            reason = f"{'agrees' if agrees else 'disagrees'} with {judge} {'to' if agrees else 'by'} {error:.1e}"
            reason += "" if agrees else f", the derivative of {at[0]}'s gradient along {at[1]}"
            reports[name] = self._report(name, at, error, agrees, reason)
        return reports

    def _attainable(self, name: str) -> float:
        """Return the largest error that a route admits, as a share of the largest entry of its product."""
        entries = self.gaps[frozenset((name, CLOSED))].entries
        whole = {label: max(scale for (_, at), (_, scale, _, _) in entries.items() if at == label) for _, label in entries}
        shares = [slack / max(scale, SMALL * whole[label]) for (_, label), (_, scale, slack, _) in entries.items() if scale]
        return max(shares, default=0.0)

    def _report(self, name: str, at: Key | None, error: float, healthy: bool, reason: str) -> Health:
        attainable = math.inf if name in self.failed else max(self.rtol, self._attainable(name))
        parameter = at[0] if at else ""
        group = REFERENCES[name].independent_group
        return Health(name, group, math.nan, parameter, error, at, attainable, healthy, self.seconds.get(name, 0.0), reason)

    def rows(self, health: Mapping[str, Health]) -> Iterator[CheckRow]:
        """Compare the closed form with every healthy reference, group by group: the worst parameter of each."""
        for name in [n for n in self.names if health[n].healthy]:
            errors = self.errors(CLOSED, name)
            for label in dict.fromkeys(label for _, label in errors):
                for group, members in self.groups.items():
                    seen = [errors[n, label] for n in members]
                    worst, passed, zeros = max(error for error, *_ in seen), all(p for _, p, _ in seen), {z for *_, z in seen}
                    zero = "" if "" in zeros else ROUNDING if ROUNDING in zeros else ZERO
                    yield CheckRow(f"{group} x {label}", name, worst, passed, self.seconds[name], self._method, zero)

    def same_call(self) -> Iterator[CheckRow]:
        """Compare loss and gradient of the operator with those of the module's own call."""
        yield loss_row(self.operator.loss, self.problem, self.rtol, self._method)
        with self.problem.at():
            own = dict(zip(self.problem.params, self.problem.gradient(), strict=True))
        mine = self.problem.unflatten(self.operator.gradient)
        errors = gradient_errors(own, mine, self.precision, self.rtol, lambda: self._gradient_noise(own, mine))
        for group, members in self.groups.items():
            worst = max((errors[n] for n in members), key=lambda error: (error != error, error))  # NaN is the worst
            yield CheckRow(f"gradient: {group}", MODULE, worst, worst <= self.rtol, 0.0, self._method)

    def diagonal(self, found: Tensor, seconds: float) -> Iterator[CheckRow]:
        """Compare a diagonal (P) at ``ENTRIES`` random entries of each parameter, relative to its largest one there."""
        name = next((n for n in self.names if n not in self.failed and not REFERENCES[n].many_calls), None)
        generator, params = torch.Generator().manual_seed(0), self.problem.params
        if name is None:
            return
        entries: dict[str, list[tuple[float, float]]] = {}
        with REFERENCES[name].along(self.problem) as product:
            for n, where in self.problem.slices.items():
                mine = found[where]
                for k in torch.randint(mine.numel(), (ENTRIES,), generator=generator).tolist():
                    unit = torch.zeros_like(params[n])
                    unit.view(-1)[k] = 1
                    column = product({n: unit})[0][n].reshape(-1)  # of the diagonal block
                    scale = max(float(mine.abs().max()), float(column.abs().max()))
                    entries.setdefault(n, []).append((float((mine[k] - column[k]).abs()), scale))
        floor = FLOOR * torch.finfo(self.precision).eps * max(scale for seen in entries.values() for _, scale in seen)
        for group, members in self.groups.items():
            worst = 0.0
            for n in members:
                for gap, scale in entries[n]:
                    error = gap / scale if scale else gap
                    if error > self.rtol and scale <= floor and gap <= self._rounding(group)[n]:
                        error = 0.0
                    worst = max(worst, error) if math.isfinite(error) else math.inf
            yield CheckRow(f"diagonal: {group}", name, worst, worst <= self.rtol, seconds, self._method)

    def _gradient_noise(self, own: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> dict[str, float]:
        with self._near.at():
            there = dict(zip(own, self._near.gradient(), strict=True)), self.problem.unflatten(self._near_operator.gradient)
        pairs = list(zip((own, mine), there, strict=True))
        return {n: SAFETY * max(float((a[n] - b[n]).abs().max()) for a, b in pairs) for n in own}

    @cached_property
    def _near_operator(self) -> HessianOperator:
        with self._near.at():
            return self.make_operator()

    @cached_property
    def _near(self) -> Problem:
        """The problem at parameters moved by a few units in the last place."""
        return perturbed(self.problem, torch.finfo(self.precision).eps, torch.Generator().manual_seed(0))
