"""Sections 2-4: the block, the angular distance, and LayerNorm Scaling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.feedforward import FeedForwardAt
from derivations.normalization import LayerNormAt, RMSNormAt
from hessiankit.blocks import PLACEMENTS, Transformer, TransformerBlock, initialise
from hessiankit.blocks import placements as eq
from hessiankit.curvature.dense import hessian
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curse_of_depth.stacks import dense, make_block, make_stack, rms_norm, stream
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, bounded, off, readings, relative_error, small
from hessiankit.ledger.registry import claim


def angle(x: Tensor, y: Tensor) -> Tensor:
    """Return d(x, y) of Eq. 1 for each token."""
    return F.cosine_similarity(x, y, -1, eps=0.0).clamp(-1, 1).arccos() / math.pi


@claim("curse-of-depth/eq1", "Sec. 2.1, Eq. 1", "HOLDS")
def eq1(seed: int) -> Evidence:
    r"""$d(x^\ell,x^{\ell+n}) = \frac1\pi\arccos\frac{x_T^\ell\cdot x_T^{\ell+n}}{\|x_T^\ell\|_2\|x_T^{\ell+n}\|_2}$ is an
    angle in units of $\pi$, whatever the lengths"""
    draw = Draw(seed)
    basis = draw.orthogonal(5)
    turns = draw.uniform(6, low=0.05, high=0.95)
    x = basis[0].expand(6, 5)
    y = 3.0 * (torch.cos(math.pi * turns)[:, None] * basis[0] + torch.sin(math.pi * turns)[:, None] * basis[1])
    return small((angle(x, y) - turns).abs(), "vectors turned by known angles")


@claim("curse-of-depth/eq1-average", "Sec. 2.1, Eq. 1, 'the average distance over 256K tokens'", "VAGUE")
def eq1_average(seed: int) -> Evidence:
    """the distance is averaged over tokens

    Correct: the released code takes the last token of each window only, as Gromov et al. do, and compares the last layer
    after the final norm
    """
    X = Draw(seed).normal(8, 16)
    states = stream(make_stack(seed, 2), X)
    distance = angle(states[0], states[2])
    return readings({"all tokens": float(distance.mean()), "last token": float(distance[-1])}, "two blocks, 8 tokens")


@claim("curse-of-depth/eq2-eq3", "Sec. 3, Eqs. 2-3; Eq. 20", "HOLDS", uses=[eq.pre])
def eq2_eq3(seed: int) -> Evidence:
    r"""$x'_\ell = x_\ell + \mathrm{Attn}(\mathrm{LN}(x_\ell))$, $y = x_{\ell+1} = x'_\ell +
    \mathrm{FFN}(\mathrm{LN}(x'_\ell))$"""
    block, X = make_block(seed), Draw(seed).normal(5, 16)
    Y = X + written_attention(block, rms_norm(X))
    Z = Y + torch.relu(rms_norm(Y) @ block.feedforward.W_1) @ block.feedforward.W_2
    return agrees(block(X), Z, "hessiankit's block with placement 'pre' against Eqs. 2-4 with torch's fused attention")


def written_attention(block: TransformerBlock, N: Tensor) -> Tensor:
    """Return concat(head_1, head_2) W_O of Eq. 4 with torch's fused attention."""
    W: Any = block.attention
    heads = []
    for h in (slice(0, 8), slice(8, 16)):
        Q, K, V = (N @ M[:, h] for M in (W.W_Q, W.W_K, W.W_V))
        heads.append(F.scaled_dot_product_attention(Q[None], K[None], V[None], is_causal=True)[0])
    return torch.cat(heads, 1) @ W.W_O


@claim("curse-of-depth/eq4", "Sec. 3, Eq. 4; Eqs. 24-25", "HOLDS", uses=[TransformerBlock])
def eq4(seed: int) -> Evidence:
    r"""$\mathrm{Attn}(x) = W_O(\mathrm{concat}(\mathrm{head}_1(x),\dots,\mathrm{head}_h(x)))$ with $\mathrm{head}_i(x) =
    \mathrm{softmax}\left(\frac{(W_{Qi}x)^\top(W_{Ki}X)}{\sqrt{d_{\mathrm{head}}}}\right)(W_{Vi}X)^\top$"""
    block, X = make_block(seed, causal=False), Draw(seed).normal(5, 16).T  # tokens are columns in Eq. 4
    W: Any = block.attention
    heads = []
    for h in (slice(0, 8), slice(8, 16)):
        Q, K, V = (M[:, h].T @ X for M in (W.W_Q, W.W_K, W.W_V))
        heads.append(torch.softmax(Q.T @ K / math.sqrt(8), -1) @ V.T)
    return agrees(block.attention(X.T), (W.W_O.T @ torch.cat(heads, 1).T).T, "columns as tokens against hessiankit's rows")


@claim("curse-of-depth/eq5", "Sec. 3, Eq. 5", "HOLDS", uses=[LayerNormAt, FeedForwardAt.jacobian])
def eq5(seed: int) -> Evidence:
    r"""$\frac{\partial\,\mathrm{Pre\text{-}LN}(x)}{\partial x} = I + \frac{\partial
    f(\mathrm{LN}(x))}{\partial\,\mathrm{LN}(x)}\frac{\partial\,\mathrm{LN}(x)}{\partial x}$"""
    draw = Draw(seed)
    X, W_1, W_2 = draw.normal(3, 5), draw.normal(5, 7), draw.normal(7, 5)
    norm = LayerNormAt(X)
    network = FeedForwardAt(norm.value, W_1, W_2, residual=False, activation="silu")
    closed = torch.eye(15, dtype=torch.float64) + dense(network.jacobian("Y") @ norm.jacobian("X"))
    reference = jacobian_of(lambda X: X + F.silu(F.layer_norm(X, (5,), eps=0.0) @ W_1) @ W_2, X)
    return agrees(closed, reference, "the closed forms of the chapters against autograd")


@claim("curse-of-depth/eq12", "Sec. 4, Eq. 12; Eq. 51", "HOLDS", uses=[eq.lns])
def eq12(seed: int) -> Evidence:
    r"""$\mathbf{h}^{(\ell)} = \mathrm{LayerNorm}(\mathbf{h}^{(\ell)})\times\frac{1}{\sqrt\ell}$ with $\ell$ from 1, in front
    of both sub-layers"""
    block, X = make_block(seed, 5, "lns"), Draw(seed).normal(5, 16)
    Y = X + written_attention(block, rms_norm(X) / math.sqrt(5))
    Z = Y + torch.relu(rms_norm(Y) / math.sqrt(5) @ block.feedforward.W_1) @ block.feedforward.W_2
    return agrees(block(X), Z, "hessiankit's placement 'lns' at l = 5 against Eq. 51")


@claim("curse-of-depth/abstract-variance", "Abstract; Sec. 8", "WRONG AS PRINTED", uses=[eq.lns])
def abstract_variance(seed: int) -> Evidence:
    r"""LNS 'scales the variance of output of the layer normalization inversely by the square root of its depth'

    Correct: it scales the output by $1/\sqrt\ell$ and so its variance by $1/\ell$ (Eq. 12)
    """
    X, factor = Draw(seed).normal(20, 64), make_block(seed, 9, "lns").factor or 0.0
    ratio = float((factor * rms_norm(X)).var() / rms_norm(X).var())
    return off(relative_error(1 / math.sqrt(9), ratio), "l = 9", corrected=relative_error(1 / 9, ratio), above=0.5)


@claim(
    "curse-of-depth/lns-only",
    "Table 8, 'LNS Only After Attn', 'LNS Only After FFN'",
    "VAGUE",
    uses=[eq.lns_after_ffn, eq.lns_ffn_ln, eq.lns_after_attention, eq.lns_attention_ln],
)
def lns_only(seed: int) -> Evidence:
    r"""the scaling of one sub-layer only

    Correct: what the sub-layer returns times $1/\sqrt\ell$, or LNS on its norm only; not the same function
    """
    X, found = Draw(seed).normal(5, 16), {}
    for name in ("lns-only-attention", "lns-only-attention-ln", "lns-only-ffn", "lns-only-ffn-ln"):
        found[PLACEMENTS[name].description] = float(make_block(seed, 4, name, activation="gelu")(X).norm())
    return readings(found, "norm of the same block's output at l = 4")


@claim("curse-of-depth/lns-before-ln", "Table 8, 'Before LN'", "WRONG AS PRINTED", uses=[eq.lns_before_ln])
def lns_before_ln(seed: int) -> Evidence:
    r"""scaling the input of the norm by $1/\sqrt\ell$ is a method of its own: perplexity 26.97 against 26.73 of Pre-LN

    Correct: the norm undoes it: it is Pre-LN up to $\epsilon$, and 0.24 is the difference of two runs of one model
    """
    X = Draw(seed).normal(5, 16)
    pre, before = make_block(seed, 9), make_block(seed, 9, "lns-before-ln")
    return off(
        abs(26.97 / 26.73 - 1), "perplexities; outputs of the two blocks at l = 9", corrected=relative_error(before(X), pre(X))
    )


@claim("ours/lns-gain", "The Curse of Depth, Eq. 12", "HOLDS", uses=[eq.lns, eq.pre])
def lns_gain(seed: int) -> Evidence:
    r"""LNS is Pre-LN with gains $\gamma_\ell/\sqrt\ell$: the same function, so that the factor folds into the gain"""
    X = Draw(seed).normal(5, 16)
    lns, pre = make_block(seed, 5, "lns", affine=True), make_block(seed, 5, affine=True)
    norms: Any = (pre.norm_1, pre.norm_2)
    for norm in norms:
        norm.weight /= math.sqrt(5)
    return agrees(lns(X), pre(X), "l = 5")


@claim("ours/lns-gain-curvature", "The Curse of Depth, Eq. 12", "HOLDS", uses=[hessian])
def lns_gain_curvature(seed: int) -> Evidence:
    r"""in these two forms the Hessian agrees in all weights; rows of a gain differ by $1/\sqrt\ell$, its own block by
    $1/\ell$"""
    X, target = Draw(seed).normal(1, 3, 4), Draw(seed + 1).normal(1, 3, 4)
    options = {"d_model": 4, "d_ff": 4, "n_heads": 1, "affine": True, "activation": "gelu"}
    lns, pre = (make_block(seed, 4, name, **options).requires_grad_() for name in ("lns", "pre"))
    norms: Any = (pre.norm_1, pre.norm_2)
    with torch.no_grad():
        for norm in norms:
            norm.weight /= 2
    names = ["feedforward.W_1", "norm_2.weight"]
    of_lns, of_pre = (hessian(block, X, target, params=names) for block in (lns, pre))
    found, expected = [], []
    for a in names:
        for b in names:
            factor = 0.5 ** ("norm" in a) * 0.5 ** ("norm" in b)
            found.append(of_lns.block(a, b))
            expected.append(factor * of_pre.block(a, b))
    return agrees(found, expected, "blocks of W_1 and gamma_2 at l = 4")


@claim("curse-of-depth/lns-renumbered", "Eq. 12 with Sec. 2, layer pruning", "HOLDS UNDER ASSUMPTION", uses=[TransformerBlock])
def renumbered(seed: int) -> Evidence:
    r"""a layer is pruned and the rest stays as it is

    Needs: each block keeps its $\ell$; a model that is saved without a block and numbered anew, as the released script does,
    has other factors behind it
    """
    X, blocks = Draw(seed).normal(5, 16), make_stack(seed, 4, "lns")
    kept = [blocks[0], *blocks[2:]]
    anew = []
    for layer, block in enumerate(kept, 1):
        moved = make_block(seed, layer, "lns")
        moved.load_state_dict(
            {name: v for name, v in block.state_dict().items() if name in dict(moved.named_parameters())}, strict=False
        )
        anew.append(moved)
    Y = X
    for block, layer in zip(kept, (1, 3, 4), strict=True):
        Z = Y + written_attention(block, rms_norm(Y) / math.sqrt(layer))
        Y = Z + torch.relu(rms_norm(Z) / math.sqrt(layer) @ block.feedforward.W_1) @ block.feedforward.W_2
    holds = agrees(stream(kept, X)[-1], Y, "4 blocks without the second")
    return assumed(holds, relative_error(stream(anew, X)[-1], Y), above=1e-3)


@claim(
    "curse-of-depth/norm-kind", "Sec. 3, 'LN denotes the layer normalization function'", "VAGUE", uses=[LayerNormAt, RMSNormAt]
)
def norm_kind(seed: int) -> Evidence:
    """LN is layer normalization

    Correct: all LLaMA runs have RMSNorm (Sec. 5.1)
    """
    X = Draw(seed).normal(5, 16) + 1
    return readings({"LayerNorm": float(LayerNormAt(X).value[0, 0]), "RMSNorm": float(RMSNormAt(X).value[0, 0])}, "an entry")


@claim("curse-of-depth/embedding-std", "Sec. 5.1; the theory, wherever sigma of x_1 enters", "OMITTED", uses=[initialise])
def embedding_std(seed: int) -> Evidence:
    """the standard deviation of the embedding is not given

    Correct: 0.632 in the released code until January 2026, 0.02 since: the first block's Jacobian feels it, and with it the
    theory
    """
    gain, tokens = [], Draw(seed).integers(0, 32, 1, 6)
    for std in (0.632, 0.02):
        model = Transformer(32, 16, 32, 1, 2, placement="pre", norm="rmsnorm", rotary=True, causal=True).double()
        initialise(model, "normal", seed=seed, embedding_std=std)
        X = model.embedding(tokens)[0].detach()
        gain.append(float(jacobian_of(model.blocks[0], X).norm() / math.sqrt(X.numel())))
    return bounded(5 * gain[0] / gain[1], f"5 times the first over the second; rms gain of block 1: {gain[0]:.2f}, {gain[1]:.2f}")
