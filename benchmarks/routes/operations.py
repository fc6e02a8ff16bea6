"""Operations of transformers, each as a tiny float64 problem with a curved loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.request.loss import mean_square


class Cubed(torch.autograd.Function):
    """The cube of every entry, with a backward in operations of torch, which can be differentiated again.

    >>> z = torch.tensor(2.0, requires_grad=True)
    >>> (first,) = torch.autograd.grad(Cubed.apply(z), z, create_graph=True)
    >>> first.item(), torch.autograd.grad(first, z)[0].item()
    (12.0, 12.0)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        """Return z^3."""
        return z**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep z."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> Tensor:
        """Return 3 z^2 times the adjoint."""
        (z,) = ctx.saved_tensors
        return 3 * z.square() * adjoint


class CubedOnce(Cubed):
    """The same, its backward marked ``once_differentiable``: a second derivative takes it for a constant, without an error.

    >>> z = torch.tensor(2.0, requires_grad=True)
    >>> (first,) = torch.autograd.grad(CubedOnce.apply(z) + z**2, z, create_graph=True)
    >>> first.item(), torch.autograd.grad(first, z)[0].item()  # 16, and 12 + 2
    (16.0, 2.0)
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, adjoint: Tensor) -> Tensor:
        """Return 3 z^2 times the adjoint."""
        return Cubed.backward(ctx, adjoint)


Function: TypeAlias = Callable[..., Tensor]
"""(inputs, one argument for each parameter by name) -> outputs."""

EPS = 1e-5


@dataclass(frozen=True)
class RouteOperation:
    """An operation within a small function of some parameters.

    Attributes:
        name: Its name in the table.
        formula: The outputs as a function of the inputs ``x`` and the parameters.
        module: Makes the module; its parameters are drawn anew.
        inputs: Shape of ``x``, or the tokens themselves.
        loss: (outputs, target) -> scalar: the mean of the squared differences, or cross entropy where ``labels`` are given.
        labels: Targets of a loss that takes classes.
    """

    name: str
    formula: str
    module: Callable[[], nn.Module]
    inputs: tuple[int, ...] | Tensor = (3, 5)
    loss: Callable[[Tensor, Tensor], Tensor] = mean_square
    labels: Tensor | None = None

    def example(self, seed: int) -> Example:
        """Draw inputs, target and parameters (in this order) from the normal distribution."""
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        module = self.module().double().eval()
        x = self.inputs if isinstance(self.inputs, Tensor) else draw(self.inputs)
        with torch.no_grad():
            target = draw(module(x).shape) if self.labels is None else self.labels
            for parameter in module.parameters():
                parameter.copy_(draw(parameter.shape))
        return Example(module, x, target, self.loss, "mse" if self.labels is None else "cross_entropy")


@dataclass(frozen=True, eq=False)
class Example:
    """One drawn problem: ``loss(module(x), target)`` as a function of the parameters that require a gradient."""

    module: nn.Module
    x: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    loss_name: str
    """The same loss as an argument of ``hessiankit.hessian``."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Name -> value of the differentiated parameters."""
        return {name: p.detach() for name, p in self.module.named_parameters() if p.requires_grad}

    @property
    def theta(self) -> Tensor:
        """The differentiated parameters as one flat vector (P)."""
        return torch.cat([value.reshape(-1) for value in self.parameters.values()])

    @property
    def samples(self) -> int:
        """Number of samples; the loss is the mean of their losses."""
        return len(self.x)

    def __call__(self, theta: Tensor, sample: Tensor | None = None) -> Tensor:
        """Return the loss at a flat vector of parameters: of all samples, or of the one with index ``sample``."""
        x, target = (self.x, self.target) if sample is None else (self.x[sample[None]], self.target[sample[None]])
        shapes = {name: value.shape for name, value in self.parameters.items()}
        pieces = theta.split([shape.numel() for shape in shapes.values()])
        values = {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        return self.loss(functional_call(self.module, values, (x,)), target)


class Formula(nn.Module):
    """A function of the inputs and of parameters of given shapes; those named in ``fixed`` are not differentiated.

    >>> sum(p.numel() for p in Formula(lambda x, W: x @ W, W=(5, 2)).parameters())
    10
    """

    def __init__(self, function: Function, fixed: tuple[str, ...] = (), **shapes: Any) -> None:
        super().__init__()
        self.function, self.names = function, tuple(shapes)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=name not in fixed))

    def forward(self, x: Tensor) -> Tensor:
        """Return the function's value."""
        return self.function(x, **{name: getattr(self, name) for name in self.names})


def written_out_layer_norm(z: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """Return gain * (z - mean) / sqrt(var + eps) + bias over the last axis, by elementary operations.

    >>> one, none = torch.ones(2), torch.zeros(2)
    >>> written_out_layer_norm(torch.tensor([[-1.0, 3.0]]), one, none).round(decimals=3).tolist()
    [[-1.0, 1.0]]
    """
    centred = z - z.mean(-1, keepdim=True)
    return gain * centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() + bias


def written_out_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v by elementary operations.

    >>> written_out_attention(torch.zeros(1, 2), torch.ones(2, 2), torch.tensor([[1.0], [3.0]])).tolist()
    [[2.0]]
    """
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def _batch_norm(x: Tensor, gain: Tensor, bias: Tensor, W: Tensor) -> Tensor:
    """Return the batch norm in training over the rows of each sample: samples beside each other, as channels."""
    z, n = (x @ W).transpose(0, 1), len(x)
    return F.batch_norm(z.flatten(1), None, None, gain.repeat(n), bias.repeat(n), True).reshape(z.shape).transpose(0, 1)


def _product_by_index(x: Tensor, W: Tensor) -> Tensor:
    z = x @ W
    return torch.ones(len(x), 2, dtype=z.dtype).scatter_reduce(1, _PAIRS.expand(len(x), 4), z, "prod")


def _triangular_solve(x: Tensor, A: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that it is deprecated
        return torch.triangular_solve(x.mT, A.masked_fill(_ABOVE.mT, 0.0) + 3 * torch.eye(4))[0].mT


def _math_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(1)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class _SelfAttention(nn.Module):
    """``nn.MultiheadAttention`` of a sequence with itself."""

    def __init__(self, need_weights: bool, math: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, bias=False, batch_first=True)
        self.need_weights, self.math = need_weights, math

    def forward(self, x: Tensor) -> Tensor:
        if self.math:
            with sdpa_kernel(SDPBackend.MATH):
                return self.attention(x, x, x, need_weights=self.need_weights)[0]
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def _arithmetic(x: Tensor, A: Tensor, B: Tensor, b: Tensor) -> Tensor:
    """Sums, products and quotients of tensors and numbers, means and powers."""
    y, z = x @ A + b, 2 * (x @ B) - 1
    mask = torch.ones(3, 4, dtype=torch.bool).tril(1)
    y = (y * z + 1) / (1 + z * z) - y.mean(-1, keepdim=True) * 0.5 + (z - y).sum(1, keepdim=True)
    y = torch.where(mask, y, z).masked_fill(~mask, 0.5) / 3 + 0.1 * x + x * z - x
    spread = y.pow(2).mean(-1, keepdim=True)
    y = y * torch.rsqrt(spread + EPS) + (y / (spread + 1).sqrt()).exp()
    return y - torch.log(y.square().mean(-1, keepdim=True) + 2) * (-b)


def _views(x: Tensor, A: Tensor, P: Tensor) -> Tensor:
    """Changes of shape and order, and pieces, some of them of the parameters."""
    y = torch.cat([x @ A + P[:3], P[3:].unsqueeze(0).expand(len(x), 1, 4)], dim=1)  # (B, 4, 4)
    first, second = y.chunk(2, dim=1)
    y = torch.stack([first, second.contiguous()], dim=1).transpose(1, 2).reshape(-1, 4, 4)
    a, b = y.view(-1, 2, 2, 4).permute(0, 2, 1, 3).flatten(1, 2).split([1, 3], dim=1)
    y = torch.cat([b, a.repeat(1, 1, 1)], 1).mT.unflatten(-1, (2, 2)).flatten(-2)
    y = torch.ops.aten.alias(y).to(device=x.device, dtype=torch.float64)
    first, second = y.unsqueeze(1).squeeze(1)[:, :, ::2].unbind(2)
    a, b = torch.cat([first, second], -1).to(torch.float64).split(4, -1)
    return torch.tanh(a * b) + (y.select(1, 0) * y[:, 1].clone())[:, [2, 0, 1, 3]] * P.select(0, 0) * P.t()[1]


def _encoder_layer() -> nn.Module:
    """Return a post-norm layer of which attention's input projection and the two gains are differentiated."""
    layer = nn.TransformerEncoderLayer(3, 1, dim_feedforward=2, dropout=0.0, bias=False, batch_first=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_("in_proj" in name or "norm" in name)
    return layer


_NORM: dict[str, Any] = {"gain": (5,), "bias": (5,), "W": (5, 5)}
_CHANNELS: dict[str, Any] = {"gain": (4,), "bias": (4,), "W": (3, 3)}
_HEADS: dict[str, Any] = {"W_Q": (4, 2), "W_K": (4, 2), "W_V": (4, 2)}
_FACTORS: dict[str, Any] = {"A": (5, 3), "B": (3, 4)}
_SEQUENCES, _TOKENS = (2, 3, 4), (2, 4, 3)
_LABELS = torch.tensor([0, 3, 1])
_PAIRS = torch.tensor([[0, 1, 0, 1]])
_SQUARE: dict[str, Any] = {"A": (4, 4)}
_ABOVE = torch.ones(4, 4, dtype=torch.bool).triu(1)


def _formula(
    name: str,
    formula: str,
    function: Function,
    inputs: tuple[int, ...] = (3, 5),
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = mean_square,
    labels: Tensor | None = None,
    **shapes: Any,
) -> RouteOperation:
    """Return an operation within a function of the inputs and of parameters of the given shapes."""
    return RouteOperation(name, formula, partial(Formula, function, **shapes), inputs, loss, labels)


def _elementwise(name: str, function: Callable[[Tensor], Tensor], formula: str = "") -> RouteOperation:
    return _formula(name, formula or f"{name}(x W)", lambda x, W: function(x @ W), W=(5, 4))


def _custom(name: str, function: type[Cubed], formula: str) -> RouteOperation:
    return _formula(name, formula, lambda x, A, B: function.apply(x @ A) @ B, **_FACTORS)


def _attention(name: str, function: Function, formula: str) -> RouteOperation:
    def attend(x: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Tensor:
        x = x[:, None]  # (B, heads, L, d_model)
        return function(x @ W_Q, x @ W_K, x @ W_V)

    return _formula(name, formula, attend, _SEQUENCES, **_HEADS)


OPERATIONS: dict[str, RouteOperation] = {
    operation.name: operation
    for operation in (
        _formula(
            "layer_norm",
            "layer_norm(x W, gain, bias)",
            lambda x, gain, bias, W: F.layer_norm(x @ W, (5,), gain, bias, EPS),
            **_NORM,
        ),
        _formula(
            "layer_norm (no bias)",
            "layer_norm(x W, gain)",
            lambda x, gain, W: F.layer_norm(x @ W, (5,), gain, None, EPS),
            gain=(5,),
            W=(5, 5),
        ),
        _formula("layer_norm (no gain)", "layer_norm(x W)", lambda x, W: F.layer_norm(x @ W, (5,), None, None, EPS), W=(5, 5)),
        _formula(
            "layer_norm (w.r.t. its input)",
            "layer_norm(x + Z, gain, bias), gain and bias fixed",
            lambda x, gain, bias, Z: F.layer_norm(x + Z, (5,), gain, bias, EPS),
            (1, 3, 5),
            fixed=("gain", "bias"),
            gain=(5,),
            bias=(5,),
            Z=(3, 5),
        ),
        _formula(
            "layer_norm (w.r.t. its gain)",
            "layer_norm(x, gain, bias)",
            lambda x, gain, bias: F.layer_norm(x, (5,), gain, bias, EPS),
            gain=(5,),
            bias=(5,),
        ),
        _formula(
            "layer_norm (written out)",
            "gain (x W - mean) / sqrt(var + eps) + bias",
            lambda x, gain, bias, W: written_out_layer_norm(x @ W, gain, bias),
            **_NORM,
        ),
        _formula("rms_norm", "rms_norm(x W, gain)", lambda x, gain, W: F.rms_norm(x @ W, (5,), gain, EPS), gain=(5,), W=(5, 5)),
        _formula(
            "group_norm",
            "group_norm(x W, 2 groups, gain, bias)",
            lambda x, gain, bias, W: F.group_norm(x @ W, 2, gain, bias, EPS),
            (2, 4, 3),
            **_CHANNELS,
        ),
        _formula(
            # As many groups as positions: torch's batching rule then finds shapes that fit where they should not.
            "group_norm (no gain)",
            "group_norm(x W, 4 groups)",
            lambda x, W: F.group_norm(x @ W, 4, None, None, EPS),
            (2, 8, 4),
            W=(4, 4),
        ),
        _formula("batch_norm", "batch_norm(x W, gain, bias, training)", _batch_norm, (2, 7, 3), **_CHANNELS | {"W": (3, 4)}),
        _formula(
            "instance_norm",
            "instance_norm(x W, gain, bias)",
            lambda x, gain, bias, W: F.instance_norm(x @ W, weight=gain, bias=bias),
            (2, 4, 3),
            **_CHANNELS,
        ),
        _formula(
            "weight_norm",
            "linear(x, _weight_norm(V, g))",
            lambda x, V, g: F.linear(x, torch._weight_norm(V, g)),
            V=(4, 5),
            g=(4, 1),
        ),
        _elementwise("softmax", lambda z: z.softmax(-1)),
        _elementwise("log_softmax", lambda z: z.log_softmax(-1)),
        _elementwise("gelu", F.gelu, "gelu(x W), erf"),
        _elementwise("gelu (tanh)", partial(F.gelu, approximate="tanh"), 'gelu(x W, approximate="tanh")'),
        _elementwise("silu", F.silu),
        _elementwise("relu", F.relu),
        _elementwise("tanh", torch.tanh),
        _elementwise("sigmoid", torch.sigmoid),
        _elementwise("elu", F.elu),
        _elementwise("mish", F.mish),
        _elementwise("hardswish", F.hardswish),
        _elementwise("cumsum", lambda z: z.cumsum(-1), "cumsum(x W, -1)"),
        _elementwise("amax", lambda z: z * z.amax(-1, keepdim=True), "z amax(z, -1), z = x W"),
        _elementwise("topk", lambda z: z.softmax(-1).topk(2).values, "topk(softmax(x W), 2)"),
        _elementwise("avg_pool1d", lambda z: F.avg_pool1d(z, 2, 1), "avg_pool1d(x W, 2, stride 1)"),
        _elementwise("dropout (eval)", partial(F.dropout, p=0.5, training=False), "dropout(x W, training=False)"),
        _formula(
            "arithmetic", "sums, products, quotients, powers, means, masks", _arithmetic, _SEQUENCES, A=(4, 4), B=(4, 1), b=(4,)
        ),
        _formula("views", "reshape, transpose, cat, split, index", _views, _SEQUENCES, A=(4, 4), P=(4, 4)),
        _formula("matmul", "x A B", lambda x, A, B: x @ A @ B, **_FACTORS),
        _formula(
            "linear", "linear(linear(x, A), B, b)", lambda x, A, B, b: F.linear(F.linear(x, A), B, b), A=(3, 5), B=(4, 3), b=(4,)
        ),
        _formula("addmm", "addmm(b, x A, B)", lambda x, A, B, b: torch.addmm(b, x @ A, B), **_FACTORS, b=(4,)),
        _formula(
            "conv1d", "conv1d(x W, K, padding 1)", lambda x, W, K: F.conv1d((x @ W)[:, None], K, padding=1), W=(5, 4), K=(2, 1, 3)
        ),
        _formula(
            "conv2d",
            "conv2d(x W, K, stride 2)",
            lambda x, W, K, b: F.conv2d((x @ W)[:, None], K, b, stride=2),
            (2, 2, 4),
            W=(4, 4),
            K=(2, 1, 2, 2),
            b=(2,),
        ),
        _formula("scatter_reduce (prod)", 'scatter_reduce(1, x W, "prod")', _product_by_index, W=(5, 4)),
        _formula(
            "cholesky_inverse",
            "x cholesky_inverse(tril(A) + 3 I)",
            lambda x, A: x @ torch.cholesky_inverse(A.masked_fill(_ABOVE, 0.0) + 3 * torch.eye(4)),
            (3, 4),
            **_SQUARE,
        ),
        _formula("triangular_solve", "triangular_solve(x^T, triu(A) + 3 I)^T", _triangular_solve, (3, 4), **_SQUARE),
        _formula(
            "linalg.solve",
            "solve(A + 3 I, x^T)^T",
            lambda x, A: torch.linalg.solve(A + 3 * torch.eye(4), x.mT).mT,
            (3, 4),
            **_SQUARE,
        ),
        _formula(
            "linalg.slogdet",
            "x slogdet(A A^T + 3 I)",
            lambda x, A: x * torch.linalg.slogdet(A @ A.mT + 3 * torch.eye(4))[1],
            **_SQUARE,
        ),
        _formula("cdist", "cdist(x W, E)", lambda x, W, E: torch.cdist(x @ W, E), W=(5, 4), E=(2, 4)),
        RouteOperation(
            "embedding",
            "embedding(tokens, E) W^T",
            lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4, bias=False)),
            torch.tensor([[0, 2, 4], [2, 1, 2]]),
        ),
        _attention("attention (written out)", written_out_attention, "softmax(Q K^T / sqrt(d)) V by elementary operations"),
        _attention("sdpa (default)", F.scaled_dot_product_attention, "scaled_dot_product_attention, torch's choice of backend"),
        _attention("sdpa (math)", _math_attention, "scaled_dot_product_attention within sdpa_kernel(SDPBackend.MATH)"),
        _attention("sdpa (math, mask)", _masked_attention, "the same, attn_mask given"),
        _attention("sdpa (math, causal)", partial(_math_attention, is_causal=True), "the same, is_causal=True"),
        RouteOperation(
            "nn.MultiheadAttention", "need_weights=False, torch's choice of backend", partial(_SelfAttention, False), _TOKENS
        ),
        RouteOperation(
            "nn.MultiheadAttention (math)",
            "need_weights=False, within sdpa_kernel(SDPBackend.MATH)",
            partial(_SelfAttention, False, True),
            _TOKENS,
        ),
        RouteOperation("nn.MultiheadAttention (weights)", "need_weights=True", partial(_SelfAttention, True), _TOKENS),
        RouteOperation("nn.TransformerEncoderLayer", "post-norm, torch's choice of backend", _encoder_layer, _TOKENS),
        _custom("autograd.Function", Cubed, "z^3 B, z = x A, with a backward of its own"),
        _custom("autograd.Function (once)", CubedOnce, "the same, its backward marked once_differentiable"),
        _formula(
            "cross_entropy", "cross_entropy(x W, labels)", lambda x, W: x @ W, W=(5, 4), loss=F.cross_entropy, labels=_LABELS
        ),
        _formula("mse_loss", "mse_loss(x A B, t)", lambda x, A, B: x @ A @ B, **_FACTORS, loss=F.mse_loss),
        _formula("(z - t).square().mean()", "(x A B - t).square().mean()", lambda x, A, B: x @ A @ B, **_FACTORS),
    )
}
"""Every operation by its name, in the order of the table's rows."""
