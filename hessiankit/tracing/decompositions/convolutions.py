"""Convolutions: windows of the image, and one linear map of each; transposed, a linear map, and windows added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from hessiankit.tracing.decompositions.registry import aten, decomposes


@decomposes(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
@decomposes(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    """The windows as rows (B, *positions, C, *kernel), and the weight as a linear map of each; in the image's memory format."""
    axes = weight.ndim - 2
    if x.ndim == axes + 1:
        return _convolution(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    kernel, strides, steps = weight.shape[2:], _each(stride, axes), _each(dilation, axes)
    is_channels_last = x.movedim(1, -1).is_contiguous() and not x.is_contiguous()
    if isinstance(padding, str):
        totals = [step * (length - 1) if padding == "same" else 0 for step, length in zip(steps, kernel, strict=True)]
        pads = [(total // 2, total - total // 2) for total in totals]
    else:
        pads = [(pad, pad) for pad in _each(padding, axes)]
    if any(map(any, pads)):
        x = F.pad(x, [p for pad in reversed(pads) for p in pad])
    windows = _tiles(x, kernel) if strides == list(kernel) and set(steps) == {1} else None
    if windows is None:
        windows = x
        for k, (length, stride_k, step) in enumerate(zip(kernel, strides, steps, strict=True)):
            windows = windows.unfold(2 + k, step * (length - 1) + 1, stride_k)[..., ::step]
        windows = windows.movedim(1, 1 + axes)
    rows = windows.flatten(2 + axes)  # (B, *positions, C, kernel)
    if groups == 1:
        out = F.linear(rows.flatten(-2), weight.flatten(1), bias)
    else:
        by_group = rows.unflatten(-2, (groups, -1)).flatten(-2).unsqueeze(-2)  # (B, *positions, groups, 1, inputs)
        out = (by_group @ weight.flatten(1).unflatten(0, (groups, -1)).mT).flatten(-3)
        out = out if bias is None else out + bias
    out = out.movedim(-1, 1)
    return out if is_channels_last else out.contiguous()  # as torch's own, of which a module may take views


def _tiles(x: Tensor, kernel: Sequence[int]) -> Tensor | None:
    """Windows that do not overlap, without choosing entries one by one; None where they do not divide the image."""
    if any(n % length for n, length in zip(x.shape[2:], kernel, strict=True)):
        return None
    axes = len(kernel)
    for k, length in enumerate(kernel):
        x = x.unflatten(2 + 2 * k, (-1, length))
    positions, offsets = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
    return x.permute(0, *positions, 1, *offsets)


def _each(value: Sequence[int], axes: int) -> list[int]:
    return list(value) * (axes // len(value))


@decomposes(aten.conv_transpose1d.default, aten.conv_transpose2d.input)
def _transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """Every position's patch, a linear map of its channels, and the patches added where they overlap."""
    axes = weight.ndim - 2
    if x.ndim == axes + 1:
        unsqueezed = _transposed_convolution(x.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation)
        return unsqueezed.squeeze(0)
    kernel, strides, pads = list(weight.shape[2:]), _each(stride, axes), _each(padding, axes)
    steps, rests = _each(dilation, axes), _each(output_padding, axes)
    size = [(n - 1) * strides[k] - 2 * pads[k] + steps[k] * (kernel[k] - 1) + rests[k] + 1 for k, n in enumerate(x.shape[2:])]
    one, zeros = (1,) * (2 - axes), (0,) * (2 - axes)  # one dimension is an image of one row
    rows = x.flatten(2).unflatten(1, (groups, -1))  # (B, groups, inputs, positions)
    patches = (weight.flatten(1).unflatten(0, (groups, -1)).mT @ rows).flatten(1, 2)  # (B, C kernel, positions)
    shape, window, skip = (*one, *size), (*one, *kernel), (*one, *steps)
    out = F.fold(patches, shape, window, skip, (*zeros, *pads), (*one, *strides))
    out = out.reshape(*out.shape[:2], *size)
    return out if bias is None else out + bias.reshape(-1, *(1 for _ in size))


@decomposes(aten.col2im.default)
def _fold(
    x: Tensor, size: Sequence[int], kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Any:
    """Onto an image with its padding, which is then cut off; without padding it stays whole."""
    if not any(padding):
        return NotImplemented
    height, width = (n + 2 * p for n, p in zip(size, padding, strict=True))
    out = F.fold(x, (height, width), tuple(kernel), tuple(dilation), 0, tuple(stride))
    top, margin = padding
    return out[..., top : top + size[0], margin : margin + size[1]].contiguous()
