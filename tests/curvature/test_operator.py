"""The operator as others use it: blocks, batches, SciPy, NumPy, curvlinops, memory; and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, mse, randomised, reverse_over_reverse
from operator_cases import EXACT, T, X, block, classifier, error, tokens
from scipy.sparse.linalg import LinearOperator, aslinearoperator, eigsh
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.operator import HessianOperator, hessian_operator
from hessiankit.curvature.solving import solve
from hessiankit.primitives.linearised_norms import LinearisedNorm
from hessiankit.support import memory
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


def test_what_the_estimators_of_curvlinops_ask_for() -> None:
    operator = hessian_operator(block(), X, T)
    v = draw(operator.shape[0], 2)
    A = operator.to_torch()
    assert (A.shape, A.dtype, A.device) == (operator.shape, torch.float64, operator.device)
    assert all(torch.equal(same @ v, operator @ v) for same in (A, A.T, A.adjoint()))
    assert np.array_equal(A @ v.numpy(), operator @ v.numpy())
    assert A.to_scipy().dtype == operator.dtype == np.float64
    rows = operator["attention.*", "norm_1.*"].to_torch()
    assert (rows.T.shape, rows.dtype) == (rows.shape[::-1], torch.float64)


@pytest.mark.parametrize("kind", ["hessian", "ggn", "fisher", "fisher-mc", "fisher-empirical"])
def test_diagonal_trace_and_array_are_those_of_the_matrix(kind: str) -> None:
    logits = torch.randint(0, 4, (2, 3), generator=torch.Generator().manual_seed(0))
    operator = hessian_operator(block(), X, logits, loss="cross_entropy", kind=kind)
    matrix = operator.to_matrix()
    assert np.array_equal(np.asarray(operator), matrix.numpy())
    assert np.asarray(operator, dtype=np.float32).dtype == np.float32
    assert error(operator.diagonal(), matrix.diagonal()) <= EXACT
    assert operator.trace() == pytest.approx(float(matrix.trace()), rel=1e-12)


def test_eigenvalues_of_operators() -> None:
    operator = hessian_operator(block(), X, T)
    every = torch.linalg.eigvalsh(operator.to_matrix())
    top = every[every.abs().argsort()[-3:]].sort().values
    for found, expected in (
        (operator.eigvalsh(3), top),
        (operator.to_torch().eigvalsh(3), top),
        ((-2 * operator).eigvalsh(3), -2 * top.flip(0)),
        (operator.eigvalsh(), every),
        (operator.eigvalsh(len(every) - 1), every[every.abs().argsort()[1:]].sort().values),
    ):
        assert error(found, expected) <= 1e-10
    with pytest.raises(InputError, match="k=0 asks for no eigenvalue"):
        operator.eigvalsh(0)


BAD_VECTORS = {
    "too short": (lambda P: torch.zeros(P - 1).double(), r"cannot multiply with shape .*; expected a vector \(77,\)"),
    "rows for columns": (lambda P: torch.zeros(2, P).double(), r"shape \(2, 77\)"),
    "three axes": (lambda P: torch.zeros(P, 1, 1).double(), "cannot multiply"),
    "float32": (lambda P: torch.zeros(P), "the vectors are torch.float32; expected torch.float64"),
    "another device": (lambda P: torch.zeros(P, device="meta").double(), "the vectors are on meta, the operator on cpu"),
    "NumPy, too long": (lambda P: np.zeros(P + 1), "cannot multiply"),
    "NumPy, complex": (lambda P: np.zeros(P, complex), "the array is complex128, which float64 cannot hold"),
    "rows of several lengths": (lambda P: [[1.0], [1.0, 2.0]], "cannot multiply with a list: .*inhomogeneous"),
    "words": (lambda P: ["a"] * P, "the array is <U1, which float64 cannot hold"),
    "None": (lambda P: None, "cannot multiply with a NoneType"),
}


@pytest.mark.parametrize("name", BAD_VECTORS)
def test_bad_vectors(name: str) -> None:
    make, message = BAD_VECTORS[name]
    operator = hessian_operator(nn.Linear(6, 11).double(), draw(3, 6), draw(3, 11))
    with pytest.raises(InputError, match=message):
        operator @ make(operator.shape[0])


BAD_REQUESTS = {
    "unknown kind": (
        lambda: hessian_operator(block(), X, T, kind="kfac"),
        "kind='kfac' is not known; choose one of hessian, ggn, fisher",
    ),
    "outer part of a loss": (lambda: hessian_operator(block(), X, loss=None, kind="ggn"), "it returns shape"),
    "block of none": (lambda: hessian_operator(block(), X, T, block_size=0), "block_size=0"),
    "triples": (lambda: hessian_operator(block(), [(X, X, T)]), "batch 0 is a tuple of 3; expected a pair"),
    "not data": (lambda: hessian_operator(block(), 3), "data is int"),
    "labels all ignored": (
        lambda: hessian_operator(classifier(), [(tokens(1, 3), torch.full((1, 3), -100))], loss="cross_entropy"),
        "no batch that counts",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests(name: str) -> None:
    make, message = BAD_REQUESTS[name]
    with pytest.raises(InputError, match=message):
        make()


def asymmetric() -> HessianOperator:
    operator = hessian_operator(Formula(lambda m, x: torch.sinc(m.lin(x)), lin=nn.Linear(4, 4)), X, T)
    batch = operator._linearised[0]
    inner = batch.product
    batch.product = lambda rows: inner(rows) + rows.roll(1, 1)  # type: ignore[method-assign]
    return operator


ASYMMETRY = r"<u, Hv> and <v, Hu> differ .* differentiated automatically: aten.sinc"


@pytest.mark.first_order
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


@pytest.mark.parametrize("recompute", [None, "layers"])
def test_a_large_model_makes_tangents_again_that_others_give_quickly(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hessiankit.engine import linearisation
    from hessiankit.engine.sweep import RecomputedTangents, push

    kinds: list[set[str]] = [set(), set()]

    def spied(*args: Any, **options: Any) -> Any:
        bent = push(*args, **options)
        for entering in bent.values():
            for t in entering:
                kinds[isinstance(t, RecomputedTangents)].add(
                    type(t.step.primitive).__name__ if isinstance(t, RecomputedTangents) else ""
                )
                assert not isinstance(t, RecomputedTangents) or t.step.bends or not any(isinstance(x, Tensor) for x in t.inputs)
        return bent

    net = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Unflatten(-1, (2, 3)), nn.LayerNorm(3), nn.Flatten(2), nn.Linear(6, 5))
    for module, x in ((block(), X), (net.double(), X), (Formula(gated, a=(4, 6), b=(4, 6), c=(6, 5)), X)):
        expected = hk.hessian(module, x, torch.zeros(()), loss=cubes).matrix
        monkeypatch.setattr(linearisation, "push", push)
        monkeypatch.setattr(linearisation, "LARGE", 10**9)
        V = draw(len(expected), 2, seed=1)
        kept = hessian_operator(module, x, torch.zeros(()), loss=cubes, recompute=recompute) @ V
        monkeypatch.setattr(linearisation, "LARGE", 0)
        monkeypatch.setattr(linearisation, "push", spied)
        again = hessian_operator(module, x, torch.zeros(()), loss=cubes, recompute=recompute) @ V
        assert error(kept, expected @ V) <= EXACT
        assert error(again, kept) <= 1e-15
    assert {"LinearisedNorm", "LinearisedEntrywise"} <= kinds[True]


def test_a_norm_keeps_its_rows_alone() -> None:
    operator = hessian_operator(block(), X, T)
    operator @ draw(operator.shape[0], seed=1)
    norms = [s.primitive for s in operator._linearised[0]._steps(0) if isinstance(s.primitive, LinearisedNorm)]
    kept = {name for norm in norms for name, x in vars(norm).items() if isinstance(x, Tensor) and x.shape == norm.x.shape}
    assert kept == {"x", "off"}  # one array, but where rows are of two entries


def cubes(z: Tensor, _: Tensor) -> Tensor:
    return (z**3).sum()


def gated(m: Formula, x: Tensor) -> Tensor:
    """A gated network: the product of two values, of which one is an activation."""
    return (torch.nn.functional.silu(x @ m.a) * (x @ m.b)) @ m.c


@pytest.mark.parametrize("period", [4099, 5])
@pytest.mark.parametrize("wrong", ["first", "second"])
def test_one_operation_of_each_kind_is_tested_where_models_are_large(
    wrong: str, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hessiankit.engine import entrywise_fusion, linearisation

    monkeypatch.setattr(linearisation, "LARGE", 60)
    monkeypatch.setattr(entrywise_fusion, "PERIOD", period)
    hessian_operator(block(), X, T)
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


@pytest.mark.parametrize("options", [{}, {"block_size": 1}], ids=str)
def test_products_in_large_pages(options: dict[str, Any]) -> None:
    module, x = nn.Linear(2**11, 2**12 + 1, bias=False), draw(2, 2**11).float()
    operator = hessian_operator(module, x, torch.zeros(2, 2**12 + 1), **options)
    V = draw(operator.shape[0], 2, seed=1).float()
    expected = V.T.reshape(2, *module.weight.shape) @ x.T @ x / (2**12 + 1)
    assert error((operator @ V).T.reshape(expected.shape), expected) <= 1e-6
    assert error((operator @ V[:, 1]).reshape(expected[1].shape), expected[1]) <= 1e-6


def test_works_where_the_dense_matrix_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = block(d_model=24, d_ff=48, d_k=24)
    x, t = draw(2, 3, 24), draw(2, 3, 24, seed=2)
    monkeypatch.setattr(memory, "available_memory", lambda device: 32 * 2**20)
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
    monkeypatch.setattr(room, "WORKSPACE", 3 * wide._linearised[0].bytes_per_vector + 8)
    narrow = hessian_operator(module, X, T)
    assert wide.block_size > narrow.block_size == 3
    assert error(narrow.to_matrix(), wide.to_matrix()) <= EXACT


NETWORK = randomised(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)))
DATA, CLASSES = draw(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
FIRST = hk.hessian_operator(NETWORK, DATA, CLASSES, loss="cross_entropy")
SECOND = hk.hessian_operator(NETWORK, 2 * DATA, CLASSES, loss="cross_entropy")
H = reverse_over_reverse(NETWORK, DATA, CLASSES, cross_entropy)
K = reverse_over_reverse(NETWORK, 2 * DATA, CLASSES, cross_entropy)
SUMS: dict[str, tuple[Any, Tensor]] = {
    "+": (FIRST + SECOND, H + K),
    "-": (FIRST - SECOND, H - K),
    "multiples": (2 * FIRST + SECOND * np.float64(0.5) - FIRST * torch.tensor(3.0), -H + K / 2),
    "block-diagonal part": (
        FIRST + FIRST.block_diagonal(),
        H + torch.block_diag(*(H[rows, rows] for rows in FIRST.slices.values())),
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_operators_of_the_same_kind(name: str) -> None:
    operator, matrix = SUMS[name]
    v, V = draw(len(H)), draw(len(H), 3)
    assert error(operator.to_matrix(), matrix) <= EXACT
    assert error(operator @ v, matrix @ v) <= EXACT
    assert error(operator @ V, matrix @ V) <= EXACT
    assert np.allclose(operator @ v.numpy(), matrix @ v, rtol=1e-11, atol=1e-14)
    assert error(operator.T @ v, matrix @ v) <= EXACT
    shift = 1.0 + float(matrix.abs().sum())
    expected = torch.linalg.solve(matrix + shift * torch.eye(len(H), dtype=torch.float64), v)
    for found in (operator.solve(v, damping=shift).x, solve(operator, v, damping=shift).x, operator.inverse(shift) @ v):
        assert error(found, expected) <= 1e-7
    largest = eigsh(operator, k=1, return_eigenvectors=False)[0]
    assert abs(abs(largest) - float(torch.linalg.eigvalsh(matrix).abs().max())) <= 1e-9 * abs(largest)


def test_sums_of_different_operators_are_refused() -> None:
    narrow = hk.hessian_operator(NETWORK, DATA, CLASSES, loss="cross_entropy", params=["0.*"])
    with pytest.raises(hk.InputError, match=r"terms are 14 x 14 in torch.float64 on cpu and 8 x 8"):
        FIRST + narrow
    with pytest.raises(TypeError, match="unsupported operand"):
        1 + FIRST


def named(vector: Tensor) -> dict[str, Tensor]:
    return {name: vector[FIRST.slices[name]].reshape(p.shape) for name, p in NETWORK.named_parameters()}


VECTORS: dict[str, Callable[[Tensor], Any]] = {
    "by name": named,
    "a list": lambda v: list(named(v).values()),
    "a tuple of parameters": lambda v: tuple(nn.Parameter(x) for x in named(v).values()),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_in_the_shapes_of_the_parameters(name: str) -> None:
    v = draw(len(H))
    given, damped = VECTORS[name](v), 1.0 + float(H.abs().sum())
    for found, expected in (
        (FIRST @ given, H @ v),
        (FIRST.dot(given), H @ v),
        (FIRST.solve(given, damping=damped).x, torch.linalg.solve(H + damped * torch.eye(len(H)).double(), v)),
    ):
        assert isinstance(found, dict if isinstance(given, dict) else list)
        shaped = found if isinstance(found, dict) else dict(zip(FIRST.names, found, strict=True))
        assert {n: x.shape for n, x in shaped.items()} == {n: p.shape for n, p in NETWORK.named_parameters()}
        assert error(torch.cat([shaped[n].reshape(-1) for n in FIRST.names]), expected) <= 1e-7


BAD_SHAPES: dict[str, tuple[Callable[[], object], str]] = {
    "a missing name": (lambda: FIRST @ {"0.weight": draw(2, 3)}, r"nothing for '0.bias' \(2,\); expected a tensor in the shape of"),
    "another name": (lambda: FIRST.solve({**named(draw(len(H))), "more": draw(1)}), "5 tensors; expected a tensor in the shape of"),
    "another shape": (lambda: FIRST @ [draw(3, 2), draw(2), draw(2, 2), draw(2)], r"\(3, 2\) for '0.weight' \(2, 3\)"),
    "no tensor": (lambda: FIRST @ [draw(2, 3), None, draw(2, 2), draw(2)], r"NoneType for '0.bias'"),
    "nothing": (lambda: FIRST.solve(None), r"solve: b is a NoneType; expected a vector \(14,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_bad_shapes(name: str) -> None:
    call, message = BAD_SHAPES[name]
    with pytest.raises(hk.InputError, match=message):
        call()


def test_a_value_inside_a_run_of_entrywise_operations_that_is_read_behind_it_too() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(x @ m.W)
        return (inner * inner + inner.exp()) @ m.V * inner

    module = Formula(forward, W=(4, 4), V=(4, 4))
    found = hessian_operator(module, X, T).to_matrix()
    assert error(found, reverse_over_reverse(module, X, T, mse)) <= EXACT
