"""A contest checks every entry, and ranks only what is right. Times are never judged here."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from benchmark_cases import PLAN, QUIET, WRONG, closed, record, whole, wrong_matrix
from torch import Tensor

from benchmarks import tables
from benchmarks.contest import CLOSED, PLAIN, contest
from benchmarks.entries import Ring
from benchmarks.peers import FUNC_HESSIAN, JACREV, JVP, REVERSE, Peer
from benchmarks.problems import Case, make
from hessiankit.support.kernels import kernels

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("plain_torch")]


def test_contest_marks_what_is_wrong_and_ranks_what_is_right() -> None:
    case = make("tiny-affine", 2)
    result = contest(case, whole(case), closed(case), [JVP, JACREV, FUNC_HESSIAN], PLAN, QUIET)
    ours, good, bad, func = result["rows"]
    assert [row["status"] for row in (ours, good)] == ["right", "right"]
    assert {row["status"] for row in (bad, func)} == {"wrong" if bad["error"] > 1e-8 else "right"}
    assert good["ratios"] == [a / b for a, b in zip(good["seconds"], ours["seconds"], strict=True)]
    assert len(good["seconds"]) == result["rounds"] == 2
    assert good["timed_columns"] == case.size == 128
    bad.update(status="wrong", error=0.583, ratio=None, time={"median": 1e-9, "low": 1e-9, "high": 1e-9})
    func.update(status="wrong", error=None)
    page = tables.contest_tables([record("dense", {"problem": "t", "batch": 2, "dtype": "float64", "threads": 1}, result)])
    best, details = page.split("## All methods")
    assert "vmap(jvp(grad))" in best
    assert "jacfwd" not in best  # the fastest, but wrong
    assert "**wrong by 0.58**" in details
    assert "**wrong: not finite**" in details


def test_compiled_kernels_are_a_row_beside_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HESSIANKIT_COMPILED")
    if kernels() is None:
        pytest.skip("the kernels are not built here (hessiankit compile)")
    case = make("tiny-affine", 1)
    rows = contest(case, whole(case), closed(case), [JVP], PLAN, QUIET)["rows"]
    assert [row["name"] for row in rows[:2]] == [CLOSED, PLAIN]
    assert [row["status"] for row in rows] == ["right"] * 3


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
    assert row["timed_columns"] % row["chunk"] == 0
    text = tables.time_text(row)
    assert text.startswith("~")
    assert text.endswith(f"from {row['timed_columns']} of 704 columns")
    assert tables.ratio_text(row).startswith("~")


def test_too_much_memory_is_refused_with_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make("tiny", 1)
    monkeypatch.setattr("benchmarks.entries.available_memory", lambda device: 1000)
    entry = Ring(case, whole(case), 1.0, "cpu").enter(FUNC_HESSIAN)
    assert entry.status == "skipped"
    assert "GiB" in entry.why


def test_a_cell_keeps_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes too long is stopped, the ones after it are not tried, and one round is run."""

    def sleeps(case: Case) -> Tensor:
        time.sleep(30.0)
        return case.theta

    case = make("tiny", 1)
    plan = replace(PLAN, repeats=50, limit_seconds=1.0, budget_seconds=3.0)  # trials end after 0.8 * 3 - 1 s
    result = contest(case, whole(case), closed(case), [REVERSE, Peer("slow", matrix=sleeps), JVP], plan, QUIET)
    status = {row["name"]: (row["status"], row["why"]) for row in result["rows"][1:]}
    assert status["reverse over reverse"] == ("right", "")
    assert status["slow"][0] == status["vmap(jvp(grad))"][0] == "skipped"
    assert re.fullmatch(r"over budget: the trial took more than \d+ s", status["slow"][1])
    assert status["vmap(jvp(grad))"][1] == "over budget: the others have taken the cell's time"
    assert result["rounds"] >= 1
    plan = replace(plan, budget_seconds=1e-6)
    assert contest(case, whole(case), closed(case), [], plan, QUIET)["rounds"] == 1
