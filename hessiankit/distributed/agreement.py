"""Whether the ranks hold the same model: a fingerprint of every tensor, compared between the ranks."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import torch
from torch import Tensor

import hessiankit
from hessiankit.distributed.ranks import Ranks
from hessiankit.errors import InputError

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD, _ODD_TOO = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
_CHUNK = 1 << 15  # entries that stay in a processor's cache; a GPU takes a thousand times as many at once


def fingerprint(tensor: Tensor) -> int:
    """Return an integer that depends on every bit of a tensor and on its place: the sum of a hash of each, modulo 2^64.

    Computed where the tensor is; integer arithmetic, so the same on every device.

    >>> x = torch.tensor([1.0, -2.0])
    >>> fingerprint(x) == fingerprint(x.clone()), fingerprint(x) == fingerprint(-x), fingerprint(x) == fingerprint(x.flip(0))
    (True, False, False)
    """
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = _CHUNK if bits.device.type == "cpu" else 1000 * _CHUNK
    for start in range(0, bits.numel(), step):
        x = bits[start : start + step].to(torch.int64, copy=True)
        x ^= torch.arange(start, start + x.numel(), device=x.device).mul_(_ODD)
        for factor in (_ODD, _ODD_TOO):  # multiplying carries differences up, shifting brings them down again
            x = (x ^ (x >> 32)).mul_(factor)
        total += (x ^ (x >> 29)).sum()
    return int(total)


def check_versions(ranks: Ranks) -> None:
    """Raise an error on every rank unless all of them run the same releases."""
    python = ".".join(platform.python_version_tuple()[:2])
    ranks.agree(**{"the version of hessiankit": hessiankit.__version__, "of torch": torch.__version__, "of Python": python})


def check_same_tensors(ranks: Ranks, tensors: Mapping[str, Tensor], what: str) -> None:
    """Raise an error on every rank unless all of them hold the same tensors, bit by bit.

    Args:
        ranks: The ranks.
        tensors: By name.
        what: What they are, in the message: ``"parameter"``.

    Raises:
        InputError: It names the first that differs.
    """
    if ranks.size == 1:
        return
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    ranks.agree(**{f"the {what} {name!r}": shape for name, shape in shapes.items()}, **{f"the number of {what}s": len(shapes)})
    held = ranks.gather([fingerprint(x) for x in tensors.values()])
    for at, name in enumerate(tensors):
        for rank, other in enumerate(held):
            if other[at] != held[0][at]:
                raise InputError(
                    f"{ranks.who}: the {what} {name!r} has other values on rank {rank} than on rank 0; expected the same model "
                    "on every rank: load one checkpoint everywhere, or broadcast the state from rank 0"
                )
