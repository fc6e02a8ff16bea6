"""The study of block-diagonal curvature: its measures against masks and inverses, its command, and the committed result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hessiankit as hk
from hessiankit.support.files import fill
from papers.__main__ import main
from papers.block_diagonal import measures, optimiser, rare_words, study
from papers.block_diagonal.models import STAGES, Case, model_of, probe, trained

DOCS = Path(__file__).parents[2] / "docs"
SMALL = Case(6, layers=1, d_model=4, steps=60, sequences=2, length=4)
NUMBERS = torch.tensor([0, 1, 0, 2, 1, 1])


def curvature() -> Tensor:
    """A positive definite matrix without zeros."""
    A = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return A @ A.T


def test_measures_are_those_of_the_masked_matrix() -> None:
    A, partitions = curvature(), {"a": NUMBERS}
    D = torch.where(NUMBERS[:, None] == NUMBERS, A, 0.0)
    v = torch.linspace(-1, 2, 6, dtype=torch.float64)
    assert measures.shares(A, partitions)["a"] == pytest.approx(float(D.square().sum() / A.square().sum()), rel=1e-12)
    assert measures.kept(A, v, partitions)["a"] == pytest.approx(float((v @ D @ v) / (v @ A @ v)), rel=1e-12)
    assert measures.areas(partitions)["a"] == pytest.approx(14 / 36, rel=1e-12)
    x = measures.block_solve(A, NUMBERS, v, 0.5)
    assert torch.allclose(x, torch.linalg.solve(D + 0.5 * torch.eye(6), v), rtol=1e-10)
    largest = float(torch.linalg.eigvalsh(A)[-1])
    assert measures.top_pair(A)[0] == pytest.approx(largest, rel=1e-10)
    damping = measures.DAMPING * largest * torch.eye(6)
    exact, block = (torch.linalg.solve(M + damping, v) for M in (A, D))
    found = measures.step_errors(A, v, partitions, largest)
    assert found["cosine"]["a"] == pytest.approx(float(block @ exact / (block.norm() * exact.norm())), rel=1e-6)
    assert found["error"]["a"] == pytest.approx(float((block - exact).norm() / exact.norm()), rel=1e-6)


def test_streamed_measures_are_those_of_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, (_, model, adamw) = trained(SMALL)
    dense = measures.measured(model, adamw, *probe(SMALL), seed=0)
    monkeypatch.setattr(measures, "DENSE", 1)
    monkeypatch.setattr(measures, "PANEL_BYTES", 4000)
    streamed = measures.measured(model, adamw, *probe(SMALL), seed=0)
    assert max(dense["row_error"], streamed["row_error"]) < 1e-12
    assert streamed["matrices"].keys() == dense["matrices"].keys()
    for kind, found in streamed["matrices"].items():
        assert found.keys() == ({"share"} if "metric" in kind else {"share", "top"})
        for measure, by_partition in found.items():
            assert by_partition == pytest.approx(dense["matrices"][kind][measure], rel=1e-9)
        assert all(dense["area"][name] < found["share"][name] < 1 for name in ("neuron", "head", "tensor"))


@pytest.mark.parametrize("tied", [True, False])
def test_measures_without_the_rows_of_rare_words(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, vocabulary=40, tied=tied)
    *_, (_, model, adamw) = trained(case)
    dense = measures.measured(model, adamw, *probe(case), seed=0)
    monkeypatch.setattr(measures, "LARGE", 1)
    found = measures.measured(model, adamw, *probe(case), seed=0)
    assert found["row_error"] < 1e-12
    assert tuple(found["matrices"]) == ("hessian", "hessian in AdamW's metric")
    for kind, of_kind in found["matrices"].items():
        assert of_kind["share"] == pytest.approx(dense["matrices"][kind]["share"], rel=1e-9)


def test_a_wrong_row_is_refused() -> None:
    *_, (_, model, _) = trained(SMALL)
    x, y = probe(SMALL)
    H = hk.hessian(model, x, y, loss="cross_entropy").matrix
    rows, scale = measures.sampled_rows(model, 0), float(H.abs().max())
    exact = measures.exact_rows(model, x, y, "hessian", rows)
    assert measures.checked_error(H[rows], exact, scale) < 1e-12
    with pytest.raises(hk.InputError, match=r"rows differ from jvp\(grad\) by .* of the largest entry, above 1e-10"):
        measures.checked_error(H[rows] + 1e-9 * scale, exact, scale)
    numbers = torch.arange(len(H))
    norms = hk.frobenius_norms(model, x, y, loss="cross_entropy", by=lambda module, _: {name: name for name in entries(module)})
    assert measures.norms_error(norms, numbers, rows, exact) < 1e-12
    with pytest.raises(hk.InputError, match=r"rows differ from jvp\(grad\)"):
        measures.norms_error(norms, numbers, rows, exact + 1e-9 * scale * exact.sign())


def entries(model: torch.nn.Module) -> list[str]:
    """Names of all entries of the parameters in their order."""
    return [f"{n}[{', '.join(map(str, at))}]" for n, p in model.named_parameters() for at in measures._indices(p.shape)]


def test_the_metric_is_that_of_the_optimizer() -> None:
    """Shares of the matrix with respect to u, theta = P^(-1/2) u, P from AdamW's state by hand."""
    stages = trained(SMALL)
    next(stages)
    _, model, adamw = next(stages)
    x, y = probe(SMALL)
    found = measures.measured(model, adamw, x, y, seed=0)["matrices"]["hessian in AdamW's metric"]["share"]["tensor"]
    state = [adamw.state[p] for p in model.parameters()]
    v = torch.cat([(s["exp_avg_sq"] / (1 - 0.95 ** float(s["step"]))).reshape(-1) for s in state])
    scale = (v.sqrt() + 1e-8).rsqrt()
    A = scale[:, None] * hk.hessian(model, x, y, loss="cross_entropy").matrix * scale
    sizes = [p.numel() for p in model.parameters()]
    blocks = [rows.split(sizes, 1)[n] for n, rows in enumerate(A.split(sizes))]
    assert found == pytest.approx(sum(float(b.square().sum()) for b in blocks) / float(A.square().sum()), rel=1e-9)


def test_every_arm_starts_alike_and_descends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimiser, "HELD_OUT", 2)
    found = optimiser.losses(replace(SMALL, steps=2))
    assert tuple(found) == optimiser.ARMS
    assert len({values[0] for values in found.values()}) == 1
    model, (x, y) = model_of(SMALL), probe(SMALL)
    before = optimiser.loss_of(model, x, y)
    for arm in optimiser.ARMS[:-1]:
        one = model_of(SMALL)
        optimiser.gauss_newton_step(one, x, y, (x, y), arm)
        assert optimiser.loss_of(one, x, y) < before


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Few(study.Preset):
        def cases(self) -> list[Case]:
            return [replace(SMALL, seed=seed) for seed in range(2)]

    monkeypatch.setitem(study.PRESETS, "tiny", Few((6,), (1,), (), 4, 60, 2, 1, 0))
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- runs -->old<!-- /runs -->\n")
    command = [
        "block-diagonal",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
        "--data",
        str(tmp_path / "a.json"),
        "--markdown",
        str(page),
    ]
    assert main(command) == 0
    assert "2 runs of the preset tiny" in capsys.readouterr().out
    report = study.read(tmp_path / "a.json")
    values = report.values(SMALL, STAGES[-1], "hessian", "share", "neuron")
    assert len(set(values)) == 2
    mean = sum(values) / 2
    assert f"{mean:.2f} ± " in page.read_text()
    lines = (tmp_path / "tiny.jsonl").read_text()
    assert main(command) == 0
    assert (tmp_path / "tiny.jsonl").read_text() == lines  # nothing was computed anew


def test_a_study_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Cases by vocabulary, as many as fit in some hours; a dry run says what is missing."""

    class Few(study.Preset):
        def cases(self) -> list[Case]:
            return [replace(SMALL, vocabulary=vocabulary, seed=seed) for vocabulary in (6, 8) for seed in range(2)]

    monkeypatch.setitem(study.PRESETS, "tiny", Few((6, 8), (1,), (), 4, 60, 2, 1, 0))
    command = ["block-diagonal", "--jobs", "1", "--out", str(tmp_path), "--words"]
    assert main([*command, "8", "--hours", "0"]) != 0
    assert "no case fits in hours=0 and none is finished" in capsys.readouterr().err
    one = study.forecast(study.Task("curvature", replace(SMALL, vocabulary=8))) / 3600
    assert main([*command, "8", "--hours", str(1.5 * one)]) == 0
    assert "1 runs of the preset tiny" in capsys.readouterr().out
    assert main([*command, "8", "--dry-run"]) == 0
    size = sum(p.numel() for p in model_of(replace(SMALL, vocabulary=8)).parameters())
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("curvature"))
    assert row == ["curvature", "8", "tied", "1", str(size), "2", "1", f"{one:.2f}"]
    assert main([*command, "8", "--hours", "0"]) == 0
    assert len((tmp_path / "tiny.jsonl").read_text().splitlines()) == 1


def test_the_page_is_of_the_committed_measures() -> None:
    stored: Any = json.loads((DOCS / "block_diagonal.json").read_text(encoding="utf-8"))
    report = study.read(DOCS / "block_diagonal.json")
    tasks = {*(r.task.case for r in report.results if r.task.what == "curvature")}
    assert tasks == set(study.PRESETS[stored["preset"]].cases())
    assert report.row_error < measures.TOLERANCE
    page = (DOCS / "block_diagonal.md").read_text(encoding="utf-8")
    assert fill(page, study.sections(report)) == page


LARGER = {
    "block_diagonal_small.json": {"larger-runs", "larger-hessian-share", "larger-losses"},
    "block_diagonal_paper.json": {"paper-runs", "paper-hessian-share", "paper-adamw-share"},
}


@pytest.mark.parametrize("name", LARGER)
def test_the_page_is_of_the_committed_measures_of_larger_models(name: str) -> None:
    page, report = (DOCS / "block_diagonal.md").read_text(encoding="utf-8"), study.read(DOCS / name)
    assert {r.task.case for r in report.results if r.task.what == "curvature"} <= set(study.PRESETS[report.preset].cases())
    assert report.row_error < measures.TOLERANCE
    sections = study.sections(report)
    assert set(sections) == LARGER[name]
    assert all(f"<!-- {section} -->\n{text}\n<!-- /{section} -->" in page for section, text in sections.items())


def test_squares_without_rare_words_are_those_of_the_masked_matrix() -> None:
    case = replace(SMALL, vocabulary=40, steps=5)
    *_, (_, model, adamw) = trained(case)
    x, y = probe(case)
    hessian, scale = hk.hessian(model, x, y, loss="cross_entropy"), measures.metric_scale(model, adamw)
    assert scale is not None
    squares = (hessian.matrix * scale * scale.unsqueeze(1)).square()
    seen = rare_words.times_seen(case).tolist()
    partitions = measures.partition_labels(hk.hessian_operator(model, x, y, loss="cross_entropy"), model)
    start, kept_of = hessian.slices["embedding.W_E"].start, {}
    for least in (0, 12):
        kept = torch.ones(len(squares), dtype=torch.bool)
        for word in range(case.vocabulary):
            rows = slice(start + 4 * word, start + 4 * word + 4)
            kept[rows] = word in x and seen[word] >= least
        kept_of[least] = kept
    assert kept_of[12].sum() < kept_of[0].sum() < len(squares)
    for least, found in zip(kept_of, rare_words.shares_without(case, (0, 12)), strict=True):
        kept = kept_of[least]
        some = squares[kept][:, kept]
        assert found["squares"] == pytest.approx(float(some.sum() / squares[kept_of[0]][:, kept_of[0]].sum()), rel=1e-10)
        for name, numbers in partitions.items():
            mask = numbers[kept].unsqueeze(1) == numbers[kept]
            assert found[name] == pytest.approx(float(some[mask].sum() / some.sum()), rel=1e-10)
    assert len(rare_words.summary(case, (0, 1)).rows) == len(rare_words.LEAST)
