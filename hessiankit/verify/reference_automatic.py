"""References by automatic differentiation, and by another package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._vmap_internals import _vmap  # what torch.autograd.functional takes forward-mode directions together with
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode

from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.loss import read_loss
from hessiankit.tracing.stopped import NO_GRAD
from hessiankit.verify.problem import Problem, outputs_of, plain_formulas
from hessiankit.verify.reference_base import FAILURES, Progress, Unsupported, in_chunks, typed_line
from hessiankit.verify.traits import traits


class GradientGraph:
    """The gradient of a loss in some leaves, with the graph that a second reverse sweep needs.

    >>> x, y, unused = (torch.tensor(v, requires_grad=True) for v in (2.0, 3.0, 1.0))
    >>> graph = GradientGraph(x**2 * y, [x, y, unused])
    >>> [g.item() for g in graph.product([torch.tensor(1.0)] * 3)]  # H = [[2 y, 2 x], [2 x, 0]]
    [10.0, 4.0, 0.0]
    """

    def __init__(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        self.loss, self.leaves = loss, leaves
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        # position of a leaf -> its gradient, where that depends on the leaves
        self.parts = {at: g for at, g in enumerate(gradients) if g is not None and g.requires_grad}

    def product(self, v: Sequence[Tensor | None], *, batched: bool = False) -> Sequence[Tensor]:
        """Return H v by leaf, for a direction v by leaf (None: zero); ``batched``: both with a first axis k."""
        positions = [at for at in self.parts if v[at] is not None]
        if not positions:
            return [torch.zeros_like(leaf) for leaf in self.leaves]
        return torch.autograd.grad(
            [self.parts[at] for at in positions],
            self.leaves,
            [v[at] for at in positions],
            retain_graph=True,
            is_grads_batched=batched,
            allow_unused=True,
            materialize_grads=True,
        )


def reverse_over_reverse(problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, None, str]:
    """Return H v = d/dtheta <g(theta), v>: the gradient's own graph is differentiated backwards again."""

    def pull(rows: Tensor, batched: bool) -> Tensor:
        lead = rows.shape[:-1]
        v = [rows[..., problem.slices[n]].reshape(*lead, *p.shape) for n, p in problem.params.items()]
        return torch.cat([x.reshape(*lead, -1) for x in graph.product(v, batched=batched)], -1)

    with problem.at(), plain_formulas():
        graph = GradientGraph(problem.call(), list(problem.own.values()))
        if not graph.parts:
            function = "gradient" if graph.loss.requires_grad else "loss"
            return torch.zeros_like(V), None, f"the {function} does not depend on the parameters"
        value, note = in_chunks(lambda rows: pull(rows, True), lambda row: pull(row, False), V, chunk, progress)
    return value, None, note


def forward_over_reverse(problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, None, str]:
    """Return H v = jvp(grad(f)): forward mode through one reverse sweep.

    The module is called as it is: for the time of a call copies in the place of its own parameters carry the direction as their
    tangent. Some backward formulas of torch have no forward mode outside ``torch.func`` (silu, group_norm); there the parameters
    are exchanged by name, if that gives the module's own loss and gradient.
    """

    def push(v: Tensor) -> Tensor:
        return torch.cat([x.reshape(-1) for x in _dual(problem, problem.unflatten(v))])

    try:
        with problem.at({n: p.clone() for n, p in problem.params.items()}), plain_formulas():
            value, note = in_chunks(_vmap(push), push, V, chunk, progress)
    except FAILURES as error:
        why = f"by torch.func, as dual numbers do not pass ({typed_line(error)})"
        fault = problem.swap_fault
        if traits(problem).stopped_by == NO_GRAD:
            fault = "there forward mode passes torch.no_grad, where torch's gradient stops"
        if fault:
            raise Unsupported("jvp(grad)", f"{why}; {fault}") from error
        gradient = grad(problem.swapped_loss)

        def forward(v: Tensor) -> Tensor:
            tangent: dict[str, Tensor] = jvp(gradient, (problem.params,), (problem.unflatten(v),))[1]
            return torch.cat([x.reshape(-1) for x in tangent.values()])

        value, note = in_chunks(vmap(forward), forward, V, chunk, progress)
        note = "; ".join(filter(None, (why, note)))
    return value, None, note


def _dual(problem: Problem, direction: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the tangent of the gradient along a direction, by parameter."""
    parameters = problem.own
    with forward_ad.dual_level():
        # No graph, but forward mode stays on; the tangents go with the level, and graphs of the user's stay valid.
        with torch.no_grad(), ExitStack() as stack:
            for p in parameters.values():  # one by one: torch takes a tuple since 2.7
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(p))
            for n, v in direction.items():
                parameters[n].copy_(forward_ad.make_dual(parameters[n].detach().clone(), v))
        with _StoppedByNoGrad():
            gradient = problem.gradient()
        tangents = [forward_ad.unpack_dual(g).tangent for g in gradient]
    return [torch.zeros_like(p) if t is None else t for p, t in zip(parameters.values(), tangents, strict=True)]


class _StoppedByNoGrad(TorchFunctionMode):
    """Drop tangents where gradients are off: reverse mode stops at ``torch.no_grad``, forward mode would not."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call through; without gradients, return a new result as a constant."""
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() or not isinstance(result, Tensor) or any(result is x for x in args):
            return result
        return forward_ad.unpack_dual(result).primal


def functional(problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, None, str]:
    """Return H v = jvp(jacrev(f)), one column of ``torch.func.hessian`` = jacfwd(jacrev(f)) for each basis direction.

    It exchanges the parameters by name (``functional_call``). Through ``layer_norm`` with a gain torch loses a term on this
    route; ``examine`` shows it.
    """

    def push(v: Tensor) -> Tensor:
        return jvp(jacrev(problem.flat_loss), (problem.theta,), (v,))[1]

    if problem.swap_fault:
        raise Unsupported("torch.func.hessian", problem.swap_fault)
    value, note = in_chunks(vmap(push), push, V, chunk, progress)
    return value, None, note


def curvlinops(problem: Problem, V: Tensor, chunk: int, progress: Progress) -> tuple[Tensor, None, str]:
    """Return products of ``curvlinops.HessianLinearOperator`` with torch's loss of the same name, the whole batch as one.

    It exchanges the parameters by name (``functional_call``).
    """
    try:
        from curvlinops import HessianLinearOperator
    except ImportError as error:
        raise Unsupported("curvlinops", "the package is not installed (docs/howto/install.md says how)") from error
    losses = {"mse": nn.MSELoss(), "cross_entropy": nn.CrossEntropyLoss(ignore_index=IGNORE_INDEX)}
    if not isinstance(problem.loss, str) or problem.target is None:
        raise Unsupported("curvlinops", "it takes 'mse' and 'cross_entropy' only, not a loss of one's own")
    buffers = [name for name, x in problem.own.items() if not isinstance(x, nn.Parameter)]
    if buffers:
        raise Unsupported("curvlinops", f"it differentiates parameters only; {', '.join(buffers)} is a buffer")
    target = problem.target.reshape(-1) if problem.loss == "cross_entropy" else problem.target
    with problem.at(), plain_formulas():
        operator = HessianLinearOperator(
            _OneBatch(problem.module, problem.loss),
            losses[problem.loss],
            list(problem.own.values()),
            [({"inputs": problem.inputs}, target)],
            check_deterministic=False,
            batch_size_fn=lambda batch: 1,
        )
        gradient, loss = operator.gradient_and_loss()
        flat = torch.cat([g.detach().reshape(-1) for g in gradient])
        # Its products exchange the parameters by name, its gradient does not.
        if fault := problem.difference("the package", float(loss.detach()), flat) or problem.swap_fault:
            raise Unsupported("curvlinops", fault)

        def multiply(rows: Tensor) -> Tensor:
            return (operator @ rows.T).T

        value, note = in_chunks(multiply, lambda row: multiply(row[None])[0], V, chunk, progress)
    return value, None, note


class _OneBatch(nn.Module):
    """The module behind the one-argument call that the package makes, with the outputs in the loss's layout."""

    def __init__(self, module: nn.Module, loss: str) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the outputs; logits as rows (N, C)."""
        outputs = outputs_of(self.module, batch["inputs"], read_loss(self.loss))
        return outputs.reshape(-1, outputs.shape[-1]) if self.loss == "cross_entropy" else outputs
