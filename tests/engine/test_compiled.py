"""The compiled kernels, beside sums written out in NumPy and beside plain torch."""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, assert_exact, draw
from torch import Tensor

import hessiankit
from hessiankit import TransformerBlock
from hessiankit.cli.main import main
from hessiankit.engine.jacobians import WeightJacobian
from hessiankit.engine.kernel_calls import KernelSum, joined, kernel_sum, mirror
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.support import kernels as library
from hessiankit.support.errors import InputError

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def kernels(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.delenv(library.SWITCH, raising=False)
    library.build()
    found = library.kernels()
    assert found is not None
    yield found
    library._found.cache_clear()  # the environment is put back, and with it what is found


def rows_of(*shape: int, dtype: torch.dtype, seed: int, zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    kept = torch.rand(*shape[:2], *(1,) * (len(shape) - 2), generator=generator) >= zeros
    return (x * kept).to(dtype)


def compiled_sum(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor, *, same: bool = False) -> KernelSum | None:
    return kernel_sum(u.X, v.X, K, u.unfold(v.unfold(into, 1), 0), is_symmetric=same)


def add_compiled(u: WeightJacobian, v: WeightJacobian, K: Tensor, into: Tensor, *, same: bool = False) -> float | None:
    found = compiled_sum(u, v, K, into, same=same)
    return None if found is None else found.add()


def written_out(u: WeightJacobian, v: WeightJacobian, K: Tensor) -> np.ndarray:
    """The block as a sum over rows of Kronecker products, in the order in which both weights are stored."""
    total = np.einsum("ni,nj,npq->ipjq", u.X.double().numpy(), v.X.double().numpy(), K.double().numpy(), optimize=True)
    total = total.swapaxes(0, 1) if u.transposed else total
    return (total.swapaxes(2, 3) if v.transposed else total).reshape(u.size, v.size)


def close(found: Tensor, expected: np.ndarray) -> None:
    assert np.abs(found.double().numpy() - expected).max() <= TOLERANCE[found.dtype] * np.abs(expected).max()


@pytest.mark.parametrize("axis", [1, 2])
def test_curvature_that_is_the_same_in_all_columns(axis: int) -> None:
    """As behind a sum over columns: an expanded tensor, one axis of which has no stride."""
    X, numbers = rows_of(3, 3, dtype=torch.float64, seed=1), rows_of(3, dtype=torch.float64, seed=2)
    u = WeightJacobian("w", None, X, 4, False)
    K = numbers[:, None, None].repeat(1, 4, 4).narrow(axis, 0, 1).expand(3, 4, 4)
    into = torch.zeros(12, 12, dtype=torch.float64)
    assert add_compiled(u, u, K, into, same=True) == 0.0
    close(into, written_out(u, u, K))


SIZES = [(5, 7, 9, 4, 6), (49, 16, 8, 32, 16), (3, 1, 33, 17, 1), (70, 12, 20, 5, 40), (1, 8, 8, 8, 8)]  # rows, i, p, j, q


TURNED = [(False, False), (False, True), (True, False), (True, True)]


def pairwise(sizes: list[tuple[int, ...]], turned: list[Any]) -> list[tuple[Any, ...]]:
    """Sizes, orders and types in full, with zeros in every second one: any two choices occur together."""
    every = itertools.product(enumerate(sizes), enumerate(turned), enumerate(TOLERANCE))
    return [(n, t, dtype, 0.6 * ((i + j + k) % 2)) for (i, n), (j, t), (k, dtype) in every]


@pytest.mark.parametrize(("sizes", "transposed", "dtype", "zeros"), pairwise(SIZES, TURNED))
def test_sum_of_two_weights(sizes, transposed, dtype, zeros: float) -> None:
    n, i, p, j, q = sizes
    u = WeightJacobian("u", None, rows_of(n, i, dtype=dtype, seed=1, zeros=zeros), p, transposed[0])
    v = WeightJacobian("v", None, rows_of(n, j, dtype=dtype, seed=2, zeros=zeros), q, transposed[1])
    K = rows_of(n, p, q, dtype=dtype, seed=3, zeros=zeros)
    big = torch.ones(u.size + 3, v.size + 5, dtype=dtype)
    into = big[1 : 1 + u.size, 2 : 2 + v.size]
    skew = add_compiled(u, v, K, into)
    if skew is None:
        assert (j if transposed[1] else q) < 4  # nothing else is refused
        assert bool((big == 1).all())
        return
    close(into - 1, written_out(u, v, K))
    into.fill_(1)
    assert bool((big == 1).all())  # nothing beside the block
    other = torch.zeros(v.size, u.size, dtype=dtype)
    if add_compiled(u, v, K.mT.contiguous().mT, other.T) is not None:  # the block stored the other way round
        close(other.T, written_out(u, v, K))


@pytest.mark.parametrize(
    ("sizes", "transposed", "dtype", "zeros"), pairwise([(21, 13, 11), (300, 4, 20), (130, 20, 4)], [False, True])
)
def test_sum_of_a_weight_with_itself(sizes, transposed: bool, dtype: torch.dtype, zeros: float) -> None:
    n, i, p = sizes
    u = WeightJacobian("u", None, rows_of(n, i, dtype=dtype, seed=1, zeros=zeros), p, transposed)
    K = rows_of(n, p, p, dtype=dtype, seed=3, zeros=zeros)
    K = K + K.mT
    into = torch.zeros(u.size, u.size, dtype=dtype)
    assert add_compiled(u, u, K, into, same=True) == 0.0
    close(into, written_out(u, u, K))
    K[4, 1, 3] += 0.25
    skew = add_compiled(u, u, K, into.zero_(), same=True)
    if skew:  # the mean was taken
        assert skew == pytest.approx(0.25 / float(K.diagonal(dim1=1, dim2=2).abs().max()), rel=1e-6)
        K = (K + K.mT) / 2
    close(into, written_out(u, u, K))


@pytest.mark.parametrize(  # the last: more rows than at once
    ("sizes", "transposed", "dtype", "zeros"), pairwise([(49, 16, 8, 32, 16), (5, 9, 4, 5, 21), (2100, 8, 4, 4, 5)], TURNED)
)
def test_two_sums_with_a_factor_in_common(sizes, transposed, dtype, zeros: float) -> None:
    n, i, p, j, q = sizes
    a, b, d = (rows_of(n, m, dtype=dtype, seed=k, zeros=zeros) for k, m in enumerate((i, j, q)))
    K, T = rows_of(n, p, q, dtype=dtype, seed=3), rows_of(n, j, p, dtype=dtype, seed=4, zeros=zeros).mT
    u, v = WeightJacobian("u", None, a, p, transposed[0]), WeightJacobian("v", None, b, q, transposed[1])
    w = WeightJacobian("v", None, d, j, not transposed[1])  # the same weight, by what it multiplies
    into = torch.full((i * p, j * q), 0.5, dtype=dtype)

    def added() -> list[KernelSum]:
        sums = [one for one in (compiled_sum(u, v, K, into), compiled_sum(u, w, T, into)) if one]
        (both,) = joined(sums)
        both.add()
        return sums

    sums = added()
    close(into, 0.5 + written_out(u, v, K) + written_out(u, w, T))
    others = [replace(u, X=a.clone()), replace(u, X=a[:, :7]), replace(u, X=a.flip(0))]
    assert [len(joined([sums[0], compiled_sum(o, w, T, into[: o.size])])) for o in others] == [2, 2, 2]  # type: ignore[list-item]
    b[0], T[0], K[0, 1, 2] = 0.0, 0.0, torch.inf  # zero times infinity
    into.zero_()
    added()
    spoilt = torch.zeros(i, p, j, q, dtype=torch.bool)
    spoilt[:, 1, :, 2] = True
    spoilt = spoilt.transpose(0, 1) if transposed[0] else spoilt
    assert torch.equal(into.isnan(), (spoilt.transpose(2, 3) if transposed[1] else spoilt).reshape(into.shape))


def test_what_there_is_no_kernel_for(kernels: ctypes.CDLL) -> None:
    def asked(dtype: torch.dtype, other: torch.dtype | None = None, device: str = "cpu") -> float | None:
        u = WeightJacobian("u", None, torch.ones(2, 4, dtype=dtype, device=device), 4, False)
        v = replace(u, X=u.X.to(other or dtype))
        K, into = torch.ones(2, 4, 4, dtype=dtype, device=device), torch.zeros(16, 16, dtype=dtype, device=device)
        return add_compiled(u, v, K, into)

    assert asked(torch.float64) == 0.0
    assert asked(torch.bfloat16) is None
    assert asked(torch.float64, torch.float32) is None
    assert asked(torch.float64, device="meta") is None
    with library.plain():
        assert asked(torch.float64) is None


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("bounds", "threads"), [([0, 1], 1), ([0, 7, 7, 30], 2), ([0, 300, 301, 571], 2), ([0, 64, 512], 1)])
def test_mirror(kernels: ctypes.CDLL, bounds: list[int], dtype: torch.dtype, threads: int) -> None:
    n = bounds[-1]
    H = rows_of(n, n, dtype=dtype, seed=5)
    expected = H.double().numpy().copy()
    apart = 0.0
    for first, last in itertools.pairwise(bounds):
        own = expected[first:last, first:last]
        apart = max(apart, np.abs(own - own.T).max(initial=0.0))
        own[:] = (own + own.T) / 2
        expected[last:, first:last] = expected[first:last, last:].T
    with threads_of(threads):
        found, finite = mirror(kernels, H, bounds)
    assert finite
    assert found == pytest.approx(apart / np.abs(np.diagonal(expected)).max(), rel=1e-6)
    np.testing.assert_allclose(H.double().numpy(), expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 3e-7)
    assert torch.equal(H, H.T)
    for at in ((0, 0), (0, n - 1), (n // 2, n - 1), (n // 2, n // 2)):
        H[at] = float("nan")
        assert not mirror(kernels, H.clone(), bounds)[1]
        H[at] = 1.0
        assert mirror(kernels, H.clone(), bounds)[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_whole_hessians_with_and_without(placement: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    block = TransformerBlock(8, 12, n_heads=2, placement=placement, activation="relu").to(dtype)
    x, y = torch.randn(3, 5, 8, dtype=dtype), torch.randn(3, 5, 8, dtype=dtype)
    calls = []
    compiled = hessiankit.hessian(block, x, y, loss="mse")
    with library.plain(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricStorage, "block", lambda *a, _block=SymmetricStorage.block: calls.append(1) or _block(*a))
        plain = hessiankit.hessian(block, x, y, loss="mse")
    assert calls
    assert not torch.equal(compiled.matrix, plain.matrix)  # another order of sums
    assert compiled.asymmetry < (1e-13 if dtype == torch.float64 else 1e-5)
    close(compiled.matrix, plain.matrix.double().numpy())


def test_digits_do_not_depend_on_threads() -> None:
    u, K = WeightJacobian("u", None, draw(64, 8), 96, False), rows_of(64, 96, 96, dtype=torch.float64, seed=1)
    found = []
    for count in (1, 2, 3):
        into = torch.zeros(768, 768, dtype=torch.float64)
        with threads_of(count):
            add_compiled(u, u, K, into, same=True)
        found.append(into)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_tensors_whose_memory_is_that_of_their_conjugates() -> None:
    module = Formula(lambda m, x: torch.fft.fft(x, dim=-1).conj().imag @ m.V @ m.W, V=(8, 6), W=(6, 5))
    assert_exact(module, draw(4, 8), loss=lambda z, _: z.pow(4).mean())


def test_turned_off_by_the_environment_or_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.kernels() is None
    monkeypatch.setenv(library.SWITCH, "1")
    assert library.kernels() is not None
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library._found.cache_clear()
    assert library.kernels() is None
    library.built().parent.mkdir()
    library.built().write_text("not a library")
    library._found.cache_clear()
    assert library.kernels() is None


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--json", "-"]) == 0
    assert json.loads(capfd.readouterr().out) == {"path": str(library.built()), "used": True, "compiled_before": True}
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert main(["compile"]) == 2
    said = capfd.readouterr().err
    assert "hessiankit compile: the kernels could not be built" in said
    assert said.count("\n") == 1
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'hessiankit\[compiled\]'"):
        library.build()
