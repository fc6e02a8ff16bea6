"""Functions that two parametrisations share, and how their Hessians follow from each other."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from model_zoo import generic
from torch import Tensor

import hessiankit as hk
from hessiankit.blocks.attention import Attention

WIDTH, LENGTH = 6, 4


def unit(y: Tensor) -> Tensor:
    return y / y.square().mean(-1, keepdim=True).sqrt()


def test_layernorm_scaling_is_pre_norm_in_other_units() -> None:
    sizes = {"d_model": 4, "d_ff": 5, "n_blocks": 3, "n_heads": 2, "bias": True}
    lns, pre = (generic(hk.VisionTransformer(4, 3, 5, placement=name, **sizes)) for name in ("lns", "pre"))
    factors = {}
    with torch.no_grad():
        for name, p in pre.named_parameters():
            if name.startswith("blocks.") and ".norm_" in name:
                factors[name] = (int(name.split(".")[1]) + 1) ** -0.5
                p.mul_(factors[name])
    x, labels = draw(2, 3, 4), torch.tensor([1, 4])
    ours, other = (hk.hessian(m, x, labels, loss="cross_entropy") for m in (lns, pre))
    assert len(factors) == 12
    assert abs(ours.loss - other.loss) < 1e-14
    D = torch.cat([torch.full_like(p.detach().reshape(-1), factors.get(name, 1.0)) for name, p in pre.named_parameters()])
    expected = D[:, None] * other.matrix * D  # of theta -> loss(D theta), from that of the loss at D theta
    assert torch.allclose(ours.matrix, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    plain = [n for n in ours.names if n not in factors]
    assert torch.allclose(ours.block(plain[-3], plain[3]), other.block(plain[-3], plain[3]), rtol=0, atol=1e-13)
    assert not torch.allclose(ours.matrix, other.matrix, atol=1e-3)


@pytest.mark.parametrize(("norms", "same"), [("qkv", True), ("qkvc", True), ("qk", False), ("kv", False), ("qkc", False)])
def test_norms_of_q_k_v_absorb_a_norm_in_front(norms: str, same: bool) -> None:
    """MHA(g o Norm(X); W) = MHA(X; diag(g) W) where queries, keys and values are all normalised: HybridNorm's redundancy."""
    attention = generic(Attention(WIDTH, 2, output_projection=True, norms=norms, norm="rmsnorm", eps=0.0))
    x, g = draw(2, LENGTH, WIDTH), 1 + draw(WIDTH, seed=3)
    front = attention(unit(x) * g)
    with torch.no_grad():
        for W in (attention.W_Q, attention.W_K, attention.W_V):
            W.mul_(g[:, None])
    assert torch.allclose(front, attention(x), rtol=1e-12, atol=1e-13) is same


def test_the_redundant_norm_leaves_the_other_blocks_of_the_hessian_alone() -> None:
    options = {"n_heads": 2, "norm": "rmsnorm", "eps": 0.0}
    one, two = (generic(hk.TransformerBlock(WIDTH, 5, placement=name, **options)) for name in ("pre-qkv-post", "hybridnorm"))
    state = one.state_dict()
    gain = state.pop("norm_1.weight")
    for name in ("W_Q", "W_K", "W_V"):
        state[f"attention.{name}"] = gain[:, None] * state[f"attention.{name}"]
    two.load_state_dict(state)
    x, target = draw(2, LENGTH, WIDTH), draw(2, LENGTH, WIDTH, seed=5)
    other, ours = (hk.hessian(m, x, target) for m in (one, two))
    for name in ("feedforward.W_1", "feedforward.W_2", "attention.W_O"):
        scale = float(ours.block(name, name).abs().max())
        assert torch.allclose(other.block(name, name), ours.block(name, name), rtol=0, atol=1e-12 * scale)
    expected = gain.repeat_interleave(WIDTH)[:, None] * ours.block("attention.W_Q", "attention.W_O")
    assert torch.allclose(other.block("attention.W_Q", "attention.W_O"), expected, rtol=0, atol=1e-12)
