"""Figures of curvature: what their files say, and their own computations, against other routes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import gradient_twice, mse, reverse_over_reverse
from figure_files import read
from figure_sizes import CURVATURE, check_files

import hessiankit as hk
from benchmarks.routes.table import load
from figures import (
    approximations,
    block_rows,
    bounds_over_truth,
    curvature_gap_6_12,
    curvature_gap_7_11,
    curvature_gap_table_1,
    curvature_gap_theorem_1,
    optimizer_curvature,
    placement_curvature,
    route_table,
    sharpness_coverage,
)
from figures._digits import ImageSpec, block_norms, snapshots
from figures._lanczos import extremes
from figures.vec_r_pictures import Layers, block, data, sites
from hessiankit.diagnostics.monitoring import Monitor
from hessiankit.diagnostics.sharpness import cotangents, replicates, sharpness
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES
from papers.experiments.training import train

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
def test_snapshots_are_those_of_one_run_and_are_kept(tmp_path, monkeypatch):
    found = {step: growing.vector(model) for step, model in snapshots(tmp_path, NANO, (3, 0, 7))}
    assert list(found) == [0, 3, 7]
    model = NANO.model()
    assert torch.equal(found[0], growing.vector(model))
    train(model, *NANO.data(), steps=7)
    assert torch.equal(found[7], growing.vector(model))
    monkeypatch.setattr("figures._digits.train", None)  # a second call trains nothing
    assert torch.equal(dict(snapshots(tmp_path, NANO, (0, 7)))[7].head.W_C, model.head.W_C)


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
def test_figures_7_to_11_show_the_trained_model(drawn):
    rows, entries = (read(drawn("curvature_gap_7_11")[end]) for end in (".csv", "_entries.csv"))
    model, tokens, labels = some(NANO, 32)
    train(model, *NANO.data(), steps=100)
    W = model.blocks[0].attention.W_V
    H = gradient_twice(F.cross_entropy(model(tokens), labels), [W])
    last = next(row for row in rows if row["step"] == "100" and row["block"] == "blocks.0.attention.W_V")
    assert float(last["hessian_frobenius"]) == pytest.approx(float(H.norm()), rel=1e-5)  # the file has six digits
    assert float(last["spectral"]) == pytest.approx(float(torch.linalg.svdvals(W.detach())[0]), rel=1e-5)
    chosen = [row for row in entries if row["step"] == "100" and row["block"] == "blocks.0.attention.W_V"]
    assert len(chosen) == curvature_gap_7_11.ENTRIES
    for row in chosen:
        assert float(row["entry"]) == pytest.approx(float(W.detach().reshape(-1)[int(row["index"])]), rel=1e-5)


@pytest.mark.slow
def test_the_terms_of_the_test_are_those_of_the_taylor_series():
    model, tokens, labels = some(SMOOTH, 6)
    (one, two) = growing.distances(model, tokens, labels, 3, (1e-2, 2e-2))
    u = torch.randn(len(growing.vector(model)), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u = u / u.norm()
    first, second = [], []
    for x, t in zip(tokens, labels, strict=True):
        parameters = list(model.parameters())
        loss = F.cross_entropy(model(x[None]), t[None])
        first.append(float(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, retain_graph=True)]) @ u))
        second.append(float(u @ gradient_twice(loss, parameters) @ u))
    gradient, hessian = ([abs(x[k] - sum(x[:k]) / k) for k in range(1, 6)] for x in (first, second))
    assert one.gradient_term == pytest.approx(1e-2 * sorted(gradient)[2], rel=1e-10)
    assert one.hessian_term == pytest.approx(0.5e-4 * sorted(hessian)[2], rel=1e-10)
    assert two.hessian_term == pytest.approx(4 * one.hessian_term, rel=1e-12)
    assert 6 < two.rest / one.rest < 10  # of third order
    assert one.rest < 0.2 * one.hessian_term
    assert one.correlation_both > 0.999999


@pytest.mark.slow
def test_gradient_norms_and_the_minimum():
    model, tokens, labels = some(SMOOTH, 40)
    found = growing.gradient_norms(model, tokens, labels)
    for k in (1, 40):
        slopes = torch.autograd.grad(F.cross_entropy(model(tokens[:k]), labels[:k]), list(model.parameters()))
        assert float(found[k - 1]) == pytest.approx(float(torch.cat([g.reshape(-1) for g in slopes]).norm()), rel=1e-12)
    lower = growing.moved(model, growing.converged(model, tokens, labels, 30))
    assert float(growing.losses(lower, tokens, labels).mean()) < 0.4 * float(growing.losses(model, tokens, labels).mean())
    assert torch.equal(growing.vector(model), growing.vector(SMOOTH.model()))  # the model itself is left alone


@pytest.mark.slow
def test_the_bound_holds_and_loosens():
    near, far = (growing.bounded(5, 20, t) for t in (1e-4, 1e-2))
    assert near
    assert far
    assert near.distance == pytest.approx(1e-4)
    assert far.steps[-1].bound > 10 * near.steps[-1].bound
    module, inputs, targets = growing.bound_problem(5, 20)
    with torch.no_grad():
        errors = [float(F.mse_loss(module(x), t)) for x, t in zip(inputs, targets, strict=True)]
    assert near.steps[-1].loss_term == pytest.approx(abs(errors[4] - sum(errors[:4]) / 4), rel=1e-12)


@pytest.mark.slow
def test_the_first_row_of_figure_6_is_the_mean_over_all_pairs(drawn):
    table = read(drawn("curvature_gap_6_12")[".csv"])
    assert table[0]["k"] == "1"
    model, tokens, labels = some(NANO, 120)
    with torch.no_grad():
        own = F.cross_entropy(model(tokens), labels, reduction="none")
    pairs = torch.cdist(own[:, None], own[:, None])  # |L_2 - L_1| = |l_2 - l_1| / 2, and all pairs are alike over the orders
    assert float(table[0]["untrained"]) == pytest.approx(float(pairs.sum() / (120 * 119) / 2), rel=0.25)


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
    assert (said["claim"], said["status"]) == ("curvature-gap/thm1", "CONTRADICTED")


def test_blocks_of_table_1_are_those_of_the_whole_hessian():
    row = curvature_gap_table_1.Row("tiny", 4, 4, 6, 2)
    spec = row.spec(1)
    model = spec.model()
    tokens, labels = spec.data(count=curvature_gap_table_1.IMAGES)
    values = [p for name, p in model.named_parameters() if name.endswith(".W_V")]
    H = gradient_twice(F.cross_entropy(model(tokens), labels), values)
    found = curvature_gap_table_1.measure(row, 1)
    assert found["W_V"] == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=2e-2)


def test_rescaled_queries_and_keys_are_the_same_function():
    (one, X, T), (two, Y, U) = (curvature_gap_theorem_1.random_problem(q, 4) for q in (1.0, 30.0))
    assert torch.equal(X, Y)
    assert torch.equal(T, U)
    torch.testing.assert_close(one(X), two(X), rtol=1e-12, atol=1e-12)


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
def test_spectrum(drawn):
    summary = json.loads(drawn("spectrum")[".json"].read_text())
    assert all(run[kind]["converged"] for run in summary["runs"] for kind in ("ggn", "hessian"))
    assert summary["density"]["within_3"] > 0.9
    assert abs(summary["trace"]["quadrature"] - summary["trace"]["all"]) <= 2 * summary["trace"]["half_width"]


@pytest.mark.slow
def test_approximations_are_those_of_the_function(drawn):
    files, nano = drawn("approximations"), approximations.Settings(("pre",), (0, 1), 4, 4, 6, 2)
    cell = approximations.Cell("pre", 1, "trained", "hessian")
    own = hk.approximations(*approximations.problem(cell, nano), loss="cross_entropy", of=["kfac"])
    (row,) = (r for r in read(files[".csv"]) if (r["approximation"], r["against"], r["seed"]) == ("kfac", "hessian", "1"))
    assert float(row["frobenius"]) == pytest.approx(own["kfac"].measures.frobenius.value, rel=1e-5)
    assert "in 4 of 4 cells, as it has to be" in files["_tables.md"].read_text()


@pytest.mark.slow
def test_what_warns_before_a_spike(drawn):
    about = json.loads(drawn("optimizer_curvature")[".json"].read_text())
    assert about["title"] == "1 of 1 runs spiked, and 0 of 1 stable ones"
    assert all(one["warned"] <= one["of"] == 1 for one in about["measures"].values())


def test_a_warning_is_the_first_value_above_one():
    rows = [{"step": k, "critical": value, "failed": ""} for k, value in enumerate((0.5, 0.9, 1.1, 0.2, None))]
    assert optimizer_curvature.warning({"rows": rows}, "critical") == 2
    assert optimizer_curvature.warning({"rows": rows[3:]}, "critical") == 4  # no multiple at all
    assert optimizer_curvature.warning({"rows": [{**rows[4], "failed": "critical"}]}, "critical") is None


@pytest.mark.slow
def test_monitored_runs(drawn):
    """A monitor with a share measures at the first and the last step; training with and without a monitor is the same."""
    steps = json.loads(drawn("monitored_share")[".json"].read_text())["runs"]["warm"]["steps"]
    assert (steps[0], steps[-1]) == (0, 6)
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


def test_the_picture_of_block_rows_has_fewer_directions_than_parameters():
    """As docs/concepts/one_sum.md says: 168 directions for a Hessian of 576 columns, and one cut."""
    ways = block_rows.paths()
    found = block_rows.diagram(ways)
    assert sum(column.count for column in found.columns) == 168
    assert sum(place.size for place in ways.places) == 576
    assert [found.rows[at] for at in found.cuts] == ["add"]


@pytest.mark.slow
def test_no_valid_bound_lies_below_the_norm(drawn):
    kept = json.loads(drawn("bounds_over_truth")[".json"].read_text())
    assert set(kept["summary"]) == {"attention", "block", "size", "training", "placement"}
    for one in (one for columns in kept["ratios"].values() for problems in columns.values() for one in problems):
        assert {"a priori", "structured", "certified, norm matrix"} <= set(one)
        assert all(ratio >= 1 - 1e-9 for kind, ratio in one.items() if not kind.startswith("printed"))


def test_the_points_of_bounds_over_truth():
    module, x, t = bounds_over_truth.problem("block", "large", 1)
    plain, same, _ = bounds_over_truth.problem("block", "init", 1)
    assert torch.equal(x, same)
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, 3 * q, msg=name)
    with torch.no_grad():
        out = module(x)
    assert 0.03 < float((out - t).norm() / out.norm()) < 0.3
    points = bounds_over_truth.trained("attention", 0, (0, 50))
    losses = [float(((m(x) - t) ** 2).mean().detach()) for _, m, x, t in points]
    assert losses[1] < losses[0]
    found = bounds_over_truth.summarise({"block": {"init": [{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]}})
    assert found == {"block": {"init": {"a": (3.0, 5.0), "b": (2.0, 2.0)}}}


def test_norms_by_placement_against_dense_eigenvalues():
    settings = replace(placement_curvature.QUICK, d_model=4, d_ff=4, tokens=4, sequences=1)
    cell = placement_curvature.Cell("hybridnorm", "megatron", 2, 1)
    problem = Problem(placement_curvature.model_of(cell, settings), *placement_curvature.data(settings), "cross_entropy")
    H = REFERENCES["reverse-over-reverse"].matrix(problem)
    types, found = hk.block_types(problem.module), placement_curvature.measure(cell, settings)
    for group in placement_curvature.GROUPS:
        rows = torch.cat([torch.arange(s.start, s.stop) for n, s in problem.slices.items() if group in (types[n], "all")])
        values = torch.linalg.eigvalsh(H[rows][:, rows])
        expected = float(values[values.abs().argmax()])
        assert abs(expected - found.signs[group] * found.norms[group]) <= 1.01 * settings.tol * abs(expected)
        assert found.residuals[group] <= settings.tol


@pytest.mark.parametrize("size", [1, 2, 40])
def test_lanczos_of_several_blocks(size):
    A = torch.randn(3 * size, 3 * size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    A = A + A.T
    groups = {"first": torch.arange(size), "rest": torch.arange(size, 3 * size), "all": torch.arange(3 * size)}
    for name, one in extremes(A.matmul, 3 * size, groups, tol=1e-6, most=200).items():
        rows = groups[name]
        values = torch.linalg.eigvalsh(A[rows][:, rows])
        assert one.value == pytest.approx(float(values[values.abs().argmax()]), rel=2e-6)
        assert one.products <= len(rows)


@pytest.mark.slow
def test_equal_placements_are_equal_but_for_eps(drawn):
    m = placement_curvature
    kept = json.loads(drawn("placement_curvature")[".json"].read_text())
    assert len(kept["cells"]) == 4 * 2 * 2 + 2 * 2
    rows = m.equalities([m.Measured(**{**c, "cell": m.Cell(**c["cell"])}) for c in kept["cells"]], m.QUICK)
    assert [row[:2] for row in rows] == [("pre-qkv-post = hybridnorm", "1"), ("pre-qkv-post = hybridnorm", "2")]
    for *_, usual, tiny in rows:
        assert float(tiny.split()[0]) < 1e-9 < 1e-4 < float(usual.split()[0]) < 0.1


@pytest.mark.parametrize("name", ["gpt", "squared error"])
def test_exact_sharpness_by_scores_and_by_closed_forms(name):
    problem = sharpness_coverage.make(name)
    x, y = problem.data
    found = sharpness(problem.model, x, y, loss=problem.loss, exact=True)
    wanted = torch.tensor([found.tensors[part.name].value * part.size for part in problem.parts], dtype=torch.float64)
    torch.testing.assert_close(sharpness_coverage.exact(problem), wanted, rtol=1e-9, atol=0)


def test_a_draw_by_scores_is_a_draw_of_the_estimator(monkeypatch):
    problem = sharpness_coverage.make("gpt")
    x, y = problem.data
    labels = torch.randint(13, (3, *y.shape), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        patch.setattr(cotangents, "sample_labels", lambda logits, numbers, draws, seed: labels[:, list(numbers)])
        found = replicates(problem.model, x, y, draws=3, micro_batch=1)
    given = iter(labels.unbind(1))  # the labels of one sequence after the other, (draws, positions)
    monkeypatch.setattr(torch, "multinomial", lambda p, n, **_: next(given).T)
    again = sharpness_coverage.draw_replicates(problem, 3, 4, torch.Generator())
    torch.testing.assert_close(again.transpose(0, 1), found.values, rtol=1e-10, atol=0)


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
    headers, cells = sharpness_coverage.over_models(measured())
    assert "| " + " | ".join(headers) + " |" in coverage
    assert all("| " + " | ".join(row) + " |\n" in coverage for row in cells)
    assert all((DOCS / f"{name}.png").exists() for name in ("bounds", "placement_curvature", "sharpness_coverage"))


def measured() -> list[sharpness_coverage.Row]:
    rows = json.loads((DOCS / "sharpness_coverage.json").read_text())["rows"]
    return [sharpness_coverage.Row(**row) for row in rows]


def test_the_page_says_what_was_measured_of_coverage():
    enough = [row for row in measured() if row.draws >= 4]
    assert {row.model for row in enough} == set(sharpness_coverage.FULL.models)
    assert all(row.trials >= 400 for row in enough)
    lowest, highest = (pick(row.coverage["types"][k] for row in enough) for pick, k in ((min, 1), (max, 2)))
    assert 0.92 <= lowest < 0.95 < highest <= 0.98
    fails = min(row.coverage["types"][1] for row in measured() if row.draws == 2 and row.micro_batches > 1)
    assert 0.87 <= fails < 0.88
