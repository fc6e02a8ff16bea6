"""Exact scalars of the Hessian, diagonal, trace and top eigenvalue, beside what Hutchinson's estimate costs at 1 % error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from benchmarks.charts import methods
from benchmarks.entries import TOLERANCE
from benchmarks.packaged import curvlinops_operator, installed
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import Case, make
from benchmarks.suites.common import BLOCK_SIZES, beyond_memory, beyond_time, case_of, dense, race
from benchmarks.tables import NOTES, contest_tables
from benchmarks.timing import spread, timed
from hessiankit import HessianOperator, hessian_diagonal, hessian_operator

GOAL = 0.01
BLOCK = 16
PROBES = 32
DENSE_EIGENVALUES = 3000
"""Largest P whose top eigenvalue is also taken from all eigenvalues of the dense matrix."""
LANCZOS_PRODUCTS = 60
"""Products that Lanczos takes, about, for the forecast."""
EIGENVALUE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def probes_needed(variance: float, value: float) -> int:
    """Return how many independent probes bring the standard error of an estimate to ``GOAL`` of its value.

    >>> probes_needed(4.0, 2.0)
    10000
    """
    return max(1, int(np.ceil(variance / (GOAL * value) ** 2))) if value else 0


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    one = make(cell["problem"], 1, cell["dtype"], plan.device)
    small = hessian_operator(one.module, one.inputs, one.target, loss=one.loss)
    small @ one.theta
    forecast = min(timed(plan.device, lambda: small @ one.theta)[1] for _ in range(3)) * cell["batch"]
    probing = (PROBES + BLOCK * (plan.repeats + 1)) * forecast
    probed = probing <= plan.limit_seconds
    case = case_of(cell, plan)
    operator = hessian_operator(case.module, case.inputs, case.target, loss=case.loss)
    too_large = beyond_memory(cell, plan) or beyond_time(cell, plan)
    matrix = None if too_large else dense(case)
    tell("Hutchinson", 0, 4)
    per_product, variance, trace = _hutchinson(operator, case, plan, matrix) if probed else (forecast, 0.0, 0.0)
    exact = {} if matrix is None else {"diagonal": matrix.diagonal().clone(), "trace": matrix.trace()}
    for k, quantity in enumerate(("diagonal", "trace")):
        tell(quantity, 1 + k, 4)
        columns_fit = probed and per_product * case.size * (plan.repeats + 1) <= plan.limit_seconds
        ours = _diagonals(quantity, case, dense_fits=matrix is not None, columns_fit=columns_fit)
        rows += race(quantity, _made(ours), exact.get(quantity), TOLERANCE[case.theta.dtype], plan)
        if not probed:
            why = f"forecast {probing:.3g} s for {PROBES} probes and their timing, limit {plan.limit_seconds:.3g} s"
            rows.append({**_skipped(quantity, why), "name": "Hutchinson"})
            continue
        if quantity == "trace":
            count = probes_needed(variance, trace)
        else:
            count = 0 if matrix is None else _diagonal_probes(matrix)
        if count:
            rows.append(_cost(quantity, count, per_product, [row for row in rows if row["quantity"] == quantity]))
    tell("top eigenvalue", 3, 4)
    lanczos = LANCZOS_PRODUCTS * forecast
    top = _eigenvalues(case, operator, matrix) if 3 * lanczos <= plan.limit_seconds else {}
    if not top:
        rows.append(_skipped("top eigenvalue", f"forecast 3 x {lanczos:.3g} s, limit {plan.limit_seconds:.3g} s a cell"))
    rows += race("top eigenvalue", _made(top), None, EIGENVALUE_TOLERANCE[case.theta.dtype], plan)
    result = {"parameters": case.size, "rows": rows, "trace": trace if probed else None, "extra": ["probes", "probes"]}
    return {**result, **({"dense_skipped": too_large["skipped"]} if too_large else {})}


def _hutchinson(operator: HessianOperator, case: Case, plan: Plan, matrix: Tensor | None) -> tuple[float, float, float]:
    """Return the seconds of a product (in blocks), the variance of one probe of the trace, and the trace.

    For signs z the variance of z^T H z is 2 (|H|_F^2 - sum_i H_ii^2); without the matrix it is estimated from probes.
    """
    generator = torch.Generator().manual_seed(2)
    signs = (2.0 * torch.randint(2, (case.size, PROBES), generator=generator) - 1).to(case.theta)
    operator @ signs[:, :BLOCK]
    times = [timed(plan.device, lambda: operator @ signs[:, :BLOCK])[1] for _ in range(max(1, plan.repeats))]
    seconds = float(np.median(times)) / BLOCK
    if matrix is not None:
        off = float(matrix.double().square().sum() - matrix.diagonal().double().square().sum())
        return seconds, 2 * max(0.0, off), float(matrix.trace())
    estimates = (signs * (operator @ signs)).sum(0).double()
    return seconds, float(estimates.var()), float(estimates.mean())


def _diagonal_probes(matrix: Tensor) -> int:
    """Return the probes after which z * (H z) has an error of ``GOAL`` in the 2-norm: its variance is sum_{j != i} H_ij^2."""
    squares, diagonal = matrix.double().square(), matrix.diagonal().double().square()
    return probes_needed(float(squares.sum() - diagonal.sum()), float(diagonal.sum().sqrt()))


def _diagonals(quantity: str, case: Case, *, dense_fits: bool, columns_fit: bool) -> dict[str, Callable[[], Tensor]]:
    """Return the exact ways to the diagonal or the trace that exist here, ours first."""

    def finish(diagonal: Tensor) -> Tensor:
        return diagonal.sum() if quantity == "trace" else diagonal

    def columns() -> Tensor:
        made = hessian_operator(case.module, case.inputs, case.target, loss=case.loss)
        diagonal, step = case.theta.new_empty(case.size), min(made.block_size, 256)
        for start in range(0, case.size, step):
            units = case.theta.new_zeros(case.size, min(step, case.size - start))
            units[start : start + step].fill_diagonal_(1.0)
            diagonal[start : start + step] = (made @ units)[start : start + step].diagonal()
        return finish(diagonal)

    def ours() -> Tensor:
        return hessian_diagonal(case.module, case.inputs, case.target, loss=case.loss, max_products=None).flat

    ways: dict[str, Callable[[], Tensor]] = {"hessiankit.hessian_diagonal": lambda: finish(ours())}
    if dense_fits:
        ways["dense closed form"] = lambda: finish(dense(case).diagonal())
    if columns_fit:
        ways["columns of the operator"] = columns
    return ways


def _eigenvalues(case: Case, operator: HessianOperator, matrix: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    start = np.random.default_rng(0).standard_normal(case.size).astype(operator.dtype)
    accuracy = 1e-8 if case.theta.dtype == torch.float64 else 1e-4

    def lanczos(linear: Any) -> Tensor:
        return torch.tensor(float(eigsh(linear, k=1, which="LA", v0=start, tol=accuracy, return_eigenvectors=False)[0]))

    def ours() -> Tensor:
        return lanczos(hessian_operator(case.module, case.inputs, case.target, loss=case.loss))

    ways: dict[str, Callable[[], Tensor]] = {"eigsh of hessian_operator": ours}
    if matrix is not None and case.size <= DENSE_EIGENVALUES:
        ways["dense closed form, eigvalsh"] = lambda: torch.linalg.eigvalsh(dense(case))[-1].cpu()
    if installed("curvlinops") and not case.theta.is_cuda:
        ways["eigsh of curvlinops"] = lambda: lanczos(curvlinops_operator(case).to_scipy())
    return ways


def _made(ways: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Return ways without a set-up, as a race takes them."""
    return {name: lambda way=way: way for name, way in ways.items()}  # type: ignore[misc]


def _skipped(quantity: str, why: str) -> dict[str, Any]:
    return {"quantity": quantity, "name": "exact", "status": "skipped", "why": why, "error": None, "time": None}


def _cost(quantity: str, count: int, per_product: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of Hutchinson's estimate: so many products at the measured seconds of one, never run in full."""
    seconds = spread([count * per_product])
    ours = next((row["time"]["median"] for row in rows if row["time"]), None)
    ratio = None if ours is None else spread([count * per_product / ours])
    name = f"Hutchinson, {GOAL:.0%} standard error"
    row = {"quantity": quantity, "name": name, "status": "right", "error": None, "why": "", "time": seconds, "ratio": ratio}
    return {**row, "probes": count, "columns": count, "timed_columns": BLOCK, "extrapolated": count > BLOCK, "of": "probes"}


BENCHMARK = Benchmark(
    "scalars",
    "Exact diagonal, trace and top eigenvalue, beside the cost of Hutchinson's estimate at 1 % error.",
    lambda plan: plan.grid((*BLOCK_SIZES, "large", "gpt2-untied")),
    run,
    lambda records: contest_tables(records, "first method", "fastest other"),
    lambda records: methods(records, "Diagonal, trace, top eigenvalue"),
    NOTES
    + "\n- Hutchinson's row is the measured time of a product, in blocks of 16, times the number of probes for a standard error\n"
    "  of 1 % (of the trace, or of the diagonal in the 2-norm). That number follows from the estimator's variance.\n"
    "- The first method of each quantity is hessiankit's. Eigenvalues are compared with it, diagonals with the dense matrix.",
    title="Diagonal, trace, top eigenvalue",
)
