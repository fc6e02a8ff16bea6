"""The three orders in which automatic differentiation can be applied twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from hessiankit.verify.problem import Problem
from hessiankit.verify.references.base import Progress, Reference, in_chunks


class ReverseOverReverse(Reference):
    """H v = d/dtheta <g(theta), v>: the gradient's own graph is differentiated backwards again.

    >>> from torch import nn
    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x, t = torch.tensor([[1.0, 2.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    >>> ReverseOverReverse().matrix(Problem(layer, x, t)).tolist()  # 2 x x^T
    [[2.0, 4.0], [4.0, 8.0]]
    """

    name = "reverse-over-reverse"
    independent_group = "reverse"
    summary = "torch.autograd.grad twice"

    def _products(self, problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor | None, str]:
        theta = problem.theta.clone().requires_grad_()
        try:
            loss = problem.flat_loss(theta)
            if not loss.requires_grad:
                return torch.zeros_like(V), None, "the loss does not depend on the parameters"
            (gradient,) = torch.autograd.grad(loss, theta, create_graph=True)
            if not gradient.requires_grad:
                return torch.zeros_like(V), None, "the gradient does not depend on the parameters"

            def pull(rows: Tensor, batched: bool) -> Tensor:
                (product,) = torch.autograd.grad(
                    gradient, theta, rows, retain_graph=True, is_grads_batched=batched, materialize_grads=True
                )
                return product

            value, note = in_chunks(lambda rows: pull(rows, True), lambda row: pull(row, False), V, chunk, progress)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise self.unsupported(error) from error
        return value, None, note


class _ForwardOverGradient(Reference):
    """H v = d/de g(theta + e v) by forward mode, with the gradient taken by one of torch.func's transforms."""

    gradient: Callable[..., Callable[..., Tensor]]

    def _products(self, problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, Tensor | None, str]:
        gradient = type(self).gradient(problem.flat_loss)

        def push(v: Tensor) -> Tensor:
            return jvp(gradient, (problem.theta,), (v,))[1]

        try:
            value, note = in_chunks(vmap(push), push, V, chunk, progress)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise self.unsupported(error) from error
        return value, None, note


class JvpOfGrad(_ForwardOverGradient):
    """H v = jvp(grad(f)): forward mode through one reverse sweep."""

    name = "jvp(grad)"
    independent_group = "forward-over-reverse"
    summary = "torch.func.jvp of torch.func.grad"
    gradient = staticmethod(grad)


class FuncHessian(_ForwardOverGradient):
    """H v = jvp(jacrev(f)), one column of ``torch.func.hessian`` = jacfwd(jacrev(f)) for each basis direction.

    Through ``layer_norm`` with a gain torch loses a term on this route; ``examine`` shows it.
    """

    name = "torch.func.hessian"
    independent_group = "jacfwd(jacrev)"
    summary = "torch.func.jvp of torch.func.jacrev, that is torch.func.hessian"
    gradient = staticmethod(jacrev)
