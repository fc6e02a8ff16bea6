"""A small GPT in the style of minimal training scripts: one linear map for q, k and v, fused attention, a tied head.

Fused attention has no double backward and no forward mode, so every route of automatic differentiation stops there.
"""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw, mse, reverse_over_reverse
from model_zoo import checked, generic
from nano_gpt import VOCABULARY, WIDTH, Block, NanoGPT
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk

TOKENS = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
NEXT = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))


def test_block_without_biases():
    checked(generic(Block(False)), draw(2, 5, WIDTH), draw(2, 5, WIDTH, seed=7))


def test_model():
    report = checked(generic(NanoGPT(2, True)), TOKENS, NEXT, loss="cross_entropy")
    assert "lm_head.weight" not in report.hessian.names  # tied: one parameter, the embedding's


def test_model_that_returns_its_loss():
    targets = NEXT.masked_fill(NEXT[0, 0] == NEXT, -1)
    checked(generic(NanoGPT(1, True)), (TOKENS, targets), loss=None)


def test_training_mode_is_refused():
    with pytest.raises(hk.InputError, match=r"h\.0\.mlp\.3.*eval"):
        hk.hessian(generic(NanoGPT(1, True)).train(), TOKENS, NEXT, loss="cross_entropy")


def test_fused_attention_has_the_hessian_of_the_plain_formula():
    block, x, target = generic(Block()), draw(2, 5, WIDTH), draw(2, 5, WIDTH, seed=7)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused = hk.hessian(block, x, target)
    with sdpa_kernel(SDPBackend.MATH):
        plain = hk.hessian(block, x, target)
    expected = reverse_over_reverse(block, x, target, mse)
    scale = expected.abs().max()
    assert (fused.matrix - expected).abs().max() <= 1e-12 * scale
    assert (plain.matrix - expected).abs().max() <= 1e-12 * scale
    assert not fused.fallbacks
