"""The exact Hessian against reverse-over-reverse autograd, in every block, at 1e-12 of the block's largest entry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from curvature_reference import (
    Formula,
    assert_exact,
    draw,
    largest_error,
    mse,
    randomised,
)
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS
from hessiankit.curvature.dense import spectral_norm

MODERN = {"norm": "rmsnorm", "activation": "swiglu", "n_kv_heads": 1, "rotary": True, "causal": True}
BLOCKS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "d_k": {"d_k": 2},
    "pre": {"placement": "pre"},
    "rmsnorm": {"norm": "rmsnorm", "d_k": 3},
    "pre rmsnorm": {"placement": "pre", "norm": "rmsnorm"},
    "biases": {"bias": True},
    "attention biases": {"attention_bias": True, "d_k": 2},
    "heads": {"n_heads": 2},
    "heads without W_O": {"n_heads": 2, "output_projection": False, "d_k": 3},
    "W_O": {"output_projection": True, "placement": "pre"},
    "causal": {"causal": True},
    "no gain": {"affine": False},
    "everything": {"n_heads": 2, "d_k": 3, "bias": True, "attention_bias": True, "causal": True, "placement": "pre"},
    "large eps": {"eps": 0.3, "activation": "silu"},
    "hybridnorm": {"placement": "hybridnorm", "n_heads": 2, **MODERN},
    "olmo2": {"placement": "olmo2", "n_heads": 2, **MODERN},
    "qkvc-pre": {"placement": "qkvc-pre", "n_heads": 2, "bias": True, "attention_bias": True, "d_k": 3, "d_v": 3},
    "sandwich": {"placement": "sandwich", "n_heads": 2, "activation": "gelu"},
    "deepnorm": {"placement": "deepnorm", "n_heads": 2, "n_layers": 3},
    "admin": {"placement": "admin", "n_heads": 2, "activation": "silu"},
    "group-ln": {"placement": "group-ln", "n_heads": 2, "activation": "gelu", "eps": 0.1},
    "group-ln rmsnorm": {"placement": "group-ln", "n_heads": 2, "norm": "rmsnorm"},
    "layerscale": {"placement": "layerscale", "n_heads": 2, "activation": "gelu"},
    **{f"activation {name}": {"activation": name, "d_k": 2, "bias": True} for name in ACTIVATIONS},
}


def block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(4, 5, **options))


@pytest.mark.parametrize("name", BLOCKS)
def test_block(name):
    found = assert_exact(block(**BLOCKS[name]), draw(2, 3, 4))
    assert found.fallbacks == ()
    assert found.asymmetry < 1e-14


@pytest.mark.parametrize("shape", [(3, 4), (1, 3, 4), (1, 4), (2, 1, 4), (2, 2, 3, 4)])
def test_shapes_of_the_input(shape):
    assert_exact(block(d_k=2, activation="gelu"), draw(*shape))


@pytest.mark.parametrize("labels", [[[0, 3, 1], [2, 2, 0]], [[-100, 3, 1], [2, -100, -100]]])
def test_cross_entropy_of_tokens(labels):
    assert_exact(block(activation="tanh"), draw(2, 3, 4), torch.tensor(labels), loss="cross_entropy")


@pytest.mark.parametrize(
    ("n_blocks", "options", "loss"),
    [(1, {"bias": True}, "mse"), (2, {"placement": "pre", "activation": "gelu", "n_heads": 2}, "cross_entropy")],
)
def test_vision_transformer(n_blocks, options, loss):
    model = randomised(hk.VisionTransformer(3, 2, 3, d_model=4, d_ff=3, n_blocks=n_blocks, **options))
    target = None if loss == "mse" else torch.tensor([2, 0, -100])
    found = assert_exact(model, draw(3, 2, 3), target, loss=loss)
    assert found.fallbacks == ()


def test_by_hand_and_forward_over_reverse():
    """The whole block written out, differentiated by jacfwd(grad): no module, norm, softmax or loss of torch is involved."""
    module, x, target = block(d_k=2, activation="tanh"), draw(2, 3, 4), draw(2, 3, 4, seed=7)
    p = {name.split(".")[0][-1] + name.split(".")[1]: value.detach() for name, value in module.named_parameters()}
    names, sizes = list(p), [v.numel() for v in p.values()]

    def norm(y: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        centred = y - y.sum(-1, keepdim=True) / 4
        return centred / (centred.square().sum(-1, keepdim=True) / 4 + 1e-5).sqrt() * gain + shift

    def loss(theta: Tensor) -> Tensor:
        w = {n: v.reshape(p[n].shape) for n, v in zip(names, theta.split(sizes), strict=True)}
        scores = torch.einsum("bik,bjk->bij", x @ w["nW_Q"], x @ w["nW_K"]) / math.sqrt(2)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        y = norm(x + weights @ x @ w["nW_V"], w["1weight"], w["1bias"])
        z = norm(y + torch.tanh(y @ w["dW_1"]) @ w["dW_2"], w["2weight"], w["2bias"])
        return (z - target).square().sum() / 24

    expected = torch.func.jacfwd(torch.func.grad(loss))(torch.cat([v.reshape(-1) for v in p.values()]))
    found = hk.hessian(module, x, target)
    assert largest_error(found, expected) < 1e-12
    assert found.loss == pytest.approx(float(loss(torch.cat([v.reshape(-1) for v in p.values()]))), rel=1e-14)


def log_cosh(z: Tensor, target: Tensor) -> Tensor:
    return (z - target).cosh().log().mean() + 0.1 * (z @ z.mT).sum()


@pytest.mark.parametrize("loss", [log_cosh, nn.functional.mse_loss, nn.functional.smooth_l1_loss, mse])
def test_a_loss_of_ones_own(loss):
    found = assert_exact(block(d_k=2), draw(2, 3, 4), loss=loss)
    assert found.loss == pytest.approx(float(loss(block(d_k=2)(draw(2, 3, 4)).detach(), draw(2, 3, 4, seed=7))))


def test_a_quadratic_form_is_known_by_hand():
    A = draw(4, 4)
    found = hk.hessian(Formula(lambda s: s.p @ A @ s.p, p=(4,)), (), loss=None)
    assert torch.allclose(found.matrix, A + A.T, rtol=0, atol=1e-15)


def test_the_norm_of_a_matrix_without_entries_is_zero():
    assert spectral_norm(torch.zeros(0, 3)) == spectral_norm(torch.zeros(0, 0), symmetric=True) == 0.0
