"""Initialisations: standard deviations and cuts on large matrices, factors of depth exactly, seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hessiankit as hk
from hessiankit.blocks import SCHEMES, initialise
from hessiankit.blocks.initialisation import CUT, WeightPlace

D, FF, LAYERS = 320, 384, 2
LETTERS = ("W_Q", "W_K", "W_V", "W_O", "W_1", "W_G", "W_2", "W_E", "P", "W_C")
CUT_SCHEMES = ("normal", "megatron", "scaled", "depth-scaled", "olmo", "mitchell", "olmo-printed")
KEPT = math.sqrt(1 - 2 * CUT * math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi) / math.erf(CUT / math.sqrt(2)))
"""Standard deviation of a normal variable that is cut at three of its own."""


def place(letter: str, layer: int = 2, n_layers: int = 8, d: int = 100, ff: int = 300, **more) -> WeightPlace:
    shape = {"W_1": (d, ff), "W_G": (d, ff), "W_2": (ff, d), "W_E": (50, d), "P": (20, d), "W_C": (d, 50)}.get(letter, (d, d))
    return WeightPlace(letter, *shape, layer, n_layers, **more)


def stds(scheme: str, **options) -> dict[str, float]:
    return {letter: SCHEMES[scheme](place(letter, **options)).std for letter in LETTERS}


def expected(everything: float, **others: float) -> dict[str, float]:
    return pytest.approx({**dict.fromkeys(LETTERS, everything), **others}, rel=1e-15)


def test_factors_of_depth():
    base = 1 / math.sqrt(250)
    assert stds("normal") == expected(base)
    assert stds("megatron") == stds("scaled") == expected(base, W_O=base / 4, W_2=base / 4)  # sqrt(2 * 8)
    assert stds("depth-scaled") == expected(base, W_O=base / 2, W_2=base / 2)  # sqrt(2 * 2)
    assert stds("depth-scaled", layer=8) == stds("megatron", layer=1)
    assert stds("olmo") == stds("mitchell") == expected(0.1, W_O=0.1 / 2, W_2=1 / math.sqrt(4 * 300))
    assert stds("olmo-printed") == expected(0.1, W_O=0.1 / 2, W_2=0.1 / 2)
    assert stds("megatron", std=0.02) == expected(0.02, W_O=0.02 / 4, W_2=0.02 / 4)
    assert SCHEMES["normal"](place("W_Q", d=2048)).std == 0.013975424859373685  # HybridNorm's code at d = 2048


def test_xavier_deepnorm_and_ds_init():
    square, network, head = math.sqrt(2 / 200), math.sqrt(2 / 400), math.sqrt(2 / 150)
    network_letters = dict.fromkeys(("W_1", "W_G", "W_2"), network)
    outside = {"W_E": 0.1, "P": 0.1, "W_C": head}
    assert stds("xavier") == expected(square, **network_letters, **outside)
    beta = (8 * 8) ** -0.25  # 1 / sqrt(8)
    scaled = {letter: beta * std for letter, std in network_letters.items()}
    assert stds("deepnorm") == expected(square, W_V=beta * square, W_O=beta * square, **scaled, **outside)
    by_layer = {letter: std / 2 for letter, std in network_letters.items()}
    assert stds("ds-init", layer=4) == expected(square / 2, **by_layer, **outside)


@pytest.mark.parametrize("scheme", {scheme: name for name, scheme in SCHEMES.items()}.values())  # without second names
def test_what_is_drawn(scheme):
    """Every matrix of a model has the standard deviation of its scheme to 1 %, and no entry beyond the cut."""
    model = hk.Transformer(
        400, D, FF, LAYERS, 4, max_len=350, tied=False, activation="swiglu", bias=True, attention_bias=True,
        initialisation=scheme, seed=1,
    )  # fmt: skip
    for name, p in model.named_parameters():
        *_, owner, letter = name.split(".")
        if p.ndim == 1:
            assert torch.all(p == float("norm" in owner and letter == "weight"))
            continue
        layer = int(name.split(".")[1]) + 1 if name.startswith("blocks") else 1
        d = SCHEMES[scheme](WeightPlace(letter, *p.shape, layer, LAYERS))
        cut = scheme in CUT_SCHEMES
        assert p.std().item() == pytest.approx(d.std * (KEPT if cut else 1), rel=0.01)
        assert abs(p.mean().item()) < 0.02 * d.std
        largest = p.abs().max().item() / d.std
        if cut:
            assert 2.9 < largest <= 3 * (1 + 1e-6)
        elif scheme == "ds-init":
            assert math.sqrt(3) * 0.999 < largest <= math.sqrt(3) * (1 + 1e-6)
        else:
            assert largest > 3.5


def small(**options) -> hk.Transformer:
    return hk.Transformer(5, 4, 6, 2, **{"initialisation": "megatron", "seed": 3, **options})


def test_a_seed_fixes_the_weights_in_every_dtype_and_leaves_torchs_generator():
    before = torch.get_rng_state()
    model = small(initialisation=None)
    torch.set_rng_state(before)
    initialise(model, "megatron", seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    first = model.blocks[1].feedforward.W_2
    assert torch.equal(first, small().blocks[1].feedforward.W_2)
    assert not torch.equal(first, small(seed=4).blocks[1].feedforward.W_2)
    double = initialise(small().double(), "megatron", seed=3).blocks[1].feedforward.W_2
    assert torch.equal(double.float(), first)
    by_generator = initialise(small(), "megatron", generator=torch.Generator().manual_seed(3))
    assert torch.equal(by_generator.blocks[1].feedforward.W_2, first)
    torch.manual_seed(5)
    one = initialise(small(), "normal").embedding.W_E.clone()
    torch.manual_seed(5)
    assert torch.equal(initialise(small(), "normal").embedding.W_E, one)


def test_own_deviation_of_the_embedding_and_own_number_of_layers():
    model = hk.Transformer(500, 200, 5, 1, max_len=300, seed=0)
    initialise(model, "megatron", seed=0, embedding_std=0.632, n_layers=50)
    for p in (model.embedding.W_E, model.embedding.P):
        assert p.std().item() == pytest.approx(0.632 * KEPT, rel=0.02)
    limit = 3 / math.sqrt(2.5 * 200) / math.sqrt(100)
    assert 0.8 * limit < model.blocks[0].feedforward.W_2.abs().max().item() <= limit * (1 + 1e-6)
    block = initialise(hk.TransformerBlock(200, 5, 2, layer=8, n_layers=9), "depth-scaled", seed=0)
    assert block.attention.W_O.std().item() == pytest.approx(KEPT / math.sqrt(500) / 4, rel=0.02)
    blocks = initialise(nn.Sequential(*(hk.TransformerBlock(200, 5, 2, n_layers=n) for n in (2, 8))), "megatron", seed=0)
    for block in blocks:
        expected = KEPT / math.sqrt(500) / math.sqrt(2 * block.n_layers)
        assert block.attention.W_O.std().item() == pytest.approx(expected, rel=0.02)


def test_biases_gains_and_scales():
    model = small(placement="layerscale", bias=True, scale_init=0.25)
    for p in model.parameters():
        p.data += 7
    initialise(model, "normal", seed=0)
    block = model.blocks[0]
    assert block.lambda_1.tolist() == [7.25] * 4  # a placement's scales are its own
    assert block.norm_1.weight.tolist() == [1] * 4
    assert block.norm_1.bias.tolist() == block.feedforward.b_2.tolist() == [0] * 4


def test_what_cannot_be_initialised():
    own = nn.Sequential(hk.TransformerBlock(4, 5), nn.Linear(4, 2))
    weight = own[0].attention.W_Q.clone()
    with pytest.raises(
        hk.InputError, match=r"initialise: '1.weight' belongs to a Linear, whose place in a transformer is not known"
    ):
        initialise(own)
    assert torch.equal(own[0].attention.W_Q, weight)
    with pytest.raises(hk.InputError, match="both seed and generator are given; pass one of them"):
        initialise(small(), seed=1, generator=torch.Generator())
    with pytest.raises(hk.InputError, match="scheme='norml' is not known; did you mean 'normal'"):
        initialise(small(), "norml")
