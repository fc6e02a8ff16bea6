"""Problems to try bounds on: tiny blocks of every placement and attentions alone, at every scale and at their worst."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.blocks import PLACEMENTS, Attention, TransformerBlock
from hessiankit.curvature.dense import Hessian, hessian
from hessiankit.theory.bounding.bounds import LossAt

KINKED = ("relu", "leaky_relu")
"""Activations across whose kinks no second derivative bounds a change."""


@dataclass(frozen=True)
class BoundProblem:
    """One problem: a module, one sequence and what its output is compared with.

    Attributes:
        seed: It is drawn from this number alone.
        name: Its placement, or "attention".
        regime: What was made extreme.
        module: The block or the attention, in float64.
        x: L x d_model.
        target: L x d_model, or labels.
        loss: ``"mse"`` or ``"cross_entropy"``.
    """

    seed: int
    name: str
    regime: str
    module: TransformerBlock | Attention
    x: Tensor
    target: Tensor
    loss: str

    @property
    def hessian(self) -> Hessian:
        """Its exact Hessian."""
        return hessian(  # drawn to be extreme: torch's own gradient may have lost its digits there
            self.module, self.x.unsqueeze(0), self.target.unsqueeze(0), loss=self.loss, handshake=False
        )

    @property
    def at(self) -> LossAt:
        """Its loss as it now is, for a bound."""
        return LossAt(self.module, self.x.unsqueeze(0), self.target.unsqueeze(0), self.loss)

    @property
    def kinked(self) -> bool:
        """Whether an activation has a kink."""
        return isinstance(self.module, TransformerBlock) and self.module.feedforward.activation in KINKED


def draw_problem(seed: int, *, placement: str | None = None) -> BoundProblem:
    """Draw a problem with weights from 1e-3 to 1e3 and, by turns, one thing at its extreme.

    The regimes: "plain"; "peaked", logits scaled so that their largest gap is 1 to 1e3; "constant", rows of the input that
    vary by 1e-8 to 1e-1 only; "pair", logits of two tokens, at the softmax's largest second derivative; "fitted", a target
    that is the output or nearly so; "lopsided", one parameter times 1e-3 to 1e3.
    """
    choose, draw = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    name = placement or ("attention" if choose.random() < 0.2 else choose.choice(list(PLACEMENTS)))
    module = _module(choose, name)
    scale = 10 ** choose.choice([0.0, 0.0, choose.uniform(-3, 3)])
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(normal(*p.shape) * (scale if p.ndim == 2 else 1.0))
    length = choose.choice([1, 2, 3, 5])
    x = normal(length, 4) * 10 ** choose.choice([0.0, 0.0, choose.uniform(-3, 3)])
    regime = choose.choice(["plain", "peaked", "constant", "pair", "fitted", "lopsided"])
    if regime == "constant":
        x = normal(length, 1) + 10 ** choose.uniform(-8, -1) * x
    elif regime == "pair" and length > 2:
        x[2:] *= 1e-3
    elif regime == "lopsided":
        with torch.no_grad():
            choose.choice(list(module.parameters())).mul_(10 ** choose.uniform(-3, 3))
    if regime in ("peaked", "pair"):
        _set_logit_gap(module, x, 10 ** choose.uniform(0, 3 if regime == "peaked" else 1))
    loss = choose.choice(["mse", "mse", "cross_entropy"])
    if loss == "cross_entropy":
        return BoundProblem(seed, name, regime, module, x, torch.randint(4, (length,), generator=draw), loss)
    target = normal(length, 4) * choose.choice([0.0, 1.0, 100.0])
    if regime == "fitted":
        target = module(x).detach() * (1 + choose.choice([0.0, 1e-3, 0.1]) * normal(length, 4))
    return BoundProblem(seed, name, regime, module, x, target, loss)


def _module(choose: random.Random, name: str) -> TransformerBlock | Attention:
    heads, kv_heads = choose.choice([(1, 1), (2, 2), (2, 1)])
    causal, rotary, d_k = choose.random() < 0.5, choose.random() < 0.3, choose.choice([2, 4, 6])  # d_k = 6 > d_model
    if name == "attention":
        projected, bias = heads > 1, choose.random() < 0.5
        given = {"n_kv_heads": kv_heads, "causal": causal, "rotary": rotary, "d_k": d_k}
        return Attention(4, heads, output_projection=projected, bias=bias, **given).double()  # type: ignore[arg-type]
    return TransformerBlock(
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
        eps=choose.choice([0.0, 1e-5, 1e-2, 1.0]),
        layer=2,
        n_layers=4,
        causal=causal,
        rotary=rotary,
        d_k=d_k,
    ).double()


def _set_logit_gap(module: TransformerBlock | Attention, x: Tensor, gap: float) -> None:
    """Scale the weights of the queries and the keys so that the largest gap of two logits, at the input x, is ``gap``."""
    part = module if isinstance(module, Attention) else module.attention
    with torch.no_grad():
        logits = (x @ part.W_Q)[:, : part.d_k] @ (x @ part.W_K)[:, : part.d_k].T / part.d_k**0.5
        largest = float((logits.max(1).values - logits.min(1).values).max())
        if largest > 0:
            part.W_Q.mul_((gap / largest) ** 0.5)
            part.W_K.mul_((gap / largest) ** 0.5)
