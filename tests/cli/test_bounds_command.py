"""``hessiankit bounds``: what it prints, writes and refuses; a bound of one's own."""

from __future__ import annotations

import json

import pytest

from hessiankit.cli.main import main
from hessiankit.theory.bounding.bounds import BOUNDS, Bound


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


def test_a_bound_of_ones_own_is_one_function(monkeypatch, capsys):
    """Registered, it is a column, a key of the JSON, and a line of --list-bounds."""

    def half_the_norm(at):
        """Half the norm, which is no bound."""
        return at.hessian.spectral_norm() / 2, {}

    monkeypatch.setitem(BOUNDS, "half", Bound("half", half_the_norm, of_matrix=True, caveat="it is no bound"))
    assert main(["bounds", "--tokens", "2", "--d-model", "2", "--d-ff", "1", "--json", "-"]) == 1  # a bound is exceeded
    found, report = capsys.readouterr()
    assert json.loads(found)["violated"][0] == ["whole", "half", pytest.approx(2.0)]
    assert "VIOLATED" in report
    assert "half: it is no bound" in report
    with pytest.raises(SystemExit, match="0"):
        main(["bounds", "--list-bounds"])
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in listed] == [name.replace("_", " ") for name in BOUNDS]
    assert "half: Half the norm, which is no bound." in listed
