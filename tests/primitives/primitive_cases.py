"""Every primitive at generic inputs beside a function written with torch's own operations: one table for the suite of actions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_reference import ACTIVATIONS, cross_entropy, layer_norm, rms_norm

from hessiankit.primitives.activation import Activation
from hessiankit.primitives.axis_maps import AxisMaps
from hessiankit.primitives.binary import Binary
from hessiankit.primitives.cast import Cast
from hessiankit.primitives.elementwise import Divide, Elementwise
from hessiankit.primitives.embedding import Embedding
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.indexing import Concatenate, Select, Slice, Stack, Take, Where
from hessiankit.primitives.linear import Add, Expand, Linear, MaskedFill, MatMul, Multiple, Multiply, Permute, Reshape, Shift
from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.pooling import Extreme, Mean, SumOver
from hessiankit.primitives.primitive import Primitive
from hessiankit.primitives.scattering import AddAt, TakeAmong
from hessiankit.primitives.softmax import LogSoftmax, Softmax


class Case(NamedTuple):
    """A primitive, a reference for it, its inputs (None or of integers where they have no tangent) and those that may move."""

    primitive: Primitive
    f: Callable[..., Tensor]
    inputs: Sequence[Tensor | None]
    movable: Sequence[int]

    @property
    def subsets(self) -> list[tuple[int, ...]]:
        """All movable inputs together, each alone, and all but the first."""
        every = tuple(self.movable)
        return sorted({every, *((k,) for k in every), every[1:] or every})


def draw(*shapes: tuple[int, ...], seed: int = 50) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


CASES: dict[str, Case] = {}


def case(
    name: str, primitive: Primitive, f: Callable[..., Tensor], *inputs: Tensor | None, movable: Sequence[int] | None = None
) -> None:
    some = [k for k, x in enumerate(inputs) if x is not None and x.is_floating_point()] if movable is None else movable
    assert name not in CASES
    CASES[name] = Case(primitive, f, inputs, some)


X, Y, POSITIVE = (*draw((2, 3, 4), (2, 5, 4)), draw((2, 3, 4))[0].abs() + 0.3)
MASK = torch.arange(12).reshape(3, 4) % 3 == 1

# Products and sums ---------------------------------------------------------------------------------------------------

for a, b in (
    ((3, 4), (4, 2)),
    ((2, 3, 4), (4, 5)),  # a weight
    ((2, 5, 3, 4), (4, 2)),
    ((3, 4), (2, 4, 5)),  # a weight from the left
    ((2, 3, 4), (2, 4, 5)),
    ((5, 2, 3, 4), (5, 2, 4, 2)),
    ((2, 1, 3, 4), (5, 4, 2)),  # both repeated
    ((1, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (1, 4, 5)),
    ((2, 5, 3, 4), (2, 1, 4, 2)),
    ((1, 1), (1, 1)),
    ((257, 3), (3, 7)),  # enough rows for other layouts
    ((257, 7), (7, 3)),
    ((2, 128, 65), (65, 64)),
):
    case(f"matmul {a} {b}", MatMul(), lambda A, B: torch.einsum("...ij,...jk->...ik", A, B), *draw(a, b))
by_columns = [x.mT.contiguous().mT for x in draw((2, 5, 4), (2, 4, 6))]
case("matmul by columns", MatMul(), lambda A, B: torch.einsum("...ij,...jk->...ik", A, B), *by_columns)
for rows, width, out in ((3,), 4, 2), ((2, 3), 4, 2), ((2, 3, 5), 4, 2), ((), 4, 2), ((257,), 7, 3), ((257,), 3, 7):
    X_, W, bias = draw((*rows, width), (out, width), (out,))
    case(f"linear {rows} {width}", Linear(), lambda x, w, c: torch.einsum("...i,oi->...o", x, w) + c, X_, W, bias)
    case(f"linear {rows} {width} without bias", Linear(), lambda x, w: torch.einsum("...i,oi->...o", x, w), X_, W)
for a, b in (
    ((3, 4), (3, 4)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 3, 4)),
    ((2, 1, 4), (3, 1)),
    ((3, 4), ()),
    ((), (2,)),
    ((1, 4), (3, 4)),
):
    x, y = draw(a, b)
    case(f"add {a} {b}", Add(-1.7), lambda x, y: x - 1.7 * y, x, y)
    case(f"multiply {a} {b}", Multiply(), lambda x, y: x * y, x, y)
    case(f"divide {a} {b}", Divide(), lambda x, y: x * y**-1, x, y.abs() + 0.5)
case("add", Add(), lambda x, y: x + y, X, X.flip(0))
for shape in ((), (4,), (2, 3, 4)):
    case(f"multiple {shape}", Multiple(-2.5), lambda x: x / -0.4, *draw(shape))
    case(f"shift {shape}", Shift(3.0), lambda x: x + 3, *draw(shape))

# Functions of entries ------------------------------------------------------------------------------------------------


def by_cases(condition, yes, no):
    return lambda x: torch.where(condition(x), yes(x), no(x))


INSIDE, ABOVE = 0.95 * torch.tanh(X), X.abs() + 1.2
ELEMENTWISE = {  # kind: reference, where, constants
    **{name: (getattr(torch, name), INSIDE, ()) for name in ["tan", "asin", "acos", "atanh", "erfinv"]},
    **{name: (getattr(torch, name), POSITIVE, ()) for name in ["log", "log1p", "sqrt", "rsqrt", "log2", "log10"]},
    **{
        name: (getattr(torch, name), X, ())
        for name in ["exp", "expm1", "reciprocal", "sigmoid", "erf", "sin", "cos", "abs", "atan", "asinh"]
    },
    "exponential": (lambda x: 2.5**x, X, (2.5,)),
    "log_sigmoid": (lambda x: -torch.log1p(torch.exp(-x)), X, ()),
    "softplus": (F.softplus, X, ()),
    "softplus, two constants": (lambda x: F.softplus(x, 2, 1.5), X, (2.0, 1.5)),
    "clamp": (lambda x: x.clamp(-0.4, 0.7), X, (-0.4, 0.7)),
    "clamp, from below": (lambda x: x.clamp(min=-0.4), X, (-0.4,)),
    **{f"power, {p}": (lambda x, p=p: x**p, X, (p,)) for p in (1, 2, 3, -2)},
    **{f"power, {p}": (lambda x, p=p: x**p, POSITIVE, (p,)) for p in (0.5, -1.5)},
    "logit": (lambda x: torch.log(x / (1 - x)), torch.sigmoid(X), ()),
    "sinh": (lambda x: (torch.exp(x) - torch.exp(-x)) / 2, X, ()),
    "cosh": (lambda x: (torch.exp(x) + torch.exp(-x)) / 2, X, ()),
    "acosh": (torch.acosh, ABOVE, ()),
    "erfc": (lambda x: 1 - torch.erf(x), X, ()),
    "special_entr": (lambda x: -x * torch.log(x), POSITIVE, ()),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), X, ()),
    "elu": (by_cases(lambda x: x > 0, lambda x: x, lambda x: torch.exp(x.clamp(max=0)) - 1), X, ()),
    "elu, three constants": (
        by_cases(lambda x: x > 0, lambda x: 1.3 * x, lambda x: 0.91 * (torch.exp(2 * x.clamp(max=0)) - 1)),
        X,
        (0.7, 1.3, 2.0),
    ),
    "hardsigmoid": (lambda x: (x / 6 + 0.5).clamp(0, 1), 4 * X, ()),
    "hardswish": (lambda x: x * (x / 6 + 0.5).clamp(0, 1), 4 * X, ()),
    "hardshrink": (by_cases(lambda x: x.abs() > 0.8, lambda x: x, torch.zeros_like), X, (0.8,)),
    "softshrink": (lambda x: torch.sign(x) * (x.abs() - 0.8).relu(), X, (0.8,)),
    "threshold": (by_cases(lambda x: x > 0.4, lambda x: x, lambda x: torch.full_like(x, 3.0)), X, (0.4, 3.0)),
    "frac": (lambda x: x - x.detach().trunc(), 2 * X, ()),
    "remainder": (lambda x: x - 0.7 * (x / 0.7).detach().floor(), X, (0.7,)),
    "fmod": (lambda x: x - 0.7 * (x / 0.7).detach().trunc(), X, (0.7,)),
    "finite": (lambda x: x * 1, X, ()),
    "logit_within": (lambda x: (lambda p: torch.log(p / (1 - p)))(x.clamp(0.3, 0.7)), torch.sigmoid(X), (0.3,)),
}
BINARY = {
    "power": lambda a, b: torch.exp(b * torch.log(a)),
    "atan2": torch.atan2,
    "logaddexp": lambda a, b: torch.log(torch.exp(a) + torch.exp(b)),
    "xlogy": lambda a, b: a * torch.log(b),
    "xlog1py": lambda a, b: a * torch.log(1 + b),
    "maximum": lambda a, b: torch.where(a > b, a, b),
    "minimum": lambda a, b: torch.where(a < b, a, b),
    "at_least": lambda a, b: torch.where(a > b, a, b),
    "at_most": lambda a, b: torch.where(a < b, a, b),
    "remainder": lambda a, b: a - b * (a / b).detach().floor(),
    "fmod": lambda a, b: a - b * (a / b).detach().trunc(),
    "copysign": lambda a, b: a.abs() * torch.sign(b).detach() + 0 * b,
}
for kind, f in ACTIVATIONS.items():
    case(f"activation {kind}", Activation(kind), f, X)
for name, (f, x, constants) in ELEMENTWISE.items():
    case(f"elementwise {name}", Elementwise(name.partition(",")[0], constants), f, x)
for kind, f in BINARY.items():
    for a, b in (((4,), (2, 3, 1)), ((2, 3), ())):
        x, y = draw(a, b, seed=65)
        x, y = (x.abs() + 0.2 if kind == "power" else x), (y.abs() + 0.2 if kind.startswith("xlog") else y)
        case(f"binary {kind} {a} {b}", Binary(kind), f, x, y)
case("cast", Cast(torch.float64), lambda x: x * 1, X)

# Entries moved -------------------------------------------------------------------------------------------------------

for mask in (MASK, MASK[0], MASK[:, :1]):
    case(f"masked fill {tuple(mask.shape)}", MaskedFill(mask, 7.0), lambda x, mask=mask: torch.where(mask, 7.0, x), X)
for shape in ((24,), (2, 12), (2, 3, 2, 2), (1, 2, 3, 4), (4, 3, 2)):
    case(f"reshape {shape}", Reshape(shape), lambda x, s=shape: x.contiguous().view(s), X)
    case(f"reshape {shape} by columns", Reshape(shape), lambda x, s=shape: x.contiguous().view(s), X.mT.contiguous().mT)
for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)):
    letters = "".join("abc"[i] for i in order)
    case(f"permute {letters}", Permute(order), lambda x, s=letters: torch.einsum(f"abc->{s}", x), X)
for before, after in ((3, 1), (3, 4)), ((4,), (2, 3, 4)), ((1, 4), (3, 4)), ((), (2, 3)), ((3,), (3, 3)):
    case(f"expand {before} {after}", Expand(after), lambda x, s=after: x + torch.zeros(s, dtype=x.dtype), *draw(before))
AT, ROWS, POSITIONS = (
    torch.tensor([[3, 3, 0], [23, 7, 3]]),
    torch.tensor([[True], [False], [True]]),
    torch.arange(24).reshape(2, 3, 4),
)
case("select", Select(1, 2), lambda x: x[:, 2], X)
case("select from the end", Select(-1, -3), lambda x: x[..., 1], X)
case("slice", Slice(1, 1), lambda x: x[:, 1:], X)
case("slice from the end", Slice(-1, -3, -1), lambda x: x[..., -3:-1], X)
case("slice with a step", Slice(2, None, None, 3), lambda x: x[..., ::3], X)
case("slice too far", Slice(1, 1, 2**62), lambda x: x[:, 1:], X)
case("slice of nothing", Slice(0), lambda x: x * 1, X)
case("concatenate", Concatenate(1), lambda x, y: torch.cat([x, y], 1), X, Y)
case("concatenate from the end", Concatenate(-2), lambda x, y, z: torch.cat([x, y, z], 1), X, Y, X.flip(0))
case("stack", Stack(-1), lambda x, z: torch.stack([x, z], 3), X, X.flip(0))
case("stack in front", Stack(0), lambda x, z: torch.stack([x, z]), X, X.flip(0))
case("take", Take(AT), lambda x: x.flatten()[AT], X)
for name, move in {
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "mT": lambda x: x.mT,
}.items():
    case(f"take of {name}", Take(move(POSITIONS)), move, X)
case("where", Where(ROWS), lambda x, z: torch.where(ROWS, x, z), X, X.flip(0))
case("where, broadcast", Where(ROWS), lambda x, z: torch.where(ROWS, x, z), X[:, :1, :1], X[1, 0])
TWO, INDEX, TWICE = Y[:, :2], torch.tensor([2, 0]), torch.tensor([1, 1])
COPIED, AMONG = POSITIONS.index_copy(1, INDEX, 24 + torch.arange(16).reshape(2, 2, 4)), torch.tensor([[0, 0, 30], [24, 39, 30]])
PADDED = F.pad(torch.arange(1, 25).reshape(2, 3, 4), (1, 2, 0, 1))
case("index_copy", TakeAmong(COPIED), lambda x, y: x.index_copy(1, INDEX, y), X, TWO)
case("entries of two", TakeAmong(AMONG), lambda x, y: torch.cat([x.flatten(), y.flatten()])[AMONG], X, TWO)
case(
    "entries with a constant",
    TakeAmong(PADDED),
    lambda z, x: F.pad(x, (1, 2, 0, 1)) + z * (PADDED == 0),
    torch.zeros((), dtype=torch.float64),
    X,
    movable=[1],
)
case("index_add", AddAt(POSITIONS.index_select(1, INDEX)), lambda x, y: x.index_add(1, INDEX, y), X, TWO)
case(
    "index_add, repeated", AddAt(POSITIONS.index_select(1, TWICE), -2.0), lambda x, y: x.index_add(1, TWICE, y, alpha=-2), X, TWO
)
TABLE, TOKENS = draw((5, 3), seed=63)[0], torch.tensor([[4, 1, 1], [0, 4, 2]])
LIVE = torch.ones(5, 1, dtype=torch.float64).index_fill(0, torch.tensor([4]), 0)
case("embedding", Embedding(TOKENS), lambda w: w[TOKENS], TABLE)
case("embedding of one token", Embedding(TOKENS[0, 0]), lambda w: w[4], TABLE)
case("embedding, frozen row", Embedding(TOKENS, 4), lambda w: (LIVE * w + (1 - LIVE) * TABLE)[TOKENS], TABLE)

# Reductions ----------------------------------------------------------------------------------------------------------

for dims, keepdim in itertools.product(((0,), (-1,), (0, 2), (-2, -1), (0, 1, 2), ()), (False, True)):
    axes = dims or (0, 1, 2)
    case(f"mean {dims} {keepdim}", Mean(dims, keepdim), lambda x, d=axes, k=keepdim: torch.mean(x, dim=d, keepdim=k), X)
    case(f"sum {dims} {keepdim}", SumOver(dims, keepdim), lambda x, d=axes, k=keepdim: torch.sum(x, dim=d, keepdim=k), X)
case("mean of a number", Mean(()), lambda x: x * 1, torch.tensor(3.0, dtype=torch.float64))
case("largest", Extreme("amax", (1,)), lambda x: x.max(1).values, X)
case("smallest, kept", Extreme("amin", (-1,), keepdim=True), lambda x: x.min(-1, keepdim=True).values, X)
case("largest over two axes", Extreme("amax", (0, -1)), lambda x: x.transpose(0, 1).flatten(1).max(1).values, X)
case("largest of all", Extreme("amax"), torch.max, X)
case("smallest of all", Extreme("amin"), torch.min, X)
case("median of all", Extreme("median"), lambda x: x.flatten().sort().values[11], X)
case(
    "median over two axes",
    Extreme("median", (0, 2), keepdim=True),
    lambda x: x.mT.flatten(0, 1).sort(0).values[3][None, :, None],
    X,
)
M, K = draw((5, 3), (2, 4), seed=67)
case("matrix along the last axis", AxisMaps((-1,), (K,)), lambda x: torch.einsum("bij,qj->biq", x, K), X)
case("matrix along an axis", AxisMaps((1,), (M,)), lambda x: torch.einsum("bij,pi->bpj", x, M), X)
case("matrices along two", AxisMaps((1, 2), (M, K)), lambda x: torch.einsum("bij,pi,qj->bpq", x, M, K), X)
case("matrices from the end", AxisMaps((-1, -2), (K, M)), lambda x: torch.einsum("bij,qj,pi->bpq", x, K, M), X)

# Softmax, norms, losses ----------------------------------------------------------------------------------------------

for shape, dim in (((4,), -1), ((3, 4), -1), ((3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -3)):
    (T,) = draw(shape, seed=35)
    case(f"softmax {shape} {dim}", Softmax(dim), lambda x, d=dim: x.exp() / x.exp().sum(d, keepdim=True), T)
    case(f"log softmax {shape} {dim}", LogSoftmax(dim), lambda x, d=dim: x - x.exp().sum(d, keepdim=True).log(), T)


for shape, dims in (((3, 4), 1), ((3, 2), 1), ((3, 1), 1), ((4,), 1), ((2, 3, 5), 1), ((2, 3, 4), 2), ((2, 1, 3, 2, 2), 3)):
    x, gamma, beta = draw(shape, shape[-dims:], shape[-dims:], seed=20)
    case(f"layer norm {shape} {dims}", LayerNorm(dims, 0.1), layer_norm(0.1, dims), x, gamma, beta)
    case(f"rms norm {shape} {dims}", RMSNorm(dims, 0.1), rms_norm(0.1, dims), x, gamma)
x, gamma, beta = draw((3, 4), (4,), (4,), seed=20)
for eps in (0.0, 0.5):
    case(f"layer norm, absent weights, eps {eps}", LayerNorm(1, eps), layer_norm(eps), x, None, None)
    case(f"layer norm, fewer inputs, eps {eps}", LayerNorm(1, eps), layer_norm(eps), x)
    case(f"layer norm, no shift, eps {eps}", LayerNorm(1, eps), layer_norm(eps), x, gamma)
case("layer norm, shift alone", LayerNorm(1, 0.1), lambda x, beta: layer_norm(0.1)(x, 1.0, beta), x, None, beta)
case("rms norm, absent gain", RMSNorm(1, 0.5), rms_norm(0.5), x, None)
case("rms norm, one input", RMSNorm(1, 0.5), rms_norm(0.5), x)
LABELS = torch.tensor([[2, 0, -100], [1, 1, 3]])


(LOGITS,) = draw((2, 3, 5), seed=56)
for smoothing, normalizer in itertools.product((0.0, 0.3), (None, 11.0)):
    primitive = CrossEntropy(label_smoothing=smoothing, normalizer=normalizer)
    case(f"cross entropy {smoothing} {normalizer}", primitive, cross_entropy(LABELS, smoothing, normalizer), LOGITS, LABELS)
OTHER = LABELS.where(LABELS != -100, 4)
case("cross entropy, other ignored label", CrossEntropy(ignore_index=1), cross_entropy(OTHER, ignored=1), LOGITS, OTHER)
for shape in ((2, 3, 4), (5,), ()):
    z, target = draw(shape, shape, seed=53)
    case(f"squared error {shape}", MeanSquaredError(7.0), lambda z, target: ((z - target) ** 2).sum() / 7, z, target)

# Fused attention -----------------------------------------------------------------------------------------------------


def attention(
    Q: Tensor, K: Tensor, V: Tensor, B: Tensor | None = None, *, keep: Tensor | None = None, scale: float = 0.5
) -> Tensor:
    """The formula with exponentials; entries and rows that are masked get weight zero."""
    T = scale * torch.einsum("...le,...se->...ls", Q, K)
    T = T if B is None else T + B
    powers = T.exp() if keep is None else torch.where(keep, T.exp(), 0.0)
    total = powers.sum(-1, keepdim=True)
    return torch.einsum("...ls,...sv->...lv", powers / torch.where(total == 0, 1.0, total), V)


QKV = {
    "one sequence": ((3, 4), (5, 4), (5, 2)),
    "batch": ((2, 3, 4), (2, 5, 4), (2, 5, 2)),
    "batch and heads": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2)),
    "queries repeated": ((1, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2)),
    "keys repeated": ((2, 3, 5, 4), (2, 1, 6, 4), (2, 3, 6, 2)),
    "values repeated": ((2, 3, 5, 4), (2, 3, 6, 4), (6, 2)),
    "only values in batches": ((5, 4), (6, 4), (2, 3, 6, 2)),
    "each in its own axis": ((2, 1, 1, 5, 4), (3, 1, 6, 4), (7, 6, 2)),
}
for name, shapes in QKV.items():
    case(f"attention, {name}", ScaledDotProductAttention(), attention, *draw(*shapes, seed=3))
HEADS = draw(*QKV["batch and heads"], seed=3)
case("attention, scale", ScaledDotProductAttention(scale=-1.3), lambda *x: attention(*x, scale=-1.3), *HEADS)
case("attention, scale zero", ScaledDotProductAttention(scale=0.0), lambda *x: attention(*x, scale=0.0), *HEADS, movable=[2])
for queries, keys in (5, 5), (3, 6), (6, 3):
    keep = torch.arange(keys) <= torch.arange(queries).unsqueeze(-1)
    inputs = draw((2, queries, 4), (2, keys, 4), (2, keys, 3), seed=3)
    causal = ScaledDotProductAttention(is_causal=True)
    case(f"attention, causal {queries} {keys}", causal, lambda *x, keep=keep: attention(*x, keep=keep), *inputs)
for number, shape in enumerate([(5, 6), (1, 6), (3, 5, 6), (2, 1, 5, 6), (2, 1, 1, 6), (2, 3, 5, 6)]):
    (B,) = draw(shape, seed=9)
    keep = B < 0.4
    hidden = B.masked_fill(~keep, -torch.inf)
    kinds = (
        ("boolean", keep, lambda *x, keep=keep: attention(*x, keep=keep)),
        ("additive", B, lambda *x, B=B: attention(*x, B)),
        ("minus infinity", hidden, lambda *x, B=B, keep=keep: attention(*x, B, keep=keep)),
    )
    name, mask, f = kinds[number % 3]  # each kind with few axes and with many
    case(f"attention, mask {name} {shape}", ScaledDotProductAttention(mask), f, *HEADS)
    case(f"attention, moving mask {shape}", ScaledDotProductAttention(), attention, *HEADS, B)
for groups in 1, 2, 3, 6:
    inputs, (B,) = draw((2, 6, 3, 4), (2, groups, 5, 4), (2, groups, 5, 2), seed=3), draw((6, 3, 5), seed=8)

    def grouped(Q: Tensor, K: Tensor, V: Tensor, B: Tensor | None = None, *, groups: int = groups) -> Tensor:
        index = torch.arange(6) // (6 // groups)
        return attention(Q, K[:, index], V[:, index], B)

    case(f"attention, {groups} groups", ScaledDotProductAttention(enable_gqa=True), grouped, *inputs)
    case(f"attention, {groups} groups, mask", ScaledDotProductAttention(enable_gqa=True), grouped, *inputs, B)
EMPTY = torch.tensor([[True, True, False, True, False], [False] * 5, [False, True, False, False, False]])
case("attention, empty row", ScaledDotProductAttention(EMPTY), lambda *x: attention(*x, keep=EMPTY), *draw(*QKV["batch"], seed=3))
