"""Growth laws of the variance with depth, fitted by least squares, and the bounds that theory gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from hessiankit.support.errors import InputError

SCALE = "least squares on the variance itself, two coefficients each"
CONSTANT = 1e-6
"""Relative spread of a variance that does not change with depth, as after norms, where it changes by eps and rounding only."""
SHAPES: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "logarithmic": np.log,
    "linear": lambda layers: layers,
    "quadratic": np.square,
}
FORMS = {"logarithmic": "a + b ln l", "linear": "a + b l", "quadratic": "a + b l^2", "exponential": "a exp(b l)"}
PRE = (
    "pre-norm, depth-uniform weights: the variance stays between const * L (rho = 0) and const * L^2 (rho = 1); "
    "the exponential upper bound in print is never attained"
)
LNS = (
    "LayerNorm Scaling, depth-uniform weights: between const * log L (rho = 0) and const * L (rho = 1); "
    "the lower bound L in print is wrong"
)
NO_LAW = "no law is known for this placement"


@dataclass(frozen=True)
class Law:
    """One law of :data:`FORMS` through sigma^2(l), l = 1, ..., L+1, with its coefficients a and b.

    ``r_squared`` is 1 - (sum of squared residuals) / (sum of squares about the mean), on the scale of the variance.
    """

    name: str
    a: float
    b: float
    r_squared: float

    def __str__(self) -> str:
        return f"{self.name} {FORMS[self.name]}: R^2 {self.r_squared:.4f} (a {self.a:.4g}, b {self.b:.4g})"


@dataclass(frozen=True)
class GrowthLaws:
    """Laws fitted to the variance by depth, and theory's bounds (The Curse of Depth, Lemmas 3.2 and 4.1, corrected).

    All four have two coefficients and are fitted on one scale, so that their R^2 may be compared; laws that differ by less
    than the irregularity of the variance cannot be distinguished, least of all in few layers.

    Attributes:
        laws: Laws by name.
        exponent: Slope of log(sigma^2(l) - sigma^2(1)) over log(l - 1), l = 2, ..., L+1: 1 for linear growth, 2 for
            quadratic; NaN where the variance falls below its first value.
        theory: Bounds from the recurrence for this placement.
    """

    laws: dict[str, Law]
    exponent: float
    theory: str

    @property
    def best(self) -> str:
        """The law with the largest R^2; ``"constant"`` where the variance does not change with depth."""
        if all(math.isnan(law.r_squared) for law in self.laws.values()):
            return "constant"
        return max(self.laws, key=lambda name: self.laws[name].r_squared)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python numbers."""
        laws = {law.name: {"a": law.a, "b": law.b, "r_squared": law.r_squared} for law in self.laws.values()}
        return {"scale": SCALE, "laws": laws, "best": self.best, "exponent": self.exponent, "theory": self.theory}

    def __str__(self) -> str:
        if self.best == "constant":
            return f"variance by layer: constant to {CONSTANT:g}; no law to fit. Theory: {self.theory}"
        best, rivals = self.laws[self.best], [law for name, law in self.laws.items() if name != self.best]
        rest = ", ".join(f"{law.name} {law.r_squared:.4f}" for law in rivals)
        return (
            f"variance by layer: {best}; R^2 of the others: {rest} ({SCALE})\nexponent {self.exponent:.2f}. Theory: {self.theory}"
        )


def growth_laws(variance: Sequence[float], theory: str = NO_LAW) -> GrowthLaws:
    """Fit the laws to sigma^2(1), sigma^2(2), ...

    With two layers every law goes through the points and R^2 is 1; a constant variance has no R^2 (NaN).

    >>> growth = growth_laws([1.0, 4.0, 9.0, 16.0])
    >>> growth.best, round(growth.laws["quadratic"].b, 9), round(growth.laws["quadratic"].r_squared, 9)
    ('quadratic', 1.0, 1.0)
    >>> round(growth_laws([3.0, 5.0, 7.0, 9.0]).exponent, 9)
    1.0
    """
    try:
        y = np.asarray(variance, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"growth_laws: variance is a {type(variance).__name__}; pass one number for each layer") from None
    if y.ndim != 1 or len(y) < 2:
        raise InputError(f"growth_laws: variance has shape {y.shape}; pass two or more numbers, one for each layer")
    layers = np.arange(1, len(y) + 1, dtype=np.float64)
    laws = {}
    for name, shape in SHAPES.items():
        b, a = map(float, np.polyfit(shape(layers), y, 1))
        laws[name] = Law(name, a, b, _r_squared(y, a + b * shape(layers)))
    a, b = _exponential(layers, y)
    laws["exponential"] = Law("exponential", a, b, _r_squared(y, a * np.exp(b * layers)))
    return GrowthLaws(laws, _exponent(layers, y), theory)


def _exponential(layers: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Return a and b of the best a exp(b l): for each b the best a is a projection, so that only b is searched."""

    def scale(b: float) -> tuple[float, NDArray[np.float64]]:
        e = np.exp(b * (layers - layers[-1])) if b > 0 else np.exp(b * (layers - layers[0]))  # the largest is 1
        return float(e @ y / (e @ e)), e

    def error(b: float) -> float:
        a, e = scale(b)
        return float(np.square(y - a * e).sum())

    span = float(np.log(1e6)) / max(len(layers) - 1, 1) * 4
    grid = np.linspace(-span, span, 401)
    start = int(np.argmin([error(b) for b in grid]))
    low, high = grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)]
    b = float(minimize_scalar(error, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x)
    a, _ = scale(b)
    return a * math.exp(-b * (layers[-1] if b > 0 else layers[0])), b


def _r_squared(y: NDArray[np.float64], prediction: NDArray[np.float64]) -> float:
    total = float(np.square(y - y.mean()).sum())
    constant = float(np.ptp(y)) <= CONSTANT * float(np.abs(y).max())
    return math.nan if constant else 1 - float(np.square(y - prediction).sum()) / total


def _exponent(layers: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    growth = y[1:] - y[0]
    if len(growth) < 2 or not (growth > 0).all():
        return math.nan
    return float(np.polyfit(np.log(layers[1:] - 1), np.log(growth), 1)[0])


def theory_of(placements: set[str]) -> str:
    """Return what theory says of a stack whose blocks all have these placements.

    >>> theory_of({"pre"}) == PRE, theory_of({"lns"}) == LNS, theory_of({"pre", "post"}) == NO_LAW
    (True, True, True)
    """
    return {frozenset({"pre"}): PRE, frozenset({"lns"}): LNS}.get(frozenset(placements), NO_LAW)
