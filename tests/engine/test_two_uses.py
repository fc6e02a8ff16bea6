"""Two ways in which parameters enter, of one parameter or of two: every pair of parameter Jacobians."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, sample
from engine_cases import PAIRS, USES, attend
from torch import Tensor

import hessiankit as hk

WHERE = ("nowhere", "before", "behind")


def paired(first: str, second: str, where: str, *, tied: bool) -> Formula:
    """Rows meet before the two uses, so that blocks go back as columns, or behind them, or nowhere."""

    def f(s: Any, x: Tensor) -> Tensor:
        x = attend(torch.tanh(x @ s.r)) if where == "before" else x
        y = torch.tanh(USES[first](s.p, x)) * torch.tanh(USES[second](s.p if tied else s.q, x) + 0.3)
        return attend(y) if where == "behind" else y

    return Formula(f, p=(20,), **({} if tied else {"q": (20,)}), **({"r": (4, 4)} if where == "before" else {}))


@pytest.mark.parametrize(("first", "second", "where"), sample([(*pair, where) for pair in PAIRS for where in WHERE], 2))
def test_of_two_parameters(first: str, second: str, where: str) -> None:
    assert_exact(paired(first, second, where, tied=False), draw(2, 3, 4))


@pytest.mark.parametrize(
    ("first", "second", "where"),
    sample([(*pair, where) for pair in itertools.combinations_with_replacement(USES, 2) for where in WHERE], 2),
)
def test_of_one_parameter(first: str, second: str, where: str, request: pytest.FixtureRequest) -> None:
    """Whose entries both reach; also with axes walked in small chunks."""
    module, x, target = paired(first, second, where, tied=True), draw(2, 3, 4), draw(2, 3, 3, seed=7)
    expected = assert_exact(module, x, target).matrix
    found = hk.hessian_diagonal(module, x, target).flat
    assert (found - expected.diagonal()).abs().max() <= 1e-12 * expected.abs().max()
    request.getfixturevalue("small_chunks")
    assert (hk.hessian(module, x, target).matrix - expected).abs().max() <= 1e-13 * expected.abs().max()


def test_a_whole_weight_in_small_chunks(small_chunks: None) -> None:
    """Its blocks are added into the matrix itself, in which earlier terms are."""

    def f(s: Any, x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x @ s.p) * torch.tanh(x.flip(-1) @ s.p + 0.3), -1)

    assert_exact(Formula(f, p=(4, 3)), draw(2, 3, 4))
