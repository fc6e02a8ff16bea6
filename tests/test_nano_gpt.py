"""A small GPT in the style of minimal training scripts: one linear map for q, k and v, fused attention, a tied head.

Fused attention has no double backward and no forward mode, so every route of automatic differentiation stops there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import draw, mse, reverse_over_reverse
from model_zoo import checked, generic
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk

VOCABULARY, WIDTH, HEADS, CONTEXT = 7, 4, 2, 6
TOKENS = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
NEXT = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1))


class SelfAttention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH, bias=bias), SelfAttention(bias)
        self.ln_2 = nn.LayerNorm(WIDTH, bias=bias)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 5, bias=bias), nn.GELU(), nn.Linear(5, WIDTH, bias=bias), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Logits; with targets, the loss that training minimises."""

    def __init__(self, layers: int, bias: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block(bias) for _ in range(layers))
        self.ln_f = nn.LayerNorm(WIDTH, bias=bias)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


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
