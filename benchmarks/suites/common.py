"""Shared by several suites: the problem of a cell, forecasts that a cell is too large, and a race of a few methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import hessiankit
from benchmarks.counting import lift_operations
from benchmarks.plan import Cell, Plan
from benchmarks.problems import DTYPES, Case, make, parameters_of, tokens_of
from benchmarks.timing import CLOCKS, add_rounds, all_rounds, deadline, finite, rounds_within, several, timed
from hessiankit.support.memory import available_memory
from hessiankit.verify.reference_base import typed_line

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


def beyond_memory(cell: Cell, plan: Plan) -> dict[str, Any] | None:
    """Return a skipped cell if the P x P matrix does not fit into memory."""
    size = parameters_of(cell["problem"])
    need = int(COPIES * size**2 * DTYPES[cell["dtype"]].itemsize)
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


def dense(case: Case) -> Tensor:
    """Return the dense Hessian by closed form."""
    return hessiankit.hessian(case.module, case.inputs, case.target, loss=case.loss, params=case.wanted).matrix


def race(
    quantity: str,
    prepared: Mapping[str, Callable[[], Callable[[], Tensor]]],
    expected: Tensor | None,
    tolerance: float,
    plan: Plan,
    *,
    rounds: int | None = None,
    too_large: str = "",
) -> list[dict[str, Any]]:
    """Return a row a method: set-up, a first call that is compared, then rounds in turn, relative to the first method.

    Args:
        quantity: What is computed.
        prepared: Name -> a function that makes what is then called.
        expected: The value, or its first entries; None: what the first method finds.
        tolerance: Of the difference, relative to the largest entry.
        plan: Limits, repeats and the device.
        rounds: How many; by default what fits into the limit.
        too_large: Why the others than the first are not tried, if they are not.
    """
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[int], float]] = {}
    for name, prepare in prepared.items():
        row: dict[str, Any] = {"quantity": quantity, "name": name, "status": "right", "error": None, "why": "", "time": None}
        rows[name] = row
        if too_large and len(rows) > 1:
            row.update(status="skipped", why=too_large)
            continue
        try:
            with deadline(plan.limit_seconds, name):
                method, row["setup_seconds"] = timed(plan.device, prepare, CLOCKS[plan.clock])
                found, row["first_seconds"] = timed(plan.device, method, CLOCKS[plan.clock])
        except TimeoutError as error:
            row.update(status="skipped", why=f"over budget: {error}")
            continue
        except ModuleNotFoundError as error:
            row.update(status="missing", why=str(error))
            continue
        except Exception as error:
            row.update(status="failed", why=typed_line(error))
            continue
        expected = found if expected is None else expected
        off = (found.reshape(-1)[: expected.numel()].to(expected) - expected.reshape(-1)).abs().max() / expected.abs().max()
        row["error"], row["status"] = finite(float(off)), "right" if off <= tolerance else "wrong"
        calls[name] = lambda _, method=method: several(plan.device, method, CLOCKS[plan.clock])  # type: ignore[misc]
    if calls:
        once = sum(rows[name]["first_seconds"] for name in calls)
        rounds = max(1, rounds_within(plan.limit_seconds, once, plan.repeats)) if rounds is None else rounds
        add_rounds(rows, all_rounds(calls, rounds), next(iter(calls)))
    return list(rows.values())
