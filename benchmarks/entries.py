"""A peer in a contest: its comparison with the reference, the choice of its chunk, and one timed run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import JVP, Peer, compiled, plain_columns
from benchmarks.problems import Case
from benchmarks.routes.torch_routes import Products
from benchmarks.timing import deadline, finite, spread, timed
from hessiankit.support.memory import available_memory
from hessiankit.verify.reference_base import bytes_per_direction, typed_line

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
MEMORY_SHARE = 0.6
"""Part of the free memory that a peer may be forecast to take."""
COLUMNS = 32
"""Columns that every contestant is compared on, spread over the parameters."""
COMPILE_SECONDS = 240.0
FIRST_CHUNK, LARGEST_CHUNK = 16, 1024


@dataclass(frozen=True)
class Part:
    """A part of the Hessian: the columns that are pushed, and the rows of them that are kept."""

    columns: slice
    rows: slice

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.columns.stop - self.columns.start)


@dataclass
class Entry:
    """A peer in a contest, and its results so far.

    Attributes:
        status: "right", "wrong", "failed" (it raised), "skipped" (beyond the memory or the time) or "missing" (not
            installed, no such form); the last three are not timed, and ``why`` says more.
        error: Largest difference from the reference on the compared columns, relative to the largest entry of those.
        timed_columns: Columns that a timed run pushes; with fewer than all, its seconds are extrapolated linearly.
    """

    peer: Peer
    status: str = "right"
    why: str = ""
    error: float | None = None
    chunk: int | None = None
    timed_columns: int | None = None
    first_seconds: float | None = None
    per_column: float = math.inf
    forecast_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether it takes part in the timed rounds."""
        return self.status in ("right", "wrong")

    def row(self, own: Sequence[float], width: int) -> dict[str, Any]:
        """Return plain data; ``own`` are the closed form's seconds, round by round."""
        ratios = [mine / closed for mine, closed in zip(self.seconds, own, strict=False)]
        return {
            "name": self.peer.name,
            "status": self.status,
            "why": self.why,
            "error": None if self.error is None else finite(self.error),
            "chunk": self.chunk,
            "columns": width,
            "timed_columns": self.timed_columns,
            "extrapolated": self.timed_columns is not None and self.timed_columns < width,
            "first_seconds": self.first_seconds,
            "forecast_seconds": self.forecast_seconds,
            "seconds": self.seconds,
            "ratios": ratios,
            "time": spread(self.seconds),
            "ratio": spread(ratios),
        }


class Ring:
    """The conditions of a contest: the problem, the part of the Hessian, the reference, and the time for one run.

    Args:
        case: The problem.
        part: The part of the Hessian.
        share: Seconds that one run of one peer may take.
        device: The device.
        until: When the last trial has to be over, by ``time.perf_counter``.
        clock: Clock of the runs.
    """

    def __init__(
        self,
        case: Case,
        part: Part,
        share: float,
        device: str,
        until: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.case, self.part, self.share, self.device, self.until = case, part, share, device, until
        self.picks = self._picks()
        self.reference = plain_columns(case, self.picks)[:, part.rows]
        self.scale = float(self.reference.abs().max())
        self.tolerance = TOLERANCE[case.theta.dtype]
        self.graph_bytes = bytes_per_direction(case.flat_loss, case.theta)

    def error(self, columns: Tensor) -> float:
        """Return the largest difference of the compared columns, one a row, from the reference."""
        return float((columns.to(self.reference) - self.reference).abs().max()) / self.scale

    def verdict(self, error: float) -> str:
        """Return "right" or "wrong"."""
        return "right" if error <= self.tolerance else "wrong"  # NaN is wrong

    def verdict_row(self, name: str, error: float) -> dict[str, Any]:
        """Return the beginning of a row of the closed form."""
        return {"name": name, "status": self.verdict(error), "error": finite(error), "columns": self.part.width}

    def enter(self, peer: Peer) -> Entry:
        """Compare a peer, choose its chunk, forecast its time, and decide whether it can be timed."""
        if why := peer.missing(self.case):
            return Entry(peer, "missing", why)
        entry, free = Entry(peer), MEMORY_SHARE * available_memory(self.case.theta.device)
        if peer.matrix is not None:
            need = self.graph_bytes * self.case.size + 3 * self.case.size**2 * self.case.theta.element_size()
            if need > free:
                return Entry(peer, "skipped", f"all columns at once would take about {need / 2**30:.0f} GiB")
        try:
            compiling = COMPILE_SECONDS * (peer.compiles or "jax" in peer.name)
            allowed = min(max(20 * self.share, 20.0) + compiling, self.until - time.perf_counter())
            if allowed <= 0:
                raise TimeoutError("the others have taken the cell's time")
            with deadline(allowed, "the trial"):
                columns = self._try_whole(entry) if peer.matrix else self._try_chunks(entry, int(free // self.graph_bytes))
        except TimeoutError as error:
            return Entry(peer, "skipped", f"over budget: {error}")
        except Exception as error:
            return Entry(peer, "failed", typed_line(error))
        entry.error = self.error(columns)
        entry.status = self.verdict(entry.error)
        return entry

    def run(self, entry: Entry) -> float:
        """Run a peer once; return its seconds for the whole part, extrapolated where only some columns are pushed."""
        peer = entry.peer
        if (matrix := peer.matrix) is not None:
            return timed(self.device, lambda: matrix(self.case), self.clock)[1]
        columns = range(self.part.columns.start, self.part.columns.start + (entry.timed_columns or self.part.width))
        run, once = timed(self.device, lambda: peer.products(self.case), self.clock)
        _, pushed = timed(self.device, lambda: self._push(run, peer, columns, entry.chunk or 1), self.clock)
        return once + pushed * self.part.width / len(columns)

    def _picks(self) -> list[int]:
        """Return columns to compare, some of every parameter that has columns in the part."""
        wanted = self.part.columns
        inside = [s for s in self.case.slices.values() if s.start < wanted.stop and s.stop > wanted.start]
        generator, each = torch.Generator().manual_seed(0), max(1, COLUMNS // len(inside))
        picks: list[int] = []
        for s in inside:
            picks += sorted((s.start + torch.randperm(s.stop - s.start, generator=generator)[:each]).tolist())
        return picks

    def _push(self, run: Products, peer: Peer, columns: Sequence[int], chunk: int) -> Tensor:
        """Return some columns of the part, one a row, pushed in chunks."""
        out = []
        for start in range(0, len(columns), chunk):
            now = columns[start : start + chunk]
            units = self.case.theta.new_zeros(chunk if peer.compiles else len(now), self.case.size)
            units[torch.arange(len(now)), torch.as_tensor(now)] = 1.0
            out.append(run(units)[: len(now), self.part.rows].detach())
        return torch.cat(out)

    def _try_whole(self, entry: Entry) -> Tensor:
        assert entry.peer.matrix is not None
        matrix, entry.first_seconds = timed(self.device, partial(entry.peer.matrix, self.case), self.clock)  # jax compiles here
        entry.timed_columns, picks = self.part.width, torch.as_tensor(self.picks)
        entry.forecast_seconds = entry.first_seconds
        return matrix[:, picks][self.part.rows].T

    def _try_chunks(self, entry: Entry, most: int) -> Tensor:
        """Fill in the chunk, the columns to time and the first call's seconds; return the columns to compare."""
        peer = entry.peer
        largest = 1 if peer.one_by_one else max(1, min(self.part.width, most, LARGEST_CHUNK))
        chunk = min(FIRST_CHUNK, largest)
        if peer.compiled_chunk is not None:
            chunk = largest = peer.compiled_chunk
        start = time.perf_counter()
        run = peer.products(self.case)
        values = self._push(run, peer, self.picks, chunk)
        entry.first_seconds = time.perf_counter() - start
        speeds: dict[int, float] = {}

        def speed(size: int) -> float:
            if size not in speeds:
                columns = range(self.part.columns.start, self.part.columns.start + size)
                if peer.compiles:
                    self._push(run, peer, columns, size)  # compiles this shape
                tries = [timed(self.device, lambda: self._push(run, peer, columns, size), self.clock)[1] for _ in range(2)]
                speeds[size] = min(tries) / size
            return speeds[size]

        for up in (True, False):  # up while it helps; down while that helps
            while largest > 1 and peer.compiled_chunk is None and sum(2 * t * k for k, t in speeds.items()) < 4 * self.share:
                step = min(largest, 2 * chunk) if up else max(1, chunk // 2)
                if step == chunk or speed(step) > 0.97 * speed(chunk):
                    break
                chunk = step
        entry.chunk, entry.per_column = chunk, speed(chunk)
        entry.forecast_seconds = entry.per_column * self.part.width
        fits = int(self.share / max(entry.per_column, 1e-12)) // chunk * chunk
        enough = entry.forecast_seconds <= self.share
        entry.timed_columns = self.part.width if enough else min(self.part.width, max(chunk, fits))
        return values

    def compiled(self, entries: Sequence[Entry]) -> Entry:
        """Return the fastest right peer that is a function of tensors only, under ``torch.compile``."""
        candidates = [e for e in entries if e.status == "right" and e.peer.route]
        if not candidates:
            return Entry(compiled(JVP, self.case, 1), "missing", "no right peer is a function of tensors only")
        first = min(candidates, key=lambda e: e.per_column)
        torch._dynamo.reset()
        return self.enter(compiled(first.peer, self.case, first.chunk or 1))
