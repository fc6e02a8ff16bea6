"""The figure of bounds over truth: its numbers, its files, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from figures import bounds_over_truth as figure
from figures.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figure")
    patch = pytest.MonkeyPatch()
    patch.setattr(figure, "QUICK", figure.Settings(1, (0, 2), (3,), 1, ("hybridnorm",), 1))
    assert main(["bounds_over_truth", "--quick", "--out", str(folder)]) == 0
    patch.undo()
    return folder


@pytest.mark.slow
def test_files(out):
    assert {path.name for path in out.iterdir()} == {f"bounds_over_truth{end}" for end in (".png", ".md", ".json")}
    data = json.loads((out / "bounds_over_truth.json").read_text())
    assert set(data["summary"]) == {"attention", "block", "size", "training", "placement"}
    assert set(data["summary"]["block"]) == set(figure.POINTS)
    assert len(data["ratios"]["attention"]["trained"]) == figure.SAMPLES
    assert str(ROOT) not in json.dumps(data)


@pytest.mark.slow
def test_no_valid_bound_lies_below_the_norm(out):
    ratios = json.loads((out / "bounds_over_truth.json").read_text())["ratios"]
    for columns in ratios.values():
        for problems in columns.values():
            for one in problems:
                assert {"a priori", "structured", "certified, norm matrix"} <= set(one)
                assert all(ratio >= 1 - 1e-9 for kind, ratio in one.items() if not kind.startswith("printed"))


def test_the_points():
    module, x, t = figure.problem("block", "large", 1)
    plain, same, _ = figure.problem("block", "init", 1)
    assert torch.equal(x, same)
    assert x.shape == t.shape == (5, 6)
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, 3 * q, msg=name)
    with torch.no_grad():
        out = module(x)
    assert 0.03 < float((out - t).norm() / out.norm()) < 0.3
    losses = [float(((m(x) - t) ** 2).mean().detach()) for _, m, x, t in figure.trained("attention", 0, (0, 50))]
    assert losses[1] < losses[0]


def test_medians_and_worst():
    found = figure.summarise({"block": {"init": [{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]}})
    assert found == {"block": {"init": {"a": (3.0, 5.0), "b": (2.0, 2.0)}}}


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "bounds.md").read_text(encoding="utf-8")
    for kind in ("a priori", "structured", "certified, norm matrix", "certified, schatten", "certified, cholesky"):
        assert page.count(f"\n| {kind} | ") >= 2
    for placement in figure.FULL.placements:
        assert f"\n| {placement} | " in page
    assert (ROOT / "docs" / "bounds.png").exists()
