"""Which closed form each operation of the tracer gets, with every way to write its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw
from torch import Tensor

import hessiankit as hk
from derivations.activation import Activation
from derivations.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiply, Permute, Reshape, Scale, Shift
from derivations.normalization import LayerNorm, RMSNorm
from derivations.pooling import Mean, Sum
from derivations.primitive import Primitive
from derivations.softmax import Softmax
from hessiankit.curvature import loss_trace
from hessiankit.fallback import AutomaticDifferentiation
from hessiankit.task import make_task

BIAS, WEIGHT, LEFT, MASK = draw(4, seed=11), draw(2, 4, seed=12), draw(2, 3, 3), torch.tensor([True, False, False, True])

OPERATIONS: dict[str, tuple[type[Primitive], Callable[[Tensor], Tensor]]] = {
    "matmul": (MatMul, lambda y: y @ y.mT),
    "matmul, left constant": (MatMul, lambda y: LEFT @ y),
    "mm": (MatMul, lambda y: torch.mm(y[0], WEIGHT.T)),
    "bmm": (MatMul, lambda y: torch.bmm(y, y.mT)),
    "linear": (Linear, lambda y: F.linear(y, WEIGHT)),
    "linear with bias": (Linear, lambda y: F.linear(y, WEIGHT, BIAS[:2])),
    "add": (Add, lambda y: y + y.mean(0)),
    "add with alpha": (Add, lambda y: torch.add(y, y[:, :1], alpha=-3)),
    "add to a constant": (Add, lambda y: BIAS + y),
    "add a number": (Shift, lambda y: 2.5 + y),
    "add a number with alpha": (Shift, lambda y: torch.add(y, 2, alpha=3)),
    "sub": (Add, lambda y: BIAS - y),
    "sub with alpha": (Add, lambda y: torch.sub(y, y[0], alpha=2)),
    "sub a number": (Shift, lambda y: y - 2),
    "mul": (Multiply, lambda y: y * y[:, :1]),
    "mul by a constant": (Multiply, lambda y: BIAS * y),
    "mul by a number": (Scale, lambda y: 3 * y),
    "div by a number": (Scale, lambda y: y / 3),
    "neg": (Scale, lambda y: -y),
    "transpose": (Permute, lambda y: y.transpose(-1, 0)),
    "mT": (Permute, lambda y: y.mT),
    "t": (Permute, lambda y: y[0].t()),
    "permute": (Permute, lambda y: y.permute(1, -1, 0)),
    "view": (Reshape, lambda y: y.view(6, -1)),
    "reshape of a transpose": (Reshape, lambda y: y.mT.reshape(-1, 3)),
    "unflatten": (Reshape, lambda y: y.unflatten(-1, (2, -1))),
    "flatten": (Reshape, lambda y: y.flatten(0, 1)),
    "unsqueeze": (Reshape, lambda y: y.unsqueeze(-2)),
    "squeeze": (Reshape, lambda y: y[:1].squeeze()),
    "squeeze an axis": (Reshape, lambda y: y[:, :1].squeeze(1)),
    "clone": (Reshape, lambda y: y.clone()),
    "contiguous": (Reshape, lambda y: y.mT.contiguous()),
    "expand": (Expand, lambda y: y[:, :1].expand(-1, 5, -1)),
    "expand by an axis": (Expand, lambda y: y.expand(2, 2, 3, 4)),
    "layer_norm": (LayerNorm, lambda y: F.layer_norm(y, (4,), BIAS, BIAS, 0.1)),
    "layer_norm over two axes": (LayerNorm, lambda y: F.layer_norm(y, (3, 4))),
    "rms_norm": (RMSNorm, lambda y: F.rms_norm(y, (4,), BIAS, 0.1)),
    "rms_norm without eps": (RMSNorm, lambda y: F.rms_norm(y, (4,))),
    "softmax": (Softmax, lambda y: torch.softmax(y, -1)),
    "softmax over tokens": (Softmax, lambda y: y.softmax(1)),
    "masked_fill": (MaskedFill, lambda y: y.masked_fill(MASK, 2.0)),
    "mean": (Mean, lambda y: y.mean(1)),
    "mean over several axes": (Mean, lambda y: y.mean((0, -1), keepdim=True)),
    "mean over everything": (Mean, lambda y: y * y.mean()),
    "sum": (Sum, lambda y: y.sum(-1, keepdim=True)),
    "sum over several axes": (Sum, lambda y: y.sum((0, 2))),
    "sum over everything": (Sum, lambda y: y * y.sum()),
    "relu": (Activation, torch.relu),
    "leaky_relu": (Activation, F.leaky_relu),
    "leaky_relu with a slope": (Activation, lambda y: F.leaky_relu(y, 0.3)),
    "gelu": (Activation, F.gelu),
    "gelu, tanh": (Activation, lambda y: F.gelu(y, approximate="tanh")),
    "silu": (Activation, F.silu),
    "tanh": (Activation, torch.tanh),
}

DECLINED: dict[str, Callable[[Tensor], Tensor]] = {
    "matrix times vector": lambda y: y @ BIAS,
    "vector times matrix": lambda y: BIAS @ y.mT,
    "linear to a number": lambda y: F.linear(y, BIAS),
    "number minus": lambda y: 1 - y,
    "division": lambda y: BIAS / (2 + y * y),
    "division by a tensor": lambda y: y / BIAS,
    "softmax in another dtype": lambda y: y.softmax(-1, dtype=torch.float32).double(),
    "mask that repeats": lambda y: y[:, :1].masked_fill(MASK.expand(2, 3, 4), 2.0),
    "mean in another dtype": lambda y: y.mean(1, dtype=torch.float32).double(),
    "power": lambda y: y**3,
    "where": lambda y: torch.where(MASK, y, y.exp()),
    "concatenation": lambda y: torch.cat([y, y.mT.mT * 2], 1),
    "einsum": lambda y: torch.einsum("bij,bkj->bik", y, y),
    "cumulative sum": lambda y: y.cumsum(1),
    "maximum": lambda y: y.amax(1),
    "softplus": F.softplus,
    "log_softmax": lambda y: y.log_softmax(-1),
    "fused attention": lambda y: F.scaled_dot_product_attention(y, y, y, is_causal=True),
}


def module_of(operation: Callable[[Tensor], Tensor]) -> Formula:
    """A module with one operation between two that have curvature, and one parameter before it."""
    return Formula(lambda s, x: torch.tanh(operation(torch.tanh(x @ s.W))), W=(5, 4))


def applied(module: Formula) -> list[Primitive]:
    x = draw(2, 3, 5)
    with torch.no_grad():
        traced = loss_trace(make_task("test", module, x, torch.zeros_like(module(x)), "mse"), 1.0)
    return [a.primitive for a in traced.trace.applications]


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_form(name):
    kind, operation = OPERATIONS[name]
    module = module_of(operation)
    seen = applied(module)
    assert kind in {type(p) for p in seen[2:-2]}
    fallbacks = {p.name for p in seen if isinstance(p, AutomaticDifferentiation)}
    assert fallbacks <= {"aten.select.int", "aten.slice.Tensor"}  # the brackets y[0] and y[:1] of the cases themselves
    assert_exact(module, draw(2, 3, 5))


@pytest.mark.parametrize("name", DECLINED)
def test_fallback(name):
    module = module_of(DECLINED[name])
    single = "dtype" in name
    found = assert_exact(module, draw(2, 3, 5), tolerance=1e-5 if single else 1e-12)
    assert found.fallbacks
    assert all(f.startswith("aten.") for f in found.fallbacks)


def test_an_operation_that_torch_cannot_differentiate_twice_is_named():
    module = module_of(lambda y: torch.ops.aten.copy.default(y, 2 * y))
    with pytest.raises(hk.TraceError, match=r"aten\.copy\.default has no closed form here, and torch cannot differentiate it"):
        hk.hessian(module, draw(2, 3, 5), draw(2, 3, 4))
