"""The P x P matrix, panel by panel, in a memory-mapped file.

In an unfinished file the diagonal entry of every row that is not finished is NaN, which no finished matrix holds.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hessiankit.curvature.evaluation import Evaluation, check_finite
from hessiankit.curvature.planning import PANEL, Panel, check_workspace, make_plan
from hessiankit.engine.linearisation import linearise
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.support.errors import InputError
from hessiankit.support.files import check_writable
from hessiankit.support.memory import byte_size

SLAB = 32 * 2**20  # bytes that are transposed at once before they are written
AGREE, CANCELLED = 1e3, 64
"""Distance in rounding units that rows computed by products may have from those of a file: relative to the largest entry of a
block, and to the largest entry of all products. The second covers blocks that cancel, such as those of a key bias, which are zero
up to the rounding of terms as large as H: at most 6 units in BERT, GPT-2 and Llama with 300 to 8,000 parameters."""

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)


def check_out(out: str | os.PathLike[str]) -> Path:
    """Return the path of a matrix, which has to end in ``.npy`` and to lie in a folder."""
    path = Path(os.path.abspath(out))
    check_writable("hessian", path)
    if path.suffix != ".npy":
        raise InputError(f"hessian: out={os.fspath(out)!r} is written in NumPy's format; pass a path that ends in '.npy'")
    return path


def write_matrix(path: Path, evaluation: Evaluation, *, overwrite: bool, resume: bool) -> None:
    """Compute the matrix of an evaluation into a file, as :func:`hessiankit.hessian` does, and map it from there.

    The evaluation's progress counts each sample once for each panel.
    """
    if path.exists() and not (overwrite or resume):
        raise InputError(
            f"hessian: {path} exists; pass resume=True to continue it, overwrite=True to replace it, or another out=..."
        )
    first = evaluation.batches[0]
    plan = make_plan(evaluation.batches, evaluation.batch_size, PANEL)
    check_workspace(plan.workspace + SLAB, plan.largest, first.device)
    if resume and path.exists():
        matrix = _opened(path, first.size, first.dtype)
        _check_rows(path, matrix, evaluation)
    else:
        path.unlink(missing_ok=True)
        matrix = _created(path, first.size, first.dtype)
    try:
        asymmetry = _write_panels(matrix, evaluation, plan.panels)
    except BaseException:
        if bool(np.isnan(matrix.diagonal()).all()):
            path.unlink()
        raise
    evaluation.take(_mapped(path, matrix.offset, first.size, matrix.dtype), asymmetry, plan.fallbacks)


def _write_panels(matrix: np.memmap, evaluation: Evaluation, parts: Sequence[Panel]) -> float:
    """Write the rows that are not finished; return the relative asymmetry of their blocks (i, i), NaN of none."""
    spans = list(evaluation.batches[0].slices.values())
    asymmetry = largest = math.nan
    for rows, numbers in groupby(range(len(parts)), lambda n: parts[n][0]):
        at = range(spans[rows[0]].start, spans[rows[-1]].stop)
        if not bool(np.isnan(matrix.diagonal()[at.start : at.stop]).any()):
            continue
        for n in numbers:
            panel, _, _ = evaluation.panel(parts, n)
            difference = panel.mirror() * panel.largest()
            check_finite(panel, evaluation.batches)
            if panel.top.start == panel.left.start:
                diagonal = panel.data.diagonal().cpu().numpy().copy()
                panel.data.fill_diagonal_(math.nan)
                asymmetry, largest = np.fmax(asymmetry, difference), np.fmax(largest, np.abs(diagonal).max(initial=0.0))
            _put(matrix, panel)
        matrix.flush()
        matrix[at, at] = diagonal
    matrix.flush()
    return float(asymmetry / largest) if largest else 0.0


def _numpy(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype


def _opened(path: Path, size: int, dtype: torch.dtype) -> np.memmap:
    try:
        matrix = np.lib.format.open_memmap(path, mode="r")  # opened for writing, a file that is too short would be extended
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"hessian: {path} is no matrix in NumPy's format ({error}); pass overwrite=True to lose it") from error
    expected = _numpy(dtype)
    if matrix.shape != (size, size) or matrix.dtype != expected or np.isfortran(matrix):
        raise InputError(
            f"hessian: {path} holds an array of shape {matrix.shape}, {matrix.dtype}, and the Hessian is {(size, size)}, "
            f"{expected}; pass another out=..., or overwrite=True to lose it"
        )
    return np.lib.format.open_memmap(path, mode="r+")


def _created(path: Path, size: int, dtype: torch.dtype) -> np.memmap:
    """Return a new file of the matrix, for which there is room on the disk."""
    try:
        matrix = np.lib.format.open_memmap(path, mode="w+", dtype=_numpy(dtype), shape=(size, size))
        _reserve(path, matrix.offset + matrix.nbytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        takes = f"the matrix takes {byte_size(size * size * dtype.itemsize)}"
        text = f"hessian: the disk is full: {takes}; make room, or pass another out=..."
        raise OSError(error.errno, text, str(path)) from error
    matrix[range(size), range(size)] = math.nan
    return matrix


def _reserve(path: Path, size: int) -> None:
    """Make room for a file on the disk, where the file system does that."""
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise


def _check_rows(path: Path, matrix: np.memmap, evaluation: Evaluation) -> None:
    """Raise if a random combination of the finished rows of a parameter is not a product with the Hessian, to rounding."""
    first, generator = evaluation.batches[0], torch.Generator().manual_seed(0)
    finished = [(name, rows) for name, rows in first.slices.items() if not bool(np.isnan(matrix.diagonal()[rows]).any())]
    directions = torch.zeros(len(finished) + 1, first.size, dtype=torch.float64, device="cpu")
    directions[-1].normal_(generator=generator)  # the size of H, of which the finished rows may be a small part
    products = torch.zeros_like(directions)
    step = max(1, SLAB // (8 * max(1, first.size)))
    for k, (_, rows) in enumerate(finished):
        directions[k, rows] = torch.randn(rows.stop - rows.start, generator=generator, dtype=torch.float64, device="cpu")
        for start in range(rows.start, rows.stop, step):
            chunk = slice(start, min(start + step, rows.stop))
            products[k] += torch.from_numpy(directions[k, chunk].numpy() @ matrix[chunk])
    expected = torch.zeros_like(directions)
    for batch in evaluation.batches:
        linearised = linearise(batch, gauss_newton=False)
        expected += batch.share * linearised.product(directions.to(first.device, first.dtype)).cpu().double()
    eps, largest = torch.finfo(first.dtype).eps, float(expected.abs().max())
    for k, (name, _) in enumerate(finished):
        for other, columns in first.slices.items():
            a, b = products[k, columns], expected[k, columns]
            allowed = eps * max(AGREE * float(b.abs().max()), CANCELLED * largest)
            if not bool(((a - b).abs() <= allowed).all()):
                raise InputError(
                    f"hessian: {path} holds another Hessian: its finished rows of {name!r} differ from those computed now in "
                    f"the columns of {other!r}. Pass another out=..., or overwrite=True to lose it and start again"
                )


def _put(matrix: np.memmap, panel: SymmetricStorage) -> None:
    """Write a panel and its mirror image."""
    data = panel.data.cpu()
    matrix[panel.top, panel.left] = data.numpy()
    step = max(1, SLAB // max(1, data.shape[0] * data.element_size()))
    for start in range(max(panel.left.start, panel.top.stop), panel.left.stop, step):
        stop = min(start + step, panel.left.stop)
        matrix[start:stop, panel.top] = data[:, start - panel.left.start : stop - panel.left.start].T.contiguous().numpy()


def _mapped(path: Path, offset: int, size: int, dtype: np.dtype) -> Tensor:
    """Return the matrix as a tensor mapped from the file, copy-on-write."""
    with open(path, "rb") as file:
        if hasattr(mmap, "MAP_PRIVATE"):  # without a reserve, or a file larger than the memory could not be mapped
            flags = mmap.MAP_PRIVATE | NO_RESERVE
            pages = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.from_numpy(np.frombuffer(pages, dtype=dtype, offset=offset).reshape(size, size))
