"""Norms other than layer_norm and rms_norm: over groups of channels, over a channel, by running statistics, of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hessiankit.tracing.decompositions.registry import aten, decomposes


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.reshape(1, -1, *(1,) * (x.ndim - 2))


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * _per_channel(weight, x)
    return x if bias is None else x + _per_channel(bias, x)


@decomposes(aten.group_norm.default)
def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, cudnn: bool = True
) -> Tensor:
    rows = x.reshape(x.shape[0], groups, -1)
    return _scaled(F.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape), weight, bias)


@decomposes(aten.instance_norm.default)
def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if use_input_stats:
        return _group_norm(x, x.shape[1], weight, bias, eps)
    return _batch_norm(x, weight, bias, mean, variance, False, momentum, eps, cudnn)


@decomposes(aten.batch_norm.default)
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    if training or mean is None or variance is None:  # the entries of a channel are one row of a layer norm
        rows = x.transpose(0, 1).reshape(x.shape[1], -1)
        if mean is not None and variance is not None:
            with torch.no_grad():
                mean.lerp_(rows.mean(-1).to(mean), momentum)
                variance.lerp_(rows.var(-1).to(variance), momentum)
        channels = F.layer_norm(rows, rows.shape[-1:], eps=eps).reshape(x.shape[1], x.shape[0], *x.shape[2:])
        return _scaled(channels.transpose(0, 1), weight, bias)
    return _scaled((x - _per_channel(mean, x)) * _per_channel((variance + eps).rsqrt(), x), weight, bias)


@decomposes(aten._weight_norm.default)
def _weight_by_length_and_direction(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / ||v||, a norm for each index of one axis; dim = -1: of the whole."""
    axes = tuple(range(v.ndim)) if dim == -1 else tuple(k for k in range(v.ndim) if k != dim)
    return v * (g / torch.sqrt((v * v).sum(axes, keepdim=True)))
