"""Errors of an approximation and its step, and the condition number after preconditioning, from the matrix or its products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from scipy.linalg import LinAlgError, eigh
from torch import Tensor

from hessiankit.curvature.dense import spectral_norm
from hessiankit.curvature.estimators import Estimate, Sketch, random_signs
from hessiankit.curvature.operator import HessianOperator
from hessiankit.curvature.structures import LowRankPlusDiagonal, StructuredOperator
from hessiankit.support.errors import InputError
from hessiankit.support.lanczos import lanczos

Model = StructuredOperator | LowRankPlusDiagonal
LEVEL = 0.95  # of confidence, of the intervals


@dataclass(frozen=True)
class Measures:
    """Errors of an approximation C of a matrix A, and of the preconditioner M made from C.

    Attributes:
        frobenius: ||A - C||_F / ||A||_F.
        spectral: ||A - C||_2 / ||A||_2.
        alignment: <A, C>_F / (||A||_F ||C||_F), which does not depend on the scale of C; NaN by products.
        step_cosine: The cosine of M^-1 g with (A + damping I)^-1 g, g the gradient.
        condition: The condition number of M^(-1/2) (A + damping I) M^(-1/2); NaN where it is not known, infinite where M or
            A + damping I is not positive definite.
        pairs: ||(A - C)_ij||_F by pair of parameters, (n, n); None by products.
        spectral_pairs: ||(A - C)_ij||_2 likewise.
    """

    frobenius: Estimate
    spectral: Estimate
    alignment: float
    step_cosine: float
    condition: float
    pairs: Tensor | None = None
    spectral_pairs: Tensor | None = None


def cosine(u: Tensor, v: Tensor) -> float:
    """Return the cosine of two vectors; NaN where one is zero.

    >>> cosine(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0]))
    1.0
    """
    size = float(u.norm() * v.norm())
    return float(u @ v) / size if size else math.nan


def block_norms(matrix: Tensor, slices: dict[str, slice]) -> tuple[Tensor, Tensor]:
    """Return the Frobenius and the spectral norm of every block (i, j) of a symmetric matrix, (n, n) each."""
    n = len(slices)
    frobenius, spectral = torch.zeros(2, n, n, dtype=torch.float64, device="cpu")
    for (i, rows), (j, columns) in combinations_with_replacement(enumerate(slices.values()), 2):
        block = matrix[rows, columns]
        frobenius[i, j] = frobenius[j, i] = float(block.norm())
        spectral[i, j] = spectral[j, i] = spectral_norm(block)
    return frobenius, spectral


class DenseTruth:
    """The exact matrix A in memory: its ``least`` eigenvalue, its norms and those of its ``pairs`` of blocks, the damping."""

    def __init__(self, matrix: Tensor, gradient: Tensor, slices: dict[str, slice], damping: float | None) -> None:
        self.matrix, self.gradient, self.slices = matrix.double().cpu(), gradient.double().cpu(), slices
        values = torch.linalg.eigvalsh(self.matrix)
        self.least, self.spectral = float(values[0]), float(values.abs().max())
        self.damping = damping_of(damping, self.spectral, self.least)
        self.frobenius = float(self.matrix.norm())
        self.damped = self.matrix + self.damping * torch.eye(len(values), dtype=torch.float64, device=self.matrix.device)
        self.step = self._solution(self.damped)
        self.pairs = block_norms(self.matrix, slices)

    def measure(self, model: Model, power: float) -> Measures:
        """Return the measures of C, with M = (C + damping I)^power, the damping in proportion to the size of C if power < 1."""
        C = model.to_matrix().double().cpu()
        E = self.matrix - C
        damping = self.damping if power == 1 else self.damping * model.largest / self.spectral
        M = C + damping * torch.eye(len(C), dtype=torch.float64, device=C.device)
        if power != 1:
            assert isinstance(model, StructuredOperator)
            M = model.mapped(lambda values: (values + damping).clamp(min=0) ** power).to_matrix().double().cpu()
        pairs, spectral_pairs = block_norms(E, self.slices)
        return Measures(
            Estimate(float(E.norm()) / self.frobenius, 0.0),
            Estimate(spectral_norm(E, symmetric=True) / self.spectral, 0.0),
            cosine(self.matrix.flatten(), C.flatten()),
            cosine(self.step, self._solution(M)),
            self._condition(M),
            pairs,
            spectral_pairs,
        )

    def _solution(self, M: Tensor) -> Tensor:
        """Return M^-1 g; where M is singular to rounding, the solution of least norm."""
        solution, info = torch.linalg.solve_ex(M, self.gradient)
        if int(info) == 0 and bool(torch.isfinite(solution).all()):
            return solution
        return torch.linalg.lstsq(M, self.gradient.unsqueeze(1), driver="gelsd").solution[:, 0]

    def _condition(self, M: Tensor) -> float:
        try:
            values = eigh(self.damped.numpy(), M.numpy(), eigvals_only=True)
        except LinAlgError:
            return math.inf
        return float(values[-1] / values[0]) if values[0] > 0 else math.inf


def damping_of(asked: float | None, spectral: float, least: float) -> float:
    """Return the damping asked for, or 1 % of the spectral norm, plus the magnitude of the least eigenvalue if it is negative.

    >>> damping_of(None, 100.0, 2.0), damping_of(None, 100.0, -3.0), damping_of(0.5, 100.0, 2.0)
    (1.0, 4.0, 0.5)
    """
    if not spectral:
        raise InputError("approximations: the exact matrix is zero, so that no error is defined; check loss and parameters")
    return 0.01 * spectral + max(0.0, -least) if asked is None else asked


class ProductTruth:
    """The exact matrix A by its products: norms with intervals, the step by conjugate gradients, ends of spectra by Lanczos.

    Attributes as in :class:`DenseTruth`, from Ritz values (the spectral norm is a lower bound) and estimates; ``notes`` say what
    has not converged. ``positive`` says that A is known to have no negative eigenvalue, so that ``least`` is 0.
    """

    def __init__(self, operator: HessianOperator, damping: float | None, products: int, seed: int, *, positive: bool) -> None:
        self.operator, self.products, self.notes = operator, products, list[str]()
        generator = torch.Generator().manual_seed(seed)
        size = operator.shape[0]
        self._start = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu").to(
            operator.device, operator.torch_dtype
        )
        self._signs = random_signs(size, min(products // 2, size - 1), generator).to(self._start)
        top, bottom = self._largest(operator.__matmul__, "A"), 0.0
        if not positive:
            bottom = -self._largest(lambda v: -(operator @ v), "-A")
        self.least, self.spectral = bottom, max(top, -bottom)
        self.damping = damping_of(damping, self.spectral, self.least)
        self._squares = self._norm(operator.__matmul__)
        self.frobenius = self._squares.value
        self.gradient = operator.gradient
        self.step = self._solve()

    def _largest(self, product: Callable[[Tensor], Tensor], of: str) -> float:
        largest = lanczos(product, self._start, tol=1e-3, most=self.products)
        if not largest.converged:
            state = f"a residual of {largest.relative:.1%} after {largest.products} products"
            self.notes.append(f"the largest eigenvalue of {of} has {state}")
        return largest.value

    def _norm(self, product: Callable[[Tensor], Tensor]) -> Estimate:
        """Return the Frobenius norm with its interval."""
        squares = Sketch(product, self._signs, product(self._signs)).squares()
        half, root = squares.half_width(LEVEL), math.sqrt(max(squares.mean, 0.0))
        return Estimate(root, half / (2 * root) if root else 0.0)

    def _solve(self) -> Tensor:
        solution = self.operator.solve(self.gradient, damping=self.damping, tol=2e-6, max_products=10 * self.products)
        if not solution.converged:
            how = f"{solution.method} stopped after {solution.products} products, before rtol = 2e-6"
            self.notes.append(f"the exact step has not converged: {how}")
        return solution.x  # type: ignore[no-any-return]

    def measure(self, model: Model, power: float) -> Measures:
        """Return the measures of C, with M as in :meth:`DenseTruth.measure`."""
        A = self.operator

        def difference(V: Tensor) -> Tensor:
            return A @ V - model @ V

        norm = self._norm(difference)
        relative = norm.value / self.frobenius
        width = relative * math.hypot(
            norm.half_width / norm.value if norm.value else 0.0, self._squares.half_width / self.frobenius
        )
        error = Estimate(0.0, norm.value / self.spectral)  # of rounding, which is not symmetric, there is no more to say
        if relative > 4 * torch.finfo(A.torch_dtype).eps ** 0.5:
            squared = lanczos(lambda v: difference(difference(v)), self._start, tol=1e-3, most=max(3, self.products // 2))
            spectral = math.sqrt(max(squared.value, 0.0))
            error = Estimate(spectral / self.spectral, squared.residual / (2 * spectral) / self.spectral if spectral else 0.0)
        damping = self.damping if power == 1 else self.damping * model.largest / self.spectral
        g = self.gradient.unsqueeze(0)
        if isinstance(model, LowRankPlusDiagonal):
            step, condition = model.solve(g, damping)[0], math.nan
        else:
            step = model.mapped(lambda v: (v + damping).clamp(min=0) ** -power)._rows(g)[0]
            condition = self._condition(model.mapped(lambda v: (v + damping).clamp(min=0) ** (-power / 2)))
        is_known = bool(torch.isfinite(step).all())
        step_cosine, condition = (cosine(self.step, step), condition) if is_known else (math.nan, math.inf)
        return Measures(Estimate(relative, width), error, math.nan, step_cosine, condition)

    def _condition(self, root: StructuredOperator) -> float:
        def product(v: Tensor) -> Tensor:
            w = root @ v
            return root @ (self.operator @ w + self.damping * w)

        if not math.isfinite(root.largest):
            return math.inf
        top = self._largest(product, "M^(-1/2) (A + damping) M^(-1/2)")
        smallest = lanczos(lambda v: 2 * top * v - product(v), self._start, tol=5e-8, most=self.products)  # never zero
        bottom = 2 * top - smallest.value
        if bottom > 0 and smallest.residual > 0.1 * bottom:
            self.notes.append("condition numbers are lower bounds: least eigenvalues have not converged; pass more products")
        return top / bottom if bottom > 0 else math.inf
