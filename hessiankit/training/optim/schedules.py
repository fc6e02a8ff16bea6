"""Warm-up and decay that keep the ratios of the groups, in both readings of the paper."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_name
from hessiankit.training.optim.steps import blockwise_groups

KINDS, RAMPS, FLOORS = ("cosine", "wsd"), ("direct", "switch"), ("scaled", "common")
FINAL = {"cosine": 1 / 20, "wsd": 0.0}


def schedule_factor(
    step: int, *, warmup: int, steps: int, kind: str = "cosine", peak: float = 1.0, final: float = 1 / 20, stable: float = 2 / 3
) -> float:
    r"""Return the learning rate at a step: linear warm-up to ``peak``, then a decay to ``final`` at ``steps``.

    The warm-up is ``peak * (step + 1) / (warmup + 1)``, so that no step has rate 0. ``"cosine"`` decays from the end of the
    warm-up; ``"wsd"`` stays at the peak to ``int(stable * steps)`` and decays linearly (*The Sharpness Disparity Principle*,
    Sec. 6 and App. A.3). After ``steps`` the rate is ``final``.

    >>> [schedule_factor(step, warmup=1, steps=5, final=0.0) for step in (0, 1, 3, 5, 9)]
    [0.5, 1.0, 0.5, 0.0, 0.0]
    >>> [schedule_factor(step, warmup=0, steps=6, kind="wsd", final=0.0) for step in (0, 4, 5, 6)]
    [1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if step >= steps:
        return final
    start = warmup if kind == "cosine" else max(warmup, int(stable * steps))
    if step <= start:
        return peak
    progress = (step - start) / (steps - start)
    height = (1 + math.cos(math.pi * progress)) / 2 if kind == "cosine" else 1 - progress
    return final + (peak - final) * height


class BlockwiseSchedule(LRScheduler):
    """The scheduler that :func:`blockwise_schedule` returns; its state dict holds numbers and strings alone."""

    def __init__(self, optimizer: Optimizer, settings: dict[str, Any]) -> None:
        self.settings = settings
        groups = optimizer.param_groups
        self.bases = [float(g.get("base_lr", g["lr"])) for g in groups]
        self.ratios = [float(g.get("ratio", 1.0)) for g in groups]
        super().__init__(optimizer)

    def rate(self, base: float, ratio: float, step: int) -> float:
        """Return the learning rate of a block with a ratio at a step."""
        s = self.settings
        options = {key: s[key] for key in ("warmup", "steps", "kind", "stable")}
        if step < s["warmup"] and s["ramp"] == "switch":
            ratio = 1.0
        if s["floor"] == "scaled":
            return base * ratio * schedule_factor(step, final=s["final"], **options)
        return base * schedule_factor(step, peak=ratio, final=s["final"], **options)

    def get_lr(self) -> list[Any]:
        return [self.rate(base, ratio, self.last_epoch) for base, ratio in zip(self.bases, self.ratios, strict=True)]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        for base, group in zip(self.bases, self.optimizer.param_groups, strict=True):
            if "expected_lr" in group:
                group["expected_lr"] = float(group["lr"])
            for cuts in group.get("slices", ()):
                for piece in cuts["pieces"]:
                    rate = self.rate(base, piece["ratio"], self.last_epoch)
                    piece["factor"] = rate / group["expected_lr"] if group["expected_lr"] else 1.0


@checked("blockwise_schedule")
def blockwise_schedule(
    optimizer: Optimizer,
    *,
    warmup: int,
    steps: int,
    kind: str = "cosine",
    ramp: str = "direct",
    floor: str = "scaled",
    final: float | None = None,
    stable: float = 2 / 3,
) -> BlockwiseSchedule:
    r"""Return a scheduler for blockwise groups: warm-up and cosine, or warm-up, stable, decay.

    *The Sharpness Disparity Principle* (Wang et al.) and its released code differ, and neither gives a reason, so both are
    offered. Call ``step()`` after every step of the optimizer.

    Args:
        optimizer: An optimizer that holds groups of :func:`~hessiankit.training.optim.blockwise_lr`; other groups have ratio 1.
        warmup: Steps of linear warm-up.
        steps: Total number of steps; later rates stay at the floor.
        kind: ``"cosine"``, or ``"wsd"``: at the peak until ``stable * steps``, then linear.
        ramp: ``"direct"``: every group warms up to its own peak (the code); ``"switch"``: all warm up to the base rate, and r is
            switched on at the end, a jump by r in one step (App. A.2).
        floor: ``"scaled"``: every group ends at r x final (what "r times the base rate" says); ``"common"``: all end at the
            same rate (the code), so that r fades to 1.
        final: The last rate over the base rate: 1/20 for the cosine (Sec. 6), 0 for ``"wsd"`` (App. A.3; Sec. 6.3 says
            lr_min, the code 1/10).
        stable: Start of the decay of ``"wsd"``, as a fraction of ``steps``.

    Raises:
        InputError: If an option is not one of these, or no group is blockwise.

    >>> import torch
    >>> from hessiankit.blocks import TransformerBlock
    >>> from hessiankit.training.optim import blockwise_lr
    >>> optimizer = torch.optim.AdamW(blockwise_lr(TransformerBlock(d_model=4, d_ff=5), 1.0))
    >>> schedule = blockwise_schedule(optimizer, warmup=1, steps=3, ramp="switch", floor="common", final=0.5)
    >>> for _ in range(4):
    ...     print([group["lr"] for group in optimizer.param_groups])
    ...     optimizer.step()
    ...     schedule.step()
    [0.5, 0.5, 0.5, 0.5]
    [8.0, 4.0, 6.0, 1.0]
    [4.25, 2.25, 3.25, 0.75]
    [0.5, 0.5, 0.5, 0.5]
    """
    final = FINAL.get(kind, 0.0) if final is None else final
    for name, value, choices in (("kind", kind, KINDS), ("ramp", ramp, RAMPS), ("floor", floor, FLOORS)):
        check_name("blockwise_schedule", name, value, choices)
    if not 0 <= warmup < steps:
        raise InputError(f"blockwise_schedule: warmup={warmup} and steps={steps}; expected 0 <= warmup < steps.")
    if not (0 <= final <= 1 and 0 < stable <= 1):
        raise InputError(
            f"blockwise_schedule: final={final} and stable={stable:.4g}; expected fractions of the peak and the steps."
        )
    if not blockwise_groups(optimizer):
        raise InputError(
            f"blockwise_schedule: no group of the {type(optimizer).__name__} has a block type; build it from "
            "blockwise_lr(model, lr)."
        )
    settings = {"warmup": warmup, "steps": steps, "kind": kind, "ramp": ramp, "floor": floor, "final": final, "stable": stable}
    return BlockwiseSchedule(optimizer, settings)
