"""The tree of inequalities: every line bounds what it names, and says how."""

from __future__ import annotations

import pytest
import torch

from derivations.matrix import BlockDiagonal, Commutation, Dense, Identity, Matrix, Named, definitions, inequalities, kron


def dense(m: int, n: int, symbol: str, seed: int) -> Matrix:
    return Dense(torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), symbol)


A, B, C = dense(3, 4, "A", 0), dense(4, 3, "B", 1), dense(3, 3, "C", 2)


@pytest.mark.parametrize(
    ("matrix", "rule", "bound"),
    [
        (A @ B, r"\|A\|\,\|B\|", lambda a, b, c: a * b),
        (A @ B + C, r"\|A\|\,\|B\| + \|C\|", lambda a, b, c: a * b + c),
        (A @ B - 3 * C, r"\|A\|\,\|B\| + 3\cdot \|C\|", lambda a, b, c: a * b + 3 * c),
        (C @ (A @ B + C), r"\|C\|\,\left(\|A\|\,\|B\| + \|C\|\right)", lambda a, b, c: c * (a * b + c)),
        (kron(Identity(2), A) @ Commutation(2, 4), r"\|A\|", lambda a, b, c: a),
        (kron(A, C.T), r"\|A\|\,\|C\|", lambda a, b, c: a * c),
        (BlockDiagonal([C, 2 * C]), r"\max_h \|C\|", lambda a, b, c: 2 * c),
        (Commutation(2, 3), "1", lambda a, b, c: 1.0),
    ],
)
def test_rules(matrix, rule, bound):
    (line,) = inequalities(matrix, "M")
    assert line.rule == rule
    norms = [float(torch.linalg.matrix_norm(X.dense(), 2)) for X in (A, B, C)]
    assert line.bound == pytest.approx(bound(*norms))
    assert line.bound >= float(torch.linalg.matrix_norm(matrix.dense(), 2)) * (1 - 1e-12)


def test_named_parts_follow():
    J = Named("J", A @ B)
    lines = inequalities(Named("H", J @ C + J.T), "H")
    assert [(line.symbol, line.rule) for line in lines] == [("H", r"\|J\|\,\|C\| + \|J\|"), ("J", r"\|A\|\,\|B\|")]
    by_name = {line.symbol: line.bound for line in lines}
    assert by_name["H"] == pytest.approx(by_name["J"] * C.norm_bound() + by_name["J"])
    assert [d.symbol for d in definitions(J @ C)] == ["J"]
