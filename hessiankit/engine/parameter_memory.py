"""Parameters, directions and derivatives in memory that the steps of a segment read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeAlias

from torch import Tensor

from hessiankit.engine.checkpoints import CheckpointSegment
from hessiankit.primitives.primitive import CovectorSum, hollow
from hessiankit.tracing.trace import Trace

Sums: TypeAlias = "Callable[[int], AbstractContextManager[Mapping[int, CovectorSum]]]"
"""Opens the sums of the covectors of the parameters that a segment reads."""


class ParameterMemory:
    """Memory of whole parameters, present in all segments; vectors are rows (S, P), of which each parameter has a view.

    Attributes:
        values: Shape and type of the parameters by the id of their value in the trace, in the order of a vector's entries.
    """

    def begin(self, trace: Trace, ids: Mapping[str, int], segments: Sequence[CheckpointSegment]) -> None:
        """Read the parameters of a trace from the ids of their names, and the segments that use them."""
        self.values = {at: hollow(trace.values[at]) for at in ids.values()}

    @property
    def size(self) -> int:
        """Number of entries of a vector."""
        return sum(x.numel() for x in self.values.values())

    def present(self, k: int) -> AbstractContextManager[None]:
        """Let the parameters that segment k reads have their values within the context."""
        return nullcontext()

    def tangents(self, rows: Tensor, k: int) -> dict[int, Tensor]:
        """Return the directions (S, *shape) of the parameters that segment k reads, of rows (S, P)."""
        return {at: x.to(self.values[at].dtype) for at, x in self._views(rows).items()}

    @contextmanager
    def sums(self, rows: Tensor) -> Iterator[Sums]:
        """Yield a function that opens the sums of covectors of a segment; in the end they are in the rows."""
        views = self._views(rows)
        sums = {at: CovectorSum(x.to(self.values[at].dtype)) for at, x in views.items()}  # a view where types agree
        yield lambda k: nullcontext(sums)
        for at, total in sums.items():
            if total.close() is not views[at]:
                views[at].copy_(total.memory)

    def _views(self, rows: Tensor) -> dict[int, Tensor]:
        pieces = rows.split([x.numel() for x in self.values.values()], 1)
        return {at: piece.reshape(-1, *x.shape) for (at, x), piece in zip(self.values.items(), pieces, strict=True)}
