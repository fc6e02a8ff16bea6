"""Blocks of every placement, and their derivatives by reverse over reverse."""

from __future__ import annotations

import random

import torch
from second_order_reference import derivatives
from torch.func import functional_call

from hessiankit import TransformerBlock

HEADS = [(1, 1), (2, 2), (2, 1)]


def sampled_block(placement: str, seed: int = 0) -> TransformerBlock:
    """Return a block of this placement with options that are drawn, the same ones for each run."""
    chance = random.Random(f"{placement} {seed}")
    torch.manual_seed(chance.randrange(1000))
    heads, kv_heads = chance.choice(HEADS)
    options = {name: chance.random() < 0.5 for name in ("bias", "attention_bias", "causal", "rotary")}
    block = TransformerBlock(
        4, 3, heads, placement, chance.choice(["layernorm", "rmsnorm"]), chance.choice(["relu", "gelu", "swiglu"]),
        n_kv_heads=kv_heads, d_k=2, layer=2, n_layers=4, norm_scope=chance.choice([None, "full"]), **options,
    ).double()  # fmt: skip
    return generic(block)


def generic(block: TransformerBlock) -> TransformerBlock:
    """Draw the parameters that are constant at initialisation: gains, biases, scales."""
    with torch.no_grad():
        for p in block.parameters():
            if p.ndim < 2:
                p.normal_()
    return block


def values(block: TransformerBlock, X: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**{name: p.detach() for name, p in block.named_parameters()}, "X": X}


def run(block: TransformerBlock, point: dict[str, torch.Tensor], changed: dict[str, torch.Tensor]) -> torch.Tensor:
    parameters = {**point, **changed}
    tokens = parameters.pop("X")
    return functional_call(block, parameters, (tokens,))


def expected_of(function, point, *names):
    """The Jacobian for one name, the second derivative for two, of a function of changed entries of a point."""
    jacobians, hessians = derivatives(lambda **changed: function(changed), {name: point[name] for name in names})
    return jacobians[names[0]] if len(names) == 1 else hessians[names]


def assert_agree(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max().clamp_min(1e-3)
