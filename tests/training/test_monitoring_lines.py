"""The file of a monitor: torn lines, full disks, other writers, files that are something else; what is read back and drawn."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from monitoring_cases import Noisy, pair, train

import hessiankit as hk
from hessiankit.cli.main import main
from hessiankit.training.monitoring import Monitor, MonitorLog
from hessiankit.training.monitoring.lines import FORMAT, KEY, Lines, read_lines

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
    header = whole[: whole.index(b"\n") + 1]
    for kept in (0, len(header) - 1, len(header)):
        path.write_bytes(header[:kept])
        assert Lines(path, HEADER).last is None
        assert path.read_bytes() == header


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


ALL = ("variance", "angles", "drop", "jacobian", "hessian", "ggn")
PART = {"name": "w", "type": "FFN", "role": "up", "layer": 0, "size": 2}
RUN = {"model": "Linear", "entries": 4, "parts": [PART, {**PART, "name": "g", "type": "Norm"}], "options": {}}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A short run, with everything measured."""
    found = tmp_path_factory.mktemp("monitor") / "run.jsonl"
    torch.manual_seed(0)
    model = Noisy(layers=3)
    what = {"norms": {}, "sharpness": {"draws": 2}, "eigenvalue": {}, "depth": {"what": ALL}}
    train(model, 1, Monitor(model, pair(rows=1), found, every=1, what=what))
    return found


def by_hand(path: Path) -> Path:
    """A file whose numbers can be told beforehand: a type that crosses another one, a step without, a number that is not finite."""
    lines = Lines(path, RUN)
    for step, flat, sharp in ((0, 1.0, 3.0), (10, 5.0, 4.0)):
        types = {"FFN": {"value": flat, "low": flat / 2, "high": 2 * flat}, "Norm": {"value": sharp, "low": 2.5, "high": 9.0}}
        sharpness = {"types": types, "ordering": "FFN < Norm" if step == 0 else "Norm ~ FFN"}
        lines.append(
            {"step": step, "loss": 2.0, "sharpness": sharpness, "norms": {"total": 5.0, "types": {"FFN": 3.0, "Norm": 4.0}}}
        )
    lines.append({"step": 20, "loss": float("inf"), "errors": {"sharpness": "InputError: not finite"}})
    return path


def test_numbers_by_step(tmp_path):
    log = MonitorLog.read(by_hand(tmp_path / "run.jsonl"))
    assert log.steps.tolist() == [0, 10, 20]
    assert log.types == ("FFN", "Norm")
    np.testing.assert_array_equal(log.sharpness["FFN"].high, [2.0, 10.0, np.nan])
    np.testing.assert_array_equal(log.norms["Norm"], [4.0, 4.0, np.nan])
    np.testing.assert_array_equal(log.series("loss"), [2.0, 2.0, np.inf])
    assert log.orders == {0: ("FFN", "Norm"), 10: ("Norm", "FFN")}
    assert log.errors == {20: {"sharpness": "InputError: not finite"}}
    assert not log.has("eigenvalue")
    with pytest.raises(hk.InputError, match=r"depth / stream of .*: no measurement has it"):
        log.series("depth", "stream")
    lines = [line.split() for line in str(log).splitlines()]
    assert str(log).startswith("Linear, 4 parameters; measurements: 3, steps 0 to 20")
    assert ["0", "FFN", "<", "Norm", "2", "5"] in lines
    assert ["10", "Norm", "~", "FFN", "2", "5"] in lines
    assert ["20", "inf"] in lines
    assert str(log).endswith("step 20: sharpness failed: InputError: not finite")
    assert "Norm ~ FFN" in log._repr_html_()


@pytest.mark.usefixtures("few_pixels")
def test_what_is_drawn_are_the_numbers_of_the_file(path, tmp_path):
    log = MonitorLog.read(path)
    panels = {axes.get_title(loc="left"): axes for axes in log.plot(tmp_path / "new" / "run.png").axes}
    assert (tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")
    assert len([title for title in panels if title]) == 10
    sharpness = panels["average sharpness, with its intervals"]
    drawn = [line.get_ydata() for line in sharpness.lines]
    for expected, seen in zip(log.sharpness.values(), drawn, strict=True):
        np.testing.assert_array_equal(expected.value, seen)
    assert {text.get_text() for text in sharpness.texts} == set(log.sharpness)
    bands = [band.get_paths()[0].get_extents() for band in sharpness.collections]
    for expected, band in zip(log.sharpness.values(), bands, strict=True):
        assert band.y1 == pytest.approx(expected.high.max())
    angles = panels["angular distance $d(x_l, x_{l+n})$, step 1"].images[0].get_array()
    distances = log.records[-1]["depth"]["angles"]["all"]
    assert (angles[0, 1], angles[1, 0]) == (distances[1][2], distances[0][2])
    variance = panels["variance of the residual stream, by layer"]
    np.testing.assert_array_equal(
        np.stack([line.get_ydata() for line in variance.lines], 1), log.series("depth", "stream", "variance")
    )


def test_two_layers_have_no_map_of_their_one_angle(tmp_path):
    path = by_hand(tmp_path / "run.jsonl")
    for step, layers in ((30, 2), (40, 3)):
        distances = [[0.1] * (layers + 1)] * (layers + 1)
        Lines(path, RUN).append({"step": step, "depth": {"angles": {"all": distances}}})
        titles = [axes.get_title(loc="left") for axes in MonitorLog.read(path).plot().axes]
        assert sum(title.startswith("angular") for title in titles) == layers - 2


def test_what_cannot_be_drawn_is_named(tmp_path):
    path = by_hand(tmp_path / "run.jsonl")
    Lines(tmp_path / "empty.jsonl", RUN)
    with pytest.raises(hk.InputError, match="holds no measurement yet"):
        MonitorLog.read(tmp_path / "empty.jsonl").plot()
    assert str(MonitorLog.read(tmp_path / "empty.jsonl")).startswith("Linear, 4 parameters; measurements: 0")
    with pytest.raises(hk.InputError, match=r"cannot write 'run.gif'; name a file that ends in \.png"):
        MonitorLog.read(path).plot(tmp_path / "run.gif")


def test_the_command(tmp_path, capsys):
    path = by_hand(tmp_path / "run.jsonl")
    assert main(["monitor", str(path), "--plot", str(tmp_path / "run.pdf")]) == 0
    assert capsys.readouterr().out == f"{MonitorLog.read(path)}\n"
    assert (tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")
    assert main(["monitor", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in found["records"]] == [0, 10, 20]
    assert found["orders"]["10"] == ["Norm", "FFN"]
