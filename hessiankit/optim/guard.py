"""Check, before every step, that the groups' learning rates are r times a common rate.

The hooks are torch's for all optimizers, and not one optimizer's own: those are lost when an optimizer is copied or loaded, and
an optimizer without them would train slices at a wrong rate.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hessiankit.optim.fused_step import rescale_slices, save_slices
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError

_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
_names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_seen: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()


def remember(p: nn.Parameter, name: str) -> None:
    """Store a parameter's name for the lifetime of the parameter."""
    _names[p] = name


def check_names(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Raise if a group's names are not those that its parameters had when the groups were made.

    torch pairs the groups of a loaded state dict with the optimizer's by position alone. The lists of names are compared when
    they are new, which after ``load_state_dict`` they are; names of wrappers (torch.compile, DDP) do not count.

    Raises:
        InputError: If they differ; with the first parameter that does.
    """
    lists = [group["param_names"] for group in groups if "param_names" in group]
    before = _seen.get(optimizer, [])
    if len(before) == len(lists) and all(a is b for a, b in zip(before, lists, strict=True)):
        return
    for group in groups:
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False):
            own = _names.get(p, name)
            if _plain(own) != _plain(name):
                raise InputError(
                    f"blockwise_lr: the groups of {type(optimizer).__name__} say {name!r} ({group['block_type']}) where the "
                    f"parameter is {own!r}; expected the same model in the same order; the state dict "
                    "that was loaded is of other groups."
                )
    _seen[optimizer] = lists


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


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
    state dict of other groups changes. A rate that is a tensor on an accelerator is not read: that would synchronise with
    the device at every step.

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
    hessiankit.support.errors.InputError: check_groups: the rates of AdamW's groups QK and VO are 0.0006 and 0.0006; expected ...
    """
    groups = blockwise_groups(optimizer)
    check_names(optimizer, groups)
    seen = [g for g in groups if g.get("guard", "raise") != "off" and not _on_accelerator(g["lr"])]
    if not seen:
        return
    largest = max(seen, key=lambda g: float(g["expected_lr"]))
    for group in seen:
        expected = float(group["lr"]) * float(largest["expected_lr"])
        right = float(largest["lr"]) * float(group["expected_lr"])
        if not abs(expected - right) <= _CLOSE * max(abs(expected), abs(right)):
            _report(optimizer, largest, group)
            return


def _on_accelerator(lr: Any) -> bool:
    return isinstance(lr, torch.Tensor) and lr.device.type != "cpu"


def _report(optimizer: Optimizer, first: dict[str, Any], second: dict[str, Any]) -> None:
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


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if blockwise_groups(optimizer):
        check_groups(optimizer)
        save_slices(optimizer)


# Once a process, at import: groups may come from a state dict. Optimizers without blockwise groups are passed over.
register_optimizer_step_pre_hook(_before)
register_optimizer_step_post_hook(lambda optimizer, *_: rescale_slices(optimizer))
