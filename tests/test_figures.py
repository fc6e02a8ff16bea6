"""The figures' command line and the scripts behind it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hessiankit
from figures import names, summary
from figures.__main__ import main


def test_every_script_says_what_it_shows() -> None:
    assert "curvature_gap_3_4" in names()
    assert all(summary(name).endswith(".") for name in names())


def test_list_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert "curvature_gap_3_4 Figures 3 and 4 of Closing the Curvature Gap" in " ".join(capsys.readouterr().out.split())
    for arguments, message in ((["nothing"], "no figure is called nothing; there are: "), ([], "name a figure, or pass --all")):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_list_as_a_module_needs_no_toolkit() -> None:
    code = "import sys; from figures.__main__ import main; main(['--list']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parent.parent)


def reverse_over_reverse(module: nn.Module, inputs: Tensor, target: Tensor, *, loss: str) -> SimpleNamespace:
    assert loss == "cross_entropy"
    parameters = dict(module.named_parameters())
    value = nn.functional.cross_entropy(module(inputs), target)
    gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(value, list(parameters.values()), create_graph=True)])
    directions = torch.eye(len(gradient), dtype=gradient.dtype).split(64)
    rows = [torch.autograd.grad(gradient, list(parameters.values()), d, True, is_grads_batched=True) for d in directions]
    ends = torch.tensor([p.numel() for p in parameters.values()]).cumsum(0).tolist()
    slices = {name: slice(end - p.numel(), end) for (name, p), end in zip(parameters.items(), ends, strict=True)}
    return SimpleNamespace(
        matrix=torch.cat([torch.cat([g.flatten(1) for g in r], 1) for r in rows]), names=list(parameters), slices=slices
    )


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_curvature_gap_3_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    closed_form = getattr(hessiankit, "hessian", reverse_over_reverse)

    def compared(module: nn.Module, inputs: Tensor, target: Tensor, *, loss: str) -> Any:
        ours, theirs = (compute(module, inputs, target, loss=loss) for compute in (closed_form, reverse_over_reverse))
        assert list(ours.names) == theirs.names
        assert (ours.matrix - theirs.matrix).abs().max() <= 1e-12 * theirs.matrix.abs().max()
        return ours

    monkeypatch.setattr(hessiankit, "hessian", compared, raising=False)
    assert main(["curvature_gap_3_4", "--quick", "--out", str(tmp_path)]) == 0
    stems = [f"curvature_gap_3_4{part}" for part in ("", "_to_scale", "_norms_before", "_norms_after")]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["cache", *(f"{s}.{e}" for s in stems for e in ("csv", "png"))])
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
