"""Figures: gradients and curvature by placement at initialisation."""

from __future__ import annotations

import math

import torch

from hessiankit.blocks import Transformer
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import measured
from papers.hybridnorm.definitions import HeadPoint
from papers.hybridnorm.theorem_pre import pre_norm_norms, qkv_norm_norms, ratios
from papers.registry import claim

LAYERS = 32


def gradient_norms(seed: int, placement: str, initialisation: str = "megatron") -> list[float]:
    """Return the norm of each block's gradient at initialisation: 32 layers, width 32, a uniform random language."""
    model = Transformer(
        64, 32, 64, LAYERS, 4, placement, norm="rmsnorm", activation="swiglu", causal=True, rotary=True,
        initialisation=initialisation, seed=seed,
    ).double()  # fmt: skip
    ids = Draw(seed).integers(0, 64, 4, 17)
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).reshape(-1, 64), ids[:, 1:].reshape(-1))
    loss.backward()  # type: ignore[no-untyped-call]
    blocks = ((p.grad for p in block.parameters() if p.grad is not None) for block in model.blocks)
    return [math.sqrt(sum(float(g.square().sum()) for g in grads)) for grads in blocks]


@claim("fig5-pre", "Fig. 5, Sec. 4.5, step 1", "SEEN AT THIS SIZE")
def fig5_pre(seed: int) -> Evidence:
    """Pre-Norm amplifies gradients on their way back to the first layers"""
    norms = gradient_norms(seed, "pre")
    factor = norms[0] / norms[-1]
    return measured(factor, factor > 2, f"first over last of {LAYERS} blocks, width 32, Megatron initialisation")


@claim("fig5-post", "Fig. 5, Sec. 4.5, step 1", "NOT SEEN AT THIS SIZE")
def fig5_post(seed: int) -> Evidence:
    """Post-Norm suffers from vanishing gradients
    Correct: flat to within a factor of 2 at 32 layers and width 32, with the norm behind (Eqs. 3-4) or in front (App. E)"""
    factors = [norms[0] / norms[-1] for norms in (gradient_norms(seed, name) for name in ("post", "post-shifted"))]
    text = " and ".join(f"{factor:.2f}" for factor in factors)
    flat = all(0.5 < factor < 2 for factor in factors)
    return measured(min(factors), flat, f"first over last block: {text}; Megatron initialisation")


@claim("fig5-hybridnorm", "Fig. 5, Sec. 4.5, step 1", "NOT SEEN AT THIS SIZE")
def fig5_hybridnorm(seed: int) -> Evidence:
    """HybridNorm has a well-balanced gradient flow
    Correct: from the second block on. The first block's gradient is several times larger, because its norm divides by a
    small embedding; in the starred variant so is the second block's"""
    norms, starred = gradient_norms(seed, "hybridnorm"), gradient_norms(seed, "hybridnorm*")
    spike, rest = norms[0] / norms[-1], norms[1] / norms[-1]
    detail = f"first over last block; second over last {rest:.2f}, in the starred variant {starred[1] / starred[-1]:.2f}"
    return measured(spike, spike > 4 and 0.5 < rest < 2 and starred[1] > 3 * starred[-1], detail)


@claim("ours/embednorm-removes-the-spike", "HybridNorm, Figs. 4 and 5", "SEEN AT THIS SIZE")
def embednorm(seed: int) -> Evidence:
    """a norm after the embedding removes the spike of the first block's gradient (the paper finds that it does not help)"""
    norms = gradient_norms(seed, "embednorm-hybridnorm")
    factor = norms[0] / norms[-1]
    return measured(factor, 0.5 < factor < 2, "first over last block, Megatron initialisation")


@claim("ours/qkv-jacobians-at-initialisation", "HybridNorm, Theorem A.3", "SEEN AT THIS SIZE")
def jacobians_at_initialisation(seed: int) -> Evidence:
    """at the paper's initialisation the Jacobians of QKV-Norm are larger than those of Pre-Norm, for all four weights:
    QKV-Norm decouples scales, it does not make gradients smaller"""
    draw = Draw(seed)
    s, d, d_k = 8, 16, 4
    found = []
    for _ in range(10):
        weights = [draw.normal(*shape, std=1 / math.sqrt(2.5 * d)) for shape in ((d, d_k), (d, d_k), (d, d_k), (d_k, d))]
        head = HeadPoint(draw.normal(s, d), *weights)
        found.append(ratios(qkv_norm_norms(head), pre_norm_norms(head)))
    means = [math.exp(sum(math.log(each[k]) for each in found) / len(found)) for k in range(4)]
    text = ", ".join(f"{letter} {mean:.1f}" for letter, mean in zip(("W_Q", "W_K", "W_V", "W_O"), means, strict=True))
    return measured(min(means), min(means) > 1.2, f"geometric means over 10 draws: {text}")
