"""The P x P matrix on disk, panel by panel, resumable after any interruption.

The matrix grows in ``out.part`` and is moved to ``out`` when it is whole, so a file at ``out`` is never half a matrix. The
journal ``out.journal.json`` names the finished panels; a panel enters it after its bytes are on the disk.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.curvature.matrix_file import SLAB, Journal, MatrixFile, fingerprint
from hessiankit.curvature.planning import PANEL, Chunk, check_workspace, make_plan
from hessiankit.engine.assembly import is_split
from hessiankit.engine.diagnosis import not_finite
from hessiankit.engine.forward_sweep import ForwardSweep
from hessiankit.engine.problem.handshake import Handshake
from hessiankit.engine.problem.loss_trace import LossTrace, loss_trace, normalizer_of
from hessiankit.engine.problem.own_call import own_value, reached
from hessiankit.engine.problem.task import Task
from hessiankit.engine.reverse_accumulation import accumulate
from hessiankit.engine.storage import RecordedBlocks, SymmetricStorage
from hessiankit.support.errors import InputError, TraceError


class PanelSum:
    """The Hessian of a sum of losses, or its Gauss-Newton part, by panels.

    The blocks between activations of the first ``cached`` chunks are cached from one panel to the next; those of the others
    are recomputed for each panel.

    Args:
        tasks: One request a batch, for the same parameters.
        weights: Factor of each batch's loss.
        chunks: The samples that are treated together; a batch without chunks does not depend on the parameters.
        parts: The panels: rows and columns as positions of parameters, see :class:`hessiankit.engine.storage.SymmetricStorage`.
        cached: Number of leading chunks whose blocks are cached.
        progress: Called with (samples done, in all), each sample counted once for each panel.
        outer: Whether to take the Gauss-Newton part only.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Sequence[float],
        chunks: Sequence[Chunk],
        parts: Sequence[tuple[range, range]],
        cached: int,
        progress: Callable[[int, int], None] | None = None,
        *,
        outer: bool = False,
    ) -> None:
        self.tasks, self.weights, self.chunks, self.outer = tasks, weights, chunks, outer
        self.parts, self.progress = parts, progress
        self.slices = tasks[0].slices
        self.samples = sum(chunk.stop - chunk.start for chunk in chunks)
        self._n_cached = cached
        self._cache: dict[int, RecordedBlocks] = {}
        self._values: dict[int, float] = {}
        self._handshakes = {chunk.batch: Handshake(tasks[chunk.batch]) for chunk in chunks}

    def panel(self, n: int) -> tuple[SymmetricStorage, float]:
        """Return the n-th panel, and the largest |H - H^T| of the blocks (i, i) in it before they were averaged.

        Raises:
            InputError: An entry is not finite.
        """
        first = self.tasks[0]
        rows, columns = self.parts[n]
        panel, done = SymmetricStorage(self.slices, first.dtype, first.device, rows=rows, columns=columns), n * self.samples
        for k, chunk in enumerate(self.chunks):
            with self.tasks[chunk.batch].at(), torch.no_grad():  # where torch differentiates, its graph reads the parameters
                self._add(panel, k, chunk)
            done += chunk.stop - chunk.start
            if self.progress is not None:
                self.progress(done, len(self.parts) * self.samples)
        for handshake in self._handshakes.values():
            handshake.close()
        self._handshakes.clear()
        asymmetry = panel.mirror() * panel.largest()
        if not panel.is_finite:
            self._report(panel)
        return panel, asymmetry

    def loss(self) -> float:
        """Return the loss, when a panel has been computed."""
        terms = [self.weights[chunk.batch] * self._values[k] for k, chunk in enumerate(self.chunks)]
        moving = {chunk.batch for chunk in self.chunks}
        for n, task in enumerate(self.tasks):
            if n not in moving:
                terms.append(self.weights[n] * own_value(task))
        return math.fsum(terms)

    def _add(self, panel: SymmetricStorage, k: int, chunk: Chunk) -> None:
        if k not in self._cache:
            task = self.tasks[chunk.batch]
            part = task if chunk.whole else task.part(slice(chunk.start, chunk.stop))
            traced = loss_trace(part, normalizer_of(task))
            sweep = ForwardSweep(traced.trace, traced.output if self.outer else None, scale=self.weights[chunk.batch])
            if chunk.batch in self._handshakes:
                self._handshakes[chunk.batch].add(traced.trace, sweep.adjoints, self.weights[chunk.batch])
            sweep.run()
            self._values[k] = float(traced.trace.values[traced.trace.output])
            if k >= self._n_cached:
                accumulate(sweep, panel)
                return
            self._cache[k] = RecordedBlocks()
            accumulate(sweep, self._cache[k])  # type: ignore[arg-type]
        self._cache[k].replay(panel)

    def _report(self, panel: SymmetricStorage) -> None:
        """Raise the error for the first block of a panel that is not finite, if one is."""
        names = list(self.slices)
        for i in panel.rows:
            for j in panel.columns:
                if not bool(torch.isfinite(panel.block(names[i], names[j])).all()):
                    raise not_finite("hessian", names[i], names[j], self.tasks)


@dataclass(frozen=True)
class Written:
    """A finished matrix on disk, its loss, asymmetry, fallbacks and time."""

    matrix: Tensor
    loss: float
    asymmetry: float
    fallbacks: tuple[str, ...]
    seconds: float


class Writer:
    """One matrix, one file.

    Args:
        out: Path of the matrix.
        tasks: One request a batch, for the same parameters.
        weights: Factor of each batch's loss.
        batch_size: Samples per chunk, or None.
        progress: Called with (samples done, in all), each sample counted once for each panel.
        overwrite: Whether to replace files that exist.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        tasks: Sequence[Task],
        weights: Sequence[float],
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.tasks, self.weights, self.batch_size = tuple(tasks), tuple(weights), batch_size
        self.progress, self.overwrite = progress, overwrite
        self.size = tasks[0].size
        self.dtype, self.device = tasks[0].dtype, tasks[0].device
        self.file = MatrixFile(out, self.size, self.dtype)

    def write(self) -> Written:
        """Compute the missing panels, and return the matrix, mapped from disk.

        Raises:
            InputError: The path cannot be used, or holds something else.
            OutOfMemoryError: A panel and the work space do not fit.
            OSError: The disk is full, or fails; finished panels remain.
        """
        start = time.perf_counter()
        file = self.file
        file.check(self.overwrite)
        with torch.no_grad():
            found = fingerprint(self.tasks, self.weights, self.batch_size, self._first_trace())
            journal = None if self.overwrite else self._found(found)
            if journal is None or not journal.complete:
                with file.opened():
                    journal = self._continue(journal or self._begin(found), start)
        result = journal.result
        return Written(file.read(), result["loss"], result["asymmetry"], tuple(result["fallbacks"]), result["seconds"])

    def _first_trace(self) -> list[LossTrace]:
        task = self.tasks[0]
        one = task.part(slice(0, 1)) if isinstance(task.loss, str) and is_split(task, self.batch_size) else task
        try:
            return [loss_trace(one, normalizer_of(task))]
        except TraceError:
            if reached(task):
                raise
            return []

    def _found(self, found: dict[str, str]) -> Journal | None:
        """Return the journal of this computation, if there is one.

        Raises:
            InputError: It is of another computation.
        """
        path = self.file.journal
        if not path.exists():
            return None
        journal = Journal.load(path)
        different = journal.differences(found)
        if different:
            rest = f" and {len(different) - 4} more" if len(different) > 4 else ""
            state = "holds" if journal.complete else "was begun for"
            raise InputError(
                f"hessian: {self.file.path} {state} the Hessian of another computation: what differs is "
                f"{', '.join(different[:4])}{rest}. Pass another out=..., or overwrite=True to lose it and start again"
            )
        if journal.complete and not self.file.is_whole():
            raise InputError(f"hessian: {self.file.path} is missing or has been changed. Pass overwrite=True to compute it again")
        return journal

    def _begin(self, found: dict[str, str]) -> Journal:
        plan = make_plan(self.tasks, self.batch_size, PANEL)
        written = {
            "chunks": [[c.batch, c.start, c.stop, c.whole] for c in plan.chunks],
            "panels": [[rows.start, rows.stop, columns.start, columns.stop] for rows, columns in plan.panels.parts],
            "panel_bytes": plan.panels.largest,
            "kept": plan.cached_chunks,
            "workspace": plan.workspace,
            "fallbacks": list(plan.fallbacks),
        }
        check_workspace(plan.workspace + SLAB, plan.panels.largest, self.device)
        self.file.clear()
        journal = Journal(self.file.journal, found, written)
        journal.save()
        return journal

    def _continue(self, journal: Journal, start: float) -> Journal:
        panels, plan = journal.plan["panels"], journal.plan
        if not (len(journal.panels) == len(panels) and self.file.is_whole()):  # else only the last step was missing
            if self.file.prepare() and journal.panels:
                journal.panels = {}
                journal.save()
            check_workspace(plan["workspace"] + SLAB, plan["panel_bytes"], self.device)
            chunks = [Chunk(*chunk) for chunk in plan["chunks"]]
            parts = [(range(*bounds[:2]), range(*bounds[2:])) for bounds in panels]
            total = PanelSum(self.tasks, self.weights, chunks, parts, plan["kept"], self.progress)
            for n in range(len(parts)):
                if str(n) not in journal.panels:
                    self._panel(total, journal, n)
                    journal.result["seconds"] = journal.result.get("seconds", 0.0) + time.perf_counter() - start
                    start = time.perf_counter()
                    journal.save()
            self.file.finish()
        entries = journal.panels.values()
        largest = max((entry["largest"] for entry in entries), default=0.0)
        worst = max((entry["asymmetry"] for entry in entries), default=0.0)
        journal.result["asymmetry"] = worst / largest if largest else 0.0
        journal.result["fallbacks"] = plan["fallbacks"]
        journal.complete = True
        journal.save()
        return journal

    def _panel(self, total: PanelSum, journal: Journal, n: int) -> None:
        panel, asymmetry = total.panel(n)
        if "loss" not in journal.result:
            journal.result["loss"] = total.loss()
        self.file.put(panel)
        journal.panels[str(n)] = {"asymmetry": asymmetry, "largest": panel.largest()}
