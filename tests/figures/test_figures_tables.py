"""Tables 4 and 5 of HybridNorm, Table 7 of The Curse of Depth, other optimizers, and where Theorem 1 is crossed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curvature_reference import gradient_twice
from figure_files import read

from figures import (
    curse_of_depth_7,
    curvature_gap_table_1,
    curvature_gap_theorem_1,
    hybridnorm_tables_4_5,
    sharpness_disparity_6_7_11,
)
from figures._depth_models import Size, llama
from figures._runs import byte_run
from figures.sharpness_disparity_6_7_11 import AdamMini, Lion
from hessiankit.blocks import PLACEMENTS
from papers.experiments.tuning.experiment import Setting

SMALL = Size(layers=2, d_model=8, heads=2, length=8, batch_size=2, steps=3, windows=4)


def test_the_norm_crosses_theorem_1_where_it_is_computed_by_hand(tmp_path: Path) -> None:
    part, X, T = curvature_gap_theorem_1.counterexample(3.0)
    H = gradient_twice(F.mse_loss(part(X), T), list(part.parameters()))
    found = curvature_gap_theorem_1.row(part, X, T)
    assert float(torch.linalg.eigvalsh(H).abs().max()) == pytest.approx(found["norm"], rel=1e-12)
    assert (found["norm"], found["text"], found["appendix"]) == pytest.approx((18.0, 24.0, 24.0), rel=1e-12)  # 2 q^2, and M
    paths = curvature_gap_theorem_1.draw(tmp_path, quick=True)
    rows = read(paths[1])
    for row in rows:
        assert float(row["norm"]) <= 1.000001 * min(float(row["a priori"]), float(row["structured"]))
    assert all(
        float(row["norm"]) > float(row["text"]) for row in rows if row["problem"] == "minimum" and float(row["q"]) > math.sqrt(12)
    )
    (said,) = json.loads(paths[2].read_text())
    assert (said["claim"], said["status"]) == ("curvature-gap/thm1", "CONTRADICTED")


def test_blocks_of_table_1_are_those_of_the_whole_hessian() -> None:
    row = curvature_gap_table_1.Row("tiny", 4, 4, 6, 2)
    spec = row.spec(1)
    model = spec.model()
    tokens, labels = spec.data(count=curvature_gap_table_1.IMAGES)
    values = [p for name, p in model.named_parameters() if name.endswith(".W_V")]
    H = gradient_twice(F.cross_entropy(model(tokens), labels), values)
    found = curvature_gap_table_1.measure(row, 1)
    assert found["W_V"] == pytest.approx(float(torch.linalg.eigvalsh(H).abs().max()), rel=2e-2)


def test_rescaled_queries_and_keys_are_the_same_function() -> None:
    (one, X, T), (two, Y, U) = (curvature_gap_theorem_1.random_problem(q, 4) for q in (1.0, 30.0))
    assert torch.equal(X, Y)
    assert torch.equal(T, U)
    torch.testing.assert_close(one(X), two(X), rtol=1e-12, atol=1e-12)


def test_lion_by_hand() -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    lion = Lion([{"params": [w], "weight_decay": 0.5}], lr=0.1)
    expected, m = np.array([1.0, -2.0]), np.zeros(2)
    for g in (np.array([0.3, -4.0]), np.array([-0.2, 7.0])):
        w.grad = torch.tensor(g)
        lion.step()
        expected = expected * (1 - 0.05) - 0.1 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
        assert w.tolist() == pytest.approx(expected.tolist(), rel=1e-14)


def test_adam_mini_is_adam_where_each_group_has_equal_gradients() -> None:
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    mini = AdamMini([{"params": [ours], "name": "attention.W_Q", "lr": 0.01, "weight_decay": 0.1}], 3)
    adam = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for k in range(4):
        by_head = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * (k + 1)
        for p in (ours, theirs):
            p.grad = by_head.repeat_interleave(2).expand(4, 6).clone()
        mini.step()
        adam.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_every_row_of_table_4_is_a_placement() -> None:
    assert {hybridnorm_tables_4_5.name_of(one) for one in hybridnorm_tables_4_5.PRINTED} <= set(PLACEMENTS)
    assert {name for name, _ in curse_of_depth_7.TABLE_7.values()} <= set(PLACEMENTS)


@pytest.mark.slow
def test_tables_of_hybridnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybridnorm_tables_4_5, "TINY", SMALL)
    monkeypatch.setattr(hybridnorm_tables_4_5, "QUICK_DEPTHS", (1, 2))
    paths = hybridnorm_tables_4_5.draw(tmp_path, quick=True)
    rows = read(paths[1])
    assert len(rows) == 16 * 2 + 2 * 4 * 2
    said = {one["claim"]: one["status"] for one in json.loads(paths[2].read_text())}
    gone = [row["diverged"] == "True" for row in rows if (row["table"], row["placement"]) == ("4", "QK-Post")]
    expected = "SUPPORTED" if all(gone) else "OPEN" if any(gone) else "CONTRADICTED"
    assert said["hybridnorm/table4-qk-post"] == expected
    orders = [
        sorted((float(row["held-out loss"]), row["placement"]) for row in rows if (row["table"], row["seed"]) == ("4", str(seed)))
        for seed in (0, 1)
    ]
    first = [{name for _, name in order[:2]} == {"HybridNorm", "HybridNorm*"} for order in orders]
    assert said["hybridnorm/table4-surpass"] == ("SUPPORTED" if all(first) else "OPEN" if any(first) else "CONTRADICTED")


@pytest.mark.slow
def test_table_7_and_the_vision_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(curse_of_depth_7.TINY_VISION, blocks=2, steps=4, every=2)
    monkeypatch.setattr(curse_of_depth_7, "TINY", SMALL)
    monkeypatch.setattr(curse_of_depth_7, "TINY_VISION", tiny)
    paths = curse_of_depth_7.draw(tmp_path, quick=True)
    losses = {(row["method"], row["seed"]): float(row["held-out loss"]) for row in read(paths[1])}
    assert losses["LNS", "1"] == pytest.approx(byte_run(llama("LNS", SMALL, 1), tmp_path).losses[-1], rel=1e-5)
    rows = read(paths[2])
    assert len(rows) == 3 * 2 * 3 * 2
    first = {(row["variant"], row["block"]): float(row["variance"]) for row in rows if (row["step"], row["seed"]) == ("0", "0")}
    assert first["Pre-LN", "1"] == pytest.approx(first["LNS after the norm", "1"])  # the first block's factor is 1
    assert first["Pre-LN", "2"] != pytest.approx(first["LNS after the norm", "2"])


@pytest.mark.slow
def test_other_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(steps=6, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=4)
    monkeypatch.setattr(sharpness_disparity_6_7_11, "TINY", replace(sharpness_disparity_6_7_11.TINY, setting=setting))
    paths = sharpness_disparity_6_7_11.draw(tmp_path, quick=True)
    rows = read(paths[1])
    last = {(r["case"], r["arm"], r["seed"]): float(r["loss"]) for r in rows if r["step"] == "6"}
    assert len(last) == 3 * 2 * 2
    assert len(set(last.values())) == len(last)
    sharp = {row["type"] for row in read(paths[2])}
    assert {"Emb", "QK", "FFN", "VO", "Norm"} <= sharp
    assert {one["claim"] for one in json.loads(paths[3].read_text())} == {
        f"sharpness-disparity/{name}" for name in ("fig6", "fig7-lion", "fig7-wsd")
    }
