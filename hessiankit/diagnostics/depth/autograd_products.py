"""Products with Jacobians, Hessians and Gauss-Newton matrices by torch.autograd alone, for models of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from hessiankit.diagnostics.sharpness.batches import BatchedLoss, MicroBatch
from hessiankit.support.errors import HessiankitError

T = TypeVar("T")
BlockProduct: TypeAlias = "Callable[[int, Sequence[Tensor]], Sequence[Tensor]]"
"""(k, tangents of the parameters of block k) -> the product with the k-th diagonal block, one tensor a parameter."""


class JacobianProducts:
    """Products with J = dy / dx from both sides.

    J^T u is linear in u, so that J v is its derivative in u along v: two reverse passes make a forward one (Townsend 2017), and
    no operation needs a forward rule. The graph is made once; a product is one pass through it.
    """

    def __init__(self, y: Tensor, *x: Tensor) -> None:
        self.y, self.x = y, x
        self.u = torch.zeros_like(y, requires_grad=True)
        self.back = _grad((y,), x, (self.u,), create_graph=True)

    def forward(self, *v: Tensor) -> Tensor:
        """Return J v."""
        return _filled(_grad(self.back, (self.u,), v), (self.u,))[0]

    def adjoint(self, w: Tensor) -> tuple[Tensor, ...]:
        """Return J^T w."""
        return _filled(_grad((self.y,), self.x, (w,)), self.x)


class HessianProducts:
    """Products with the diagonal blocks H_kk of the Hessian of the mean loss over all data, or of its Gauss-Newton part.

    H v = d/dtheta <g, v>, reverse over reverse. The Gauss-Newton part is J^T (L'' (J v)). The graph of a single micro-batch is
    cached; with several, every product recomputes them.

    The parameters of ``blocks`` require gradients; ``kind`` is ``"hessian"`` or ``"ggn"``.
    """

    def __init__(self, data: BatchedLoss, blocks: Sequence[Sequence[nn.Parameter]], kind: str) -> None:
        self.data, self.blocks, self.kind = data, blocks, kind
        self.terms = sum(data.count(target) for _, target in data.pairs())
        self.cached = self._linearised(data.batches[0]) if len(data.batches) == 1 else None

    def of(self, k: int) -> Callable[[Tensor], Tensor]:
        """Return the function v (P_k,) -> H_kk v."""
        parameters = self.blocks[k]

        def product(v: Tensor) -> Tensor:
            flat = v.split([p.numel() for p in parameters])
            tangents = [part.view_as(p) for part, p in zip(flat, parameters, strict=True)]
            total = torch.zeros_like(v)
            for batch in self.data.batches:
                multiply = self.cached or self._linearised(batch)
                total += torch.cat([x.reshape(-1) for x in multiply(k, tangents)]).detach()
            return total / self.terms

        return product

    def _linearised(self, batch: MicroBatch) -> BlockProduct:
        out = self.data.output(batch)
        target = self.data.target(batch, out)
        return self._hessian(self.data.summed(out, target)) if self.kind == "hessian" else self._gauss_newton(out, target)

    def _hessian(self, loss: Tensor) -> BlockProduct:
        parameters = {id(p): p for block in self.blocks for p in block}
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
        of_parameter = dict(zip(parameters, gradients, strict=True))

        def multiply(k: int, v: Sequence[Tensor]) -> Sequence[Tensor]:
            block = self.blocks[k]
            return _filled(_grad([of_parameter[id(p)] for p in block], block, v), block)

        return multiply

    def _gauss_newton(self, out: Tensor, target: Tensor) -> BlockProduct:
        z = out.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.data.summed(z, target), z, create_graph=True)
        jacobians: dict[int, JacobianProducts] = {}

        def multiply(k: int, v: Sequence[Tensor]) -> Sequence[Tensor]:
            if k not in jacobians:
                jacobians.clear()  # one block after the other
                jacobians[k] = JacobianProducts(out, *self.blocks[k])
            (curved,) = torch.autograd.grad(slope, z, jacobians[k].forward(*v), retain_graph=True)
            return jacobians[k].adjoint(curved)

        return multiply


def _grad(
    y: Sequence[Tensor | None], x: Sequence[Tensor], u: Sequence[Tensor], *, create_graph: bool = False
) -> Sequence[Tensor | None]:
    """Return sum_k (dy_k / dx)^T u_k for each x, None where no y depends on it."""
    pairs = [(a, b) for a, b in zip(y, u, strict=True) if a is not None and a.requires_grad]
    if not pairs:
        return (None,) * len(x)
    outputs, adjoints = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, x, adjoints, create_graph=create_graph, retain_graph=True, allow_unused=True)


def _filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(like, gradients, strict=True))


def by_route(
    route: str, size: int, most: int, closed_forms: tuple[str, Callable[[], T]], autograd: Callable[[], T]
) -> tuple[T, str, str]:
    """Return what closed forms give, or autograd; the name of the route taken; and why, where it was not asked for.

    Args:
        route: The name of either route, or ``"auto"``: closed forms where they can be taken.
        size: Number of parameters.
        most: Parameters up to which ``"auto"`` tries closed forms.
        closed_forms: Their name, and the function; it may raise one of the library's errors.
        autograd: The function of the other route, ``"autograd"``.
    """
    name, exact = closed_forms
    why = ""
    if route == "auto" and size > most:
        why = f"{size:,} parameters, more than {most:,}"
    elif route != "autograd":
        try:
            return exact(), name, ""
        except HessiankitError as error:
            if route == name:
                raise
            why = f"{type(error).__name__}: {error}"
    return autograd(), "autograd", why
