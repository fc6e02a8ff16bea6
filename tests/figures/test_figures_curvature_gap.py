"""Figures 5 to 12 of Closing the Curvature Gap: their numbers, against what is computed here in another way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import gradient_twice
from figure_files import read

import hessiankit
from figures import curvature_gap_5, curvature_gap_6_12, curvature_gap_7_11
from figures import curvature_gap_6_12 as growing
from figures.__main__ import main
from figures._digits import ImageSpec, block_norms, snapshots
from papers.experiments.training import train

pytestmark = pytest.mark.slow

QUICK = {"d_model": 4, "d_ff": 6}
NANO = ImageSpec(patch=4, **QUICK)


def test_snapshots_are_those_of_one_run_and_are_kept(tmp_path, monkeypatch):
    found = {step: growing.vector(model) for step, model in snapshots(tmp_path, NANO, (3, 0, 7))}
    assert list(found) == [0, 3, 7]
    model = NANO.model()
    assert torch.equal(found[0], growing.vector(model))
    train(model, *NANO.data(), steps=7)
    assert torch.equal(found[7], growing.vector(model))
    monkeypatch.setattr("figures._digits.train", None)  # a second call trains nothing
    again = {step: growing.vector(model) for step, model in snapshots(tmp_path, NANO, (0, 7))}
    assert torch.equal(again[7], found[7])


def test_block_norms():
    model = NANO.model()
    tokens, labels = (x[:5] for x in NANO.data())
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


def test_figure_5(tmp_path, monkeypatch):
    monkeypatch.setattr("figures._digits.QUICK", QUICK)
    paths = curvature_gap_5.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == ["curvature_gap_5.png", "curvature_gap_5.csv", "curvature_gap_5_verdicts.json"]
    rows = read(paths[1])
    assert len(rows) == 2 * 2 * 16
    assert len({row["hessian_spectral"] for row in rows if row["block"] == "head.W_C"}) == 4  # two seeds, two steps
    for row in rows:
        assert float(row["hessian_spectral"]) <= float(row["hessian_frobenius"]) * (1 + 1e-5)
        assert float(row["parameter_spectral"]) <= float(row["parameter_frobenius"]) * (1 + 1e-5)


def test_figures_7_to_11(tmp_path, monkeypatch):
    monkeypatch.setattr("figures._digits.QUICK", QUICK)
    paths = curvature_gap_7_11.draw(tmp_path, quick=True)
    assert [path.name for path in paths] == [f"curvature_gap_7_11{x}" for x in (".png", ".csv", "_entries.csv", "_verdicts.json")]
    rows = read(paths[1])
    assert len(rows) == 11 * 9
    assert [row["step"] for row in rows if row["hessian_spectral"]] == [str(20 * k) for k in range(6) for _ in range(9)]
    model = NANO.model()
    tokens, labels = NANO.data()
    train(model, tokens, labels, steps=100)
    W = model.blocks[0].attention.W_V
    H = gradient_twice(F.cross_entropy(model(tokens[:32]), labels[:32]), [W])
    last = next(row for row in rows if row["step"] == "100" and row["block"] == "blocks.0.attention.W_V")
    assert float(last["hessian_frobenius"]) == pytest.approx(float(H.norm()), rel=1e-5)  # the file has six digits
    assert float(last["spectral"]) == pytest.approx(float(torch.linalg.svdvals(W.detach())[0]), rel=1e-5)
    entries = [row for row in read(paths[2]) if row["step"] == "100" and row["block"] == "blocks.0.attention.W_V"]
    assert len(entries) == curvature_gap_7_11.ENTRIES
    for row in entries:
        assert float(row["entry"]) == pytest.approx(float(W.detach().reshape(-1)[int(row["index"])]), rel=1e-5)


def test_the_terms_of_the_test_are_those_of_the_taylor_series():
    model = ImageSpec(patch=4, d_model=4, d_ff=6, activation="gelu").model()
    tokens, labels = (x[:6] for x in NANO.data())
    (one, two) = growing.distances(model, tokens, labels, 3, (1e-2, 2e-2))
    star = growing.vector(model)
    u = torch.randn(len(star), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    u = u / u.norm()
    first, second = [], []
    for x, t in zip(tokens, labels, strict=True):
        parameters = list(model.parameters())
        loss = F.cross_entropy(model(x[None]), t[None])
        first.append(float(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, retain_graph=True)]) @ u))
        second.append(float(u @ gradient_twice(loss, parameters) @ u))
    gradient = [abs(first[k] - sum(first[:k]) / k) for k in range(1, 6)]
    hessian = [abs(second[k] - sum(second[:k]) / k) for k in range(1, 6)]
    assert one.gradient_term == pytest.approx(1e-2 * sorted(gradient)[2], rel=1e-10)
    assert one.hessian_term == pytest.approx(0.5e-4 * sorted(hessian)[2], rel=1e-10)
    assert two.hessian_term == pytest.approx(4 * one.hessian_term, rel=1e-12)
    assert 6 < two.rest / one.rest < 10  # of third order
    assert one.rest < 0.2 * one.hessian_term
    assert one.correlation_both > 0.999999


def test_gradient_norms_and_the_minimum():
    spec = ImageSpec(patch=4, d_model=4, d_ff=6, activation="gelu")
    model = spec.model()
    tokens, labels = (x[:40] for x in spec.data())
    found = growing.gradient_norms(model, tokens, labels)
    for k in (1, 7, 40):
        slopes = torch.autograd.grad(F.cross_entropy(model(tokens[:k]), labels[:k]), list(model.parameters()))
        assert float(found[k - 1]) == pytest.approx(float(torch.cat([g.reshape(-1) for g in slopes]).norm()), rel=1e-12)
    lower = growing.moved(model, growing.converged(model, tokens, labels, 30))
    assert float(growing.losses(lower, tokens, labels).mean()) < 0.4 * float(growing.losses(model, tokens, labels).mean())
    assert torch.equal(growing.vector(model), growing.vector(spec.model()))  # the model itself is left alone


def test_the_bound_holds_and_loosens():
    near, far = (growing.bounded(5, 20, t) for t in (1e-4, 1e-2))
    assert near
    assert far
    assert near.distance == pytest.approx(1e-4)
    assert far.steps[-1].bound > 10 * near.steps[-1].bound
    block, inputs, targets = growing.bound_problem(5, 20)
    with torch.no_grad():
        errors = [float(F.mse_loss(block(x), t)) for x, t in zip(inputs, targets, strict=True)]
    expected = abs(errors[4] - sum(errors[:4]) / 4)
    assert near.steps[-1].loss_term == pytest.approx(expected, rel=1e-12)


def test_figures_6_and_12(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        curvature_gap_6_12, "measure", lambda out, *_, real=curvature_gap_6_12.measure: real(out, NANO, 20, 120, 12, 10, 4)
    )
    paths = curvature_gap_6_12.draw(tmp_path, quick=True)
    stem = "curvature_gap_6_12"
    assert [path.name for path in paths] == [
        f"{stem}{end}" for end in (".png", "_test.png", ".csv", "_test.csv", ".json", "_verdicts.json")
    ]
    slopes = [float(part.split()[-1]) for part in capsys.readouterr().out.partition("slopes ")[2].splitlines()[0].split(", ")]
    assert len(slopes) == 3
    assert all(abs(slope + 1) < 0.15 for slope in slopes)
    table = read(paths[2])
    assert table[0]["k"] == "1"
    model = NANO.model()
    tokens, labels = (x[:120] for x in NANO.data())
    with torch.no_grad():
        own = F.cross_entropy(model(tokens), labels, reduction="none")
    pairs = torch.cdist(own[:, None], own[:, None])  # |L_2 - L_1| = |l_2 - l_1| / 2, and all pairs are alike over the orders
    assert float(table[0]["untrained"]) == pytest.approx(float(pairs.sum() / (120 * 119) / 2), rel=0.25)


@pytest.mark.slow
def test_curvature_gap_3_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    closed_form = hessiankit.hessian

    def compared(module: torch.nn.Module, inputs: torch.Tensor, target: torch.Tensor, *, loss: str) -> hessiankit.Hessian:
        ours = closed_form(module, inputs, target, loss=loss)
        expected = gradient_twice(F.cross_entropy(module(inputs), target), list(module.parameters()))
        assert list(ours.names) == [name for name, _ in module.named_parameters()]
        assert (ours.matrix - expected).abs().max() <= 1e-12 * expected.abs().max()
        return ours

    monkeypatch.setattr(hessiankit, "hessian", compared)
    assert main(["curvature_gap_3_4", "--quick", "--out", str(tmp_path)]) == 0
    stems = [f"curvature_gap_3_4{part}" for part in ("", "_norms_after", "_growth")]
    files = [f"{stem}.{end}" for stem in stems for end in ("csv", "png")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["cache", "curvature_gap_3_4_verdicts.json", *files])
    assert "validation accuracy" in capsys.readouterr().out
    rows = read(tmp_path / "curvature_gap_3_4.csv")
    assert len(rows) == 2 * 16**2
    assert [row["column"] for row in rows[:16]][-2:] == ["head.W_C", "head.b_C"]
    frobenius: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        frobenius.setdefault((row["row"], row["column"]), []).append(float(row["frobenius"]))
    value = "blocks.0.attention.W_V"
    assert frobenius[value, value][1] > frobenius[value, value][0]
    spectral = {(r["row"], r["column"]): float(r["norm"]) for r in read(tmp_path / "curvature_gap_3_4_norms_after.csv")}
    for pair, (_, norm) in frobenius.items():
        assert spectral[pair] <= norm * (1 + 1e-8)
        assert spectral[pair] == pytest.approx(spectral[pair[::-1]], rel=1e-6)
