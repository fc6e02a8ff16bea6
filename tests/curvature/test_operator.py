"""The operator as others use it: blocks, batches, SciPy, NumPy, curvlinops, memory; and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from operator_cases import EXACT, T, X, block, classifier, error, tokens
from scipy.sparse.linalg import LinearOperator, aslinearoperator, eigsh
from torch import nn

import hessiankit as hk
from hessiankit.curvature.operator import HessianOperator, hessian_operator
from hessiankit.engine.problem import task
from hessiankit.support.errors import InputError, OutOfMemoryError, TraceError


def test_blocks_of_vectors_equal_single_ones_in_blocks_of_any_size() -> None:
    module = block()
    matrix = hk.hessian(module, X, T).matrix
    V = draw(matrix.shape[0], 5, seed=9)
    for block_size in (None, 1, 2, 5):
        operator = hessian_operator(module, X, T, block_size=block_size)
        assert error(operator @ V, matrix @ V) <= EXACT
        assert error(operator @ V[:, 0], matrix @ V[:, 0]) <= EXACT
        assert (operator @ V[:, :0]).shape == (matrix.shape[0], 0)
        assert (operator @ V[:, :1]).shape == (matrix.shape[0], 1)


def test_eigsh_finds_the_top_eigenvalues() -> None:
    module = block()
    operator = hessian_operator(module, X, T)
    everything = hk.hessian(module, X, T).eigvalsh()
    expected = everything[everything.abs().topk(3).indices].sort().values
    start = np.random.default_rng(0).standard_normal(operator.shape[0])
    values, vectors = eigsh(operator, k=3, v0=start)
    assert values.dtype == np.float64
    assert np.abs(np.sort(values) - expected.numpy()).max() < 1e-10 * float(expected.abs().max())
    assert np.abs(operator @ vectors - vectors * values).max() < 1e-9 * float(expected.abs().max())


@pytest.mark.filterwarnings("ignore:Calling `matvec` on:FutureWarning")  # of one column; SciPy 1.18 to 1.19
def test_numpy_and_scipy() -> None:
    operator = hessian_operator(block(), X, T)
    matrix, v = operator.to_matrix().numpy(), draw(operator.shape[0], 3).numpy()
    assert isinstance(operator, LinearOperator)
    assert aslinearoperator(operator) is operator
    scale = np.abs(matrix @ v).max()
    for found, expected in (
        (operator @ v, matrix @ v),
        (operator @ v[:, 0], matrix @ v[:, 0]),
        (operator.dot(v), matrix @ v),
        (operator.matvec(v[:, :1]), matrix @ v[:, :1]),
        (operator.T @ v[::-1], matrix @ v[::-1]),
        (operator.H @ v, matrix @ v),
        (v.T @ operator, v.T @ matrix),
        (operator.rmatvec(v[:, 0]), matrix @ v[:, 0]),
        ((2 * operator + operator) @ v, 3 * matrix @ v),
        (operator @ np.eye(len(matrix), dtype=np.float32), matrix),
    ):
        assert isinstance(found, np.ndarray)
        assert found.dtype == np.float64
        assert np.abs(found - expected).max() < EXACT * scale
    v.flags.writeable = False
    assert np.abs(operator @ v - matrix @ v).max() < EXACT * scale


def test_estimators_of_curvlinops() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    operator = hessian_operator(block(), X, T, kind="ggn")
    matrix, adapter = operator.to_matrix(), operator.to_torch()
    for estimate, expected in (
        (lambda A: curvlinops.hutchinson_trace(A, num_matvecs=7), matrix.trace()),
        (lambda A: curvlinops.hutchpp_trace(A, num_matvecs=9), matrix.trace()),
        (lambda A: curvlinops.xtrace(A, num_matvecs=8), matrix.trace()),
        (lambda A: curvlinops.hutchinson_diag(A, num_matvecs=7), matrix.diagonal()),
        (lambda A: curvlinops.xdiag(A, num_matvecs=8), matrix.diagonal()),
        (lambda A: curvlinops.hutchinson_squared_fro(A, num_matvecs=5), matrix.square().sum()),
    ):
        torch.manual_seed(0)
        found = estimate(adapter)
        torch.manual_seed(0)
        same = estimate(matrix)  # the same draws on the matrix
        assert found.shape == expected.shape
        assert error(found, same) < 1e-10


BAD_VECTORS = {
    "too short": (lambda P: torch.zeros(P - 1).double(), r"cannot multiply with shape .*; expected a vector \(77,\)"),
    "rows for columns": (lambda P: torch.zeros(2, P).double(), r"shape \(2, 77\)"),
    "three axes": (lambda P: torch.zeros(P, 1, 1).double(), "cannot multiply"),
    "a number": (lambda P: torch.zeros(()).double(), "cannot multiply"),
    "float32": (lambda P: torch.zeros(P), "the vectors are torch.float32; expected torch.float64"),
    "integers": (lambda P: torch.zeros(P).long(), "the vectors are torch.int64"),
    "another device": (lambda P: torch.zeros(P, device="meta").double(), "the vectors are on meta, the operator on cpu"),
    "NumPy, too long": (lambda P: np.zeros(P + 1), "cannot multiply"),
    "NumPy, complex": (lambda P: np.zeros(P, complex), "the array is complex128, which float64 cannot hold"),
}


@pytest.mark.parametrize("name", BAD_VECTORS)
def test_bad_vectors(name: str) -> None:
    make, message = BAD_VECTORS[name]
    operator = hessian_operator(nn.Linear(6, 11).double(), draw(3, 6), draw(3, 11))
    with pytest.raises(InputError, match=message):
        operator @ make(operator.shape[0])


BAD_REQUESTS = {
    "dropout layer": (lambda: hessian_operator(nn.Sequential(block(), nn.Dropout(0.1)), X, T), "dropout layer .* module.eval"),
    "unknown kind": (
        lambda: hessian_operator(block(), X, T, kind="kfac"),
        "kind='kfac' is not known; choose one of hessian, ggn, fisher",
    ),
    "Fisher of a callable": (lambda: hessian_operator(block(), X, T, loss=mse, kind="fisher"), "kind='fisher' needs a loss"),
    "outer part of a loss": (lambda: hessian_operator(block(), X, loss=None, kind="ggn"), "it returns shape"),
    "block of none": (lambda: hessian_operator(block(), X, T, block_size=0), "block_size=0"),
    "target missing": (lambda: hessian_operator(block(), X), "needs a target"),
    "triples": (lambda: hessian_operator(block(), [(X, X, T)]), "batch 0 is a tuple of 3; expected a pair"),
    "not data": (lambda: hessian_operator(block(), 3), "data is int"),
    "labels all ignored": (
        lambda: hessian_operator(classifier(), [(tokens(1, 3), torch.full((1, 3), -100))], loss="cross_entropy"),
        "no batch that counts",
    ),
    "target all ignored": (
        lambda: hessian_operator(classifier(), tokens(1, 3), torch.full((1, 3), -100), loss="cross_entropy"),
        "every label is -100",
    ),
    "empty batch": (
        lambda: hessian_operator(classifier(), [(tokens(1, 3)[:0], tokens(1, 3)[:0])], loss="cross_entropy"),
        "with no entries",
    ),
    "not a module": (lambda: hessian_operator(len, X, T), "expected a torch.nn.Module"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests(name: str) -> None:
    make, message = BAD_REQUESTS[name]
    with pytest.raises(InputError, match=message):
        make()


def asymmetric() -> HessianOperator:
    operator = hessian_operator(Formula(lambda m, x: torch.sinc(m.lin(x)), lin=nn.Linear(4, 4)), X, T)
    batch = operator._batches[0]
    inner = batch.product
    batch.product = lambda rows: inner(rows) + rows.roll(1, 1)  # type: ignore[method-assign]
    return operator


ASYMMETRY = r"<u, Hv> and <v, Hu> differ .* differentiated automatically: aten.sinc"


def test_the_first_two_vectors_show_a_wrong_second_derivative() -> None:
    v, w = draw(20, seed=1), draw(20, seed=2)
    operator = asymmetric()
    operator @ v
    with pytest.raises(InputError, match=ASYMMETRY):
        operator @ w
    for parallel in (-2 * v, 0 * v):  # says nothing: random vectors do
        operator = asymmetric()
        operator @ v
        with pytest.raises(InputError, match=ASYMMETRY):
            operator @ parallel
    with pytest.raises(InputError, match=ASYMMETRY):
        asymmetric() @ torch.stack([v, w], 1)
    with pytest.raises(InputError, match=ASYMMETRY):
        _ = asymmetric().symmetry_error
    right = hessian_operator(Formula(lambda m, x: torch.sinc(m.lin(x)), lin=nn.Linear(4, 4)), X, T)
    right @ v
    right @ w
    assert right.symmetry_error < 1e-14
    assert right._pair is None


def test_a_large_model_keeps_nothing_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from hessiankit.curvature import operator as room
    from hessiankit.engine import linearisation

    monkeypatch.setattr(room, "LARGE", 0)
    monkeypatch.setattr(linearisation, "LARGE", 30)  # entries of an operation that is tested by itself
    module, v = block(), draw(77, seed=1)
    small = hessian_operator(module, X, T, snapshot=True)
    operator = hessian_operator(module, X, T)
    v = draw(operator.shape[0], seed=1)
    assert error(operator @ v, small @ v) <= EXACT
    assert operator._pair is None
    next(module.parameters()).data.mul_(2)
    for reading in (lambda: operator @ v, lambda: operator.gradient):
        with pytest.raises(InputError, match="has been given other values since"):
            reading()
    small @ v


@pytest.mark.parametrize("wrong", ["first", "second"])
def test_one_operation_of_each_kind_is_tested_where_models_are_large(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from derivations.linearised_norms import LinearisedNorm
    from hessiankit.engine import linearisation

    monkeypatch.setattr(linearisation, "LARGE", 60)
    push, pull = LinearisedNorm.push, LinearisedNorm.pull

    def lopsided(self: LinearisedNorm, bar: Any, tangents: Any = None) -> Any:
        found = pull(self, bar, tangents)
        return found if bar is not None else (found[0] + tangents[0].roll(1, -1), *found[1:])

    if wrong == "first":
        monkeypatch.setattr(LinearisedNorm, "push", lambda self, t: push(self, t).roll(1, -1))
    else:
        monkeypatch.setattr(LinearisedNorm, "pull", lopsided)
    with pytest.raises(TraceError, match=r"the derivatives of '.*' \(LayerNorm\) are not each other's transposes"):
        hessian_operator(block(), X, T)


def test_works_where_the_dense_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block(d_model=24, d_ff=48, d_k=24)
    x, t = draw(2, 3, 24), draw(2, 3, 24, seed=2)
    monkeypatch.setattr(task, "available_memory", lambda device: 32 * 2**20)
    with pytest.raises(OutOfMemoryError):
        hk.hessian(module, x, t)
    operator = hessian_operator(module, x, t)
    v = draw(operator.shape[0], seed=4)
    leaves = list(module.parameters())
    slopes = torch.cat([g.reshape(-1) for g in torch.autograd.grad(mse(module(x), t), leaves, create_graph=True)])
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(slopes @ v, leaves)])
    assert error(operator @ v, expected) <= EXACT
    with pytest.raises(OutOfMemoryError, match="to_matrix"):
        operator.to_matrix()


def test_many_batches_in_float32_add_no_rounding() -> None:
    module, x, t = block().float(), X[:1].float(), T[:1].float()
    one, many = hessian_operator(module, x, t), hessian_operator(module, [(x, t)] * 40)
    v = draw(one.shape[0], dtype=torch.float32)
    assert error(many @ v, one @ v) <= torch.finfo(torch.float32).eps
    assert error(many.gradient, one.gradient) <= torch.finfo(torch.float32).eps


def test_blocks_are_cut_to_the_work_space(monkeypatch: pytest.MonkeyPatch) -> None:
    from hessiankit.curvature import operator as room

    module = block()
    wide = hessian_operator(module, X, T)
    monkeypatch.setattr(room, "WORKSPACE", 3 * wide._batches[0].bytes_per_vector + 8)
    narrow = hessian_operator(module, X, T)
    assert wide.block_size > narrow.block_size == 3
    assert error(narrow.to_matrix(), wide.to_matrix()) <= EXACT


def test_a_value_inside_a_run_of_entrywise_operations_that_is_read_behind_it_too() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(x @ m.W)
        return (inner * inner + inner.exp()) @ m.V * inner

    module = Formula(forward, W=(4, 4), V=(4, 4))
    found = hessian_operator(module, X, T).to_matrix()
    assert error(found, reverse_over_reverse(module, X, T, mse)) <= EXACT
