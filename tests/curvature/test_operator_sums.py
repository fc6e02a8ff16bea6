"""Sums and multiples of operators, and vectors as tensors in the shapes of the parameters, against the matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import cross_entropy, draw, randomised, reverse_over_reverse
from operator_cases import EXACT, error
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.solving import solve

MODULE = randomised(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)))
X, LABELS = draw(6, 3), torch.tensor([0, 1, 1, 0, 1, 0])
FIRST = hk.hessian_operator(MODULE, X, LABELS, loss="cross_entropy")
SECOND = hk.hessian_operator(MODULE, 2 * X, LABELS, loss="cross_entropy")
H = reverse_over_reverse(MODULE, X, LABELS, cross_entropy)
K = reverse_over_reverse(MODULE, 2 * X, LABELS, cross_entropy)
SUMS: dict[str, tuple[Any, Tensor]] = {
    "sum": (sum([FIRST, SECOND]), H + K),
    "+": (FIRST + SECOND, H + K),
    "-": (FIRST - SECOND, H - K),
    "multiples": (2 * FIRST + SECOND * np.float64(0.5) - FIRST * torch.tensor(3.0), -H + K / 2),
    "quotient": (-FIRST / 4, -H / 4),
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
    narrow = hk.hessian_operator(MODULE, X, LABELS, loss="cross_entropy", params=["0.*"])
    with pytest.raises(hk.InputError, match=r"terms are 14 x 14 in torch.float64 on cpu and 8 x 8"):
        FIRST + narrow
    with pytest.raises(TypeError, match="unsupported operand"):
        1 + FIRST


def named(vector: Tensor) -> dict[str, Tensor]:
    return {name: vector[FIRST.slices[name]].reshape(p.shape) for name, p in MODULE.named_parameters()}


VECTORS: dict[str, Callable[[Tensor], Any]] = {
    "by name": named,
    "in another order": lambda v: dict(reversed(named(v).items())),
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
        assert {n: x.shape for n, x in shaped.items()} == {n: p.shape for n, p in MODULE.named_parameters()}
        assert error(torch.cat([shaped[n].reshape(-1) for n in FIRST.names]), expected) <= 1e-7


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "a missing name": (lambda: FIRST @ {"0.weight": draw(2, 3)}, r"nothing for '0.bias' \(2,\); expected a tensor in the shape of"),
    "another name": (lambda: FIRST.solve({**named(draw(len(H))), "more": draw(1)}), "5 tensors; expected a tensor in the shape of"),
    "another shape": (lambda: FIRST @ [draw(3, 2), draw(2), draw(2, 2), draw(2)], r"\(3, 2\) for '0.weight' \(2, 3\)"),
    "no tensor": (lambda: FIRST @ [draw(2, 3), None, draw(2, 2), draw(2)], r"NoneType for '0.bias'"),
    "text": (lambda: FIRST.solve("b"), r"solve: b is a str; expected a vector \(14,\)"),
    "nothing": (lambda: FIRST.solve(None), r"solve: b is a NoneType; expected a vector \(14,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_vectors(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(hk.InputError, match=message):
        call()
