"""Learning rates for the slices of one tensor: each slice's step is rescaled after the optimizer's.

An optimizer moves a tensor with one learning rate. If its step is linear in that rate and its state does not see the rate, then

    theta[slice] <- theta[slice] + f (theta'[slice] - theta[slice])

is the step with f times the rate (sharpness-disparity/fused of The Sharpness Disparity Principle). Scaling the gradient is not:
AdamW and Lion divide it out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import ASGD, LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adamax, Optimizer, RMSprop, Rprop

from hessiankit.support.errors import InputError

_NOT_LINEAR = (LBFGS, Rprop, ASGD, Adafactor)
_DECAY_IN_GRADIENT = (SGD, RMSprop, Adagrad, Adadelta, Adamax)
_FOUND = ("Shard", "Replicate")
"""Placements of a DTensor in which a rank's rows are consecutive, so that slices are found in them."""


@dataclass(frozen=True)
class _SavedSlice:
    """A slice whose step is rescaled, and its values before the step."""

    group: dict[str, Any]
    parameter: nn.Parameter
    axis: int
    piece: dict[str, Any]
    before: Tensor

    @property
    def now(self) -> Tensor:
        return _slice(self.parameter, self.axis, self.piece)


_saved: WeakKeyDictionary[Optimizer, list[_SavedSlice]] = WeakKeyDictionary()
_without_copies: WeakSet[Optimizer] = WeakSet()


@torch.no_grad()
def save_slices(optimizer: Optimizer) -> None:
    """Save the slices whose step will be rescaled, before the step.

    Raises:
        InputError: If the optimizer's step is not linear in its rate, a tensor no longer has the shape that was cut, or slices
            that need different weight decays meet an optimizer that adds the decay to the gradient.
    """
    saved = []
    for group in optimizer.param_groups:
        for p, cuts in zip(group["params"], group.get("slices", ()), strict=False):
            pieces = [piece for piece in cuts["pieces"] if _differs(piece, group)]
            if pieces:
                _check(optimizer, group, p, cuts, pieces)
            axis = cuts["axis"]
            for piece in pieces:
                saved.append(_SavedSlice(group, p, axis, piece, _slice(p, axis, piece).clone()))
    if saved:
        _saved[optimizer] = saved
    else:
        _saved.pop(optimizer, None)


@torch.no_grad()
def rescale_slices(optimizer: Optimizer) -> None:
    """Rescale the step of every saved slice.

    Raises:
        InputError: After an optimizer's first step, if its state holds a copy of the weights, which would undo the rescaling.
    """
    done = _saved.pop(optimizer, [])
    if done and optimizer not in _without_copies:
        _refuse_copies(optimizer, [item.parameter for item in done])
        _without_copies.add(optimizer)
    for item in done:
        piece, group, now = item.piece, item.group, item.now
        moved = torch.lerp(item.before, now, piece["factor"])
        other = group["weight_decay"] - piece["weight_decay"]
        if other and item.parameter.grad is not None:  # without a gradient there was no step, and no decay
            moved += (piece["factor"] * group["lr"] * other * _stepped(optimizer, now)) * item.before
        now.copy_(moved)
    if done and _saved:  # an optimizer around this one would rescale the same step again
        parameters = {id(item.parameter) for item in done}
        for outer in list(_saved):
            _saved[outer] = [item for item in _saved[outer] if id(item.parameter) not in parameters]


def _slice(p: Any, axis: int, piece: dict[str, Any]) -> Tensor:
    """Return the view of a slice; of a sharded parameter (FSDP2), the rows of it that lie on this rank, perhaps none."""
    start, stop = piece["start"], piece["stop"]
    local = _local(p)
    if hasattr(p, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1][axis]
        start, stop = (min(max(end - first, 0), local.shape[axis]) for end in (start, stop))
    return local.narrow(axis, start, stop - start)


def _differs(piece: dict[str, Any], group: dict[str, Any]) -> bool:
    return bool(piece["factor"] != 1 or piece["weight_decay"] != group["weight_decay"])


def _stepped(optimizer: Optimizer, like: Tensor) -> Tensor | float:
    """Return 0 where a fused optimizer skipped the step itself because GradScaler found an infinity, else 1."""
    skipped = getattr(optimizer, "found_inf", None)
    return 1.0 if skipped is None else (skipped == 0).to(like)


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
    who = type(optimizer).__name__
    if isinstance(optimizer, _NOT_LINEAR):
        raise InputError(
            f"blockwise_lr: the step of {who} is not linear in its rate, so that slices of a fused tensor cannot have their own; "
            "use AdamW, Lion or SGD, or split the tensor."
        )
    if list(p.shape) != list(cuts["shape"]) or not all(type(x).__name__ in _FOUND for x in getattr(p, "placements", ())):
        raise InputError(
            f"blockwise_lr: a fused tensor of {group['block_type']} is now a {type(p).__name__} of shape {tuple(p.shape)}, "
            f"{getattr(p, 'placements', 'not sharded')}; expected {tuple(cuts['shape'])}, whole or as a DTensor (FSDP2) in plain "
            "shards. Split the tensor, or give its types one ratio."
        )
    in_gradient = isinstance(optimizer, _DECAY_IN_GRADIENT) or group.get("decoupled_weight_decay") is False
    if in_gradient and any(piece["weight_decay"] != group["weight_decay"] for piece in pieces):
        raise InputError(
            f"blockwise_lr: the slices of a fused tensor of {group['block_type']} have different weight decays, and {who} adds "
            "the decay to the gradient of the whole tensor; use couple_decay=True and one decay for its types, or AdamW."
        )
