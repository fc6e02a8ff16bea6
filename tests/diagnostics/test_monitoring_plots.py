"""What is read back, printed and drawn from a monitor's file; the command; the page of the documentation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from monitoring_cases import Noisy, pair, train

import hessiankit as hk
from hessiankit.cli.main import main
from hessiankit.diagnostics.monitoring import Monitor, MonitorLog
from hessiankit.diagnostics.monitoring.lines import Lines

ALL = ("variance", "angles", "drop", "jacobian", "hessian", "ggn")
PART = {"name": "w", "type": "FFN", "role": "up", "layer": 0, "size": 2}
HEADER = {"model": "Linear", "entries": 4, "parts": [PART, {**PART, "name": "g", "type": "Norm"}], "options": {}}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A short run, with everything measured."""
    found = tmp_path_factory.mktemp("monitor") / "run.jsonl"
    torch.manual_seed(0)
    model = Noisy()
    train(model, 1, Monitor(model, pair(rows=1), found, every=1, draws=2, depth=ALL))
    return found


def by_hand(path: Path) -> Path:
    """A file whose numbers can be told beforehand: a type that crosses another one, a step without, a number that is not finite."""
    lines = Lines(path, HEADER)
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
    with pytest.raises(AttributeError):
        log.records = ()


def test_the_table(tmp_path):
    log = MonitorLog.read(by_hand(tmp_path / "run.jsonl"))
    lines = [line.split() for line in str(log).splitlines()]
    assert str(log).startswith("Linear, 4 parameters; measurements: 3, steps 0 to 20")
    assert ["0", "FFN", "<", "Norm", "2", "5"] in lines
    assert ["10", "Norm", "~", "FFN", "2", "5"] in lines
    assert ["20", "inf"] in lines
    assert str(log).endswith("step 20: sharpness failed: InputError: not finite")
    assert "Norm ~ FFN" in log._repr_html_()


def test_every_panel_is_drawn(path, tmp_path):
    log = MonitorLog.read(path)
    picture = log.plot(tmp_path / "new" / "run.png", title="Mine")
    titles = [axes.get_title(loc="left") for axes in picture.axes]
    assert len([title for title in titles if title]) == 10
    assert picture.texts[0].get_text() == "Mine"
    assert (tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn_are_the_numbers_of_the_file(path, tmp_path):
    log = MonitorLog.read(path)
    panels = {axes.get_title(loc="left"): axes for axes in log.plot().axes}
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
    assert angles[0, 1] == distances[1][2]
    assert angles[1, 0] == distances[0][2]
    assert np.isnan(np.ma.filled(angles, np.nan)[1, 1])
    variance = panels["variance of the residual stream, by layer"]
    np.testing.assert_array_equal(
        np.stack([line.get_ydata() for line in variance.lines], 1), log.series("depth", "stream", "variance")
    )


def test_what_cannot_be_drawn_is_named(path, tmp_path):
    Lines(tmp_path / "empty.jsonl", HEADER)
    with pytest.raises(hk.InputError, match="holds no measurement yet"):
        MonitorLog.read(tmp_path / "empty.jsonl").plot()
    assert str(MonitorLog.read(tmp_path / "empty.jsonl")).startswith("Linear, 4 parameters; measurements: 0")
    with pytest.raises(hk.InputError, match=r"cannot write 'run.gif'; name a file that ends in \.png"):
        MonitorLog.read(path).plot(tmp_path / "run.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(hk.InputError, match=r"MonitorLog.plot: cannot make the folder .*file"):
        MonitorLog.read(path).plot(tmp_path / "file" / "run.png")


def test_the_command(tmp_path, capsys):
    path = by_hand(tmp_path / "run.jsonl")
    assert main(["monitor", str(path), "--plot", str(tmp_path / "run.pdf")]) == 0
    assert capsys.readouterr().out == f"{MonitorLog.read(path)}\n"
    assert (tmp_path / "run.pdf").read_bytes().startswith(b"%PDF")
    assert main(["monitor", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [record["step"] for record in found["records"]] == [0, 10, 20]
    assert found["orders"]["10"] == ["Norm", "FFN"]
