"""torch's ways to differentiate a scalar function twice: products with the Hessian, and the whole Hessian.

One table for the route table (``python -m benchmarks routes``) and the peers of the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.functional import hessian as autograd_hessian
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.func import hessian as func_hessian

from hessiankit.verify.reference_differences import combined

Scalar: TypeAlias = Callable[[Tensor], Tensor]
"""A function of the flat vector theta (P) that returns one number."""

Products: TypeAlias = Callable[[Tensor], Tensor]
"""Directions, one a row (k, P) -> their products with the Hessian, one a row (k, P)."""


class MeanOverSamples(Protocol):
    """A function of theta that is the mean of one function for each sample; the argument of the per-sample routes."""

    @property
    def samples(self) -> int:
        """Number of samples."""

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
    """One way to second derivatives; it has products, or the whole matrix, or both.

    Attributes:
        name: Column of the route table.
        summary: The functions that it calls.
        products: (f, theta) -> products with the Hessian of f at theta; what is done once for all directions is done here.
        whole: (f, theta) -> the Hessian (P, P); column j is the derivative of the gradient along parameter j. The routes
            through per-sample gradients take a ``MeanOverSamples``, the others any scalar function.
    """

    name: str
    summary: str
    products: Callable[[Scalar, Tensor], Products] | None = None
    whole: Callable[[Any, Tensor], Tensor] | None = None

    def matrix(self, f: Any, theta: Tensor) -> Tensor:
        """Return the Hessian (P, P), by ``whole`` if the route has it, else by products with the unit vectors."""
        if self.whole is not None:
            return self.whole(f, theta)
        assert self.products is not None
        return self.products(f, theta)(torch.eye(len(theta)).to(theta)).T


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
    odd = [gradient(f, theta + k * step * e) - gradient(f, theta - k * step * e) for k in (1, 2, 3, 4)]
    return combined(odd, step)


def _twice(*, batched: bool = False) -> Callable[[Scalar, Tensor], Products]:
    """Reverse over reverse: d<g, v>/dtheta, row by row, or several directions batched."""

    def products(f: Scalar, theta: Tensor) -> Products:
        leaf = theta.detach().requires_grad_()
        (g,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)

        def one(v: Tensor) -> Tensor:
            return torch.autograd.grad(g, leaf, v, retain_graph=True)[0]

        if not batched:
            return lambda V: torch.stack([one(v) for v in V])
        return lambda V: torch.autograd.grad(g, leaf, V, retain_graph=True, is_grads_batched=True)[0]

    return products


def _pulled(f: Scalar, theta: Tensor) -> Products:
    """Reverse over reverse by transforms: vmap of the vjp of the gradient."""
    pull = vjp(grad(f), theta)[1]
    return vmap(lambda v: pull(v)[0])


def _pushed(first: Callable[[Scalar], Callable[[Tensor], Tensor]], *, batched: bool) -> Callable[[Scalar, Tensor], Products]:
    """Forward over reverse: the jvp of the derivative that ``first`` makes, one direction at a time or under vmap."""

    def products(f: Scalar, theta: Tensor) -> Products:
        def one(v: Tensor) -> Tensor:
            return jvp(first(f), (theta,), (v,))[1]

        return vmap(one) if batched else lambda V: torch.stack([one(v) for v in V])

    return products


def _reverse_over_forward(f: Scalar, theta: Tensor) -> Products:
    """The gradient of the slope along one direction after the other."""
    return lambda V: torch.stack([grad(lambda x, v=v: jvp(f, (x,), (v,))[1])(theta) for v in V])


def _per_sample(
    outer: Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]],
) -> Callable[[MeanOverSamples, Tensor], Tensor]:
    """The derivative of the mean of the per-sample gradients, which vmap takes together."""

    def matrix(f: MeanOverSamples, theta: Tensor) -> Tensor:
        each = torch.arange(f.samples, device=theta.device)
        return outer(lambda x: vmap(grad(f), (None, 0))(x, each).mean(0))(theta)

    return matrix


FORWARD_VECTORIZED = 'torch.autograd.functional.hessian(vectorize=True, outer_jacobian_strategy="forward-mode")'

ROUTES: dict[str, Route] = {
    route.name: route
    for route in (
        Route("grad twice", "torch.autograd.grad of torch.autograd.grad, row by row (reverse over reverse)", _twice()),
        Route("grad twice (batched)", "the same with is_grads_batched=True", _twice(batched=True)),
        Route("jacrev(grad)", "torch.func, reverse over reverse", _pulled, lambda f, x: jacrev(grad(f))(x)),
        Route("jvp(grad)", "torch.func, forward over reverse, one direction at a time", _pushed(grad, batched=False)),
        Route(
            "jacfwd(grad)",
            "torch.func, forward over reverse, all directions together",
            _pushed(grad, batched=True),
            lambda f, x: jacfwd(grad(f))(x),
        ),
        Route("jacfwd(vmap(grad))", "forward over per-sample gradients, averaged", whole=_per_sample(jacfwd)),
        Route("jacrev(vmap(grad))", "reverse over per-sample gradients, averaged", whole=_per_sample(jacrev)),
        Route("torch.func.hessian", "jacfwd(jacrev(f))", _pushed(jacrev, batched=True), lambda f, x: func_hessian(f)(x)),
        Route("jvp(jacrev)", "its columns, one direction at a time", _pushed(jacrev, batched=False)),
        Route("jacrev(jacrev)", "torch.func, reverse over reverse through jacrev", whole=lambda f, x: jacrev(jacrev(f))(x)),
        Route("grad(jvp)", "torch.func, reverse over forward, one direction at a time", _reverse_over_forward),
        Route("jacfwd(jacfwd)", "torch.func, forward over forward", whole=lambda f, x: jacfwd(jacfwd(f))(x)),
        Route("autograd hessian", "torch.autograd.functional.hessian", whole=autograd_hessian),
        Route(
            "autograd hessian (vectorized)",
            "torch.autograd.functional.hessian(vectorize=True)",
            whole=lambda f, x: autograd_hessian(f, x, vectorize=True),
        ),
        Route(
            "autograd hessian (forward)",
            FORWARD_VECTORIZED,
            whole=lambda f, x: autograd_hessian(f, x, vectorize=True, outer_jacobian_strategy="forward-mode"),
        ),
        Route("central differences", "of the gradient, eighth order; a judge of the others", whole=central_differences),
    )
}
"""Every route by its name, in the order of the table's columns."""
