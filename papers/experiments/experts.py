"""Mixture of experts in the place of a block's network, as HybridNorm's MoE-1B-7B (OLMoE) has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import initialise
from hessiankit.blocks.feedforward import FeedForward, weight

BALANCE, Z_LOSS = 0.01, 0.001
"""Weights of the load balancing loss and of the router z-loss: HybridNorm, Table 7."""


class Experts(nn.Module):
    r"""Experts :math:`\sum_{e\in\mathrm{top}_k(p)} p_e\,\mathrm{FFN}_e(y)`, p = softmax(y W_R); no token is dropped.

    The probabilities of the chosen experts are not divided by their sum, as in OLMoE.

    Args:
        network: Network whose widths and activation the experts have.
        count: Experts E.
        active: Experts k of a token.

    Attributes:
        auxiliary: Load balancing loss E sum_e f_e mean(p_e), f_e the share of the tokens' choices that fall on e, and z-loss,
            the mean of (log sum exp)^2 of the router, of the last call, with their weights.
    """

    def __init__(self, network: FeedForward, count: int, active: int) -> None:
        super().__init__()
        d_model, d_ff = network.W_1.shape
        self.active = active
        self.W_R = weight(d_model, count)
        self.experts = nn.ModuleList(FeedForward(d_model, d_ff, activation=network.activation) for _ in range(count))
        self.auxiliary: Tensor | None = None

    def forward(self, y: Tensor) -> Tensor:
        """Map tokens ``(..., d_model)`` to ``(..., d_model)``."""
        tokens = y.reshape(-1, y.shape[-1])  # (N, d_model)
        logits = (tokens @ self.W_R).float()  # (N, E)
        p = logits.softmax(-1)
        largest, chosen = p.topk(self.active, -1)  # (N, k)
        share = torch.zeros_like(p).scatter(1, chosen, 1.0).mean(0) / self.active
        self.auxiliary = BALANCE * len(self.experts) * (share * p.mean(0)).sum() + Z_LOSS * logits.logsumexp(-1).square().mean()
        total = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            total = total.index_add(0, rows, (largest[rows, place, None] * expert(tokens[rows])).to(total.dtype))
        return total.reshape(y.shape)


def add_experts(model: Any, experts: tuple[int, ...], scheme: str | None = None, std: float | None = None, seed: int = 0) -> Any:
    """Replace the network of every block by experts, in place, draw their weights if a scheme is named, and return the model.

    Args:
        model: The model.
        experts: Networks of a block, and those that a token takes.
        scheme: A name in ``hessiankit.blocks.SCHEMES``.
        std: Standard deviation of the matrices, where the scheme takes one.
        seed: Seed of the model's own weights; the experts' are other draws.
    """
    count, active = experts
    generator = torch.Generator().manual_seed(seed + 1)
    for block in model.blocks:
        block.feedforward = Experts(block.feedforward, count, active)
        if scheme is not None:
            initialise(block.feedforward.experts, scheme, generator=generator, n_layers=len(model.blocks), std=std)
            with torch.no_grad():
                block.feedforward.W_R.normal_(0.0, std or (2.5 * block.d_model) ** -0.5, generator=generator)
    return model


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """Return the sum of the experts' auxiliary losses of the last call, 0 where there are none."""
    losses = [m.auxiliary for m in model.modules() if isinstance(m, Experts) and m.auxiliary is not None]
    return sum(losses) if losses else 0.0
