"""Group normalisation of the features of each row against torch.nn.functional.group_norm written out."""

from fractions import Fraction

import pytest
import torch
from second_order_reference import check_all_blocks, random_point, relative_error
from structured_reference import check_structure_of_all_blocks, integers

from derivations.group_normalization import GroupNormRowsAt
from derivations.normalization import LayerNormAt

EVERYTHING = random_point(0, X=(2, 6), gamma=(6,), beta=(6,))


def reference(groups, eps, kind="layernorm"):
    """The statistics by hand: fused norms with gains are differentiated wrongly by some of torch's routes."""

    def f(X, gamma=1.0, beta=0.0):
        parts = X.reshape(len(X), groups, -1)
        centred = parts - parts.mean(-1, keepdim=True) if kind == "layernorm" else parts
        return (centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(X.shape) * gamma + beta

    return f


@pytest.mark.parametrize("names", [("X",), ("X", "gamma"), ("X", "beta"), ("X", "gamma", "beta")])
@pytest.mark.parametrize("groups", [2, 3])
def test_all_blocks_equal_autograd(names, groups):
    point = {name: EVERYTHING[name] for name in names}
    operation = GroupNormRowsAt(groups=groups, eps=0.3, **point)
    check_all_blocks(operation, reference(groups, 0.3), point)
    check_structure_of_all_blocks(operation, point["X"])


@pytest.mark.parametrize("names", [("X",), ("X", "gamma")])
def test_all_blocks_of_rms_norm_equal_autograd(names):
    point = {name: EVERYTHING[name] for name in names}
    operation = GroupNormRowsAt(groups=2, eps=0.3, kind="rmsnorm", **point)
    check_all_blocks(operation, reference(2, 0.3, "rmsnorm"), point)
    check_structure_of_all_blocks(operation, point["X"])


def test_value_is_that_of_torch():
    X, gamma, beta = EVERYTHING.values()
    seen = GroupNormRowsAt(X, 3, gamma, beta, eps=1e-5).value
    assert relative_error(seen, torch.nn.functional.group_norm(X, 3, gamma, beta, eps=1e-5)) <= 1e-13


def test_one_group_is_layer_norm():
    one, norm = GroupNormRowsAt(groups=1, **EVERYTHING), LayerNormAt(**EVERYTHING)
    for i in EVERYTHING:
        assert relative_error(one.jacobian(i).dense(), norm.jacobian(i).dense()) <= 1e-14
        for j in EVERYTHING:
            like = EVERYTHING["X"]
            assert relative_error(one.hessian(i, j).dense(like), norm.hessian(i, j).dense(like)) <= 1e-14


def test_groups_of_a_row_do_not_mix():
    J = GroupNormRowsAt(EVERYTHING["X"], 2).jacobian("X").dense().reshape(2, 2, 3, 2, 2, 3)
    for row in range(2):
        for group in range(2):
            J[row, group, :, row, group] = 0
    assert not J.any()


def test_exact_numbers_stay_exact():
    X = integers(2, 1, 4)
    point = GroupNormRowsAt(X, 2, integers(3, 4), eps=[1 - ((a - b) / 2) ** 2 for a, b in X.reshape(2, 2)])
    assert all(isinstance(v, int | Fraction) for v in point.hessian("X", "X").dense().reshape(-1))
    assert point.norm.s.reshape(-1).tolist() == [1, 1]


def test_latex():
    X, gamma, _ = EVERYTHING.values()
    point = GroupNormRowsAt(X, 2, gamma)
    of_groups = LayerNormAt(X.reshape(4, 3)).jacobian("X").latex()
    assert point.jacobian("X").latex() == rf"\left(I_{{2}}\otimes \operatorname{{diag}}(\gamma)\right)\,{of_groups}"
    assert point.jacobian("gamma").latex() == (
        r"\operatorname{diag}(\operatorname{vec}_r(\hat X))\,\left(\mathbf{1}_{2}\otimes I_{6}\right)"
    )


def test_errors():
    X, gamma, _ = EVERYTHING.values()
    with pytest.raises(ValueError, match=r"X must be L x d with d a multiple of the 4 groups, got \(2, 6\)"):
        GroupNormRowsAt(X, 4)
    with pytest.raises(ValueError, match="there is no kind 'rms'; the kinds are 'layernorm' and 'rmsnorm'"):
        GroupNormRowsAt(X, 2, kind="rms")
    with pytest.raises(ValueError, match=r"gamma and beta must have shape \(6,\)"):
        GroupNormRowsAt(X, 2, gamma[:3])
    with pytest.raises(ValueError, match=r"GroupNormRowsAt\.hessian.*: no argument is called 'beta'"):
        GroupNormRowsAt(X, 2, gamma).hessian("X", "beta")
