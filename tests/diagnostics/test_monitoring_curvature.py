"""A monitor of the spectrum, of approximations and of the exact Hessian, within a share of the time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import assert_one_clear_error
from monitoring_cases import Noisy, pair, train

import hessiankit as hk
from hessiankit.diagnostics.monitoring import monitor as module_of_monitor

OFF: dict[str, Any] = {"sharpness": False, "norms": False, "eigenvalue": False, "depth": (), "every": 2}


def small() -> Noisy:
    torch.manual_seed(0)
    return Noisy(1).double()


def test_sections_are_those_of_the_functions(tmp_path: Any) -> None:
    model = small()
    data = pair()
    options: dict[str, Any] = {"spectrum": 2, "approximations": ["kfac"], "hessian": True}
    monitor = hk.Monitor(model, data, tmp_path / "run.jsonl", **{**OFF, "every": 1}, **options)
    train(model, 1, monitor)
    log = hk.Monitor.read(tmp_path / "run.jsonl")
    assert log.steps.tolist() == [0, 1]
    model.eval()
    last = log.records[-1]
    inputs, labels = data
    H = hk.hessian(model, inputs, labels, loss="cross_entropy").matrix
    values = torch.linalg.eigvalsh(H)
    assert last["hessian"]["top"] == pytest.approx(float(values[-1]), rel=1e-9)
    assert last["hessian"]["bottom"] == pytest.approx(float(values[0]), rel=1e-9)
    assert last["hessian"]["frobenius"] == pytest.approx(float(H.norm()), rel=1e-9)
    found = last["spectrum"]
    for k, value in ((0, values[-1]), (1, values[-2]), (-1, values[0])):
        assert abs(found["eigenvalues"][k] - float(value)) <= found["residuals"][k] + 1e-9 * float(values[-1])
    own = hk.approximations(model, inputs, labels, loss="cross_entropy", against="ggn", of=["kfac"])
    assert last["approximations"]["by_name"]["kfac"]["frobenius"]["value"] == own["kfac"].measures.frobenius.value
    log.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


def test_training_is_the_same_with_and_without(tmp_path: Any) -> None:
    alone, watched = small(), small()
    torch.manual_seed(1)
    train(alone, 2)
    torch.manual_seed(1)
    options: dict[str, Any] = {"spectrum": 1, "approximations": ["diagonal"], "share": 0.9}
    train(watched, 2, hk.Monitor(watched, pair(), tmp_path / "run.jsonl", **OFF, **options))
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_share_of_the_time(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of our own: every measurement takes 3 s, every step of training 1 s, and a quarter of the time is allowed."""
    now = [0.0]
    monkeypatch.setattr(module_of_monitor.time, "perf_counter", lambda: now[0])
    model = small()
    monitor = hk.Monitor(model, pair(), tmp_path / "run.jsonl", **{**OFF, "every": 1}, share=0.25)

    def slow(*_: Any) -> float:
        now[0] += 3.0
        return 1.0

    monitor._sections = {"loss": slow}
    for step in range(30):
        monitor.step(step)
        now[0] += 1.0
    log = hk.Monitor.read(tmp_path / "run.jsonl")
    assert log.steps.tolist() == [0, 9, 18, 27]  # 3 s of 12, of 24, of 36
    assert log.records[1]["time"] == {"measuring": 6.0, "since_start": 15.0, "skipped": list(range(1, 9))}
    assert monitor.step(29, force=True) is not None
    assert log.header["options"]["share"] == 0.25


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": 1.5}, "share=1.5 is no share of the time"),
        ({"spectrum": -1}, "spectrum=-1; pass how many"),
        ({"approximations": ["kfca"]}, "approximations='kfca' is not known; did you mean 'kfac'"),
    ],
)
def test_bad_options_are_one_clear_error(options: dict[str, Any], said: str, tmp_path: Any) -> None:
    assert_one_clear_error(lambda: hk.Monitor(small(), pair(), tmp_path / "run.jsonl", **{**OFF, **options}), said)


def test_the_exact_hessian_of_several_batches(tmp_path: Any) -> None:
    model, data = small(), [pair(1), pair(2)]
    monitor = hk.Monitor(model, data, tmp_path / "run.jsonl", hessian=True, **OFF)
    monitor.step(0)
    last = hk.Monitor.read(tmp_path / "run.jsonl").records[-1]
    rows = [torch.cat(x) for x in zip(*data, strict=True)]
    values = hk.hessian(model.eval(), *rows, loss="cross_entropy").eigvalsh()
    assert last["hessian"]["top"] == pytest.approx(float(values[-1]), rel=1e-9)
