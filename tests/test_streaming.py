"""The matrix on disk: the bytes of an uninterrupted run, whatever interrupts it; nothing of others is overwritten."""

from __future__ import annotations

import builtins
import errno
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, draw, largest_error, mse, randomised, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import matrix_file, planning, streaming
from hessiankit.support.files import sync_folder

X, T = draw(3, 4, 6), draw(3, 4, 6, seed=2)


def block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(6, 7, d_k=3, **options))


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seven panels, one of them a part of the rows of W_1."""
    monkeypatch.setattr(streaming, "PANEL", 30_000)
    monkeypatch.setattr(matrix_file, "SLAB", 1000)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kept", [0, 2**30])
def test_file_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """The curvature is kept from panel to panel or computed again: the bytes are the same."""
    monkeypatch.setattr(planning, "CACHE", kept)
    module, out, steps = block(), tmp_path / "h.npy", []
    found = hk.hessian(module, X, T, out=out, progress=lambda done, total: steps.append((done, total)))
    plain = hk.hessian(module, X, T)
    assert torch.equal(found.matrix, plain.matrix)
    assert (found.loss, found.asymmetry, found.fallbacks, found.unused) == (plain.loss, plain.asymmetry, (), ())
    assert largest_error(found, reverse_over_reverse(module, X, T, mse)) <= 1e-12
    assert names(tmp_path) == ["h.npy", "h.npy.journal.json"]
    assert np.array_equal(np.load(out, mmap_mode="r"), plain.matrix.numpy())
    panels = json.loads((tmp_path / "h.npy.journal.json").read_text())["plan"]["panels"]
    assert len(panels) > 5
    assert any(left > top and bottom == top + 1 for top, bottom, left, _ in panels)
    assert steps == [(3 * n, 3 * len(panels)) for n in range(1, 1 + len(panels))]
    assert "d_model" not in found.table()
    assert torch.equal(found.outer(), plain.outer())


def test_second_call_opens_the_file(tmp_path: Path) -> None:
    module, out = block(), tmp_path / "h.npy"
    first = hk.hessian(module, X, T, out=out)
    before = out.stat().st_mtime_ns
    steps: list[int] = []
    again = hk.hessian(module, X, T, out=str(out), progress=lambda done, total: steps.append(done))
    assert steps == []
    assert torch.equal(again.matrix, first.matrix)
    assert (again.loss, again.asymmetry, again.seconds) == (first.loss, first.asymmetry, first.seconds)
    again.matrix[0, 0] = 7.0  # a private copy of the page
    assert out.stat().st_mtime_ns == before
    assert np.load(out)[0, 0] != 7.0


def test_float32_and_params(tmp_path: Path) -> None:
    module = block().float()
    some = {"params": ["attention.*", "norm_2.bias"]}
    found = hk.hessian(module, X.float(), T.float(), out=tmp_path / "h.npy", **some)
    assert np.load(tmp_path / "h.npy").dtype == np.float32
    assert torch.equal(found.matrix, hk.hessian(module, X.float(), T.float(), **some).matrix)
    half = hk.hessian(block().bfloat16(), X.bfloat16(), T.bfloat16(), out=tmp_path / "b.npy", **some)
    assert np.load(tmp_path / "b.npy").dtype == np.float32
    assert torch.equal(half.matrix, hk.hessian(block().bfloat16(), X.bfloat16(), T.bfloat16(), **some).matrix)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:os.fork")  # of jax, where another test has imported it
def test_killed_three_times_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PANEL", 4000)
    module, out, seed = block(), tmp_path / "h.npy", int.from_bytes(os.urandom(2), "big")
    hk.hessian(module, X, T, out=tmp_path / "whole.npy")
    whole, journal, chance = (tmp_path / "whole.npy").read_bytes(), tmp_path / "h.npy.journal.json", random.Random(seed)
    for panels in sorted(chance.sample(range(1, 30), 3)):
        if not (child := os.fork()):
            try:
                hk.hessian(module, X, T, out=out)
            finally:
                os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if journal.exists() and len(json.loads(journal.read_text())["panels"]) >= panels:
                os.kill(child, signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.004))
    hk.hessian(module, X, T, out=out)
    assert out.read_bytes() == whole, seed
    assert names(tmp_path) == ["h.npy", "h.npy.journal.json", "whole.npy", "whole.npy.journal.json"], seed


class Stop(BaseException):
    """What no handler expects."""


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Let the n-th step towards the disk fail, before or after it happens."""
    state = {"left": 10**9, "after": False, "error": Stop}

    def guard(inner: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            state["left"] -= 1
            if state["left"] == 0 and not state["after"]:
                raise state["error"]
            result = inner(*args, **options)
            if state["left"] == 0:
                raise state["error"]
            return result

        return step

    for where, name in ((os, "fsync"), (os, "replace"), (matrix_file, "_reserve"), (matrix_file.MatrixFile, "_block")):
        monkeypatch.setattr(where, name, guard(getattr(where, name)))
    return state


def test_a_name_in_a_folder_lasts_where_the_system_can_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[os.stat_result] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file)))
    sync_folder(tmp_path)
    assert [found.st_ino for found in synced] == [tmp_path.stat().st_ino]
    monkeypatch.delattr(os, "O_DIRECTORY")  # as on Windows
    sync_folder(tmp_path)
    assert len(synced) == 1


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_interrupted_at_every_step(tmp_path: Path, interrupted: dict[str, Any], after: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(streaming, "PANEL", 2500)
    module = randomised(nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)))
    target = T[..., :2]
    expected = hk.hessian(module, X, target).matrix.numpy().tobytes()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    n, out = 0, tmp_path / "h.npy"
    while True:
        n += 1
        interrupted.update(left=n, after=after)
        try:
            hk.hessian(module, X, target, out=out, overwrite=True)
        except Stop:
            assert not out.exists() or out.read_bytes()[128:] == expected
        else:
            break
        interrupted["left"] = 10**9
        found = hk.hessian(module, X, target, out=out)
        assert out.read_bytes()[128:] == expected, n
        assert found.asymmetry >= 0
        assert names(tmp_path) == ["h.npy", "h.npy.journal.json"]
        for file in tmp_path.iterdir():
            file.unlink()
    assert n > 15
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_finished_panels_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, out, steps = block(), tmp_path / "h.npy", []

    def stop(done: int, total: int) -> None:
        steps.append(done)
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hk.hessian(module, X, T, out=out, progress=stop)
    assert names(tmp_path) == ["h.npy.journal.json", "h.npy.part"]
    monkeypatch.setattr(streaming, "PANEL", 10**9)  # what was planned stays
    steps.clear()
    found = hk.hessian(module, X, T, out=out, progress=lambda done, total: steps.append(done))
    assert steps[0] == 9
    assert torch.equal(found.matrix, hk.hessian(module, X, T).matrix)


def test_full_disk(tmp_path: Path, interrupted: dict[str, Any]) -> None:
    module, out = block(), tmp_path / "h.npy"
    for n in (4, 5, 12):  # no room at all, and no room for a panel
        interrupted.update(left=n, error=OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match=r"the disk is full: the matrix takes .* What is finished is kept") as caught:
            hk.hessian(module, X, T, out=out)
        assert caught.value.errno == errno.ENOSPC
        assert not out.exists()
    interrupted["left"] = 10**9
    assert torch.equal(hk.hessian(module, X, T, out=out).matrix, hk.hessian(module, X, T).matrix)


def test_other_computations_are_refused(tmp_path: Path) -> None:
    module, out = block(), tmp_path / "h.npy"
    found = hk.hessian(module, X, T, out=out)
    moved = block()
    with torch.no_grad():
        moved.norm_1.bias[0] += 1e-12
    for arguments, what in (
        ((moved, X, T), "'norm_1.bias' of the module"),
        ((module, X + 1, T), "the inputs of batch 0"),
        ((module, X, T + 1), "the target of batch 0"),
        (
            (module, [(X, T), (X, T)]),
            "the weight of batch 0, the inputs of batch 1, the target of batch 1, the weight of batch 1",
        ),
    ):
        with pytest.raises(hk.InputError, match=f"holds the Hessian of another computation: what differs is {what}"):
            hk.hessian(*arguments, out=out)
    for options, what in (
        ({"params": ["attention.W_Q"]}, "the chosen parameters"),
        ({"batch_size": 2}, "batch_size"),
        ({"loss": lambda z, t: (z - t).square().sum()}, "the loss"),
    ):
        with pytest.raises(hk.InputError, match=what):
            hk.hessian(module, X, T, out=out, **options)
    other = hk.hessian(moved, X, T, out=out, overwrite=True)
    assert torch.equal(other.matrix, hk.hessian(moved, X, T).matrix)
    assert not torch.equal(other.matrix, found.matrix)  # which is still there: the file was replaced, not written over


def test_other_code_is_refused(tmp_path: Path) -> None:
    module = block()
    hk.hessian(module, X, T, out=tmp_path / "h.npy")
    forward = type(module).forward
    module.forward = lambda x: forward(module, x) * 1.0
    with pytest.raises(hk.InputError, match="what differs is the operations of module and loss"):
        hk.hessian(module, X, T, out=tmp_path / "h.npy")


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    module, out = block(), tmp_path / "h.npy"
    for name in ("h.npy", "h.npy.part", "h.npy.journal.json"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(hk.InputError, match="overwrite=True"):
            hk.hessian(module, X, T, out=out)
        assert names(tmp_path) == [name]
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    out.write_text("mine")
    hk.hessian(module, X, T, out=out, overwrite=True)
    out.write_bytes(out.read_bytes()[:-8])
    with pytest.raises(hk.InputError, match="is missing or has been changed"):
        hk.hessian(module, X, T, out=out)


def test_paths_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = block()
    with pytest.raises(hk.InputError, match="there is no folder"):
        hk.hessian(module, X, T, out=tmp_path / "a" / "h.npy")
    with pytest.raises(hk.InputError, match="is a folder"):
        hk.hessian(module, X, T, out=tmp_path)
    done = hk.hessian(module, X, T, out=tmp_path / "h.npy")
    monkeypatch.setattr(matrix_file.os, "access", lambda path, mode: False)  # as for anybody but root in a read-only folder
    with pytest.raises(hk.InputError, match="the folder is read-only"):
        hk.hessian(module, X, T, out=tmp_path / "g.npy")
    assert torch.equal(hk.hessian(module, X, T, out=tmp_path / "h.npy").matrix, done.matrix)
    with pytest.raises(hk.InputError, match="lazy=True"):
        hk.hessian(module, X, T, out=tmp_path / "g.npy", lazy=True)
    with pytest.raises(hk.InputError, match="overwrite=True is for out"):
        hk.hessian(module, X, T, overwrite=True)
    assert names(tmp_path) == ["h.npy", "h.npy.journal.json"]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with builtins.open(tmp_path / "h.npy.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(hk.InputError, match="another process is writing"):
            hk.hessian(block(), X, T, out=tmp_path / "h.npy")
    assert hk.hessian(block(), X, T, out=tmp_path / "h.npy").matrix.shape == (180, 180)


def test_memory_and_values_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def root(m: Any, x: Tensor) -> Tensor:
        return (x * m.w).abs().sqrt()

    with pytest.raises(hk.InputError, match=r"the block \('w', 'w'\) is NaN or infinite"):
        hk.hessian(Formula(root, w=(3,)), torch.zeros(2, 3, dtype=torch.float64), draw(2, 3), out=tmp_path / "n.npy")
    assert not (tmp_path / "n.npy").exists()
    monkeypatch.setattr(planning, "available_memory", lambda device: 2**16)
    with pytest.raises(hk.OutOfMemoryError, match=r"the derivatives of one chunk of samples take .* Pass batch_size=1"):
        hk.hessian(block(), X, T, out=tmp_path / "h.npy")
    assert "h.npy" not in "".join(names(tmp_path))
