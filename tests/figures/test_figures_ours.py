"""The figures of our own: analytic minus empirical, the route table, speed against peers."""

from __future__ import annotations

import json

import pytest
from figure_files import read

from benchmarks.routes.table import load
from figures import analytic_minus_empirical, route_table, spectrum
from figures._digits import ImageSpec

pytestmark = pytest.mark.slow
QUICK = {"d_model": 4, "d_ff": 6}
NANO = ImageSpec(patch=4, **QUICK)


def test_analytic_minus_empirical(tmp_path, monkeypatch):
    monkeypatch.setattr("figures._digits.QUICK", QUICK)
    paths = analytic_minus_empirical.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"analytic_minus_empirical{end}" for end in (".png", ".csv", ".json")]
    rows = read(paths[1])
    assert len(rows) == 16 * 16
    assert max(float(row["reverse over reverse"]) for row in rows) < 1e-10
    wrong = {(row["row"], row["column"]) for row in rows if float(row["jacfwd(jacrev)"]) > 1e-3}
    assert ("blocks.0.norm_1.weight", "blocks.0.attention.W_V") in wrong or (
        "blocks.0.attention.W_V",
        "blocks.0.norm_1.weight",
    ) in wrong
    assert ("head.b_C", "head.b_C") not in wrong
    summary = json.loads(paths[2].read_text())
    decided = summary["against_central_differences"]
    assert decided["closed forms"] < 1e-8
    assert decided["jacfwd(jacrev)"] > 1e-3
    assert summary["parameters"] == sum(p.numel() for p in NANO.model().parameters())


def test_route_table(tmp_path, monkeypatch):
    monkeypatch.setattr(route_table, "QUICK", ("layer_norm", "tanh"))
    paths = route_table.draw(tmp_path, quick=True)
    stem = "route_table"
    assert [path.name for path in paths] == [f"{stem}{end}" for end in (".png", "_errors.png", ".csv", "_errors.csv", ".json")]
    rows = read(paths[2])
    shipped = load()["operations"]
    assert len(rows) == len(shipped)
    for row in rows:
        for name in route_table.ROUTES_OF:
            assert row[name] == shipped[row["operation"]].get(name, "right").split()[0]
    gain = next(row for row in rows if row["operation"] == "aten.layer_norm.default(input*, weight*)")
    assert (gain["torch.func.hessian"], gain["reverse-over-reverse"]) == ("wrong", "right")
    cells = {(row["operation"], row["route"]): row["status"] for row in read(paths[3])}
    assert cells["tanh", "torch.func.hessian"] == cells["layer_norm", "grad twice"] == "right"


def test_spectrum(tmp_path):
    paths = spectrum.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"spectrum{end}" for end in (".png", ".csv", ".json")]
    assert len(read(paths[1])) == 2 * 2 * 10
    summary = json.loads(paths[2].read_text())
    assert all(run[kind]["converged"] for run in summary["runs"] for kind in ("ggn", "hessian"))
    assert summary["density"]["within_3"] > 0.9
    assert abs(summary["trace"]["quadrature"] - summary["trace"]["all"]) <= 2 * summary["trace"]["half_width"]
