"""``hessiankit sharpness``: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hessiankit.cli.main import main

SMALL = """
import torch
from hessiankit import Transformer
def model(): return Transformer(256, 8, 16, 2, n_heads=2, causal=True, max_len=16)
def odd(): return torch.nn.Sequential(torch.nn.Embedding(256, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 256))
"""
QUICK = ["--batch", "2", "--length", "8", "--draws", "3"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small_models.py").write_text(SMALL)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    monkeypatch.chdir(tmp_path)


def run(*given: str, code: int = 0) -> None:
    assert main(["sharpness", *QUICK, *given]) == code


def test_tables_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    run("--model", "small_models:model", "--text", "text.txt", "--layers", "--tensors", "--json", "out.json")
    printed = capsys.readouterr().out
    assert "small_models:model: Transformer" in printed
    assert "torch seeded with 0" in printed
    assert "S by layer and type" in printed
    assert "blocks.1.attention.W_Q" in printed
    found = json.loads(Path("out.json").read_text())
    assert set(found["sharpness"]["types"]) >= {"Emb", "QK", "VO", "FFN", "Norm"}
    assert found["sharpness"]["draws"] == 3
    assert found["sharpness"]["terms"] == 16
    assert found["exact"] is None
    assert found["sharpness"]["histograms"] == {}
    for one in found["sharpness"]["types"].values():
        assert one["low"] <= one["value"] <= one["high"]
        assert f"{one['value']:.4g}" in printed


def test_exact_values_stand_beside_the_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "small_models:model", "--text", "text.txt", "--dtype", "float64", "--exact", "--json", "out.json"]
    run(*given, "--draws", "40", "--micro-batch", "1", "--histograms")
    assert "beside the exact Gauss-Newton trace" in capsys.readouterr().out
    found = json.loads(Path("out.json").read_text())
    assert found["sharpness"]["histograms"].keys() == found["sharpness"]["types"].keys()
    for kind, one in found["sharpness"]["types"].items():
        assert abs(one["value"] - found["exact"]["types"][kind]["value"]) <= 5 * one["standard_error"]


def test_a_seed_decides_all() -> None:
    values = []
    for more in ((), (), ("--seed", "1")):
        run("--model", "small_models:model", "--text", "text.txt", "--json", "out.json", *more)
        values.append(
            {kind: one["value"] for kind, one in json.loads(Path("out.json").read_text())["sharpness"]["types"].items()}
        )
    assert values[0] == values[1] != values[2]


def test_types_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    run("--model", "small_models:odd", "--text", "text.txt", "--type", r"^1\.=FFN", "--type", r"^2\.=Head")
    assert "Head" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--length", "17"], "the sequence has 17 tokens and there are 16 learned positions"),
        (["--type", "router"], "expected REGEX=TYPE"),
        (["--type", "router=MoE"], "MoE"),
    ],
)
def test_errors(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("--model", "small_models:model", "--text", "text.txt", *given, code=2)
    assert message in capsys.readouterr().err


def test_one_draw_beside_exact_values_is_neither_inside_nor_outside(capsys: pytest.CaptureFixture[str]) -> None:
    run("--model", "small_models:model", "--text", "text.txt", "--draws", "1", "--exact", "--tensors")
    told = capsys.readouterr().out
    assert "nan" not in told
    beside = told[told.index("beside the exact") :].splitlines()
    assert next(line for line in beside if line.startswith("QK ")).split()[3:] == ["n.a.", "n.a."]
