"""The grid of norm placements: a sample of its cases, its command, and the committed result of all of it."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hessiankit.blocks import PLACEMENTS, FeedForward
from hessiankit.cli.program import FAILED
from hessiankit.support.jsonl import read_records
from papers.__main__ import main
from papers.experiments.placement_grid import (
    KINK,
    OPTIONS,
    PlacementCase,
    build,
    cases,
    finished_case,
    is_balanced,
    is_generic,
)

pytestmark = pytest.mark.slow

SAMPLE, SEED = 3, 24  # with every value of every option, and one stack of blocks
ROOT = Path(__file__).parents[2]
CHEAP = PlacementCase("post", "layernorm", "relu", "1", "none", 1, "mse")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sample's result."""
    folder = tmp_path_factory.mktemp("placements")
    assert main(["placements", "--sample", str(SAMPLE), "--seed", str(SEED), "--out", str(folder)]) == 0
    return folder


def test_the_sample_passes_and_covers_every_option(out):
    finished = list(read_records(out / "cases.jsonl", finished_case))
    assert all(one.passed and 0 < one.error <= 1e-10 and one.identities > 0 for one in finished)
    assert [one.case for one in finished] == cases(sample=SAMPLE, seed=SEED)
    assert len({one.case.placement for one in finished}) == SAMPLE
    for option, values in OPTIONS.items():
        assert {getattr(one.case, option) for one in finished} == set(values)


def test_a_wrong_entry_is_found(tmp_path, monkeypatch, capsys):
    checking = importlib.import_module("hessiankit.verify.check")  # the package's name ``check`` is the function
    right = checking.hessian_of

    def wrong(*args, **options):
        found = right(*args, **options)
        where = found.slices["blocks.0.feedforward.W_1"]
        found.matrix[where, where] += 1e-6 * found.matrix[where, where].abs().max()
        return found

    monkeypatch.setattr(checking, "hessian_of", wrong)
    command = ["placements", "--placement", "lns", "--sample", "1", "--out", str(tmp_path)]
    assert main(command) == FAILED
    assert "1 of 1 cases FAILED" in capsys.readouterr().out
    assert json.loads((tmp_path / "placement_grid.json").read_text())["placements"]["lns"]["failed"] == 1
    assert "Failed:" in (tmp_path / "placement_grid.md").read_text()


def test_points_that_decide_nothing_are_refused():
    """A pre-activation at the kink of ReLU, a constant row where the norm centres, a gradient that is small for one weight."""
    for activation in ("relu", "gelu"):
        model, ids, _ = build(replace(CHEAP, activation=activation))
        assert is_generic(model, ids)
        network, read = next(m for m in model.modules() if isinstance(m, FeedForward)), []
        with torch.no_grad(), network.register_forward_pre_hook(lambda _, args, to=read: to.append(args[0])):
            model(ids)
            network.b_1[0] -= (read[0][0, 0] @ network.W_1 + network.b_1)[0] - KINK / 2
        assert is_generic(model, ids) is (activation == "gelu")
    for norm in ("layernorm", "rmsnorm"):
        model, ids, _ = build(replace(CHEAP, norm=norm, activation="gelu"))
        part = model.blocks[0].attention
        with torch.no_grad():
            model.embedding.W_E.fill_(1.0)  # every entry of every row alike, and what the attention adds is nothing
            for p in (model.embedding.P, part.W_O, part.b_O):
                p.zero_()
        assert is_generic(model, ids) is (norm == "rmsnorm")
    model, ids, target = build(CHEAP)
    assert is_balanced(model, ids, target, "mse")
    model.blocks[0].feedforward.W_2.data *= 1e-6  # the gradient of W_1 is then small
    assert not is_balanced(model, ids, target, "mse")


def test_the_committed_result_is_of_every_placement():
    found = json.loads((ROOT / "docs" / "placement_grid.json").read_text(encoding="utf-8"))
    size = found["cases"]
    part = "" if size == len(cases()) else f" --sample {size} --seed 0"
    assert found["command"] == f"python -m papers placements{part}"
    assert size >= 8 * len(PLACEMENTS)
    assert set(found["placements"]) == set(PLACEMENTS)
    assert found["failed"] == []
    assert found["max_rel_error"] <= found["tolerance"] == 1e-10
    for option, values in OPTIONS.items():
        assert all(any(own["by"][option][str(v)] is not None for own in found["placements"].values()) for v in values)
    page = (ROOT / "docs" / "placement_grid.md").read_text(encoding="utf-8")
    assert all(f"\n| {name} | {size // len(PLACEMENTS)} | 0 |" in page for name in PLACEMENTS)
    assert str(ROOT) not in page
