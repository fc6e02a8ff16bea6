"""A contest checks every entry, and ranks only what is right. Times are never judged here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark_cases import PLAN, QUIET, WRONG, closed, record, whole, wrong_matrix
from torch import Tensor

from benchmarks import tables
from benchmarks.contest import contest
from benchmarks.peers import FUNC_HESSIAN, JACREV, JVP, REVERSE, Peer
from benchmarks.problems import Case, make

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]


def test_contest_marks_what_is_wrong_and_ranks_what_is_right() -> None:
    case = make("tiny-affine", 2)
    result = contest(case, whole(case), closed(case), [JVP, JACREV, FUNC_HESSIAN], PLAN, QUIET)
    ours, good, bad, func = result["rows"]
    assert [row["status"] for row in (ours, good)] == ["right", "right"]
    assert {row["status"] for row in (bad, func)} == {"wrong" if bad["error"] > 1e-8 else "right"}
    assert good["ratios"] == [a / b for a, b in zip(good["seconds"], ours["seconds"], strict=True)]
    assert len(good["seconds"]) == result["rounds"] == 2
    bad.update(status="wrong", error=0.583, ratio=None, time={"median": 1e-9, "low": 1e-9, "high": 1e-9})
    func.update(status="wrong", error=None)
    page = tables.contest_tables([record("dense", {"problem": "t", "batch": 2, "dtype": "float64", "threads": 1}, result)])
    best, details = page.split("## All methods")
    assert "vmap(jvp(grad))" in best
    assert "jacfwd" not in best  # the fastest, but wrong
    assert "**wrong by 0.58**" in details


def raises(case: Case) -> Tensor:
    raise ValueError("cannot do it\nand more")


def test_contest_sees_a_small_lie_and_survives_a_peer_that_breaks() -> None:
    case = make("tiny", 1)
    result = contest(case, whole(case), closed(case), [WRONG, Peer("breaks", matrix=raises)], replace(PLAN, repeats=1), QUIET)
    _, lies, breaks = result["rows"]
    assert lies["status"] == "wrong"
    assert 1e-4 < lies["error"] < 1e-2
    assert (breaks["status"], breaks["why"], breaks["seconds"]) == ("failed", "ValueError: cannot do it", [])
    assert result["writing"]["median"] > 0
    assert contest(case, whole(case), lambda: wrong_matrix(case), [], PLAN, QUIET)["rows"][0]["status"] == "wrong"


def test_slow_peers_are_extrapolated_and_marked() -> None:
    case = make("small", 1)
    plan = replace(PLAN, limit_seconds=0.05, repeats=1)
    result = contest(case, whole(case), closed(case), [REVERSE], plan, QUIET)
    row = result["rows"][1]
    assert row["extrapolated"]
    assert row["timed_columns"] < row["columns"] == 704
    assert tables.time_text(row).startswith("~")
    assert tables.ratio_text(row).startswith("~")
