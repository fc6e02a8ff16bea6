"""Which closed form each operation of the tracer gets, with every way to write its arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw, mse, reverse_over_reverse
from operation_cases import applied, check_closed_form, module_of
from operator_cases import error
from torch import Tensor

import hessiankit as hk
from hessiankit.primitives.activation import Activation
from hessiankit.primitives.axis_maps import AxisMaps
from hessiankit.primitives.binary import Binary
from hessiankit.primitives.elementwise import Divide, Elementwise
from hessiankit.primitives.embedding import Embedding
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.indexing import Concatenate, Select, Slice, Stack, Take, Where
from hessiankit.primitives.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiple, Multiply, Permute, Reshape, Shift
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.pooling import Extreme, Mean, SumOver
from hessiankit.primitives.primitive import Primitive
from hessiankit.primitives.scattering import AddAt, TakeAmong
from hessiankit.primitives.softmax import LogSoftmax, Softmax

BIAS, WEIGHT, LEFT, MASK = draw(4, seed=11), draw(2, 4, seed=12), draw(2, 3, 3), torch.tensor([True, False, False, True])
BOTH, KEEP = draw(2, 3, 4, seed=13), torch.tensor([[True, True, False], [False, True, True], [True, False, True]])

OPERATIONS: dict[str, tuple[type[Primitive], Callable[[Tensor], Tensor]]] = {
    "matmul": (MatMul, lambda y: y @ y.mT),
    "bmm": (MatMul, lambda y: torch.bmm(y, y.mT)),
    "linear with bias": (Linear, lambda y: F.linear(y, WEIGHT, BIAS[:2])),
    "add": (Add, lambda y: y + y.mean(0)),
    "add with alpha": (Add, lambda y: torch.add(y, y[:, :1], alpha=-3)),
    "add a number": (Shift, lambda y: 2.5 + y),
    "add a number with alpha": (Shift, lambda y: torch.add(y, 0.2, alpha=3)),
    "sub": (Add, lambda y: BIAS - y),
    "sub with alpha": (Add, lambda y: torch.sub(y, y[0], alpha=2)),
    "sub a number": (Shift, lambda y: y - 2),
    "mul": (Multiply, lambda y: y * y[:, :1]),
    "mul by a number": (Multiple, lambda y: 3 * y),
    "div by a number": (Multiple, lambda y: y / 3),
    "neg": (Multiple, lambda y: -y),
    "mT": (Permute, lambda y: y.mT),
    "t": (Permute, lambda y: y[0].t()),
    "permute": (Permute, lambda y: y.permute(1, -1, 0)),
    "view": (Reshape, lambda y: y.view(6, -1)),
    "reshape of a transpose": (Reshape, lambda y: y.mT.reshape(-1, 3)),
    "unsqueeze": (Reshape, lambda y: y.unsqueeze(-2)),
    "squeeze an axis": (Reshape, lambda y: y[:, :1].squeeze(1)),
    "clone": (Reshape, lambda y: y.clone()),
    "expand": (Expand, lambda y: y[:, :1].expand(-1, 5, -1)),
    "expand by an axis": (Expand, lambda y: y.expand(2, 2, 3, 4)),
    "layer_norm": (LayerNorm, lambda y: F.layer_norm(y, (4,), BIAS, BIAS, 0.1)),
    "rms_norm": (RMSNorm, lambda y: F.rms_norm(y, (4,), BIAS, 0.1)),
    "rms_norm without eps": (RMSNorm, lambda y: F.rms_norm(y, (4,))),
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
    "relu": (Activation, torch.relu),
    "leaky_relu with a slope": (Activation, lambda y: F.leaky_relu(y, 0.3)),
    "gelu": (Activation, F.gelu),
    "gelu, tanh": (Activation, lambda y: F.gelu(y, approximate="tanh")),
    "silu": (Activation, F.silu),
    "tanh": (Activation, torch.tanh),
    "matrix times vector": (MatMul, lambda y: y @ BIAS),
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
    "einsum, rows times a weight, transposed": (Linear, lambda y: torch.einsum("... j, k j -> ... k", y, WEIGHT)),
    "einsum of three": (MatMul, lambda y: torch.einsum("bij,bkj,bkl->bil", y, y, LEFT)),
    "einsum with a trace": (Take, lambda y: torch.einsum("bii->b", y @ y.mT)),
    "einsum, implicit output": (MatMul, lambda y: torch.einsum("bij,jk", y, WEIGHT.T)),
    "inner": (MatMul, lambda y: torch.inner(y, WEIGHT)),
    "tensordot": (MatMul, lambda y: torch.tensordot(y, LEFT, ([0, 1], [0, 1]))),
    "outer": (Multiply, lambda y: torch.outer(y[0, 0], y[1, 1])),
    "number minus": (Shift, lambda y: 1 - y),
    "tensor minus, reversed": (Add, lambda y: torch.rsub(y, BIAS, alpha=2)),
    "division": (Divide, lambda y: BIAS / (2 + y * y)),
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
    "deviation": (Elementwise, lambda y: (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True) + 0.1)),
    "norm": (Elementwise, lambda y: y.norm(dim=-1)),
    "logsumexp": (Elementwise, lambda y: y * y.logsumexp(-1, keepdim=True)),
    "logsumexp without the axis": (Elementwise, lambda y: y.logsumexp((0, 2))),
    "constants like it": (Multiply, lambda y: y * (torch.ones_like(y) + torch.zeros_like(y)) + y.new_ones(4) + y.new_zeros(4)),
    "normalize": (Divide, lambda y: F.normalize(y, dim=-1)),
    "log_softmax over tokens": (LogSoftmax, lambda y: F.log_softmax(y, 1)),
    "mask that repeats": (Where, lambda y: y[:, :1].masked_fill(MASK.expand(2, 3, 4), 2.0)),
    "masked_fill by a tensor": (Where, lambda y: y.masked_fill(MASK, y[0, 0, 0])),
    "where": (Where, lambda y: torch.where(MASK, y, y.exp())),
    "where, a number": (MaskedFill, lambda y: torch.where(y > 0, y, 0.5)),
    "where, a number first": (MaskedFill, lambda y: torch.where(y > 0, 0.5, y * y)),
    "tril": (MaskedFill, lambda y: y.tril(1)),
    "triu": (MaskedFill, lambda y: y.triu()),
    "select": (Select, lambda y: y[:, -1]),
    "slice with a step": (Slice, lambda y: y[..., 1::2]),
    "narrow": (Slice, lambda y: y.narrow(1, 1, 2)),
    "split into unequal": (Slice, lambda y: y.split([1, 2], 1)[1]),
    "split with a rest": (Slice, lambda y: y.split(2, 1)[1]),
    "chunk": (Slice, lambda y: torch.mul(*y.chunk(2, -1))),
    "tensor_split": (Slice, lambda y: y.tensor_split(2, 1)[0]),
    "unbind": (Select, lambda y: (lambda q, k, v: q * k + v)(*y.unbind(1))),
    "cat": (Concatenate, lambda y: torch.cat([y, y.mT.mT * 2], 1)),
    "cat with an empty vector": (Concatenate, lambda y: torch.cat([y.new_zeros(0), y, 2 * y], 1)),
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
    "logcumsumexp, entries far apart": lambda y: (9 * y).logcumsumexp(1),
    "product of many": lambda y: (1 + y).repeat(1, 1, 20).prod(-1),
    "determinant": lambda y: y * torch.linalg.slogdet(torch.eye(4).double() + y[0].T @ y[0])[1],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_closed_form(name):
    kind, operation = OPERATIONS[name]
    check_closed_form(operation, kind)


@pytest.mark.parametrize("name", DECLINED)
def test_fallback(name):
    found = assert_exact(module_of(DECLINED[name]), draw(2, 3, 5))
    assert found.fallbacks
    assert all(f.startswith("aten.") for f in found.fallbacks)


def test_an_operation_that_torch_cannot_differentiate_twice_is_named():
    module = module_of(lambda y: torch.ops.aten.copy.default(y, 2 * y))
    with pytest.raises(hk.TraceError, match=r"aten\.copy\.default has no closed form here, and torch cannot differentiate it"):
        hk.hessian(module, draw(2, 3, 5), draw(2, 3, 4), handshake=False)


SLOPES = draw(4, seed=11)

FUNCTIONS = {
    **{name: getattr(torch, name) for name in ["erfc", "sinh", "cosh", "tan", "asin", "acos", "atan", "asinh", "nan_to_num"]},
    "mish": F.mish,
    "elu with a slope": lambda y: F.elu(y, 0.7),
    "selu": F.selu,
    "celu": lambda y: F.celu(y, 0.5),
    "hardswish": lambda y: F.hardswish(4 * y),
    "hardshrink": lambda y: F.hardshrink(y, 0.3),
    "softshrink": lambda y: F.softshrink(y, 0.3),
    "threshold": lambda y: F.threshold(y, 0.1, 0.3),
    "logit within": lambda y: torch.logit(y.sigmoid(), 0.3),
    "erfinv": lambda y: torch.erfinv(0.9 * y),
    "acosh": lambda y: torch.acosh(y + 3),
    "atanh": lambda y: torch.atanh(0.9 * y),
    "log10": lambda y: torch.log10(y + 2),
    "frac": lambda y: torch.frac(3 * y),
    "remainder": lambda y: torch.remainder(y, 0.3),
    "fmod": lambda y: torch.fmod(y, 0.3),
    "clip": lambda y: y.clip(-0.3, 0.4),
    "entr": lambda y: torch.special.entr(y + 2),
}

BINARIES = {
    "minimum": lambda y: torch.minimum(y, y[:, :1] + 0.1),
    "max of two": lambda y: torch.max(y, BOTH),
    "fmax": lambda y: torch.fmax(y, BOTH),
    "clamp": lambda y: y.clamp(-BOTH.abs(), BOTH.abs()),
    "clamp_max": lambda y: torch.clamp_max(y, y[:1] * BOTH),
    "power, both moving": lambda y: (y + 2) ** y,
    "atan2": lambda y: torch.atan2(y, BOTH),
    "logaddexp": lambda y: torch.logaddexp(y, y[0] * BOTH),
    "xlogy of numbers": lambda y: torch.xlogy(2.0, y + 2) + torch.special.xlogy(y, 3.0),
    "xlog1py": lambda y: torch.special.xlog1py(y, y[:1] * 0.2) + torch.special.xlog1py(2.0, 0.3 * y),
    "copysign": lambda y: torch.copysign(y, BOTH),
    "remainder": lambda y: torch.remainder(y, BOTH.abs()),
    "fmod": lambda y: torch.fmod(y, BOTH),
}

WRITTEN_OUT = {
    "tanhshrink": F.tanhshrink,
    "prelu, moving": lambda y: F.prelu(y.mT, y[0, 0]),
    "prelu, one slope": lambda y: F.prelu(y, SLOPES[:1]),
    "addcdiv": lambda y: torch.addcdiv(y, BOTH, 2 + y, value=2),
    "lerp by a tensor": lambda y: torch.lerp(y, BOTH, y.sin()),
    "hypot": lambda y: torch.hypot(y, BOTH),
    "xlogy at zero": lambda y: torch.xlogy(y * (BOTH > 0), (y + 2) * (BOTH > 0)),
    "ldexp": lambda y: torch.ldexp(y, torch.tensor([1, 2, 0, 1])),
    "degrees": lambda y: torch.rad2deg(torch.deg2rad(y) * y),
    "where": lambda y: torch.where(y > BOTH, y, BOTH * y),
}

STEPS = {
    **{name: getattr(torch, name) for name in ["sign", "floor", "ceil", "round", "trunc"]},
    "round to digits": lambda y: torch.round(y, decimals=1),
    "division with rounding": lambda y: y.div(BOTH, rounding_mode="floor"),
    "one_hot": lambda y: F.one_hot(y.argmax(-1), 4),
    "bucketize": lambda y: SLOPES[torch.bucketize(y, torch.linspace(-1, 1, 3))],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    check_closed_form(FUNCTIONS[name], Elementwise)


@pytest.mark.parametrize("name", BINARIES)
def test_binary(name):
    check_closed_form(BINARIES[name], Binary)


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_written_out(name):
    check_closed_form(WRITTEN_OUT[name], handshake=name != "xlogy at zero")  # where torch's own gradient is NaN


@pytest.mark.parametrize("name", STEPS)
def test_step(name):
    check_closed_form(lambda y: y * STEPS[name](3 * y) + y)
    assert len(applied(module_of(lambda y: y + STEPS[name](3 * y)))) <= 6  # the step itself is no application


ONCE = {
    "floor_divide": (lambda y: y * torch.floor_divide(y, 0.3), lambda y: y * torch.floor(y / 0.3)),
    "hardsigmoid": (lambda y: F.hardsigmoid(4 * y), lambda y: (4 * y / 6 + 0.5).clamp(0, 1)),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_autograd_differentiates_once_or_never(name):
    operation, same = (module_of(f) for f in ONCE[name])
    x, target = draw(2, 3, 5), torch.zeros(2, 3, 4).double()
    found = hk.hessian(operation, x, target, handshake=name != "floor_divide")
    assert error(found.matrix, reverse_over_reverse(same, x, target, mse)) <= 1e-12
    assert found.fallbacks == ()


def test_rrelu_in_evaluation():
    module = Formula(lambda s, x: torch.tanh(F.rrelu(x @ s.W)), W=(5, 4))
    assert Activation in {type(p) for p in applied(module)}
    assert assert_exact(module, draw(3, 5), draw(3, 4)).fallbacks == ()


@pytest.mark.first_order
@pytest.mark.parametrize("f", [F.elu, F.selu, lambda z: F.celu(z, 0.5), lambda z: F.elu(z, 0.7)])
def test_the_second_derivative_at_the_kink_is_that_of_torch(f) -> None:
    """Of an entry that is zero and moves, as behind a hard choice."""
    chosen = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    module, x = Formula(lambda s, x: f(x @ s.W * chosen), W=(3, 4)), draw(5, 3)
    assert_exact(module, x, draw(5, 4, seed=2))
    assert_exact(Formula(lambda s, x: f(x @ s.W * (s.W.sum() - s.W.sum().detach())), W=(3, 4)), x, draw(5, 4, seed=2))


PLACES = torch.tensor([[[1, 0, 2, 1]], [[0, 0, 1, 2]]])
TWICE = torch.tensor([[[1, 0, 2, 1], [1, 1, 1, 1]], [[0, 0, 1, 2], [2, 1, 0, 0]]])
PAIRS = (torch.tensor([0, 1]), torch.tensor([2, 0]))
ROWS = torch.tensor([1, 0, 1])

CHOOSING = {
    "max along, kept": (Take, lambda y: y.max(dim=-1, keepdim=True).values),
    "min along": (Take, lambda y: y.min(-1)[0]),
    "median along": (Take, lambda y: y.median(1)[0]),
    "kthvalue": (Take, lambda y: y.kthvalue(2, 1)[0]),
    "cummax": (Take, lambda y: y.cummax(1)[0]),
    "topk along": (Take, lambda y: y.topk(2, dim=1, largest=False)[0]),
    "weights of a router": (Take, lambda y: (lambda v: v / v.sum(-1, keepdim=True))(y.softmax(-1).topk(2, -1)[0])),
    "sort, descending": (Take, lambda y: y.sort(dim=1, descending=True)[0]),
    "gather by argmax": (Take, lambda y: y.gather(-1, y.argmax(-1, keepdim=True))),
    "max of all": (Extreme, torch.max),
    "min of all": (Extreme, torch.min),
    "median of all": (Extreme, torch.median),
    "amax over several": (Extreme, lambda y: y.amax((0, 2), keepdim=True)),
    "amax with ties": (Extreme, lambda y: torch.cat([y[:, :1], y[:, :1]], 1).amax(1)),
    "amin": (Extreme, lambda y: y.amin(-1)),
    "scatter": (TakeAmong, lambda y: (BOTH * y).scatter(1, PLACES, y[:, :1])),
    "scatter a number": (TakeAmong, lambda y: y.scatter(1, PLACES, 0.5)),
    "index_copy": (TakeAmong, lambda y: y.index_copy(1, torch.tensor([2, 0]), BOTH[:, :2] * y[:, 1:])),
    "index_fill": (TakeAmong, lambda y: y.index_fill(1, torch.tensor([1]), 0.3)),
    "index_put, one value for all": (TakeAmong, lambda y: y.index_put((y > 0,), y[0, 0, 0].exp())),
    "index_put, adding": (AddAt, lambda y: y.index_put(PAIRS, y[0, :2].sin(), accumulate=True)),
    "masked_scatter": (TakeAmong, lambda y: y.masked_scatter(MASK, y.sin())),
    "slice_scatter": (TakeAmong, lambda y: torch.slice_scatter(y, BOTH[:, :1] * y[:, 1:2], 1, 0, 1)),
    "select_scatter": (TakeAmong, lambda y: torch.select_scatter(y, y[:, 0].sin(), 1, 2)),
    "diagonal_scatter": (TakeAmong, lambda y: torch.diagonal_scatter(y, y[:, 0, :3].sin(), 0, 1, 2)),
    "scatter_add": (AddAt, lambda y: (BOTH * y).scatter_add(1, TWICE, y[:, :2])),
    "scatter_reduce": (AddAt, lambda y: y.scatter_reduce(1, PLACES, y[:, :1].sin(), "sum")),
    "index_add": (AddAt, lambda y: y.new_zeros(2, 5, 4).index_add(1, ROWS, y)),
    "index_add with a factor": (AddAt, lambda y: y.index_add(-1, torch.tensor([1, 0]), y[:, :, :2], alpha=2)),
    "index_add in place": (AddAt, lambda y: torch.zeros(2, 5, 4).double().index_add_(1, ROWS, y)),
    "masked_select": (Take, lambda y: y.masked_select(MASK)),
    "index by its own mask": (Take, lambda y: y[y > 0]),
    "index by where": (Take, lambda y: y[torch.where(y > 0)]),
    "pad and cut": (TakeAmong, lambda y: F.pad(y, (1, -1), value=0.7)),
    "pad, by default with zeros": (TakeAmong, lambda y: torch.constant_pad_nd(y, (1, 2))),
    "pad, reflect": (Take, lambda y: F.pad(y[None], (1, 2, 1, 1), mode="reflect")),
    "pad, replicate": (Take, lambda y: F.pad(y, (1, 2), mode="replicate")),
    "pad, circular": (Take, lambda y: F.pad(y, (1, 2), mode="circular")),
    "diag": (TakeAmong, lambda y: torch.diag(y[0, 0])),
    "diag_embed": (TakeAmong, lambda y: torch.diag_embed(y, 1)),
    "unfold": (TakeAmong, lambda y: F.unfold(y[:, None], (2, 2), padding=1)),
    "fold, padded": (AddAt, lambda y: F.fold(y.reshape(1, 4, 6), (3, 2), (2, 2), padding=(0, 1))),
    "max_pool1d": (Take, lambda y: F.max_pool1d(y, 2)),
    "max_pool2d": (Take, lambda y: F.max_pool2d(y[:, None], 2, 1, 1)),
    "adaptive_max_pool2d": (Take, lambda y: F.adaptive_max_pool2d(y[:, None], (2, 2))),
    "pixel_shuffle": (Take, lambda y: F.pixel_shuffle(y.reshape(2, 4, 3, 1), 2)),
    "pixel_unshuffle": (Take, lambda y: F.pixel_unshuffle(y.reshape(1, 3, 2, 4), 2)),
    "channel_shuffle": (Take, lambda y: F.channel_shuffle(y.reshape(2, 4, 3, 1), 2)),
    "rot90": (Take, lambda y: torch.rot90(y, 1, (1, 2))),
    "trace": (Take, lambda y: torch.trace(y[0])),
    "cumsum from the end": (AxisMaps, lambda y: torch.cumsum(y, -1)),
    "avg_pool1d, padded": (AxisMaps, lambda y: F.avg_pool1d(y, 3, 1, 1, count_include_pad=False)),
    "avg_pool2d, padded": (AxisMaps, lambda y: F.avg_pool2d(y[:, None], (2, 3), (1, 2), 1, True, False)),
    "avg_pool2d, padding counts": (AxisMaps, lambda y: F.avg_pool2d(y[:, None], (2, 3), 2, 1, True, True)),
    "avg_pool3d": (AxisMaps, lambda y: F.avg_pool3d(y[None], (1, 2, 3))),
    "adaptive_avg_pool1d": (AxisMaps, lambda y: F.adaptive_avg_pool1d(y, 3)),
    "adaptive_avg_pool2d": (AxisMaps, lambda y: F.adaptive_avg_pool2d(y[:, None], (2, 3))),
    "adaptive_avg_pool2d to one": (AxisMaps, lambda y: F.adaptive_avg_pool2d(y[:, None], 1)),
    "local_response_norm": (AxisMaps, lambda y: F.local_response_norm(y, 2)),
    "nearest": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 6))),
    "nearest, exact": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 3), mode="nearest-exact")),
    "linear, aligned": (AxisMaps, lambda y: F.interpolate(y, size=7, mode="linear", align_corners=True)),
    "bilinear": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 3), mode="bilinear")),
    "bicubic, aligned": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(5, 6), mode="bicubic", align_corners=True)),
    "bicubic, antialiased": (AxisMaps, lambda y: F.interpolate(y[:, None], size=(2, 5), mode="bicubic", antialias=True)),
    "trilinear": (AxisMaps, lambda y: F.interpolate(y[None, None], size=(3, 2, 5), mode="trilinear")),
    "cumsum of a number": (None, lambda y: y * y[0, 0, 0].cumsum(0)),
}


@pytest.mark.parametrize("name", CHOOSING)
def test_choosing(name):
    kind, operation = CHOOSING[name]
    check_closed_form(operation, kind)


AXES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "aminmax": lambda y, dim: sum(torch.aminmax(y, dim=dim)),
    "cosine_similarity": lambda y, dim: F.cosine_similarity(y, y * y, dim),
    "gather": lambda y, dim: y.gather(dim, torch.tensor(0)),
    "index_fill": lambda y, dim: y.index_fill(dim, torch.tensor(0), 2.0),
    "kthvalue": lambda y, dim: y.kthvalue(1, dim).values,
    "norm": lambda y, dim: torch.norm(y, 3, dim),
    "normalize": lambda y, dim: F.normalize(y, dim=dim),
    "scatter_add": lambda y, dim: y.scatter_add(dim, torch.tensor(0), y * y),
    "topk": lambda y, dim: y.topk(1, dim).values,
    "transpose": lambda y, dim: y.transpose(dim, dim),
    "var": lambda y, dim: y.var(dim, correction=0),
}
"""Operations along an axis, of a tensor without axes: torch takes it for one entry."""


def first(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    return results if isinstance(results, Tensor) else results[0]


NAMED = (
    Tensor.amax, Tensor.amin, Tensor.cummax, Tensor.cumprod, Tensor.cumsum, Tensor.flip, Tensor.log_softmax, Tensor.logcumsumexp,
    Tensor.logsumexp, Tensor.max, Tensor.mean, Tensor.median, Tensor.min, Tensor.prod, Tensor.softmax, Tensor.sort,
    Tensor.squeeze, Tensor.sum, Tensor.unsqueeze,
)  # fmt: skip
AXES |= {f.__name__: lambda y, dim, f=f: first(f(y, dim)) for f in NAMED}
WHOLE = (Tensor.max, Tensor.mean, Tensor.median, Tensor.prod, Tensor.sum)
AXES |= {f"{f.__name__}, all axes": lambda y, _, f=f: f(y) for f in WHOLE}


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", AXES)
def test_a_tensor_without_axes(name: str, dim: int) -> None:
    module = Formula(lambda s, x: s.W**3 + s.W * (AXES[name](torch.sin(s.W), dim) * x).sum(), W=())
    expected = reverse_over_reverse(module, draw(1), None, None)
    assert (hk.hessian(module, draw(1), loss=None).matrix - expected).abs() <= 1e-12 * expected.abs()
