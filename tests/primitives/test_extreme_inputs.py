"""Softmax, losses and norms as primitives: extreme inputs, digits of saturated rows, constant targets, refusals."""

from __future__ import annotations

import pytest
import torch
from primitive_cases import LABELS
from second_order_reference import random_point, relative_error

from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.softmax import Softmax


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


def test_rows_that_are_nearly_one_hot_keep_their_digits():
    """Of a covariance that a constant added to the tangent leaves as it is; the numbers are those of 60 digits, by mpmath."""
    first = [-4.248354255291589e-18, 4.248354255291589e-18, 5.414554163536245e-35]
    second = [1.2745062765874767e-17, -1.2745062765874767e-17, -1.082910832707249e-34]
    primitive, T = Softmax(-1), torch.tensor([[0.0, -40.0, -80.0]], dtype=torch.float64)
    tangent, adjoint = torch.tensor([[[7.0, 8.0, 10.0]]]).double(), torch.tensor([[5.0, 2.0, 3.0]]).double()
    assert primitive.jvp((T,), (tangent,))[0, 0].tolist() == pytest.approx(first, rel=1e-12, abs=0)
    assert primitive.curvature((T,), adjoint, (tangent,))[0][0, 0].tolist() == pytest.approx(second, rel=1e-12, abs=0)


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
]


def test_the_default_eps_of_a_root_mean_square_is_that_of_torch():
    small = 1e-4 * random_point(20, X=(2, 3, 5))["X"].float()  # of the dtype, which shows on small rows
    assert relative_error(RMSNorm().value(small), torch.nn.functional.rms_norm(small, (5,))) < 1e-6


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[1][:30])
def test_refused(case):
    with pytest.raises(ValueError, match=case[1]):
        case[0]()
