"""Comparison of Hessians block pair by block pair, each relative to its own largest entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from hessiankit.curvature.dense import hessian
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.verify.probes import Probes, probe_directions
from hessiankit.verify.problem import Problem

Route: TypeAlias = Callable[[Problem, Tensor], Tensor]
"""A problem and directions (k, P) -> products (k, P)."""

ULPS = 16.0
"""Size of the perturbation of the parameters, in units of the last place: roundings change, the Hessian does not."""

PERTURBATIONS, SAFETY = 2, 32.0
"""A block counts as zero up to this many times its largest change under rounding, of two perturbations."""


def perturbed(problem: Problem, eps: float, generator: torch.Generator) -> Problem:
    """Return the problem at parameters moved by ``ULPS`` units in the last place."""

    def moved(x: Tensor) -> Tensor:
        return x * (1 + ULPS * eps * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x))

    return problem.near({n: moved(x) for n, x in problem.params.items()})


class RoundingNoise:
    """The size of rounding errors in each block pair.

    A block that vanishes identically (the bias of the keys, say) is computed as eps times the terms that cancel. Where the
    parameters move by a few units in the last place, such a remainder changes wholly, a true entry by a few eps of itself,
    however small it is. So the largest change, times a safety, separates the two, without any scale from outside the block.

    Args:
        problem: The loss.
        routes: The routes whose products are compared; each leaves a remainder of its own.
        eps: Of the lowest precision that the module computes in.
    """

    def __init__(self, problem: Problem, routes: Mapping[str, Route], eps: float) -> None:
        self.problem, self.routes, self.eps = problem, dict(routes), eps

    @cached_property
    def floor(self) -> Tensor:
        """(n, n): of the derivative of parameter i's gradient along parameter j."""
        problem, generator = self.problem, torch.Generator().manual_seed(0)
        probes = probe_directions(problem, 1, seed=1)
        result = torch.zeros(len(problem.params), len(problem.params), dtype=torch.float64)
        here = {name: self._products(route, problem, probes.V) for name, route in self.routes.items()}
        for _ in range(PERTURBATIONS):
            there = perturbed(problem, self.eps, generator)
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
    with problem.at():
        found = hessian(*problem.arguments, **problem.options)
    return V.to(found.matrix) @ found.matrix


FLOOR = 45.0
"""Below FLOOR * eps times the largest entry of the whole (1e-14 in float64) a block may be a remainder of rounding."""

RESOLVED = 1e-2
"""A route resolves a block where its own error estimate stays below this share of the block's largest entry."""


@dataclass(frozen=True)
class Worst:
    """The largest disagreement over all block pairs.

    Args:
        error: Largest difference relative to the largest entry of that block pair.
        share: Largest difference anywhere relative to the largest entry of the whole.
        pair: (i, j): the derivative of parameter i's gradient along parameter j, where ``error`` occurs.
    """

    error: float
    share: float
    pair: tuple[str, str] | None

    def __str__(self) -> str:
        where = f", block {self.pair[0]} x {self.pair[1]}" if self.pair else ""
        return f"{self.share:.2g} of the largest entry{where}"


class BlockMaxima:
    """Block-pair maxima of arrays laid out as products (k, P): rows are directions, columns gradient entries.

    The block pair (i, j) holds the rows of directions on parameter j and the columns of parameter i. Differences are
    measured against the largest entry of their own block pair. A block that vanishes identically (the bias of the keys,
    say) is computed as what rounding leaves of it, of which a relative error has no meaning: a difference counts as zero
    in a block below ``FLOOR * eps`` of the largest entry of the whole, if it is no larger than ``noise`` says that rounding
    is in this very block. A small block that is wrong is thus not mistaken for one.

    Args:
        problem: Gives the parameters and their slices.
        probes: The directions of the products; None for whole matrices.
        precision: The lowest floating type that the module computes in; None: the type of the parameters.
        noise: The rounding errors of each block pair; None: as much as ``FLOOR`` allows.
    """

    def __init__(
        self,
        problem: Problem,
        probes: Probes | None = None,
        precision: torch.dtype | None = None,
        noise: RoundingNoise | None = None,
    ) -> None:
        self.probes, self.noise = probes, noise
        self.eps = torch.finfo(precision or problem.dtype).eps
        # Differences need not resolve a block below this share of the whole's largest entry: they have little to spare.
        self.small = 1e-4 if self.eps < 1e-12 else 1e-2
        self.names = tuple(problem.params)
        self._slices = list(problem.slices.values())
        owners = probes.owners if probes else tuple(n for n, s in problem.slices.items() for _ in range(s.stop - s.start))
        self.along = tuple(name for name in self.names if name in owners)
        device = problem.theta.device
        self._rows = [torch.tensor([k for k, o in enumerate(owners) if o == name], device=device) for name in self.along]
        self.shape = (len(owners), problem.size)

    def largest(self, products: Tensor) -> Tensor:
        """Return the largest absolute entry of every block pair (i, j): one row a parameter, one column an owner."""
        per_direction = torch.stack([products[:, where].abs().amax(1) for where in self._slices])  # (n, k)
        return self._over_directions(per_direction)

    def relative(self, difference: Tensor, scales: Tensor, slack: Tensor | None = None) -> Tensor:
        """Return block-pair differences relative to the block's own scale.

        It is 0 where the block cannot be told from zero: below rounding, or small and below the error ``slack`` that
        the compared routes admit, with a difference no larger than that. Zero on one side only gives 1.
        """
        floor = FLOOR * self.eps * scales.amax()
        slack = torch.zeros_like(scales) if slack is None else slack
        within = difference <= slack + floor
        unresolved = within & (slack > RESOLVED * scales) & (slack <= RESOLVED * self.small * scales.amax())
        vanishing = within & (scales <= floor)
        if self.noise is not None and bool((vanishing & ~unresolved & (difference > 0)).any()):
            probed = [self.names.index(name) for name in self.along]
            vanishing &= difference <= slack + self.noise.floor[:, probed].to(difference)
        return torch.where(vanishing | unresolved, 0.0, difference / scales.clamp_min(torch.finfo(scales.dtype).tiny))

    def attainable(self, own_error: Tensor, scales: Tensor) -> float:
        """Return the relative error that a route admits, blocks below ``small`` being measured against that."""
        reference = scales.clamp_min(self.small * float(scales.amax())).clamp_min(torch.finfo(scales.dtype).tiny)
        return float((own_error / reference).amax())

    def difference(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest difference and the largest entry (of either) of every block pair."""
        return self.largest(a - b), torch.maximum(self.largest(a), self.largest(b))

    def asymmetry(self, products: Tensor, own_error: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the asymmetry of H, its scale, and the asymmetry within the route's own error.

        Whole matrices are compared entry by entry. Of probes there are only the bilinear forms v_k^T H v_l, which are
        compared with |(H v_l)_i|, the length of the product restricted to v_k's parameter i (v_k has length one).
        """
        own = torch.zeros(len(self.names), len(self.along)).to(products) if own_error is None else own_error
        if self.probes is None:
            scales = self.largest(products)
            return self.largest(products - products.T), torch.maximum(scales, scales.T), own + own.T
        forms = self.probes.V.to(products) @ products.T  # (k, k), entry v_k^T H v_l
        gaps = (forms - forms.T).abs()
        difference = self._over_directions(torch.stack([gaps[rows].amax(0) for rows in self._rows]))
        lengths = self._over_directions(torch.stack([products[:, where].norm(dim=1) for where in self._slices]))
        sizes = torch.tensor([where.stop - where.start for where in self._slices]).to(products)
        own = own * sizes.sqrt()[:, None]  # |error_i| <= sqrt(n_i) times its largest entry
        probed = [self.names.index(name) for name in self.along]  # only these have directions on both sides
        scales, own = lengths[probed], own[probed]
        result = torch.zeros(3, len(self.names), len(probed)).to(products)
        result[:, probed] = torch.stack([difference, torch.maximum(scales, scales.T), own + own.T])
        return result[0], result[1], result[2]

    def worst(self, difference: Tensor, scales: Tensor, slack: Tensor | None = None) -> Worst:
        """Return the largest relative difference, its block pair, and the largest difference as a share of the whole."""
        relative = self.relative(difference, scales, slack)
        if not bool(torch.isfinite(relative).all()):
            return Worst(math.inf, math.inf, self._pair(int((~torch.isfinite(relative)).flatten().nonzero()[0])))
        whole = float(scales.amax())
        share = float(difference.amax()) / whole if whole > 0 else 0.0
        at = int(relative.argmax())
        return Worst(float(relative.flatten()[at]), share, self._pair(at))

    def _pair(self, at: int) -> tuple[str, str]:
        return self.names[at // len(self.along)], self.along[at % len(self.along)]

    def _over_directions(self, per_direction: Tensor) -> Tensor:
        return torch.stack([per_direction[:, rows].amax(1) for rows in self._rows], dim=1)


def block_errors(a: Tensor, b: Tensor, problem: Problem) -> Tensor:
    """Return max |a - b| of every block pair relative to the block's largest entry.

    Entry (i, j) belongs to the derivative of parameter i's gradient along parameter j, in the order of ``params``.

    Args:
        a: One Hessian (P, P).
        b: The other.
        problem: Gives the parameters and their slices.

    Raises:
        InputError: A wrong shape.

    >>> problem = Problem(torch.nn.Linear(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    >>> H = torch.tensor([[2.0, 2.0], [2.0, 2.0]])
    >>> block_errors(H, H + torch.tensor([[0.0, 1e-20], [2.0, 0.0]]), problem)
    tensor([[0.0000, 0.0000],
            [0.5000, 0.0000]])
    """
    blocks = BlockMaxima(problem)
    for value in (a, b):
        if tuple(value.shape) != blocks.shape:
            raise InputError(f"block_errors: a value has shape {tuple(value.shape)}; expected {blocks.shape}.")
    return blocks.relative(*blocks.difference(a.T, b.T))
