"""Blocks of an operator, its block-diagonal part, and the Jacobian of the output with its transpose."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, assert_one_clear_error, draw, mse, reverse_over_reverse
from operator_cases import EXACT, TOKENS, T, TiedBlock, X, block, error
from scipy.sparse.linalg import eigsh, lsqr
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.jacobian import jacobian_operator
from hessiankit.curvature.operator import hessian_operator

ROWS: dict[str, Any] = {
    "a name": ("norm_1.weight", ["norm_1.weight"]),
    "a pattern": ("attention.*", ["attention.W_Q", "attention.W_K", "attention.W_V"]),
    "a list, in another order": (["norm_1.bias", "attention.W_Q"], ["attention.W_Q", "norm_1.bias"]),
}


def scaled() -> Any:  # a parameter without axes
    return Formula(lambda m, x: torch.tanh(x @ m.W) * m.scale, W=(4, 3), scale=()), X


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
    H, operator, planned = hk.hessian(*call), hessian_operator(*call), hk.hessian_function(*call)()
    for found in (H, pickle.loads(pickle.dumps(hk.hessian_function(*call)))(), planned, hk.hessian(*call, lazy=True)):
        assert torch.equal(found.block("b.weight", "a.bias"), found.block("a.weight", "a.bias"))
        assert torch.equal(found.block("b.weight[0]", "a.bias"), found.block("a.weight[0]", "a.bias"))
    assert torch.equal(operator["b.*"].rows, operator["a.weight"].rows)
    assert torch.equal(hk.hessian_diagonal(*call)["b.weight"], hk.hessian_diagonal(*call)["a.weight"])
    assert hk.frobenius_norms(*call).block("b.weight", "b.weight") == hk.frobenius_norms(*call).block("a.weight", "a.weight")
    assert hk.spectrum(operator, k=1, by={"b.weight": "tied"}).groups["tied"].size == 4
    with pytest.raises(hk.InputError, match=r"no parameter 'b\.bias'"):
        H.block("b.bias", "a.bias")


def test_parts_of_parameters_and_one_selection_for_both() -> None:
    module = block()
    operator = hessian_operator(module, X, T)
    whole = operator.to_matrix()
    start = operator.slices["attention.W_Q"].start
    at = start + torch.tensor([0, 2, 4, 6])  # the first column of (4, 2)
    for key in ("attention.W_Q[:, 0]", "*.W_Q[:, 0]"):
        assert torch.equal(operator[key].rows, at)
        assert error(operator[key].to_matrix(), whole[at][:, at]) <= EXACT
    assert torch.equal(operator[["*"]].rows, torch.arange(operator.shape[0]))
    top = eigsh(operator["attention.*"], k=1, return_eigenvectors=False)[0]
    inside = operator["attention.*"].to_matrix()
    values = torch.linalg.eigvalsh(inside)
    assert top == pytest.approx(float(max(values, key=abs)), rel=1e-9)


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


@pytest.mark.parametrize("make", [lambda: (block(), X), lambda: (TiedBlock().double(), TOKENS), scaled])
def test_jacobian_is_that_of_autograd(make: Any) -> None:
    module, inputs = make()
    z = module(inputs).reshape(-1)
    leaves = list(module.parameters())
    rows = [torch.autograd.grad(entry, leaves, retain_graph=True) for entry in z]
    expected = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])
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
@pytest.mark.parametrize("seed", range(3))
def test_outputs_with_a_constant_sum_are_compared(last: str, seed: int) -> None:
    """The gradient of the plain sum of the outputs is rounding there, and would tell nothing."""
    module = Formula(lambda m, x: CONSTANT_SUMS[last](torch.tanh(x @ m.W) @ m.V), W=(4, 5), V=(5, 3))
    expected = torch.autograd.functional.jacobian(lambda W: CONSTANT_SUMS[last](torch.tanh(X @ W) @ module.V), module.W.detach())
    x = draw(*X.shape, seed=seed)
    jacobian_operator(module, x)
    J = jacobian_operator(module, X, params="W")
    assert error(J.to_matrix(), expected.reshape(J.shape)) <= EXACT
    module.W.register_hook(lambda slope: 2 * slope)
    with pytest.raises(hk.TraceError, match="a hook on the parameter"):
        jacobian_operator(module, X)


def test_gauss_newton_of_squared_error_is_the_jacobians_gram_matrix() -> None:
    module = block()
    J = jacobian_operator(module, X)
    G = hessian_operator(module, X, T, kind="ggn")
    v = draw(G.shape[0], seed=2)
    assert error(2 / T.numel() * (J.T @ (J @ v)), G @ v) <= EXACT
    found = lsqr(J, J @ v.numpy(), atol=1e-14, btol=1e-14)[0]
    assert np.allclose(J @ found, J @ v.numpy(), rtol=1e-8)


HOLDERS: dict[str, Callable[[nn.Module, Tensor], Callable[[], Tensor]]] = {
    "a buffer": lambda m, t: m.register_buffer("scale", t) or (lambda: m.scale),
    "a list": lambda m, t: setattr(m, "held", [t]) or (lambda: m.held[0]),
    "a variable of a function": lambda m, t: lambda: t,
    "a variable of a function, expanded": lambda m, t: lambda: t[:1].expand(3),
}
OPERATORS: dict[str, Callable[[nn.Module], Any]] = {
    "Jacobian": lambda m: jacobian_operator(m, X[0]),
    "Hessian": lambda m: hessian_operator(m, X[0], T[0, :, :3]),
    "in parts": lambda m: hessian_operator(m, X[0], T[0, :, :3], micro_batch=2),
    "recomputed": lambda m: hessian_operator(m, X[0], T[0, :, :3], recompute="layers"),
}


@pytest.mark.parametrize(
    ("holder", "operator"), [(h, o) for k, h in enumerate(HOLDERS) for n, o in enumerate(OPERATORS) if n == k or n == 1]
)
def test_operators_do_not_move_with_a_constant(holder: str, operator: str) -> None:
    scale = torch.ones(3, dtype=torch.float64)
    module = Formula(lambda m, x: torch.tanh(x @ m.W) * read(), W=(4, 3))
    read = HOLDERS[holder](module, scale)
    made = OPERATORS[operator](module)
    before = made @ torch.ones(made.shape[1], dtype=torch.float64)
    scale.mul_(4.0)
    assert torch.equal(made @ torch.ones(made.shape[1], dtype=torch.float64), before)
    assert not torch.allclose(OPERATORS[operator](module) @ torch.ones(made.shape[1], dtype=torch.float64), before)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


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
        (lambda: jacobian_operator(Pair(), X), "the module returns a tuple; wrap it"),
        (lambda: jacobian_operator(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).double(), X), "dropout"),
        (lambda: jacobian_operator(block(), X * float("nan")), "NaN"),
        (lambda: jacobian_operator(block(), X).sample_gradients(torch.zeros(3)), r"expected \(2, 3, 4\)"),
    ],
)
def test_what_cannot_be_is_one_clear_error(call: Any, said: str) -> None:
    assert_one_clear_error(call, said)


def test_a_parameter_without_effect_and_a_fallback() -> None:
    module = Formula(lambda m, x: torch.sinc(x @ m.W), W=(4, 2), unused=(3,))
    J = jacobian_operator(module, X[0], params=["W", "unused"])
    assert J.fallbacks
    assert float(J.to_matrix()[:, J.slices["unused"]].abs().max()) == 0
    module.W.data.zero_()  # the operator keeps its point
    assert float((J @ draw(J.shape[1])).abs().max()) > 0
