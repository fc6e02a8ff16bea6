"""Row softmax: vec_r forms against autograd and exactly, the primitive against torch.func."""

from __future__ import annotations

from fractions import Fraction

import mpmath
import numpy as np
import pytest
import sympy
import torch
from action_reference import check_actions, check_against_matrices
from second_order_reference import (
    at,
    check_all_blocks,
    exact_hessian,
    exact_jacobian,
    random_point,
    relative_error,
    same,
    symbols,
)

from derivations.operation import Operation
from derivations.softmax import LogSoftmax, Softmax, SoftmaxAt, softmax


def row_softmax(T, mask=None):
    powers = T.exp() if mask is None else T.exp() * mask
    return powers / powers.sum(-1, keepdim=True)


@pytest.mark.parametrize("shape", [(3, 3), (2, 4), (4, 2), (1, 5), (3, 1)])
def test_blocks_against_autograd(shape):
    point = random_point(30, T=shape)
    check_all_blocks(SoftmaxAt(**point), row_softmax, point, 1e-12)


def test_masked_blocks_against_autograd():
    point = random_point(31, T=(3, 4))
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
    additive = torch.zeros(3, 4, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for given in (mask, mask.numpy(), additive):
        check_all_blocks(SoftmaxAt(**point, mask=given), lambda T: row_softmax(T, mask), point)
    second = SoftmaxAt(**point, mask=mask).hessian("T", "T").dense().reshape(3, 4, 12, 12)
    assert (second[~mask] == 0).all()
    assert (second[:, :, ~mask.reshape(-1)] == 0).all()


def test_entries_as_the_claim_prints_them():
    T = random_point(32, T=(3, 4))["T"]
    point = SoftmaxAt(T)
    a = point.value[1]
    blocks = point.hessian("T", "T").dense().reshape(3, 4, 3, 4, 3, 4)  # (i, j, k, l, m, n)
    eye = torch.eye(4, dtype=torch.float64)
    for j in range(4):
        e = eye[j]
        inner = 2 * torch.outer(a, a) + torch.outer(e, e) - torch.diag(a) - torch.outer(e, a) - torch.outer(a, e)
        assert torch.allclose(blocks[1, j, 1, :, 1, :], a[j] * inner, rtol=0, atol=1e-15)
    across = blocks.clone()
    across[1, :, 1, :, 1, :] = 0
    assert (across[1] == 0).all()
    assert (across[:, :, 1] == 0).all()


def test_logits_may_move_by_a_constant():
    T = random_point(33, T=(3, 4))["T"]
    point = SoftmaxAt(T)
    shift = torch.ones(12, dtype=torch.float64)
    assert (point.jacobian("T") @ shift).abs().max() < 1e-15
    assert (point.hessian("T", "T") @ shift).abs().max() < 1e-15


def test_rational_weights_stay_rational():
    T = symbols("t", 2, 3)
    powers = np.frompyfunc(sympy.exp, 1, 1)(T)
    A = powers / powers.sum(1).reshape(2, 1)
    logs = np.array([[1, 2, 5], [3, 1, 1]], dtype=object)  # T = log of these
    values = {t: sympy.log(v) for t, v in zip(T.reshape(-1), logs.reshape(-1), strict=True)}
    weights = np.array([[Fraction(int(v), int(row.sum())) for v in row] for row in logs], dtype=object)
    point = SoftmaxAt(np.zeros((2, 3), dtype=object), weights=weights)
    assert point.jacobian("T").dense().tolist() == at(exact_jacobian(A, T), values).tolist()
    second = point.hessian("T", "T").dense()
    assert all(isinstance(v, (int, Fraction)) for v in second.reshape(-1))
    assert second.tolist() == at(exact_hessian(A, T, T), values).tolist()


def test_symbolic_entries():
    T = symbols("t", 1, 2)
    point = SoftmaxAt(T)
    outputs = [sympy.exp(t) / (sympy.exp(T[0, 0]) + sympy.exp(T[0, 1])) for t in T[0]]
    assert same(point.jacobian("T").sympy(), exact_jacobian(outputs, T))
    assert same(point.hessian("T", "T").sympy(), exact_hessian(outputs, T, T))
    masked = softmax(T, np.array([[True, False]]))
    assert masked.tolist() == [[1, 0]]
    assert softmax(T, np.array([[0, -sympy.oo]], dtype=object)).tolist() == [[1, 0]]


def test_norm_bound_is_sharp_for_the_jacobian():
    point = SoftmaxAt(random_point(34, T=(3, 4))["T"])
    assert isinstance(point, Operation)
    bound, dense = point.jacobian("T").norm_bound(), point.jacobian("T").dense()
    assert bound == pytest.approx(float(torch.linalg.matrix_norm(dense, 2)), rel=1e-12)
    assert bound <= 0.5


@pytest.mark.parametrize(("shape", "dim"), [((4,), -1), ((3, 4), -1), ((3, 4), 0), ((2, 3, 4), 1), ((2, 3, 4), -3)])
def test_actions(shape, dim):
    T = random_point(35, T=shape)["T"]
    check_actions(Softmax(dim), lambda T: T.exp() / T.exp().sum(dim, keepdim=True), (T,), (0,))


def test_actions_against_the_vec_r_matrices():
    T = random_point(36, T=(3, 4))["T"]
    check_against_matrices(Softmax(-1), (T,), SoftmaxAt(T))


def test_actions_on_masked_and_large_logits():
    T = random_point(37, T=(2, 3))["T"]
    masked = T.masked_fill(torch.tensor([[False, True, False]] * 2), -torch.inf)
    t, w = torch.randn(4, 2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    (full,), (kept,) = (
        Softmax(-1).curvature((x,), y, (z,)) for x, y, z in ((masked, w, t), (T[:, [0, 2]], w[:, [0, 2]], t[:, :, [0, 2]]))
    )
    assert relative_error(full[:, :, [0, 2]], kept) < 1e-14
    assert (full[:, :, 1] == 0).all()
    assert torch.isfinite(Softmax(-1).curvature((1000 * T,), w, (t,))[0]).all()


def test_float32():
    T = random_point(38, T=(5, 16))["T"]
    w, t = random_point(39, w=(5, 16), t=(3, 5, 16)).values()
    (single,), (double,) = Softmax().curvature((T.float(),), w.float(), (t.float(),)), Softmax().curvature((T,), w, (t,))
    assert relative_error(single.double(), double) <= 2e-6


def test_rows_stay_apart_in_front_of_the_axis():
    T = torch.zeros(2, 3, 4)
    assert [Softmax(-1).rowwise((T,), axes, (True,)) for axes in (1, 2, 3)] == [True, True, False]
    assert [Softmax(1).rowwise((T,), axes, (True,)) for axes in (1, 2)] == [True, False]


def test_errors():
    with pytest.raises(ValueError, match="row without entries"):
        softmax(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    with pytest.raises(ValueError, match="L x S"):
        SoftmaxAt(torch.zeros(2))
    with pytest.raises(ValueError, match="weights have shape"):
        SoftmaxAt(torch.zeros(2, 2), weights=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="no argument is called 'X'"):
        SoftmaxAt(torch.zeros(2, 2)).jacobian("X")
    with pytest.raises(ValueError, match="tangent of T is None"):
        Softmax().jvp((torch.zeros(2),), (None,))


@pytest.mark.parametrize("dim", [-1, 1, 0])
def test_log_softmax(dim):
    T = random_point(65, T=(2, 3, 4))["T"]
    check_actions(LogSoftmax(dim), lambda x: x - x.exp().sum(dim, keepdim=True).log(), (T,), (0,))
    axis = dim % 3
    assert [LogSoftmax(dim).rowwise((T,), axes, (True,)) for axes in (1, 2, 3)] == [axes <= axis for axes in (1, 2, 3)]
    assert LogSoftmax(dim).curvature((T,), T, (None,)) == (None,)
    with pytest.raises(ValueError, match="tangent of T is None"):
        LogSoftmax(dim).jvp((T,), (None,))


def test_rows_that_are_nearly_one_hot_keep_their_digits():
    # along t = (c, c + 1, c + 3) at weights (1 - e, e, e^2) the covariance is that of (0, 1, 3): a constant drops out exactly
    with mpmath.workdps(60):
        logits = [mpmath.mpf(0), mpmath.mpf(-40), mpmath.mpf(-80)]
        powers = [mpmath.exp(x) for x in logits]
        p = [x / sum(powers) for x in powers]
        t, w = [mpmath.mpf(7), mpmath.mpf(8), mpmath.mpf(10)], [mpmath.mpf(5), mpmath.mpf(2), mpmath.mpf(3)]

        def mean(values):
            return sum(a * v for a, v in zip(p, values, strict=True))

        first = [a * (v - mean(t)) for a, v in zip(p, t, strict=True)]
        q = [a * (v - mean(w)) for a, v in zip(p, w, strict=True)]
        along_q = sum(a * (v - mean(t)) for a, v in zip(q, t, strict=True))
        second = [a * (v - mean(t)) - b * along_q for a, v, b in zip(q, t, p, strict=True)]
    primitive, T = Softmax(-1), torch.tensor([[0.0, -40.0, -80.0]], dtype=torch.float64)
    tangent, adjoint = torch.tensor([[[7.0, 8.0, 10.0]]]).double(), torch.tensor([[5.0, 2.0, 3.0]]).double()
    found = primitive.jvp((T,), (tangent,))[0, 0], primitive.curvature((T,), adjoint, (tangent,))[0][0, 0]
    for values, expected in zip(found, (first, second), strict=True):
        for value, exact in zip(values.tolist(), expected, strict=True):
            assert abs(value - float(exact)) <= 1e-12 * abs(float(exact))
