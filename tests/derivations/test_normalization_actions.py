"""The LayerNorm and RMSNorm primitives: against torch.func, the vec_r matrices and torch's own kernels."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions, check_against_matrices
from second_order_reference import random_point, relative_error

from derivations.normalization import LayerNorm, LayerNormAt, RMSNorm, RMSNormAt

SHAPES = [((3, 4), 1), ((4,), 1), ((2, 3, 5), 1), ((2, 3, 4), 2), ((2, 1, 3, 2, 2), 3)]


def layer_norm(eps, dims):
    def f(X, gamma=1.0, beta=0.0):
        axes = tuple(range(-dims, 0))
        centred = X - X.mean(axes, keepdim=True)
        return centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt() * gamma + beta

    return f


def rms_norm(eps, dims):
    def f(X, gamma=1.0):
        return X / (X.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps).sqrt() * gamma

    return f


def inputs_of(shape, dims, present):
    point = random_point(20, X=shape, gamma=shape[len(shape) - dims :], beta=shape[len(shape) - dims :])
    return tuple(point[name] if name in present else None for name in ("X", "gamma", "beta"))


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
def test_layernorm_actions(shape, dims, moving):
    inputs = inputs_of(shape, dims, ("X", "gamma", "beta"))
    check_actions(LayerNorm(dims, 1e-5), layer_norm(1e-5, dims), inputs, moving)


@pytest.mark.parametrize(("shape", "dims"), SHAPES)
@pytest.mark.parametrize("moving", [(0,), (1,), (0, 1)])
def test_rmsnorm_actions(shape, dims, moving):
    check_actions(RMSNorm(dims, 1e-3), rms_norm(1e-3, dims), inputs_of(shape, dims, ("X", "gamma"))[:2], moving)


@pytest.mark.parametrize("present", [("X",), ("X", "gamma"), ("X", "gamma", "beta")])
def test_absent_gain_and_shift(present):
    inputs = inputs_of((3, 4), 1, present)
    given = tuple(x for x in inputs if x is not None)
    for eps in (0.0, 0.5):
        check_actions(LayerNorm(1, eps), layer_norm(eps, 1), inputs, (0,))
        check_actions(LayerNorm(1, eps), layer_norm(eps, 1), given, (0,))
    if "beta" not in present:
        check_actions(RMSNorm(1, 0.5), rms_norm(0.5, 1), given, (0,))
        check_actions(RMSNorm(1, 0.5), rms_norm(0.5, 1), inputs[:2], (0,))


def test_shift_without_gain():
    X, _, beta = inputs_of((3, 4), 1, ("X", "gamma", "beta"))
    check_actions(LayerNorm(1, 0.1), lambda X, beta: layer_norm(0.1, 1)(X, 1.0, beta), (X, None, beta), (0, 2))


def test_against_the_vec_r_matrices():
    point = random_point(21, X=(3, 4), gamma=(4,), beta=(4,))
    inputs = tuple(point.values())
    check_against_matrices(LayerNorm(1, 0.2), inputs, LayerNormAt(**point, eps=0.2))
    check_against_matrices(RMSNorm(1, 0.2), inputs[:2], RMSNormAt(*inputs[:2], eps=0.2))


def test_values_are_torchs():
    X, gamma, beta = inputs_of((2, 3, 5), 1, ("X", "gamma", "beta"))
    assert relative_error(LayerNorm().value(X, gamma, beta), torch.nn.functional.layer_norm(X, (5,), gamma, beta)) < 1e-14
    assert relative_error(RMSNorm().value(X, gamma), torch.nn.functional.rms_norm(X, (5,), gamma)) < 1e-14
    small = 1e-4 * X.float()  # torch's default eps is the machine epsilon of the dtype, which shows on small rows
    assert relative_error(RMSNorm().value(small), torch.nn.functional.rms_norm(small, (5,))) < 1e-6


def test_tangents_in_any_memory_layout():
    X, gamma, beta = inputs_of((2, 3, 5), 1, ("X", "gamma", "beta"))
    norm, t = LayerNorm(), torch.randn(4, 3, 2, 5, dtype=torch.float64).transpose(1, 2)
    adjoint = torch.randn(3, 2, 5, dtype=torch.float64).transpose(0, 1)
    repeated = torch.randn(4, 1, 1, 5, dtype=torch.float64).expand(4, 2, 3, 5)
    for tangent in (t, repeated):
        before = tangent.clone()
        tangents = (tangent, None, None)
        packed = (tangent.contiguous(), None, None)
        assert relative_error(norm.jvp((X, gamma, beta), tangents), norm.jvp((X, gamma, beta), packed)) < 1e-15
        for seen, expected in zip(
            norm.curvature((X, gamma, beta), adjoint, tangents),
            norm.curvature((X, gamma, beta), adjoint.contiguous(), packed),
            strict=True,
        ):
            assert (seen is None and expected is None) or relative_error(seen, expected) < 1e-14
        assert torch.equal(tangent, before)


def test_parameters_that_require_grad():
    module = torch.nn.LayerNorm(4).double()
    X = torch.randn(3, 4, dtype=torch.float64)
    inputs = (X, module.weight, module.bias)
    assert LayerNorm().jvp(inputs, (torch.randn(2, 3, 4, dtype=torch.float64), None, None)).shape == (2, 3, 4)
    assert LayerNorm().vjp(inputs, torch.randn(2, 3, 4, dtype=torch.float64))[1].shape == (2, 4)


def test_float32_agrees_to_its_precision():
    inputs = inputs_of((6, 32), 1, ("X", "gamma", "beta"))
    generator = torch.Generator().manual_seed(5)
    t, w = (torch.randn(*s, 6, 32, generator=generator, dtype=torch.float64) for s in ((3,), ()))
    single = tuple(x.float() for x in inputs)
    for norm, n in ((LayerNorm(), 3), (RMSNorm(), 2)):
        double = norm.curvature(inputs[:n], w, (t, None, None)[:n])
        for a, b in zip(norm.curvature(single[:n], w.float(), (t.float(), None, None)[:n]), double, strict=True):
            assert (a is None and b is None) or relative_error(a.double(), b) <= 2e-6


def test_rows_stay_apart_unless_the_gain_moves():
    inputs = inputs_of((2, 3, 5), 1, ("X", "gamma", "beta"))
    norm = LayerNorm()
    assert norm.rowwise(inputs, 2, (True, False, False))
    assert not norm.rowwise(inputs, 3, (True, False, False))
    assert not norm.rowwise(inputs, 1, (True, True, False))
    assert not LayerNorm(2).rowwise(inputs, 2, (True, False, False))
    t = torch.zeros(1, 2, 3, 5, dtype=torch.float64)
    t[:, 1, 2] = 1.0 + torch.arange(5)
    moved = norm.jvp(inputs, (t, None, None))
    assert moved[0, 1, 2].abs().max() > 0
    moved[0, 1, 2] = 0
    assert moved.abs().max() == 0


def test_errors():
    X, gamma, _ = inputs_of((3, 4), 1, ("X", "gamma", "beta"))
    with pytest.raises(ValueError, match=r"gamma must have the shape \(4,\) of the last 1 axes of X, got \(3,\)"):
        LayerNorm().value(X, gamma[:3])
    with pytest.raises(ValueError, match="every tangent is None"):
        LayerNorm().jvp((X, gamma), (None, None))
