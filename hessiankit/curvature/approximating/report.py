"""The report of ``approximations``: a table, a picture and plain numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hessiankit.curvature.approximating.measure import Measures, Model
from hessiankit.curvature.plot_frame import INK, Picture, picture
from hessiankit.curvature.plots import block_norms_map
from hessiankit.request.fisher import NAMES
from hessiankit.support.errors import InputError, unknown
from hessiankit.support.files import plain
from hessiankit.support.tables import Piece, Printed, table


@dataclass(frozen=True)
class Approximation:
    """One approximation and its measures.

    Attributes:
        name: Key in :data:`hessiankit.curvature.approximating.APPROXIMATIONS`.
        about: The structure in words.
        numbers: How many numbers it stores.
        power: Exponent of the step (C + damping I)^-power g: 1, or 1/2 for optimizers that divide by a root.
        measures: Errors, alignment, step and condition number.
        operator: C: ``@`` multiplies, ``.to_matrix()`` forms it; but for ``"low-rank"``, ``.mapped(f)`` is f(C), such as
            ``.mapped(lambda v: 1 / (v + damping))`` for the damped inverse.
    """

    name: str
    about: str
    numbers: int
    power: float
    measures: Measures
    operator: Model = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python numbers, without the errors by pair; infinite and unknown ones as None."""
        numbers = {name: x for name, x in vars(self.measures).items() if not name.endswith("pairs")}
        return plain({"about": self.about, "numbers": self.numbers, "power": self.power, **numbers}, lambda _: None)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False, eq=False)
class ApproximationsReport(Printed):
    """Approximations of a curvature matrix, each against the exact one; made by :func:`hessiankit.approximations`.

    Attributes:
        against: The kind of the exact matrix A.
        parameters: P.
        names: Names of the parameters, in the order of the pairs.
        loss: The loss at this point.
        damping: The number added to the diagonal of A and, in proportion, of each approximation.
        least: The least eigenvalue of A, or its Ritz value.
        spectral: The spectral norm of A.
        frobenius: Frobenius norm.
        found: The approximations by name.
        pairs: ||A_ij||_F by pair of parameters, (n, n); None where A was not formed.
        spectral_pairs: ||A_ij||_2 likewise.
        notes: Parts that were left out or have not converged, and why.
        seconds: Time taken.
    """

    against: str
    parameters: int
    names: tuple[str, ...]
    loss: float
    damping: float
    least: float
    spectral: float
    frobenius: float
    found: dict[str, Approximation]
    pairs: Tensor | None
    spectral_pairs: Tensor | None
    notes: tuple[str, ...]
    seconds: float

    def __getitem__(self, name: str) -> Approximation:
        if name not in self.found:
            raise unknown("ApproximationsReport", "name", name, self.found)
        return self.found[name]

    @property
    def is_estimate(self) -> bool:
        """Whether norms are estimates, because A was not formed."""
        return self.pairs is None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data; norms and errors by pair as nested lists."""
        pairs = {name: one.measures.pairs for name, one in self.found.items()}
        return {
            "against": self.against,
            "parameters": self.parameters,
            "names": list(self.names),
            "loss": self.loss,
            "damping": self.damping,
            "least_eigenvalue": self.least,
            "spectral_norm": self.spectral,
            "frobenius_norm": self.frobenius,
            "approximations": {name: one.to_dict() for name, one in self.found.items()},
            "pairs": None if self.pairs is None else self.pairs.tolist(),
            "errors_by_pair": {name: x.tolist() for name, x in pairs.items() if x is not None},
            "notes": list(self.notes),
            "seconds": self.seconds,
        }

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw error, cosine of the step and condition number of every approximation as bars.

        The picture is written to ``path``, as ``.png``, ``.svg`` or ``.pdf``, or the numbers, as ``.csv``.
        """
        rows = list(self.found.values())[::-1]
        panels = [
            (r"$\|A-C\|_F\,/\,\|A\|_F$", [r.measures.frobenius.value for r in rows], "linear"),
            ("cosine with the exact step", [r.measures.step_cosine for r in rows], "linear"),
            ("condition number left", [r.measures.condition for r in rows], "log"),
        ]
        with picture("plot", 7.5, 0.6 + 0.26 * len(rows), path, layout="constrained") as figure:
            axes = figure.subplots(1, 3, sharey=True)
            for axis, (title, values, scale) in zip(axes, panels, strict=True):
                heights = [v if math.isfinite(v) else 0.0 for v in values]
                if title.startswith("$"):
                    heights = [min(v, 2.0) for v in heights]
                    axis.set_xlim(0, 1.05 * max(1.0, *heights))
                axis.barh([r.name for r in rows], heights, color="0.75", height=0.7)
                axis.set_xscale(scale)
                if scale == "log":
                    axis.set_xlim(1, 2 * max(5.0, *heights))
                axis.set_title(title, fontsize=8)
                for y, value in enumerate(values):
                    number = f"{value:.0f}" if 100 <= value < 1e5 else f"{value:.2g}"
                    text = number if math.isfinite(value) else "not definite" if math.isinf(value) else "unknown"
                    axis.annotate(text, (0.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=INK)
            of = f"{NAMES[self.against]}, {self.parameters:,} parameters, damping {self.damping:.3g}"
            figure.suptitle(of, fontsize=9)
            header = ("approximation", "frobenius", "spectral", "alignment", "step cosine", "condition")
            figure.numbers = header, [(r.name, *map(_full, _values(r))) for r in rows[::-1]]
        return figure

    def plot_pairs(self, name: str, path: Path | str | None = None) -> Picture:
        """Draw ||(A - C)_ij||_F of one approximation by pair of parameters, where A was formed; ``path`` as in :meth:`plot`."""
        errors = self[name].measures.pairs
        if errors is None:
            raise InputError("plot_pairs: errors by pair need the exact matrix in memory; pass method='dense', or fewer params")
        return block_norms_map(errors, self.names, title=self[name].about, path=path, norm=r"$\|(A-C)_{ij}\|_F$")

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for one in self.found.values():
            cells = map(_shown, _values(one)[2:])
            m = one.measures
            yield one.name, one.about, f"{one.numbers:,}", f"{m.frobenius:.3g}", f"{m.spectral:.3g}", *cells

    def _headline(self) -> str:
        exact = "estimated by products" if self.is_estimate else "exact"
        return (
            f"approximations of the {NAMES[self.against]}, {self.parameters:,} parameters: ||A||_2 {self.spectral:.4g}, "
            f"||A||_F {self.frobenius:.4g} ({exact}), least eigenvalue {self.least:.3g}, damping {self.damping:.3g}, "
            f"loss {self.loss:.4g}, {self.seconds:.2f} s"
        )

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(_HEADERS, self._rows(), left=2, prose=("structure",), drop=("structure", "numbers", "alignment"))
        yield from self.notes


_HEADERS = ("approximation", "structure", "numbers", "error F", "error 2", "alignment", "cosine of step", "condition")


def _values(one: Approximation) -> tuple[float, ...]:
    m = one.measures
    return m.frobenius.value, m.spectral.value, m.alignment, m.step_cosine, m.condition


def _shown(value: float) -> str:
    return "" if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.3g}"


def _full(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else ""
