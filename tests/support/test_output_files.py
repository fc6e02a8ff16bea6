"""Pictures, tables and reports on a full disk: one line that names the file, and nothing that was there before is lost."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import hessiankit as hk
from hessiankit.curvature.plot_frame import write_picture
from hessiankit.curvature.plots import write_numbers
from hessiankit.support.files import STDOUT, output_for, write_text

FULL = OSError(errno.ENOSPC, "No space left on device")


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writing files fail half-way."""
    write = Path.write_bytes

    def torn(path: Path, content: bytes) -> None:
        write(path, content[: len(content) // 2])
        raise FULL

    monkeypatch.setattr(Path, "write_bytes", torn)


def test_a_picture_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new folder" / "a.png"
    write_picture("plots", Figure(), path)
    before = path.read_bytes()
    full_disk(monkeypatch)
    with pytest.raises(hk.InputError, match=r"^plots: cannot write .*a\.png: No space left on device; name a file"):
        write_picture("plots", Figure(figsize=(1, 1)), path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a.png"]


def test_a_table_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "t.csv", ("a", "b"), [(1, 2)])
    full_disk(monkeypatch)
    with pytest.raises(hk.InputError, match=r"cannot write .*t\.csv: No space left"):
        write_numbers(path, ("a", "b"), [(3, 4)])
    assert path.read_text() == "a,b\n1,2\n"


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(hk.InputError, match=r"cannot make the folder .*taken: File exists; name another one"):
        write_picture("plots", Figure(), tmp_path / "taken" / "a.svg")


def test_prints_go_to_standard_error_where_the_output_is_reserved(capsys: pytest.CaptureFixture[str]) -> None:
    """A table printed on the way does not end up in a file named ``-``."""
    with output_for([STDOUT]):
        print("on the way")
        write_text("plots", STDOUT, "the file\n")
    assert capsys.readouterr() == ("the file\n", "on the way\n")
