"""Hooks around every step of an optimizer with blockwise groups: a check of the rates, and a rescaling of the slices' steps.

An optimizer moves a tensor with one learning rate. If its step is linear in that rate and its state does not see the rate, then

    theta[slice] <- theta[slice] + f (theta'[slice] - theta[slice])

is the step with f times the rate (sharpness-disparity/fused of The Sharpness Disparity Principle). Scaling the gradient is not:
AdamW and Lion divide it out again.

The hooks are torch's for all optimizers, and not one optimizer's own: those are lost when an optimizer is copied or loaded, and
an optimizer without them would train slices at a wrong rate.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, Optimizer, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError

_NOT_LINEAR = (LBFGS, Rprop, ASGD, Adafactor)
_DECAY_IN_GRADIENT = (SGD, RMSprop, Adagrad, Adadelta, Adamax)
_CONSECUTIVE = ("Shard", "Replicate")
"""Placements of a DTensor in which a rank's rows are consecutive, so that slices are found in them."""


@dataclass(frozen=True)
class _SavedSlice:
    """A slice whose step is rescaled, and its values before the step."""

    group: dict[str, Any]
    parameter: nn.Parameter
    axis: int
    piece: dict[str, Any]
    origin: Tensor

    @property
    def view(self) -> Tensor:
        return _slice(self.parameter, self.axis, self.piece)


_slices: WeakKeyDictionary[Optimizer, list[_SavedSlice]] = WeakKeyDictionary()
_without_copies: WeakSet[Optimizer] = WeakSet()


@torch.no_grad()
def save_slices(optimizer: Optimizer) -> None:
    """Save the slices whose step will be rescaled, before the step; refuse an optimizer whose step cannot be."""
    slices = []
    for group in optimizer.param_groups:
        for p, cuts in zip(group["params"], group.get("slices", ()), strict=False):
            decay = group["weight_decay"]
            pieces = [piece for piece in cuts["pieces"] if piece["factor"] != 1 or piece["weight_decay"] != decay]
            if pieces:
                _check(optimizer, group, p, cuts, pieces)
            axis = cuts["axis"]
            for piece in pieces:
                slices.append(_SavedSlice(group, p, axis, piece, _slice(p, axis, piece).clone()))
    _slices.pop(optimizer, None)
    if slices:
        _slices[optimizer] = slices


@torch.no_grad()
def rescale_slices(optimizer: Optimizer) -> None:
    """Rescale the step of every saved slice; refuse, after its first step, an optimizer whose state holds the weights."""
    slices = _slices.pop(optimizer, [])
    if slices and optimizer not in _without_copies:
        _refuse_copies(optimizer, [item.parameter for item in slices])
        _without_copies.add(optimizer)
    for item in slices:
        piece, group, values = item.piece, item.group, item.view
        result = torch.lerp(item.origin, values, piece["factor"])
        decay_difference = group["weight_decay"] - piece["weight_decay"]
        if decay_difference and item.parameter.grad is not None:  # without a gradient there was no step, and no decay
            result += (piece["factor"] * group["lr"] * decay_difference * _stepped(optimizer, values)) * item.origin
        values.copy_(result)
    if slices and _slices:  # an optimizer around this one would rescale the same step again
        parameters = {id(item.parameter) for item in slices}
        for outer in list(_slices):
            _slices[outer] = [item for item in _slices[outer] if id(item.parameter) not in parameters]


def _slice(p: Any, axis: int, piece: dict[str, Any]) -> Tensor:
    """Return the view of a slice; of a sharded parameter (FSDP2), the rows of it that lie on this rank, perhaps none."""
    start, stop = piece["start"], piece["stop"]
    local = _local(p)
    if hasattr(p, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1][axis]
        start, stop = (min(max(end - first, 0), local.shape[axis]) for end in (start, stop))
    return local.narrow(axis, start, stop - start)


def _stepped(optimizer: Optimizer, like: Tensor) -> Tensor | float:
    """Return 0 where a fused optimizer skipped the step after GradScaler found an infinity, else 1."""
    skips = getattr(optimizer, "found_inf", None)
    return 1.0 if skips is None else (skips == 0).to(like)


def _refuse_copies(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        weights = _local(p)
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.shape != p.shape or not bool(weights.any()):
                continue
            if torch.equal(_local(value).to(weights), weights):
                raise InputError(
                    f"blockwise_lr: {type(optimizer).__name__} keeps the weights of a fused tensor a second time, as {key!r}, "
                    "and its next step would undo the rates of the slices; split the tensor, or give its types one ratio."
                )


def _local(tensor: Any) -> Tensor:
    """Return a tensor, or its shard on this rank."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "device_mesh") else tensor
    return local


def _check(
    optimizer: Optimizer, group: dict[str, Any], p: nn.Parameter, cuts: dict[str, Any], pieces: list[dict[str, Any]]
) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, _NOT_LINEAR):
        raise InputError(
            f"blockwise_lr: the step of {name} is not linear in its rate, so that slices of a fused tensor cannot have their "
            "own; use AdamW, Lion or SGD, or split the tensor."
        )
    if list(p.shape) != list(cuts["shape"]) or not all(type(x).__name__ in _CONSECUTIVE for x in getattr(p, "placements", ())):
        raise InputError(
            f"blockwise_lr: a fused tensor of {group['block_type']} is now a {type(p).__name__} of shape {tuple(p.shape)}, "
            f"{getattr(p, 'placements', 'not sharded')}; expected {tuple(cuts['shape'])}, whole or as a DTensor (FSDP2) in plain "
            "shards. Split the tensor, or give its types one ratio."
        )
    is_decoupled = group.get("decoupled_weight_decay", not isinstance(optimizer, Adam))  # Adam's group has it since torch 2.7
    in_gradient = isinstance(optimizer, _DECAY_IN_GRADIENT) or is_decoupled is False
    if in_gradient and any(piece["weight_decay"] != group["weight_decay"] for piece in pieces):
        raise InputError(
            f"blockwise_lr: the slices of a fused tensor of {group['block_type']} have different weight decays, and {name} adds "
            "the decay to the gradient of the whole tensor; use couple_decay=True and one decay for its types, or AdamW."
        )


_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
NAMES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The name that a parameter had when its groups were made, for the lifetime of the parameter."""
_name_lists: WeakKeyDictionary[Optimizer, list[list[str]]] = WeakKeyDictionary()


def check_names(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Raise if a group's names are not those that its parameters had when the groups were made.

    torch pairs the groups of a loaded state dict with the optimizer's by position alone. The lists of names are compared when
    they are new, which after ``load_state_dict`` they are; names of wrappers (torch.compile, DDP) do not count.
    """
    lists = [group["param_names"] for group in groups if "param_names" in group]
    old_lists = _name_lists.get(optimizer, [])
    if len(old_lists) == len(lists) and all(a is b for a, b in zip(old_lists, lists, strict=True)):
        return
    for group in groups:
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False):
            registered_name = NAMES.get(p, name)
            if _plain(registered_name) != _plain(name):
                raise InputError(
                    f"blockwise_lr: the groups of {type(optimizer).__name__} say {name!r} ({group['block_type']}) where the "
                    f"parameter is {registered_name!r}; expected the same model in the same order; the state dict "
                    "that was loaded is of other groups."
                )
    _name_lists[optimizer] = lists


def _plain(name: str) -> str:
    return _WRAPPERS.sub("", name)


MODES = ("raise", "warn", "off")
_CLOSE = 1e-6


def blockwise_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer that :func:`~hessiankit.training.optim.blockwise_lr` made."""
    return [group for group in optimizer.param_groups if "block_type" in group and "expected_lr" in group]


@checked("check_groups")
def check_groups(optimizer: Optimizer) -> None:
    """Check an optimizer's groups now; every step of it does the same.

    The rates must be in the proportion that :func:`~hessiankit.training.optim.blockwise_lr` or
    :func:`~hessiankit.training.optim.blockwise_schedule` gave them, to 1e-6; and the names must be those of the parameters, which
    a state dict of other groups changes. A rate that is a tensor on an accelerator is not read: that would synchronise with
    the device at every step.

    Raises:
        InputError: If not; a warning for the rates where the groups were made with ``guard="warn"``, nothing with ``"off"``.

    >>> from hessiankit.blocks import TransformerBlock
    >>> from hessiankit.training.optim import blockwise_lr
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
    checked_groups = [g for g in groups if g.get("guard", "raise") != "off" and getattr(g["lr"], "is_cpu", True)]
    if not checked_groups:
        return
    largest = max(checked_groups, key=lambda g: float(g["expected_lr"]))
    for group in checked_groups:
        left_side = float(group["lr"]) * float(largest["expected_lr"])
        right_product = float(largest["lr"]) * float(group["expected_lr"])
        if not abs(left_side - right_product) <= _CLOSE * max(abs(left_side), abs(right_product)):
            _report(optimizer, largest, group)
            return


def _report(optimizer: Optimizer, first: dict[str, Any], second: dict[str, Any]) -> None:
    proportion = float(first["expected_lr"]) / max(float(second["expected_lr"]), 1e-300)
    text = (
        f"blockwise_lr: the rates of {type(optimizer).__name__}'s groups {first['block_type']} and {second['block_type']} are "
        f"{float(first['lr']):.4g} and {float(second['lr']):.4g}; expected the first to be {proportion:.4g} times the second. "
        "A scheduler or a loop has written them; multiply every group's own rate (lr * group['ratio']), or use "
        "hessiankit.training.optim.blockwise_schedule; guard='off' in blockwise_lr stops this check."
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
