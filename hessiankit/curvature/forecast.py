"""Forecast of memory, disk, operations and time of a Hessian, before it is computed."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from hessiankit.curvature.planning import PANEL, make_plan
from hessiankit.curvature.streaming import SLAB
from hessiankit.engine.storage import zeros
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.support.files import WithDict
from hessiankit.support.memory import available_memory, byte_size
from hessiankit.support.tables import Piece, Printed, table

_HEADERS = ("of the Hessian", "forecast")
MARGIN = 64 * 2**20  # bytes for what libraries take besides tensors
LOOSE = 1.5  # copies that operations make for themselves, and the allocator's holes
DISK = 5e8  # bytes that it takes per second
FRESH = 1024  # rows of a matrix of 8 MiB that is touched to see how fast new pages come


@dataclass(frozen=True, repr=False)
class Forecast(Printed, WithDict):
    """Memory, disk and time of a Hessian, from the shapes of a chunk of samples; made by ``hessian(..., dry_run=True)``.

    Attributes:
        parameters: P.
        dtype: Type of the matrix.
        device: Where it is computed.
        samples: In all batches.
        batches: How many.
        chunks: Groups of samples that are treated together.
        panels: Groups of rows that are written one after the other; 1 without ``out``.
        matrix_bytes: The P x P matrix.
        workspace_bytes: Upper bound of the memory besides the matrix or its panel; at most four times the true one, except
            for small models, which take less than the allowance for libraries.
        memory_bytes: Memory at most, in all.
        disk_bytes: Size of the file, 0 without ``out``.
        free_memory: Free bytes of memory now.
        free_disk: Free bytes where ``out`` is; 0 without it.
        flops: Floating-point operations in products of matrices; a multiply-add counts as two.
        moved: Bytes read and written by all operations.
        operations: Calls of torch, repeated ones counted each time.
        seconds: Estimate from the speeds of this machine, measured just now; a factor of 3 either way is usual.
        fallbacks: Operations without a closed form, which will be differentiated automatically.

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.ones(3, 2, dtype=torch.float64)
    >>> found = hk.hessian(layer, x, torch.zeros(3, 1, dtype=torch.float64), dry_run=True)
    >>> found.parameters, found.matrix_bytes, found.fits
    (2, 32, True)
    """

    parameters: int
    dtype: str
    device: str
    samples: int
    batches: int
    chunks: int
    panels: int
    matrix_bytes: int
    workspace_bytes: int
    memory_bytes: int
    disk_bytes: int
    free_memory: int
    free_disk: int
    flops: float
    moved: float
    operations: int
    seconds: float
    fallbacks: tuple[str, ...]

    _derived = ("fits",)

    @property
    def fits(self) -> bool:
        """Whether memory and disk suffice as they are now."""
        return self.memory_bytes <= self.free_memory and self.disk_bytes <= self.free_disk

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "parameters", f"{self.parameters:,}"
        yield "matrix", f"{self.parameters:,} x {self.parameters:,} {self.dtype}, {byte_size(self.matrix_bytes)}"
        yield "samples", f"{self.samples:,}, in batches: {self.batches:,}, in chunks: {self.chunks:,}"
        if self.disk_bytes:
            yield "panels", f"{self.panels:,}"
            yield "disk", f"{byte_size(self.disk_bytes)} ({byte_size(self.free_disk)} free)"
        yield "work space", f"at most {byte_size(self.workspace_bytes)}"
        yield "memory", f"at most {byte_size(self.memory_bytes)} ({byte_size(self.free_memory)} free on {self.device})"
        yield "operations", f"{self.flops:.2g} floating-point, {self.moved:.2g} bytes moved"
        yield "time", f"about {_duration(self.seconds)}"
        yield "differentiated automatically", ", ".join(self.fallbacks) or "nothing"

    def _headline(self) -> str:
        return "Forecast: it fits" if self.fits else "Forecast: it does not fit"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(_HEADERS, self._rows(), left=2, prose=_HEADERS)


def forecast(batches: Sequence[BatchLoss], batch_size: int | None, out: Path | None) -> Forecast:
    """Return the memory, disk and time that the Hessian of some batches takes, in a file if there is a path of one."""
    first = batches[0]
    plan = make_plan(batches, batch_size, math.inf if out is None else PANEL)
    size = first.size
    matrix = size * size * first.dtype.itemsize
    workspace = round(LOOSE * plan.workspace) + MARGIN + (SLAB if out is not None else 0)
    flops, moved, operations = plan.total("flops"), plan.total("moved"), round(plan.total("operations"))
    flop, byte, fresh, call = _times(first.dtype, first.device)
    seconds = flops * flop + (moved + 4 * matrix) * byte + operations * call
    seconds += (matrix + plan.workspace) * fresh if out is None else 2 * matrix / DISK
    return Forecast(
        parameters=size,
        dtype=str(first.dtype).removeprefix("torch."),
        device=str(first.device),
        samples=sum(batch.n_samples for batch in batches),
        batches=len(batches),
        chunks=len(plan.costs),
        panels=len(plan.panels),
        matrix_bytes=matrix,
        workspace_bytes=workspace,
        memory_bytes=workspace + (matrix if out is None else plan.largest),
        disk_bytes=0 if out is None else matrix + 128,
        free_memory=available_memory(first.device),
        free_disk=0 if out is None else shutil.disk_usage(out.parent).free,
        flops=flops,
        moved=moved,
        operations=operations,
        seconds=seconds,
        fallbacks=plan.fallbacks,
    )


def _times(dtype: torch.dtype, device: torch.device) -> tuple[float, float, float, float]:
    """Return the seconds of one floating-point operation, one byte moved, one byte of new memory and one call of torch."""
    a = torch.ones(64, 256, 64, dtype=dtype, device=device)
    b = torch.ones(2**21, dtype=dtype, device=device)
    c = torch.ones(8, dtype=dtype, device=device)
    product, copy, call = _seconds(lambda: a.mT @ a), _seconds(lambda: b + 1), _seconds(lambda: c + 1)
    new = _seconds(lambda: zeros((FRESH, FRESH), torch.float64, device).fill_(1.0))
    return product / (2 * 64 * 256 * 64 * 64), copy / (2 * b.numel() * b.element_size()), new / (8 * FRESH**2), call


def _seconds(run: Callable[[], Any]) -> float:
    """Return the time of a call, which ends on the device, measured for about 10 ms."""
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.01).median


def _duration(seconds: float) -> str:
    """Format a time.

    >>> _duration(0.25), _duration(75), _duration(7200)
    ('0.25 s', '75 s', '2 h')
    """
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.2g} h"
