"""The spectrum of a Hessian or Gauss-Newton matrix from products with it: its ends, and optionally the density of the rest."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn

from hessiankit.curvature.dense import Hessian
from hessiankit.curvature.operator import hessian_operator
from hessiankit.curvature.solving import SymmetricOperator
from hessiankit.curvature.suboperators import Partition, SubOperator, groups_of
from hessiankit.curvature.tensor_operator import TensorOperator, by_all_processes
from hessiankit.landscape.density import DIRECTIONS, STEPS, SpectralMeasure
from hessiankit.landscape.preconditioner import PreconditionedOperator, Preconditioner, preconditioner_of
from hessiankit.landscape.spectrum_result import Spectrum
from hessiankit.request.signature import RequestArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.inner_products import holding, normal
from hessiankit.support.lanczos import RitzPairs, extreme_eigenpairs, quadrature
from hessiankit.support.memory import check_room
from hessiankit.support.progress import Tell, progress_bar, silent

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "spectrum"
METHODS = ("auto", "full", "lanczos")
TOLERANCE = {torch.float64: 1e-6}  # of the residuals, by dtype; 1e-4 for others
SPARE = 20  # vectors of the basis beyond twice those wanted
TOGETHER = 2**24  # entries of all vectors of the directions that are treated together
DENSE = 800
"""Rows up to which all eigenvalues are taken. Blocks of unit vectors make their products cheap: a transformer of 560 parameters
took 0.11 s for all, 0.08 s for three by Lanczos."""


@dataclass(frozen=True)
class SpectrumPlan:
    """The computation for one matrix, adapted by :meth:`of` to the size of a block."""

    top: int
    bottom: int
    directions: int
    steps: int
    tol: float
    most: int
    seed: int
    method: str
    kind: str
    loss: float

    def of(self, size: int) -> SpectrumPlan:
        """Return the plan for a block of that size, with the method chosen."""
        top = min(self.top, size)
        full = self.method == "full" or (self.method == "auto" and size <= max(DENSE, self.directions * self.steps))
        return replace(self, top=top, bottom=min(self.bottom, size - top), method="full" if full else "lanczos")


class SciPyOperator(SymmetricOperator):
    """A symmetric SciPy operator for torch vectors, on the CPU in float64."""

    def __init__(self, operator: LinearOperator) -> None:
        super().__init__(operator.shape, torch.float64, torch.device("cpu"))
        self.operator = operator

    def _rows(self, rows: Tensor) -> Tensor:
        return torch.from_numpy(np.asarray(self.operator.matmat(rows.T.numpy()), dtype=np.float64)).T


class HessianMatrix(SymmetricOperator):
    """Products of a computed Hessian with torch vectors."""

    kind = "hessian"

    def __init__(self, H: Hessian) -> None:
        self.matrix, self.loss, self.slices, self.shapes = H.matrix, H.loss, H.slices, H.shapes
        super().__init__((len(H.matrix), len(H.matrix)), H.matrix.dtype, H.matrix.device)
        self.block_size = len(H.matrix)

    def _rows(self, rows: Tensor) -> Tensor:
        return rows @ self.matrix


@checked(WHO, leave=("module", "preconditioner"))
@asks(RequestArguments)
@by_all_processes
def spectrum(
    module: nn.Module | LinearOperator | Hessian,
    inputs: Any = None,
    target: Any = None,
    *,
    kind: str = "hessian",
    preconditioner: Any = None,
    k: int = 10,
    bottom: int = 0,
    density: bool = False,
    directions: int | None = None,
    steps: int = STEPS,
    by: str | Mapping[str, Any] | Partition | None = None,
    method: str = "auto",
    tol: float | None = None,
    max_products: int | None = None,
    seed: int = 0,
    progress: bool = False,
    **asked: Unpack[RequestArguments],
) -> Spectrum:
    """Return extreme eigenpairs of the Hessian of ``loss(module(inputs), target)``, and when asked its spectral density.

    The pairs by thick-restart Lanczos with full reorthogonalisation (Wu and Simon 2000), in as many products as SciPy's ``eigsh``
    or fewer (``docs/howto/spectrum.md``). As there, a multiple eigenvalue may count once: a Krylov space has one vector of its
    eigenspace. The density takes 800 products more, with a second search for multiple eigenvalues: by
    stochastic Lanczos quadrature in the complement of the eigenvectors, so that outliers are exact in density, trace and ranks
    (formulas and sources: :mod:`hessiankit.landscape.density`). Of a matrix of up to 800 rows all eigenvalues are taken.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two; or in its place, without data, a
            computed :class:`hessiankit.Hessian`, or an operator: of :func:`hessiankit.hessian_operator` or any symmetric
            ``scipy.sparse.linalg.LinearOperator``.
        inputs: What it is called with.
        target: What the loss compares with.
        **asked: Arguments of :class:`~hessiankit.request.signature.RequestArguments`.
        kind: ``"hessian"``, ``"ggn"`` or ``"fisher"``, as in :func:`hessiankit.hessian_operator`.
        preconditioner: A symmetric positive P, for the spectrum of P^(-1/2) H P^(-1/2): the torch optimizer that trains the
            module, or a list of several, with the metric read from their states and the threshold beside the eigenvalues (which
            optimizers and how: :mod:`hessiankit.landscape.optimizer_states`); a diagonal, as one tensor or one for each parameter
            by name; a matrix or operator, which is formed unless it is a
            :class:`~hessiankit.curvature.structures.StructuredOperator`; or a function that returns one of these, called with
            a dict of the module's parameters, by which any optimizer's state can be read.
        k: Largest eigenvalues, with vectors.
        bottom: Smallest eigenvalues, with vectors.
        density: Whether to take density, trace and ranks too, in ``directions`` x ``steps`` more products.
        directions: Random directions of the density, 2 or more, or 0 for none; by default 10 with ``density=True``, else 0.
        steps: Lanczos steps of each, the nodes that its measure has.
        by: Diagonal blocks to treat as well: ``"parameter"``; ``"layer"``, blocks with an attention, or in a model without one
            its modules; ``"type"``, block types of :func:`hessiankit.block_types` (these two need the module); a dict of group to
            names, patterns such as ``"h.0.*"`` or slices ``"name[0:4]"``; a dict of name to group, as ``block_types`` returns; or
            a function of the module and of the names of its parameters that returns one of these. Each costs what the whole does.
            With a preconditioner, each is that of steps in the block's entries alone.
        method: ``"full"``: all eigenvalues, of the P x P matrix, by LAPACK; ``"lanczos"``; ``"auto"``: "full" of a computed
            Hessian, and where P is at most 800 or directions x steps.
        tol: Tolerance of the residuals |H v - lambda v|, relative to the largest |eigenvalue|; by default 1e-6, in float32 1e-4.
        max_products: Limit on the search for the ends of one matrix; by default 500, or 40 per pair if that is more. What has
            not converged by then is returned with its residuals, and the result says so.
        seed: Seed of first vectors and directions.
        progress: Show a progress bar on standard error, in a terminal.

    Raises:
        InputError: An argument cannot be used, or products are not finite or not symmetric.
        TraceError: If torch cannot trace the module.
        OutOfMemoryError: The vectors, 3 (k + bottom) + 20, or ``steps`` of a density, or the P x P matrix, do not fit.

    The Hessian of mean((x w)^2) over the rows x = (1, 0), (0, 2) is diag(1, 4):

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> found = spectrum(layer, x, torch.zeros(2, 1, dtype=torch.float64), k=1, bottom=1)
    >>> [round(value, 9) for value in found.eigenvalues.tolist()], found.trace.value, round(found.effective_rank.value, 6)
    ([4.0, 1.0], 5.0, 1.470588)
    """
    start = time.perf_counter()
    directions = DIRECTIONS * density if directions is None else directions
    _check(k, bottom, density, directions, steps, method, tol, max_products)
    operator = _operator(module, inputs, target, kind=kind, **asked)
    kind = getattr(getattr(operator, "whole", operator), "kind", "operator")
    method = "full" if method == "auto" and isinstance(operator, HessianMatrix) else method
    if operator.shape[0] != operator.shape[1]:
        raise InputError(f"{WHO}: the operator is {operator.shape[0]} x {operator.shape[1]}; eigenvalues need a symmetric one")
    matrix = operator if isinstance(operator, TensorOperator) else SciPyOperator(operator)
    size = matrix.size
    if matrix.of_pieces and (by is not None or preconditioner is not None or method == "full"):
        raise InputError(
            f"{WHO}: by, preconditioner and method='full' need whole vectors, and the operator is of a sharded model"
        )
    bottom = min(bottom, max(size - k, 0))
    if k > size:
        raise InputError(f"{WHO}: k={k} and bottom={bottom} of {size} eigenvalues; expected no more in all")
    plan = SpectrumPlan(
        top=k,
        bottom=bottom,
        directions=directions,
        steps=steps,
        tol=TOLERANCE.get(matrix.torch_dtype, 1e-4) if tol is None else tol,
        most=max(500, 40 * (k + bottom)) if max_products is None else max_products,
        seed=seed,
        method="lanczos" if matrix.of_pieces else method,
        kind=kind,
        loss=float(getattr(operator, "loss", math.nan)),
    )
    model = module if isinstance(module, nn.Module) else None
    groups = {} if by is None else groups_of(WHO, by, operator, model)
    P = None if preconditioner is None else preconditioner_of(WHO, preconditioner, matrix, model)
    with progress_bar() if progress else nullcontext(silent) as tell:
        result = _spectrum("whole", matrix, P, plan, tell)
        blocks = {
            name: _spectrum(f"block {name}", SubOperator(matrix, rows, rows), P and P.of(rows), plan, tell)
            for name, rows in groups.items()
        }
    return replace(result, groups=blocks, seconds=time.perf_counter() - start)


def _check(
    k: int, bottom: int, density: bool, directions: int, steps: int, method: str, tol: float | None, most: int | None
) -> None:
    check_name(WHO, "method", method, METHODS)
    if k < 1 or bottom < 0:
        raise InputError(f"{WHO}: k={k}, bottom={bottom}; expected at least one eigenvalue, and bottom 0 or more")
    if (directions or density) and min(directions, steps) < 2:
        options = f"density={density}, directions={directions}, steps={steps}"
        raise InputError(f"{WHO}: {options}; a density with its error needs 2 or more of each, or pass directions=0 for none")
    if tol is not None and not tol > 0:
        raise InputError(f"{WHO}: tol={tol}; expected a positive number, such as 1e-6")
    if most is not None and most < 2:
        raise InputError(f"{WHO}: max_products={most}; expected 2 or more")


def _operator(module: Any, inputs: Any, target: Any, **options: Any) -> LinearOperator:
    if isinstance(module, LinearOperator | Hessian):
        if inputs is not None or target is not None:
            result = "a Hessian" if isinstance(module, Hessian) else "an operator"
            raise InputError(f"{WHO}: {result} has its data; pass it alone, or the module with inputs and target")
        return HessianMatrix(module) if isinstance(module, Hessian) else module
    if not isinstance(module, nn.Module):
        seen, known = type(module).__name__, "the model, hessian(...) or hessian_operator(...)"
        raise InputError(f"{WHO}: expected a module, a Hessian or an operator, got {seen}; pass {known}")
    return hessian_operator(module, inputs, target, **options)


def _spectrum(name: str, matrix: TensorOperator, P: Preconditioner | None, plan: SpectrumPlan, tell: Tell) -> Spectrum:
    """Return the spectrum of one matrix, in the metric of P where there is one."""
    start = time.perf_counter()
    A, plan = matrix if P is None else PreconditionedOperator(matrix, P), plan.of(matrix.size)
    pairs, measure = _full(A, plan) if plan.method == "full" else _lanczos(name, A, plan, tell)
    return Spectrum(
        pairs.values, pairs.vectors.T, pairs.residuals, min(plan.top, len(pairs.values)), measure.size, plan.kind, plan.loss,
        measure, plan.method, plan.tol, pairs.converged, pairs.products + measure.nodes.numel(), time.perf_counter() - start,
        preconditioner=P,
    )  # fmt: skip


def _full(matrix: TensorOperator, plan: SpectrumPlan) -> tuple[RitzPairs, SpectralMeasure]:
    """Return the wanted eigenpairs and all eigenvalues, of the dense matrix."""
    size, eps = matrix.shape[0], torch.finfo(matrix.torch_dtype).eps
    request = f"all eigenvalues of {size:,} parameters"
    need, remedy = 3 * size**2 * matrix.torch_dtype.itemsize, "pass method='lanczos', or fewer params=[...]"
    check_room(WHO, need, request, matrix.device, remedy)
    H = matrix.to_matrix().double()
    if not bool(torch.isfinite(H).all()):
        raise InputError(f"{WHO}: products with the matrix are NaN or infinite, so it has no eigenvalues")
    error, scale = float((H - H.T).abs().max()), float(H.abs().max())
    if error > eps**0.5 * scale:
        raise InputError(f"{WHO}: H and its transpose differ by {error / scale:.1e} of the largest entry, so H is not symmetric")
    H = (H + H.T) / 2
    values, V = torch.linalg.eigh(H)
    chosen = [*range(size - 1, size - 1 - plan.top, -1), *range(plan.bottom - 1, -1, -1)]
    residuals = (H @ V[:, chosen] - V[:, chosen] * values[chosen]).norm(dim=0)
    pairs = RitzPairs(values[chosen].cpu(), V[:, chosen].to(matrix.torch_dtype).T, residuals.cpu(), size, True)
    return pairs, SpectralMeasure(size, values.flip(0).cpu(), eps)


def _lanczos(name: str, matrix: TensorOperator, plan: SpectrumPlan, tell: Tell) -> tuple[RitzPairs, SpectralMeasure]:
    """Return the wanted eigenpairs, and these with the nodes and weights of random directions, if any."""
    n_pairs, size, eps = plan.top + plan.bottom, matrix.size, torch.finfo(matrix.torch_dtype).eps
    basis = min(size, 2 * n_pairs + SPARE)
    together = max(1, min(plan.directions, TOGETHER // (plan.steps * size)))
    vectors = max(basis, plan.steps * together if plan.directions else 0) + n_pairs
    request = f"{vectors} vectors of {size:,} parameters"
    need, remedy = (
        vectors * matrix.shape[0] * matrix.torch_dtype.itemsize,
        "pass a smaller k, bottom or steps, or fewer params=[...]",
    )
    check_room(WHO, need, request, matrix.device, remedy)

    def after(products: int, converged: int) -> None:
        tell(f"{name}: eigenpairs, {products} products", converged, n_pairs)

    pairs = extreme_eigenpairs(
        matrix.__matmul__, _starts(matrix, [plan.seed])[0], top=plan.top, bottom=plan.bottom, tol=plan.tol, most=plan.most,
        basis=basis, again=plan.directions > 0, seed=plan.seed, tell=after,
    )  # fmt: skip
    steps = min(plan.steps, size - len(pairs.vectors))
    if steps == 0 or not plan.directions:
        return pairs, SpectralMeasure(size, pairs.values, eps)
    U = holding().qr(pairs.vectors.T)[0].T  # converged vectors are orthogonal to the tolerance only
    norm = float(pairs.values.abs().max())
    quadratures: list[tuple[Tensor, Tensor]] = []
    while len(quadratures) < plan.directions:
        count = min(together, plan.directions - len(quadratures))
        starts = _starts(matrix, [plan.seed + 1_000_003 * (len(quadratures) + n + 1) for n in range(count)])
        quadratures += quadrature(matrix.__matmul__, starts, steps, against=U, norm=norm)
        tell(f"{name}: density, directions", len(quadratures), plan.directions)
    nodes, weights = (torch.zeros(plan.directions, steps, dtype=torch.float64, device="cpu") for _ in range(2))
    for row, (t, w) in enumerate(quadratures):
        nodes[row, : len(t)], weights[row, : len(t)] = t, w
    return pairs, SpectralMeasure(size, pairs.values, eps, nodes, weights)


def _starts(matrix: TensorOperator, seeds: Sequence[int]) -> Tensor:
    """Return a random vector for each seed as rows, the same on every device."""
    return torch.stack([normal(matrix.shape[0], seed) for seed in seeds]).to(matrix.device, matrix.torch_dtype)
