"""The diagonal against that of reverse-over-reverse, under every choice of cuts and chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw
from engine_cases import CASES
from engine_choices import CHOICES, case, force, in_turn, paths_of, program
from torch import Tensor

import hessiankit as hk
from hessiankit.engine import jacobians, sections
from hessiankit.engine.diagonal_rows import read_diagonal
from hessiankit.engine.jacobians import GainJacobian, IndexJacobian, ParameterJacobian, WeightJacobian


@pytest.mark.parametrize(("seed", "choice"), in_turn(range(1000, 1030)))
def test_random_programs(seed: int, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, expected = program(seed)
    force(monkeypatch, CHOICES[choice])
    found = hk.hessian_diagonal(module, x, loss=None, max_products=None).flat
    assert (found - expected.diagonal()).abs().max() <= 1e-11 * expected.abs().max()


@pytest.mark.parametrize(("name", "choice"), in_turn(CASES))
def test_structures(name: str, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, target, expected = case(name)
    force(monkeypatch, CHOICES[choice])
    found = hk.hessian_diagonal(module, x, target, loss="mse", max_products=None).flat
    assert (found - expected.diagonal()).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("name", ["two attentions", "a weight used twice", "a table over columns", "overlapping parts"])
def test_every_entry_comes_once(name: str) -> None:
    """Of a parameter that enters twice, or an entry of which reaches several columns, the whole at once."""
    module, x, target, _ = case(name)
    paths, count = paths_of(module, x, target, "mse", by_column=True), dict[str, Tensor]()

    def add(u: ParameterJacobian, values: Tensor) -> None:
        assert u.reaches_one_column()
        seen = count.setdefault(u.parameter, torch.zeros(paths.value(paths.trace.parameters[u.parameter]).numel()))
        for span, entries in u.runs():
            seen[entries] += len(values[span]) / (span.stop - span.start)

    with torch.no_grad():
        read_diagonal(paths, add)
    assert set(count) == set(paths.trace.parameters)
    assert all(bool((seen == 1).all()) for seen in count.values())


WHICH = torch.tensor([[0, 1, 4], [2, 1, 3], [0, 1, 3], [0, 5, 4], [2, 1, 4], [2, 5, 3]])
JACOBIANS: dict[str, ParameterJacobian] = {
    "weight": WeightJacobian("u", None, draw(6, 4, seed=2), 3, False),
    "weight stored the other way": WeightJacobian("u", None, draw(6, 4, seed=2), 3, True),
    "gain": GainJacobian("u", None, draw(6, 3, seed=3)),
    "bias": GainJacobian("u", None, torch.ones((), dtype=torch.float64).expand(6, 3)),
    "table": IndexJacobian("u", torch.arange(6), WHICH),
}


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("name", JACOBIANS)
def test_the_diagonal_of_a_jacobian_from_equal_columns(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of J^T K J, with rows that meet in groups."""
    u, groups = JACOBIANS[name], 6 // rows
    assert u.reaches_one_column()
    K = draw(groups, rows, 3, rows, 3, seed=5)
    K = K + K.permute(0, 3, 4, 1, 2)
    J = u.columns(0, u.size, torch.zeros(6, 3, dtype=torch.float64)).reshape(u.size, groups, rows, 3)
    expected = torch.einsum("ugmp,gmpnq,ugnq->u", J, K, J)
    D = K.diagonal(dim1=2, dim2=4)
    assert torch.allclose(u.diagonal(D), expected, rtol=1e-13)
    monkeypatch.setattr(jacobians, "SCRATCH", 1)
    assert torch.allclose(u.diagonal(D), expected, rtol=1e-13)


def test_entries_that_reach_several_columns() -> None:
    which = WHICH.clone()
    which[3, 2] = 1
    assert not IndexJacobian("u", torch.arange(6), which).reaches_one_column()


def stream(layers: int) -> Formula:
    """A narrow stream, to each branch of which all samples add one value of a weight of its own."""

    def f(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(x @ s.first)
        for n in range(layers):
            shared = torch.tanh(x[0] @ getattr(s, f"P{n}"))
            h = h + torch.tanh(torch.tanh(h @ getattr(s, f"A{n}")) @ getattr(s, f"B{n}") + shared)
        return h

    shapes = {"first": (9, 2)}
    for n in range(layers):
        shapes |= {f"P{n}": (9, 2), f"A{n}": (2, 20), f"B{n}": (20, 2)}
    return Formula(f, **shapes)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_meet_within_a_section_and_stay_apart_behind_it(rows: int) -> None:
    """Where the stream is cut, what follows keeps samples apart, and the weight of all samples does not."""
    module, x, target = stream(8), draw(3, rows, 9), draw(3, rows, 2, seed=7)
    assert len(sections.sections(paths_of(module, x, target, "mse", by_column=True))) > 1
    expected = hk.hessian(module, x, target).matrix.diagonal()
    found = hk.hessian_diagonal(module, x, target, max_products=None).flat
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
