"""Problems to try bounds on: blocks of any placement at every scale, and an ascent that looks for a violation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.blocks import PLACEMENTS, Attention


@dataclass(frozen=True)
class Tried:
    """One problem: a module, one sequence and what its output is compared with."""

    name: str
    module: nn.Module
    x: Tensor
    target: Tensor
    loss: str

    @property
    def hessian(self) -> hk.Hessian:
        """Its exact Hessian."""
        return hk.hessian(self.module, self.x.unsqueeze(0), self.target.unsqueeze(0), loss=self.loss)


def draw_problem(seed: int, *, placement: str | None = None) -> Tried:
    """Draw a tiny block, or an attention alone, with parameters, inputs and target at scales from 1e-2 to 1e2."""
    choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    heads, kv_heads = choose.choice([(1, 1), (2, 2), (2, 1)])
    name = placement or choose.choice(["attention", *PLACEMENTS])
    common = {"causal": choose.random() < 0.5, "rotary": choose.random() < 0.3, "d_k": choose.choice([2, 4, 6])}
    module: nn.Module
    if name == "attention":
        module = Attention(4, heads, n_kv_heads=kv_heads, output_projection=heads > 1, bias=choose.random() < 0.5, **common)
    else:
        module = hk.TransformerBlock(
            4,
            3,
            heads,
            name,
            choose.choice(["layernorm", "rmsnorm"]),
            choose.choice(["relu", "gelu", "silu", "tanh", "swiglu"]),
            choose.random() < 0.5,
            n_kv_heads=kv_heads,
            attention_bias=choose.random() < 0.5,
            affine=choose.random() < 0.5,
            eps=choose.choice([1e-5, 1e-2, 1.0]),
            layer=2,
            n_layers=4,
            **common,
        )
    module.double()
    scale = choose.choice([1e-2, 0.3, 1.0, 3.0, 10.0])
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(normal(*p.shape) * (scale if p.ndim == 2 else 1.0))
    length = choose.choice([1, 2, 3, 5])
    x = normal(length, 4) * choose.choice([0.1, 1.0, 10.0])
    if choose.random() < 0.2:
        x[0] = 1.0 + 1e-3 * x[0]  # a row that is nearly constant
    loss = choose.choice(["mse", "mse", "cross_entropy"])
    if loss == "cross_entropy":
        return Tried(name, module, x, torch.randint(4, (length,), generator=draw), loss)
    return Tried(name, module, x, normal(length, 4) * choose.choice([0.0, 1.0, 100.0]), loss)


def ascend(problem: Tried, bound: Callable[[Tried], float], steps: int, seed: int = 0) -> float:
    """Return the largest true / bound that a random ascent over parameters and inputs finds."""
    draw = torch.Generator().manual_seed(seed)
    moved = [problem.x, *(p.data for p in problem.module.parameters())]
    best, size = _ratio(problem, bound), 0.5
    for _ in range(steps):
        kept = [value.clone() for value in moved]
        for value in moved:
            value.add_(size * value.abs().mean() * torch.randn(value.shape, generator=draw, dtype=value.dtype))
        ratio = _ratio(problem, bound)
        if ratio > best:
            best, size = ratio, min(2 * size, 2.0)
        else:
            size = max(0.7 * size, 1e-3)
            for value, before in zip(moved, kept, strict=True):
                value.copy_(before)
    return best


def _ratio(problem: Tried, bound: Callable[[Tried], float]) -> float:
    true, limit = problem.hessian.spectral_norm(), bound(problem)
    return true / limit if limit else 0.0
