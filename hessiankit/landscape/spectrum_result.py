"""The eigenvalues of a Hessian as :func:`hessiankit.spectrum` returns them: extreme pairs, outliers; density, trace, ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hessiankit.curvature.estimators import Estimate
from hessiankit.landscape.density import COST, Density, SpectralMeasure, density
from hessiankit.landscape.preconditioner import Preconditioner
from hessiankit.support.files import WithDict, plain
from hessiankit.support.tables import Detail, Piece, Printed, table

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture


SUMS = ("trace", "frobenius_squared", "effective_rank", "stable_rank")


@dataclass(frozen=True, repr=False, eq=False)
class Spectrum(Printed, WithDict):
    """Extreme eigenpairs of a symmetric matrix, and its spectral density; made by :func:`hessiankit.spectrum`.

    Trace, norm, ranks and density need ``density=True``, or a method that takes all eigenvalues; without, an InputError says what
    they cost.

    Attributes:
        eigenvalues: The ``top`` largest, then the smallest, in descending order, (k,), float64.
        eigenvectors: Their unit vectors, as columns (P, k), on the operator's device and in its dtype.
        residuals: |H v - lambda v| of each pair: some eigenvalue lies within it, (k,).
        top: Number of eigenvalues at the upper end.
        size: P.
        kind: Kind of the operator: ``"hessian"``, ``"ggn"``, ...
        loss: Loss at this point; NaN for an operator without one.
        measure: Located eigenvalues, with the nodes and weights of random directions where a density was asked.
        method: ``"full"``: all eigenvalues, from the P x P matrix; ``"lanczos"``.
        tol: Tolerance of the residuals, relative to the largest |eigenvalue|.
        converged: Whether all residuals are within the tolerance.
        products: Products with the matrix.
        seconds: Time taken.
        groups: The spectrum of the diagonal block of each group of parameters, by its name.
        preconditioner: P, where the matrix is P^(-1/2) H P^(-1/2).
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    residuals: Tensor
    top: int
    size: int
    kind: str
    loss: float
    measure: SpectralMeasure
    method: str
    tol: float
    converged: bool
    products: int
    seconds: float
    groups: dict[str, Spectrum] = field(default_factory=dict)
    preconditioner: Preconditioner | None = None

    _derived = ("threshold_ratio", "outliers", "gap")
    _hidden = ("eigenvectors", "measure")

    @property
    def threshold_ratio(self) -> float:
        """The largest eigenvalue over the optimizer's threshold (NaN without one); above 1, steps on a quadratic diverge."""
        return math.nan if self.preconditioner is None else self.preconditioner.ratio(float(self.eigenvalues[0]))

    @property
    def directions(self) -> Tensor:
        """The eigenvectors as directions in the parameters, columns (P, k): times P^(-1/2) where there is a preconditioner."""
        V = self.eigenvectors
        return V if self.preconditioner is None else self.preconditioner.root @ V

    @property
    def trace(self) -> Estimate:
        """The sum of all eigenvalues, with its 95 % interval over the random directions."""
        return self.measure.estimate(lambda t: t)

    @property
    def frobenius_squared(self) -> Estimate:
        """The sum of the squares of all eigenvalues, with its 95 % interval."""
        return self.measure.estimate(torch.square)

    @property
    def effective_rank(self) -> Estimate:
        """The participation ratio (sum |lambda|)^2 / sum lambda^2, between 1 and P, with its 95 % interval, to first order."""
        size, square = (float(self.measure.sums(f).mean()) for f in (torch.abs, torch.square))
        ratio = size / square if square else math.nan
        return self.measure.estimate(lambda t: 2 * ratio * t.abs() - ratio**2 * t.square(), value=ratio * size)

    @property
    def stable_rank(self) -> Estimate:
        """sum lambda^2 / max lambda^2, between 1 and P, with its 95 % interval."""
        return self.measure.estimate(lambda t: (t / self.measure.scale).square())

    @property
    def outliers(self) -> int:
        """The number n of eigenvalues above the widest gap of the upper end: lambda_n / lambda_(n + 1) is the largest ratio.

        Among the positive ones of the ``top`` found; 0 where fewer than two of them are positive. A count by one rule, for which
        :attr:`gap` is the evidence: a ratio near those of the neighbours is no gap.
        """
        ratios = self._ratios()
        return int(ratios.argmax()) + 1 if len(ratios) else 0

    @property
    def gap(self) -> float:
        """The ratio of the last outlier to the eigenvalue below it; NaN where there is none."""
        ratios = self._ratios()
        return float(ratios.max()) if len(ratios) else float("nan")

    def _ratios(self) -> Tensor:
        upper = self.eigenvalues[: self.top]
        upper = upper[upper > self.tol * self.measure.scale]
        return upper[:-1] / upper[1:]

    def density(self, *, scale: str = "linear", width: float | None = None, points: int | Tensor = 400) -> Density:
        """Return the density of all eigenvalues, smoothed by a normal kernel, with its standard error over the directions.

        Args:
            scale: ``"linear"``; or ``"log"``: per decade of |eigenvalue|, positive and negative ones apart.
            width: Standard deviation of the kernel, in eigenvalues or decades; by default a hundredth of the range of the
                eigenvalues, or a fiftieth of the decades.
            points: Number of points of the axis, or the eigenvalues (n,) themselves.

        Nodes resolve the linear density to about the range over ``steps``. Much smaller eigenvalues share few nodes, so that
        the logarithmic density has the right mass there, but not the right shape.

        Raises:
            InputError: An argument cannot be used.
        """
        return density(self.measure, scale, width, points)

    def plot(self, path: Path | str | None = None, *, width: float | None = None, title: str | None = None) -> Picture:
        """Draw the density over a linear and a logarithmic axis, with the eigenvalues and the outliers marked, under a title.

        The picture is written to ``path``, as ``.png``, ``.svg`` or ``.pdf``; ``width`` is that of the kernel of the linear axis,
        see :meth:`density`.
        """
        from hessiankit.landscape.plots import plot_spectrum  # only here: Matplotlib

        return plot_spectrum(self, self.density(width=width), self.density(scale="log"), path, title or self._headline())

    def to_dict(self) -> dict[str, Any]:
        """Return everything but vectors and nodes as plain Python data; trace, norm and ranks as None where they are unknown."""
        sums = {name: plain(getattr(self, name), float) if self.measure.is_whole else None for name in SUMS}
        return {**super().to_dict(), **sums, "directions": len(self.measure.nodes)}

    def _headline(self) -> str:
        matrix = "Hessian" if self.kind == "hessian" else f"operator of kind {self.kind!r}"
        how = "all eigenvalues" if self.method == "full" else f"{self.products:,} products"
        warning = "" if self.converged else "; NOT CONVERGED: see the residuals, raise max_products or tol"
        loss = "" if self.loss != self.loss else f", loss {self.loss:.6g}"
        return f"spectrum of the {matrix}, {self.size:,} parameters{loss}, {how}, {self.seconds:.2f} s{warning}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        if self.preconditioner is not None:
            yield from self.preconditioner._parts()
            if self.preconditioner.rule:
                yield f"largest eigenvalue over the threshold: {self.threshold_ratio:.4g}"
        rows = [
            (str(k + 1) if k < self.top else str(self.size - len(self.eigenvalues) + k + 1), f"{x:.6g}", f"{r:.1e}")
            for k, (x, r) in enumerate(zip(self.eigenvalues.tolist(), self.residuals.tolist(), strict=True))
        ]
        yield table(("number", "eigenvalue", "residual"), rows, spread=True)
        sums = ""
        if self.measure.is_whole:
            sums = f"trace {self.trace:.4g}, effective rank {self.effective_rank:.4g}, stable rank {self.stable_rank:.4g}"
        gap = f"{self.outliers} above the widest gap, a factor of {self.gap:.3g}" if self.outliers else ""
        if sums or gap:
            yield "; ".join(filter(None, (sums, gap)))
        if self.groups:
            limit = ("over the threshold",) if self.preconditioner is not None and self.preconditioner.rule else ()
            lines = [(*_row(name, one), *(f"{one.threshold_ratio:.4g}" for _ in limit)) for name, one in self.groups.items()]
            yield table(
                (*_GROUP, *limit),
                lines,
                names=self.groups,
                rank=[float(g.measure.scale) for g in self.groups.values()],
                ranked="largest |eigenvalue|",
            )
        if len(self.measure.nodes):
            interval_note = "wider where one eigenvalue is most of a sum (docs/intervals.md)"
            yield Detail(f"intervals of 95 % over {len(self.measure.nodes)} random directions, {interval_note}")
        elif not self.measure.is_whole:
            yield Detail(f"trace, density and ranks: density=True, {COST}, which also look for multiple eigenvalues")


_GROUP = ("group", "parameters", "largest", "smallest", "trace", "effective rank")


def _row(name: str, one: Spectrum) -> tuple[str, ...]:
    mark = "" if one.converged else "?"
    ends = (
        f"{float(one.eigenvalues[0]):.4g}{mark}",
        f"{float(one.eigenvalues[-1]):.4g}{mark}" if one.top < len(one.eigenvalues) else "",
    )
    sums = (f"{one.trace:.4g}", f"{one.effective_rank:.4g}") if one.measure.is_whole else ("", "")
    return name, f"{one.size:,}", *ends, *sums
