"""hessian-eigenthings' own tests on hessiankit's products: a pytest plugin that replaces those of its Hessian and GGN operators.

Run from its source::

    PYTHONPATH=HESSIANKIT:. python -m pytest -p benchmarks.peer_suites.eigenthings tests

Finite differences (``method="finite_difference"``) stay the peer's, as do its Fisher matrix of samples and its algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hessian_eigenthings.operators import GGNOperator, HessianOperator
from torch import Tensor, cat, nn

import hessiankit as hk


class OfBatch(nn.Module):
    """``function(model, batch)`` as a module of the parts of the batch."""

    def __init__(self, model: nn.Module, function: Callable[[Any, Any], Any], kind: type) -> None:
        super().__init__()
        self.model, self.function, self.kind = model, function, kind

    def forward(self, *parts: Any, **named: Any) -> Any:
        """Return the function of the batch that has these parts."""
        batch = named or (parts[0] if self.kind not in (tuple, list) else self.kind(parts))
        return self.function(self.model, batch)


def product(op: Any, v: Tensor, batch: Any, function: Callable[[Any, Any], Any], **options: Any) -> Tensor:
    """Return the product with a vector in the order of the peer's parameters."""
    module = OfBatch(op.model, function, type(batch))
    known = {id(p): name for name, p in module.named_parameters()}
    order = [known[id(p)] for p in op._param_list]
    inputs = batch if isinstance(batch, (dict, Tensor)) else tuple(batch)
    A = hk.hessian_operator(module, inputs, params=order, **options)
    parts = dict(zip(order, v.split([p.numel() for p in op._param_list]), strict=True))
    inside = cat([parts[name] for name in A.names]).to(A.torch_dtype)
    found = A @ inside
    return cat([found[A.slices[name]] for name in order]).to(v.dtype)


def hessian(op: Any, v_split: list[Tensor], batch: Any) -> Tensor:
    return product(op, cat([v.reshape(-1) for v in v_split]), batch, op.loss_fn, loss=None)


def gauss_newton(op: Any, v: Tensor, batch: Any) -> Tensor:
    first = next(x for x in (batch.values() if isinstance(batch, dict) else batch) if isinstance(x, Tensor))
    return product(op, v, batch, op.forward_fn, target=first, loss=lambda out, _: op.loss_of_output_fn(out, batch), kind="ggn")


HessianOperator._hvp_autograd = hessian
GGNOperator._matvec_autograd = GGNOperator._matvec_fd_jvp = gauss_newton
