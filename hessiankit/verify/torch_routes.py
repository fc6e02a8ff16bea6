"""Every way in which torch can differentiate a scalar function twice, each returning the whole Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.functional import hessian as autograd_hessian
from torch.func import grad, jacfwd, jacrev, jvp, vmap
from torch.func import hessian as func_hessian

from hessiankit.verify.reference_differences import WEIGHTS

Scalar: TypeAlias = Callable[[Tensor], Tensor]
"""A function of the flat vector theta (P) that returns one number."""


class MeanOverSamples(Protocol):
    """A function of theta that is the mean of one function for each sample; what per-sample routes take."""

    @property
    def samples(self) -> int:
        """How many there are."""

    def __call__(self, theta: Tensor, sample: Tensor | None = None) -> Tensor:
        """Return the mean, or the value of one sample by its index."""


STEPS = tuple(4.0**-k for k in range(4, 10))
"""Of the central differences, the first that the next one confirms: in float64 the first has a truncation h^8 far below
the rounding eps / h, about 1e-13; a kink (a ReLU close to zero) or a nearly constant row of a layer norm needs a smaller one.
"""

CONFIRMED = 1e-10
"""Two steps that agree to this, relative to the column's largest entry, confirm each other."""


@dataclass(frozen=True)
class Route:
    """One way to a Hessian.

    Attributes:
        name: How the table calls it.
        summary: What it calls, in words.
        matrix: (f, theta) -> the Hessian (P, P); column j is the derivative of the gradient along parameter j. The routes
            through per-sample gradients take a ``MeanOverSamples``, the others any scalar function.
    """

    name: str
    summary: str
    matrix: Callable[[Any, Tensor], Tensor]


def gradient(f: Scalar, theta: Tensor) -> Tensor:
    """Return the gradient of ``f`` by one reverse sweep.

    >>> gradient(lambda x: x.square().sum(), torch.tensor([1.0, 3.0])).tolist()
    [2.0, 6.0]
    """
    theta = theta.detach().requires_grad_()
    return torch.autograd.grad(f(theta), theta)[0]


def central_differences(f: Scalar, theta: Tensor) -> Tensor:
    """Return the eighth-order central differences of the gradient; no second derivative is taken.

    >>> H = central_differences(lambda x: x[0] * x[1] ** 2, torch.tensor([1.0, 2.0], dtype=torch.float64))
    >>> H.round(decimals=9).tolist()
    [[0.0, 4.0], [4.0, 2.0]]
    """
    return torch.stack([_column(f, theta, e) for e in torch.eye(len(theta)).to(theta)], dim=1)


def _column(f: Scalar, theta: Tensor, e: Tensor) -> Tensor:
    """Return the derivative of the gradient along ``e``, at the step that agrees best with the next smaller one."""
    best, least = torch.full_like(theta, torch.nan), float("inf")
    coarse = _difference(f, theta, e, STEPS[0])
    for step in STEPS[1:]:
        fine = _difference(f, theta, e, step)
        gap = float((coarse - fine).abs().max())
        if gap < least:
            best, least = coarse, gap
        if gap <= CONFIRMED * float(fine.abs().max()):
            break
        coarse = fine
    return best


def _difference(f: Scalar, theta: Tensor, e: Tensor, step: float) -> Tensor:
    total = torch.zeros_like(theta)
    for k, weight in enumerate(WEIGHTS, 1):
        total += weight * (gradient(f, theta + k * step * e) - gradient(f, theta - k * step * e))
    return total / step


def _graph(f: Scalar, theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return a leaf and the gradient at it, with the graph that a second sweep needs."""
    leaf = theta.detach().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf, create_graph=True)[0], leaf


def _twice(f: Scalar, theta: Tensor) -> Tensor:
    g, leaf = _graph(f, theta)
    return torch.stack([torch.autograd.grad(g, leaf, e, retain_graph=True)[0] for e in torch.eye(len(theta)).to(theta)], dim=1)


def _twice_batched(f: Scalar, theta: Tensor) -> Tensor:
    g, leaf = _graph(f, theta)
    basis = torch.eye(len(theta)).to(theta)
    return torch.autograd.grad(g, leaf, basis, is_grads_batched=True)[0].T


def _push(first: Callable[[Scalar], Callable[[Tensor], Tensor]]) -> Callable[[Scalar, Tensor], Tensor]:
    """Push one basis direction after the other through the derivative that ``first`` makes."""

    def matrix(f: Scalar, theta: Tensor) -> Tensor:
        return torch.stack([jvp(first(f), (theta,), (e,))[1] for e in torch.eye(len(theta)).to(theta)], dim=1)

    return matrix


def _reverse_over_forward(f: Scalar, theta: Tensor) -> Tensor:
    """Differentiate the slope along one basis direction after the other backwards."""
    basis = torch.eye(len(theta)).to(theta)
    return torch.stack([grad(lambda x, e=e: jvp(f, (x,), (e,))[1])(theta) for e in basis], dim=1)


def _per_sample(
    outer: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
) -> Callable[[MeanOverSamples, Tensor], Tensor]:
    """Differentiate the mean of the per-sample gradients, which vmap takes together, once more."""

    def matrix(f: MeanOverSamples, theta: Tensor) -> Tensor:
        each = torch.arange(f.samples, device=theta.device)
        return outer(lambda x: vmap(grad(f), (None, 0))(x, each).mean(0))(theta)

    return matrix


ROUTES: dict[str, Route] = {
    route.name: route
    for route in (
        Route("grad twice", "torch.autograd.grad of torch.autograd.grad, row by row (reverse over reverse)", _twice),
        Route("grad twice (batched)", "the same with is_grads_batched=True", _twice_batched),
        Route("jacrev(grad)", "torch.func, reverse over reverse", lambda f, x: jacrev(grad(f))(x)),
        Route("jvp(grad)", "torch.func, forward over reverse, one direction at a time", _push(grad)),
        Route("jacfwd(grad)", "torch.func, forward over reverse, all directions together", lambda f, x: jacfwd(grad(f))(x)),
        Route("jacfwd(vmap(grad))", "forward over per-sample gradients, averaged", _per_sample(jacfwd)),
        Route("jacrev(vmap(grad))", "reverse over per-sample gradients, averaged", _per_sample(jacrev)),
        Route("torch.func.hessian", "jacfwd(jacrev(f))", lambda f, x: func_hessian(f)(x)),
        Route("jvp(jacrev)", "its columns, one direction at a time", _push(jacrev)),
        Route("jacrev(jacrev)", "torch.func, reverse over reverse through jacrev", lambda f, x: jacrev(jacrev(f))(x)),
        Route("grad(jvp)", "torch.func, reverse over forward, one direction at a time", _reverse_over_forward),
        Route("jacfwd(jacfwd)", "torch.func, forward over forward", lambda f, x: jacfwd(jacfwd(f))(x)),
        Route("autograd hessian", "torch.autograd.functional.hessian", lambda f, x: autograd_hessian(f, x)),
        Route(
            "autograd hessian (vectorized)",
            "torch.autograd.functional.hessian(vectorize=True)",
            lambda f, x: autograd_hessian(f, x, vectorize=True),
        ),
        Route(
            "autograd hessian (forward)",
            'torch.autograd.functional.hessian(vectorize=True, outer_jacobian_strategy="forward-mode")',
            lambda f, x: autograd_hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode"),
        ),
        Route("central differences", "of the gradient, eighth order; a judge of the others", central_differences),
    )
}
"""Every route by its name, in the order of the table's columns."""
