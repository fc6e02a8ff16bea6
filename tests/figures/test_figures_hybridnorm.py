"""The figures of HybridNorm: their numbers, recomputed by other routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from figure_files import read
from scipy import stats

from figures import hybridnorm_4_5 as first
from figures import hybridnorm_table_3 as scheme
from figures._depth_models import Size, olmo
from figures._runs import byte_run, measured_on, model_of
from hessiankit.blocks import Transformer
from hessiankit.cli.text import load_text

pytestmark = pytest.mark.slow

SMALL = Size(layers=3, d_model=8, heads=2, length=8, batch_size=2, steps=16, windows=4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that both figures read the same runs."""
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Quick modes at the size of a test."""
    patch = pytest.MonkeyPatch()
    patch.setattr(first, "QUICK", first.Settings(SMALL, (0, 1), replace(SMALL, steps=3), (0, 1), (2, 4), (0,)))
    patch.setattr(scheme, "TINY", SMALL)
    patch.setattr(scheme, "QUICK_SEEDS", (0, 1))
    yield
    patch.undo()


def held_out(model: Transformer, size: Size) -> float:
    inputs, targets = load_text(split="validation").windows(size.length, size.windows)
    with torch.no_grad():
        return F.cross_entropy(model.double()(inputs).flatten(0, 1), targets.flatten()).item()


def gradients(model: Transformer, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return [math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters())) for block in model.blocks]


def student(values: np.ndarray, confidence: float) -> tuple[float, float]:
    return stats.t.interval(confidence, len(values) - 1, values.mean(), stats.sem(values))


def test_first_blocks_and_gradients(out: Path) -> None:
    paths = first.draw(out, quick=True)
    names = [".png", "_losses.csv", "_differences.csv", "_gradients.csv", "_ratios.csv", "_verdicts.json"]
    assert [path.name for path in paths] == [f"hybridnorm_4_5{name}" for name in names]
    last = [row for row in read(paths[1]) if int(row["step"]) == SMALL.steps]
    losses = {(row["first block"], int(row["seed"])): float(row["held-out loss"]) for row in last}
    for (name, seed), loss in losses.items():
        model = byte_run(olmo(first.FIRST_BLOCKS[name], "megatron", SMALL, seed), out).model()
        assert loss == pytest.approx(held_out(model, SMALL), rel=1e-5)
    apart = {row["first block"]: row for row in read(paths[2]) if int(row["step"]) == SMALL.steps}
    assert list(apart) == ["HybridNorm*", "First-QKV-Pre", "EmbedNorm"]
    for name, row in apart.items():
        less = np.array([losses[name, seed] - losses["HybridNorm", seed] for seed in (0, 1)])
        assert (float(row["low"]), float(row["high"])) == pytest.approx(student(less, 0.95), abs=2e-4)
    rows = {(r["model"], int(r["seed"]), int(r["step"]), int(r["block"])): float(r["gradient norm"]) for r in read(paths[3])}
    for name, (placement, initialisation) in first.FLOWS.items():
        spec = olmo(placement, initialisation, first.QUICK.deep, 1, measured=("gradient",))
        for step, model in ((0, model_of(spec)), (3, byte_run(spec, out).model())):
            (batch,) = measured_on(spec)
            found = [rows[name, 1, step, block] for block in range(1, SMALL.layers + 1)]
            assert found == pytest.approx(gradients(model, *batch), rel=1e-4)
    ratios = {(row["model"], int(row["blocks"])): float(row["last / first"]) for row in read(paths[4])}
    spec = olmo("pre", "normal", replace(SMALL, layers=4), 0)
    known = gradients(model_of(spec), *measured_on(spec)[0])
    assert ratios["Pre-Norm, normal", 4] == pytest.approx(known[-1] / known[0], rel=1e-4)


def test_star_and_first_qkv_pre_start_as_one_function() -> None:
    spec = olmo("hybridnorm*", "megatron", SMALL, 0)
    tight = [
        model_of(replace(s, block=(*s.block, ("eps", 1e-12)))).double() for s in (spec, replace(spec, placement="first-qkv-pre"))
    ]
    inputs = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(tight[0](inputs), tight[1](inputs), rtol=1e-8, atol=1e-8)


def test_initialisations(out: Path) -> None:
    paths = scheme.draw(out, quick=True)
    assert [path.name for path in paths] == [
        f"hybridnorm_table_3{name}" for name in (".png", ".csv", "_runs.csv", "_verdicts.json")
    ]
    runs = {(r["placement"], r["initialisation"], int(r["seed"])): float(r["held-out loss"]) for r in read(paths[2])}
    assert len(runs) == 2 * 3 * 2
    model = byte_run(olmo("hybridnorm", "depth-scaled", SMALL, 1), out).model()
    assert runs["HybridNorm", "depth-scaled", 1] == pytest.approx(held_out(model, SMALL), rel=1e-5)
    for row in read(paths[1]):
        own, base = (
            np.array([runs[row["placement"], name, seed] for seed in (0, 1)])
            for name in (row["initialisation"], scheme.CHOSEN[row["placement"]])
        )
        # nothing rises by half a nat in so few steps: what counts as diverged here never came below a uniform guess
        assert int(row["diverged"]) == (own > math.log(256)).sum()
        if row["diverged"] == "0":
            ends = float(row["held-out loss, low"]), float(row["held-out loss, high"])
            assert ends == pytest.approx(student(own, 0.95), abs=2e-4)
        else:
            assert row["held-out loss"] == row["held-out loss, low"] == ""
        if row["initialisation"] == scheme.CHOSEN[row["placement"]] or max(*own, *base) > math.log(256):
            assert row["less the paper's choice"] == ""
        else:
            ends = float(row["less the paper's choice, low"]), float(row["less the paper's choice, high"])
            assert ends == pytest.approx(student(own - base, 1 - 0.05 / 4), abs=2e-3)


def test_a_diverged_run_has_no_interval() -> None:
    well = scheme.Cell("Pre-Norm", "normal", (2.0, 2.1), (False, False), (2.0, 2.0))
    gone = scheme.Cell("Pre-Norm", "megatron", (2.0, math.inf), (False, True), (2.0, math.inf))
    assert gone.mean is None
    assert gone.less(well) is None
    assert scheme.compared([well, gone]) == {("Pre-Norm", "megatron"): None}
    picture = scheme.picture([well, gone], scheme.compared([well, gone]))
    assert "diverged" in [text.get_text() for text in picture.axes[0].texts]
