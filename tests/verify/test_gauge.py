"""Gauge dimensions against numerical nullities, changes of units, and functions that two parametrisations share."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from model_zoo import generic
from torch import Tensor

import hessiankit as hk
from hessiankit.blocks.attention import Attention, rotate
from hessiankit.verify.identities import gauge_dimension, rescaled

WIDTH, LENGTH = 6, 4


def unit(y: Tensor) -> Tensor:
    return y / y.square().mean(-1, keepdim=True).sqrt()


def head(weights: tuple[Tensor, ...], x: Tensor, normed: str, rotary: bool) -> Tensor:
    q, k, v = (unit(x @ W) if letter in normed else x @ W for letter, W in zip("qkv", weights, strict=False))
    if rotary:
        q, k = rotate(q), rotate(k)
    c = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
    return (unit(c) if "c" in normed else c) @ weights[3]


@pytest.mark.parametrize("normed", ["", "qk", "qkv", "qkvc", "qkc", "kv", "kc", "c"])
@pytest.mark.parametrize("rotary", [False, True])
def test_dimension_is_the_nullity_of_the_generators(normed: str, rotary: bool) -> None:
    """The derivative of the head's outputs, on enough inputs, along each of the 4 d^2 generators."""
    d = 4
    W_Q, W_K, W_V, W_O = *(draw(WIDTH, d, seed=s) for s in (1, 2, 3)), draw(d, WIDTH, seed=4)
    x = draw(8, LENGTH, WIDTH, seed=5)

    def outputs(G: Tensor) -> Tensor:
        return head((W_Q + W_Q @ G[0], W_K + W_K @ G[1], W_V + W_V @ G[2], W_O + G[3] @ W_O), x, normed, rotary)

    J = torch.func.jacfwd(outputs)(torch.zeros(4, d, d, dtype=torch.float64))
    values = torch.linalg.svdvals(J.reshape(-1, 4 * d * d))
    assert int((values < 1e-10 * values[0]).sum()) == gauge_dimension(d, normed=normed, rotary=rotary)


def test_gauge_dimension_errors() -> None:
    with pytest.raises(hk.InputError, match="normed='qx'"):
        gauge_dimension(4, normed="qx")
    with pytest.raises(hk.InputError, match="head_dim=3, rotary=True"):
        gauge_dimension(3, rotary=True)


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
    expected = rescaled(other.matrix, other.slices, factors)
    assert torch.allclose(ours.matrix, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    plain = [n for n in ours.names if n not in factors]
    assert torch.allclose(ours.block(plain[-3], plain[3]), other.block(plain[-3], plain[3]), rtol=0, atol=1e-13)
    assert not torch.allclose(ours.matrix, other.matrix, atol=1e-3)


def test_rescaled_errors() -> None:
    with pytest.raises(hk.InputError, match="no parameter named 'x'"):
        rescaled(torch.eye(2), {"w": slice(0, 2)}, {"x": 2.0})


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
