"""Solutions of (H + damping I) x = b from products with H, and the inverse as an operator."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from hessiankit.curvature.dense import top_eigenvalues
from hessiankit.curvature.estimators import scalar_estimates
from hessiankit.curvature.krylov import SOLVERS, Iterate, System, norm
from hessiankit.curvature.structures import diagonal_operator
from hessiankit.curvature.tensor_operator import TensorOperator, by_all_processes
from hessiankit.support.arguments import checked
from hessiankit.support.errors import ConvergenceError, InputError, check_name
from hessiankit.support.files import WithDict
from hessiankit.support.lanczos import Product, RitzValue
from hessiankit.support.tables import Piece, Printed
from hessiankit.support.torch_state import full_precision, wide

PRECONDITIONERS = ("diagonal", "kfac", "ekfac")
TOLERANCE = {torch.float64: 1e-8}  # of the residual, by dtype; 1e-4 for others
DENSE = 4096
"""Rows up to which the diagonal of an inverse is exact, from P products and three P x P matrices, of 134 MB each in float64.
An estimate is no cheaper there: its 100 solutions took 93 products each for a transformer of 776 parameters at damping 0.01,
225 at 0.001."""


@dataclass(frozen=True, repr=False, eq=False)
class Solution(Printed, WithDict):
    """The solution of (H + damping I) x = b; made by :func:`solve`.

    Attributes:
        x: (P,), or (P, k) for k right-hand sides, or tensors in the shapes of the parameters, as b is; the last iterate where it
            has not converged.
        residual: |b - (H + damping I) x| / |b|, from a product of its own; the largest of the right-hand sides.
        converged: Whether that is within ``tol``.
        least_squares: Whether it is not, and no x has a smaller residual: b - (H + damping I) x lies in the null space of H +
            damping I, to within ``tol`` of the matrix.
        tol: The tolerance.
        damping: Added to the diagonal.
        method: ``"cg"``, ``"minres"`` or ``"lsmr"``, the one that gave x.
        products: Products with H.
        lowest: Smallest Ritz value of H, an upper bound of its smallest eigenvalue, if conjugate gradients met a direction of
            nonpositive curvature of H + damping I; else None.
        seconds: Time taken.
    """

    x: Any
    residual: float
    converged: bool
    tol: float
    damping: float
    method: str
    products: int
    lowest: RitzValue | None
    seconds: float
    least_squares: bool = False

    _hidden = ("x",)

    @property
    def _state(self) -> str:
        if self.least_squares:
            cause = "what is left of b is in the null space of H + damping I"
            return f"NO SOLUTION: {cause}, x is a least-squares solution; raise damping"
        return f"NOT CONVERGED to {self.tol:g}: raise max_products or damping, or precondition"

    def _headline(self) -> str:
        state = "" if self.converged else f", {self._state}"
        text = f"{self.method}, damping {self.damping:g}: relative residual {self.residual:.1e} after {self.products} products"
        return f"{text}, {self.seconds:.2f} s{state}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        if self.lowest is not None:
            yield (
                f"H + damping I is not positive definite: H has an eigenvalue of {self.lowest.value:.6g} or less; x is no "
                "minimum of the quadratic model"
            )


class SymmetricOperator(TensorOperator):
    """A symmetric matrix known by its products, with solutions of linear systems; sums and multiples are such operators too.

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> H = hk.hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64))
    >>> (3 * H - sum([H, H])).to_matrix().tolist()
    [[2.0, 2.0], [2.0, 4.0]]
    >>> [round(v, 9) for v in (H.inverse() @ torch.tensor([4.0, 6.0], dtype=torch.float64)).tolist()]
    [1.0, 1.0]
    """

    def _adjoint(self) -> SymmetricOperator:
        return self

    def __add__(self, other: Any) -> Any:
        return OperatorSum([(1.0, self), (1.0, other)]) if isinstance(other, SymmetricOperator) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return self if isinstance(other, (int, float)) and other == 0 else NotImplemented  # where sum() begins

    def __mul__(self, other: Any) -> Any:
        is_number = np.isscalar(other) or (isinstance(other, Tensor) and not other.ndim)
        return OperatorSum([(float(other), self)]) if is_number else super().__mul__(other)

    def __rmul__(self, other: Any) -> Any:
        return self * other if np.isscalar(other) or isinstance(other, Tensor) else super().__rmul__(other)

    def __truediv__(self, other: Any) -> Any:
        return self * (1 / other)

    def __neg__(self) -> Any:
        return self * -1.0

    def eigvalsh(self, k: int | None = None) -> Tensor:
        """Return the k eigenvalues of largest magnitude, ascending, by ARPACK (``scipy.sparse.linalg.eigsh``), to rounding.

        All of them, from the dense matrix, where ``k`` is None or at least P - 1. :func:`hessiankit.spectrum` has eigenvectors,
        residuals and the density.
        """
        if k is None or not 0 < k < self.shape[0] - 1:
            return top_eigenvalues(torch.linalg.eigvalsh(self.to_matrix()), k)
        return torch.as_tensor(np.sort(eigsh(self.to_scipy(), k, return_eigenvectors=False)), device=self.device)

    def solve(self, b: Any, **options: Any) -> Solution:
        """Return x with (H + damping I) x = b; options as in :func:`hessiankit.curvature.solving.solve`."""
        return solve(self, b, **options)

    def inverse(self, damping: float = 0.0, **options: Any) -> InverseOperator:
        """Return (H + damping I)^-1 as an operator whose products are solutions; options as in :meth:`solve`."""
        return InverseOperator(self, damping, options)


class OperatorSum(SymmetricOperator):
    """sum_k w_k A_k of symmetric operators of one size; made by ``A + B``, ``2 * A`` and ``sum([A, B])``."""

    def __init__(self, terms: Sequence[tuple[float, SymmetricOperator]]) -> None:
        kinds = list(dict.fromkeys((term.shape, term.torch_dtype, term.device) for _, term in terms))
        if len(kinds) > 1:
            seen = " and ".join(f"{m} x {n} in {dtype} on {device}" for (m, n), dtype, device in kinds[:2])
            raise InputError(f"OperatorSum: terms are {seen}; expected the same")
        super().__init__(*kinds[0])
        self.terms, self.block_size = tuple(terms), min(term.block_size for _, term in terms)

    def _rows(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for weight, term in self.terms:
            out.add_(term._rows(rows), alpha=weight)
        return out


class InverseOperator(SymmetricOperator):
    """(H + damping I)^-1 by solutions of linear systems; made by :meth:`hessiankit.HessianOperator.inverse`.

    A product raises a :class:`hessiankit.ConvergenceError`, which carries the solution so far, where one of its systems has not
    converged.

    Attributes:
        operator: H.
        damping: Added to its diagonal.
    """

    def __init__(self, operator: TensorOperator, damping: float, options: dict[str, Any]) -> None:
        super().__init__(operator.shape, operator.torch_dtype, operator.device)
        self.operator, self.damping, self.options = operator, damping, options

    def _rows(self, rows: Tensor) -> Tensor:
        solution = solve(self.operator, rows.T, damping=self.damping, **self.options)
        if not solution.converged:
            raise ConvergenceError(
                f"InverseOperator: relative residual {solution.residual:.1e} after {solution.products} products, asked for "
                f"{solution.tol:g}: {solution._state}; the error's .found is the solution so far",
                solution,
            )
        return solution.x.T

    def diagonal(self, *, method: str = "auto", products: int = 100, level: float = 0.95, seed: int = 0) -> InverseDiagonal:
        """Return the diagonal of the inverse: the denominators of the saliencies of Optimal Brain Surgeon and SparseGPT.

        Args:
            method: ``"exact"``, from the dense matrix and its inverse; ``"estimate"``, from solutions for random signs, see
                :func:`hessiankit.scalar_estimates`; ``"auto"``: exact up to P = 4,096.
            products: Solutions of an estimate, 6 or more.
            level: Confidence level of the interval of each entry of an estimate.
            seed: Seed of the random signs.

        Raises:
            InputError: An argument cannot be used, or H + damping I is singular.
            ConvergenceError: A solution of an estimate has not converged.

        H = [[2, 2], [2, 4]], the Hessian of a linear layer, has the inverse [[1, -1/2], [-1/2, 1/2]]:

        >>> import hessiankit as hk
        >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
        >>> H = hk.hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64))
        >>> [round(v, 12) for v in H.inverse().diagonal().values.tolist()]
        [1.0, 0.5]
        """
        check_name("InverseOperator", "method", method, ("auto", "exact", "estimate"))
        start = time.perf_counter()
        if method == "exact" or (method == "auto" and self.shape[0] <= DENSE):
            values = _inverse_diagonal(self.operator, self.damping)
            return InverseDiagonal(values, torch.zeros_like(values), self.damping, None, time.perf_counter() - start)
        estimate = scalar_estimates(self, products=products, level=level, seed=seed)
        tol = self.options.get("tol") or TOLERANCE.get(self.torch_dtype, 1e-4)
        inexact = tol * math.sqrt(max(0.0, estimate.frobenius_squared.value))  # the residuals of the solutions
        widths = estimate.half_widths + inexact
        return InverseDiagonal(estimate.diagonal, widths, self.damping, estimate.level, time.perf_counter() - start)


@dataclass(frozen=True, repr=False, eq=False)
class InverseDiagonal(Printed, WithDict):
    """The diagonal of (H + damping I)^-1; made by :meth:`InverseOperator.diagonal`.

    Attributes:
        values: Entries (P,), in the order of the operator's vectors.
        half_widths: Half widths (P,) of their confidence intervals; 0 where the values are exact.
        damping: Number added to the diagonal of H.
        level: Confidence level of each interval; None where the values are exact.
        seconds: Time taken.
    """

    values: Tensor
    half_widths: Tensor
    damping: float
    level: float | None
    seconds: float

    _hidden = ("values", "half_widths")

    @property
    def is_estimate(self) -> bool:
        """Whether the values are estimates, not exact."""
        return self.level is not None

    @property
    def shape(self) -> torch.Size:
        """(P,)."""
        return self.values.shape

    def _headline(self) -> str:
        state = "exact" if self.level is None else f"ESTIMATE, {100 * self.level:g} % intervals"
        ends = f"{float(self.values.min()):.4g} to {float(self.values.max()):.4g}"
        text = f"diagonal of the inverse, damping {self.damping:g}: {len(self.values):,} entries from {ends}"
        return f"{text}; {state}, {self.seconds:.2f} s"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()


@full_precision()
def _inverse_diagonal(operator: TensorOperator, damping: float) -> Tensor:
    """Return the diagonal of (H + damping I)^-1 by an LU factorisation, in float64 where the device has it."""
    A = operator.to_matrix().to(wide(operator.device))
    A.diagonal().add_(damping)
    inverse, _ = torch.linalg.inv_ex(A)
    residual = float((A @ inverse).sub_(torch.eye(len(A), dtype=A.dtype, device=A.device)).abs().max())
    if not residual <= torch.finfo(A.dtype).eps ** 0.5:
        raise InputError(
            f"InverseOperator: H + damping I is singular to rounding, with damping={damping:g}; pass a larger damping"
        )
    return inverse.diagonal().to(operator.torch_dtype)


@checked("solve", leave=("operator", "b", "preconditioner"))
@by_all_processes
def solve(
    operator: TensorOperator,
    b: Any,
    *,
    damping: float = 0.0,
    method: str = "auto",
    preconditioner: Any = None,
    tol: float | None = None,
    max_products: int = 1000,
) -> Solution:
    """Return x with (H + damping I) x = b for a symmetric operator H.

    Everything stays on the operator's device and in its dtype; scalar products are summed in float64.

    Args:
        operator: H, (P, P): of :func:`hessiankit.hessian_operator`, a diagonal block ``operator[names]`` of it, or its
            block-diagonal part.
        b: Right-hand side (P,), or several as columns (P, k), treated one after the other.
        damping: Added to the diagonal, 0 or more.
        method: ``"cg"``, for a positive definite matrix; ``"minres"``, for any symmetric one; ``"lsmr"``, least squares, the
            shortest of all solutions where there are many, two products a step; ``"auto"``: "cg", and "minres" from the beginning
            where that meets a direction p with <p, (H + damping I) p> <= 0; "lsmr" where these stagnate, as without a solution.
        preconditioner: ``"diagonal"``, ``"kfac"`` or ``"ekfac"``: the damped inverse of that
            :meth:`hessiankit.HessianOperator.approximation`. Or the diagonal of H, (P,), or a result with it as ``.flat``, as
            of :func:`hessiankit.hessian_diagonal`: the inverse of |diagonal| + damping is taken. Or an approximation of
            (H + damping I)^-1, symmetric and positive definite: a matrix, an operator, or a function v (P,) -> tensor (P,). Not
            for "lsmr".
        tol: Tolerance of |b - (H + damping I) x| / |b|; by default 1e-8, in float32 1e-4.
        max_products: Limit for each right-hand side. Beyond it the last iterate is returned with its residual.

    Raises:
        InputError: An argument cannot be used, a product is not finite, or ``method="cg"`` meets an indefinite matrix.

    [[2, 2], [2, 4]] x = (4, 6), the Hessian of a linear layer:

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> H = hk.hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64))
    >>> found = H.solve(torch.tensor([4.0, 6.0], dtype=torch.float64))
    >>> [round(v, 9) for v in found.x.tolist()], found.method, found.converged
    ([1.0, 1.0], 'cg', True)
    """
    start = time.perf_counter()
    if not isinstance(operator, TensorOperator) or operator.shape[0] != operator.shape[1]:
        seen = f"{operator.shape[0]} x {operator.shape[1]}" if isinstance(operator, TensorOperator) else type(operator).__name__
        raise InputError(f"solve: operator is {seen}; expected a symmetric operator, as hessian_operator(...) or operator[names]")
    tol = TOLERANCE.get(operator.torch_dtype, 1e-4) if tol is None else tol
    B = _checked(operator, b, damping, method, tol, max_products)
    M = _preconditioner(operator, preconditioner, damping)
    if M is not None and method == "lsmr":
        raise InputError("solve: method='lsmr' takes no preconditioner; leave it out, or pass method='minres'")
    solver, A = SOLVERS[method](), System(operator, damping)
    iterates, residuals, null = list[Iterate](), list[float](), list[bool]()
    for column in (B.unsqueeze(1) if B.ndim == 1 else B).T.to(operator.device, operator.torch_dtype):
        end, iterate = A.products + max_products, solver.solve(A, column, M, tol, max_products)
        if isinstance(iterate, RitzValue):
            raise InputError(
                f"solve: method={method!r} needs a positive definite matrix, but H has an eigenvalue of {iterate.value:.6g} or "
                f"less and damping={damping:g}; pass a larger damping, method='minres', or a Gauss-Newton operator"
            )
        iterates.append(iterate)
        residuals.append(norm(iterate.remainder) / (norm(column) or 1.0))
        if residuals[-1] > tol:
            null.append(A.products < end and A.is_null(iterate.remainder, column, tol))
    X, worst = torch.stack([iterate.x for iterate in iterates], dim=1), max(residuals)
    lowest = next((iterate.lowest for iterate in iterates if iterate.lowest is not None), None)
    return Solution(
        X[:, 0] if B.ndim == 1 else X, worst, worst <= tol, tol, float(damping), iterates[-1].method, A.products, lowest,
        time.perf_counter() - start, bool(null) and all(null),
    )  # fmt: skip


def _checked(operator: TensorOperator, b: Any, damping: float, method: str, tol: float, most: int) -> Tensor:
    check_name("solve", "method", method, SOLVERS)
    size = operator.shape[0]
    try:
        B = b if isinstance(b, Tensor) else torch.as_tensor(b, device="cpu")
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"solve: b is a {type(b).__name__}; expected a vector ({size},) or columns ({size}, k)") from error
    if B.ndim not in (1, 2) or B.shape[0] != size or not (B.numel() or operator.of_pieces):
        raise InputError(f"solve: b has shape {tuple(B.shape)}; expected a vector ({size},) or columns ({size}, k)")
    if not B.is_floating_point() or not bool(torch.isfinite(B).all()):
        seen = "NaN or infinite entries" if B.is_floating_point() else f"dtype {B.dtype}"
        raise InputError(f"solve: b has {seen}; expected finite floating-point numbers")
    if not damping >= 0:
        raise InputError(f"solve: damping={damping}; expected 0 or more")
    if not tol > 0 or most < 1:
        raise InputError(f"solve: tol={tol}, max_products={most}; expected a positive tolerance and 1 or more products")
    return B


def _preconditioner(operator: TensorOperator, choice: Any, damping: float) -> Product | None:
    """Return v -> M v, or None."""
    if choice is None:
        return None
    size, dtype = operator.shape[0], operator.torch_dtype
    if isinstance(choice, str):
        check_name("solve", "preconditioner", choice, PRECONDITIONERS)
        if not hasattr(operator, "approximation"):
            raise InputError(
                f"solve: preconditioner={choice!r} needs the operator of a module, and this one is a {type(operator).__name__}; "
                "take hessian_operator(..., params=[...])"
            )
        choice = operator.approximation(choice).inverse(damping)
    if isinstance(choice, np.ndarray | Tensor):
        choice = torch.as_tensor(choice, device=operator.device).detach().to(dtype)
    diagonal = choice if isinstance(choice, Tensor) and choice.ndim != 2 else getattr(choice, "flat", None)
    if isinstance(diagonal, Tensor):
        if diagonal.shape != (size,) or not bool(torch.isfinite(diagonal).all()):
            raise InputError(f"solve: preconditioner has shape {tuple(diagonal.shape)}; expected a finite diagonal ({size},)")
        choice = diagonal_operator(diagonal.detach().to(operator.device, dtype)).inverse(damping)
    apply = choice.__matmul__ if hasattr(choice, "shape") and hasattr(choice, "__matmul__") else choice
    if not callable(apply) or tuple(getattr(choice, "shape", (size, size))) != (size, size):
        seen = tuple(choice.shape) if hasattr(choice, "shape") else type(choice).__name__
        raise InputError(
            f"solve: preconditioner is {seen}; expected a diagonal ({size},), an operator ({size}, {size}) or a function"
        )

    def multiply(v: Tensor) -> Tensor:
        on_the_host = hasattr(choice, "matvec") and not isinstance(choice, TensorOperator)  # an operator of SciPy
        return torch.as_tensor(apply(v.double().cpu().numpy() if on_the_host else v)).detach().to(v)

    return multiply
