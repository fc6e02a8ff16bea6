"""Exact identities between placements: the same function in other parameters."""

from __future__ import annotations

import math

import pytest
import torch
from blocks_reference import draw, randomised
from torch import nn

import hessiankit as hk

NAMES = {"d_model": 6, "d_ff": 5, "n_heads": 2, "activation": "gelu", "causal": True}


def chain(placement: str, layers: int = 3, **options) -> list[hk.TransformerBlock]:
    return [hk.TransformerBlock(**{**NAMES, "placement": placement, "n_layers": layers, "layer": layer, **options}).double()
            for layer in range(1, layers + 1)]  # fmt: skip


def generic(blocks: list[hk.TransformerBlock]) -> list[hk.TransformerBlock]:
    return [randomised(block, seed) for seed, block in enumerate(blocks)]


def run(blocks: list[hk.TransformerBlock], x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-13) -> bool:
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_lns_is_pre_with_its_gains_divided(norm):
    """The Curse of Depth, Eq. 12: gamma / sqrt(l) and, for LayerNorm, beta / sqrt(l)."""
    scaled, pre = generic(chain("lns", norm=norm)), chain("pre", norm=norm)
    for layer, (other, own) in enumerate(zip(scaled, pre, strict=True), start=1):
        own.load_state_dict({n: v for n, v in other.state_dict().items() if n != "depth"})
        for p in (*own.norm_1.parameters(), *own.norm_2.parameters()):
            p.data /= math.sqrt(layer)
    x = draw(4, 6)
    assert close(run(pre, x), run(scaled, x))
    assert not close(run(generic(chain("pre", norm=norm)), x), run(scaled, x))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_post_on_a_norm_is_a_norm_of_post_shifted(norm):
    """HybridNorm, App. E: N_1 is the first shifted norm; each norm of Eqs. 3-4 is the next one in front of a sub-layer."""
    shifted = generic(chain("post-shifted", norm=norm))
    post = chain("post", norm=norm)
    last = randomised(nn.LayerNorm(6) if norm == "layernorm" else nn.RMSNorm(6, eps=1e-5), 9)
    fronts = [n for block in shifted for n in (block.norm_1, block.norm_2)] + [last]
    for k, (own, other) in enumerate(zip(post, shifted, strict=True)):
        own.attention, own.feedforward = other.attention, other.feedforward
        own.norm_1, own.norm_2 = fronts[2 * k + 1], fronts[2 * k + 2]
    x = draw(4, 6)
    assert close(run(post, fronts[0](x)), last(run(shifted, x)))
    assert not close(run(post, x), last(run(shifted, x)), 1e-3)


@pytest.mark.parametrize(("with_norm", "without"), [("pre-qkv-post", "hybridnorm"), ("pre-qkv-pre", "qkv-pre")])
def test_qkv_norms_make_the_norm_in_front_redundant(with_norm, without):
    """MHA_QKV(g N(X); W) = MHA_QKV(X; diag(g) W) for RMSNorm and eps = 0."""
    options = {"norm": "rmsnorm", "eps": 0.0}
    other, own = generic(chain(with_norm, **options)), chain(without, **options)
    for a, b in zip(other, own, strict=True):
        b.load_state_dict({n: v for n, v in a.state_dict().items() if not n.startswith("norm_1")})
        for letter in "QKV":
            weight = getattr(b.attention, f"W_{letter}")
            weight.data = a.norm_1.weight.data[:, None] * weight.data
    assert close(run(own, draw(4, 6)), run(other, draw(4, 6)), 1e-12)
