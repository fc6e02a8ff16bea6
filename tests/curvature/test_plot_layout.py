"""The arithmetic of the pictures, against explicit loops and a solver that knows nothing of it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from torch import nn

from hessiankit.blocks import VisionTransformer
from hessiankit.curvature.plot_frame import block_pixels, colour_range, pixel_starts, pool, short_labels, spread

RNG = np.random.default_rng(0)
SIZES = [5, 1, 40, 2, 17]


@pytest.mark.parametrize("scale", ["blocks", "parameters"])
@pytest.mark.parametrize("pixels", [5, 90])
@pytest.mark.parametrize("how", ["max", "rms"])
def test_pooling_covers_every_entry_of_its_own_block(scale: str, pixels: int, how: str) -> None:
    matrix = RNG.standard_normal((65, 65))
    widths = block_pixels(SIZES, pixels, scale)
    assert widths.sum() == pixels
    assert widths.min() >= 1
    picture = pool(matrix, pixel_starts(SIZES, widths.tolist()), how)
    covered = []
    for size, width, offset in zip(SIZES, widths, np.cumsum([0, *SIZES]), strict=False):
        ends = [size * (k + 1) // width for k in range(width)]
        covered += [range(offset + size * k // width, offset + max(ends[k], size * k // width + 1)) for k in range(width)]
    assert set().union(*covered) == set(range(65))
    for (i, j), seen in np.ndenumerate(picture):
        part = np.abs(matrix[np.ix_(covered[i], covered[j])])
        assert seen == pytest.approx(part.max() if how == "max" else np.sqrt((part**2).mean()), rel=1e-12)


def test_spread_is_the_least_squares_solution() -> None:
    centres = np.sort(RNG.uniform(0, 10, 7))
    lengths = RNG.uniform(0.5, 1.5, 7)
    places = spread(centres.tolist(), lengths.tolist(), 0.0, 10.0)
    gaps = np.diff(places) - (lengths[1:] + lengths[:-1]) / 2
    assert gaps.min() > -1e-12
    assert places[0] >= lengths[0] / 2
    assert places[-1] <= 10 - lengths[-1] / 2
    constraints = [
        {"type": "ineq", "fun": lambda x: np.diff(x) - (lengths[1:] + lengths[:-1]) / 2},
        {"type": "ineq", "fun": lambda x: [x[0] - lengths[0] / 2, 10 - lengths[-1] / 2 - x[-1]]},
    ]
    best = minimize(lambda x: ((x - centres) ** 2).sum(), np.linspace(1, 9, 7), constraints=constraints, tol=1e-12)
    assert best.success
    assert places == pytest.approx(best.x, abs=1e-5)


def test_colour_range() -> None:
    values = 10.0 ** np.linspace(-9, 1, 1001)
    low, high = colour_range(values)
    assert high == 10
    assert low == pytest.approx(1e-7)
    assert (values < colour_range(values, span=20)[0]).sum() == 5
    assert colour_range(np.array([2.0, 3.0])) == (1.0, 10.0)
    assert colour_range(np.array([5.0])) == (1.0, 10.0)
    assert colour_range(np.array([1.0])) == (1.0, 10.0)
    assert colour_range(np.zeros(3)) == (0.1, 1.0)


def labels(module: nn.Module) -> str:
    return " ".join(short_labels([name for name, _ in module.named_parameters()])).replace("$", "").replace("\\", "")


def test_letters_of_our_blocks_and_of_torchs() -> None:
    one = VisionTransformer(4, 3, 2, d_model=4, d_ff=4, bias=True, attention_bias=True, n_heads=2)
    assert labels(one) == ("W_E b_E P W_Q W_K W_V W_O b_Q b_K b_V b_O gamma_1 beta_1 W_1 b_1 W_2 b_2 gamma_2 beta_2 W_C b_C")
    layer = nn.TransformerEncoderLayer(4, 1, 4)
    assert labels(layer) == "W_{QKV} b_{QKV} W_O b_O W_1 b_1 W_2 b_2 gamma_1 beta_1 gamma_2 beta_2"
    two = VisionTransformer(4, 3, 2, d_model=4, d_ff=4, n_blocks=2)
    assert labels(two).startswith("W_E b_E P W_{Q,0} W_{K,0} W_{V,0} gamma_{1,0}")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("transformer.h.3.attn.c_attn.weight", r"$W_{QKV}$"),
        ("transformer.h.3.attn.c_proj.weight", r"$W_O$"),
        ("transformer.h.3.mlp.c_proj.bias", r"$b_2$"),
        ("transformer.ln_f.weight", r"$\gamma_f$"),
        ("model.layers.0.self_attn.q_proj.weight", r"$W_Q$"),
        ("model.layers.0.post_attention_layernorm.weight", r"$\gamma_2$"),
        ("model.layers.0.mlp.gate_proj.weight", r"$W_G$"),
        ("blocks.1.attn.proj.weight", r"$W_O$"),
        ("blocks.1.mlp.fc2.bias", r"$b_2$"),
        ("patch_embed.proj.weight", r"$W_E$"),
        ("encoder.layer.0.intermediate.dense.weight", r"$W_1$"),
        ("encoder.layer.0.output.dense.weight", r"$W_2$"),
        ("encoder.layer.0.attention.output.dense.weight", r"$W_O$"),
        ("model.embed_tokens.weight", r"$W_E$"),
        ("lm_head.weight", r"$W_C$"),
        ("pos_embed", r"$P$"),
        ("0.weight", "0.weight"),
        ("cls_token", "cls_token"),
        ("mixer.dt_bias", "mixer.dt_bias"),
    ],
)
def test_letters_of_other_libraries(name: str, label: str) -> None:
    assert short_labels([name]) == [label]


def test_names_that_would_share_a_letter_stay_whole() -> None:
    assert short_labels(["encoder.fc1.weight", "decoder.fc1.weight", "fc2.weight"]) == [
        "encoder.fc1.weight",
        "decoder.fc1.weight",
        "$W_2$",
    ]
