r"""Spectral sums and densities from extreme eigenpairs and stochastic Lanczos quadrature.

With n eigenpairs (lambda_i, u_i) found, U their vectors, and s random directions q_j, uniform on the unit sphere of the
complement of U, the Gauss quadrature of each direction's spectral measure (nodes t_jk, weights w_jk) gives without bias

    tr f(H)  =  sum_i f(lambda_i) + (P - n) E[q^T f(H) q]  ~  sum_i f(lambda_i) + (P - n) / s sum_jk w_jk f(t_jk) .

Golub and Welsch, "Calculation of Gauss quadrature rules", Math. Comp. 23, 1969; Lin, Saad and Yang, "Approximating spectral
densities of large matrices", SIAM Review 58, 2016, Sec. 3.2; Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic
Lanczos quadrature", SIAM J. Matrix Anal. Appl. 38, 2017. The eigenpairs apart, this is the estimator of Ghorbani, Krishnan and
Xiao, "An investigation into neural net optimization via Hessian eigenvalue density", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from hessiankit.curvature.estimators import Estimate
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.files import WithDict

LEVEL = 0.95
DIRECTIONS, STEPS = 10, 80
COST = f"{DIRECTIONS} directions x {STEPS} steps = {DIRECTIONS * STEPS} more products"
SCALES = ("linear", "log")
EIGENVALUE_ROUNDING = (
    64  # times eps and the largest |eigenvalue|: smaller ones count as zero; of a sum, times eps and that of magnitudes
)
NO_NODES = torch.zeros(0, 0, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, eq=False)
class SpectralMeasure:
    """Point masses for the eigenvalues of a symmetric matrix: located ones exactly, the rest by nodes of random directions."""

    size: int  # P, the number of all eigenvalues
    located: Tensor  # eigenvalues that count once each, (n,); fewer than P without nodes: the others are unknown
    eps: float  # relative rounding error of a product
    nodes: Tensor = NO_NODES  # of each direction, (s, m), float64; s = 0 where only the located eigenvalues are known
    weights: Tensor = NO_NODES  # of the nodes, 0 where there is none; every row sums to 1

    @property
    def is_whole(self) -> bool:
        """Whether the measure has a mass for all eigenvalues, exact or estimated."""
        return bool(len(self.nodes)) or len(self.located) == self.size

    @property
    def scale(self) -> float:
        """The largest |eigenvalue| or |node|."""
        return max((float(x.abs().max()) for x in (self.located, self.nodes) if x.numel()), default=0.0)

    def sums(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the value of tr f(H) by each direction, (max(s, 1), ...), for f: (n,) -> (..., n)."""
        if not self.is_whole:
            state = f"{len(self.located):,} of {self.size:,} eigenvalues are known"
            raise InputError(f"Spectrum: {state}, and trace, density and ranks need all; pass density=True, which takes {COST}")
        exact = f(self.located).sum(-1)
        if not len(self.nodes):
            return exact.unsqueeze(0)
        rest = torch.stack([(f(t) * w).sum(-1) for t, w in zip(self.nodes, self.weights, strict=True)])
        return exact + (self.size - len(self.located)) * rest

    def estimate(self, f: Callable[[Tensor], Tensor], *, value: float | None = None) -> Estimate:
        """Return tr f(H) with its 95 % interval over the directions; exact where there are none.

        A direction's n q_1^2, its share of one eigenvalue times the n of the complement, has the variance 2 (n - 1) / (n + 2),
        which no few directions with small shares show. So the half width is Student's of the sample or the normal one of that
        variance for the largest |f| of a node, the larger of the two. ``value`` is that of another number, whose change with the
        measure is that of tr f(H) to first order.
        """
        sums = self.sums(f)
        value = float(sums.mean()) if value is None else value
        s, rest = len(self.nodes), self.size - len(self.located)
        if not s:
            return Estimate(value, 0.0)
        level = (1 + LEVEL) / 2
        largest = float((f(self.nodes).abs() * (self.weights > 0)).max())
        deviation = math.sqrt(2 * (rest - 1) / (rest + 2)) * largest
        half = max(float(stdtrit(s - 1, level)) * float(sums.std()), float(ndtri(level)) * deviation) / math.sqrt(s)
        rounding = EIGENVALUE_ROUNDING * self.eps * float(self.sums(lambda t: f(t).abs()).mean())
        return Estimate(value, half + rounding)


@dataclass(frozen=True, eq=False)
class Density(WithDict):
    """The spectral density convolved with a normal density of standard deviation ``width``; its integral is 1 less ``zeros``.

    Attributes:
        scale: ``"linear"``: per unit of the eigenvalue; ``"log"``: per decade of |eigenvalue|.
        points: Eigenvalues, or |eigenvalues|, (n,).
        values: The density there; of the positive eigenvalues where the scale is logarithmic.
        standard_errors: Standard errors over the random directions; 0 where all eigenvalues are known.
        negative: The density of the negative eigenvalues per decade of |eigenvalue|; None for a linear scale.
        negative_errors: Standard errors of ``negative``; None for a linear scale.
        zeros: Share of the eigenvalues that are zero to rounding, which a logarithmic scale does not show; 0 for a linear one.
        width: Standard deviation of the kernel, in the scale's unit: eigenvalues, or decades.
    """

    scale: str
    points: Tensor
    values: Tensor
    standard_errors: Tensor
    negative: Tensor | None
    negative_errors: Tensor | None
    zeros: float
    width: float

    def __repr__(self) -> str:
        """Return one line: scale, points, kernel and the largest standard error."""
        per = "decade of |eigenvalue|" if self.scale == "log" else "eigenvalue"
        span = f"{len(self.points)} points from {float(self.points[0]):.4g} to {float(self.points[-1]):.4g}"
        error = float(self.standard_errors.max())
        return f"<Density: per {per}, {span}, kernel width {self.width:.3g}, standard errors up to {error:.2g}>"


def density(measure: SpectralMeasure, scale: str, width: float | None, points: int | Tensor) -> Density:
    """Return the density of a measure; see :meth:`hessiankit.landscape.Spectrum.density`."""
    caller = "Spectrum.density"
    check_name(caller, "scale", scale, SCALES)
    if width is not None and not (math.isfinite(width) and width > 0):
        raise InputError(f"{caller}: width={width}; expected a positive number, in the unit of the axis, or None")
    if isinstance(points, int) and points < 2:
        raise InputError(f"{caller}: points={points}; expected 2 or more")
    if isinstance(points, Tensor) and (points.ndim != 1 or (scale == "log" and not bool((points > 0).all()))):
        raise InputError(
            f"{caller}: points has shape {tuple(points.shape)}; expected eigenvalues (n,), for scale='log' positive ones"
        )
    masses = torch.cat([measure.located, measure.nodes[measure.weights > 0]])
    top = measure.scale or 1.0
    zero = EIGENVALUE_ROUNDING * measure.eps * top
    if scale == "linear":
        low, high = float(masses.min()), float(masses.max())
        s = width or max(high - low, top * 1e-3) / 100
        x = _axis(low - 4 * s, high + 4 * s, points)
        value, error = _mean(measure, lambda t: _kernel(x, t, s))
        return Density(scale, x, value, error, None, None, 0.0, s)
    sizes = masses.abs()[masses.abs() > zero]
    low, high = (math.log10(float(sizes.min())), math.log10(float(sizes.max()))) if sizes.numel() else (-1.0, 0.0)
    s = width or max(high - low, 0.5) / 50
    x = _axis(low - 4 * s, high + 4 * s, points.log10() if isinstance(points, Tensor) else points)

    def side(sign: float) -> tuple[Tensor, Tensor]:
        return _mean(measure, lambda t: _kernel(x, (sign * t).clamp(min=zero).log10(), s) * (sign * t > zero))

    zeros, _ = _mean(measure, lambda t: (t.abs() <= zero).double())
    return Density(scale, 10**x, *side(1.0), *side(-1.0), float(zeros), s)


def _axis(low: float, high: float, points: int | Tensor) -> Tensor:
    return points.double() if isinstance(points, Tensor) else torch.linspace(low, high, points, dtype=torch.float64, device="cpu")


def _kernel(x: Tensor, t: Tensor, width: float) -> Tensor:
    """Return the normal density at x (n,) around each t (m,), (n, m)."""
    return torch.exp(-0.5 * ((x.unsqueeze(1) - t) / width) ** 2) / (width * math.sqrt(2 * math.pi))


def _mean(measure: SpectralMeasure, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean over the directions of tr f(H) / P, and its standard error."""
    values = measure.sums(f) / measure.size
    if not len(measure.nodes):
        return values[0], torch.zeros_like(values[0])
    return values.mean(0), values.std(0) / math.sqrt(len(values))
