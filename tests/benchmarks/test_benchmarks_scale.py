"""The problems that the benchmarks pose, their peers, and real sizes, at small ones: every method beside differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmark_cases import PLAN, QUIET, check_page, closed, record, whole

from benchmarks import real_sizes
from benchmarks.contest import contestants
from benchmarks.entries import Ring
from benchmarks.gpt2 import TinyGPT2
from benchmarks.plan import Plan
from benchmarks.problems import GPT2, SIZES, Case, make, parameters_of
from benchmarks.real_sizes import HUGGING_FACE
from benchmarks.residence import Memory
from benchmarks.suites import common
from benchmarks.suites import scale as suite

SHORT = replace(PLAN, repeats=1)
TINY = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}


def cell(problem: str, method: str = "double", dtype: str = "float64") -> dict[str, Any]:
    return {"problem": problem, "method": method, "batch": 1, "dtype": dtype, "threads": 1}


def row_of(problem: str, method: str = "double", dtype: str = "float64", plan: Plan = SHORT) -> dict[str, Any]:
    (row,) = suite.run(cell(problem, method, dtype), plan, QUIET)["rows"]
    return row  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["hessian_operator:block_size=2,kind='hessian'", "double", "curvlinops"])
def test_products_of_attention_are_those_of_differences(method: str) -> None:
    if method == "curvlinops":
        pytest.importorskip("curvlinops")
    row = row_of("attention-causal-L16", method)
    assert (row["status"], row["reference"], row["ours"]) == ("right", "float64", method.startswith("hessian"))
    assert row["error"] < 1e-8
    assert row["setup_ratio"] > 0 < row["ratio"]["median"]
    printed = check_page(
        "scale", cell("attention-causal-L16", method), {"parameters": 16640, "gradient": row["time"], "rows": [row]}
    )
    assert f"| {method} |" in printed


@pytest.mark.parametrize("method", ["hessian", "bounds", "frobenius_norms"])
def test_everyday_work_is_compared_with_the_dense_hessian(method: str) -> None:
    result = suite.run(cell("tiny", method), SHORT, QUIET)
    assert [row["status"] for row in result["rows"]] == ["right"]
    assert result["rows"][0]["error"] < 1e-8
    assert "Everyday sizes" in suite.table([record("scale", cell("tiny", method), result)])


def test_the_top_eigenvalue_is_that_of_the_matrix() -> None:
    case = real_sizes.make("small", 1, torch.float32, "cpu")
    matrix = common.dense(case)
    found = suite._eigenvalue(case, lambda v: matrix @ v, Memory("cpu"), SHORT, lambda: 0.0)
    values = torch.linalg.eigvalsh(matrix.double())
    assert found["value"] == pytest.approx(float(values[values.abs().argmax()]), rel=1e-4)
    assert found["residual"] < 1e-3
    result = suite.run(cell("decoder-L8", dtype="float32"), SHORT, QUIET)
    assert result["rows"][0]["eigenvalue"]["products"] > 5
    assert "largest magnitude" in suite.table([record("scale", cell("decoder-L8", dtype="float32"), result)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-134M-L5", {**TINY, "vocab_size": 13}),
        ("bert-base-L5", {**TINY, "vocab_size": 13}),
        ("vit-b16", {**TINY, "image_size": 8, "patch_size": 4, "num_labels": real_sizes.CLASSES}),
    ],
)
def test_models_of_transformers(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    known = real_sizes.read(name)
    assert known is not None
    monkeypatch.setitem(HUGGING_FACE, known[0], (HUGGING_FACE[known[0]][0], options))
    row = row_of(name)
    assert row["status"] == "right", row
    assert row["error"] < 1e-6


# Problems and peers: each computes what it says -----------------------------------------------------------------------


def test_problems_have_the_papers_sizes() -> None:
    assert {name: parameters_of(name) for name in SIZES} == {
        "tiny": 112,
        "small": 704,
        "paper-mnist": 2816,
        "medium": 11264,
        "large": 720896,
    }
    for name in ("tiny", "small-affine", "paper-mnist", "L5d4f6-x2", *GPT2):
        case = make(name, 2, "float32")
        assert case.size == parameters_of(name) == sum(p.numel() for p in case.module.parameters())
        assert {p.dtype for p in case.parameters.values()} == {torch.float32}
    assert make("gpt2-untied", 1).size - make("gpt2-tied", 1).size == 64 * 32


@pytest.mark.slow
def test_every_chunked_peer_takes_a_language_model() -> None:
    torch.manual_seed(0)
    model = TinyGPT2(5, 3, d_model=4, n_heads=2, n_layers=1, tied=True).double()
    ids = torch.randint(5, (4, 4))
    case = Case("gpt2", model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), "cross_entropy")
    ring = Ring(case, whole(case), 0.05, "cpu")
    peers = [peer for peer in contestants() if peer.matrix is None and not peer.missing(case)]
    statuses = {peer.name: ring.enter(peer).status for peer in peers}
    assert statuses["vmap(jvp(grad))"] == statuses["reverse over reverse"] == "right"
    assert set(statuses.values()) <= {"right", "wrong"}  # none fails; some lose a term in the norms
    assert ring.verdict(ring.error(closed(case)()[:, ring.picks].T)) == "right"
