"""Blocks: Eqs. 1-11, Figs. 2 and 4, Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.multihead import MultiHeadAttentionAt, split_heads
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks import placements as eq
from hessiankit.blocks.attention import Attention
from hessiankit.blocks.placements import placement_of_layer
from hessiankit.formulas.block_at import BlockAt, block_stage, input_stage
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, counts, relative_error, small, wrong
from hessiankit.ledger.hybridnorm.definitions import attn, mha, rms_norm, swiglu
from hessiankit.ledger.hybridnorm.jacobians import dense
from hessiankit.ledger.registry import claim

HEADS = 2
Written = Callable[[Tensor, dict[str, Tensor]], Tensor]


def make(placement: str, *, d: int = 6, **options: Any) -> TransformerBlock:
    """Return a block as the paper defines it: RMSNorm without gain and eps, SwiGLU, two heads."""
    fixed: dict[str, Any] = {"norm": "rmsnorm", "eps": 0.0, "affine": False, "activation": "swiglu"}
    return TransformerBlock(d, 5, HEADS, placement, **{**fixed, **options}).double()


def generic(block: TransformerBlock, draw: Draw) -> dict[str, Tensor]:
    """Give the block generic weights and return them by letter."""
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(draw.normal(*p.shape))
    return {name.split(".")[-1]: p.detach() for name, p in block.named_parameters()}


def compare(seed: int, placement: str, written: Written) -> Evidence:
    """Compare a placement with its printed equations: the block, and its Jacobian in closed form with autograd of the print."""
    return small(errors(seed, placement, written), "the block against the print, its Jacobian w.r.t. W_Q against autograd")


def errors(seed: int, placement: str, written: Written) -> list[float]:
    """Return the two errors of ``compare``."""
    draw = Draw(seed)
    block = make(placement)
    W, X = generic(block, draw), draw.normal(3, 6)
    Z = block_stage(BlockAt(block, {name: p.detach() for name, p in block.named_parameters()}), input_stage(X))
    reference = jacobian_of(lambda W_Q: written(X, {**W, "W_Q": W_Q}), W["W_Q"])
    return [relative_error(block(X), written(X, W)), relative_error(dense(Z.jacobian("W_Q")), reference)]


@claim("hybridnorm/eq1", "Sec. 3.1, Eq. 1", "HOLDS", uses=[AttentionAt])
def eq1(seed: int) -> Evidence:
    r"""$\mathrm{attn}(Q,K,V) = \mathrm{softmax}(QK^\top/\sqrt{d_k})V$"""
    draw = Draw(seed)
    X, W_Q, W_K, W_V = draw.normal(4, 5), draw.normal(5, 3), draw.normal(5, 3), draw.normal(5, 3)
    Q, K, V = X @ W_Q, X @ W_K, X @ W_V
    fused = torch.nn.functional.scaled_dot_product_attention(Q[None], K[None], V[None])[0]
    return agrees([AttentionAt(X, W_Q, W_K, W_V).value, attn(Q, K, V)], [fused, fused], "against torch's fused attention")


@claim("hybridnorm/eq2", "Sec. 3.1, Eq. 2", "HOLDS", uses=[MultiHeadAttentionAt, Attention])
def eq2(seed: int) -> Evidence:
    r"""$\mathrm{MHA}(X) = \mathrm{Concat}(\mathrm{head}_1,\ldots,\mathrm{head}_h)W_O$, heads by $\mathrm{Split}$, $d_k = d/h$"""
    draw = Draw(seed)
    block = make("pre")
    W, X = generic(block, draw), draw.normal(3, 6)
    closed = MultiHeadAttentionAt(X, split_heads(W["W_Q"], W["W_K"], W["W_V"], W["W_O"], HEADS)).value
    other = torch.nn.MultiheadAttention(6, HEADS, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        other.in_proj_weight.copy_(torch.cat([W["W_Q"].T, W["W_K"].T, W["W_V"].T]))
        other.out_proj.weight.copy_(W["W_O"].T)
        reference = other(X[None], X[None], X[None], need_weights=False)[0][0]
    return agrees([closed, block.attention(X), mha(X, W, HEADS)], [reference] * 3, "against torch's multi-head attention")


@claim("hybridnorm/eq3-4", "Sec. 3.1, Eqs. 3-4, Fig. 2a", "HOLDS", uses=[eq.post])
def eq3_4(seed: int) -> Evidence:
    r"""Post-Norm: $Y = \mathrm{Norm}(\mathrm{MHA}(X) + X)$, $X' = \mathrm{Norm}(\mathrm{FFN}(Y) + Y)$"""

    def written(X: Tensor, W: dict[str, Tensor]) -> Tensor:
        Y = rms_norm(mha(X, W, HEADS) + X)
        return rms_norm(swiglu(Y, W) + Y)

    return compare(seed, "post", written)


@claim("hybridnorm/eq5-6", "Sec. 3.1, Eqs. 5-6, Fig. 2b", "HOLDS", uses=[eq.pre])
def eq5_6(seed: int) -> Evidence:
    r"""Pre-Norm: $Y = \mathrm{MHA}(\mathrm{Norm}(X)) + X$, $X' = \mathrm{FFN}(\mathrm{Norm}(Y)) + Y$"""

    def written(X: Tensor, W: dict[str, Tensor]) -> Tensor:
        Y = mha(rms_norm(X), W, HEADS) + X
        return swiglu(rms_norm(Y), W) + Y

    return compare(seed, "pre", written)


@claim("hybridnorm/eq7", "Sec. 3.2, Eq. 7", "HOLDS", uses=[Attention])
def eq7(seed: int) -> Evidence:
    r"""$\mathrm{attn}_{QKV}(Q,K,V) = \mathrm{softmax}(\mathrm{Norm}(Q)\mathrm{Norm}(K)^\top/\sqrt{d_k})\,\mathrm{Norm}(V)$,
    the norms on each head"""
    draw = Draw(seed)
    block = make("hybridnorm")
    W, X = generic(block, draw), draw.normal(3, 6)
    return agrees(block.attention(X), mha(X, W, HEADS, "qkv"), "two heads")


def hybridnorm_block(X: Tensor, W: dict[str, Tensor]) -> Tensor:
    """Eqs. 8 and 9."""
    Y = mha(X, W, HEADS, "qkv") + X
    return swiglu(rms_norm(Y), W) + rms_norm(Y)


@claim("hybridnorm/eq8-9", "Sec. 3.2, Eqs. 8-9, Fig. 2d", "HOLDS", uses=[eq.bare_post])
def eq8_9(seed: int) -> Evidence:
    r"""HybridNorm: $Y = \mathrm{MHA}_{QKV}(X) + X$, $X' = \mathrm{FFN}(\mathrm{Norm}(Y)) + \mathrm{Norm}(Y)$"""
    return compare(seed, "hybridnorm", hybridnorm_block)


@claim("hybridnorm/qk-norm-fig2c", "Fig. 2c and Eqs. 47-48", "HOLDS", uses=[eq.pre])
def fig2c(seed: int) -> Evidence:
    """'Pre-Norm with QK-Norm' of Fig. 2c is Pre-QK-Pre"""

    def written(X: Tensor, W: dict[str, Tensor]) -> Tensor:
        Y = mha(rms_norm(X), W, HEADS, "qk") + X
        return swiglu(rms_norm(Y), W) + Y

    return compare(seed, "pre-qk-pre", written)


@claim("hybridnorm/algorithm1", "App. D, Algorithm 1", "HOLDS", uses=[eq.bare_post])
def algorithm1(seed: int) -> Evidence:
    """the pseudocode is Eqs. 8-9 with norms on each head and the normalised residual"""
    draw = Draw(seed)
    block = make("hybridnorm")
    W, tokens = generic(block, draw), draw.normal(2, 3, 6)
    attn_proj = torch.cat([W["W_Q"], W["W_K"], W["W_V"]], 1)  # one projection, d to 3d

    def forward(x: Tensor) -> Tensor:
        res = x
        q, k, v = (x @ attn_proj).split((6, 6, 6), dim=-1)
        q, k, v = (y.view(2, 3, HEADS, 3) for y in (q, k, v))
        q, k, v = (rms_norm(y).transpose(1, 2) for y in (q, k, v))
        x = attn(q, k, v).transpose(1, 2).reshape(2, 3, 6) @ W["W_O"] + res
        x = rms_norm(x)
        return swiglu(x, W) + x

    return agrees(block(tokens), forward(tokens), "two sequences")


@claim("hybridnorm/post-norm-in-ffn", "Abstract, Sec. 1 and 3.2", "WRONG AS PRINTED", uses=[eq.bare_post])
def post_norm_in_ffn(seed: int) -> Evidence:
    r"""'Post-Norm in the FFN', with Post-Norm as in Eq. 4

    Correct: Eq. 9: the norm stands before the network and feeds branch and residual, not $\mathrm{Norm}(\mathrm{FFN}(Y) + Y)$
    """
    draw = Draw(seed)
    block = make("hybridnorm")
    W, X = generic(block, draw), draw.normal(3, 6)
    Y = mha(X, W, HEADS, "qkv") + X
    return wrong(rms_norm(swiglu(Y, W) + Y), block(X), "Eq. 4 in place of Eq. 9", corrected=hybridnorm_block(X, W), above=0.05)


@claim("hybridnorm/remark31", "Remark 3.1", "OMITTED", uses=[placement_of_layer])
def remark31(seed: int) -> Evidence:
    """Mix-LN: Post-Norm in the earlier layers, Pre-Norm in the deeper ones

    Correct: how many: a quarter, as in its public code (3 of 12, 6 of 24)
    """
    names = [placement_of_layer("mix-ln", layer, 16).name for layer in range(1, 17)]
    in_order = names == sorted(names, key=("post", "pre").index)
    return counts(names.count("post") if in_order else -1, 4, "Post-Norm blocks of 16, in front of the others")


@claim("ours/full-norms-differ", "HybridNorm, Eqs. 7 and 40, Algorithm 1", "HOLDS", uses=[Attention])
def full_norms(seed: int) -> Evidence:
    """norms of each head and norms over all heads side by side give different functions of the same weights"""
    draw, distances = Draw(seed), []
    for _ in range(5):
        block, full = make("hybridnorm"), make("hybridnorm", norm_scope="full")
        generic(block, draw)
        full.load_state_dict(block.state_dict())
        X = draw.normal(3, 6)
        distances.append(relative_error(full(X), block(X)))
    return counts(sum(distance > 1e-3 for distance in distances), 5, f"of 5 draws, by {min(distances):.2g} and more")
