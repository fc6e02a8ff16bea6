"""The optimizers of the papers over groups with a rate by block type: AdamW, Adam, Adam-mini, Lion, Muon."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.support.errors import check_name
from hessiankit.training.optim import blockwise_lr, blockwise_schedule
from papers.experiments.tuning.experiment import BETAS, Ratios

OPTIMIZERS = ("adamw", "adam_mini", "lion", "muon")


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2024): w - lr (sign(b1 m + (1 - b1) g) + decay w), then m = b2 m + (1 - b2) g."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, ...] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * torch.lerp(p.grad, m, b1).sign())
                m.lerp_(p.grad, 1 - b2)


class AdamMini(torch.optim.Optimizer):
    """Adam-mini (Zhang et al. 2024): Adam with the mean of g^2 over a group of entries for g^2.

    Args:
        params: Groups of one parameter each, with its ``name``.
        n_heads: Heads, each a group of columns of W_Q and of W_K; each row of an embedding is one, and each other tensor.
        betas: Decay rates of both moments.
    """

    def __init__(self, params: Iterable[Any], n_heads: int, betas: tuple[float, ...] = BETAS) -> None:
        self.n_heads = n_heads
        super().__init__(params, {"lr": 1e-3, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["t"] = t = state.get("t", 0) + 1
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - b1)
                v.lerp_(grouped_mean(p.grad.square(), group["name"], self.n_heads), 1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8))


def grouped_mean(squares: Tensor, name: str, n_heads: int) -> Tensor:
    """Return each entry's mean over its group in Adam-mini, in the shape of the parameter.

    >>> x = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    >>> [grouped_mean(x, name, 2).tolist() for name in ("embedding.W_E", "attention.W_Q", "feedforward.W_1")]
    [[[2.0, 2.0], [6.0, 6.0]], [[3.0, 5.0], [3.0, 5.0]], [[4.0, 4.0], [4.0, 4.0]]]
    """
    if name.startswith("embedding"):
        return squares.mean(-1, keepdim=True).expand_as(squares)
    if name.endswith(("W_Q", "W_K")):
        heads = squares.reshape(len(squares), n_heads, -1)
        return heads.mean((0, 2), keepdim=True).expand_as(heads).reshape_as(squares)
    return squares.mean().expand_as(squares)


class Together:
    """Optimizers, or their schedules, that take their steps one after the other, as Muon and AdamW do."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all optimizers."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self) -> None:
        """Take a step of each."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the states of all."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)


def optimizer_of(
    model: nn.Module,
    kind: str,
    lr: float,
    ratios: Ratios = (),
    decay: float = 0.1,
    betas: tuple[float, ...] = BETAS,
    n_heads: int = 1,
) -> Together:
    """Return an optimizer over groups with a rate by block type.

    Args:
        model: The model.
        kind: A name in :data:`OPTIMIZERS`.
        lr: Rate of block types without a ratio.
        ratios: Factors by block type.
        decay: Decay of the matrices.
        betas: Decay rates of the moments; with Muon, those of AdamW.
        n_heads: Attention heads, for Adam-mini.
    """
    check_name("train", "optimizer", kind, OPTIMIZERS)
    groups = blockwise_lr(model, lr, dict(ratios), optimizer=kind, weight_decay=decay)
    if kind == "muon":
        return Together([torch.optim.Muon(groups.muon), torch.optim.AdamW(groups.adamw, betas=betas)])  # type: ignore[arg-type]
    if kind == "lion":
        return Together([Lion(groups, betas=betas)])
    return Together([AdamMini(groups, n_heads, betas) if kind == "adam_mini" else torch.optim.AdamW(groups, betas=betas)])  # type: ignore[arg-type]


def schedule_of(optimizer: Together, **options: Any) -> Together:
    """Return the schedules of an optimizer's parts, with the options of ``hessiankit.training.optim.blockwise_schedule``."""
    return Together([blockwise_schedule(part, **options) for part in optimizer.parts])
