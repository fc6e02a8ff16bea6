"""Softmax, losses, norms and networks: identities, extreme inputs, torch's own functions, and what they do with exact numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from primitive_cases import LABELS, layer_norm
from second_order_reference import check_all_blocks, random_point, relative_error

from derivations.bounds.norm_rows import NormRows
from derivations.group_normalization import GroupNormRowsAt
from derivations.multihead import MultiHeadAttentionAt, split_heads
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.row_blocks import RowCovariance
from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.softmax import Softmax

# Softmax -------------------------------------------------------------------------------------------------------------


def test_row_covariance():
    rows = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.1, 0.8]], dtype=torch.float64)
    matrix, expected = RowCovariance(rows), torch.block_diag(*[torch.diag(row) - torch.outer(row, row) for row in rows])
    y = random_point(0, y=(6, 5))["y"]
    assert torch.allclose(matrix.dense(), expected, rtol=0, atol=1e-15)
    assert torch.allclose(matrix @ y, expected @ y, rtol=0, atol=1e-15)
    assert matrix.norm_bound() == pytest.approx(float(torch.linalg.matrix_norm(expected, 2)), abs=1e-12)
    assert matrix.latex() == r"\operatorname{blockdiag}_i(\operatorname{diag}(a_i)-a_i{a_i}^\top)"
    thirds = RowCovariance(np.array([[Fraction(1, 3), Fraction(2, 3)]], dtype=object))
    assert thirds.dense().tolist() == [[Fraction(2, 9), Fraction(-2, 9)], [Fraction(-2, 9), Fraction(2, 9)]]
    assert thirds.norm_bound() == pytest.approx(4 / 9)


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


def test_norms_of_rows_that_move_along_themselves_keep_their_digits():
    """With delta half the difference of two entries, or the only one, y = delta / (delta^2 + eps)^(1/2): no difference is left."""
    eps = 2e-16
    for chapter, signs, share in (
        (LayerNormAt, torch.tensor([1.0, -1.0]).double(), 0.5),
        (RMSNormAt, torch.ones(1).double(), 1.0),
    ):
        point = chapter(3.0 * signs.reshape(1, -1) + (share < 1), eps=eps)
        s = (9.0 + eps) ** 0.5
        first = eps / s**3 * share * torch.outer(signs, signs)
        second = -9 * eps / s**5 * share**2 * torch.einsum("i,j,k->ijk", signs, signs, signs)
        assert relative_error(point.jacobian("X").dense(), first) < 1e-15
        assert relative_error(point.hessian("X", "X").dense(), second.reshape(-1, len(signs))) < 1e-15


def test_rows_that_are_nearly_one_hot_keep_their_digits():
    """Of a covariance that a constant added to the tangent leaves as it is; the numbers are those of 60 digits, by mpmath."""
    first = [-4.248354255291589e-18, 4.248354255291589e-18, 5.414554163536245e-35]
    second = [1.2745062765874767e-17, -1.2745062765874767e-17, -1.082910832707249e-34]
    primitive, T = Softmax(-1), torch.tensor([[0.0, -40.0, -80.0]], dtype=torch.float64)
    tangent, adjoint = torch.tensor([[[7.0, 8.0, 10.0]]]).double(), torch.tensor([[5.0, 2.0, 3.0]]).double()
    assert primitive.jvp((T,), (tangent,))[0, 0].tolist() == pytest.approx(first, rel=1e-12, abs=0)
    assert primitive.curvature((T,), adjoint, (tangent,))[0][0, 0].tolist() == pytest.approx(second, rel=1e-12, abs=0)


# Losses --------------------------------------------------------------------------------------------------------------


def test_constant_targets_are_left_out():
    Z, target = random_point(54, Z=(2, 3), T=(2, 3)).values()
    t, w = torch.randn(4, 2, 3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    fixed, full = MeanSquaredError(6.0, constant_target=True), MeanSquaredError(6.0)
    for name, arguments in (("curvature", (w, (t, None))), ("vjp", (torch.ones(1).double(),))):
        seen, expected = getattr(fixed, name)((Z, target), *arguments), getattr(full, name)((Z, target), *arguments)
        assert seen[1] is None
        assert torch.equal(seen[0], expected[0])
        assert torch.equal(expected[1], -expected[0])
    with pytest.raises(ValueError, match="constant_target"):
        fixed.jvp((Z, target), (t, t))


def test_one_row_and_extreme_logits():
    logits, label = torch.tensor([1000.0, -1000.0, 0.0], dtype=torch.float64), torch.tensor(1)
    primitive = CrossEntropy()
    assert primitive.value(logits, label) == 2000
    assert primitive.vjp((logits, label), torch.ones(1).double())[0].tolist() == [[1, -1, 0]]
    assert torch.isfinite(primitive.curvature((logits, label), torch.tensor(1.0), (logits.reshape(1, 3), None))[0]).all()
    ignored = torch.tensor([[0.0, 1.0], [torch.nan, torch.inf]])
    labels = torch.tensor([0, -100])
    assert torch.isfinite(primitive.value(ignored, labels))
    assert primitive.vjp((ignored, labels), torch.ones(1))[0][0, 1].tolist() == [0, 0]


LOGITS = torch.zeros(2, 3, 5)
REFUSED = [
    (lambda: CrossEntropy().value(LOGITS, torch.zeros(2, 3)), r"need integer labels of shape \(2, 3\), got torch.float32"),
    (lambda: CrossEntropy().value(LOGITS, LABELS[:1]), "The classes are the last axis"),
    (lambda: CrossEntropy().value(LOGITS, torch.full((2, 3), -100)), "all 6 labels are -100"),
    (lambda: CrossEntropy().jvp((LOGITS, LABELS), (None, None)), "labels have no tangent"),
    (lambda: MeanSquaredError(1.0).value(torch.zeros(2), torch.zeros(3)), r"shape \(2,\) and the target \(3,\)"),
    (
        lambda: LayerNorm().value(LOGITS, LOGITS[0, 0, :3]),
        r"gamma must have the shape \(5,\) of the last 1 axes of X, got \(3,\)",
    ),
    (lambda: split_heads(*(torch.ones(4, 4) for _ in range(4)), n_heads=3), "do not divide into 3 heads"),
]


def test_the_default_eps_is_that_of_torch():
    small = 1e-4 * random_point(20, X=(2, 3, 5))["X"].float()  # of the dtype for RMSNorm, which shows on small rows; 0 for groups
    assert relative_error(RMSNorm().value(small), torch.nn.functional.rms_norm(small, (5,))) < 1e-6
    X = random_point(0, X=(2, 6))["X"]
    assert relative_error(GroupNormRowsAt(X, 3).value, torch.nn.functional.group_norm(X, 3, eps=0.0)) <= 1e-13


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1][:30])
def test_refused(case):
    with pytest.raises(ValueError, match=case[1]):
        case[0]()


# Norms ---------------------------------------------------------------------------------------------------------------

L, d = 3, 4


def test_eps_per_row():
    point = random_point(3, X=(L, d), gamma=(d,))
    eps = torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64)
    for shaped in (eps.tolist(), eps.reshape(L, 1)):
        check_all_blocks(LayerNormAt(**point, eps=shaped), lambda **p: layer_norm(eps.reshape(L, 1))(**p), point)


@pytest.mark.parametrize(("chapter", "width"), [(LayerNormAt, 5), (LayerNormAt, 2), (RMSNormAt, 3), (RMSNormAt, 1)])
def test_the_rows_of_a_norm_are_blocks_of_the_chapter(chapter, width):
    point = random_point(4, X=(L, width), gamma=(width,))
    rows, r = NormRows(**point, eps=0.3, norm=chapter.__name__[:-2].lower()), random_point(5, r=(L, width))["r"]
    at = chapter(**point, eps=0.3)
    assert relative_error(rows.value, at.value) < 1e-14
    assert relative_error(torch.block_diag(*rows.jacobian.mT), at.jacobian("X").dense()) < 1e-13
    contracted = torch.einsum("o,oij->ij", r.reshape(-1), at.hessian("X", "X").dense().reshape(-1, L * width, L * width))
    assert relative_error(torch.block_diag(*rows.curvature(r)), contracted) < 1e-13


# Feed-forward networks and heads -------------------------------------------------------------------------------------


def test_split_heads_is_the_packed_attention_of_torch():
    n_heads = 2
    point = random_point(5, X=(1, L, d), in_proj=(3 * d, d), out_proj=(d, d))
    packed = torch.nn.MultiheadAttention(d, n_heads, bias=False, batch_first=True, dtype=torch.float64)
    packed.load_state_dict({"in_proj_weight": point["in_proj"], "out_proj.weight": point["out_proj"]})
    W_Q, W_K, W_V = point["in_proj"].T.split(d, dim=1)
    operation = MultiHeadAttentionAt(point["X"][0], split_heads(W_Q, W_K, W_V, point["out_proj"].T, n_heads))
    expected = packed(point["X"], point["X"], point["X"], need_weights=False)[0][0]
    assert torch.allclose(operation.value, expected, rtol=0, atol=1e-12)
