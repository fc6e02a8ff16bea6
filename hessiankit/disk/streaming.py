"""The P x P matrix on disk, panel by panel: what is finished stays finished, whatever happens to the process.

The matrix grows in ``out.part`` and is moved to ``out`` when it is whole, so a file at ``out`` is never half a matrix. The
journal ``out.journal.json`` names the finished panels; a panel enters it after its bytes are on the disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.disk.journal import Journal, fingerprint
from hessiankit.disk.matrix_file import SLAB, MatrixFile
from hessiankit.disk.panel_sum import PanelSum
from hessiankit.disk.planning import PANEL, Chunk, check_workspace, make_plan
from hessiankit.engine.assembly import is_split
from hessiankit.errors import InputError, TraceError
from hessiankit.request.loss_trace import LossTrace, loss_trace, normalizer_of
from hessiankit.request.own_call import reached
from hessiankit.request.task import Task


@dataclass(frozen=True)
class Written:
    """A finished matrix on disk, and what is known of it."""

    matrix: Tensor
    loss: float
    asymmetry: float
    fallbacks: tuple[str, ...]
    seconds: float


class Writer:
    """One matrix, one file.

    Args:
        who: What an error message starts with.
        out: Where the matrix shall be.
        tasks: One request a batch, for the same parameters.
        shares: What each batch's loss is multiplied by.
        batch_size: Samples treated at once, or None.
        progress: Called with (samples done, in all), each sample counted once for each panel.
        overwrite: Whether to start again, whatever is there.
    """

    def __init__(
        self,
        who: str,
        out: str | os.PathLike[str],
        tasks: Sequence[Task],
        shares: Sequence[float],
        batch_size: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        self.who, self.tasks, self.shares, self.batch_size = who, tuple(tasks), tuple(shares), batch_size
        self.progress, self.overwrite = progress, overwrite
        self.size = tasks[0].size
        self.dtype, self.device = tasks[0].dtype, tasks[0].device
        self.file = MatrixFile(who, out, self.size, self.dtype)

    def write(self) -> Written:
        """Compute what is missing, and return the matrix as it lies on disk.

        Raises:
            InputError: The path cannot be used, or holds something else.
            OutOfMemoryError: A panel and the work space do not fit.
            OSError: The disk is full, or fails; what is finished is kept.
        """
        start = time.perf_counter()
        file = self.file
        file.check(self.overwrite)
        with torch.no_grad():
            found = fingerprint(self.tasks, self.shares, self.batch_size, self._first_trace())
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
        journal = Journal.load(self.who, path)
        different = journal.differences(found)
        if different:
            rest = f" and {len(different) - 4} more" if len(different) > 4 else ""
            state = "holds" if journal.complete else "was begun for"
            raise InputError(
                f"{self.who}: {self.file.path} {state} the Hessian of another computation: what differs is "
                f"{', '.join(different[:4])}{rest}. Pass another out=..., or overwrite=True to lose it and start again"
            )
        if journal.complete and not self.file.is_whole():
            raise InputError(
                f"{self.who}: {self.file.path} is missing or has been changed. Pass overwrite=True to compute it again"
            )
        return journal

    def _begin(self, found: dict[str, str]) -> Journal:
        plan = make_plan(self.tasks, self.batch_size, PANEL)
        written = {
            "chunks": [[c.batch, c.start, c.stop, c.whole] for c in plan.chunks],
            "panels": [[rows.start, rows.stop, columns.start, columns.stop] for rows, columns in plan.panels.parts],
            "panel_bytes": plan.panels.largest,
            "kept": plan.kept,
            "workspace": plan.workspace,
            "fallbacks": list(plan.fallbacks),
        }
        check_workspace(self.who, plan.workspace + SLAB, plan.panels.largest, self.device)
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
            check_workspace(self.who, plan["workspace"] + SLAB, plan["panel_bytes"], self.device)
            chunks = [Chunk(*chunk) for chunk in plan["chunks"]]
            parts = [(range(*bounds[:2]), range(*bounds[2:])) for bounds in panels]
            total = PanelSum(self.who, self.tasks, self.shares, chunks, parts, plan["kept"], self.progress)
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
