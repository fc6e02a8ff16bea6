"""The result of the depth diagnostics: one row a layer, in a terminal, a notebook and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hessiankit.diagnostics.depth.curvature import LayerCurvature
from hessiankit.diagnostics.depth.jacobians import Jacobians
from hessiankit.diagnostics.depth.laws import GrowthLaws
from hessiankit.diagnostics.depth.pruning import PruningDrop
from hessiankit.diagnostics.depth.stream import AngularDistances, StreamStatistics
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table


@dataclass(frozen=True, repr=False, eq=False)
class DepthReport(Printed, WithDict):
    """Diagnostics of the blocks of a model by depth; made by :func:`depth_diagnostics`. Quantities that were not chosen are None.

    Attributes:
        model: Name of the model's class.
        blocks: Names of the blocks, first to last.
        tokens: Which tokens the stream's numbers are means over: ``"all"`` or ``"last"``.
        stream: Variance, second moment, rho, update ratio.
        laws: Growth laws through the variance; None in a stack of one block.
        angles: Angular distances.
        drop: Loss and accuracy with one block removed.
        gradient: Norm of the loss's gradient in each block's parameters.
        jacobians: Distance of each block from the identity; the stack's gain.
        hessian: lambda_max and trace of the Hessian in each block's parameters.
        ggn: The same of its Gauss-Newton part.
        memory: Bytes that each quantity was expected to hold, beside the model.
        seconds: Time taken.
    """

    model: str
    blocks: tuple[str, ...]
    tokens: str
    stream: StreamStatistics | None
    laws: GrowthLaws | None
    angles: AngularDistances | None
    drop: PruningDrop | None
    gradient: tuple[float, ...] | None
    jacobians: Jacobians | None
    hessian: LayerCurvature | None
    ggn: LayerCurvature | None
    memory: dict[str, int]
    seconds: float

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the table's columns after the layer's number: heading -> one text a layer."""
        columns: dict[str, tuple[str, ...]] = {}
        L = len(self.blocks)
        if self.stream is not None:
            columns["sigma^2(x_l)"] = _numbers(self.stream.variance[:L])
            columns["sigma^2(y_l)"] = _numbers(self.stream.variance[1:])
            columns["cos(x,f)"] = tuple(f"{x:.3f}" for x in self.stream.rho["block"])
            columns["||f||/||x||"] = _numbers(self.stream.update_ratio["block"])
        if self.angles is not None:
            columns["d(x_l,y_l)"] = _numbers(self.angles.all.diagonal(1).tolist())
        if self.drop is not None:
            columns["dloss"] = tuple(f"{x:+.4f}" for x in self.drop.loss_change)
            if self.drop.accuracy_change is not None:
                columns["dacc"] = tuple(f"{x:+.4f}" for x in self.drop.accuracy_change)
        if self.gradient is not None:
            columns["||grad||"] = _numbers(self.gradient)
        if self.jacobians is not None:
            columns["||J-I||_2"] = tuple(map(str, self.jacobians.spectral))
            columns["rms(J-I)"] = tuple(map(str, self.jacobians.rms))
        for name, part in (("H", self.hessian), ("G", self.ggn)):
            if part is not None:
                columns[f"lambda_max {name}"] = tuple(map(str, part.top))
                columns[f"tr {name}"] = tuple(map(str, part.trace))
        return columns

    def _headline(self) -> str:
        loss = f", loss {self.drop.loss:.4g}" if self.drop is not None else ""
        accuracy = f", accuracy {self.drop.accuracy:.4g}" if self.drop is not None and self.drop.accuracy is not None else ""
        counted = f", {self.stream.tokens:,} tokens ({self.tokens})" if self.stream is not None else ""
        return f"depth of {self.model}: {len(self.blocks)} blocks{counted}{loss}{accuracy}, {self.seconds:.2f} s"

    def _remarks(self) -> list[str]:
        remarks = [str(part) for part in (self.laws, self.jacobians, self.hessian, self.ggn) if part is not None]
        if any("?" in text for column in self.columns().values() for text in column):
            remarks.append("? Lanczos ran out of products: a lower bound of that number; pass products=")
        if self.drop is not None and self.drop.renumbered:
            remarks.append("dloss, dacc: later blocks renumbered")
        return remarks

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        columns, drop = self.columns(), ("block", "sigma^2(y_l)", "rms(J-I)", "||f||/||x||")
        layers = map(str, range(1, len(self.blocks) + 1))
        rows = zip(layers, self.blocks, *columns.values(), strict=True)
        yield table(("l", "block", *columns), rows, left=2, names=self.blocks, drop=drop)
        yield from self._remarks()


def _numbers(values: Any) -> tuple[str, ...]:
    return tuple(f"{x:.4g}" for x in values)
