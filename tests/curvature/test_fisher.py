"""Fisher matrices: exact, from drawn labels and empirical; the draws; their sums, their scale, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_one_clear_error, draw
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operator_cases import EXACT, LABELS, TOKENS, TiedBlock, error
from readings import READINGS, assert_readings
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.operator import hessian_operator
from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError, SampledLoss
from hessiankit.request import fisher as labels
from hessiankit.request.fisher import sample_labels, sample_residuals, uniforms

X, Y = draw(5, 3), torch.tensor([0, 3, 1, -100, 2])


def classifier() -> nn.Module:
    return Formula(lambda m, x: torch.tanh(x @ m.W) @ m.V + m.b, W=(3, 3), V=(3, 4), b=(4,))


def term_gradients(module: nn.Module, terms: Tensor) -> Tensor:
    """The gradients of a vector of terms in all parameters, one backward each, (terms, P)."""
    rows = [torch.autograd.grad(t, list(module.parameters()), retain_graph=True) for t in terms]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def fisher(module: nn.Module, **options: Any) -> Tensor:
    return hessian_operator(module, X, Y, loss="cross_entropy", **options).to_matrix()


@pytest.mark.parametrize(("loss", "target"), [("cross_entropy", Y), ("mse", draw(5, 4, seed=3))])
def test_fisher_is_the_expectation_over_the_models_labels(loss: str, target: Tensor) -> None:
    """By the sum over all labels, or the Jacobian's Gram matrix, which share nothing with the closed forms."""
    module = classifier()
    Z = module(X)
    if loss == "mse":
        J = term_gradients(module, Z.reshape(-1))
        expected = 2 * J.T @ J / Z.numel()
    else:
        expected = torch.zeros(())
        for label in range(4):
            G = term_gradients(module, F.cross_entropy(Z, torch.full((5,), label), reduction="none"))
            p = torch.softmax(Z.detach(), -1)[:, label] * (Y != -100)
            expected = expected + (G.T * p) @ G / 4
    for kind in ("fisher", "ggn"):
        assert error(hessian_operator(module, X, target, loss=loss, kind=kind).to_matrix(), expected) <= EXACT


def test_monte_carlo_fisher_tends_to_the_fisher_with_its_standard_error() -> None:
    """49 independent Fishers of one draw each: their mean is within 5 of its standard errors, entry by entry."""
    module = classifier()
    found = torch.stack([fisher(module, kind="fisher-mc", seed=seed) for seed in range(49)])
    apart = (found.mean(0) - fisher(module, kind="fisher")).abs()
    assert bool((apart <= 5 * found.std(0) / 7 + 1e-12).all())


def test_one_label_is_drawn_from_seed_0_unless_asked_otherwise() -> None:
    module, expected = classifier(), fisher(classifier(), kind="fisher-mc", seed=0, draws=1)
    assert error(fisher(module, kind="fisher-mc", draws=2), expected) > 0.01
    readings = {name: READINGS[name] for name in ("hessian_operator", "hessian_diagonal", "frobenius_norms")}
    assert_readings(expected, module, X, Y, loss="cross_entropy", kind="fisher-mc", readings=readings)
    found = hk.approximations(module, X, Y, loss="cross_entropy", against="fisher-mc", of=["diagonal"])
    assert error(found["diagonal"].operator.to_matrix(), torch.diag(expected.diagonal())) <= EXACT


@pytest.mark.parametrize("kind", ["fisher", "fisher-mc", "fisher-empirical"])
def test_batches_change_nothing(kind: str) -> None:
    module, options = TiedBlock().double(), {"loss": "cross_entropy", "kind": kind}
    one = hessian_operator(module, TOKENS, LABELS, **options)
    pairs = list(zip(TOKENS.split([1, 2]), LABELS.split([1, 2]), strict=True))
    expected = one.to_matrix()
    readings = {name: READINGS[name] for name in ("hessian_operator", "hessian_diagonal", "frobenius_norms")}
    for found in assert_readings(expected, module, pairs, readings=readings, floor=1e-12, **options).values():
        assert found.loss == pytest.approx(one.loss, rel=1e-13)
    parts = hessian_operator(module, TOKENS, LABELS, micro_batch=1, **options)
    assert error(parts.to_matrix(), expected) <= EXACT
    assert error(parts.gradient, one.gradient) <= EXACT
    diagonal = hk.hessian_diagonal(module, TOKENS, LABELS, batch_size=1, **options)
    assert error(diagonal.flat, expected.diagonal()) <= EXACT


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 2), st.booleans(), st.sampled_from(["mean", "sum"]))
def test_empirical_fisher_of_squared_error_in_terms_of_per_sample_gradients(
    sizes: list[int], T: int, has_rows: bool, reduction: str
) -> None:
    """C times the mean of the outer products of gradients of mean squared errors of a row, and curvlinops' matrix."""
    module = classifier()
    x = draw(sum(sizes), T, 3, seed=1) if has_rows else draw(sum(sizes), 3, seed=1)
    Z = module(x)
    y = draw(*Z.shape, seed=2)
    rows, C = Z.shape[:-1].numel(), Z.shape[-1]
    G = term_gradients(module, (Z - y).square().mean(-1).flatten())
    expected = C * G.T @ G / rows if reduction == "mean" else C**2 * G.T @ G
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    own = hessian_operator(module, batches, kind="fisher-empirical", reduction=reduction).to_matrix()
    assert error(own, expected) <= EXACT
    if find_spec("curvlinops") and sizes == [1]:
        from curvlinops import EFLinearOperator

        other = EFLinearOperator(module, nn.MSELoss(reduction=reduction), list(module.parameters()), batches)
        assert error(own, torch.stack([other @ e for e in torch.eye(len(own), dtype=torch.float64)], 1)) <= EXACT


LABELLED = st.lists(st.lists(st.sampled_from([-100, 0, 1, 2, 3]), min_size=2, max_size=2), min_size=2, max_size=6)


@settings(max_examples=8, deadline=None)
@given(LABELLED, st.data(), st.sampled_from(["cross_entropy", "mse"]), st.integers(1, 3), st.integers(0, 9))
def test_drawn_labels_do_not_depend_on_cuts_even_where_a_batch_has_no_label_that_counts(
    labels: list[list[int]], data: st.DataObject, loss: str, draws: int, seed: int
) -> None:
    module, n = classifier(), len(labels)
    cuts = data.draw(st.lists(st.integers(1, n), min_size=1).map(lambda sizes: sorted({0, n, *(k for k in sizes if k < n)})))
    sizes = [after - before for before, after in pairwise(cuts)]
    x, y = draw(n, 2, 3, seed=5), torch.tensor(labels)
    kept = y != -100
    assume(bool(kept.any()))
    Z = module(x)
    if loss == "cross_entropy":
        drawn = sample_labels(Z, range(n), draws, seed)
        terms = [F.cross_entropy(Z[kept], own[kept], reduction="none") for own in drawn]
        count = int(kept.sum())
    else:
        y = torch.zeros_like(Z)
        drawn = sample_residuals(Z, range(n), draws, seed)
        terms = [(Z - (Z.detach() + 0.5**0.5 * own)).square().sum(-1).flatten() for own in drawn]
        count = Z.numel()
    G = torch.cat([term_gradients(module, own) for own in terms])
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    options: dict[str, Any] = {"loss": loss, "kind": "fisher-mc", "seed": seed, "draws": draws}
    expected = G.T @ G / (draws * count)
    assert error(hessian_operator(module, batches, **options).to_matrix(), expected) <= EXACT
    assert error(hk.hessian_diagonal(module, batches, **options).flat, expected.diagonal()) <= EXACT


def test_batches_of_weight_zero_keep_their_numbers() -> None:
    module, y = classifier(), torch.tensor([0, 3, 1, 1, 2])
    Z, rows = module(X), [0, 1, 3, 4]
    own = sample_labels(Z.unsqueeze(1), range(5), 1, 0)[0, :, 0]
    G = term_gradients(module, F.cross_entropy(Z[rows], own[rows], reduction="none"))
    batches = list(zip(X.split([2, 1, 2]), y.split([2, 1, 2]), strict=True))
    found = hessian_operator(module, batches, loss="cross_entropy", kind="fisher-mc", weights=[2, 0, 2])
    assert error(found.to_matrix(), G.T @ G / 4) <= EXACT


@pytest.mark.parametrize("loss", [MeanSquaredError(7.0), CrossEntropy(normalizer=7.0)], ids=["mse", "cross entropy"])
def test_a_sampled_loss_has_outer_products_for_its_second_derivative(loss: Any) -> None:
    Z = draw(2, 3, 4, seed=2).requires_grad_()
    T = draw(2, 6, 3, 4, seed=1)
    T = T if isinstance(loss, MeanSquaredError) else T.argmax(-1)
    sampled, one = SampledLoss(loss), torch.ones(1, dtype=torch.float64)
    (slope,) = torch.autograd.grad(sampled.value(Z, T), Z)
    G = [term_rows(Z, lambda m=m: loss.value(Z, T[:, m])) for m in range(1, 6)]
    second = sum(7 / 5 * torch.block_diag(*(torch.outer(g, g) for g in rows)) for rows in G)
    t = draw(3, 2, 3, 4, seed=3)
    at = (Z.detach(), T)
    assert error(sampled.vjp(at, one)[0][0], slope) <= EXACT
    assert error(sampled.jvp(at, (t, None)), t.flatten(1) @ slope.flatten()) <= EXACT
    assert error(sampled.curvature(at, 2 * one[0], (t, None))[0].flatten(1), 2 * t.flatten(1) @ second) <= EXACT
    with pytest.raises(ValueError, match="only Z"):
        sampled.jvp(at, (t, T))


def term_rows(Z: Tensor, loss: Callable[[], Tensor]) -> Tensor:
    """The gradient of a sum of terms, one a row, as rows."""
    return torch.autograd.grad(loss(), Z)[0].reshape(-1, Z.shape[-1])


CALLS = (hk.hessian_operator, hk.hessian_diagonal, hk.frobenius_norms)


@pytest.mark.parametrize(
    ("k", "options", "said"),
    [
        (0, {"kind": "fisher-monte-carlo"}, "kind='fisher-monte-carlo' is not known; did you mean 'fisher'"),
        (1, {"kind": "fisher-mc", "draws": 0}, "draws=0 draws no label; pass 1 or more"),
        (2, {"kind": "fisher-mc", "seed": -1}, "seed=-1 is negative; pass 0 or more"),
        (
            0,
            {"kind": "fisher-mc", "loss": nn.L1Loss()},
            "kind='fisher-mc' needs a loss with a likelihood, 'mse' or 'cross_entropy'",
        ),
        (1, {"kind": "fisher-empirical", "loss": lambda z, t: z.sum()}, "'fisher-empirical' needs a loss with a likelihood"),
    ],
)
def test_what_does_not_fit_is_one_clear_error(k: int, options: dict[str, Any], said: str) -> None:
    assert_one_clear_error(lambda: CALLS[k](Formula(lambda m, x: x @ m.W, W=(3, 4)), X, draw(5, 4), **options), said)


def test_confident_rows_keep_their_digits() -> None:
    """At p = 1 - 1e-20 the gradient is 1e-20, which p - 1 would round to zero."""
    module = Formula(lambda m, x: x @ m.W, W=(1, 2))
    module.W.data = torch.tensor([[46.0, 0.0]], dtype=torch.float64)
    x = torch.ones(1, 1, dtype=torch.float64)
    found = hessian_operator(module, x, torch.tensor([0]), loss="cross_entropy", kind="fisher-empirical").to_matrix()
    p = float(torch.exp(torch.tensor(-46.0, dtype=torch.float64)))
    assert float(found[1, 1]) == pytest.approx(p**2, rel=1e-12)


def logits(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_uniforms_are_pinned():
    """They may not change with a version of torch or NumPy: Philox4x64-10 of Random123, by its recurrence in whole numbers."""
    assert uniforms(3, 2, [0, 5], 6)[1, 1].tolist() == [_philox(3, 1, 5, k) for k in range(6)]


def _philox(seed, draw, number, position):
    """Random123's philox4x64-10; NumPy adds one to the counter before the first block."""
    mask = 2**64 - 1
    counter, key = [position // 4 + 1, number, 0, 0], [seed, draw]
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return ((counter[position % 4] >> 12) + 0.5) / 2**52


def test_inverse_of_the_distribution_function():
    z = logits(4, 3, 6)
    found = sample_labels(z, [3, 1, 4, 9], 5, 2)
    cumulative = torch.softmax(z, -1).cumsum(-1)
    u = uniforms(2, 5, [3, 1, 4, 9], 3)
    for d, b, t in [(d, b, t) for d in range(5) for b in range(4) for t in range(3)]:
        c = int(found[d, b, t])
        below = 0.0 if c == 0 else float(cumulative[b, t, c - 1])
        assert below <= float(u[d, b, t]) <= float(cumulative[b, t, c])


@pytest.mark.parametrize("chunk", [1, 7, 24, 10**6])
def test_chunks_change_nothing(monkeypatch, chunk):
    z = logits(4, 3, 6)
    wanted = sample_labels(z, range(4), 5, 2)
    monkeypatch.setattr(labels, "CHUNK", chunk)
    assert torch.equal(sample_labels(z, range(4), 5, 2), wanted)


def test_a_sequence_alone_and_padded():
    z = logits(4, 5, 6)
    wanted = sample_labels(z, range(4), 3, 0)
    assert torch.equal(sample_labels(z[2:3], [2], 3, 0), wanted[:, 2:3])
    assert torch.equal(sample_labels(z[:, :3], range(4), 3, 0), wanted[:, :, :3])
    assert torch.equal(sample_labels(z[[3, 0]], [3, 0], 2, 0), wanted[:2, [3, 0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_summed_in_double_precision(dtype):
    z = logits(2, 3, 50_000).to(dtype)
    assert torch.equal(sample_labels(z, [0, 1], 2, 0), sample_labels(z.double(), [0, 1], 2, 0))


def test_residuals_are_standard_normal():
    found = sample_residuals(torch.zeros(200, 3, 4), range(200), 8, 1)
    assert found.shape == (8, 200, 3, 4)
    assert abs(float(found.mean())) < 4 / found.numel() ** 0.5
    assert abs(float(found.square().mean()) - 1) < 4 * (2 / found.numel()) ** 0.5
    assert torch.equal(sample_residuals(torch.zeros(1, 3, 4), [7], 8, 1)[:, 0], found[:, 7])


def test_a_number_on_the_edge_of_two_classes_draws_the_second(monkeypatch):
    monkeypatch.setattr(labels, "uniforms", lambda *_: torch.full((1, 1, 1), 0.5, dtype=torch.float64))
    assert sample_labels(torch.zeros(1, 1, 2, dtype=torch.float64), [0], 1, 0).item() == 1


APART = {  # losses of (output, target, weight) with terms that keep output and weight apart
    "penalty": lambda o, t, w: (o - t).square().mean() + 0.1 * w.square().sum(),
    "mean of penalised batches": lambda o, t, w: ((o - t).pow(4).mean() + w.pow(4).sum()) * 0.5 / 3,
    "penalty, divided by a tensor": lambda o, t, w: ((o - t).cosh().mean() + w.norm()) / t.new_tensor(4.0),
    "weight that is detached": lambda o, t, w: (o - t).cosh().mean() * w.detach().square().sum(),
}
MIXED = {
    "factor": lambda o, t, w: (o - t).square().mean() * w.square().sum(),
    "temperature": lambda o, t, w: (o / w.norm() - t).square().mean(),
    "scale of a linear readout": lambda o, t, w: (o * t).sum() * w.square().sum(),
    "margin": lambda o, t, w: torch.nn.functional.softplus(-o * t * w.norm()).mean(),
    "root of a penalised loss": lambda o, t, w: ((o - t).square().mean() + w.square().sum()).sqrt(),
    "shift": lambda o, t, w: (o - t + w[:, 0]).square().mean(),
}
GAUSS_NEWTON = {
    "outer": lambda *a, **k: hk.hessian(*a, **k).outer(),
    "lazy outer": lambda *a, **k: hk.hessian(*a, lazy=True, **k).outer(),
    "operator": lambda *a, **k: hk.hessian_operator(*a, kind="ggn", **k).to_matrix(),
    "diagonal": lambda *a, **k: torch.diag(hk.hessian_diagonal(*a, kind="ggn", **k).flat),
}


@pytest.mark.parametrize("reading", GAUSS_NEWTON)
def test_a_gauss_newton_matrix_needs_a_loss_that_the_parameters_reach_by_the_output(reading: str) -> None:
    module, x, target = nn.Linear(3, 2, bias=False).double(), draw(4, 3), draw(4, 2, seed=2)
    w, read = module.weight, GAUSS_NEWTON[reading]
    J = torch.func.jacrev(lambda v: (x @ v.T).reshape(-1))(w.detach()).reshape(8, 6)
    for name, formula in APART.items():
        second = torch.autograd.functional.hessian(partial(formula, t=target, w=w.detach()), module(x).detach()).reshape(8, 8)
        G = J.T @ second @ J
        seen = read(module, x, target, loss=partial(formula, w=w))
        expected = torch.diag(G.diagonal()) if reading == "diagonal" else G
        assert error(seen, expected) <= EXACT, name
    for formula in MIXED.values():
        with pytest.raises(hk.InputError, match="has no Gauss-Newton part"):
            read(module, x, target, loss=partial(formula, w=w))
