"""A small GPT in the style of minimal training scripts: one linear map for q, k and v, fused attention, a tied head.

Fused attention has no double backward and no forward mode, so every route of automatic differentiation stops there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import draw, mse, reverse_over_reverse
from model_zoo import checked, generic
from nano_gpt import VOCABULARY, WIDTH, Block, NanoGPT
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk

TOKENS = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
NEXT = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [True, False])
def test_block(bias):
    checked(generic(Block(bias)), draw(2, 5, WIDTH), draw(2, 5, WIDTH, seed=7))


@pytest.mark.parametrize("bias", [True, False])
def test_model(bias):
    report = checked(generic(NanoGPT(1 + bias, bias)), TOKENS, NEXT, loss="cross_entropy")
    assert "lm_head.weight" not in report.hessian.names  # tied: one parameter, the embedding's


def test_model_that_returns_its_loss():
    targets = NEXT.masked_fill(NEXT[0, 0] == NEXT, -1)
    checked(generic(NanoGPT(1, True)), (TOKENS, targets), loss=None)


def test_training_mode_is_refused():
    with pytest.raises(hk.InputError, match=r"h\.0\.mlp\.3.*eval"):
        hk.hessian(generic(NanoGPT(1, True)).train(), TOKENS, NEXT, loss="cross_entropy")


def by_curvlinops(block: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    from curvlinops import HessianLinearOperator

    parameters = list(block.parameters())
    operator = HessianLinearOperator(block, nn.MSELoss(), parameters, [(x, target)], check_deterministic=False)
    return operator @ torch.eye(sum(p.numel() for p in parameters), dtype=torch.float64)


def by_func(mode: Callable[..., object]) -> Callable[..., object]:
    def route(block: nn.Module, x: Tensor, target: Tensor) -> object:
        point = {name: p.detach() for name, p in block.named_parameters()}
        return mode(lambda p: mse(torch.func.functional_call(block, p, (x,)), target), point)

    return route


def along(function: Callable[..., Tensor], point: dict[str, Tensor]) -> object:
    return torch.func.jvp(torch.func.grad(function), (point,), ({name: torch.ones_like(p) for name, p in point.items()},))


def by_autograd(block: nn.Module, x: Tensor, target: Tensor) -> object:
    names, values = zip(*((name, p.detach()) for name, p in block.named_parameters()), strict=True)
    return torch.autograd.functional.hessian(
        lambda *p: mse(torch.func.functional_call(block, dict(zip(names, p, strict=True)), (x,)), target), values
    )


ROUTES = {
    "torch.func.hessian": by_func(lambda f, point: torch.func.hessian(f)(point)),
    "jvp(grad)": by_func(along),
    "torch.autograd.functional.hessian": by_autograd,
    "curvlinops": by_curvlinops,
}


@pytest.mark.parametrize("name", ROUTES)
def test_no_route_of_autograd_passes_fused_attention(name):
    block, x, target = generic(Block()), draw(2, 5, WIDTH), draw(2, 5, WIDTH, seed=7)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # fused, also on the CPU in float64
        block(x)
        with pytest.raises(
            (RuntimeError, NotImplementedError), match=r"(?i)not (been )?implemented|does not support|not support"
        ):
            ROUTES[name](block, x, target)
    with sdpa_kernel(SDPBackend.MATH):
        ROUTES[name](block, x, target)  # it is the attention that stops it


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
