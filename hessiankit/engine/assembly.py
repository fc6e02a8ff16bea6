"""The P x P Hessian of a batch: for each chunk of samples a sweep, or products with unit vectors, added to one matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hessiankit.engine.block_rows import BlockRows
from hessiankit.engine.linearisation import Linearisation
from hessiankit.engine.matrix_rows import MatrixRows
from hessiankit.engine.parts import BatchPart, is_split, parts
from hessiankit.engine.product_rows import add_products
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.handshake import Handshake


def assemble(
    batch: BatchLoss,
    matrix: SymmetricStorage,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    gauss_newton: bool = False,
    on_memory: Callable[[int], None] | None = None,
) -> tuple[float, tuple[str, ...]]:
    """Add the Hessian of a batch to a matrix.

    Args:
        batch: One batch.
        matrix: Matrix; its lower half is not written.
        batch_size: Argument of :func:`parts`.
        progress: Called with (samples done, samples in all).
        on_memory: Called with an estimate of the bytes of a chunk's derivatives, before they are computed.

    Returns:
        The loss, and the operations that were differentiated automatically.
    """
    handshake, split = Handshake(batch), is_split(batch, batch_size)
    losses, fallbacks = list[float](), tuple[str, ...]()
    with batch.at(), torch.no_grad():  # where torch differentiates, its graph reads the parameters
        for part in parts(batch, batch_size, split=split, gauss_newton=gauss_newton):
            if on_memory is not None:
                on_memory(part.bytes)
            add_part(part, matrix, handshake, gauss_newton=gauss_newton)
            fallbacks = part.traced_loss.trace.fallbacks
            losses.append(part.loss)
            if progress is not None:
                progress(part.stop, batch.n_samples)
    handshake.close()
    return math.fsum(losses), fallbacks


def add_part(part: BatchPart, matrix: SymmetricStorage, handshake: Handshake | None, *, gauss_newton: bool) -> None:
    """Add the Hessian of some samples to a matrix or a panel of it, by sweeps or by products with unit vectors."""
    if part.is_long:
        linearised = Linearisation(part.batch, gauss_newton=gauss_newton, handshake=handshake, traced_loss=part.traced_loss)
        add_products(linearised, part.batch.share, matrix)
        return
    if handshake is not None:
        handshake.add(part.paths.trace, part.paths.adjoints, part.batch.share)
    BlockRows(part.paths, part.sections).read(MatrixRows(matrix, part.paths.tied))
