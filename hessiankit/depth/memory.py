"""What the diagnostics hold at once, counted on one micro-batch before the long work begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hessiankit.depth.blocks import WHO, Blocks
from hessiankit.depth.data import Data
from hessiankit.depth.recording import recording
from hessiankit.errors import OutOfMemoryError
from hessiankit.request.task import available_memory, gib

BASIS = 20
"""Vectors that Lanczos keeps."""
SECOND = 3
"""A graph with second derivatives, in graphs of a training step: the forward pass, its derivative, and work space."""


def expected_memory(data: Data, blocks: Blocks, asked: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes that each quantity is expected to hold beside the model: one micro-batch's states and graphs.

    Args:
        data: The data; the largest micro-batch is run once.
        blocks: The blocks.
        asked: The quantities.

    Raises:
        OutOfMemoryError: If one of them does not fit.
    """
    batch = max(data.batches, key=lambda b: len(b.numbers))
    saved = _Saved(data.model)
    with torch.enable_grad(), recording(blocks) as found, saved_tensors_hooks(saved.count, saved.restore):
        out = data.output(batch)
    x = found.inputs[0]
    states = (len(blocks) + 1) * x.numel()
    graph = saved.bytes + out.numel() * out.element_size()
    largest = max((sum(p.numel() for p in block.parameters()) for block in blocks.modules), default=0)
    weights = sum(p.numel() * p.element_size() for block in blocks.modules for p in block.parameters())
    needed = {
        "variance": states * (x.element_size() + 8),
        "angles": states * (x.element_size() + 8),
        "drop": out.numel() * 24,
        "gradient": graph + 2 * out.numel() * out.element_size() + 2 * weights,
        "jacobian": 2 * SECOND * graph + BASIS * x.numel() * x.element_size(),
        "hessian": SECOND * graph + weights + BASIS * largest * x.element_size(),
        "ggn": SECOND * graph + weights + BASIS * largest * x.element_size(),
    }
    needed = {name: size for name, size in needed.items() if name in asked}
    free = available_memory(x.device)
    for name, size in needed.items():
        if size > free:
            raise OutOfMemoryError(
                f"{WHO}: {name!r} holds about {gib(size)} for {len(batch.numbers)} sequences at once, but only {gib(free)} "
                f"are free on {x.device}; pass a smaller micro_batch=, or leave it out of what="
            )
    return needed


class _Saved:
    """Counts what autograd would keep beside the model, each storage once, and keeps none of it."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self.seen: dict[int, StorageWeakRef] = {}
        for x in (*model.parameters(), *model.buffers()):
            self.seen[x.untyped_storage().data_ptr()] = StorageWeakRef(x.untyped_storage())

    def count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        earlier = self.seen.get(storage.data_ptr())
        if earlier is None or earlier.expired():  # an address is used again once its storage is gone
            self.seen[storage.data_ptr()] = StorageWeakRef(storage)
            self.bytes += storage.nbytes()

    @staticmethod
    def restore(_: None) -> Tensor:
        raise RuntimeError("this graph is only counted")
