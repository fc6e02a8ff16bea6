"""The matrix on disk: resumed where it was interrupted, refused where it is another's; nothing is overwritten unasked."""

from __future__ import annotations

import copy
import errno
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import draw, mse, randomised
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import streaming
from hessiankit.curvature.planning import Plan

X, T = draw(3, 4, 6), draw(3, 4, 6, seed=2)


def block(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(6, 7, d_k=3, **options))


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some seven panels, one of them a part of the rows of W_1."""
    monkeypatch.setattr(streaming, "PANEL", 30_000)
    monkeypatch.setattr(streaming, "SLAB", 1000)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_and_result(tmp_path: Path) -> None:
    """By panels and at once the bytes are the same."""
    module, out, steps = block(), tmp_path / "h.npy", []
    found = hk.hessian(module, X, T, out=out, progress=lambda done, total: steps.append((done, total)))
    plain = hk.hessian(module, X, T)
    assert torch.equal(found.matrix, plain.matrix)
    assert (found.loss, found.fallbacks, found.unused) == (plain.loss, (), ())
    assert max(found.asymmetry, plain.asymmetry) <= 1e-14
    assert names(tmp_path) == ["h.npy"]
    assert np.array_equal(np.load(out, mmap_mode="r"), plain.matrix.numpy())
    assert steps == [(3 * n, steps[0][1]) for n in range(1, 1 + steps[0][1] // 3)]
    assert len(steps) > 5
    assert torch.equal(found.outer(), plain.outer())


def test_a_finished_file_is_opened(tmp_path: Path) -> None:
    module, out = block(), tmp_path / "h.npy"
    first = hk.hessian(module, X, T, out=out)
    before = out.stat().st_mtime_ns
    steps: list[int] = []
    again = hk.hessian(module, X, T, out=str(out), resume=True, progress=lambda done, total: steps.append(done))
    assert steps == []
    assert torch.equal(again.matrix, first.matrix)
    assert again.loss == pytest.approx(first.loss, rel=1e-14)
    again.matrix[0, 0] = 7.0  # a private copy of the page
    assert np.load(out)[0, 0] != 7.0
    assert out.stat().st_mtime_ns == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_types_and_params(dtype: torch.dtype, tmp_path: Path) -> None:
    call, options = (block().to(dtype), X.to(dtype), T.to(dtype)), {"params": ["attention.*", "norm_2.bias"]}
    found = hk.hessian(*call, out=tmp_path / "h.npy", **options)
    assert np.load(tmp_path / "h.npy").dtype == np.float32
    assert torch.equal(found.matrix, hk.hessian(*call, **options).matrix)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:os.fork")  # of jax, where another test has imported it
def test_killed_and_resumed(tmp_path: Path) -> None:
    module, out = block(), tmp_path / "h.npy"

    def kill(done: int, total: int, *, after: int) -> None:
        if done >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    unfinished = [180]
    for after in (13, 16, 19):
        if not (child := os.fork()):
            hk.hessian(module, X, T, out=out, resume=True, progress=partial(kill, after=after))
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        unfinished.append(int(np.isnan(np.load(out).diagonal()).sum()))
    assert unfinished == sorted(unfinished, reverse=True)
    assert 0 < unfinished[-1] < 180
    assert torch.equal(hk.hessian(module, X, T, out=out, resume=True).matrix, hk.hessian(module, X, T).matrix)


def interrupted(module: nn.Module, out: Path, after: int, data: tuple[Tensor, Tensor] = (X, T)) -> None:
    """Write some rows of the Hessian, and stop."""

    def stop(done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hk.hessian(module, *data, out=out, progress=stop)


def test_finished_rows_are_not_computed_again(tmp_path: Path) -> None:
    module, out, steps = block(), tmp_path / "h.npy", []
    interrupted(module, out, 15)
    assert np.isnan(np.load(out)).sum() == np.isnan(np.load(out).diagonal()).sum() > 0
    found = hk.hessian(module, X, T, out=out, resume=True, progress=lambda done, total: steps.append(done))
    assert steps[0] > 3
    assert torch.equal(found.matrix, hk.hessian(module, X, T).matrix)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_that_cancel(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a key bias are zero up to the rounding of larger terms: its gradient is zero identically."""
    monkeypatch.setattr(streaming, "PANEL", 3750 * dtype.itemsize)
    module, data = block(attention_bias=True).to(dtype), (X.to(dtype), T.to(dtype))
    whole, near = hk.hessian(module, *data), copy.deepcopy(module)
    assert whole.block("attention.b_K", "attention.b_K").abs().max() <= 10 * torch.finfo(dtype).eps * whole.matrix.abs().max()
    with torch.no_grad():
        near.norm_1.bias[0] += 1e7 * torch.finfo(dtype).eps
    for after in (9, 15, 24):  # b_K is finished in the last
        out = tmp_path / f"{after}.npy"
        interrupted(module, out, after, data)
        with pytest.raises(hk.InputError, match="holds another Hessian"):
            hk.hessian(near, *data, out=out, resume=True)
        assert torch.equal(hk.hessian(module, *data, out=out, resume=True).matrix, whole.matrix)


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"the disk is full: the matrix takes .* make room, or pass another out") as caught:
        hk.hessian(block(), X, T, out=tmp_path / "h.npy")
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_another_hessian_is_refused(tmp_path: Path) -> None:
    """Whatever differs, from a whole file and from one of which some rows are finished."""
    module, moved = block(), block()
    with torch.no_grad():
        moved.norm_1.bias[0] += 1e-3
    others: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "a parameter": ((moved, X, T), {}),
        "inputs": ((module, X + 1e-3, T), {}),
        "a batch": ((module, [(X, T), (X + 1, T)]), {}),
        "a penalty": (
            (module, X, T),
            {"loss": lambda z, t: mse(z, t) + 1e-6 * sum(p.square().sum() for p in module.parameters())},
        ),
    }
    whole = hk.hessian(module, X, T, out=tmp_path / "whole.npy").matrix
    interrupted(module, tmp_path / "some.npy", 15)
    for what, (arguments, options) in others.items():
        for path in (tmp_path / "whole.npy", tmp_path / "some.npy"):
            before = path.read_bytes()
            with pytest.raises(hk.InputError, match=r"holds another Hessian: its finished rows of"):
                hk.hessian(*arguments, out=path, resume=True, **options)
            assert path.read_bytes() == before, what
    with pytest.raises(hk.InputError, match=r"holds an array of shape \(180, 180\), float64, and the Hessian is \(18, 18\)"):
        hk.hessian(module, X, T, params="attention.W_Q", out=tmp_path / "whole.npy", resume=True)
    cut = [(X[:1], T[:1]), (X[1:], T[1:])]  # the same function, in other batches
    assert torch.equal(hk.hessian(module, cut, out=tmp_path / "whole.npy", resume=True).matrix, whole)
    other = hk.hessian(moved, X, T, out=tmp_path / "whole.npy", overwrite=True)
    assert torch.equal(other.matrix, hk.hessian(moved, X, T).matrix)
    assert not torch.equal(other.matrix, whole)  # whose pages are still those of the replaced file


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    module, out = block(), tmp_path / "h.npy"
    out.write_text("mine")
    for options, message in (({}, "exists; pass resume=True"), ({"resume": True}, "is no matrix in NumPy's format")):
        with pytest.raises(hk.InputError, match=message):
            hk.hessian(module, X, T, out=out, **options)
        assert out.read_text() == "mine"
    hk.hessian(module, X, T, out=out, overwrite=True)
    out.write_bytes(out.read_bytes()[:-8])
    with pytest.raises(hk.InputError, match="is no matrix in NumPy's format"):
        hk.hessian(module, X, T, out=out, resume=True)


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("a/h.npy", {}, "there is no folder"),
        (".", {}, "is a folder"),
        ("h.pt", {}, r"ends in '\.npy'"),
        ("g.npy", {"lazy": True}, "lazy=True"),
        ("g.npy", {"overwrite": True, "resume": True}, "overwrite=True loses what resume=True keeps"),
        (None, {"overwrite": True}, "overwrite=True is for out"),
        (None, {"resume": True}, "resume=True is for out"),
    ],
)
def test_what_cannot_be_written(out: str | None, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(hk.InputError, match=message):
        hk.hessian(block(), X, T, out=out and tmp_path / out, **options)
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", [1, 40, 64, 200, 10**6])
@pytest.mark.parametrize("sizes", [[3], [2, 5, 1, 1, 7, 3], [1, 1, 1, 9], [12, 1, 2], [4, 0, 3]])
def test_panels_cover_every_pair_once(sizes: list[int], limit: int) -> None:
    found = Plan((), tuple(sizes), 2, limit)
    pairs = [(i, j) for rows, columns in found.panels for i in rows for j in columns if i <= j]
    assert sorted(pairs) == [(i, j) for i in range(len(sizes)) for j in range(i, len(sizes))]
    for rows, columns in found.panels:
        height, width = (sum(sizes[k] for k in part) for part in (rows, columns))
        assert columns[0] >= rows[0]
        assert 2 * height * width <= found.largest
        assert 2 * height * width <= limit or len(rows) == len(columns) == 1
    assert found.largest <= limit or found.largest <= 2 * max(sizes) ** 2
