"""Figures of curvature: what their files say, and their own computations, against other routes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import gradient_twice, mse, reverse_over_reverse
from figure_files import WITHOUT_PICTURES, read
from figure_sizes import CURVATURE, check_files

import hessiankit as hk
from benchmarks.routes.table import load
from figures import (
    approximations,
    bounds_over_truth,
    curvature_gap_6_12,
    curvature_gap_table_1,
    curvature_gap_theorem_1,
    placement_curvature,
    route_table,
    sharpness_coverage,
)
from figures._digits import ImageSpec, block_norms
from figures.vec_r_pictures import Layers, block, data, sites
from hessiankit.training.monitoring import Monitor
from hessiankit.training.sharpness import sharpness

DOCS = Path(__file__).parents[2] / "docs"
NANO, SMOOTH = (ImageSpec(patch=4, d_model=4, d_ff=6, activation=name) for name in ("relu", "gelu"))
growing = curvature_gap_6_12


def some(spec: ImageSpec, count: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """The model of a specification, and the first of its images with their labels."""
    tokens, labels = spec.data()
    return spec.model(), tokens[:count], labels[:count]


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVATURE)
def test_every_figure_writes_its_pictures_and_numbers(name, drawn):
    check_files(name, drawn(name))


# Closing the Curvature Gap


@pytest.mark.slow
def test_block_norms():
    model, tokens, labels = some(NANO, 5)
    parameters = dict(model.named_parameters())
    H = gradient_twice(F.cross_entropy(model(tokens), labels), list(parameters.values()))
    norms, start = block_norms(model, (tokens, labels)), 0
    assert list(norms) == list(parameters)
    for name, p in ((name, p.detach()) for name, p in parameters.items()):
        own = H[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()
        svd = torch.linalg.svdvals(p.reshape(len(p), -1))
        expected = [float(svd.max()), float(p.norm()), float(torch.linalg.svdvals(own).max()), float(own.square().sum().sqrt())]
        assert norms[name] == pytest.approx(expected, rel=1e-10), name
    assert list(block_norms(model, (tokens, labels), ["head.b_C"])) == ["head.b_C"]


@pytest.mark.slow
def test_the_norm_crosses_theorem_1_where_it_is_computed_by_hand(drawn):
    part, X, T = curvature_gap_theorem_1.counterexample(3.0)
    H = gradient_twice(F.mse_loss(part(X), T), list(part.parameters()))
    found = curvature_gap_theorem_1.row(part, X, T)
    assert float(torch.linalg.eigvalsh(H).abs().max()) == pytest.approx(found["norm"], rel=1e-12)
    assert (found["norm"], found["text"], found["appendix"]) == pytest.approx((18.0, 24.0, 24.0), rel=1e-12)  # 2 q^2, and M
    files = drawn("curvature_gap_theorem_1")
    for row in read(files[".csv"]):
        assert float(row["norm"]) <= 1.000001 * min(float(row["a priori"]), float(row["structured"]))
        assert row["problem"] != "minimum" or (float(row["norm"]) > float(row["text"])) == (float(row["q"]) > math.sqrt(12))
    (said,) = json.loads(files["_verdicts.json"].read_text())
    assert (said["claim"], said["status"]) == ("curvature-gap/thm1", "SEEN AT THIS SIZE")


def test_blocks_of_table_1_are_those_of_the_whole_hessian():
    row = curvature_gap_table_1.Row("tiny", 4, 4, 6, 2)
    spec = row.spec(1)
    model = spec.model()
    tokens, labels = spec.data(count=curvature_gap_table_1.IMAGES)
    values = [p for name, p in model.named_parameters() if name.endswith(".W_V")]
    H = gradient_twice(F.cross_entropy(model(tokens), labels), values)
    found = curvature_gap_table_1.measure(row, 1)
    assert found["W_V"] == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=2e-2)


# Figures of our own


@pytest.mark.slow
def test_analytic_minus_empirical(drawn):
    files = drawn("analytic_minus_empirical")
    rows = read(files[".csv"])
    assert len(rows) == 16 * 16
    assert max(float(row["reverse over reverse"]) for row in rows) < 1e-10
    wrong = {frozenset((row["row"], row["column"])) for row in rows if float(row["jacfwd(jacrev)"]) > 1e-3}
    assert {"blocks.0.norm_1.weight", "blocks.0.attention.W_V"} in wrong
    assert {"head.b_C"} not in wrong
    decided = json.loads(files[".json"].read_text())["against_central_differences"]
    assert decided["closed forms"] < 1e-8
    assert decided["jacfwd(jacrev)"] > 1e-3


@pytest.mark.slow
def test_route_table(drawn):
    files, shipped = drawn("route_table"), load()["operations"]
    rows = {row["operation"]: row for row in read(files[".csv"])}
    assert rows.keys() == shipped.keys()
    for operation, row in rows.items():
        assert all(row[name] == shipped[operation].get(name, "right").split()[0] for name in route_table.ROUTES_OF)
    gain = rows["aten.layer_norm.default(input*, weight*)"]
    assert (gain["torch.func.hessian"], gain["reverse-over-reverse"]) == ("wrong", "right")
    cells = {(row["operation"], row["route"]): row["status"] for row in read(files["_errors.csv"])}
    assert cells["tanh", "torch.func.hessian"] == cells["layer_norm", "grad twice"] == "right"


@pytest.mark.slow
def test_approximations_are_those_of_the_function(drawn):
    files, nano = drawn("approximations"), approximations.Settings(("pre",), (0, 1), 4, 4, 6, 2)
    cell = approximations.Cell("pre", 1, "trained", "hessian")
    own = hk.approximations(*approximations.problem(cell, nano), loss="cross_entropy", of=["kfac"])
    (row,) = (r for r in read(files[".csv"]) if (r["approximation"], r["against"], r["seed"]) == ("kfac", "hessian", "1"))
    assert float(row["frobenius"]) == pytest.approx(own["kfac"].measures.frobenius.value, rel=1e-5)
    assert "in 4 of 4 cells, as it has to be" in files["_tables.md"].read_text()


@pytest.mark.slow
def test_monitored_runs(drawn):
    """A monitor measures on time; training with and without a monitor is the same."""
    assert json.loads(drawn("monitored_adamw")[".json"].read_text())["steps"] == [0, 2, 4, 6]
    pytest.importorskip("transformers")
    files = drawn("monitored_gpt2")
    about, log = json.loads(files[".json"].read_text()), Monitor.read(files[".jsonl"])
    assert about["same_parameters"] is True
    assert about["steps_measured"] == log.steps.tolist() == [0, 1]
    assert len(log.records[-1]["spectrum"]["eigenvalues"]) == 4


def twice(model: Layers) -> torch.Tensor:
    """The Hessian in W_1 and W_2 by reverse over reverse, which shares nothing with the pictures of vec_r."""
    X, T = data()
    return reverse_over_reverse(model, X, T, mse)


def test_the_formula_of_the_pictures_of_vec_r_is_the_block():
    found, expected = block(), twice(Layers(bent=False))
    assert (found.formula - expected[:6, 6:]).abs().max() < 1e-12 * expected[:6, 6:].abs().max()
    assert found.functional.abs().max() > found.gauss_newton.abs().max()  # as docs/concepts/second_derivatives.md says
    expected = twice(Layers(bent=True))
    assert (sum(sites().values()) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert torch.linalg.eigvalsh(sites()["loss"])[0] > -1e-12


@pytest.mark.slow
def test_no_valid_bound_lies_below_the_norm(drawn):
    kept = json.loads(drawn("bounds_over_truth")[".json"].read_text())
    assert set(kept["summary"]) == {"attention", "block", "size", "training", "placement"}
    for one in (one for columns in kept["ratios"].values() for problems in columns.values() for one in problems):
        assert {"a priori", "structured", "certified, norm matrix"} <= set(one)
        assert all(ratio >= 1 - 1e-9 for kind, ratio in one.items() if not kind.startswith("printed"))


@pytest.mark.parametrize("name", ["gpt", "squared error"])
def test_exact_sharpness_by_scores_and_by_closed_forms(name):
    problem = sharpness_coverage.make(name)
    x, y = problem.data
    found = sharpness(problem.model, x, y, loss=problem.loss, exact=True)
    wanted = torch.tensor([found.tensors[part.name].value * part.size for part in problem.parts], dtype=torch.float64)
    torch.testing.assert_close(sharpness_coverage.exact(problem), wanted, rtol=1e-9, atol=0)


# Pages with tables that figures wrote


def test_the_pages_have_the_tables_of_the_figures():
    bounds, placements, coverage = (
        (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("bounds", "placement_curvature", "sharpness")
    )
    for kind in ("a priori", "structured", "certified, norm matrix", "certified, schatten", "certified, cholesky"):
        assert bounds.count(f"\n| {kind} | ") >= 2
    assert all(f"\n| {placement} | " in bounds for placement in bounds_over_truth.FULL.placements)
    for name in placement_curvature.FULL.placements:
        assert placements.count(f"\n| {name} | ") == len(placement_curvature.FULL.initialisations)
    rows = json.loads((DOCS / "sharpness_coverage.json").read_text())["rows"]
    headers, cells = sharpness_coverage.over_models([sharpness_coverage.Row(**row) for row in rows])
    assert "| " + " | ".join(headers) + " |" in coverage
    assert all("| " + " | ".join(row) + " |\n" in coverage for row in cells)
    assert WITHOUT_PICTURES or all(
        (DOCS / f"{name}.png").exists() for name in ("bounds", "placement_curvature", "sharpness_coverage")
    )
