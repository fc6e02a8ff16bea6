"""The diagonal of lifted curvature, against jacobians written out as matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from curvature_reference import draw
from torch import Tensor

from hessiankit.engine.diagonal_accumulation import across, along, by_column, is_by_column, product_by_column
from hessiankit.engine.jacobians import GainJacobian, IndexJacobian, ParameterJacobian, WeightJacobian

ROWS, WIDTH, SIZE = 6, 3, 20  # of a parameter of which jacobians reach some entries


def written_out(u: ParameterJacobian) -> Tensor:
    """The derivative (rows, columns, SIZE) of the value by all entries of the parameter, one entry at a time."""
    J = torch.zeros(ROWS, WIDTH, SIZE, dtype=torch.float64)
    at = torch.arange(u.size) if u.at is None else u.at.reshape(-1)
    for e, position in enumerate(at.tolist()):
        if isinstance(u, WeightJacobian):
            rows = u.weights.shape[1]
            i, p = (e % rows, e // rows) if u.transposed else (e // WIDTH, e % WIDTH)
            J[:, p, position] += u.weights[:, i]
        elif isinstance(u, GainJacobian):
            J[:, e, position] += u.weights[:, e]
        else:
            assert isinstance(u, IndexJacobian)
            J[:, :, position] += (u.which == e).double()
    return J


def positions(n: int, seed: int) -> Tensor:
    return torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))[:n]


TABLE = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 1, 2], [0, 4, 2], [3, 4, 2], [0, 1, 5]])
LIFTS: dict[str, ParameterJacobian] = {
    "weight": WeightJacobian("W", positions(12, 1), draw(ROWS, 4), WIDTH, transposed=False),
    "transposed weight": WeightJacobian("W", positions(15, 2), draw(ROWS, 5, seed=2), WIDTH, transposed=True),
    "gain": GainJacobian("W", positions(3, 3), draw(ROWS, WIDTH, seed=3)),
    "bias": GainJacobian("W", None, torch.ones((), dtype=torch.float64).expand(ROWS, WIDTH)),
    "table": IndexJacobian("W", positions(6, 4), TABLE),
    "table across columns": IndexJacobian("W", positions(6, 5), TABLE.flip(1)[:, [0, 2, 1]] % 4),
}


@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize(("first", "second"), itertools.combinations_with_replacement(LIFTS, 2))
def test_any_two_lifts(first: str, second: str, groups: int) -> None:
    u, v, m = LIFTS[first], LIFTS[second], ROWS // groups
    K = draw(groups, m * WIDTH, m * WIDTH, seed=5)
    if u is v:
        K = K + K.mT
    J_u, J_v = (written_out(x).reshape(groups, m * WIDTH, SIZE) for x in (u, v))
    expected = torch.einsum("gae,gab,gbe->e", J_u, K, J_v)
    found = torch.zeros(SIZE, dtype=torch.float64)
    at, values = across(u, v, K.reshape(groups, m, WIDTH, m, WIDTH))
    found.index_add_(0, at, values)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    if is_by_column(u, v):
        found = torch.zeros(SIZE, dtype=torch.float64)
        found.index_add_(0, torch.arange(u.size) if u.at is None else u.at, along(u, v, by_column(K, WIDTH)))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_which_lifts_need_equal_columns_only() -> None:
    alone = {name for name, u in LIFTS.items() if is_by_column(u, u)}
    assert alone == set(LIFTS) - {"table across columns"}
    assert not any(is_by_column(u, v) for u, v in itertools.combinations(LIFTS.values(), 2))


@pytest.mark.parametrize("m", [1, 2])
def test_a_product_of_equal_columns(m: int) -> None:
    J, X = draw(4, m * 3, 5), draw(4, 5, m * 3, seed=2)
    torch.testing.assert_close(product_by_column(J, X, 3), by_column(J @ X, 3), rtol=0, atol=1e-13)
