"""Trace, diagonal and Frobenius norm of a Hessian from a few products with it, with intervals.

One sketch serves all three. For k vectors Omega of random signs, Q R = H Omega and Z = H Q, 2 k products; without the i-th
vector the basis is Q_i Q_i^T = Q (I - s_i s_i^T) Q^T, with s_i the i-th column of R^-T at length 1. What Q_i leaves of H is
measured by omega_i, which is independent of it. Each of k values is unbiased, whatever the signs of the eigenvalues (of trace
and norm in the part without direction i: (I - P_i) omega_i is brought to the length that it has on average, which is exact for
directions that are uniform, and for signs a bias of a few hundredths of the spread):

    trace      tr(Q_i^T H Q_i) + omega_i^T (I - P_i) H (I - P_i) omega_i,     P_i = Q_i Q_i^T
    diagonal   diag(P_i H) + omega_i o (I - P_i) H omega_i
    |H|_F^2    |H Q_i|_F^2 + |H (I - P_i) omega_i|^2

The first two are XTrace and XDiag of Epperly, Tropp and Webber, "XTrace: Making the most of every sample in stochastic trace
estimation", SIAM J. Matrix Anal. Appl. 45, 2024, which share the idea of Meyer, Musco, Musco and Woodruff, "Hutch++", 2021:
a low-rank part exactly, the rest at random. An estimate is the mean of the k values x_i.

The x_i share all but one vector. Their covariance has an unbiased estimate of its own. Let x_ij be the i-th value without the
j-th vector in its basis. Over omega_i alone x_i and x_ij have the truth for mean, over omega_j alone x_j and x_ji; and x_ij does
not depend on omega_j, nor x_ji on omega_i. So of the four products of deviations only the first has a mean other than 0 in

    cov(x_i, x_j) = E (x_i - x_ij)(x_j - x_ji) .

With s^2 the sample variance of the x_i, the variance of their mean is E s^2 / k + cov. All of it is arithmetic in the basis and
takes no further products.

The sketch pays where H is near a matrix of rank k. The first k products show that: y_i = H omega_i and its part outside the
span of the others have mean squares |H|_F^2 and |(I - P_i) H|_F^2. Where the share of the latter is above :data:`FLAT`, the
other k products are of k more signs, and the estimates are means over all 2 k: Girard, "A fast 'Monte-Carlo cross-validation'
procedure", Numer. Math. 56, 1989; Hutchinson, Commun. Statist. Simul. 19, 1990; Bekas, Kokiopoulou and Saad, Appl. Numer. Math.
57, 2007:

    trace      omega^T H omega          diagonal   omega o H omega          |H|_F^2    |H omega|^2
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.special import stdtrit
from torch import Tensor

from hessiankit.curvature.tensor_operator import TensorOperator, by_all_processes
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.files import plain
from hessiankit.support.inner_products import entries, holding, summed
from hessiankit.support.tables import Piece, Printed, table

LEAST = 6  # products
SMALL = 32  # rows up to which the whole matrix is taken: k vectors of few signs may be linearly dependent
SUM_ROUNDING = 16  # times the rounding error of a sum of as many terms as the number has, the least half width
PAIRED = 64  # vectors of which all pairs are taken for the covariance of two values
FLAT = 0.25
"""Share of |H|_F^2 outside the span of k - 1 products from which 2 k signs are taken. A sketch's half width grows with the root
of the share: with 20 signs it is at most Student's t_19 (1.5 2 share / 20)^(1/2), that of 40 signs is t_39 (2 / 40)^(1/2)."""
SHARED = 0.5  # share of s^2 / k that the covariance is at least: its estimate is noisy, and small where s^2 is too small
WIDER = 1.25
"""Of an entry of the diagonal, whose covariances would take k^2 numbers each: its errors are 1.0 to 1.25 times what s^2 / k says,
and sqrt(P / (P - k)) times more where k is not far below P."""
FEW, HELD = 20, (77, 91)
"""Products, and the least share in % of intervals of 95 % that held with fewer and with as many, of docs/intervals.md."""


@dataclass(frozen=True)
class Estimate:
    """An estimate with its confidence interval ``value - half_width`` to ``value + half_width``.

    >>> print(Estimate(2.0, 0.25))
    2 +- 0.25
    """

    value: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.value:.6g} +- {self.half_width:.2g}"

    def __format__(self, spec: str) -> str:
        """Return the value as a number, with one digit of the half width where there is one; without ``spec``, as ``str``."""
        error = f" +- {self.half_width:.1g}" if self.half_width else ""
        return format(self.value, spec) + error if spec else str(self)


@dataclass(frozen=True, repr=False, eq=False)
class ScalarEstimates(Printed):
    """Estimates of trace, diagonal and Frobenius norm; made by :func:`scalar_estimates`.

    Attributes:
        trace: Trace of the matrix.
        frobenius_squared: The sum of the squares of all entries.
        traces: Trace of each parameter's diagonal block, by name; from the estimated diagonal.
        diagonal: Each entry of it, (P,).
        half_widths: Half widths of the entries' intervals, (P,); the level holds for one entry, not for all together.
        products: Products with the matrix that were taken.
        level: Confidence level of each interval.
        kind: Kind of the operator of a module; the class of any other.
        size: Number of rows P of the matrix.
        seconds: Time taken.
    """

    trace: Estimate
    frobenius_squared: Estimate
    traces: dict[str, Estimate]
    diagonal: Tensor
    half_widths: Tensor
    products: int
    level: float
    kind: str
    size: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the diagonal as plain Python values."""
        about = {"parameters": self.size, "kind": self.kind, "products": self.products, "level": self.level}
        numbers = plain({name: getattr(self, name) for name in ("trace", "frobenius_squared", "traces", "seconds")}, float)
        return {**about, **numbers}

    @property
    def words(self) -> str:
        """The reliability of the numbers, in words."""
        if self.products == self.size:
            return f"exact up to rounding, from {self.products:,} products"
        coverage = (
            f"those of 95 % held {HELD[self.products >= FEW]} to 100 % of the time where that was measured, docs/intervals.md"
        )
        return f"ESTIMATES from {self.products:,} products, {100 * self.level:g} % intervals ({coverage})"

    def _headline(self) -> str:
        matrix = "Hessian" if self.kind == "hessian" else f"operator of kind {self.kind!r}"
        return f"{matrix}, {self.size:,} parameters: trace {self.trace}, |H|_F^2 {self.frobenius_squared}; {self.words}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        rows = ((name, f"{e.value:.4g}", f"{e.half_width:.2g}") for name, e in self.traces.items())
        yield table(("parameter", "trace", "+-"), rows, names=self.traces)


@checked("scalar_estimates", leave=("operator",))
@by_all_processes
def scalar_estimates(operator: TensorOperator, *, products: int = 100, level: float = 0.95, seed: int = 0) -> ScalarEstimates:
    """Return trace, diagonal and squared Frobenius norm of an operator with intervals, from some products with it.

    Sources and formulas: at the head of the file. Intervals are Student's, of leave-one-out values and the covariance of two of
    them; for |H|_F^2 with fewer degrees of freedom, as its values are skewed. From 20 products on those of 95 % held 91 to 100 %
    of the time on the matrices of ``docs/intervals.md``; with 10, those of |H|_F^2 87 %, and those of entries of a diagonal of
    which three are nearly all 77 %. Of a matrix with a flat spectrum the intervals are those of plain random signs. Where
    ``products`` is P or more, or P at most 32, P products with the unit vectors give everything exactly. Memory: about four times
    as many vectors (P,) in float64 as products.

    Args:
        operator: Any symmetric operator, as of :func:`hessiankit.hessian_operator` or its inverse; it may be indefinite.
        products: Products with the operator, 6 or more; of an odd number one is not taken.
        level: Confidence level of a single interval.
        seed: Seed of the random signs; torch's global generator is not used.

    Raises:
        InputError: An argument cannot be used, or a product is not finite.

    The Hessian of a linear layer under squared error is 2/(L d_out) X^T X (x) I, here [[2, 2], [2, 4]]:

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> found = scalar_estimates(hk.hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64)), products=6)
    >>> found.trace.value, found.frobenius_squared.value, found.diagonal.tolist()
    (6.0, 28.0, [2.0, 4.0])
    """
    start = time.perf_counter()
    caller = "scalar_estimates"
    if not isinstance(operator, TensorOperator) or operator.shape[0] != operator.shape[1]:
        raise InputError(f"{caller}: operator is a {type(operator).__name__}; pass what hessian_operator(...) returns")
    if products < LEAST:
        raise InputError(f"{caller}: products={products} leave no spread to see; pass {LEAST} or more")
    if not 0 < level < 1:
        raise InputError(f"{caller}: level={level} is no share of intervals; pass a number between 0 and 1, 0.95 for one")
    slices: dict[str, slice] = getattr(operator, "slices", {})  # only of an operator with parameters by name
    size, dtype, eps = operator.size, operator.torch_dtype, torch.finfo(operator.torch_dtype).eps
    if operator.of_pieces and size <= max(products, SMALL):
        raise InputError(f"{caller}: products={products} of a sharded model with {size} parameters; pass fewer than it has")

    def product(vectors: Tensor) -> Tensor:
        products: Tensor = operator @ vectors
        if not math.isfinite(float(summed(products.sum()))) and float(summed((~torch.isfinite(products)).sum())):
            raise InputError(f"{caller}: a product with the operator is NaN or infinite, so that nothing can be estimated")
        return products

    if size <= max(products, SMALL):
        H = product(torch.eye(size, dtype=dtype, device=operator.device)).double()
        exact = [H.trace(), H.square().sum(), *(H.diagonal()[rows].sum() for rows in slices.values())]
        trace, squares, *blocks = (Sample(x.reshape(1)) for x in exact)
        D, count = H.diagonal().unsqueeze(1), size
    else:
        generator, half = torch.Generator().manual_seed(seed), products // 2
        signs = random_signs(operator.shape[0], half, generator).to(operator.device, dtype)
        Y = product(signs)
        samples: Sketch | Means
        if share_outside(Y) <= FLAT:
            samples = Sketch(product, signs, Y)
        else:
            second_signs = random_signs(operator.shape[0], half, generator).to(signs)
            samples = Means((signs, Y), (second_signs, product(second_signs)))
        trace, squares, D, count = samples.trace(), samples.squares(), samples.diagonal(), 2 * half
        blocks = [samples.block(rows) for rows in slices.values()]
    norm = math.sqrt(max(0.0, squares.mean))

    def estimate(sample: Sample, scale: float) -> Estimate:
        return Estimate(sample.mean, sample.half_width(level) + SUM_ROUNDING * eps * scale)

    sizes = summed(torch.tensor([rows.stop - rows.start for rows in slices.values()], device="cpu")).tolist()
    return ScalarEstimates(
        estimate(trace, math.sqrt(size) * norm),  # the sum of |eigenvalues| is at most sqrt(P) |H|_F
        estimate(squares, norm**2),
        {n: estimate(block_values, math.sqrt(rows) * norm) for n, block_values, rows in zip(slices, blocks, sizes, strict=True)},
        D.mean(1).to(dtype),
        (entry_half_widths(D, level) + SUM_ROUNDING * eps * norm).to(dtype),
        count,
        level,
        getattr(operator, "kind", type(operator).__name__),
        size,
        time.perf_counter() - start,
    )


def random_signs(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Return vectors of random signs, (size, count), in float64, each contiguous, as those of products are."""

    def draw(n: int) -> Tensor:
        return torch.randint(2, (n,), generator=generator, dtype=torch.float64, device="cpu")

    return torch.stack([holding().drawn(draw, size) for _ in range(count)]).mul_(2).sub_(1).T


def share_outside(Y: Tensor) -> float:
    """Return the share of the squared norms of the columns (P, k) that lies outside the span of the other columns.

    From the Gram matrix G: that of a column is 1 / (G^-1)_ii. G gets a ridge of its rounding: dependent columns have none.

    >>> share_outside(torch.eye(3)[:, :2]), round(share_outside(torch.ones(3, 2)), 5)
    (1.0, 0.0)
    """
    G = summed(Y.T @ Y).double()
    total = float(G.trace())
    ridge = len(G) * torch.finfo(Y.dtype).eps * total
    G.diagonal().add_(ridge)
    return float((1 / torch.linalg.inv(G).diagonal() - ridge).sum()) / total if ridge else 0.0


@dataclass(frozen=True, eq=False)
class Sample:
    """Values of one number, whose mean is its estimate."""

    values: Tensor  # (k,); one for an exact number
    covariance: float | None = None  # estimate of that of two of them; None where they are independent
    varying: float = 0.0  # the mean of what random vectors give of a number of skewed values, all positive; 0 of others

    @property
    def mean(self) -> float:
        """The estimate."""
        return float(self.values.mean())

    @property
    def variance(self) -> float:
        """Variance of the mean: s^2 / k and the covariance, if any, which counts for half of s^2 / k at least; 0 if exact."""
        k = len(self.values)
        spread = float(self.values.var()) / k if k > 1 else 0.0
        return spread if self.covariance is None else spread + max(self.covariance, SHARED * spread)

    def half_width(self, level: float) -> float:
        """Return the half width of the mean's interval: Student's t with k - 1 degrees of freedom.

        Of skewed values it has m, 1 / m = 1 / (k - 1) + variance / varying^2: for a gamma variable, the variance of the
        logarithm of the sample variance is 2 / m.

        >>> Sample(torch.tensor([1.0])).half_width(0.95), Sample(torch.tensor([2.0, 2.0, 2.0])).half_width(0.95)
        (0.0, 0.0)
        """
        variance = self.variance
        if variance == 0.0:
            return 0.0
        inverse_freedom = 1 / (len(self.values) - 1) + (variance / self.varying**2 if self.varying > 0 else 0.0)
        return float(stdtrit(1 / inverse_freedom, (1 + level) / 2)) * math.sqrt(variance)


class Means:
    """Values of the trace, norm and diagonal of a symmetric matrix H by each of n vectors of signs.

    ``draws`` are signs Omega (P, k), which are written over, with H Omega.
    """

    def __init__(self, *draws: tuple[Tensor, Tensor]) -> None:
        self.lengths = summed(torch.cat([Y.square().sum(0).double() for _, Y in draws]))
        self.values = torch.cat([signs.mul_(Y).T for signs, Y in draws]).T

    def trace(self) -> Sample:
        """Return values of tr H."""
        return self.block(slice(None))

    def squares(self) -> Sample:
        """Return values of |H|_F^2."""
        return Sample(self.lengths, varying=float(self.lengths.mean()))

    def diagonal(self) -> Tensor:
        """Return values of every entry of the diagonal, (P, n)."""
        return self.values

    def block(self, rows: slice) -> Sample:
        """Return values of the sum of the diagonal's entries in some rows."""
        return Sample(summed(self.values[rows].sum(0).double()))


class Sketch:
    """Leave-one-out values of trace, norm and diagonal of a symmetric matrix H, from k vectors of signs and 2 k products.

    Omega (P, k), k < P, are the signs, Y is H Omega; ``product`` maps V (P, k) to H V in their type, and all else is in float64.
    """

    def __init__(self, product: Callable[[Tensor], Tensor], signs: Tensor, Y: Tensor) -> None:
        self.signs, Y, dtype = signs.double(), Y.double(), signs.dtype
        k = signs.shape[1]
        self.size = entries(Y[:, 0])
        self.Q, self.R = holding().qr(Y)
        self.Z = product(self.Q.to(dtype)).double()
        spread = torch.linalg.svdvals(self.R)
        if float(spread[-1]) <= k * torch.finfo(dtype).eps * float(spread[0]):  # Q holds all of H, with or without any one vector
            self.S = torch.zeros_like(self.R)
        else:
            eye = torch.eye(k, dtype=self.R.dtype, device=self.R.device)
            S = torch.linalg.solve_triangular(self.R, eye, upper=True).T
            self.S = S / S.norm(dim=0)
        self.W, self.H = summed(self.Q.T @ self.signs), summed(self.Q.T @ self.Z)
        self.ZZ, self.ZY, self.YY = summed(self.Z.T @ self.Z), summed(self.Z.T @ Y), summed(Y.square().sum(0))

    def trace(self) -> Sample:
        """Return values of tr H."""
        H, W, R = self.H, self.W, self.R

        def values(bases: list[Tensor], at: Tensor) -> Tensor:
            U, scale = self._projected(bases, at)
            rest = (W * R).sum(0)[at] - 2 * (R[:, at] * U).sum(0) + (U * (H @ U)).sum(0)
            return _outside(H, bases) + scale * rest

        return self._sample(values)

    def squares(self) -> Sample:
        """Return values of |H|_F^2."""
        ZZ, ZY, YY = self.ZZ, self.ZY, self.YY

        def rest(bases: list[Tensor], at: Tensor) -> Tensor:
            U, scale = self._projected(bases, at)
            return scale * (YY[at] - 2 * (ZY[:, at] * U).sum(0) + (U * (ZZ @ U)).sum(0)).clamp(min=0.0)

        def values(bases: list[Tensor], at: Tensor) -> Tensor:
            return _outside(ZZ, bases) + rest(bases, at)

        varying = float(rest([self.S], torch.arange(len(YY), device=YY.device)).mean())
        return replace(self._sample(values), varying=varying)

    def diagonal(self) -> Tensor:
        """Return values of every entry of the diagonal, (P, k)."""
        QS, ZS = self.Q @ self.S, self.Z @ self.S
        return (self.Q * self.Z).sum(1, keepdim=True) - QS * ZS + self.signs * QS * (self.S * self.R).sum(0)

    def block(self, rows: slice) -> Sample:
        """Return values of the sum of the diagonal's entries in some rows."""
        QZ, W, R = summed(self.Q[rows].T @ self.Z[rows]), summed(self.Q[rows].T @ self.signs[rows]), self.R

        def values(bases: list[Tensor], at: Tensor) -> Tensor:
            measured = [(B * W[:, at]).sum(0) * (B * R[:, at]).sum(0) for B in bases]
            return _outside(QZ, bases) + torch.stack(measured).sum(0)

        return self._sample(values)

    def _projected(self, bases: list[Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
        """Return P omega in the basis Q, and the factor that scales |(I - P) omega|^2 to its mean."""
        size, k, U = self.size, len(self.R), self.W[:, at]
        for B in bases:
            U = U - B * (B * U).sum(0)
        return U, (size - k + len(bases)) / (size - U.square().sum(0))

    def _sample(self, values: Callable[[list[Tensor], Tensor], Tensor]) -> Sample:
        """Return the values, of bases Q less one direction, and their covariance, by bases less two."""
        k = self.R.shape[1]
        indices = torch.arange(k, device=self.R.device)
        x, S = values([self.S], indices), self.S
        if k == 1 or not bool(S.any()):
            return Sample(x, 0.0)
        paired = indices[:PAIRED]
        changes = x.new_zeros(len(paired), len(paired))
        for j in range(len(paired)):
            at = paired[paired != j]
            second = S[:, j : j + 1] - S[:, at] * (S[:, j] @ S[:, at])
            changes[at, j] = x[at] - values([S[:, at], second / second.norm(dim=0)], at)
        return Sample(x, float((changes * changes.T).sum()) / (len(paired) * (len(paired) - 1)))


def _outside(A: Tensor, bases: list[Tensor]) -> Tensor:
    """Return tr A less B^T A B for every column of every B, with columns of the same number orthogonal."""
    return A.trace() - torch.stack([(B * (A @ B)).sum(0) for B in bases]).sum(0)


def entry_half_widths(values: Tensor, level: float) -> Tensor:
    """Return the half widths (P,) of the intervals of the means of the diagonal's leave-one-out values (P, k).

    >>> entry_half_widths(torch.tensor([[1.0]]), 0.95), entry_half_widths(torch.full((9, 3), 2.0), 0.95)[0]
    (tensor([0.]), tensor(0.))
    """
    size, k = entries(values[:, 0]), values.shape[1]
    if k == 1:
        return torch.zeros_like(values[:, 0])
    wider = WIDER * math.sqrt(size / (size - k)) * float(stdtrit(k - 1, (1 + level) / 2))
    squares = (values - values.mean(1, keepdim=True)).square_().sum(1)  # in half the time of std
    return wider * (squares / (k - 1)).sqrt() / math.sqrt(k)
