"""Approximations of curvature against brute force, against facts from the literature, and against each other's measures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from approximation_cases import AGREED, T, X, Y, perceptron, point
from curvature_reference import Formula, assert_one_clear_error, draw, mse, randomised, reverse_over_reverse
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from operator_cases import EXACT, RowsTimesMatrix, error, tokens
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.operator import hessian_operator
from hessiankit.curvature.structures import LowRankPlusDiagonal, StructuredOperator


def language_model() -> nn.Module:
    return randomised(hk.Transformer(6, 4, 5, 1, placement="pre"))


def term_gradients(module: nn.Module, terms: Tensor) -> list[list[Tensor]]:
    return [list(torch.autograd.grad(t, list(module.parameters()), retain_graph=True)) for t in terms]


def dense(operator: Any) -> Tensor:
    return torch.stack([operator @ e for e in torch.eye(operator.shape[0], dtype=torch.float64)], 1)


LOSSES = pytest.mark.parametrize(
    ("loss", "own", "target"),
    [("cross_entropy", nn.CrossEntropyLoss(), Y), ("mse", nn.MSELoss(), T)],
    ids=["cross_entropy", "mse"],
)


@LOSSES
def test_kfac_and_ekfac_of_curvlinops_on_a_perceptron(loss: str, own: nn.Module, target: Tensor) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    module = perceptron()
    for name, kind in (("kfac", curvlinops.KFACLinearOperator), ("ekfac", curvlinops.EKFACLinearOperator)):
        arguments = (module, own, list(module.parameters()), [(X, target)])
        other = kind(*arguments, fisher_type="type-2", separate_weight_and_bias=True)
        assert error(point(module, X, target, loss=loss).model(name)[0].to_matrix(), dense(other)) <= AGREED


@LOSSES
def test_exact_matrices_and_inverses_of_curvlinops(loss: str, own: nn.Module, target: Tensor) -> None:
    """Its Gauss-Newton matrix, its empirical Fisher and its KFAC's inverse with exact damping, on a perceptron."""
    curvlinops = pytest.importorskip("curvlinops")
    module = perceptron()
    arguments = (module, own, list(module.parameters()), [(X, target)])
    for kind, other in (("ggn", curvlinops.GGNLinearOperator), ("fisher-empirical", curvlinops.EFLinearOperator)):
        found = hk.hessian_operator(module, X, target, loss=loss, kind=kind)
        assert error(found.to_matrix(), dense(other(*arguments))) <= AGREED
    kfac = curvlinops.KFACLinearOperator(*arguments, fisher_type="type-2", separate_weight_and_bias=True)
    inverse = curvlinops.KFACInverseLinearOperator(kfac, damping=0.1, use_exact_damping=True)
    model = point(module, X, target, loss=loss).model("kfac")[0]
    assert isinstance(model, StructuredOperator)
    assert error(model.mapped(lambda v: 1 / (v + 0.1)).to_matrix(), dense(inverse)) <= AGREED


def test_blocks_leave_errors_only_off_the_blocks() -> None:
    module, ids, target = language_model(), tokens(2, 3), tokens(2, 3, seed=5)
    found = hk.approximations(module, ids, target, loss="cross_entropy", of=["tensor", "type", "layer"])
    halves = {"halves": lambda module, names: {"first": list(names)[:5], "rest": list(names)[5:]}}
    found.found.update(hk.approximations(module, ids, target, loss="cross_entropy", partitions=halves, of=["halves"]).found)
    truth = hk.hessian(module, ids, target, loss="cross_entropy")
    types = hk.block_types(module)
    groups: dict[str, dict[str, Any]] = {
        "tensor": {n: n for n in truth.names},
        "type": {n: types[n] for n in truth.names},
        "layer": {p.parameter: p.layer for p in types.parts},
        "halves": {n: k < 5 for k, n in enumerate(truth.names)},
    }
    whole = float(truth.matrix.abs().max())
    for name, of in groups.items():
        for (i, a), (j, b) in itertools.product(enumerate(truth.names), repeat=2):
            left = float(found[name].measures.pairs[i, j])
            expected = 0.0 if of[a] == of[b] else truth.frobenius_norm(a, b)
            assert left == pytest.approx(expected, rel=1e-10, abs=1e-12 * whole)
            assert float(found.spectral_pairs[i, j]) == pytest.approx(truth.spectral_norm(a, b), rel=1e-8, abs=1e-7 * whole)


def test_measures_are_those_of_numpy() -> None:
    module = perceptron()
    found = hk.approximations(module, X, Y, loss="cross_entropy", of=["diagonal", "adam", "low-rank"], rank=3)
    H = reverse_over_reverse(module, X, Y, F.cross_entropy).numpy()
    g = np.concatenate([g.reshape(-1) for g in torch.autograd.grad(F.cross_entropy(module(X), Y), list(module.parameters()))])
    values = np.linalg.eigvalsh(H)
    damping = 0.01 * abs(values).max() + max(0, -values[0])
    assert found.damping == pytest.approx(damping, rel=1e-9)
    damped = H + damping * np.eye(len(H))
    exact = np.linalg.solve(damped, g)

    def check(name: str, C: Any, M: Any) -> None:
        m = found[name].measures
        assert m.frobenius.value == pytest.approx(np.linalg.norm(H - C) / np.linalg.norm(H), rel=1e-9)
        assert m.spectral.value == pytest.approx(np.linalg.norm(H - C, 2) / np.linalg.norm(H, 2), rel=1e-8)
        assert m.alignment == pytest.approx((H * C).sum() / np.linalg.norm(H) / np.linalg.norm(C), rel=1e-9)
        step = np.linalg.solve(M, g)
        assert m.step_cosine == pytest.approx(step @ exact / np.linalg.norm(step) / np.linalg.norm(exact), rel=1e-6)
        left = np.linalg.eigvals(np.linalg.solve(M, damped)).real
        assert m.condition == pytest.approx(left.max() / left.min(), rel=1e-6)

    eye = np.eye(len(H))
    check("diagonal", np.diag(np.diag(H)), np.diag(np.diag(H)) + damping * eye)
    terms = F.cross_entropy(module(X), Y, reduction="none")
    rows = [torch.cat([g.reshape(-1) for g in row]).numpy() for row in term_gradients(module, terms)]
    v = np.mean(np.square(rows), 0)
    check("adam", np.diag(v), np.diag(np.sqrt(v + damping * v.max() / abs(values).max())))
    top = np.argsort(-abs(values))[:3]
    U = np.linalg.eigh(H)[1][:, top]
    part = U * values[top] @ U.T
    low = part + np.diag(np.diag(H - part))
    check("low-rank", low, low + damping * eye)
    assert found["identity"].measures.condition == pytest.approx((values[-1] + damping) / (values[0] + damping), rel=1e-6)
    undamped = hk.approximations(module, X, Y, loss="cross_entropy", of=["adam"], damping=0.0)
    assert undamped["adam"].measures.condition == np.inf  # H has negative eigenvalues


@pytest.mark.parametrize(
    ("names", "target", "options"),
    [
        (["diagonal", "ekfac", "shampoo", "low-rank"], Y, {"loss": "cross_entropy", "against": "ggn"}),
        (["diagonal", "adam"], 3 * T, {}),  # the least eigenvalue is the one of largest magnitude
    ],
)
def test_products_agree_with_the_dense_measures(names: list[str], target: Tensor, options: dict[str, Any]) -> None:
    module = perceptron()
    dense = hk.approximations(module, X, target, of=names, rank=4, **options)
    found = hk.approximations(module, X, target, of=names, rank=4, method="products", products=100, **options)
    assert found.is_estimate
    assert not dense.is_estimate
    assert found.spectral == pytest.approx(dense.spectral, rel=1e-3)
    assert found.least == pytest.approx(dense.least, rel=1e-3, abs=1e-10)
    assert found.damping == pytest.approx(dense.damping, rel=1e-3)
    for name in ("identity", *names):
        a, b = dense[name].measures, found[name].measures
        assert abs(b.frobenius.value - a.frobenius.value) <= 2 * b.frobenius.half_width + 1e-6
        assert b.spectral.value == pytest.approx(a.spectral.value, rel=5e-3, abs=1e-6)
        assert b.step_cosine == pytest.approx(a.step_cosine, abs=1e-4)
        assert name == "low-rank" or b.condition == pytest.approx(a.condition, rel=0.02)


def test_report_prints_and_draws(tmp_path: Any) -> None:
    found = hk.approximations(perceptron(), X, T, of=["diagonal", "kfac"])
    text = found.table()
    assert all(word in text for word in ("identity", "kfac", "damping"))
    assert found._repr_html_().count("<tr>") == 4
    plain = found.to_dict()
    assert plain["approximations"]["kfac"]["frobenius"]["value"] == found["kfac"].measures.frobenius.value
    assert np.shape(plain["errors_by_pair"]["diagonal"]) == (4, 4)
    assert found.plot(tmp_path / "bars.png").axes[2].get_xlim()[0] == 1  # where a bar of a condition number begins
    found.plot_pairs("kfac", tmp_path / "pairs.png")
    assert {p.name for p in tmp_path.iterdir()} == {"bars.png", "pairs.png"}
    assert_one_clear_error(lambda: found["shampo"], "name='shampo' is not known")


def test_products_of_a_single_precision_module_agree_with_the_dense_measures() -> None:
    names, options = ["diagonal", "ekfac", "low-rank"], {"loss": "cross_entropy", "against": "ggn", "rank": 4}
    dense = hk.approximations(perceptron(), X, Y, of=names, **options)
    found = hk.approximations(perceptron().float(), X.float(), Y, of=names, method="products", products=100, **options)
    assert found.spectral == pytest.approx(dense.spectral, rel=1e-3)
    for name in names:
        a, b = dense[name].measures, found[name].measures
        assert abs(b.frobenius.value - a.frobenius.value) <= 2 * b.frobenius.half_width + 1e-4
        assert b.step_cosine == pytest.approx(a.step_cosine, abs=1e-3)


def test_what_cannot_be_made_is_left_out_with_its_reason() -> None:
    found = hk.approximations(perceptron(), X, T, loss=lambda z, t: (z - t).pow(4).mean())
    assert not {"kfac", "layer"} & set(found.found)
    assert any("kfac left out: KFAC needs a loss with known second derivative" in note for note in found.notes)
    whole = Formula(lambda m, x: mse(x @ m.W, T), W=(3, 4))
    alone = hk.approximations(whole, X, loss=None, of=["diagonal"])
    assert alone["diagonal"].measures.frobenius.value < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"of": ["kfca"]}, "of='kfca' is not known; did you mean 'kfac'"),
        ({"damping": -1.0}, "damping=-1.0; pass a finite number"),
        ({"products": 2}, "products=2; pass 6 or more"),
        ({"of": ["tensor"], "method": "products"}, "exact blocks are cut from the exact matrix; pass method='dense'"),
        ({"of": ["kfac"], "loss": lambda z, t: (z - t).pow(4).mean()}, "KFAC needs a loss with known second derivative"),
        ({"of": ["layer"]}, "not recognised"),
        ({"against": "fisher-mc", "loss": F.l1_loss}, "needs a loss with a likelihood"),
        ({"loss": lambda z, t: 0 * z.sum()}, "the exact matrix is zero"),
    ],
)
def test_bad_requests_are_one_clear_error(options: dict[str, Any], said: str) -> None:
    module = Formula(lambda m, x: x @ m.strange, strange=(3, 4))
    assert_one_clear_error(lambda: hk.approximations(module, X, T, **options), f"approximations: .*{said}")


IGNORED = -100
PARTIAL_TRACES = (("ijkj", "ik"), ("ijil", "jl"))


def network(layers: list[tuple[bool, int]], outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    width, parts = 3, []
    for is_stored_across, size in layers:
        parts += [RowsTimesMatrix(width, size) if is_stored_across else nn.Linear(width, size), nn.Tanh()]
        width = size
    return nn.Sequential(*parts, nn.Linear(width, outputs)).double()


def kron(factors: Sequence[Tensor]) -> Tensor:
    return torch.kron(*factors) if len(factors) == 2 else factors[0]


def of_rows(loss: str, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """Gradients in the rows of outputs (R, C), their second derivatives (R, C, C), and the number of terms of the mean."""
    if loss == "mse":
        return 2 * (z - y), 2 * torch.eye(z.shape[-1]).to(z).expand(len(z), -1, -1), float(z.numel())
    p = torch.softmax(z, -1)
    counted = (y != IGNORED).to(z)
    slopes = (p - F.one_hot(y.clamp(min=0), z.shape[-1])) * counted[:, None]
    return slopes, (torch.diag_embed(p) - p[:, :, None] * p[:, None]) * counted[:, None, None], float(counted.sum())


def pulled(module: nn.Sequential, x: Tensor) -> tuple[list[tuple[nn.Module, Tensor, Tensor]], Tensor]:
    """Inputs (R, i) of every layer and Jacobians (R, C, o) of the outputs, row by row; and the outputs."""
    layers, held = [m for m in module if hasattr(m, "weight")], []
    handles = [m.register_forward_hook(lambda m, inputs, out: held.append((m, inputs[0].detach(), out))) for m in layers]
    z = module(x)
    for handle in handles:
        handle.remove()
    found = []
    for layer, inputs, out in held:
        J = torch.stack([torch.autograd.grad(z[..., c].sum(), out, retain_graph=True)[0] for c in range(z.shape[-1])], -2)
        found.append((layer, inputs.flatten(0, -2), J.flatten(0, -3)))  # rows do not depend on each other
    return found, z.detach().flatten(0, -2)


CASES = given(
    st.sampled_from(["mse", "cross_entropy"]),
    st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=2),
    st.integers(2, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([(), (2,)]),
    st.sampled_from(["mean", "sum"]),
    st.integers(0, 99),
)


def drawn(loss: str, outputs: int, sizes: list[int], rows: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    x = torch.randn(n, *rows, 3, dtype=torch.float64, generator=generator)
    if loss == "mse":
        y = torch.randn(n, *rows, outputs, dtype=torch.float64, generator=generator)
    else:
        y = torch.randint(outputs, (n, *rows), generator=generator)
        y[torch.rand(y.shape, generator=generator) < 0.2] = IGNORED
        assume(bool((y != IGNORED).any()))
    return x, y, list(zip(x.split(sizes), y.split(sizes), strict=True))


@settings(max_examples=6, deadline=None)
@CASES
def test_factors_are_sums_over_rows_of_all_batches(
    loss: str, layers: list[Any], outputs: int, sizes: list[int], rows: tuple[int, ...], reduction: str, seed: int
) -> None:
    module = network(layers, outputs, seed)
    x, y, batches = drawn(loss, outputs, sizes, rows, seed)
    of_layers, z = pulled(module, x)
    _, second, terms = of_rows(loss, z, y.reshape(len(z), *y.shape[1 + len(rows) :]))
    scale = 1.0 if reduction == "sum" else 1 / terms
    counted = torch.ones(len(z), dtype=torch.bool) if loss == "mse" else (y != IGNORED).reshape(-1)
    operator = hessian_operator(module, batches, loss=loss, kind="ggn", reduction=reduction)
    kfac, ekfac = (operator.approximation(name).to_matrix() for name in ("kfac", "ekfac"))
    exact = operator.to_matrix()
    names = {id(p): name for name, p in module.named_parameters()}
    blocks, corrected = [], []
    for layer, inputs, J in of_layers:
        a = inputs[counted]
        A = a.T @ a / len(a)
        G = (scale * torch.einsum("rco,rcd,rdp->op", J, second, J)).contiguous()
        pair = (A, G) if isinstance(layer, RowsTimesMatrix) else (G, A)
        for p, factors in ((layer.weight, pair), (layer.bias, (G,))):
            at = operator.slices[names[id(p)]]
            blocks.append(kron(factors))
            spectra = [torch.linalg.eigh(factor) for factor in factors]
            U = kron([basis.contiguous() for _, basis in spectra])
            is_unique = all(bool((w.diff() > 1e-4 * w.abs().max()).all()) for w, _ in spectra)  # else the basis is a choice
            corrected.append(U @ torch.diag((U.T @ exact[at, at] @ U).diagonal()) @ U.T if is_unique else ekfac[at, at])
    assert error(kfac, torch.block_diag(*blocks)) <= EXACT
    assert error(ekfac, torch.block_diag(*corrected)) <= 1e-9


def sample_gradients(module: nn.Module, loss: str, x: Tensor, y: Tensor, reduction: str) -> Tensor:
    """The gradients of the samples that count, of losses whose mean over these samples is that of all data: (B, P)."""
    terms = float(y.numel()) if loss == "mse" else float((y != IGNORED).sum())
    kept = [n for n in range(len(x)) if loss == "mse" or bool((y[n] != IGNORED).any())]
    found = []
    for n in kept:
        z = module(x[n])
        value = (
            (z - y[n]).square().sum()
            if loss == "mse"
            else F.cross_entropy(z.reshape(-1, z.shape[-1]), y[n].reshape(-1), reduction="sum", ignore_index=IGNORED)
        )
        own = torch.autograd.grad(value, list(module.parameters()))
        found.append(torch.cat([g.flatten() for g in own]) * (len(kept) / terms if reduction == "mean" else len(kept)))
    return torch.stack(found)


@settings(max_examples=6, deadline=None)
@CASES
@pytest.mark.parametrize("minibatch", [1, 3])
def test_moments_of_mini_batches_by_gradients_of_single_samples(
    minibatch: int, loss: str, layers: list[Any], outputs: int, sizes: list[int], rows: tuple[int, ...], reduction: str, seed: int
) -> None:
    module = network(layers, outputs, seed)
    x, y, batches = drawn(loss, outputs, sizes, rows, seed)
    g = sample_gradients(module, loss, x, y, reduction)
    mean = g.mean(0)
    second = g.T @ g / len(g) / minibatch + (1 - 1 / minibatch) * torch.outer(mean, mean)
    of = ["adam", "shampoo", "muon"]
    report = hk.approximations(module, batches, loss=loss, of=of, minibatch=minibatch, reduction=reduction, damping=1.0)
    adam, shampoo, muon = (report[name].operator.to_matrix() for name in of)
    assert error(adam, torch.diag(second.diagonal())) <= EXACT
    start, left_and_right, of_mean = 0, [], []
    for p in module.parameters():
        at = slice(start, start := start + p.numel())
        own = second[at, at]
        if p.ndim < 2:
            left_and_right.append(own @ own)
            of_mean.append(torch.diag(own.diagonal()))
            continue
        m, n = p.shape
        G = mean[at].reshape(m, n)
        left, right = (torch.einsum(f"{indices}->{out}", own.reshape(m, n, m, n)) for indices, out in PARTIAL_TRACES)
        left_and_right.append(torch.kron(left.contiguous(), right.contiguous()))
        of_mean.append(torch.kron(G @ G.T, torch.eye(n).to(G)) if m <= n else torch.kron(torch.eye(m).to(G), G.T @ G))
    assert error(shampoo @ shampoo, torch.block_diag(*left_and_right)) <= 1e-9  # it has the root of each factor
    assert error(muon, torch.block_diag(*of_mean)) <= EXACT


@pytest.mark.parametrize("against", ["ggn", "fisher-mc", "fisher-empirical"])
def test_outputs_without_an_axis_of_columns_are_a_column(against: str) -> None:
    """Outputs (B,), of an odd number of samples, under squared error have the approximations of outputs (B, 1)."""
    parts = {"first": nn.Linear(3, 4), "last": nn.Linear(4, 1)}
    column = Formula(lambda m, x: m.last(torch.tanh(m.first(x))), **parts)
    flat = Formula(lambda m, x: m.last(torch.tanh(m.first(x)))[:, 0], **parts)
    options: dict[str, Any] = {"against": against, "damping": 0.01}
    found, expected = (hk.approximations(m, X[:5], t, **options) for m, t in ((flat, T[:5, 0]), (column, T[:5, :1])))
    for name, row in expected.found.items():
        assert float((found[name].operator.to_matrix() - row.operator.to_matrix()).abs().max()) <= AGREED, name


def test_the_numbers_that_each_approximation_stores() -> None:
    """Halves of symmetric blocks: of the weights 5 x 3 and 4 x 5 with their biases, 44 entries."""
    found = hk.approximations(perceptron(), X, Y, loss="cross_entropy", against="ggn", rank=2)
    tri = {n: n * (n + 1) // 2 for n in (3, 4, 5, 15, 20)}
    pairs = tri[3] + tri[5] + tri[5] + tri[4] + tri[5] + tri[4]
    blocks = tri[15] + tri[5] + tri[20] + tri[4]
    expected = {"identity": 0, "diagonal": 44, "tensor": blocks, "kfac": pairs, "ekfac": pairs, "adam": 44, "shampoo": pairs}
    expected |= {"muon": tri[3] + 5 + tri[4] + 4, "low-rank": 44 * 2 + 2 + 44}
    assert {name: row.numbers for name, row in found.found.items() if name in expected} == expected


def test_a_low_rank_matrix_with_values_of_either_sign_is_inverted():
    basis, values, diagonal = torch.linalg.qr(draw(5, 3)).Q, torch.tensor([2.0, -0.3, 0.0]).double(), draw(5).abs()
    matrix, rows = basis @ torch.diag(values) @ basis.T + torch.diag(diagonal + 0.7), draw(2, 5, seed=3)
    found = LowRankPlusDiagonal(basis, values, diagonal).solve(rows, 0.7)
    assert torch.allclose(found, torch.linalg.solve(matrix, rows.T).T, rtol=1e-12)
