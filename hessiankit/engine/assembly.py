"""The P x P Hessian of a task: for each chunk of samples a sweep, or products with unit vectors, added to one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hessiankit.engine.block_rows import BlockRows
from hessiankit.engine.linearisation import Linearisation
from hessiankit.engine.matrix_rows import MatrixRows
from hessiankit.engine.parts import BatchPart, is_split, parts
from hessiankit.engine.problem.handshake import Handshake
from hessiankit.engine.problem.loss_trace import normalizer_of
from hessiankit.engine.problem.task import Task
from hessiankit.engine.product_rows import add_products
from hessiankit.engine.storage import SymmetricStorage


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
        matrix: Its lower half is left alone.
        share: What the loss is multiplied by.
        batch_size: As in :func:`parts`.
        progress: Called with (samples done, samples in all).
        on_memory: Called with about the bytes that the derivatives of a chunk take, before they are computed.

    Returns:
        The loss, and the operations that were differentiated automatically.
    """
    handshake, normalizer = Handshake(task), normalizer_of(task)
    split = is_split(task, batch_size)
    losses, fallbacks = list[float](), tuple[str, ...]()
    with task.at(), torch.no_grad():  # where torch differentiates, its graph reads the parameters
        for part in parts(task, normalizer, batch_size, split=split, share=share, gauss_newton=gauss_newton):
            if on_memory is not None:
                on_memory(part.bytes)
            add_part(part, matrix, handshake, normalizer, share=share, gauss_newton=gauss_newton)
            fallbacks = part.traced.trace.fallbacks
            losses.append(part.loss)
            if progress is not None:
                progress(part.stop, task.batch)
    handshake.close()
    return math.fsum(losses), fallbacks


def add_part(
    part: BatchPart, matrix: SymmetricStorage, handshake: Handshake | None, normalizer: float, *, share: float, gauss_newton: bool
) -> None:
    """Add the Hessian of some samples to a matrix or a panel of it, by sweeps or by products with unit vectors."""
    if part.is_long:
        linearised = Linearisation(
            part.task, gauss_newton=gauss_newton, count=normalizer, handshake=handshake, traced=part.traced
        )
        add_products(linearised, share, matrix)
        return
    if handshake is not None:
        handshake.add(part.paths.trace, part.paths.adjoints, share)
    BlockRows(part.paths, part.sections).read(MatrixRows(matrix, part.paths.tied))
