"""Checks of a model before a measurement: independence of sequences, determinism and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from hessiankit.blocks.embeddings import TokenEmbedding
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.support.errors import InputError
from hessiankit.support.memory import byte_size, check_room
from hessiankit.training.partition import Part
from hessiankit.training.sharpness.batches import MicroBatch, forward
from hessiankit.training.sharpness.options import WHO


@contextmanager
def watch_lookups(model: nn.Module, parts: Sequence[Part]) -> Iterator[dict[str, Tensor]]:
    """Yield a dict that forward passes fill: parameter -> which of its rows were looked up, booleans (rows,).

    Only for whole parameters of type Emb that an ``nn.Embedding`` or a ``TokenEmbedding`` owns.
    """
    embedding_names = {part.parameter for part in parts if part.type == "Emb" and part.axis is None}
    names_by_id = {id(p): name for name, p in model.named_parameters() if name in embedding_names}
    row_masks: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for module in model.modules():
            if not isinstance(module, (nn.Embedding, TokenEmbedding)):
                continue
            tables = {letter: p for letter, p in module.named_parameters(recurse=False) if id(p) in names_by_id}
            masks = {letter: torch.zeros(p.shape[0], dtype=torch.bool, device=p.device) for letter, p in tables.items()}
            row_masks |= {names_by_id[id(p)]: masks[letter] for letter, p in tables.items()}

            def mark(_: nn.Module, inputs: tuple[Any, ...], masks: dict[str, Tensor] = masks) -> None:
                ids = inputs[0] if inputs else None
                tokens, positions = masks.get("W_E", masks.get("weight")), masks.get("P")
                if not isinstance(ids, Tensor) or ids.is_floating_point():
                    return
                if tokens is not None and ids.numel() and int(ids.min()) >= 0 and int(ids.max()) < tokens.numel():
                    tokens[ids.reshape(-1).long()] = True
                if positions is not None and ids.ndim:
                    positions[: ids.shape[-1]] = True

            if masks:
                hooks.callback(module.register_forward_pre_hook(mark).remove)
        yield row_masks


def _alike(x: Tensor, y: Tensor, slack: float) -> bool:
    """Tell whether two outputs differ by at most ``slack`` of the largest entry, and have NaN at the same places."""
    largest = float(x.abs().nan_to_num().max()) if x.numel() else 0.0
    return x.shape == y.shape and torch.allclose(x, y, 0.0, slack * largest, equal_nan=True)


@torch.no_grad()
def check_cut(caller: str, model: nn.Module, batches: Sequence[MicroBatch]) -> None:
    """Compare the output of two sequences with those of each alone, where a batch was cut.

    Raises:
        InputError: They differ, or the model does not accept them.
    """
    uncut_batch = next((batch.uncut for batch in batches if batch.uncut is not None), None)
    if uncut_batch is None:
        return
    reason = ""
    try:
        pair, *single = (
            forward(model, uncut_batch.part(rows), caller).detach() for rows in (slice(0, 2), slice(0, 1), slice(1, 2))
        )
        if _alike(pair, torch.cat(single), torch.finfo(pair.dtype).eps ** 0.5):
            return
    except InputError as error:
        reason = f" ({error})"
    raise InputError(
        f"{caller}: two sequences and each of them alone give other outputs, so that micro_batch= changes the result: sequences "
        f"depend on each other, or an input with a row for each of them does not go by sequences{reason}; leave micro_batch out"
    )


def probe(model: nn.Module, batches: Sequence[MicroBatch], *, backward: bool, copies: int) -> None:
    """Check a model by two calls with one sequence.

    With ``backward`` the memory of a backward pass is forecast, with as many ``copies`` of the parameters held at once.

    Raises:
        InputError: If two calls differ, a call changes a buffer, or the batches cannot be cut.
        OutOfMemoryError: If the graph of the largest micro-batch will not fit.
    """
    check_cut(WHO, model, batches)
    largest = max(batches, key=lambda batch: len(batch.numbers))
    sample = _single(largest)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        first, graph = _held(model, sample, backward)
    except InputError:
        if len(sample.numbers) == len(largest.numbers):
            raise
        sample = largest  # something among the inputs does not go by sequences
        first, graph = _held(model, sample, backward)
    with torch.no_grad():
        second = forward(model, sample)
    _check_buffers(model, buffers)
    slack = min(torch.finfo(first.dtype).eps ** 0.5, 1e-3)  # kernels with and without autograd round apart
    if not _alike(first, second, slack):
        raise InputError(
            f"{WHO}: two calls of the model in evaluation mode on the same inputs give different outputs, so it draws random"
            " numbers or depends on earlier calls; turn that off (a dropout that ignores eval(), a router's noise)"
        )
    if backward:
        need = graph * len(largest.numbers) // len(sample.numbers)
        weights = copies * sum(p.numel() * p.element_size() for p in model.parameters())
        graph_of, tensors = "the graph of one micro-batch", f"{copies} tensors of the parameters' size"
        description = f"{graph_of}, {byte_size(need)}, and {tensors}, {byte_size(weights)},"
        check_room(WHO, need + weights, description, first.device, "pass a smaller micro_batch")


def _single(batch: MicroBatch) -> MicroBatch:
    """Return the sequence with most labels."""
    if len(batch.numbers) == 1:
        return batch
    is_counted = batch.target != IGNORE_INDEX if not batch.target.is_floating_point() else torch.ones_like(batch.target)
    k = int(is_counted.reshape(len(batch.numbers), -1).sum(1).argmax())
    return batch.part(slice(k, k + 1))


def _held(model: nn.Module, batch: MicroBatch, backward: bool) -> tuple[Tensor, int]:
    """Return the output, and the bytes that a backward pass needs."""
    if not backward:  # parameters may be spread over ranks, where there is no memory to look at
        with torch.no_grad():
            return forward(model, batch), 0
    graph = CountedGraph(model, keep=True)
    with graph:
        return forward(model, batch).detach(), graph.bytes


class CountedGraph(saved_tensors_hooks):
    """Counts the ``bytes`` that autograd keeps beside the model, each storage once; without ``keep`` they are freed."""

    def __init__(self, model: nn.Module, *, keep: bool) -> None:
        super().__init__(self._count, self._restore)
        self.bytes, self._keep = 0, keep
        storages = (x.untyped_storage() for x in (*model.parameters(), *model.buffers()))
        self._storages = {storage.data_ptr(): StorageWeakRef(storage) for storage in storages}

    def _count(self, x: Tensor) -> Tensor | None:
        storage = x.untyped_storage()
        earlier = self._storages.get(storage.data_ptr())
        if earlier is None or earlier.expired():  # an address is used again once its storage is gone
            self._storages[storage.data_ptr()] = StorageWeakRef(storage)
            self.bytes += storage.nbytes()
        return x if self._keep else None

    def _restore(self, x: Tensor | None) -> Tensor:
        if x is None:
            raise RuntimeError("this graph is only counted")
        return x


def _check_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    current = dict(model.named_buffers())
    names = [name for name, b in buffers.items() if name in current and not torch.equal(current[name], b)]
    for name in names:
        current[name].copy_(buffers[name])
    if names:
        raise InputError(
            f"{WHO}: a call of the model in evaluation mode changes its buffer {names[0]!r}, so the loss is not a function of"
            " the parameters; keep the buffer as it is in forward"
        )
