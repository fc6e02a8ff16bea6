"""Losses: vec_r forms against autograd and exactly, the primitives against torch.func and torch's own losses."""

from __future__ import annotations

from fractions import Fraction

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

from derivations.loss import CrossEntropy, CrossEntropyAt, MeanSquaredError, MeanSquaredErrorAt
from derivations.operation import Operation

LABELS = torch.tensor([[2, 0, -100], [1, 1, 3]])


def cross_entropy(labels, smoothing=0.0, normalizer=None, ignored=-100):
    """Written with logarithms of sums, one class at a time."""

    def f(logits, _labels=None):
        kept = labels != ignored
        log_p = logits - logits.exp().sum(-1, keepdim=True).log()
        target = torch.nn.functional.one_hot(labels.where(kept, 0), logits.shape[-1]).to(logits)
        target = (1 - smoothing) * target + smoothing / logits.shape[-1]
        losses = -(target * log_p).sum(-1) * kept
        return losses.sum() / (kept.sum() if normalizer is None else normalizer)

    return f


# vec_r ---------------------------------------------------------------------------------------------------------------


def test_mean_squared_error_blocks():
    point = random_point(50, Z=(3, 4))
    target = random_point(51, T=(3, 4))["T"]
    operation = MeanSquaredErrorAt(point["Z"], target)
    assert isinstance(operation, Operation)
    check_all_blocks(operation, lambda Z: (Z - target).square().mean().reshape(1, 1), point)
    assert operation.hessian("Z", "Z").latex() == r"\frac{1}{6}\,I_{12}"


def test_cross_entropy_blocks():
    point, labels = random_point(52, logits=(3, 5)), torch.tensor([4, 0, 2])
    for given in (labels, labels.tolist()):
        operation = CrossEntropyAt(**point, labels=given)
        check_all_blocks(operation, lambda logits: cross_entropy(labels)(logits).reshape(1, 1), point)
    weights = torch.softmax(point["logits"], -1)
    overridden = CrossEntropyAt(torch.zeros(3, 5), labels, weights)
    assert relative_error(overridden.value, operation.value) < 1e-14
    assert torch.equal(overridden.hessian("logits", "logits").dense(), operation.hessian("logits", "logits").dense())


def test_exact_mean_squared_error():
    Z, target = symbols("z", 1, 3), np.array([[Fraction(1), Fraction(-2), Fraction(1, 3)]], dtype=object)
    at_point = MeanSquaredErrorAt(np.array([[Fraction(1, 2), Fraction(0), Fraction(5)]], dtype=object), target)
    assert at_point.value[0, 0] == (Fraction(1, 4) + 4 + Fraction(196, 9)) / 3
    assert at_point.jacobian("Z").dense().tolist() == [[Fraction(-1, 3), Fraction(4, 3), Fraction(28, 9)]]
    exact_target = target - np.array([[sympy.Integer(0)] * 3], dtype=object)
    symbolic = MeanSquaredErrorAt(Z, exact_target)
    assert same(symbolic.jacobian("Z").sympy(), exact_jacobian(symbolic.value, Z))
    assert same(symbolic.hessian("Z", "Z").sympy(), sympy.Rational(2, 3) * sympy.eye(3))


def test_exact_cross_entropy():
    logits, labels = symbols("l", 2, 3), [2, 0]
    loss = sum(sympy.log(sum(sympy.exp(v) for v in row)) - row[y] for row, y in zip(logits, labels, strict=True)) / 2
    odds = [[1, 2, 5], [3, 1, 1]]
    values = {s: sympy.log(v) for s, v in zip(logits.reshape(-1), [v for row in odds for v in row], strict=True)}
    weights = np.array([[Fraction(v, sum(row)) for v in row] for row in odds], dtype=object)
    point = CrossEntropyAt(np.zeros((2, 3), dtype=object), labels, weights)
    assert point.jacobian("logits").dense().tolist() == at(exact_jacobian([loss], logits), values).tolist()
    assert point.hessian("logits", "logits").dense().tolist() == at(exact_hessian([loss], logits, logits), values).tolist()
    assert sympy.simplify(point.value[0, 0] - loss.subs(values)) == 0
    symbolic = CrossEntropyAt(logits[:1], labels[:1])
    one_row = sympy.log(sum(sympy.exp(v) for v in logits[0])) - logits[0, 2]
    assert same(symbolic.jacobian("logits").sympy(), exact_jacobian([one_row], logits[:1]))


# Primitives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moving", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5,), ()])
def test_mean_squared_error_actions(shape, moving):
    inputs = tuple(random_point(53, Z=shape, T=shape).values())
    check_actions(MeanSquaredError(7.0), lambda Z, T: ((Z - T) ** 2).sum() / 7, inputs, moving)


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


def test_mean_squared_error_against_the_matrices():
    Z, target = random_point(55, Z=(3, 4), T=(3, 4)).values()
    flat = MeanSquaredErrorAt(Z, target)

    class Fixed(MeanSquaredError):  # the target bound, so that inputs and arguments agree
        def _residual(self, inputs):
            return inputs[0] - target

        def _difference(self, tangents):
            return tangents[0]

    check_against_matrices(Fixed(12.0), (Z,), flat)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("normalizer", [None, 11.0])
def test_cross_entropy_actions(smoothing, normalizer):
    logits = random_point(56, logits=(2, 3, 5))["logits"]
    primitive = CrossEntropy(label_smoothing=smoothing, normalizer=normalizer)
    check_actions(primitive, cross_entropy(LABELS, smoothing, normalizer), (logits, LABELS), (0,))
    seen = primitive.value(logits, LABELS)
    torchs = torch.nn.functional.cross_entropy(
        logits.reshape(-1, 5), LABELS.reshape(-1), label_smoothing=smoothing, reduction="mean" if normalizer is None else "sum"
    )
    assert relative_error(seen, torchs / (normalizer or 1)) < 1e-14
    assert primitive.vjp((logits, LABELS), torch.ones(1).double())[1] is None


def test_cross_entropy_against_the_matrices_and_other_ignored_labels():
    logits, labels = random_point(57, logits=(3, 4))["logits"], torch.tensor([3, 1, 0])
    operation = CrossEntropyAt(logits, labels)
    eye, w = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4), torch.tensor(-1.3, dtype=torch.float64)
    seen = CrossEntropy().curvature((logits, labels), w, (eye, None))[0].reshape(12, 12)
    assert relative_error(seen, -1.3 * operation.hessian("logits", "logits").dense()) < 1e-14
    assert relative_error(CrossEntropy().jvp((logits, labels), (eye, None)), operation.jacobian("logits").dense()[0]) < 1e-14
    padded = CrossEntropy(ignore_index=1)
    check_actions(padded, cross_entropy(labels, ignored=1), (logits, labels), (0,))


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


def test_parts_of_a_batch_add_up_under_one_normalizer():
    logits = random_point(58, logits=(2, 3, 5))["logits"]
    kept = float((LABELS != -100).sum())
    primitive = CrossEntropy(normalizer=kept)
    parts = [primitive.value(logits[i], LABELS[i]) for i in range(2)]
    assert relative_error(parts[0] + parts[1], CrossEntropy().value(logits, LABELS)) < 1e-15


def test_float32():
    logits, t = random_point(59, logits=(2, 3, 5), t=(4, 2, 3, 5)).values()
    one = torch.tensor(1.0)
    single = CrossEntropy().curvature((logits.float(), LABELS), one, (t.float(), None))[0]
    assert relative_error(single.double(), CrossEntropy().curvature((logits, LABELS), one.double(), (t, None))[0]) <= 1e-6


def test_losses_mix_rows_but_their_curvature_does_not():
    Z = torch.zeros(2, 3, 5)
    for loss, inputs, largest in ((MeanSquaredError(1.0), (Z, Z), 3), (CrossEntropy(), (Z, LABELS), 2)):
        assert not loss.rowwise(inputs, 1, (True, False))
        assert [loss.separable(inputs, axes, (True, False)) for axes in (1, largest, largest + 1)] == [True, True, False]


def test_errors():
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(ValueError, match=r"need integer labels of shape \(2, 3\), got torch.float32"):
        CrossEntropy().value(logits, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="The classes are the last axis"):
        CrossEntropy().value(logits, LABELS[:1])
    with pytest.raises(ValueError, match="all 6 labels are -100"):
        CrossEntropy().value(logits, torch.full((2, 3), -100))
    with pytest.raises(ValueError, match="labels have no tangent"):
        CrossEntropy().jvp((logits, LABELS), (None, None))
    with pytest.raises(ValueError, match=r"shape \(2,\) and the target \(3,\)"):
        MeanSquaredError(1.0).value(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="every tangent is None"):
        MeanSquaredError(1.0).jvp((logits, logits), (None, None))
    with pytest.raises(ValueError, match="the target"):
        MeanSquaredErrorAt(torch.zeros(1, 2), torch.zeros(2, 1))
    for labels in ([0], [0, 5]):
        with pytest.raises(ValueError, match="need L labels below C"):
            CrossEntropyAt(torch.zeros(2, 5), labels)
    with pytest.raises(ValueError, match="no argument is called 'target'"):
        MeanSquaredErrorAt(torch.zeros(1, 2), torch.zeros(1, 2)).jacobian("target")
