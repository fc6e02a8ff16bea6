"""Hessian, Gauss-Newton part, diagonal, products and norms of small modules, against reverse over reverse and Jacobians."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from curvature_reference import (
    Formula,
    assert_exact,
    cross_entropy,
    draw,
    gauss_newton,
    largest_error,
    mse,
    randomised,
    reverse_over_reverse,
)
from engine_cases import CASES, PRODUCTS, ROWS_MEET, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st
from readings import assert_readings
from torch import Tensor, nn
from torch.nn.functional import linear

import hessiankit as hk
from hessiankit.tracing.reassociation import reassociate


def assert_everywhere(module: torch.nn.Module, x: Tensor, turn: int, *, panel_bytes: int | None = None) -> None:
    """Compare the Hessian and its outer part with the whole matrices; and in turn the diagonals, products or norms."""
    target = draw(*module(x).shape, seed=7)
    matrices = {"hessian": reverse_over_reverse(module, x, target, mse), "ggn": gauss_newton(module, x, target, mse)}
    found = hk.hessian(module, x, target)
    assert largest_error(found, matrices["hessian"]) <= 1e-12
    assert found.asymmetry <= 1e-12
    assert torch.equal(found.matrix, found.matrix.T)
    assert (found.outer() - matrices["ggn"]).abs().max() <= 1e-12 * matrices["ggn"].abs().max()
    assert found.loss == pytest.approx(float(mse(module(x), target).detach()), rel=1e-13)
    if turn == 0:
        norms = hk.frobenius_norms(module, x, target, panel_bytes=panel_bytes)
        assert norms.whole == pytest.approx(float(matrices["hessian"].norm()), rel=1e-12)
    for kind, matrix in matrices.items():
        scale = matrix.abs().max()
        if turn == 1:
            diagonal = hk.hessian_diagonal(module, x, target, kind=kind)
            for name, rows in found.slices.items():  # each parameter by its own largest entry
                own = matrix[rows, rows]
                error = (diagonal[name].reshape(-1) - own.diagonal()).abs().max()
                assert error <= 1e-12 * max(own.abs().max(), 1e-3 * scale), (kind, name)
        elif turn == 2:
            V = draw(len(matrix), 2, seed=3)
            operator = hk.hessian_operator(module, x, target, kind=kind)
            assert (operator @ V - matrix @ V).abs().max() <= 1e-12 * scale * len(V)


@pytest.mark.parametrize(("k", "name"), enumerate(CASES))
def test_every_result(k: int, name: str) -> None:
    """Every other time, norms come from panels of a few parameters."""
    assert_everywhere(CASES[name].module(), draw(*CASES[name].x), k % 3, panel_bytes=None if k % 2 else 400)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", [*ROWS_MEET, "narrow, wide, narrow", "two wide"])
def test_a_few_columns_at_a_time(name: str) -> None:
    assert_exact(CASES[name].module(), draw(*CASES[name].x))


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


def test_diagonal_curvature_between_two_places_that_share_a_residual_stream() -> None:
    """A gain of one block and the residual of the next, as in two blocks of OLMo 2."""
    blocks = [hk.TransformerBlock(4, 3, placement="olmo2") for _ in range(2)]
    for turn in range(3):
        assert_everywhere(randomised(torch.nn.Sequential(*blocks)), draw(2, 3, 4), turn)


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_that_are_flattened_for_a_weight_cost_as_much_as_with_their_axes(batch: int) -> None:
    """As in GPT-2, whose products with weights read tokens (B L, d), and whose loss reads the logits of some as (N, C)."""

    def attending(self: Formula, x: Tensor, *, flat: bool) -> Tensor:
        for W, b in ((self.A, self.a), (self.C, self.c)):
            z = (x.reshape(-1, 4) @ W + b).reshape(batch, 3, 12) if flat else x @ W + b
            q, k, v = z.tanh().split(4, -1)
            x = x + torch.softmax(q @ k.mT, -1) @ v
        if flat:
            return linear(x.reshape(-1, 4), self.E).reshape(batch, 3, 5)[:, 1:].reshape(batch, 2, 5)
        return linear(x, self.E)[:, 1:]

    def flattened(z: Tensor, t: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(z.reshape(-1, 5), t.reshape(-1))

    x, labels, found, work = draw(batch, 3, 4), torch.tensor([[0, 2], [1, -100]])[:batch], [], []
    for flat, loss in ((True, flattened), (False, "cross_entropy")):
        module = Formula(partial(attending, flat=flat), A=(4, 12), a=(12,), C=(4, 12), c=(12,), E=(5, 4))
        found.append(hk.hessian(module, x, labels, loss=loss))
        work.append(hk.hessian(module, x, labels, loss=loss, dry_run=True).flops)
        expected = reverse_over_reverse(module, x, labels, lambda z, t: cross_entropy(z.reshape(-1, 5), t.reshape(-1)))
        assert largest_error(found[-1], expected) <= 1e-12
    assert work[0] < 1.01 * work[1]
    assert torch.allclose(found[0].outer(), found[1].outer(), rtol=0, atol=1e-14)


OUTPUTS = {
    "a product of tokens": lambda s, x: torch.tanh(x @ s.W) @ s.V,
    "rows": lambda s, x: (torch.tanh(x @ s.W) @ s.V).reshape(-1, 5),
    "rows, then a bias": lambda s, x: (torch.tanh(x @ s.W).reshape(-1, 4) @ s.V).reshape(-1, 5) + s.b,
    "rows and back": lambda s, x: (torch.tanh(x.reshape(-1, 4) @ s.W) @ s.V + s.b).reshape(2, 3, 5),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "callable"])
def test_the_output_stays_where_the_loss_begins(name: str, loss: str) -> None:
    """The Gauss-Newton matrix J^T (d^2 loss / dz^2) J, for outputs whose rows have been flattened; J by autograd."""
    module, x = Formula(OUTPUTS[name], W=(4, 4), V=(4, 5), b=(5,)), draw(2, 3, 4)
    z = module(x).detach()
    labels = torch.randint(5, z.shape[:-1], generator=torch.Generator().manual_seed(2))
    target = draw(*z.shape, seed=7) if loss == "mse" else labels
    flat = torch.nn.functional.cross_entropy
    functions = {"mse": mse, "cross_entropy": cross_entropy, "callable": lambda z, t: flat(z.reshape(-1, 5), t.reshape(-1))}
    expected = gauss_newton(module, x, target, functions[loss])
    assert_readings(expected, module, x, target, loss=functions[loss] if loss == "callable" else loss, kind="ggn")


WEIGHTS = {
    "softmax": lambda scores, dim: scores.softmax(dim),
    "softmax of a product": lambda scores, dim: (2 * scores).softmax(dim),
    "sigmoid": lambda scores, dim: scores.sigmoid(),
    "masked": lambda scores, dim: scores.masked_fill(torch.eye(scores.shape[-1], dtype=torch.bool), -torch.inf).softmax(dim),
    "logarithm": lambda scores, dim: scores.log_softmax(dim),
    "of a constant": lambda scores, dim: scores.detach().softmax(dim),
}


@given(
    weights=st.sampled_from(sorted(WEIGHTS)),
    dim=st.sampled_from([-1, -2, 2, 1]),
    biases=st.tuples(*[st.booleans()] * 3),
    turned=st.booleans(),
    leading=st.sampled_from([(), (2,)]),
    seed=st.integers(0, 5),
)
@settings(deadline=None, max_examples=30)
def test_attention_in_any_order_of_its_products(
    weights: str, dim: int, biases: tuple[bool, ...], turned: bool, leading: tuple[int, ...], seed: int
) -> None:
    """A softmax over queries, whose rows do not sum to one, biases, weights as torch's layers or as matrices hold them."""

    def attention(s: Formula, x: Tensor) -> Tensor:
        if turned:
            q, k, v = (x @ weight for weight in (s.q.weight.mT, s.k.weight.mT, s.v.weight.mT))
            v = v if s.v.bias is None else v + s.v.bias
        else:
            q, k, v = s.q(x), s.k(x), s.v(x)
        A = WEIGHTS[weights](q @ k.mT, dim % x.ndim if abs(dim) <= x.ndim else -1)
        return A @ v

    module = Formula(attention, **{name: nn.Linear(3, 4, bias=bias) for name, bias in zip("qkv", biases, strict=True)})
    x, target = draw(*leading, 5, 3, seed=seed), draw(*leading, 5, 4, seed=seed + 20)
    expected = reverse_over_reverse(module, x, target, mse)
    assert (hk.hessian(module, x, target).matrix - expected).abs().max() < 1e-12 * expected.abs().max()
