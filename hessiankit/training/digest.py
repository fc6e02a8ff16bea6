"""A digest of tensors and plain values, which two runs or two processes compare."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.torch_state import strided_parts


def digest(x: Any) -> str:
    """Return a digest of tensors and plain values, nested in any way.

    >>> digest([torch.ones(2), 1]) == digest([torch.ones(2), 1]), digest(torch.ones(2)) == digest(torch.ones(2, 1))
    (True, False)
    """
    total = hashlib.sha256()
    leaves, structure = torch.utils._pytree.tree_flatten(x)
    total.update(str(structure).encode() if len(leaves) != 1 else b"")
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            total.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            for part in strided_parts(leaf):
                flat = part.detach().cpu().contiguous().reshape(-1)
                total.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        else:
            plain = leaf is None or isinstance(leaf, (bool, int, float, str))
            total.update((repr(leaf) if plain else type(leaf).__qualname__).encode())
    return total.hexdigest()
