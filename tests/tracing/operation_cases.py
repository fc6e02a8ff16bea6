"""One operation between two that have curvature: what the tests of the rules and of the decompositions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from curvature_reference import Formula, assert_exact, draw
from torch import Tensor

from hessiankit.primitives.primitive import Primitive
from hessiankit.request.loss_trace import loss_trace
from hessiankit.request.read import read_request
from hessiankit.tracing.fallback import AutomaticDifferentiation

Operation: TypeAlias = Callable[[Tensor], Tensor]


def module_of(operation: Operation) -> Formula:
    """A module with the operation, of y = tanh(x W) with y of shape (2, 3, 4), and with one parameter before it.

    A loss without axes is a module's output like any other, so a single number is multiplied by y.
    """

    def forward(s: Formula, x: Tensor) -> Tensor:
        y = torch.tanh(x @ s.W)
        z = operation(y)
        return torch.tanh(z if z.ndim else z * y)

    return Formula(forward, W=(5, 4))


def applied(module: Formula) -> list[Primitive]:
    x = draw(2, 3, 5)
    with torch.no_grad():
        traced = loss_trace(read_request(module, x, torch.zeros_like(module(x))).only())
    return [a.primitive for a in traced.trace.applications]


def check_closed_form(
    operation: Operation, kind: type[Primitive] | None = None, tolerance: float = 1e-12, **options: Any
) -> None:
    """Assert that an operation needs no automatic differentiation, uses a chapter, and gives the exact Hessian."""
    module = module_of(operation)
    seen = applied(module)
    assert not any(isinstance(p, AutomaticDifferentiation) for p in seen), seen
    assert kind is None or kind in {type(p) for p in seen[2:-2]}, seen  # those of module_of and of the loss left out
    assert assert_exact(module, draw(2, 3, 5), tolerance=tolerance, **options).fallbacks == ()


def cubed(
    name: str,
    backward: Callable[[Tensor, Tensor], Tensor] = lambda x, g: 3 * x.square() * g,
    *,
    forward: Operation = lambda x: x**3,
    saved: Operation = lambda x: x,
    wrap: Callable[[Any], Any] = lambda f: f,
) -> Any:
    """A function of one's own: x^3 or ``forward``, which keeps ``saved``, and whose ``backward`` may be wrong."""

    def run(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(saved(x))
        return forward(x)

    actions = {"forward": run, "backward": wrap(lambda ctx, g: backward(ctx.saved_tensors[0], g))}
    return type(name, (torch.autograd.Function,), {action: staticmethod(f) for action, f in actions.items()})
