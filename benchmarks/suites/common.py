"""Shared by several suites: the problem of a cell, and forecasts that a cell is too large."""

from __future__ import annotations

from typing import Any

import torch

import hessiankit
from benchmarks.counting import dense_bytes, lift_operations
from benchmarks.plan import Cell, Plan
from benchmarks.problems import DTYPES, Case, make, parameters_of, tokens_of
from benchmarks.timing import timed
from hessiankit.engine.problem.task import available_memory

BLOCK_SIZES = ("tiny", "small", "small-affine", "paper-mnist", "paper-mnist-affine", "medium")
FAST_RATE = 2e12
"""Floating point operations a second that no processor with a few cores exceeds: beyond the limit at this rate is beyond it."""
WARM_SECONDS = 2.0
"""A first call that takes longer than this, and than a run may take, is not mainly warming up, and is not repeated."""
COPIES = 2.5
"""P x P matrices that the dense Hessian needs at its peak, about: the blocks of one half, the matrix, one strip."""


def case_of(cell: Cell, plan: Plan, wanted: tuple[str, ...] | None = None) -> Case:
    """Return the problem of a cell."""
    return make(cell["problem"], cell["batch"], cell["dtype"], plan.device, wanted)


def hook(name: str) -> Any:
    """Return a public function of the toolkit by name; None in a version that does not have it (yet)."""
    return getattr(hessiankit, name, None)


def beyond_memory(cell: Cell, plan: Plan) -> dict[str, Any] | None:
    """Return a skipped cell if the P x P matrix does not fit into memory."""
    size = parameters_of(cell["problem"])
    need = int(COPIES * dense_bytes(size, DTYPES[cell["dtype"]].itemsize))
    free = available_memory(torch.device(plan.device))
    if need <= free:
        return None
    return {
        "skipped": f"forecast {need / 2**30:.1f} GiB for {size} x {size}, {free / 2**30:.1f} GiB free",
        "parameters": size,
        "forecast_bytes": need,
    }


def beyond_time(cell: Cell, plan: Plan) -> dict[str, Any] | None:
    """Return a skipped cell if the closed form's own runs would take longer than the limit.

    The forecast is a measured run on one sequence, times the batch; where even that would be too long, the operations of
    the output at a rate that no processor has.
    """
    size, runs = parameters_of(cell["problem"]), 2  # one to warm up, one that counts
    at_least = lift_operations(size, cell["batch"] * tokens_of(cell["problem"])) / FAST_RATE
    how = "at the least"
    if runs * at_least <= plan.limit_seconds:
        one = make(cell["problem"], 1, cell["dtype"], plan.device)
        seconds = timed(plan.device, lambda: dense(one))[1]
        if seconds < max(WARM_SECONDS, plan.limit_seconds / runs):
            seconds = min(seconds, timed(plan.device, lambda: dense(one))[1])
        at_least, how = seconds * cell["batch"], "from one sequence"
    if runs * at_least <= plan.limit_seconds:
        return None
    return {
        "skipped": f"forecast {runs} x {at_least:.3g} s {how}, limit {plan.limit_seconds:.3g} s a cell",
        "parameters": size,
        "forecast_seconds": at_least,
    }


def dense(case: Case) -> torch.Tensor:
    """Return the dense Hessian by closed form."""
    return hessiankit.hessian(case.module, case.inputs, case.target, loss=case.loss, params=case.wanted).matrix
