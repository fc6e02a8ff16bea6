r"""Bounds from norms alone, for every placement: the block's own equation, run on bounded values.

What goes in are the norms of the input, of the weights (over a Frobenius ball around each, radius 0 for a point) and of the
target, the smallest row scale of each norm's input, and the sizes; what comes out are bounds that hold for every problem with
these. With loss ||Z - T||_F^2 / N and R = Z - T,

    ||H_ij|| <= (2/N) [ g_i g_j + (largest row of R) hessian_row_ij + ||R||_F hessian_all_ij ],   ||H|| <= that matrix's norm.

Over a ball this bounds every Hessian in it, which is what a comparison of losses at two points needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from derivations.bounds import STEEPNESS
from derivations.bounds.block_norms import BlockNorms
from hessiankit.blocks import ACTIVATIONS, Attention, TransformerBlock
from hessiankit.blocks.attention import rotate
from hessiankit.blocks.norms import norm_of
from hessiankit.blocks.parts import BlockParts
from hessiankit.request.loss import read_loss
from hessiankit.support.errors import InputError
from hessiankit.theory.bounding import rules
from hessiankit.theory.bounding.rules import Bounded, BoundedParameter, Sphere, ZeroScaleError

Block = TypeVar("Block", bound=nn.Module)
NORM_ROUNDING = 1e-13
"""Share of the terms that cancel in the output of a norm that rounding may leave in a Hessian computed in float64."""


def in_float64(module: Block) -> Block:
    """Return the same function of the same numbers in float64: the module itself, or a converted copy.

    Every number of a narrower dtype is one of float64. An ``nn.RMSNorm`` without an eps keeps torch's for the narrower dtype.

    >>> in_float64(nn.RMSNorm(4)).eps == torch.finfo(torch.float32).eps
    True
    """
    if not any(x.is_floating_point() and x.dtype != torch.float64 for x in (*module.parameters(), *module.buffers())):
        return module
    converted = copy.deepcopy(module)
    for part in converted.modules():
        if isinstance(part, nn.RMSNorm) and part.eps is None:
            part.eps = norm_of(part, next(part.parameters(), next(module.parameters())).dtype)[2]
    return converted.double()


def a_priori(
    block: TransformerBlock | Attention, X: Tensor, target: Any, *, loss: str = "mse", radius: float | Mapping[str, float] = 0.0
) -> BlockNorms:
    """Return a-priori bounds of a block's loss Hessian, and among the parts ``lipschitz``, a bound on its gradient over the ball.

    X is one sequence, L x d_model, of which only norms count, and the scales of what reaches the norms of the block, which may
    be an attention on its own. A narrower dtype is bounded in float64. ``radius`` is that of the Frobenius ball of parameters,
    for all together or for each name. An InputError names what has no rule, or a norm with eps = 0 of a row whose scale may be 0.
    """
    parts = _BoundedParts(in_float64(block), radius)
    try:
        Z = parts(rules.constant(X.detach().double()))
    except ZeroScaleError as error:
        raise InputError(f"bounds: in {parts.at}, {error}") from error
    names = tuple(name for name, _ in block.named_parameters())
    outer, row, frobenius = _loss(Z, target, loss)
    norms = _matrix(names, lambda i, j: outer * Z.jacobian.get(i, 0.0) * Z.jacobian.get(j, 0.0) + Z.hessian(i, j, row, frobenius))
    if Z.sphere is not None and loss == "mse":
        on_a_sphere = _on_a_sphere(Z, Z.sphere, target.detach().double(), names)
        norms = torch.minimum(norms, on_a_sphere + NORM_ROUNDING * norms)
    gradient = frobenius * math.hypot(*Z.jacobian.values())
    return BlockNorms(names, torch.maximum(norms, norms.T) * (1 + 1e-10), {"lipschitz": gradient})


def _matrix(names: Sequence[str], entry: Callable[[str, str], float]) -> Tensor:
    return torch.tensor([[entry(i, j) for j in names] for i in names], dtype=torch.float64, device="cpu")


def _loss(Z: Bounded, target: Any, loss: str) -> tuple[float, float, float]:
    """Return bounds on the loss's second derivative, on the rows of its gradient, and on the gradient."""
    if loss == "mse":
        T, n = target.detach().double(), Z.centre.numel()
        row, residual = Z.row + float(T.norm(dim=1).max()), Z.frobenius + float(T.norm())
        if Z.drift == 0:  # the residual is that at the centre
            row, residual = min(row, float((Z.centre - T).norm(dim=1).max())), min(residual, float((Z.centre - T).norm()))
        return 2 / n, 2 / n * row, 2 / n * residual
    if loss == "cross_entropy":
        # softmax minus one-hot has length at most sqrt(2); the Hessian diag(p) - p p^T at most 1/2
        count = read_loss(loss).count(target) or math.inf  # without labels that count there is no loss
        return 0.5 / count, math.sqrt(2) / count, math.sqrt(2 / count)
    raise InputError(f"bounds: no a-priori bound for loss={loss!r}; pass 'mse' or 'cross_entropy'")


def _on_a_sphere(Z: Bounded, sphere: Sphere, T: Tensor, names: tuple[str, ...]) -> Tensor:
    r"""Return bounds for the mean squared error of an output whose rows have a fixed length up to eps.

    With M the norm's input, S_i^2 = |M_i|^2 + d eps (M centred for LayerNorm) and s <= S_i / sqrt(d), the loss is

        ||Z - T||^2 / N = const - (2/N) <Z, T> - (1/N) sum_i d^2 eps / S_i^2 ,

    so there is no Gauss-Newton term: the targets, centred as Z is, take the residual's place. The
    last sum has the gradient 2 d^2 eps M_i / S_i^4, of length at most 2 eps sqrt(d) / s^3, and the second derivative
    2 d^2 eps (I - 4 M_i M_i^T / S_i^2) / S_i^4, of norm at most 6 eps / s^4.
    """
    T = T - T.mean(1, keepdim=True) if sphere.centred else T
    n, M = Z.centre.numel(), sphere.before
    row, frobenius = float(T.norm(dim=1).max()), float(T.norm())
    second, first = 6 * sphere.eps / sphere.scale**4, 2 * sphere.eps * math.sqrt(Z.width) / sphere.scale**3
    root = math.sqrt(Z.length)

    def entry(i: str, j: str) -> float:
        lengths = second * M.jacobian.get(i, 0.0) * M.jacobian.get(j, 0.0) + first * M.hessian(i, j, 1.0, root)
        return (2 * Z.hessian(i, j, row, frobenius) + lengths) / n

    return _matrix(names, entry)


class _BoundedParts(BlockParts):
    """A block's parts, on bounded values."""

    def __init__(self, block: TransformerBlock | Attention, radius: float | Mapping[str, float]) -> None:
        radii = radius if isinstance(radius, Mapping) else dict.fromkeys((name for name, _ in block.named_parameters()), radius)
        balls = {n: BoundedParameter(n, p.detach().double(), radii.get(n, 0.0)) for n, p in block.named_parameters()}
        super().__init__(block, balls)
        self.at = "the block"

    def mixed(self, Q: Bounded, K: Bounded, V: Bounded) -> Bounded:
        part, context = self.part, self._context(Q.centre, K.centre, V.centre)
        if part.rotary:  # each row by its own angle: rows keep their lengths, but equal keys part and others may line up
            Q, K = replace(Q, spectral=Q.frobenius), replace(K, spectral=K.frobenius, diameter=math.inf)
        scale, groups = 1 / math.sqrt(part.d_k), part.n_heads // part.n_kv_heads
        return rules.mixed(Q, K, V, scale, context, heads=part.n_heads, groups=groups)

    def activation(self, X: Bounded, kind: str) -> Bounded:
        if kind not in STEEPNESS:
            raise InputError(f"bounds: the activation {kind!r} has no a-priori constants")
        return rules.activation(X, kind, ACTIVATIONS[kind](X.centre))

    def gated(self, G: Bounded, U: Bounded) -> Bounded:
        return rules.hadamard(rules.activation(G, "silu", torch.nn.functional.silu(G.centre)), U)

    def affine(self, X: Bounded, prefix: str, letter: str) -> Bounded:
        return rules.affine(X, self.arrays[f"{prefix}W_{letter}"], self.arrays.get(f"{prefix}b_{letter}"))

    split, merge = staticmethod(rules.split), staticmethod(rules.merge)

    def norm(self, X: Bounded, part: nn.Module, name: str) -> Bounded:
        self.at = name
        kind, groups, eps = norm_of(part, X.centre.dtype)
        gain, shift = self.arrays.get(f"{name}.weight"), self.arrays.get(f"{name}.bias")
        bare = rules.norm(rules.split(X, groups), layernorm=kind == "layernorm", eps=eps)
        out = rules.gain_and_shift(rules.merge(bare, groups), gain, shift)
        return replace(out, centre=part(X.centre).detach(), jacobian_row=out.jacobian_row if groups > 1 else {})

    def _context(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        part = self.part
        heads = ((Q, part.n_heads), (K, part.n_kv_heads), (V, part.n_kv_heads))
        q, k, v = (Y.unflatten(-1, (n, -1)).transpose(0, 1) for Y, n in heads)  # (heads, L, width)
        if part.rotary:
            q, k = rotate(q, part.rotary_theta), rotate(k, part.rotary_theta)
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=part.causal, enable_gqa=True)
        return context.transpose(0, 1).flatten(1)
