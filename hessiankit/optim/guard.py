"""A look at the groups' learning rates before every step: are they still r times a common rate?"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from hessiankit.arguments import checked
from hessiankit.errors import InputError
from hessiankit.optim.names import check_names

MODES = ("raise", "warn", "off")
_CLOSE = 1e-6


def blockwise_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer that :func:`~hessiankit.optim.blockwise_lr` made."""
    return [group for group in optimizer.param_groups if "block_type" in group and "expected_lr" in group]


@checked("check_groups")
def check_groups(optimizer: Optimizer) -> None:
    """Check an optimizer's groups now; every step of it does the same.

    The rates must be in the proportion that :func:`~hessiankit.optim.blockwise_lr` or
    :func:`~hessiankit.optim.blockwise_schedule` gave them, to 1e-6; and the names must be those of the parameters, which a
    state dict of other groups changes. A rate that is a tensor on an accelerator is not looked at: that would wait for the
    device at every step.

    Raises:
        InputError: If not; a warning for the rates where the groups were made with ``guard="warn"``, nothing with ``"off"``.

    >>> from hessiankit.blocks import TransformerBlock
    >>> from hessiankit.optim import blockwise_lr
    >>> optimizer = torch.optim.AdamW(blockwise_lr(TransformerBlock(d_model=4, d_ff=5), 1e-3))
    >>> check_groups(optimizer)
    >>> for group in optimizer.param_groups:  # as a loop for plain AdamW does
    ...     group["lr"] = 6e-4
    >>> check_groups(optimizer)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hessiankit.errors.InputError: check_groups: the rates of AdamW's groups QK and VO are 0.0006 and 0.0006; expected ...
    """
    groups = blockwise_groups(optimizer)
    check_names(optimizer, groups)
    seen = [g for g in groups if g.get("guard", "raise") != "off" and not _far(g["lr"])]
    if not seen:
        return
    largest = max(seen, key=lambda g: float(g["expected_lr"]))
    for group in seen:
        ours = float(group["lr"]) * float(largest["expected_lr"])
        theirs = float(largest["lr"]) * float(group["expected_lr"])
        if not abs(ours - theirs) <= _CLOSE * max(abs(ours), abs(theirs)):
            _complain(optimizer, largest, group)
            return


def _far(lr: Any) -> bool:
    return isinstance(lr, torch.Tensor) and lr.device.type != "cpu"


def _complain(optimizer: Optimizer, first: dict[str, Any], second: dict[str, Any]) -> None:
    proportion = float(first["expected_lr"]) / max(float(second["expected_lr"]), 1e-300)
    text = (
        f"blockwise_lr: the rates of {type(optimizer).__name__}'s groups {first['block_type']} and {second['block_type']} are "
        f"{float(first['lr']):.4g} and {float(second['lr']):.4g}; expected the first to be {proportion:.4g} times the second. "
        "A scheduler or a loop has written them; multiply every group's own rate (lr * group['ratio']), or use "
        "hessiankit.optim.blockwise_schedule; guard='off' in blockwise_lr stops this check."
    )
    if second.get("guard") == "warn":
        warnings.warn(text, stacklevel=5)
    else:
        raise InputError(text)
