"""Curvature by norm placement: the norms against dense eigenvalues, what has to be equal, going on after an interrupt."""

from __future__ import annotations

import csv
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hessiankit as hk
from figures import placement_curvature as figure
from figures.__main__ import main
from figures._lanczos import extremes
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES

ROOT = Path(__file__).parents[2]
SMALL = replace(figure.QUICK, d_model=4, d_ff=4, tokens=4, sequences=1)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the result of a run smaller than the quick one."""
    folder = tmp_path_factory.mktemp("curvature")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "QUICK", SMALL)
        assert main(["placement_curvature", "--quick", "--out", str(folder)]) == 0
    return folder


def test_norms_against_dense_eigenvalues():
    settings, cell = SMALL, figure.Cell("hybridnorm", "megatron", 2, 1)
    model = figure.model_of(cell, settings)
    ids, labels = figure.data(settings)
    problem = Problem(model, ids, labels, "cross_entropy")
    H = REFERENCES["reverse-over-reverse"].matrix(problem)
    types, found = hk.block_types(model), figure.measure(cell, settings)
    for group in figure.GROUPS:
        rows = torch.cat([torch.arange(s.start, s.stop) for n, s in problem.slices.items() if group in (types[n], "all")])
        values = torch.linalg.eigvalsh(H[rows][:, rows])
        expected = float(values[values.abs().argmax()])
        assert abs(expected - found.signs[group] * found.norms[group]) <= 1.01 * settings.tol * abs(expected)
        assert found.residuals[group] <= settings.tol


@pytest.mark.parametrize("size", [1, 2, 40])
def test_lanczos_of_several_blocks(size):
    generator = torch.Generator().manual_seed(size)
    A = torch.randn(3 * size, 3 * size, generator=generator, dtype=torch.float64)
    A = A + A.T
    groups = {"first": torch.arange(size), "rest": torch.arange(size, 3 * size), "all": torch.arange(3 * size)}
    for name, one in extremes(A.matmul, 3 * size, groups, tol=1e-6, most=200).items():
        rows = groups[name]
        values = torch.linalg.eigvalsh(A[rows][:, rows])
        assert one.value == pytest.approx(float(values[values.abs().argmax()]), rel=2e-6)
        assert one.products <= len(rows)


def test_the_text_is_the_same_everywhere():
    assert hashlib.sha256(figure.zen()).hexdigest() == "e250f274f33b9b621a04264025d50e5fb9b1f989f444d13bb373882e734e996f"
    ids, labels = figure.data(figure.FULL)
    assert ids.shape == labels.shape == (4, 16)
    assert torch.equal(ids[:, 1:], labels[:, :-1])


@pytest.mark.slow
def test_equal_placements_are_equal_but_for_eps(out):
    cells = json.loads((out / "placement_curvature.json").read_text())["cells"]
    rows = figure.equalities([figure.Measured(**{**c, "cell": figure.Cell(**c["cell"])}) for c in cells], SMALL)
    assert [row[:2] for row in rows] == [("pre-qkv-post = hybridnorm", "1"), ("pre-qkv-post = hybridnorm", "2")]
    for *_, usual, tiny in rows:
        assert float(tiny.split()[0]) < 1e-9 < 1e-4 < float(usual.split()[0]) < 0.1


@pytest.mark.slow
def test_files(out):
    names = {path.name.removeprefix("placement_curvature") for path in out.iterdir()}
    assert names == {".png", ".csv", ".json", ".md", "cache"}
    with (out / "placement_curvature.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 1 * 3 * 6
    for row in rows:
        assert 0 < float(row["lowest"]) <= float(row["median"]) <= float(row["highest"])
    text = (out / "placement_curvature.json").read_text()
    assert len(json.loads(text)["cells"]) == 4 * 2 * 2 + 2 * 2
    assert str(ROOT) not in text


@pytest.mark.slow
def test_finished_cells_are_not_measured_again(out, monkeypatch, capsys):
    monkeypatch.setattr(figure, "QUICK", SMALL)
    picture = (out / "placement_curvature.png").read_bytes()
    monkeypatch.setattr(figure, "measure", lambda *_: pytest.fail("a finished cell was measured again"))
    assert main(["placement_curvature", "--quick", "--out", str(out)]) == 0
    assert "pre-qkv-post = hybridnorm" in capsys.readouterr().out
    assert (out / "placement_curvature.png").read_bytes() == picture


def test_the_page_has_every_placement():
    page = (ROOT / "docs" / "placement_curvature.md").read_text(encoding="utf-8")
    for name in figure.FULL.placements:
        assert page.count(f"\n| {name} | ") == len(figure.FULL.initialisations)
    assert (ROOT / "docs" / "placement_curvature.png").exists()
