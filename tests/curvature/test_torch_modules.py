"""Torch's own transformer modules, unmodified, and a small GPT: fused attention has a closed form, and no backend is switched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, mse, randomised
from torch import Tensor, nn

import hessiankit as hk

ATTENTION = "scaled_dot_product_attention"
PADDED = torch.tensor([[False, False, True], [False, False, False]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(3, dtype=torch.float64)
BY_HEAD = draw(4, 3, 3, seed=8)
FORBIDDEN = torch.tensor([[False, True, True], [False, False, True], [True, False, False]])


def attention(call: Callable[[nn.Module, Tensor], Tensor], width: int = 4, heads: int = 2, **options: object) -> nn.Module:
    """An nn.MultiheadAttention wrapped to return one tensor."""
    layer = nn.MultiheadAttention(width, heads, batch_first=True, **options)
    return Formula(lambda s, x: call(s.layer, x)[0], layer=layer)


SELF: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda a, x: a(x, x, x, need_weights=False),
    "key_padding_mask": lambda a, x: a(x, x, x, need_weights=False, key_padding_mask=PADDED),
    "boolean attn_mask": lambda a, x: a(x, x, x, need_weights=False, attn_mask=FORBIDDEN),
    "additive attn_mask": lambda a, x: a(x, x, x, need_weights=False, attn_mask=CAUSAL + 0.3),
    "a mask for each head": lambda a, x: a(x, x, x, need_weights=False, attn_mask=BY_HEAD),
    "both masks": lambda a, x: a(x, x, x, need_weights=False, attn_mask=FORBIDDEN, key_padding_mask=PADDED & False),
}


@pytest.mark.parametrize("case", SELF)
def test_multihead_attention(case):
    assert assert_exact(attention(SELF[case]), draw(2, 3, 4)).fallbacks == ()


def test_cross_attention_of_other_widths():
    context = draw(2, 5, 3, seed=3)
    module = attention(lambda a, x: a(x, context, context[..., :2], need_weights=False), kdim=3, vdim=2)
    assert assert_exact(module, draw(2, 3, 4)).fallbacks == ()


@pytest.mark.parametrize(
    ("norm_first", "activation", "training"),
    [(False, "relu", True), (False, "gelu", False), (True, "relu", False), (True, "gelu", True)],
)
def test_encoder_layer(norm_first, activation, training):
    layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, activation, batch_first=True, norm_first=norm_first)
    found = assert_exact(randomised(layer).train(training), draw(2, 3, 4))
    assert found.fallbacks == ()
    assert found.matrix.shape[0] == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize(("norm_first", "activation"), [(False, "gelu"), (True, "relu")])
def test_decoder_layer(norm_first, activation):
    layer = nn.TransformerDecoderLayer(4, 2, 5, 0.0, activation, batch_first=True, norm_first=norm_first)
    assert assert_exact(randomised(layer).eval(), (draw(2, 3, 4), draw(2, 5, 4, seed=5))).fallbacks == ()


@pytest.mark.slow
@pytest.mark.parametrize(("padded", "training"), [(PADDED, True), (PADDED[:1].expand(2, 3), False)], ids=["one", "every one"])
def test_encoder_stack_on_embedded_tokens(training, padded):
    """Of padded sequences."""
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 3, 0.0, batch_first=True), 2, norm=nn.LayerNorm(4))
    parts = {"embed": nn.Embedding(6, 4), "stack": stack}
    module = Formula(lambda s, tokens: s.stack(s.embed(tokens), src_key_padding_mask=padded), **parts).train(training)
    found = assert_exact(module, torch.tensor([[1, 5, 0], [3, 5, 2]]))
    assert not any(ATTENTION in name for name in found.fallbacks)


def test_the_fast_path_of_evaluation_mode_stays_as_it_was():
    layer = randomised(nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True)).eval()
    with torch.no_grad():
        found = hk.hessian(layer, draw(2, 3, 4), draw(2, 3, 4, seed=7))
        expected = mse(layer(draw(2, 3, 4)), draw(2, 3, 4, seed=7))
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-14)
    assert torch.backends.mha.get_fastpath_enabled()
