"""The figure of approximations: its numbers are those of the function, its findings those of its numbers."""

from __future__ import annotations

import pytest
import torch
from figure_files import read

import hessiankit as hk
from figures import approximations as figure

pytestmark = pytest.mark.slow

NANO = figure.Settings(("pre",), (0, 1), 4, 4, 6, 2)


def test_rows_and_findings(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "QUICK", NANO)
    paths = figure.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"approximations{end}" for end in (".png", ".csv", ".json", "_tables.md")]
    rows = read(paths[1])
    assert len(rows) == 2 * 3 * 11
    cell = figure.Cell("pre", 1, "trained", "hessian")
    own = hk.approximations(*figure.problem(cell, NANO), loss="cross_entropy", of=["kfac"])
    (row,) = (r for r in rows if r["approximation"] == "kfac" and r["against"] == "hessian" and r["seed"] == "1")
    assert float(row["frobenius"]) == pytest.approx(own["kfac"].measures.frobenius.value, rel=1e-5)
    before = figure.problem(figure.Cell("pre", 1, "initialisation", "ggn"), NANO)[0].state_dict()
    after = figure.problem(cell, NANO)[0].state_dict()
    assert not torch.equal(before["head.W_C"], after["head.W_C"])
    text = paths[3].read_text()
    assert "in 4 of 4 cells, as it has to be" in text
    assert text.count("| kfac |") == 9
