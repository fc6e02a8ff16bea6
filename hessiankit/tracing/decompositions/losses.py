"""Losses: squared, absolute and robust errors, cross entropies and divergences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hessiankit.tracing.decompositions.registry import aten, decomposes


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@decomposes(aten.mse_loss.default)
def _squared_error(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    difference = x - target
    return _reduced(difference * difference, reduction)


@decomposes(aten.huber_loss.default)
def _huber(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    difference = x - target
    size = difference.abs()
    return _reduced(torch.where(size < delta, 0.5 * difference * difference, delta * (size - 0.5 * delta)), reduction)


@decomposes(aten.smooth_l1_loss.default)
def _smooth_absolute_error(x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    return _huber(x, target, reduction, beta) / beta if beta else _reduced((x - target).abs(), reduction)


@decomposes(aten.cross_entropy_loss.default)
def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Rows (N, C) of logits; the plain mean or sum over labels stays whole, since it has a chapter of its own."""
    soft = target.is_floating_point()
    if x.ndim == 2 and weight is None and reduction and not soft:
        return NotImplemented
    if x.ndim != 2:
        rows = _rows(x)
        flat = F.cross_entropy(
            rows,
            _rows(target) if soft else target.reshape(-1),
            weight,
            ignore_index=ignore_index,
            reduction=("none", "mean", "sum")[reduction],
            label_smoothing=label_smoothing,
        )
        return flat if reduction else flat.reshape(x.shape[:1] + x.shape[2:] if x.ndim > 1 else ())
    log_p = torch.log_softmax(x, 1)
    if soft:
        target = target * (1 - label_smoothing) + label_smoothing / x.shape[1] if label_smoothing else target
        loss = -(log_p * (target if weight is None else target * weight)).sum(1)
        return _reduced(loss, reduction)
    plain, count = _likelihood(log_p, target, weight, ignore_index)
    if label_smoothing:
        spread = -(log_p if weight is None else log_p * weight).sum(1).masked_fill(target == ignore_index, 0)
        plain = plain * (1 - label_smoothing) + spread * (label_smoothing / x.shape[1])
    return plain.sum() / count if reduction == 1 else _reduced(plain, reduction)


def _linear_cross_entropy_summed(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, reduction: str, ignored: int, *_: Any
) -> tuple[Tensor, ...]:
    """The logits and their loss; the gradients that the operation also returns, for its own backward, are not read."""
    loss = F.cross_entropy(F.linear(x, weight, bias), target, classes, ignore_index=ignored, reduction=reduction)
    return loss, *(x.new_empty(0) for _ in range(3))


def _linear_cross_entropy_of_rows(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignored: int, *_: Any
) -> Tensor:
    return _linear_cross_entropy_summed(x, weight, target, bias, classes, "none", ignored)[0]


try:
    from torch.nn.modules import linear_cross_entropy as chunks
except ImportError:  # torch 2.12 has no cross entropy of a head in chunks
    pass
else:
    decomposes(chunks._linear_cross_entropy_batch_chunked._opoverload)(_linear_cross_entropy_summed)
    decomposes(chunks._linear_cross_entropy_batch_chunked_no_reduction._opoverload)(_linear_cross_entropy_of_rows)


@decomposes(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def _negative_log_likelihood(
    log_p: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    loss, count = _likelihood(_rows(log_p), target.reshape(-1), weight, ignore_index)
    if reduction == 0:
        return loss.reshape(target.shape)
    return loss.sum() / count if reduction == 1 else loss.sum()


def _rows(x: Tensor) -> Tensor:
    """Turn classes along the second axis (or the only one) into the last of two."""
    return x.unsqueeze(0) if x.ndim == 1 else x.movedim(1, -1).reshape(-1, x.shape[1])


def _likelihood(log_p: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return -w log p of each row's label, zero where it is ignored, and what a mean divides by (zero if all are ignored)."""
    ignored = target == ignore_index
    label = target.long().masked_fill(ignored, 0)
    share = torch.ones_like(label, dtype=log_p.dtype) if weight is None else weight[label]
    share = share.masked_fill(ignored, 0)
    return -log_p.gather(1, label.unsqueeze(1)).squeeze(1).masked_fill(ignored, 0) * share, share.sum()


@decomposes(aten.kl_div.default)
def _divergence(x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False) -> Tensor:
    loss = target.exp() * (target - x) if log_target else torch.xlogy(target, target) - target * x
    return _reduced(loss, reduction)


@decomposes(aten.binary_cross_entropy.default)
def _binary_cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1) -> Tensor:
    """Logarithms are not below -100, as in torch."""
    loss = -(target * x.log().clamp_min(-100) + (1 - target) * torch.log1p(-x).clamp_min(-100))
    return _reduced(loss if weight is None else loss * weight, reduction)


@decomposes(aten.binary_cross_entropy_with_logits.default)
def _binary_cross_entropy_of_logits(
    x: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    steep = 1 if pos_weight is None else 1 + (pos_weight - 1) * target
    loss = (1 - target) * x - steep * F.logsigmoid(x)
    return _reduced(loss if weight is None else loss * weight, reduction)
