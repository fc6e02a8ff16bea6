"""Curvature by placement, which the paper does not look at: growth of the Hessian's norm with depth at initialisation."""

from __future__ import annotations

import torch

from hessiankit.blocks import Transformer
from hessiankit.blocks import placements as eq
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import measured
from hessiankit.ledger.registry import claim

DEPTHS = (1, 8)


def hessian_norm(seed: int, placement: str, n_layers: int, *, steps: int = 15) -> float:
    """Return ||H||_2 in all parameters by power iteration with products by automatic differentiation: width 16, two heads."""
    model = Transformer(
        32, 16, 32, n_layers, 2, placement, norm="rmsnorm", activation="swiglu", causal=True, rotary=True,
        initialisation="megatron", seed=seed,
    ).double()  # fmt: skip
    draw = Draw(seed)
    ids, parameters = draw.integers(0, 32, 4, 13), list(model.parameters())
    loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).reshape(-1, 32), ids[:, 1:].reshape(-1))
    gradient = torch.autograd.grad(loss, parameters, create_graph=True)
    v, norm = tuple(draw.normal(*p.shape) for p in parameters), 1.0
    for _ in range(steps):
        norm = float(sum(x.square().sum() for x in v)) ** 0.5
        v = torch.autograd.grad(gradient, parameters, tuple(x / norm for x in v), retain_graph=True)
    return float(sum(x.square().sum() for x in v)) ** 0.5


def growth(seed: int, placements: tuple[str, ...]) -> dict[str, float]:
    """Return ||H||_2 of eight blocks over that of one."""
    shallow, deep = DEPTHS
    return {name: hessian_norm(seed, name, deep) / hessian_norm(seed, name, shallow) for name in placements}


def told(factors: dict[str, float]) -> str:
    """Return the factors in words."""
    return "8 blocks over 1: " + ", ".join(f"{name} {factor:.1f}" for name, factor in factors.items())


@claim(
    "ours/curvature-bare-residual", "HybridNorm, Eqs. 5-6 and 43-44, at initialisation", "REPRODUCED", uses=[eq.pre, eq.bare_pre]
)
def bare_residual(seed: int) -> Evidence:
    r"""without a norm on the residual (Pre-Norm, QKV-Pre) $\|H\|_2$ grows several times with depth"""
    factors = growth(seed, ("pre", "qkv-pre"))
    return measured(min(factors.values()), min(factors.values()) > 5, told(factors))


@claim(
    "ours/curvature-normed-residual",
    "HybridNorm, Eqs. 8-9 and 49-50, at initialisation",
    "REPRODUCED",
    uses=[eq.bare_post, eq.pre_post],
)
def normed_residual(seed: int) -> Evidence:
    r"""one norm on the residual in each block (HybridNorm, Pre-Post) keeps $\|H\|_2$ within a factor of 4"""
    factors = growth(seed, ("hybridnorm", "pre-post"))
    return measured(max(factors.values()), max(factors.values()) < 4, told(factors))
