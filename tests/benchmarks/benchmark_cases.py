"""What the tests of the benchmarks share: a short plan, the closed form as an entry, the smallest cells, and an entry that lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.entries import Part, Ring
from benchmarks.peers import Peer
from benchmarks.plan import Cell, Plan, Tell
from benchmarks.problems import Case
from benchmarks.suites import BENCHMARKS
from hessiankit import hessian

QUIET: Tell = lambda what, done, total: None  # noqa: E731
PLAN = Plan(repeats=2, limit_seconds=60.0, compile=False)


def whole(case: Case) -> Part:
    return Part(slice(0, case.size), slice(0, case.size))


def closed(case: Case) -> Callable[[], Tensor]:
    return lambda: hessian(case.module, case.inputs, case.target, loss=case.loss).matrix


def first_cell(name: str, **fixed: Any) -> Cell:
    return {**BENCHMARKS[name].cells(replace(PLAN, quick=True))[0], **fixed}


def record(name: str, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
    return {"cell": cell, "result": json.loads(json.dumps(result, allow_nan=False)), "environment": {"date": "2026-01-01"}}


def check_page(name: str, cell: Cell, result: dict[str, Any]) -> str:
    records = [record(name, cell, result)]
    assert BENCHMARKS[name].plot(records) is not None
    return BENCHMARKS[name].table(records)


def wrong_matrix(case: Case) -> Tensor:
    """Return the Hessian with one compared column off by a thousandth of the largest entry."""
    found = closed(case)().clone()
    found[:, Ring(case, whole(case), 1.0, "cpu").picks[3]] += 1e-3 * found.abs().max()
    return found


WRONG = Peer("wrong", matrix=wrong_matrix)
