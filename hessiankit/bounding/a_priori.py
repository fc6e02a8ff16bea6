r"""Bounds from norms alone, for every placement: the block's own equation, run on bounded values.

What goes in are the norms of the input, of the weights (over a Frobenius ball around each, radius 0 for a point) and of the
target, the smallest row scale of each norm's input, and the sizes; what comes out are bounds that hold for every problem with
these. With loss ||Z - T||_F^2 / N and R = Z - T,

    ||H_ij|| <= (2/N) [ g_i g_j + (largest row of R) hessian_row_ij + ||R||_F hessian_all_ij ],   ||H|| <= that matrix's norm.

Over a ball this bounds every Hessian in it, which is what a comparison of losses at two points needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import ACTIVATIONS, Attention, TransformerBlock
from hessiankit.blocks.attention import rotate
from hessiankit.blocks.norms import norm_of
from hessiankit.bounding.rules import (
    ACTIVATION_CONSTANTS,
    Bounded,
    BoundedParameter,
    Sphere,
    ZeroScaleError,
    activation,
    affine,
    constant,
    gain_and_shift,
    hadamard,
    merge,
    mixed,
    norm,
    split,
)
from hessiankit.support.errors import InputError

ROUNDING = 1e-13
"""Of the terms that cancel in the output of a norm: what they leave in a Hessian computed in float64 is not above the bound."""


@dataclass(frozen=True)
class NormTable:
    """Bounds on the norms of the blocks of a Hessian.

    Attributes:
        names: The parameters.
        norms: The bounds, in the order of the names.
        lipschitz: Bound on the norm of the gradient over the ball.
        spectral: Another bound on the whole, where there is one.
    """

    names: tuple[str, ...]
    norms: Tensor
    lipschitz: float
    spectral: float = math.inf

    @property
    def whole(self) -> float:
        """Bound on the norm of the whole Hessian: the norm of the matrix of block norms, or ``spectral``."""
        return min(float(torch.linalg.eigvalsh(self.norms)[-1]) * (1 + 1e-10), self.spectral)

    def __getitem__(self, pair: tuple[str, str]) -> float:
        i, j = (self.names.index(name) for name in pair)
        return float(self.norms[i, j])


def a_priori(
    block: TransformerBlock | Attention,
    X: Tensor,
    target: Any,
    *,
    loss: str = "mse",
    radius: float | Mapping[str, float] = 0.0,
) -> NormTable:
    """Return a-priori bounds of a block's loss Hessian.

    Args:
        block: A block of any placement, or an attention on its own.
        X: L x d_model, one sequence; only its norms and the scales of what reaches the norms count.
        target: L x d_model, or labels for cross entropy.
        loss: ``"mse"`` or ``"cross_entropy"``, averaged over entries or tokens.
        radius: Frobenius radius of the ball of parameters: one for all together, or one for each name.

    Raises:
        InputError: If the placement or the loss has no rule, or a norm with eps = 0 meets a row whose scale may be 0.
    """
    parts = _BoundedParts(block, radius)
    try:
        given = constant(X.detach().double())
        Z = parts.attention(given) if isinstance(block, Attention) else block.equation(parts, given)
    except ZeroScaleError as error:
        raise InputError(f"bounds: in {parts.at}, {error}") from error
    names = tuple(name for name, _ in block.named_parameters())
    outer, row, whole, first = _loss(Z, target, loss)
    norms = _matrix(names, lambda i, j: outer * Z.jacobian.get(i, 0.0) * Z.jacobian.get(j, 0.0) + Z.hessian(i, j, row, whole))
    if Z.sphere is not None and loss == "mse":
        on_a_sphere = _on_a_sphere(Z, Z.sphere, target.detach().double(), names)
        norms = torch.minimum(norms, on_a_sphere + ROUNDING * norms)
    gradient = first * math.sqrt(sum(g * g for g in Z.jacobian.values()))
    return NormTable(names, torch.maximum(norms, norms.T) * (1 + 1e-10), gradient)


def _matrix(names: Sequence[str], entry: Callable[[str, str], float]) -> Tensor:
    return torch.tensor([[entry(i, j) for j in names] for i in names], dtype=torch.float64)


def _loss(Z: Bounded, target: Any, loss: str) -> tuple[float, float, float, float]:
    """Return bounds on: the loss's second derivative, its gradient's rows, the gradient, and the gradient again."""
    if loss == "mse":
        T = target.detach().double()
        n = Z.centre.numel()
        row = Z.row + float(T.norm(dim=1).max())
        residual = Z.frobenius + float(T.norm())
        near = Z.centre - T  # the residual at the centre, moved by at most the drift
        row = min(row, float(near.norm(dim=1).max()) + Z.drift) if Z.drift == 0 else row
        residual = min(residual, float(near.norm()) + Z.drift) if Z.drift == 0 else residual
        return 2 / n, 2 / n * row, 2 / n * residual, 2 / n * residual
    if loss == "cross_entropy":
        # softmax minus one-hot has length at most sqrt(2); the Hessian diag(p) - p p^T at most 1/2
        return 0.5 / Z.length, math.sqrt(2) / Z.length, math.sqrt(2 / Z.length), math.sqrt(2 / Z.length)
    raise InputError(f"bounds: no a-priori bound for loss={loss!r}; pass 'mse' or 'cross_entropy'")


def _on_a_sphere(Z: Bounded, sphere: Sphere, T: Tensor, names: tuple[str, ...]) -> Tensor:
    r"""Return bounds for the mean squared error of an output whose rows have a fixed length but for eps.

    With M the norm's input, S_i^2 = |M_i|^2 + d eps (M centred for LayerNorm) and s <= S_i / sqrt(d), the loss is

        ||Z - T||^2 / N = const - (2/N) <Z, T> - (1/N) sum_i d^2 eps / S_i^2 ,

    so there is no Gauss-Newton term: the targets, centred as Z is, take the residual's place. The
    last sum has the gradient 2 d^2 eps M_i / S_i^4, of length at most 2 eps sqrt(d) / s^3, and the second derivative
    2 d^2 eps (I - 4 M_i M_i^T / S_i^2) / S_i^4, of norm at most 6 eps / s^4.
    """
    T = T - T.mean(1, keepdim=True) if sphere.centred else T
    n, M = Z.centre.numel(), sphere.before
    row, whole = float(T.norm(dim=1).max()), float(T.norm())
    second, first = 6 * sphere.eps / sphere.scale**4, 2 * sphere.eps * math.sqrt(Z.width) / sphere.scale**3
    root = math.sqrt(Z.length)

    def entry(i: str, j: str) -> float:
        lengths = second * M.jacobian.get(i, 0.0) * M.jacobian.get(j, 0.0) + first * M.hessian(i, j, 1.0, root)
        return (2 * Z.hessian(i, j, row, whole) + lengths) / n

    return _matrix(names, entry)


class _BoundedParts:
    """A block's parts, on bounded values."""

    def __init__(self, block: TransformerBlock | Attention, radius: float | Mapping[str, float]) -> None:
        self.block, self.radius, self.at = block, radius, "the block"
        self.named = dict(block.named_parameters())
        self.prefix = "" if isinstance(block, Attention) else "attention."
        self.part: Attention = block if isinstance(block, Attention) else block.attention

    def attention(self, X: Bounded) -> Bounded:
        """Self-attention."""
        part = self.part
        Q = self._projected("Q", X, part.n_heads)
        K = self._projected("K", X, part.n_kv_heads)
        V = self._projected("V", X, part.n_kv_heads)
        if part.rotary:  # each row by its own angle: rows keep their lengths, but equal keys part and others may line up
            Q, K = replace(Q, spectral=Q.frobenius), replace(K, spectral=K.frobenius, diameter=math.inf)
        scale, groups = 1 / math.sqrt(part.d_k), part.n_heads // part.n_kv_heads
        C = mixed(Q, K, V, scale, self._context(Q, K, V), heads=part.n_heads, groups=groups)
        C = self._inner("c", C, part.n_heads)
        return C if part.W_O is None else self._affine(C, f"{self.prefix}W_O", f"{self.prefix}b_O")

    def feedforward(self, Y: Bounded) -> Bounded:
        """The feed-forward network."""
        assert isinstance(self.block, TransformerBlock)
        part = self.block.feedforward
        U = self._affine(Y, "feedforward.W_1", "feedforward.b_1")
        if part.W_G is not None:
            G = self._affine(Y, "feedforward.W_G", "feedforward.b_G")
            H = hadamard(activation(G, "silu", torch.nn.functional.silu(G.centre)), U)
        elif part.activation in ACTIVATION_CONSTANTS:
            H = activation(U, part.activation, ACTIVATIONS[part.activation](U.centre))
        else:
            raise InputError(f"bounds: the activation {part.activation!r} has no a-priori constants")
        return self._affine(H, "feedforward.W_2", "feedforward.b_2")

    def __getattr__(self, name: str) -> Any:
        part = getattr(self.__dict__["block"], name)
        if isinstance(part, nn.Parameter):
            return self._parameter(name)
        if isinstance(part, nn.Module):
            return lambda X: self._norm(X, part, name)
        return part

    def _parameter(self, name: str) -> BoundedParameter | None:
        radius = self.radius.get(name, 0.0) if isinstance(self.radius, Mapping) else float(self.radius)
        found = self.named.get(name)
        return None if found is None else BoundedParameter(name, found.detach().double(), radius)

    def _affine(self, X: Bounded, weight: str, bias: str) -> Bounded:
        W = self._parameter(weight)
        assert W is not None
        return affine(X, W, self._parameter(bias))

    def _projected(self, letter: str, X: Bounded, heads: int) -> Bounded:
        return self._inner(letter.lower(), self._affine(X, f"{self.prefix}W_{letter}", f"{self.prefix}b_{letter}"), heads)

    def _inner(self, letter: str, X: Bounded, heads: int) -> Bounded:
        part = getattr(self.part, f"norm_{letter}")
        if part is None:
            return X
        name = f"{self.prefix}norm_{letter}"
        if self.part.norm_scope == "full":
            return self._norm(X, part, name)
        return merge(self._norm(split(X, heads), part, name), heads)

    def _norm(self, X: Bounded, part: nn.Module, name: str) -> Bounded:
        self.at = name
        like = next(part.parameters(), X.centre)
        kind, groups, eps = norm_of(part, like.dtype)
        gain, shift = self._parameter(f"{name}.weight"), self._parameter(f"{name}.bias")
        bare = norm(split(X, groups), layernorm=kind == "layernorm", eps=eps)
        out = gain_and_shift(merge(bare, groups), gain, shift)
        return replace(out, centre=part(X.centre.to(like)).double().detach(), jacobian_row=out.jacobian_row if groups > 1 else {})

    def _context(self, Q: Bounded, K: Bounded, V: Bounded) -> Tensor:
        part = self.part

        def heads(Y: Tensor, n: int) -> Tensor:
            return Y.unflatten(-1, (n, -1)).transpose(0, 1)  # (heads, L, width)

        q, k, v = heads(Q.centre, part.n_heads), heads(K.centre, part.n_kv_heads), heads(V.centre, part.n_kv_heads)
        if part.rotary:
            q, k = rotate(q, part.rotary_theta), rotate(k, part.rotary_theta)
        repeats = part.n_heads // part.n_kv_heads
        logits = q @ k.repeat_interleave(repeats, 0).mT / math.sqrt(part.d_k)
        if part.causal:
            logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return (torch.softmax(logits, -1) @ v.repeat_interleave(repeats, 0)).transpose(0, 1).flatten(1)
