"""What figures share: files, kept answers, of which damaged ones are made anew, training runs, and the command that draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from figure_sizes import RUN

from figures import __main__ as command
from figures import _kit, _session
from figures._kit import cached
from figures._runs import byte_run
from figures._store import NOTHING, keep, recall
from hessiankit.support.errors import InputError
from papers.experiments.tuning.experiment import RunSpec, Setting, run


def test_an_answer_is_kept_until_its_key_or_the_code_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(len(made))
        return {"made": len(made), "pair": (1, 2)}

    first = cached(tmp_path, "x", RUN, make)
    assert first == cached(tmp_path, "x", RUN, make) == {"made": 1, "pair": [1, 2]}
    assert cached(tmp_path, "x", replace(RUN, seed=1), make)["made"] == 2
    monkeypatch.setattr(_kit, "code_version", lambda *names: "other code")
    assert cached(tmp_path, "x", RUN, make)["made"] == 3


def test_a_run_is_that_of_tune_lr(tmp_path: Path) -> None:
    setting = Setting(steps=12, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=4)
    found, reference = byte_run(RUN, tmp_path), run(RunSpec(setting, 0.01))
    assert found.steps == reference.steps == (0, 4, 8, 12)
    assert found.losses == reference.losses
    assert len(found.train_losses) == 12


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[:-9],
    "one bit": lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "other content": lambda content: b"[1, 2]",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_answer_is_set_aside_and_made_anew(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 6) == 6
    (path,) = tmp_path.glob("cache/*")
    damaged = DAMAGE[how](path.read_bytes())
    path.write_bytes(damaged)
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 6) == 6
    assert path.with_name(f"{path.name}.damaged").read_bytes() == damaged
    said = capsys.readouterr().err
    assert said.startswith(f"figures: {path} is damaged: ")
    assert said.endswith(f"; it is now {path.name}.damaged, and is made anew\n")
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 1 / 0) == 6


def test_an_answer_to_another_question_is_set_aside_where_its_name_is_of_one_alone(tmp_path: Path) -> None:
    keep(tmp_path / "a.pt", {"n": 4}, 7)
    assert recall(tmp_path / "a.pt", {"n": 3}, exclusive=False) is NOTHING
    assert recall(tmp_path / "a.pt", {"n": 4}) == 7
    assert recall(tmp_path / "a.pt", {"n": 3}) is NOTHING
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt.damaged"]


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Path], list[Path]]]:
    """Three figures that write an empty file each, to be replaced by the test."""

    def writing(name: str) -> Callable[[Path], list[Path]]:
        def draw(out: Path) -> list[Path]:
            (out / f"{name}.png").touch()
            return [out / f"{name}.png"]

        return draw

    draws = {name: writing(name) for name in ("one", "three", "two")}
    monkeypatch.setattr(command, "names", lambda: sorted(draws))
    monkeypatch.setattr(command, "summary", lambda name: f"Shows {name}.")
    monkeypatch.setattr(command, "script", lambda name: lambda out, quick, suffix: draws[name](out))
    monkeypatch.setattr(_session, "code_version", lambda *names: "code")
    return draws


def raising(error: BaseException) -> Callable[[Path], list[Path]]:
    def draw(out: Path) -> list[Path]:
        raise error

    return draw


def test_one_that_fails_is_named_and_the_others_are_drawn(
    three: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mended = three["three"]
    three["three"] = raising(InputError("a text: not there"))
    assert command.main(["--all", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "drawn: 2 of 3" in out
    assert err.endswith("failed: three: a text: not there\n")
    assert "Traceback" not in err
    assert {p.name for p in tmp_path.glob("*.png")} == {"one.png", "two.png"}
    three["three"], three["one"] = mended, raising(AssertionError("drawn again"))
    assert command.main(["--all", "--out", str(tmp_path)]) == 0
    assert "one: drawn before the interruption" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "three.png", "two.png"]
    assert command.main(["--all", "--out", str(tmp_path)]) == 1  # all were drawn: this is a new session, in which one fails
    assert capsys.readouterr().err.endswith("failed: one: AssertionError: drawn again\n")


def test_the_same_command_goes_on_after_ctrl_c(three: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mended, asked = three["three"], ["--all", "--out", str(tmp_path)]
    three["three"] = raising(KeyboardInterrupt())
    assert command.main(asked) == 130
    assert "goes on with three, two" in capsys.readouterr().err
    three["three"] = mended
    (tmp_path / "one.png").unlink()  # a file that is gone is drawn again
    assert command.main(asked) == 0
    assert "drawn before" not in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.png", "three.png", "two.png"]
