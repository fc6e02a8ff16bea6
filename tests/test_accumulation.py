"""Hessian, Gauss-Newton part, diagonal, products and norms of small modules, against reverse over reverse and Jacobians."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, largest_error, mse, reverse_over_reverse
from engine_cases import CASES, PAIRS, PRODUCTS, ROWS_MEET, SHAPES, USES, attend
from torch import Tensor

import hessiankit as hk
from hessiankit.engine import column_blocks, parameter_blocks
from hessiankit.engine.reassociation import reassociate


def gauss_newton(module: torch.nn.Module, x: Tensor) -> Tensor:
    """2 / N J^T J of the squared error, J by torch.autograd.functional.jacobian."""
    names = [name for name, _ in module.named_parameters()]

    def output(*values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,)).reshape(-1)

    parts = torch.autograd.functional.jacobian(output, tuple(p.detach() for p in module.parameters()))
    J = torch.cat([part.flatten(1) for part in parts], 1)
    return 2 / len(J) * J.T @ J


def assert_everywhere(module: Formula, x: Tensor) -> None:
    """Compare every result of the engine for one module with the whole matrices."""
    target = draw(*module(x).shape, seed=7)
    matrices = {"hessian": reverse_over_reverse(module, x, target, mse), "ggn": gauss_newton(module, x)}
    found = hk.hessian(module, x, target)
    assert largest_error(found, matrices["hessian"]) <= 1e-12
    assert found.asymmetry <= 1e-12
    assert torch.equal(found.matrix, found.matrix.T)
    assert (found.outer() - matrices["ggn"]).abs().max() <= 1e-12 * matrices["ggn"].abs().max()
    assert found.loss == pytest.approx(float(mse(module(x), target).detach()), rel=1e-13)
    V = draw(found.matrix.shape[0], 2, seed=3)
    for kind, matrix in matrices.items():
        scale = matrix.abs().max()
        diagonal = hk.hessian_diagonal(module, x, target, kind=kind)
        for name, rows in found.slices.items():  # each parameter by its own largest entry
            own = matrix[rows, rows]
            theirs = own.diagonal()
            assert (diagonal[name].reshape(-1) - theirs).abs().max() <= 1e-12 * max(own.abs().max(), 1e-3 * scale), (kind, name)
        products = hk.hessian_operator(module, x, target, kind=kind) @ V
        assert (products - matrix @ V).abs().max() <= 1e-12 * scale * len(V)
        for panel_bytes in (None, 400):
            norm = hk.frobenius_norms(module, x, target, kind=kind, panel_bytes=panel_bytes).whole
            assert norm == pytest.approx(float(matrix.norm()), rel=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_every_result(name: str) -> None:
    assert_everywhere(CASES[name].module(), draw(*CASES[name].x))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long axes are walked in chunks of a few entries."""
    for name, most in (("CACHE", 40), ("OUTER", 7), ("SCRATCH", 1)):
        monkeypatch.setattr(parameter_blocks, name, most)
    monkeypatch.setattr(column_blocks, "ENTRIES", 40)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", [*ROWS_MEET, "narrow, wide, narrow", "two wide"])
def test_a_few_columns_at_a_time(name: str) -> None:
    assert_exact(CASES[name].module(), draw(*CASES[name].x))


def paired(first: str, second: str, *, tied: bool, meet: bool) -> Formula:
    """Two uses, of one parameter or of two; a third one in front where rows meet, so that blocks go back as columns."""

    def f(s: Any, x: Tensor) -> Tensor:
        x = attend(torch.tanh(x @ s.r)) if meet else x
        return torch.tanh(USES[first](s.p, x)) * torch.tanh(USES[second](s.p if tied else s.q, x) + 0.3)

    return Formula(f, p=(20,), **({} if tied else {"q": (20,)}), **({"r": (4, 4)} if meet else {}))


@pytest.mark.parametrize("meet", [False, True], ids=["rows apart", "rows meet"])
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_uses(first: str, second: str, meet: bool, request: pytest.FixtureRequest) -> None:
    """Of two parameters, in both orders; of one, as the two uses share entries."""
    x = draw(2, 3, 4)
    assert_exact(paired(first, second, tied=False, meet=meet), x)
    if (first, second) in {tuple(sorted(pair)) for pair in PAIRS}:
        module = paired(first, second, tied=True, meet=meet)
        target = draw(2, 3, 3, seed=7)
        found = hk.hessian_diagonal(module, x, target)
        expected = assert_exact(module, x, target).matrix.diagonal()
        assert (found.flat - expected).abs().max() <= 1e-12 * expected.abs().max()
    request.getfixturevalue("small_chunks")
    assert_exact(paired(first, second, tied=True, meet=meet), x)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_three_matrices_are_bracketed_anew(name: str) -> None:
    """Where rows stay apart that way; values stay what they are."""
    f, expected = PRODUCTS[name]
    module, x = Formula(f, **SHAPES), draw(2, 3, 4)
    trace = hk.trace_module(lambda p, x: torch.func.functional_call(module, p, (x,)), dict(module.named_parameters()), (x,))
    value, before = trace.values[trace.output], [a.name for a in trace.applications]
    reassociate(trace)
    assert ([a.name for a in trace.applications] != before) == expected
    again = dict(enumerate(trace.values))
    for a in trace.applications:
        again[a.output] = a.primitive.value(*(None if at is None else again[at] for at in a.inputs))
    assert torch.allclose(again[trace.output], value, rtol=0, atol=1e-14)


def test_parameters_without_effect_have_zero_blocks() -> None:
    found = assert_exact(CASES["without effect"].module(), draw(3, 4))
    assert found.asymmetry <= 1e-14
    assert (found.block("V", "V") == 0).all()
    assert (found.block("V", "W") == 0).all()
