"""Which closed form each operation of the tracer gets, with every way to write its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import assert_exact, draw
from operation_cases import applied, module_of
from torch import Tensor

import hessiankit as hk
from derivations.activation import Activation
from derivations.elementwise import Divide, Elementwise
from derivations.embedding import Embedding
from derivations.fused_attention import ScaledDotProductAttention
from derivations.indexing import Concatenate, Select, Slice, Stack, Take, Where
from derivations.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiple, Multiply, Permute, Reshape, Shift
from derivations.normalization import LayerNorm, RMSNorm
from derivations.pooling import Mean, SumOver
from derivations.primitive import Primitive
from derivations.softmax import LogSoftmax, Softmax
from hessiankit.tracing.fallback import AutomaticDifferentiation

BIAS, WEIGHT, LEFT, MASK = draw(4, seed=11), draw(2, 4, seed=12), draw(2, 3, 3), torch.tensor([True, False, False, True])
BOTH, KEEP = draw(2, 3, 4, seed=13), torch.tensor([[True, True, False], [False, True, True], [True, False, True]])

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
    "add a number with alpha": (Shift, lambda y: torch.add(y, 0.2, alpha=3)),
    "sub": (Add, lambda y: BIAS - y),
    "sub with alpha": (Add, lambda y: torch.sub(y, y[0], alpha=2)),
    "sub a number": (Shift, lambda y: y - 2),
    "mul": (Multiply, lambda y: y * y[:, :1]),
    "mul by a constant": (Multiply, lambda y: BIAS * y),
    "mul by a number": (Multiple, lambda y: 3 * y),
    "div by a number": (Multiple, lambda y: y / 3),
    "neg": (Multiple, lambda y: -y),
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
    "fused attention": (ScaledDotProductAttention, lambda y: F.scaled_dot_product_attention(y, y, y, is_causal=True)),
    "fused attention, mask": (ScaledDotProductAttention, lambda y: F.scaled_dot_product_attention(y, y, BOTH, attn_mask=KEEP)),
    "fused attention, learned bias": (
        ScaledDotProductAttention,
        lambda y: F.scaled_dot_product_attention(BOTH, y, y, attn_mask=y @ y.mT, scale=2.0),
    ),
    "masked_fill": (MaskedFill, lambda y: y.masked_fill(MASK, 2.0)),
    "mean": (Mean, lambda y: y.mean(1)),
    "mean over several axes": (Mean, lambda y: y.mean((0, -1), keepdim=True)),
    "mean over everything": (Mean, lambda y: y * y.mean()),
    "sum": (SumOver, lambda y: y.sum(-1, keepdim=True)),
    "sum over several axes": (SumOver, lambda y: y.sum((0, 2))),
    "sum over everything": (SumOver, lambda y: y * y.sum()),
    "relu": (Activation, torch.relu),
    "leaky_relu": (Activation, F.leaky_relu),
    "leaky_relu with a slope": (Activation, lambda y: F.leaky_relu(y, 0.3)),
    "gelu": (Activation, F.gelu),
    "gelu, tanh": (Activation, lambda y: F.gelu(y, approximate="tanh")),
    "silu": (Activation, F.silu),
    "tanh": (Activation, torch.tanh),
    "matrix times vector": (MatMul, lambda y: y @ BIAS),
    "vector times matrix": (MatMul, lambda y: BIAS @ y.mT),
    "matrix times vector, moving": (MatMul, lambda y: torch.mv(y[0], y[1, 2])),
    "vector times vector": (MatMul, lambda y: y * torch.dot(y[0, 1], y[1, 2])),
    "linear to a number": (MatMul, lambda y: F.linear(y, BIAS)),
    "addmm": (MatMul, lambda y: torch.addmm(y[0, :, :2], y[1], WEIGHT.T)),
    "addmm with factors": (Multiple, lambda y: torch.addmm(y[0, 0, :3], y[1], y[0].T, beta=0.5, alpha=-2)),
    "baddbmm": (MatMul, lambda y: torch.baddbmm(y[:, :, :3], LEFT, LEFT + y[:, :, 1:], beta=2)),
    "addbmm": (MatMul, lambda y: torch.addbmm(y[0, :, :3], y, y.mT, beta=2, alpha=3)),
    "addmv": (MatMul, lambda y: torch.addmv(y[0, :, 0], y[1], BIAS, beta=2)),
    "addcmul": (Multiply, lambda y: torch.addcmul(y, y[0], BIAS, value=2)),
    "einsum, a product": (MatMul, lambda y: torch.einsum("bij,bkj->bik", y, y)),
    "einsum, rows times a weight": (MatMul, lambda y: torch.einsum("bij,jk->bik", y, WEIGHT.T)),
    "einsum, rows times a weight, transposed": (Linear, lambda y: torch.einsum("... j, k j -> ... k", y, WEIGHT)),
    "einsum of three": (MatMul, lambda y: torch.einsum("bij,bkj,bkl->bil", y, y, LEFT)),
    "einsum that repeats": (Expand, lambda y: torch.einsum("bij,jk->bik", y[..., :1], WEIGHT.T).exp().expand(2, 3, 2)),
    "einsum with a trace": (Take, lambda y: torch.einsum("bii->b", y @ y.mT)),
    "einsum, implicit output": (MatMul, lambda y: torch.einsum("bij,jk", y, WEIGHT.T)),
    "inner": (MatMul, lambda y: torch.inner(y, WEIGHT)),
    "tensordot": (MatMul, lambda y: torch.tensordot(y, LEFT, ([0, 1], [0, 1]))),
    "outer": (Multiply, lambda y: torch.outer(y[0, 0], y[1, 1])),
    "number minus": (Shift, lambda y: 1 - y),
    "tensor minus, reversed": (Add, lambda y: torch.rsub(y, BIAS, alpha=2)),
    "division": (Divide, lambda y: BIAS / (2 + y * y)),
    "division by a tensor": (Divide, lambda y: y / (3 + BIAS)),
    "division of two": (Divide, lambda y: y / (2 + y[:, :1] ** 2)),
    "division by a count": (Divide, lambda y: y.sum(0) / MASK.sum()),
    **{
        name: (Elementwise, getattr(torch, name))
        for name in ["square", "exp", "exp2", "expm1", "sigmoid", "erf", "sin", "cos", "abs"]
    },
    "number over": (Elementwise, lambda y: 2 / (2 + y)),
    "power": (Elementwise, lambda y: y**3),
    "number to a power": (Elementwise, lambda y: 2.5**y),
    "log": (Elementwise, lambda y: torch.log(2 + y)),
    "log1p": (Elementwise, lambda y: torch.log1p(y / 2)),
    "sqrt": (Elementwise, lambda y: torch.sqrt(2 + y)),
    "rsqrt": (Elementwise, lambda y: torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 0.1)),
    "logsigmoid": (Elementwise, F.logsigmoid),
    "softplus": (Elementwise, F.softplus),
    "softplus with arguments": (Elementwise, lambda y: F.softplus(y, 3, 0.5)),
    "softsign": (Elementwise, F.softsign),
    "clamp": (Elementwise, lambda y: y.clamp(-0.3, 0.4)),
    "clamp from below": (Elementwise, lambda y: y.clamp(min=-0.3)),
    "clamp from above": (Elementwise, lambda y: y.clamp(max=0.3)),
    "clamp_min": (Elementwise, lambda y: y.clamp_min(-0.3)),
    "clamp_max": (Elementwise, lambda y: y.clamp_max(0.3)),
    "hardtanh": (Elementwise, lambda y: F.hardtanh(y, -0.3, 0.3)),
    "relu6": (Elementwise, F.relu6),
    "glu": (Elementwise, F.glu),
    "variance": (Mean, lambda y: y.var(-1)),
    "variance of the population": (Mean, lambda y: y.var(1, unbiased=False, keepdim=True)),
    "variance with a correction": (Mean, lambda y: torch.var(y, (0, 1), correction=2)),
    "deviation": (Elementwise, lambda y: (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 0.1)),
    "norm": (Elementwise, lambda y: y.norm(dim=-1)),
    "logsumexp": (Elementwise, lambda y: y * y.logsumexp(-1, keepdim=True)),
    "logsumexp without the axis": (Elementwise, lambda y: y.logsumexp((0, 2))),
    "constants like it": (Multiply, lambda y: y * (torch.ones_like(y) + torch.zeros_like(y)) + y.new_ones(4) + y.new_zeros(4)),
    "normalize": (Divide, lambda y: F.normalize(y, dim=-1)),
    "log_softmax": (LogSoftmax, lambda y: y.log_softmax(-1)),
    "log_softmax over tokens": (LogSoftmax, lambda y: F.log_softmax(y, 1)),
    "mask that repeats": (Where, lambda y: y[:, :1].masked_fill(MASK.expand(2, 3, 4), 2.0)),
    "masked_fill by a tensor": (Where, lambda y: y.masked_fill(MASK, y[0, 0, 0])),
    "where": (Where, lambda y: torch.where(MASK, y, y.exp())),
    "where, a number": (MaskedFill, lambda y: torch.where(y > 0, y, 0.5)),
    "where, a number first": (MaskedFill, lambda y: torch.where(y > 0, 0.5, y * y)),
    "where, broadcast": (Where, lambda y: torch.where(MASK, y[:, :1], y[:1])),
    "tril": (MaskedFill, lambda y: y.tril(1)),
    "triu": (MaskedFill, lambda y: y.triu()),
    "select": (Select, lambda y: y[:, -1]),
    "slice": (Slice, lambda y: y[:, 1:, :-1]),
    "slice with a step": (Slice, lambda y: y[..., 1::2]),
    "narrow": (Slice, lambda y: y.narrow(1, 1, 2)),
    "split": (Slice, lambda y: torch.mul(*y.split(2, -1))),
    "split into unequal": (Slice, lambda y: y.split([1, 2], 1)[1]),
    "split with a rest": (Slice, lambda y: y.split(2, 1)[1]),
    "chunk": (Slice, lambda y: torch.mul(*y.chunk(2, -1))),
    "tensor_split": (Slice, lambda y: y.tensor_split(2, 1)[0]),
    "unbind": (Select, lambda y: (lambda q, k, v: q * k + v)(*y.unbind(1))),
    "cat": (Concatenate, lambda y: torch.cat([y, y.mT.mT * 2], 1)),
    "cat with an empty vector": (Concatenate, lambda y: torch.cat([y.new_zeros(0), y, 2 * y], 1)),
    "cat with a constant": (Concatenate, lambda y: torch.cat([LEFT, y], -1)),
    "hstack": (Concatenate, lambda y: torch.hstack([y, 2 * y])),
    "stack": (Stack, lambda y: torch.stack([y, 2 * y, y * y], -1)),
    "index": (Take, lambda y: y[:, [0, 2, 2, 1]]),
    "index, two axes apart": (Take, lambda y: y[[1, 0], :, [2, 3]]),
    "index by a mask": (Take, lambda y: y[..., MASK]),
    "index_select": (Take, lambda y: y.index_select(1, torch.tensor([2, 0]))),
    "gather": (Take, lambda y: y.gather(2, torch.tensor([[[1], [3], [3]], [[0], [0], [2]]]))),
    "take_along_dim": (Take, lambda y: torch.take_along_dim(y, torch.tensor([[[1, 0]]]), 2)),
    "flip": (Take, lambda y: y.flip(1, -1)),
    "roll": (Take, lambda y: y.roll((1, -1), (0, 1))),
    "repeat": (Take, lambda y: y.repeat(2, 1, 2)),
    "repeat_interleave": (Expand, lambda y: y.repeat_interleave(2, 1)),
    "diagonal": (Take, lambda y: y.diagonal(1, 1, 2)),
    "embedding": (Embedding, lambda y: F.embedding(torch.tensor([[1, 2], [2, 0]]), y[0])),
    "dropout": (Reshape, lambda y: F.dropout(y, 0.1, training=False)),
    "dropout of nothing": (Reshape, lambda y: F.dropout(y, 0.0)),
    "to the same dtype": (Reshape, lambda y: y.to(torch.float64)),
    "type_as": (Reshape, lambda y: y.type_as(BIAS)),
    "movedim": (Permute, lambda y: y.movedim(0, -1)),
    "swapaxes": (Permute, lambda y: y.swapaxes(0, 1)),
    "T": (Permute, lambda y: y[0].T),
    "expand_as": (Expand, lambda y: y[:1].expand_as(y)),
    "broadcast_to": (Expand, lambda y: y[:1].broadcast_to(4, 2, 3, 4)),
    "view_as": (Reshape, lambda y: y.view_as(BIAS.expand(2, 3, 4))),
    "mse_loss": (Mean, lambda y: y * F.mse_loss(y, y[:, :1].expand(2, 3, 4))),
    "convolution of patches": (Linear, lambda y: F.conv2d(y[:, None, :2], LEFT[:, None, :2, :2], BIAS[:2], stride=2)),
}

DECLINED: dict[str, Callable[[Tensor], Tensor]] = {
    "sinc": torch.sinc,
    "cumprod of a number": lambda y: y * y[0, 0, 0].cumprod(0),
    "logcumsumexp": lambda y: y.logcumsumexp(1),
    "product of many": lambda y: (1 + y).repeat(1, 1, 20).prod(-1),
    "determinant": lambda y: y * torch.linalg.slogdet(torch.eye(4).double() + y[0].T @ y[0])[1],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_form(name):
    kind, operation = OPERATIONS[name]
    module = module_of(operation)
    seen = applied(module)
    assert kind in {type(p) for p in seen[2:-2]}
    assert not any(isinstance(p, AutomaticDifferentiation) for p in seen)
    assert_exact(module, draw(2, 3, 5))


@pytest.mark.parametrize("name", DECLINED)
def test_fallback(name):
    module = module_of(DECLINED[name])
    found = assert_exact(module, draw(2, 3, 5))
    assert found.fallbacks
    assert all(f.startswith("aten.") for f in found.fallbacks)


def test_an_operation_that_torch_cannot_differentiate_twice_is_named():
    module = module_of(lambda y: torch.ops.aten.copy.default(y, 2 * y))
    with pytest.raises(hk.TraceError, match=r"aten\.copy\.default has no closed form here, and torch cannot differentiate it"):
        hk.hessian(module, draw(2, 3, 5), draw(2, 3, 4), handshake=False)
