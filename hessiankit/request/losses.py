"""What is known of a loss: what it averages over, and so how the losses of several batches make up that of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.request.calling import Loss

LOSSES = ("mse", "cross_entropy")
IGNORE_INDEX = -100
ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
"""Losses of torch that average over the entries of outputs and target alike."""
_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
}


def loss_module(loss: Loss) -> nn.Module | None:
    """Return the torch loss that a callable is: itself, or for one of torch's functions the module with its defaults."""
    if type(loss) in (*ELEMENTWISE, *_LABELS):
        return loss  # type: ignore[return-value]
    made = _FUNCTIONS.get(loss) if callable(loss) and getattr(loss, "__hash__", None) else None
    return None if made is None else made()


def same_as(loss: Loss, outputs: Any, target: Any) -> str | None:
    """Return the named loss that a loss of torch's equals on these outputs and target, or None.

    >>> same_as(nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.tensor([0, -100]))
    'cross_entropy'
    """
    known = loss_module(loss)
    if known is None or known.reduction != "mean" or not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return None
    if isinstance(known, nn.MSELoss) and (target.shape, target.dtype) == (outputs.shape, outputs.dtype):
        return "mse"
    if isinstance(known, nn.CrossEntropyLoss) and outputs.ndim == 2 and target.dtype == torch.int64:  # else classes on axis 1
        plain = known.weight is None and known.ignore_index == IGNORE_INDEX and known.label_smoothing == 0
        return "cross_entropy" if plain and target.shape == outputs.shape[:1] else None
    return None


def known_reduction(loss: Loss) -> str | None:
    """Return "mean" or "sum", or None where it is not known.

    >>> known_reduction("mse"), known_reduction(nn.NLLLoss(reduction="sum")), known_reduction(len)
    ('mean', 'sum', None)
    """
    if isinstance(loss, str):
        return "mean"
    known = loss_module(loss)
    return None if known is None else str(known.reduction)


def known_count(loss: Loss, target: Any) -> float | None:
    """Return what a loss divides its sum by for this target; None where it is not known.

    The entries ("mse" and torch's entrywise losses); the labels that are not ignored, or the sum of their class weights
    (cross entropy and negative log-likelihood); the samples, for a target of class probabilities.

    >>> labels = torch.tensor([[0, 1, -100]])
    >>> known_count("cross_entropy", labels), known_count(nn.CrossEntropyLoss(ignore_index=0), labels), known_count(None, labels)
    (2.0, 2.0, None)
    """
    if not isinstance(target, Tensor):
        return None
    if loss == "mse":
        return float(target.numel())
    if loss == "cross_entropy":
        return float((target != IGNORE_INDEX).sum())
    known = loss_module(loss)
    if isinstance(known, ELEMENTWISE):
        return float(target.numel())
    if not isinstance(known, _LABELS):
        return None
    if target.is_floating_point():
        classes = target.shape[1] if target.ndim > 1 else target.shape[0]
        return target.numel() / classes
    kept = target[target != known.ignore_index]
    weight = known.weight
    if weight is None:
        return float(kept.numel())
    if kept.numel() and not (int(kept.min()) >= 0 and int(kept.max()) < weight.numel()):
        return math.nan  # the loss itself says what is wrong with the labels
    return float(weight.to(torch.float64)[kept].sum())
