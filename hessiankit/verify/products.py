"""``check`` by products, where P x P does not fit: H v along generic directions, by the closed form and by references."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from hessiankit.curvature.operator import HessianOperator
from hessiankit.verify.comparison import Gaps, Judge, Layout, joined
from hessiankit.verify.health import Case, Health, healths
from hessiankit.verify.probes import Direction
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported
from hessiankit.verify.traits import Traits

CLOSED = "closed form"


@dataclass
class Products:
    """Products of one operator and of references along the same directions, compared one direction at a time.

    Only what one direction needs is in memory: a vector of the parameters' size for each result, and a graph. Of ``along``, the
    last direction is the one that central differences, which call the module many times, take as well.
    """

    problem: Problem
    operator: HessianOperator
    names: tuple[str, ...]
    along: Sequence[Direction]
    tolerance: float
    judge: Judge
    progress: Callable[[str, int, int], None] | None = None
    _gaps: dict[frozenset[str], list[Gaps]] = field(default_factory=dict)
    _cases: dict[str, Case] = field(default_factory=dict)

    def run(self) -> None:
        """Compute and compare all products."""
        self._cases = {name: Case(name, self.tolerance, self.tolerance, symmetric=True) for name in self.names}
        for at, direction in enumerate(self.along):
            last, v = at == len(self.along) - 1, direction.vector(self.problem)
            results = {CLOSED: (self.operator @ v)[None]}
            errors: dict[str, Tensor | None] = {CLOSED: None}
            layout = Layout(self.problem, [direction.label])
            for name in self.names:
                if self._cases[name].failed or (REFERENCES[name].many_calls and not last):
                    continue
                outcome = self._measured(name, v, layout)
                if outcome is None:
                    continue
                errors[name] = None if outcome.error is None else layout.largest(outcome.error)
                for other in results:
                    gaps = layout.gaps(results[other], outcome.value, errors[other], errors[name])
                    self._gaps.setdefault(frozenset((other, name)), []).append(gaps)
                if name == self.names[0] or last:  # along the others, each is compared with the first only
                    results[name] = outcome.value
            if self.progress is not None:
                self.progress("products", at + 1, len(self.along))

    def _measured(self, name: str, v: Tensor, layout: Layout) -> Outcome | None:
        """Return the product of a reference, and note its time and precision, or why it has none."""
        case = self._cases[name]
        try:
            outcome = REFERENCES[name].measure(self.problem, v[None], chunk=1)
        except Unsupported as reason:
            self._cases[name] = replace(case, failed=True, attainable=math.inf, note=reason.reason)
            return None
        own = 0.0
        if outcome.error is not None:
            own = self.judge.attainable(layout.largest(outcome.error), layout.largest(outcome.value))
        self._cases[name] = replace(case, attainable=max(case.attainable, own), seconds=case.seconds + outcome.seconds)
        return outcome

    def gaps(self, a: str, b: str) -> Gaps:
        """Return two results side by side, along the directions that both have; the closed form is first."""
        return joined(self._gaps[frozenset((a, b))])

    def health(self, found: Traits) -> dict[str, Health]:
        """Return the health of the references, from their comparison with each other."""
        return healths(self._cases, self.gaps, self.judge, found)
