"""The figure of coverage: its arithmetic against the estimator's, its files, and the page that shows its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from figures import sharpness_coverage as figure
from figures.__main__ import main
from hessiankit.diagnostics.sharpness import cotangents, replicates, sharpness

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gpt", "squared error"])
def test_exact_values_by_scores_and_by_closed_forms(name):
    problem = figure.make(name)
    x, y = problem.data
    found = sharpness(problem.model, x, y, loss=problem.loss, exact=True)
    wanted = torch.tensor([found.tensors[part.name].value * part.size for part in problem.parts], dtype=torch.float64)
    torch.testing.assert_close(figure.exact(problem), wanted, rtol=1e-9, atol=0)


def test_a_draw_by_scores_is_a_draw_of_the_estimator(monkeypatch):
    problem = figure.make("gpt")
    x, y = problem.data
    labels = torch.randint(13, (3, *y.shape), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch:
        patch.setattr(cotangents, "sample_labels", lambda logits, numbers, draws, seed: labels[:, list(numbers)])
        found = replicates(problem.model, x, y, draws=3, micro_batch=1)
    given = iter(labels.unbind(1))  # the labels of one sequence after the other, (draws, positions)
    monkeypatch.setattr(torch, "multinomial", lambda p, n, **_: next(given).T)
    again = figure.draw_replicates(problem, 3, 4, torch.Generator())
    torch.testing.assert_close(again.transpose(0, 1), found.values, rtol=1e-10, atol=0)


@pytest.mark.slow
def test_files(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "QUICK", figure.Settings(10, (2, 4), 3, ("classifier",)))
    assert main(["sharpness_coverage", "--quick", "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"sharpness_coverage{end}" for end in (".png", ".md", ".json")}
    data = json.loads((tmp_path / "sharpness_coverage.json").read_text())
    assert [(row["micro_batches"], row["draws"], row["estimator"]) for row in data["rows"]] == [
        (1, 2, False), (1, 4, False), (4, 2, False), (4, 4, False), (1, 8, True),
    ]  # fmt: skip
    assert str(ROOT) not in json.dumps(data)
    for row in data["rows"]:
        mean, low, high = row["coverage"]["types"]
        assert 0.5 < low <= mean <= high <= 1


def measured() -> list[figure.Row]:
    rows = json.loads((ROOT / "docs" / "sharpness_coverage.json").read_text())["rows"]
    return [figure.Row(**row) for row in rows]


def test_the_page_has_the_measured_table():
    page = (ROOT / "docs" / "sharpness.md").read_text(encoding="utf-8")
    headers, cells = figure.over_models(measured())
    assert "| " + " | ".join(headers) + " |" in page
    for row in cells:
        assert "| " + " | ".join(row) + " |\n" in page
    assert (ROOT / "docs" / "sharpness_coverage.png").exists()


def test_the_page_says_what_was_measured():
    enough = [row for row in measured() if row.draws >= 4]
    assert {row.model for row in enough} == set(figure.FULL.models)
    assert all(row.trials >= 400 for row in enough)
    lowest, highest = (pick(row.coverage["types"][k] for row in enough) for pick, k in ((min, 1), (max, 2)))
    assert 0.92 <= lowest < 0.95 < highest <= 0.98
    fails = min(row.coverage["types"][1] for row in measured() if row.draws == 2 and row.micro_batches > 1)
    assert 0.87 <= fails < 0.88
