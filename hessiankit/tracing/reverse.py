"""The derivative actions of one value by its autograd graph: torch.autograd.grad once and twice.

With y the value and x_1, ..., x_m the places in its graph that count as inputs,

    vjp:        grad(y, x, u)
    jvp:        grad(grad(y, x, w), w, t), since grad(y, x, w) = J^T w is linear in w; at w = 1, because some formulas of
                torch take the logarithm of w
    curvature:  grad(grad(y, x, lambda), x, t), the contraction [lambda . D^2 y] t by reverse-over-reverse.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hessiankit.primitives.primitive import Covectors, Tangents

Places: TypeAlias = "Sequence[Tensor] | Sequence[GradientEdge]"


def vjp(y: Tensor, x: Places, adjoint: Tensor) -> Covectors:
    """Pull adjoints (S, *y.shape) back to every input; None where y does not depend on it."""
    return _batched(lambda u: _grad([y], x, [u]), [adjoint]) if y.requires_grad else (None,) * len(x)


def jvp(y: Tensor, x: Places, tangents: Tangents) -> Tensor:
    """Push tangents (S, *x_k.shape) forward: (S, *y.shape)."""
    length = next(len(t) for t in tangents if t is not None)
    zero = y.new_zeros(length, *y.shape)
    if not y.requires_grad:
        return zero
    with torch.enable_grad():
        w = torch.ones_like(y, requires_grad=True)
        gradients = _grad([y], x, [w], create_graph=True)
    linear, directions = _paired(gradients, tangents)
    if not linear:
        return zero
    (tangent,) = _batched(lambda *t: _grad(linear, [w], t), directions)
    return zero if tangent is None else tangent


def curvature(y: Tensor, x: Places, adjoint: Tensor, tangents: Tangents) -> Covectors:
    """Contract the second derivative of y with an adjoint (of y's shape) and tangents (S, *x_k.shape)."""
    if not y.requires_grad:
        return (None,) * len(x)
    with torch.enable_grad():
        gradients = _grad([y], x, [adjoint], create_graph=True)
    nonlinear, directions = _paired(gradients, tangents)
    if not nonlinear:
        return (None,) * len(x)
    return _batched(lambda *t: _grad(nonlinear, x, t), directions)


def is_affine(y: Tensor, x: Places) -> bool:
    """Tell whether, by autograd's graph, the first derivative of y is independent of the inputs."""
    with torch.enable_grad():
        gradients = _grad([y], x, [torch.ones_like(y)], create_graph=True)
    nonconstant = [s for s in gradients if s is not None and s.requires_grad]
    return not nonconstant or all(c is None for c in _grad(nonconstant, x, [torch.ones_like(s) for s in nonconstant]))


def _paired(gradients: Covectors, tangents: Tangents) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients that can be differentiated again and have a tangent, and these tangents."""
    pairs = [(s, t) for s, t in zip(gradients, tangents, strict=True) if s is not None and t is not None and s.requires_grad]
    return [s for s, _ in pairs], [t for _, t in pairs]


def _grad(y: Sequence[Tensor], x: Places, u: Sequence[Tensor], *, create_graph: bool = False) -> Covectors:
    return torch.autograd.grad(y, x, u, retain_graph=True, create_graph=create_graph, allow_unused=True)


def _batched(function: Callable[..., Covectors], stacks: Sequence[Tensor]) -> Covectors:
    """Call a function for every entry of the leading axis S: once for all by vmap, one by one where vmap has no rule."""
    present: list[bool] = []

    def without_none(*u: Tensor) -> tuple[Tensor, ...]:
        results = function(*u)
        present[:] = [c is not None for c in results]
        return tuple(c for c in results if c is not None)

    length = len(stacks[0])
    columns: Sequence[Tensor] | None = None
    if length > 1:
        try:
            with warnings.catch_warnings():  # of a rule that is missing, and of the loop that takes its place
                warnings.simplefilter("ignore")
                columns = torch.vmap(without_none)(*stacks)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, ValueError):
            pass  # what is wrong beyond vmap is raised below
    if columns is None:
        rows = [without_none(*(stack[i] for stack in stacks)) for i in range(length)]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
    rest = iter(columns)
    return tuple(with_memory(next(rest)) if is_present else None for is_present in present)


def with_memory(x: Tensor) -> Tensor:
    """Return a tensor itself, or ordinary zeros for one of torch's zero tensors, which have no memory and cannot be written into.

    >>> with_memory(torch._efficientzerotensor(2)).add_(1).tolist()
    [1.0, 1.0]
    """
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if x._is_zerotensor() else x
