"""The P x P Hessian of a task: for each chunk of samples a sweep, or products with unit vectors, added to one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hessiankit.engine.block_rows import BlockRows
from hessiankit.engine.cost import sweep_cost
from hessiankit.engine.linearisation import Linearisation
from hessiankit.engine.matrix_rows import MatrixRows
from hessiankit.engine.paths import Paths
from hessiankit.engine.problem.handshake import Handshake
from hessiankit.engine.problem.loss_trace import loss_trace, normalizer_of, samples_are_independent
from hessiankit.engine.problem.task import Task, check_memory
from hessiankit.engine.product_rows import ProductRows, products_are_cheaper
from hessiankit.engine.storage import SymmetricStorage

WORKSPACE = 512 * 2**20  # bytes of tangents that products with a block of vectors may take
CHUNK = 64 * 2**20  # bytes that the derivatives of a chunk of samples may take; more is slower, as it leaves the cache
MOST = 8 * CHUNK  # of a chunk whose curvature is added to a large matrix
LARGE = 4  # times that, from which it pays to begin again with fewer samples, where it was not seen before


def assemble(
    task: Task,
    matrix: SymmetricStorage,
    *,
    share: float = 1.0,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    gauss_newton: bool = False,
    on_memory: Callable[[int], None] | None = None,
) -> tuple[float, tuple[str, ...]]:
    """Add the Hessian of a task to a matrix.

    Args:
        task: One batch.
        matrix: What is added to; its lower half is left alone.
        share: What the loss is multiplied by.
        batch_size: Samples of a chunk, or None.
        progress: Called with (samples done, samples in all).
        gauss_newton: Whether to add the Gauss-Newton part only.
        on_memory: Called with about the bytes that the derivatives of a chunk take, before they are computed, unless the chunk's
            size follows from an earlier one.

    Returns:
        The loss, and the operations that were differentiated automatically.
    """
    handshake, normalizer, batch = Handshake(task), normalizer_of(task), task.batch
    splittable = is_split(task, batch_size)
    step = batch if not splittable else batch_size or 1
    losses, done, measured = list[float](), 0, False
    fallbacks: tuple[str, ...] = ()
    with task.at(), torch.no_grad():  # where torch differentiates, its graph reads the parameters
        while done < batch:
            rows = slice(done, min(done + step, batch))
            part = task.part(rows) if splittable else task
            traced = loss_trace(part, normalizer)
            loss, fallbacks = float(traced.trace.values[traced.trace.output]), traced.trace.fallbacks
            paths = Paths(traced.trace, traced.output if gauss_newton else None, scale=share)
            cost = sweep_cost(paths)
            if products_are_cheaper(cost, traced.trace, task.size, task.dtype.itemsize):
                kept: dict[str, Any] = {"count": normalizer, "handshake": handshake, "traced": traced}
                ProductRows(Linearisation(part, gauss_newton=gauss_newton, **kept), share).replay(matrix)
            else:
                taken = cost.numbers * task.dtype.itemsize
                undecided = batch_size is None and not splittable and _has_samples(task)
                if undecided and taken > LARGE * chunk_bytes(task) and can_be_split(task):
                    splittable, step = True, next_step(task, batch, taken)
                    continue
                if on_memory is not None and not measured:
                    on_memory(taken)
                handshake.add(traced.trace, paths.adjoints, share)
                if batch_size is None and rows.stop < batch:  # the first chunk tells what a sample takes
                    step, measured = next_step(task, rows.stop - rows.start, taken), True
                BlockRows(paths).read(MatrixRows(matrix, paths.tied))
            done = rows.stop
            losses.append(loss)
            if progress is not None:
                progress(done, batch)
    handshake.close()
    return math.fsum(losses), fallbacks


def check_matrix(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise OutOfMemoryError if the matrix and a minimal workspace do not fit."""
    check_memory("hessian", size, dtype, device, workspace=min(CHUNK, size * size * dtype.itemsize))


def is_split(task: Task, batch_size: int | None) -> bool:
    """Tell whether the samples of a batch are treated in several chunks."""
    cut = (batch_size or 1) < task.batch if batch_size is not None else _guess(task) > chunk_bytes(task)
    return cut and can_be_split(task)


def can_be_split(task: Task) -> bool:
    """Tell whether the loss of a batch is a sum over its samples."""
    return _has_samples(task) and samples_are_independent(task)


def _has_samples(task: Task) -> bool:
    """Tell whether there are several samples, and a loss that is a known sum over them."""
    return task.batch > 1 and isinstance(task.loss, str)


def chunk_bytes(task: Task) -> int:
    """Return the bytes that the derivatives of a chunk may take: each chunk passes over the whole matrix once."""
    return min(MOST, max(2 * CHUNK, task.size**2 * task.dtype.itemsize // 4))


def next_step(task: Task, samples: int, peak_bytes: int) -> int:
    """Return how many samples to treat at once, when some have taken so many bytes."""
    return max(1, chunk_bytes(task) * samples // max(peak_bytes, 1))


def _guess(task: Task) -> float:
    """Return the bytes of all samples' derivatives, if the module is a transformer block: its width is about sqrt(P / 12)."""
    tensors = [x for x in torch.utils._pytree.tree_leaves((task.inputs, task.target)) if isinstance(x, Tensor)]
    width, itemsize = math.sqrt(task.size), task.dtype.itemsize
    return 16 * itemsize * width * sum(x.numel() * (1 if x.is_floating_point() else width / 4) for x in tensors)
