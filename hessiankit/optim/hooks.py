"""What happens at every step of an optimizer that holds blockwise groups: the guard, and the rescaled slices.

The hooks are torch's for all optimizers, and not one optimizer's own: those are lost when an optimizer is copied or loaded, and
an optimizer that was never attached would train slices at a rate that nobody asked for.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hessiankit.optim.fused_step import hold_slices, rescale_slices
from hessiankit.optim.guard import blockwise_groups, check_groups

_watching: list[Any] = []


def watch() -> None:
    """Register the hooks, once a process. Optimizers without blockwise groups are passed over."""
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_before))
        _watching.append(register_optimizer_step_post_hook(_after))


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if blockwise_groups(optimizer):
        check_groups(optimizer)
        hold_slices(optimizer)


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    rescale_slices(optimizer)
