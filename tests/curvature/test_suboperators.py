"""Blocks of an operator, its block-diagonal part, and the Jacobian of the output with its transpose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, assert_one_clear_error, draw, jacobian_rows, mse, reverse_over_reverse
from operator_cases import EXACT, TOKENS, T, TiedBlock, X, block, error
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.jacobian import jacobian_operator
from hessiankit.curvature.operator import hessian_operator

ROWS: dict[str, Any] = {
    "a name": ("norm_1.weight", ["norm_1.weight"]),
    "a pattern": ("attention.*", ["attention.W_Q", "attention.W_K", "attention.W_V"]),
    "a list, in another order": (["norm_1.bias", "attention.W_Q"], ["attention.W_Q", "norm_1.bias"]),
}
SCALED = Formula(lambda m, x: torch.tanh(x @ m.W) * m.scale, W=(4, 3), scale=())  # a parameter without axes


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("columns", ROWS)
def test_blocks_are_those_of_reverse_over_reverse(rows: str, columns: str) -> None:
    module = block()
    whole = reverse_over_reverse(module, X, T, mse)
    operator = hessian_operator(module, X, T)

    def at(names: list[str]) -> Tensor:
        every = torch.arange(operator.shape[0])
        return torch.cat([every[operator.slices[name]] for name in operator.names if name in names])

    (asked_i, i), (asked_j, j) = ROWS[rows], ROWS[columns]
    expected = whole[at(i)][:, at(j)]
    found = operator[asked_i, asked_j]
    assert found.shape == expected.shape
    assert error(found.to_matrix(), expected) <= EXACT
    u = draw(expected.shape[0], seed=4)
    assert error(found.T @ u, expected.T @ u) <= EXACT
    assert np.allclose(found.T @ u.numpy(), expected.T @ u, rtol=1e-10)


def test_the_second_name_of_a_tied_parameter() -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), tanh=nn.Tanh(), b=nn.Linear(2, 2, bias=False))).double()
    module.b.weight = module.a.weight
    call = (module, X.reshape(-1, 2), draw(X.numel() // 2, 2, seed=3))
    operator = hessian_operator(*call)
    for found in (hk.hessian(*call), hk.hessian_function(*call)(), hk.hessian(*call, lazy=True)):
        assert torch.equal(found.block("b.weight", "a.bias"), found.block("a.weight", "a.bias"))
        assert torch.equal(found.block("b.weight[0]", "a.bias"), found.block("a.weight[0]", "a.bias"))
        with pytest.raises(hk.InputError, match=r"no parameter 'b\.bias'"):
            found.block("b.bias", "a.bias")
    assert torch.equal(operator["b.*"].rows, operator["a.weight"].rows)
    assert torch.equal(hk.hessian_diagonal(*call)["b.weight"], hk.hessian_diagonal(*call)["a.weight"])
    assert hk.frobenius_norms(*call).block("b.weight", "b.weight") == hk.frobenius_norms(*call).block("a.weight", "a.weight")
    assert hk.spectrum(operator, k=1, by={"b.weight": "tied"}).groups["tied"].size == 4


def test_parts_of_parameters_and_one_selection_for_both() -> None:
    operator = hessian_operator(block(), X, T)
    whole = operator.to_matrix()
    at = operator.slices["attention.W_Q"].start + torch.tensor([0, 2, 4, 6])  # the first column of (4, 2)
    for key in ("attention.W_Q[:, 0]", "*.W_Q[:, 0]"):
        assert torch.equal(operator[key].rows, at)
        assert error(operator[key].to_matrix(), whole[at][:, at]) <= EXACT
    assert torch.equal(operator[["*"]].rows, torch.arange(operator.shape[0]))
    top = eigsh(operator["attention.*"], k=1, return_eigenvectors=False)[0]
    assert abs(top) == pytest.approx(float(torch.linalg.eigvalsh(operator["attention.*"].to_matrix()).abs().max()), rel=1e-9)


def test_block_diagonal_of_any_grouping() -> None:
    module = block()
    operator = hessian_operator(module, X, T)
    whole, mask = operator.to_matrix(), torch.zeros(operator.shape)
    groups: dict[str, Any] = {"attention": "attention.*", "half of a weight": ["feedforward.W_1[:, 0:2]", "norm_2.weight"]}
    for of in groups.values():
        at = operator[of].rows
        mask[at.unsqueeze(1), at] = 1
    found = operator.block_diagonal(groups)
    assert error(found.to_matrix(), whole * mask) <= EXACT
    v = draw(operator.shape[0], 2, seed=5)
    assert error(found @ v, (whole * mask) @ v) <= EXACT
    assert found.T is found
    by_tensor = torch.block_diag(*(whole[rows, rows] for rows in operator.slices.values()))
    assert error(operator.block_diagonal().to_matrix(), by_tensor) <= EXACT


@pytest.mark.parametrize(("module", "inputs"), [(block(), X), (TiedBlock().double(), TOKENS), (SCALED, X)])
def test_jacobian_is_that_of_autograd(module: nn.Module, inputs: Tensor) -> None:
    expected = jacobian_rows(module(inputs), list(module.parameters()))
    J = jacobian_operator(module, inputs)
    assert J.output_shape == tuple(module(inputs).shape)
    assert error(J.to_matrix(), expected) <= EXACT
    assert error(J.T.to_matrix(), expected.T) <= EXACT
    u, v = draw(3, J.shape[0], seed=1).T, draw(J.shape[1], seed=2)
    assert error(J.T @ u, expected.T @ u) <= EXACT
    assert error(J @ v, expected @ v) <= EXACT
    assert J.T.T is J
    cotangents = draw(*J.output_shape, seed=3)
    own = (cotangents.reshape(-1, 1) * expected).reshape(len(cotangents), -1, J.shape[1]).sum(1)
    J.block_size = 2
    assert error(J.sample_gradients(cotangents), own) <= EXACT


CONSTANT_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda z: z.softmax(-1),
    "LayerNorm": lambda z: nn.functional.layer_norm(z, z.shape[-1:]),
    "differences": lambda z: z - z.mean(),
}


@pytest.mark.parametrize("last", CONSTANT_SUMS)
def test_outputs_with_a_constant_sum_are_compared(last: str) -> None:
    """The gradient of the plain sum of the outputs is rounding there, and would tell nothing."""
    module = Formula(lambda m, x: CONSTANT_SUMS[last](torch.tanh(x @ m.W) @ m.V), W=(4, 5), V=(5, 3))
    jacobian_operator(module, X)
    module.W.register_hook(lambda slope: 2 * slope)
    with pytest.raises(hk.TraceError, match="a hook on the parameter"):
        jacobian_operator(module, X)


OPERATORS: dict[str, Callable[[nn.Module], Any]] = {
    "Jacobian": lambda m: jacobian_operator(m, X[0]),
    "Hessian": lambda m: hessian_operator(m, X[0], T[0, :, :3]),
    "in parts": lambda m: hessian_operator(m, X[0], T[0, :, :3], micro_batch=2),
    "recomputed": lambda m: hessian_operator(m, X[0], T[0, :, :3], recompute="layers"),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_do_not_move_with_a_constant(operator: str) -> None:
    """One in a closure, of which a view is read too."""
    scale = torch.ones(3, dtype=torch.float64)
    module = Formula(lambda m, x: torch.tanh(x @ m.W) * scale * scale[:1].expand(3), W=(4, 3))
    found = OPERATORS[operator](module)
    v = torch.ones(found.shape[1], dtype=torch.float64)
    before = found @ v
    scale.mul_(4.0)
    assert torch.equal(found @ v, before)
    assert not torch.allclose(OPERATORS[operator](module) @ v, before)


OPERATOR = hessian_operator(block(), X, T)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: OPERATOR["attention.W_X"], "no parameter 'attention.W_X'; did you mean 'attention.W_"),
        (lambda: OPERATOR["a", "b", "c"], "no parameter 'a'"),
        (lambda: OPERATOR[0], "asked for by its name, not by a value 0"),
        (lambda: OPERATOR[[]], "an empty list selects no parameter"),
        (lambda: OPERATOR["norm_1.weight[9]"], "has 4 entries, the index is 9"),
        (lambda: OPERATOR.block_diagonal({"a": "norm_1.*", "b": "*.bias"}), "groups 'a' and 'b' share entry"),
        (
            lambda: OPERATOR["norm_1.weight"] @ torch.zeros(3),
            r"SubOperator: cannot multiply with shape \(3,\); expected a vector",
        ),
        (lambda: jacobian_operator(block(), X).sample_gradients(torch.ones(X.shape)), "float32; expected .* torch.float64"),
        (
            lambda: jacobian_operator(Formula(lambda m, x: (m.l(x), x), l=nn.Linear(4, 2)), X),
            "the module returns a tuple; wrap it",
        ),
        (lambda: jacobian_operator(block(), X).sample_gradients(torch.zeros(3)), r"expected \(2, 3, 4\)"),
    ],
)
def test_what_cannot_be_is_one_clear_error(call: Any, said: str) -> None:
    assert_one_clear_error(call, said)
