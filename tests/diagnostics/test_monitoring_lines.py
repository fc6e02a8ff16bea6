"""The file of a monitor: torn lines, full disks, other writers, files that are something else."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

import hessiankit as hk
from hessiankit.diagnostics.monitoring.lines import FORMAT, KEY, Lines, read_lines

HEADER = {"model": "Linear", "options": {"seed": 0}, "environment": {"torch": "2"}}


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_lines(path)[1]]


def made(path: Path, *measured: int) -> Lines:
    lines = Lines(path, HEADER)
    for step in measured:
        lines.append({"step": step})
    return lines


def test_a_torn_last_line_is_dropped_and_nothing_else(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    made(path, 0, 10)
    whole = path.read_bytes()
    for kept in range(len(whole) - 1, len(whole) - len(b'{"step":10}\n') - 1, -1):  # killed after any number of bytes
        path.write_bytes(whole[:kept])
        assert steps(path) == [0]
        lines = Lines(path, HEADER)
        assert lines.last == 0
        lines.append({"step": 10})
        assert path.read_bytes() == whole


def test_an_environment_may_change_and_the_first_one_stays(tmp_path):
    path = tmp_path / "run.jsonl"
    made(path, 5)
    Lines(path, {**HEADER, "environment": {"torch": "3"}})
    assert read_lines(path)[0]["environment"] == {"torch": "2"}
    with pytest.raises(hk.InputError, match=r"is of another run: options\['seed'\] is 0 there, 1 here\. Name another file"):
        Lines(path, {**HEADER, "options": {"seed": 1}})


def test_going_back_takes_nothing_out_of_the_file(tmp_path):
    lines = made(tmp_path / "run.jsonl", 0, 10, 20, 30)
    lines.rewind(31)
    before = lines.path.read_bytes()
    lines.rewind(20)
    assert lines.path.read_bytes() == before  # until there is something to write
    lines.append({"step": 20, "again": True})
    assert read_lines(lines.path)[1] == [{"step": 0}, {"step": 10}, {"step": 20, "again": True}]
    lines.rewind(15)
    lines.append({"step": 15})
    assert steps(lines.path) == [0, 10, 15]
    own = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [one.get("step", one.get("rewind")) for one in own[1:]] == [0, 10, 20, 30, 20, 20, 15, 15]
    assert own[0][KEY] == FORMAT
    assert Lines(lines.path, HEADER).last == 15
    lines.rewind(0)
    lines.append({"step": 0})
    assert steps(lines.path) == [0]


def test_a_full_disk_loses_nothing(tmp_path):
    lines = made(tmp_path / "run.jsonl", 0)
    before = lines.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))  # room for a part of the line
    try:
        with pytest.raises(hk.InputError, match=r"All earlier measurements are safe; make room: the measurement is kept"):
            lines.append({"step": 10})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert lines.path.read_bytes() == before
    lines.append({"step": 20})
    assert steps(lines.path) == [0, 10, 20]


def test_another_writer_is_noticed(tmp_path):
    first, second = made(tmp_path / "run.jsonl", 0), Lines(tmp_path / "run.jsonl", HEADER)
    second.append({"step": 10})
    with pytest.raises(hk.InputError, match="is not as this monitor left it"):
        first.append({"step": 10})
    assert steps(first.path) == [0, 10]
    second.path.unlink()
    with pytest.raises(hk.InputError, match="put the file back"):
        second.append({"step": 20})


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run.jsonl", tmp_path):
        with pytest.raises(hk.InputError, match=r"monitor: cannot (write|read) .*; name a file"):
            Lines(path, HEADER)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,loss\n0,1\n", "line 1 of .* is not the header of a monitor"),
        ("{}\n", "was not written by a Monitor"),
        ('{"hessiankit_monitor": 9}\n', "has format 9; expected 'hessiankit_monitor': 1"),
        ('{"hessiankit_monitor": 1}\n{"step": 1}\nrubbish\n{"step": 2}\n', "line 3 of .* is damaged"),
        ('{"hessiankit_monitor": 1}\n{"loss": 1}\n', "line 2 of .* is damaged"),
        ("no end of line", "was not written by a Monitor"),
    ],
)
def test_files_that_are_something_else_are_refused_and_kept(tmp_path, content, message):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(hk.InputError, match=message):
        Lines(path, HEADER)
    assert path.read_text() == content
    with pytest.raises(hk.InputError, match="No such file"):
        read_lines(tmp_path / "none.jsonl")
