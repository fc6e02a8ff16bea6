"""Files that figures keep: damaged ones are set aside and made anew, nothing that is finished is lost, and errors are one line."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from figure_files import SMALL, measured

from figures import _digits, _store
from figures._digits import ImageSpec, snapshots
from figures._kit import cached
from figures._runs import ByteRun, byte_run
from figures._store import NOTHING, keep, put, recall, set_aside
from hessiankit.support.errors import InputError
from papers.experiments.training import train

pytestmark = pytest.mark.slow

NANO = ImageSpec(patch=4, d_model=4, d_ff=6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ByteRun:
    return byte_run(SMALL, tmp_path_factory.mktemp("whole"))


def same(one: ByteRun, other: ByteRun) -> bool:
    states = [(one.model(step).state_dict(), other.model(step).state_dict()) for step in (5, 12)]
    weights = all(torch.equal(a[name], b[name]) for a, b in states for name in a)
    return weights and (one.losses, one.train_losses, measured(one)) == (other.losses, other.train_losses, measured(other))


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
        assert said.count("\n") == 1
    assert cached(tmp_path, "sum", {"n": 3}, lambda: 1 / 0) == 6
    assert capsys.readouterr().err == ""


def test_an_answer_to_another_question_is_set_aside_where_its_name_is_of_one_alone(tmp_path: Path) -> None:
    keep(tmp_path / "a.pt", {"n": 4}, 7)
    assert recall(tmp_path / "a.pt", {"n": 3}, exclusive=False) is NOTHING
    assert recall(tmp_path / "a.pt", {"n": 4}) == 7
    assert recall(tmp_path / "a.pt", {"n": 3}) is NOTHING
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt.damaged"]


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(
        InputError, match=r"^figures: cannot read .*a\.pt: Is a directory; remove it, or pass another folder with --out$"
    ):
        recall(tmp_path / "a.pt", 1)
    assert recall(tmp_path / "none.pt", 1) is NOTHING
    keep(tmp_path / "b.pt", 1, "before")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        InputError, match=r"^figures: cannot write .*b\.pt: No space left on device; pass another folder with --out$"
    ):
        put(tmp_path / "b.pt", b"after")
    assert recall(tmp_path / "b.pt", 1) == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]
    monkeypatch.setattr(_store.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(InputError, match="Read-only file system; pass another folder"):
        set_aside(tmp_path / "b.pt", "of a test")


def test_a_finished_run_is_made_anew_where_its_file_is_damaged(
    whole: ByteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = byte_run(SMALL, tmp_path).folder / "run.pt"
    path.write_bytes(path.read_bytes()[:-20])
    assert same(byte_run(SMALL, tmp_path), whole)
    assert "run.pt is damaged: " in capsys.readouterr().err
    (path.parent / "monitor.jsonl").write_text("?")  # which the run's file holds too
    assert same(byte_run(SMALL, tmp_path, tell=lambda *_: pytest.fail("trained again")), whole)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_run_does_not_mind_where_it_is_called(context: Callable[[], Any], whole: ByteRun, tmp_path: Path) -> None:
    with context():
        found = byte_run(SMALL, tmp_path)
        models = {step: model.head.W_C.detach().clone() for step, model in snapshots(tmp_path, NANO, (0, 3))}
    assert same(found, whole)
    reference = NANO.model()
    train(reference, *NANO.data(), steps=3)
    assert torch.equal(models[3], reference.head.W_C)


def test_a_measurement_that_the_disk_refuses_ends_the_run(
    whole: ByteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, left = os.fsync, iter([True, True, True, False])

    def full(file: int) -> None:
        if not next(left):
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with (
            pytest.raises(InputError, match=r"^figures: cannot write .*monitor\.jsonl: it lacks step \d+; make room"),
            pytest.warns(),
        ):
            byte_run(SMALL, tmp_path)
    assert same(byte_run(SMALL, tmp_path), whole)


@pytest.mark.parametrize("step", [3, 7])
def test_a_damaged_snapshot_is_set_aside(step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = dict(snapshots(tmp_path, NANO, (3, 7)))[7].head.W_C
    (folder,) = tmp_path.glob("cache/digits-*")
    for content in (b"?", (folder / f"{10 - step}.pt").read_bytes()):  # the other is whole, and of other steps
        (folder / f"{step}.pt").write_bytes(content)
        assert torch.equal(dict(snapshots(tmp_path, NANO, (3, 7)))[7].head.W_C, expected)
        assert f"{step}.pt is damaged: " in capsys.readouterr().err


def test_ctrl_c_keeps_the_snapshots_that_were_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: Any, *data: Any, callback: Callable[[int, float], None], **options: Any) -> Any:
        def stop(step: int, loss: float) -> None:
            callback(step, loss)
            if step == 4:
                os.kill(os.getpid(), signal.SIGINT)

        return train(model, *data, **options, callback=stop)

    monkeypatch.setattr(_digits, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(snapshots(tmp_path, NANO, (3, 7)))
    assert [path.name for path in tmp_path.glob("cache/digits-*/*")] == ["3.pt"]
