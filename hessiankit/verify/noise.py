"""What rounding leaves of a second derivative: found by moving the parameters by a few units in their last place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.curvature import hessian
from hessiankit.errors import HessiankitError
from hessiankit.verify.probes import probe_directions
from hessiankit.verify.problem import Problem

Route: TypeAlias = Callable[[Problem, Tensor], Tensor]
"""A problem and directions (k, P) -> products (k, P)."""

ULPS = 16.0
"""How far the parameters are moved, in units of their last place: all roundings fall anew, the Hessian stays."""

SAFETY = 32.0
"""What is zero may be this many times the largest change that was seen."""


class RoundingNoise:
    """The size below which an entry of a block pair means nothing, block pair by block pair.

    A block that vanishes identically (the bias of the keys, say) is computed as eps times the terms that cancel. Where the
    parameters move by a few units in the last place, such a remainder changes wholly, a true entry by a few eps of itself,
    however small it is. So the largest change, times a safety, separates the two, without any scale from outside the block.

    Args:
        problem: The loss.
        routes: What computes the products that are compared; each leaves a remainder of its own.
        eps: Of the lowest precision that the module computes in.
        samples: How many times the parameters are moved.
    """

    def __init__(self, problem: Problem, routes: Mapping[str, Route], eps: float, samples: int = 2) -> None:
        self.problem, self.routes, self.eps, self.samples = problem, dict(routes), eps, samples

    @cached_property
    def floor(self) -> Tensor:
        """(n, n): of the derivative of parameter i's gradient along parameter j."""
        problem, generator = self.problem, torch.Generator().manual_seed(0)
        probes = probe_directions(problem, 1, seed=1)
        result = torch.zeros(len(problem.params), len(problem.params), dtype=torch.float64)
        here = {name: self._products(route, problem, probes.V) for name, route in self.routes.items()}
        for _ in range(self.samples):
            there = problem.near(
                {
                    n: x * (1 + ULPS * self.eps * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x))
                    for n, x in problem.params.items()
                }
            )
            for name, route in self.routes.items():
                before, after = here[name], self._products(route, there, probes.V)
                if before is not None and after is not None:
                    change = (after - before).abs().double().cpu()
                    seen = torch.stack([change[:, where].amax(1) for where in problem.slices.values()])  # (n, directions)
                    result = torch.maximum(result, seen)
        return SAFETY * torch.maximum(result, result.T).to(problem.theta)

    @staticmethod
    def _products(route: Route, problem: Problem, V: Tensor) -> Tensor | None:
        try:
            return route(problem, V)
        except HessiankitError:  # the point itself is compared without this route's remainder, which is stricter
            return None


def closed_form(problem: Problem, V: Tensor) -> Tensor:
    """Return H V by the closed form, at the values of a problem."""
    with problem.borrowed():
        found = hessian(
            problem.module, problem.inputs, problem.target, loss=problem.loss, params=list(problem.params), handshake=False
        )
    return V.to(found.matrix) @ found.matrix
