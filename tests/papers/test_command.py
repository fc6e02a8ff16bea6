"""``python -m papers``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hessiankit.cli import program as exit_codes
from hessiankit.cli.main import main as hessiankit_main
from hessiankit.cli.program import with_dashes
from papers import claims
from papers.__main__ import app, main
from papers.experiments import placements, tune_lr


def test_the_statements_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["id"], row["verdict"]) for row in rows] == [(row.id, row.verdict) for row in claims()]


@pytest.mark.parametrize("command", ["run --id hybridnorm/eq20", "show hybridnorm/eq19"])
def test_verdicts_as_json(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for seed in ("0", "1"):
        assert main([*shlex.split(command), "--seed", seed, "--json", str(tmp_path / "rows.json")]) == 0
        (row,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
        assert row["id"].startswith("hybridnorm/")
        assert row["verdict"] in capsys.readouterr().out
        assert row["reproduced"] is True


def test_printed_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Theorem 6 beside the numbers of ``hessiankit bounds --no-affine``; Theorem 1 with --attention."""
    files = [tmp_path / name for name in ("valid.json", "block.json", "attention.json")]
    assert hessiankit_main(["bounds", "--no-affine", "--tokens", "2", "--json", str(files[0])]) == 0
    assert main(["bounds", "--tokens", "2", "--json", str(files[1])]) == 0
    assert main(["bounds", "--tokens", "2", "--attention", "--json", str(files[2])]) == 0
    assert "printed theorem 6" in capsys.readouterr().out
    valid, block, attention = (json.loads(path.read_text(encoding="utf-8"))["whole"] for path in files)
    assert {kind: value for kind, value in block.items() if not kind.startswith("printed")} == valid
    assert block.keys() - valid.keys() == {"printed_theorem_6", "printed_theorem_6_proof"}
    assert attention.keys() - valid.keys() == {"printed_theorem_1", "printed_theorem_1_appendix"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("list --verdict wrong", "verdict='wrong' is not known; did you mean 'WRONG AS PRINTED'?"),
        ("list --paper hybrid", 'Did you mean "hybridnorm"?'),
        ("run --id nothing", "id='nothing' is not known; all"),
        ("show nothing", "'nothing' is not known; all"),
        ("show hybridnorm/eq1*", "show takes one of them"),
        ("list --markdown no/such/a.md", "there is no folder no/such"),
        ("placements --placement hybrid", "placements: placement='hybrid' is not known; did you mean 'hybridnorm'"),
        ("tune-lr --quick --text nowhere", "tune-lr: 'nowhere' is neither"),
        ("tune-lr --grid -1 2", 'tune-lr: Invalid value "-1.0" for --grid. Must be > 0.'),
    ],
)
def test_what_cannot_be_used_is_one_line(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(given)) == exit_codes.USAGE
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("example", [command for one in (placements, tune_lr) for command, _ in one.EXAMPLES])
def test_examples_parse(example: str) -> None:
    assert example.startswith("python -m papers ")
    words = shlex.split(example)[3:]
    assert app().parse_args(with_dashes(words), exit_on_error=False, print_error=False)[1].arguments
