"""What figures share: files, kept answers, of which damaged ones are made anew, training runs, and the command that draws them."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from figure_sizes import RUN

from figures import __main__ as command
from figures import _kit, _session
from figures._kit import cached, page, save, style, write_json, write_rows
from figures._runs import byte_run
from figures._store import NOTHING, keep, put, recall
from hessiankit.support.errors import InputError
from papers.experiments.tuning.experiment import RunSpec, Setting, run


def test_rows_need_the_same_keys_and_somewhere_to_go(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows with different keys"):
        write_rows(tmp_path / "t.csv", [{"a": 1}, {"b": 1}])
    with pytest.raises(InputError, match="no rows"):
        write_rows(tmp_path / "t.csv", [])
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*; pass another folder"):
        write_rows(tmp_path / "file" / "t.csv", [{"a": 1}])


def test_json_has_no_infinite_number(tmp_path: Path) -> None:
    path = write_json(tmp_path / "deep" / "t.json", {"loss": math.inf, "spec": RUN})
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["loss"] is None
    assert found["spec"]["kept"] == [5]
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]


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


def test_pictures_have_the_same_bytes_each_time(tmp_path: Path) -> None:
    def drawn(name: str, look: Callable[[], Any] = style) -> bytes:
        with look():
            figure = page(2.0, 1.0)
            figure.add_subplot().plot([0, 1], [0, 1], "o", clip_on=True)
            return save(figure, tmp_path / name).read_bytes()

    for suffix in (".png", ".svg", ".pdf"):
        for look in (style, nullcontext):
            assert drawn(f"a{suffix}", look) == drawn(f"b{suffix}", look)
    with pytest.raises(InputError, match=r"ends in \.png, \.svg, \.pdf"):
        drawn("a.gif")


def test_a_run_is_that_of_tune_lr(tmp_path: Path) -> None:
    setting = Setting(steps=12, batch_size=2, length=8, layers=1, d_model=8, heads=2, evaluations=3, windows=4)
    found, reference = byte_run(RUN, tmp_path), run(RunSpec(setting, 0.01))
    assert found.steps == reference.steps == (0, 4, 8, 12)
    assert found.losses == reference.losses
    assert len(found.train_losses) == 12


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    found = byte_run(replace(RUN, lr=1e30, every=0, kept=()), tmp_path)
    assert found.diverged
    assert found.losses[-1] == math.inf
    assert len(found.losses) == 4
    assert not byte_run(replace(RUN, every=0), tmp_path).diverged


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda content: content[:-9],
    "empty": lambda content: b"",
    "one bit": lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
    "other content": lambda content: b"[1, 2]",
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_answer_is_set_aside_and_made_anew(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 6) == 6
    (path,) = tmp_path.glob("cache/*")
    damaged = DAMAGE[how](path.read_bytes())
    for attempt in (f"{path.name}.damaged", f"{path.name}.damaged-2"):
        path.write_bytes(damaged)
        assert cached(tmp_path, "sum", {"n": 3}, lambda: 6) == 6
        assert path.with_name(attempt).read_bytes() == damaged
        said = capsys.readouterr().err
        assert said.startswith(f"figures: {path} is damaged: ")
        assert said.endswith(f"; it is now {attempt}, and is made anew\n")
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 1 / 0) == 6


def test_an_answer_to_another_question_is_set_aside_where_its_name_is_of_one_alone(tmp_path: Path) -> None:
    keep(tmp_path / "a.pt", {"n": 4}, 7)
    assert recall(tmp_path / "a.pt", {"n": 3}, exclusive=False) is NOTHING
    assert recall(tmp_path / "a.pt", {"n": 4}) == 7
    assert recall(tmp_path / "a.pt", {"n": 3}) is NOTHING
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt.damaged"]


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(InputError, match=r"^figures: cannot read .*a\.pt: Is a directory; remove it, or pass another folder"):
        recall(tmp_path / "a.pt", 1)
    keep(tmp_path / "b.pt", 1, "before")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match=r"^figures: cannot write .*b\.pt: No space left on device; pass another folder"):
        put(tmp_path / "b.pt", b"after")
    assert recall(tmp_path / "b.pt", 1) == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_run_does_not_mind_where_it_is_called_and_is_made_anew_where_its_file_is_damaged(
    context: Callable[[], Any], tmp_path: Path
) -> None:
    whole = byte_run(RUN, tmp_path / "whole")
    with context():
        assert byte_run(RUN, tmp_path).losses == whole.losses
    path = byte_run(RUN, tmp_path).folder / "run.pt"
    path.write_bytes(path.read_bytes()[:-20])
    again = byte_run(RUN, tmp_path)
    (path.parent / "monitor.jsonl").write_text("?")  # which the run's file holds too
    kept = byte_run(RUN, tmp_path, tell=lambda *_: pytest.fail("trained again"))
    for made in (again, kept):
        assert (made.losses, made.train_losses) == (whole.losses, whole.train_losses)
        assert all(torch.equal(p, q) for p, q in zip(made.model(5).parameters(), whole.model(5).parameters(), strict=True))
        assert made.log is not None
        assert made.log.steps.tolist() == whole.log.steps.tolist()


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
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("failed: one: AssertionError: drawn again\n")


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
    three["three"] = raising(KeyboardInterrupt())
    assert command.main(asked) == 130
    three["three"], three["one"] = mended, raising(AssertionError("drawn again"))
    assert command.main([*asked, "--quick"]) == 1  # another command: nothing of the first one counts


def test_a_folder_that_cannot_be_written_is_said_at_once(
    three: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        command.main(["one", "--out", str(tmp_path / "file")])
    assert "cannot write to" in capsys.readouterr().err
