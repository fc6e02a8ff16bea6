"""The figures of The Curse of Depth: their numbers, recomputed from the models by other routes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from figure_files import read
from torch import Tensor, nn

from figures import curse_of_depth_2_3_6 as angles
from figures import curse_of_depth_4_8 as variance
from figures._depth_models import CURSE, EMBEDDING_STD, Size, llama
from figures._runs import byte_run, measured_on, model_of
from hessiankit.blocks import Transformer
from hessiankit.cli.text import load_text

SMALL = Size(layers=3, d_model=8, heads=2, length=8, batch_size=2, steps=3, windows=4)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder, so that both figures read the same runs."""
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    """Quick modes at the size of a test."""
    patch = pytest.MonkeyPatch()
    patch.setattr(angles, "TINY", SMALL)
    patch.setattr(variance, "TINY", SMALL)
    patch.setattr(angles, "WINDOWS", 6)
    yield
    patch.undo()


@torch.no_grad()
def states(model: Transformer, inputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """The stream x_1, ..., x_{L+1}, and the logits, by calling one module after the other."""
    stream = [model.embedding(inputs)]
    for block in model.blocks:
        stream.append(block(stream[-1]))
    last = stream[-1] if model.final_norm is None else model.final_norm(stream[-1])
    assert model.head is not None
    return stream, model.head(last)


@torch.no_grad()
def without(model: Transformer, k: int, inputs: Tensor, targets: Tensor) -> float:
    kept = model.blocks
    try:
        model.blocks = nn.ModuleList([block for j, block in enumerate(kept) if j != k])
        return float(F.cross_entropy(model(inputs).double().flatten(0, 1), targets.flatten()))
    finally:
        model.blocks = kept


@pytest.mark.slow
def test_angles_and_drops(out: Path) -> None:
    paths = angles.draw(out, quick=True)
    assert [path.name for path in paths] == [
        f"curse_of_depth_2_3_6{x}" for x in (".png", ".csv", "_angles.csv", "_verdicts.json")
    ]
    assert all(path.stat().st_size for path in paths)
    by_block = {(row["method"], int(row["seed"]), int(row["block"])): row for row in read(paths[1])}
    assert len(by_block) == len(angles.METHODS) * len(angles.SEEDS) * SMALL.layers
    inputs, targets = load_text(split="validation").windows(SMALL.length, angles.WINDOWS)
    mean = {method: torch.zeros(SMALL.layers + 1, SMALL.layers + 1, dtype=torch.float64) for method in angles.METHODS}
    for method, seed in product(angles.METHODS, angles.SEEDS):
        spec = llama(method, SMALL, seed)
        model = byte_run(spec, out).model().eval()
        stream, logits = states(model, inputs)
        loss = float(F.cross_entropy(logits.double().flatten(0, 1), targets.flatten()))
        units = [F.normalize(x.double(), dim=-1) for x in stream]
        for i, j in product(range(SMALL.layers + 1), repeat=2):
            mean[method][i, j] += (units[i] * units[j]).sum(-1).clamp(-1, 1).arccos().mean() / math.pi / len(angles.SEEDS)
        before, _ = states(model_of(spec), inputs)
        for k in range(SMALL.layers):
            row = by_block[method, seed, k + 1]
            assert float(row["loss rise without it"]) == pytest.approx(without(model, k, inputs, targets) - loss, abs=2e-6)
            near = F.cosine_similarity(before[k].double(), before[k + 1].double(), dim=-1).arccos().mean() / math.pi
            assert float(row["before training"]) == pytest.approx(float(near), rel=2e-5)
            assert (row["loss rise, renumbered"] == row["loss rise without it"]) == (method != "LNS" or k == SMALL.layers - 1)
    pairs = read(paths[2])
    assert len(pairs) == len(angles.METHODS) * SMALL.layers * (SMALL.layers + 1) // 2
    for row in pairs:
        first, n = int(row["l"]), int(row["n"])
        assert float(row["angular distance"]) == pytest.approx(float(mean[row["method"]][first - 1, first + n - 1]), rel=2e-5)
        assert 0.0 <= float(row["row stretched"]) <= 1.0


def test_stretched_rows_span_the_scale_whatever_the_angles(out: Path) -> None:
    one = np.array([[0.0, 0.1000, 0.3], [0.1000, 0.0, 0.1001], [0.3, 0.1001, 0.0]])
    zero = np.zeros(2)
    raw, stretched = angles.maps([angles.Measured("LNS", 0, 1.0, one, one, zero, zero, zero)], "LNS")
    np.testing.assert_allclose(raw, [[0.1, 0.1001], [0.3, np.nan]])
    np.testing.assert_allclose(stretched, [[0.0, 1.0], [0.0, np.nan]], atol=1e-12)


@pytest.mark.slow
def test_variance_and_laws(out: Path) -> None:
    paths = variance.draw(out, quick=True)
    assert [path.name for path in paths] == [f"curse_of_depth_4_8{x}" for x in (".png", ".csv", "_laws.csv", "_verdicts.json")]
    rows = {
        (r["method"], int(r["seed"]), int(r["step"]), int(r["output of block"])): float(r["variance"]) for r in read(paths[1])
    }
    for method, seed in product(variance.METHODS, variance.SEEDS):
        spec = llama(method, SMALL, seed)
        inputs = torch.cat([x for x, _ in measured_on(spec)])
        for step, model in ((0, model_of(spec)), (SMALL.steps, byte_run(spec, out).model())):
            stream, _ = states(model.eval(), inputs)
            for block, x in enumerate(stream):
                known = (x.double() - x.double().mean(-1, keepdim=True)).square().mean()
                assert rows[method, seed, step, block] == pytest.approx(float(known), rel=2e-5)
    laws = [row for row in read(paths[2]) if (row["method"], row["seed"], int(row["step"])) == ("LNS", "1", SMALL.steps)]
    assert sorted(row["law"] for row in laws) == ["exponential", "linear", "logarithmic", "quadratic"]
    y = np.array([rows["LNS", 1, SMALL.steps, block] for block in range(SMALL.layers + 1)])
    (linear,) = (row for row in laws if row["law"] == "linear")
    slope, intercept = np.polyfit(np.arange(1, len(y) + 1), y, 1)
    assert (float(linear["b"]), float(linear["a"])) == pytest.approx((slope, intercept), rel=1e-3)
    assert float(linear["r_squared"]) == pytest.approx(np.corrcoef(np.arange(len(y)), y)[0, 1] ** 2, abs=1e-4)


def test_models_are_the_papers(out: Path) -> None:
    size = Size(layers=4, d_model=64)
    plain, scaled, lns = (model_of(llama(method, size, 0)) for method in ("Pre-LN", "Pre-LN, scaled init", "LNS"))
    assert plain.embedding.W_E.std().item() == pytest.approx(EMBEDDING_STD, rel=0.03)
    for (name, a), b, c in zip(plain.named_parameters(), scaled.parameters(), lns.parameters(), strict=True):
        smaller = name.endswith(("W_O", "W_2"))
        torch.testing.assert_close(b, a / math.sqrt(2 * size.layers) if smaller else a)
        assert torch.equal(a, c)
    assert [block.factor for block in lns.blocks] == pytest.approx([k**-0.5 for k in range(1, 5)])
    assert {placement for placement, _ in CURSE.values()} == {"post", "pre", "lns"}
