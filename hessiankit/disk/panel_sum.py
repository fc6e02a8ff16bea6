"""One panel of the Hessian of several batches after the other, each of them the sum over all chunks of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hessiankit.disk.planning import Chunk
from hessiankit.engine.diagnosis import not_finite
from hessiankit.engine.storage import Kept, Panel
from hessiankit.engine.sweep import Sweep
from hessiankit.engine.unwinding import unwind
from hessiankit.request.handshake import Handshake
from hessiankit.request.loss_trace import loss_trace, normalizer_of
from hessiankit.request.own_call import own_value
from hessiankit.request.task import Task


class PanelSum:
    """The Hessian of a sum of losses, or its Gauss-Newton part, by panels.

    The curvature between activations of the first ``kept`` chunks stays from one panel to the next; that of the others is
    computed again for each panel.

    Args:
        who: What an error message starts with.
        tasks: One request a batch, for the same parameters.
        shares: What each batch's loss is multiplied by.
        chunks: The samples that are treated together; a batch without chunks does not depend on the parameters.
        parts: The panels: rows and columns as positions of parameters, see :class:`hessiankit.engine.storage.Panel`.
        kept: The number of chunks, the first ones, whose curvature is kept.
        progress: Called with (samples done, in all), each sample counted once for each panel.
        outer: Whether to take the Gauss-Newton part only.
    """

    def __init__(
        self,
        who: str,
        tasks: Sequence[Task],
        shares: Sequence[float],
        chunks: Sequence[Chunk],
        parts: Sequence[tuple[range, range]],
        kept: int,
        progress: Callable[[int, int], None] | None = None,
        *,
        outer: bool = False,
    ) -> None:
        self.who, self.tasks, self.shares, self.chunks, self.outer = who, tasks, shares, chunks, outer
        self.parts, self.progress = parts, progress
        self.slices = tasks[0].slices
        self.samples = sum(chunk.stop - chunk.start for chunk in chunks)
        self._keep = kept
        self._kept: dict[int, Kept] = {}
        self._values: dict[int, float] = {}
        self._handshakes = {chunk.batch: Handshake(tasks[chunk.batch]) for chunk in chunks}

    def panel(self, n: int) -> tuple[Panel, float]:
        """Return the n-th panel, and the largest |H - H^T| of the blocks (i, i) in it before they were averaged.

        Raises:
            InputError: An entry is not finite.
        """
        first = self.tasks[0]
        panel, done = Panel(self.slices, *self.parts[n], first.dtype, first.device), n * self.samples
        for k, chunk in enumerate(self.chunks):
            with self.tasks[chunk.batch].at(), torch.no_grad():  # where torch differentiates, its graph reads the parameters
                self._add(panel, k, chunk)
            done += chunk.stop - chunk.start
            if self.progress is not None:
                self.progress(done, len(self.parts) * self.samples)
        for handshake in self._handshakes.values():
            handshake.close()
        self._handshakes.clear()
        asymmetry = panel.mirror()
        if not panel.is_finite:
            self._report(panel)
        return panel, asymmetry

    def loss(self) -> float:
        """Return the loss, when a panel has been computed."""
        terms = [self.shares[chunk.batch] * self._values[k] for k, chunk in enumerate(self.chunks)]
        moving = {chunk.batch for chunk in self.chunks}
        for n, task in enumerate(self.tasks):
            if n not in moving:
                terms.append(self.shares[n] * own_value(task))
        return math.fsum(terms)

    def _add(self, panel: Panel, k: int, chunk: Chunk) -> None:
        if k not in self._kept:
            task = self.tasks[chunk.batch]
            part = task if chunk.whole else task.part(slice(chunk.start, chunk.stop))
            traced = loss_trace(part, normalizer_of(task))
            sweep = Sweep(traced.trace, traced.output if self.outer else None, scale=self.shares[chunk.batch])
            if chunk.batch in self._handshakes:
                self._handshakes[chunk.batch].add(traced.trace, sweep.lambdas, self.shares[chunk.batch])
            sweep.run()
            self._values[k] = float(traced.trace.values[traced.trace.output])
            if k >= self._keep:
                unwind(sweep, panel)
                return
            kept = Kept()
            unwind(sweep, kept)  # type: ignore[arg-type]
            self._kept[k] = kept
        self._kept[k].replay(panel)

    def _report(self, panel: Panel) -> None:
        """Raise the error for the first block of a panel that is not finite, if one is."""
        names = list(self.slices)
        for i in panel.rows:
            for j in panel.columns:
                if not bool(torch.isfinite(panel.block(names[i], names[j])).all()):
                    raise not_finite(self.who, names[i], names[j], self.tasks)
