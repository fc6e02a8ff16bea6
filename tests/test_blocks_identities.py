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


def test_starred_hybridnorm_is_first_qkv_pre_without_eps():
    options = {"norm": "rmsnorm", "eps": 0.0}
    starred, first = chain("hybridnorm*", **options), chain("first-qkv-pre", **options)
    for a, b in zip(generic(starred), first, strict=True):
        if a.norm_1 is not None:
            nn.init.ones_(a.norm_1.weight)
        b.load_state_dict({n: v for n, v in a.state_dict().items() if not n.startswith("norm_1")})
    assert close(run(first, draw(4, 6)), run(starred, draw(4, 6)), 1e-12)


@pytest.mark.parametrize("inside", ["qk", "kv", "qkc"])
def test_fewer_norms_inside_leave_the_norm_in_front(inside):
    options = {"norm": "rmsnorm", "eps": 0.0}
    other, own = generic(chain(f"pre-{inside}-pre", **options)), chain(f"{inside}-pre", **options)
    for a, b in zip(other, own, strict=True):
        nn.init.ones_(a.norm_1.weight)
        b.load_state_dict({n: v for n, v in a.state_dict().items() if not n.startswith("norm_1")})
    assert not close(run(own, draw(4, 6)), run(other, draw(4, 6)), 1e-3)


def test_scaling_before_a_norm_does_nothing_without_eps():
    """The Curse of Depth, Table 8: "Before LN" is Pre-Norm."""
    before, pre = generic(chain("lns-before-ln", eps=0.0)), generic(chain("pre", eps=0.0))
    assert close(run(before, draw(4, 6)), run(pre, draw(4, 6)), 1e-12)
    assert not close(
        run(generic(chain("lns-before-ln", eps=0.5)), draw(4, 6)), run(generic(chain("pre", eps=0.5)), draw(4, 6)), 1e-3
    )


def test_the_first_layer_of_lns_is_pre():
    assert torch.equal(generic(chain("lns"))[0](draw(4, 6)), generic(chain("pre"))[0](draw(4, 6)))


def test_hybridnorm_does_not_see_the_scale_of_queries_keys_and_values():
    """Each of W_Q, W_K, W_V of a head has a scale symmetry for eps = 0; per-head norms have one for each head."""
    (block,) = generic(chain("hybridnorm", layers=1, eps=0.0, norm="rmsnorm"))
    x = draw(4, 6)
    out = block(x)
    for letter, columns, factor in (("Q", slice(0, 3), 3.0), ("K", slice(3, 6), 0.1), ("V", slice(0, 3), 7.0)):
        getattr(block.attention, f"W_{letter}").data[:, columns] *= factor
    assert close(block(x), out)


def test_deepnorm_admin_layerscale_and_skipinit_at_neutral_scales():
    x = draw(4, 6)
    post, pre = run(generic(chain("post")), x), run(generic(chain("pre")), x)
    assert torch.equal(run(generic(chain("deepnorm", factor=1.0)), x), post)
    for placement, expected in (("admin", post), ("layerscale", pre), ("skipinit", pre)):
        blocks = generic(chain("post" if placement == "admin" else "pre"))
        scaled = chain(placement, scale_init=1.0)
        for a, b in zip(blocks, scaled, strict=True):
            b.load_state_dict(a.state_dict(), strict=False)
        assert torch.equal(run(scaled, x), expected)
    one = chain("group-ln", groups=1)
    for a, b in zip(generic(chain("pre")), one, strict=True):
        b.load_state_dict(a.state_dict())
    assert close(run(one, x), pre)
