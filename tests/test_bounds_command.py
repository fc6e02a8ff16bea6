"""``hessiankit bounds``: what it prints, writes and refuses."""

from __future__ import annotations

import json

import pytest

from hessiankit.cli.main import main


def test_table_and_json(capsys, tmp_path):
    path = tmp_path / "bounds.json"
    given = ["--placement", "hybridnorm", "--heads", "2", "--kv-heads", "1", "--tokens", "2", "--loss", "cross_entropy"]
    assert main(["bounds", *given, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "attention.W_Q x attention.W_K" in printed
    assert "a priori" in printed
    found = json.loads(path.read_text())
    assert found["whole"]["true"] <= found["whole"]["structured"] <= found["whole"]["a_priori"]
    assert len(found["pairs"]) == len(found["names"]) * (len(found["names"]) + 1) // 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--placement", "hybrid"], "hybridnorm"),
        (["--loss", "hinge"], "hinge"),
        (["--json", "/no/such/folder/x.json"], "cannot write"),
        (["--attack", "3"], "--tokens does not go with --attack"),
    ],
)
def test_errors(capsys, given, message):
    assert main(["bounds", "--tokens", "2", *given]) == 2
    assert message in capsys.readouterr().err
