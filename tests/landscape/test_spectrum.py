"""Spectra from products against all eigenvalues of the matrix and against SciPy's eigsh; what is refused."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
import torch
from operator_cases import T, X, block
from scipy.sparse.linalg import LinearOperator, aslinearoperator, eigsh
from torch import nn

import hessiankit as hk
from hessiankit.curvature.operator import HessianOperator
from hessiankit.landscape.density import SpectralMeasure
from hessiankit.support.files import plain
from hessiankit.support.lanczos import extreme_eigenpairs, quadrature

DOUBLE = {"dtype": torch.float64}


def with_eigenvalues(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    n = len(values)
    Q = torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(seed), **DOUBLE))[0]
    return (Q * values) @ Q.T


SPECTRA = {
    "multiple": (torch.cat([torch.tensor([9.0, 9, 9, 4, 4, -2, -2]), torch.linspace(0, 1, 80)]).double(), 5, 2),
    "of low rank": (torch.cat([torch.zeros(70), torch.arange(1.0, 6)]).double(), 5, 2),
    "one value": (torch.ones(30, **DOUBLE), 4, 2),
    "zero": (torch.zeros(30, **DOUBLE), 2, 2),
    "decades": (10.0 ** -torch.arange(60, **DOUBLE), 6, 0),
    "lower end": (torch.linspace(-3, 1, 90, **DOUBLE), 0, 3),
    "all of a small one": (torch.linspace(-3, 1, 6, **DOUBLE), 3, 3),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_both_ends_with_their_multiplicities(name: str) -> None:
    values, top, bottom = SPECTRA[name]
    A = with_eigenvalues(values)
    start = torch.randn(len(values), generator=torch.Generator().manual_seed(1), **DOUBLE)
    found = extreme_eigenpairs(A.matmul, start, top=top, bottom=bottom, tol=1e-8, most=2000, basis=2 * (top + bottom) + 10)
    ordered = values.sort(descending=True).values
    expected = torch.cat([ordered[:top], ordered[len(ordered) - bottom :]])
    scale = float(values.abs().max())
    assert found.converged
    assert float((found.values - expected).abs().max()) <= 1e-10 * scale + 1e-15
    V = found.vectors
    assert float((V @ V.T - torch.eye(len(V), **DOUBLE)).abs().max()) < 1e-6
    assert float((V @ A - found.values.unsqueeze(1) * V).norm(dim=1).max()) <= 1e-8 * scale + 1e-14


def test_multiple_eigenvalues_of_a_diagonal_matrix_which_rounding_does_not_separate() -> None:
    values = SPECTRA["multiple"][0]
    start = torch.randn(len(values), generator=torch.Generator().manual_seed(1), **DOUBLE)
    found = extreme_eigenpairs(torch.diag(values).matmul, start, top=5, bottom=2, tol=1e-3, most=2000, basis=24)
    within = (1e-3 * 9) ** 2 / 2  # the residual's square over the least distance to another eigenvalue, from -2 to 0
    assert found.values.tolist() == pytest.approx([9, 9, 9, 4, 4, -2, -2], abs=within)
    start = torch.randn(92, generator=torch.Generator().manual_seed(1), **DOUBLE)  # one value twelve times: several looks
    often = torch.cat([torch.full((12,), 9.0, **DOUBLE), values[7:]])
    found = extreme_eigenpairs(torch.diag(often).matmul, start, top=12, tol=1e-3, most=2000, basis=38)
    assert found.values.tolist() == pytest.approx([9] * 12, abs=within)


def test_quadrature_is_exact_for_polynomials() -> None:
    values = torch.linspace(-1, 2, 40, **DOUBLE)
    A, starts = with_eigenvalues(values), torch.randn(3, 40, generator=torch.Generator().manual_seed(2), **DOUBLE)
    for q, (nodes, weights) in zip(starts, quadrature(A.matmul, starts, 6), strict=True):
        q, power = q / q.norm(), q / q.norm()
        for degree in range(12):
            assert float((weights * nodes**degree).sum()) == pytest.approx(float(q @ power), rel=1e-11, abs=1e-12)
            power = A @ power


def test_the_rest_of_a_matrix_whose_rank_is_found_is_zero() -> None:
    found = hk.spectrum(aslinearoperator(np.ones((50, 50))), k=1, method="lanczos", density=True, steps=10)
    assert (found.trace.value, found.trace.half_width) == (pytest.approx(50), pytest.approx(0, abs=1e-9))


@pytest.fixture(scope="module")
def operator() -> HessianOperator:
    return hk.hessian_operator(block(), X, T)


def test_the_ends_are_those_of_eigsh_and_of_the_matrix(operator: HessianOperator) -> None:
    found = hk.spectrum(operator, k=3, bottom=2, method="lanczos", tol=1e-9)
    every = hk.hessian(block(), X, T).eigvalsh().flip(0)
    start = np.random.default_rng(0).standard_normal(len(every))
    upper = np.sort(eigsh(operator, k=3, which="LA", v0=start)[0])[::-1]
    scale = float(every.abs().max())
    assert found.converged
    assert found.kind == "hessian"
    assert found.loss == operator.loss
    for one in (found, hk.spectrum(operator, k=3, bottom=2)):
        assert float((one.eigenvalues - torch.cat([every[:3], every[-2:]])).abs().max()) < 1e-10 * scale
    assert np.abs(found.eigenvalues[:3].numpy() - upper).max() < 1e-10 * scale
    off = operator @ found.eigenvectors - found.eigenvectors * found.eigenvalues
    assert off.norm(dim=0).tolist() == pytest.approx(found.residuals.tolist(), abs=1e-13)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-6), (torch.float32, 1e-4)])
def test_eigenvalues_take_no_more_products_than_eigsh_and_a_density_what_it_says(
    kind: str, dtype: torch.dtype, tol: float
) -> None:
    sizes = {"d_model": 12, "d_ff": 24, "n_layers": 2, "n_heads": 2, "placement": "pre", "max_len": 8, "seed": 0}
    ids = torch.randint(20, (4, 9), generator=torch.Generator().manual_seed(1))
    model = hk.Transformer(20, **sizes, causal=True).to(dtype)
    A = hk.hessian_operator(model, ids[:, :-1], ids[:, 1:], loss="cross_entropy", kind=kind)
    calls = []
    counted = LinearOperator(A.shape, dtype=A.dtype, matvec=lambda v: calls.append(1) or A @ v.astype(A.dtype))
    scale = float(np.abs(eigsh(A, k=1, which="LM", return_eigenvectors=False)).max())
    start = np.random.default_rng(0).standard_normal(A.shape[0])
    for k in (1, 3, 5):
        calls.clear()
        values = np.sort(eigsh(counted, k=k, which="LA", tol=tol, v0=start)[0])
        found = hk.spectrum(A, k=k)
        assert found.method == "lanczos"
        assert found.converged
        assert found.products <= len(calls)
        assert np.abs(found.eigenvalues.numpy() - values[::-1]).max() <= 2 * tol * scale
        off = (A @ found.eigenvectors).double() - found.eigenvectors.double() * found.eigenvalues
        assert bool((off.norm(dim=0) <= 1.01 * found.residuals + 0.01 * tol * scale).all())
    assert hk.spectrum(A, k=5, directions=0).products == found.products
    assert found.products + 800 < hk.spectrum(A, k=5, density=True).products < found.products + 900


def test_sums_and_densities_lie_within_their_errors_of_the_full_spectrum(operator: HessianOperator) -> None:
    full = hk.spectrum(operator, k=4, bottom=4)
    assert (full.method, full.products, len(full.measure.nodes)) == ("full", operator.shape[0], 0)
    assert full.trace.value == pytest.approx(float(operator.to_matrix().trace()))
    assert (full.trace.half_width, full.effective_rank.half_width) == (0.0, 0.0)
    found = hk.spectrum(operator, k=4, bottom=4, method="lanczos", directions=12, steps=40)
    for name in ("trace", "frobenius_squared", "effective_rank", "stable_rank"):
        truth, estimate = getattr(full, name).value, getattr(found, name)
        assert 0 < estimate.half_width < 0.5 * abs(truth)
        assert abs(estimate.value - truth) <= 1.5 * estimate.half_width
    true = full.density(width=0.02)
    estimate = found.density(width=0.02, points=true.points)
    error = (estimate.values - true.values).abs()
    assert float((error <= 3 * estimate.standard_errors + 1e-3 * true.values.max()).double().mean()) > 0.95
    assert float(estimate.standard_errors.max()) < 0.2 * float(true.values.max())


def test_a_density_integrates_to_one() -> None:
    values = torch.tensor([-3.0, -1.0, 0.0, 0.0, 2.0, 5.0, 7.0], **DOUBLE)
    found = hk.spectrum(aslinearoperator(np.diag(values.numpy())), k=1)
    linear, log = found.density(width=0.3, points=4000), found.density(scale="log", points=4000)
    assert float(torch.trapezoid(linear.values, linear.points)) == pytest.approx(1, abs=1e-4)
    decades = log.points.log10()
    assert float(torch.trapezoid(log.values, decades)) == pytest.approx(3 / 7, abs=1e-4)
    assert float(torch.trapezoid(log.negative, decades)) == pytest.approx(2 / 7, abs=1e-4)
    assert log.zeros == pytest.approx(2 / 7)
    some = found.density(scale="log", points=log.points[::7])
    assert some.values.tolist() == pytest.approx(log.values[::7].tolist())
    assert found.effective_rank.value == pytest.approx(18**2 / 88)
    assert found.stable_rank.value == pytest.approx(88 / 49)


def test_groups_are_diagonal_blocks(operator: HessianOperator) -> None:
    H = operator.to_matrix()
    found = hk.spectrum(operator, k=2, by="parameter")
    assert list(found.groups) == list(operator.names)
    for name, rows in operator.slices.items():
        expected = torch.linalg.eigvalsh(H[rows, rows])
        assert float(found.groups[name].eigenvalues[0]) == pytest.approx(float(expected[-1]), abs=1e-12)
        assert float(found.groups[name].trace.value) == pytest.approx(float(expected.sum()), abs=1e-12)
    some = {"attention": "attention.*", "first": ["norm_1.weight", "attention.W_Q[0]"]}
    found = hk.spectrum(operator, k=1, by=some, method="lanczos", directions=2, steps=3)
    again = hk.spectrum(operator, k=1, by=lambda module, names: some, method="lanczos", directions=2, steps=3)
    assert {name: one.eigenvalues.tolist() for name, one in again.groups.items()} == {
        name: one.eigenvalues.tolist() for name, one in found.groups.items()
    }
    W, g = operator.slices["attention.W_Q"], operator.slices["norm_1.weight"]
    rows = [*range(W.start, W.start + operator.shapes["attention.W_Q"][1]), *range(g.start, g.stop)]
    expected = torch.linalg.eigvalsh(H[rows][:, rows])[-1]
    assert found.groups["first"].size == len(rows)
    assert float(found.groups["first"].eigenvalues[0]) == pytest.approx(float(expected), rel=1e-10)


def test_a_computed_hessian_takes_the_place_of_its_operator(operator: HessianOperator) -> None:
    H = hk.hessian(block(), X, T)
    found, expected = (hk.spectrum(one, k=3, bottom=3, by="parameter", directions=2, steps=3) for one in (H, operator))
    assert (found.method, found.kind, found.loss) == ("full", "hessian", H.loss)  # all eigenvalues, by LAPACK
    assert torch.allclose(found.eigenvalues, H.eigvalsh()[[-1, -2, -3, 2, 1, 0]], rtol=0, atol=1e-12)
    for name, one in expected.groups.items():
        assert torch.allclose(found.groups[name].eigenvalues, one.eigenvalues, rtol=0, atol=1e-10)
    assert torch.allclose(hk.spectrum(H, k=3, bottom=3, method="lanczos").eigenvalues, found.eigenvalues, rtol=0, atol=1e-10)
    with pytest.raises(hk.InputError, match="a Hessian has its data; pass it alone"):
        hk.spectrum(H, X, T)


def test_groups_by_type_and_by_layer() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(4, 4)).double()
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0), **DOUBLE)
    by_type = hk.spectrum(module, x, x, k=1, by="type", kind="ggn").groups
    assert {name: one.size for name, one in by_type.items()} == hk.block_types(module).entries
    again = hk.spectrum(module, x, x, k=1, by=hk.block_types(module), kind="ggn").groups
    assert [one.trace.value for one in again.values()] == [one.trace.value for one in by_type.values()]
    assert set(hk.spectrum(module, x, x, k=1, by="layer").groups) == {"layer 0", "layer 1", "outside"}
    assert set(hk.spectrum(module, x, x, k=1, by="layer", params="0.layers.0.linear1.*").groups) == {"layer 0"}
    for by in ("type", hk.block_types(module)):
        assert set(hk.spectrum(module, x, x, k=1, by=by, params="0.layers.0.linear1.*").groups) == {"FFN"}


def test_the_layers_of_a_model_without_attention_are_its_modules() -> None:
    mlp = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    groups = hk.spectrum(mlp, torch.ones(2, 2, **DOUBLE), torch.zeros(2, 1, **DOUBLE), k=1, by="layer").groups
    assert {name: one.size for name, one in groups.items()} == {"0": 9, "2": 4}


def test_outliers_are_above_the_widest_gap() -> None:
    for least in (-40.0, 0.01):
        A = aslinearoperator(np.diag([100.0, 70.0, 50.0, 5.0, 4.0, 3.0, 1.0, 1.0, least]))
        found = hk.spectrum(A, k=6, bottom=1)
        assert (found.outliers, found.gap) == (3, pytest.approx(10.0))
    assert hk.spectrum(aslinearoperator(-np.eye(4)), k=2).outliers == 0
    assert math.isnan(hk.spectrum(aslinearoperator(-np.eye(4)), k=2).gap)


def test_the_same_seed_gives_the_same_digits(operator: HessianOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"k": 2, "method": "lanczos", "directions": 2, "steps": 5, "seed": 3}
    one, two = (hk.spectrum(operator, **options) for _ in range(2))
    assert torch.equal(one.eigenvalues, two.eigenvalues)
    assert torch.equal(one.measure.nodes, two.measure.nodes)
    monkeypatch.setattr("hessiankit.landscape.spectra.TOGETHER", 1)  # directions one after the other
    torch.testing.assert_close(hk.spectrum(operator, **options).measure.nodes, one.measure.nodes)


def test_products_that_run_out_are_said() -> None:
    A = with_eigenvalues(torch.linspace(0, 1, 200, **DOUBLE))
    found = hk.spectrum(aslinearoperator(A.numpy()), k=3, bottom=0, method="lanczos", max_products=20, directions=2, steps=4)
    assert not found.converged
    assert "NOT CONVERGED" in str(found)
    values = torch.linspace(0, 1, 200, **DOUBLE)
    for value, residual in zip(found.eigenvalues, found.residuals, strict=True):
        assert float((values - value).abs().min()) <= float(residual)
    few = extreme_eigenpairs(torch.eye(30, **DOUBLE).matmul, torch.ones(30, **DOUBLE), top=4, most=6)
    assert (len(few.values), float(few.residuals.max()) < 1e-12, few.converged) == (2, True, False)  # exact, and too few


def test_prints_and_pictures(operator: HessianOperator, tmp_path) -> None:
    ends = hk.spectrum(operator, k=3, by="parameter", method="lanczos")
    assert "density=True, 10 directions x 80 steps = 800 more products" in str(ends)
    assert ends.to_dict()["trace"] is None
    found = hk.spectrum(operator, k=3, bottom=3, by="parameter", method="lanczos", directions=2, steps=4)
    assert "spectrum of the Hessian, " in str(found)
    assert "attention.W_Q" in found.table()
    assert re.search(rf"^{operator.shape[0]} ", found.table(), re.MULTILINE)  # the number of the smallest eigenvalue
    json.dumps(plain(found.to_dict()), allow_nan=False)
    json.dumps(found.density(scale="log").to_dict(), allow_nan=False)
    picture = found.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size
    assert [axes.get_xscale() for axes in picture.axes] == ["linear", "log"]


def nan_operator() -> LinearOperator:
    return aslinearoperator(np.full((5, 5), np.nan))


BAD = {
    "k too large": (lambda op: hk.spectrum(op, k=10**6), r"k=1000000 and bottom=0 of \d+ eigenvalues"),
    "no k": (lambda op: hk.spectrum(op, k=0), "k=0, bottom=0; expected at least one"),
    "NaN, Lanczos": (lambda op: hk.spectrum(nan_operator(), k=1, method="lanczos"), "product 1 with the matrix is NaN"),
    "not symmetric": (
        lambda op: hk.spectrum(aslinearoperator(np.triu(np.ones((30, 30)))), k=1, method="lanczos"),
        "not symmetric",
    ),
    "not square": (lambda op: hk.spectrum(aslinearoperator(np.ones((3, 4))), k=1), "the operator is 3 x 4"),
    "dropout": (
        lambda op: hk.spectrum(nn.Sequential(block(), nn.Dropout(0.1)), X, T),
        r"call model.eval\(\) first: .* dropout layer",
    ),
    "method": (lambda op: hk.spectrum(op, method="eigsh"), "method='eigsh' is not known"),
    "tol": (lambda op: hk.spectrum(op, tol=0.0), "tol=0.0"),
    "NaN, full": (lambda op: hk.spectrum(nan_operator(), k=1), "NaN or infinite"),
    "not symmetric, full": (lambda op: hk.spectrum(aslinearoperator(np.triu(np.ones((30, 30)))), k=1), "not symmetric"),
    "directions": (lambda op: hk.spectrum(op, directions=1), "directions=1"),
    "a density of no direction": (lambda op: hk.spectrum(op, density=True, directions=0), "density=True, directions=0"),
    "a trace of few eigenvalues": (
        lambda op: hk.spectrum(op, k=2, method="lanczos").trace,
        r"2 of 88 eigenvalues are known.*pass density=True, which takes 10 directions x 80 steps = 800 more products",
    ),
    "a picture of few eigenvalues": (lambda op: hk.spectrum(op, k=2, method="lanczos").plot(), "pass density=True"),
    "products": (lambda op: hk.spectrum(op, max_products=1), "max_products=1"),
    "no module": (lambda op: hk.spectrum(X), "got Tensor"),
    "part": (lambda op: hk.spectrum(op, by={"a": ["attention.W_X"]}), "attention.W_X"),
    "empty": (lambda op: hk.spectrum(op, by={"a": []}), "an empty list selects no parameter"),
    "width": (lambda op: hk.spectrum(op, k=1).density(width=0.0), "width=0.0"),
    "inputs beside an operator": (lambda op: hk.spectrum(op, X), "an operator has its data"),
    "by": (lambda op: hk.spectrum(op, by="class"), "by='class' is not known; choose one of parameter, neuron, head, "),
    "by of a class": (lambda op: hk.spectrum(op, by=nn.ReLU), "a partition gives a type; pass a dict"),
    "by without groups": (lambda op: hk.spectrum(op, by=lambda module, names: None), "a partition gives a NoneType; pass a dict"),
    "by without module": (lambda op: hk.spectrum(op, by="type"), "read from the module"),
    "by of no names": (lambda op: hk.spectrum(aslinearoperator(np.eye(3)), k=1, by="parameter"), "needs parameters by name"),
    "pattern": (lambda op: hk.spectrum(op, by={"a": "b.*"}), r"'b\.\*'"),
    "density": (lambda op: hk.spectrum(op, k=1).density(scale="cubic"), "scale='cubic'"),
    "a target beside an operator": (lambda op: hk.spectrum(op, target=T), "an operator has its data"),
    "picture": (lambda op: hk.spectrum(op, k=1).plot("a.bmp"), "cannot write 'a.bmp'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str, operator: HessianOperator) -> None:
    call, message = BAD[name]
    with pytest.raises(hk.InputError, match=message) as seen:
        call(operator)
    assert str(seen.value).startswith(("spectrum: ", "Spectrum"))
    assert "\n" not in str(seen.value)


def test_what_does_not_fit_in_memory(operator: HessianOperator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hessiankit.support.memory.available_memory", lambda device: 1000)
    with pytest.raises(hk.OutOfMemoryError, match=r"vectors of \d+ parameters take"):
        hk.spectrum(operator, k=1, method="lanczos")
    with pytest.raises(hk.OutOfMemoryError, match="all eigenvalues of"):
        hk.spectrum(operator, k=1)


def test_sums_are_over_all_eigenvalues_and_linear_ones_have_the_error_of_a_mean(operator: HessianOperator) -> None:
    one = hk.spectrum(aslinearoperator(np.eye(30)), k=2, bottom=0, method="lanczos", directions=2, steps=2)
    assert (one.trace.value, one.effective_rank.value) == (pytest.approx(30), pytest.approx(30))
    found = hk.spectrum(operator, k=2, method="lanczos", directions=4, steps=6)
    scale = found.measure.scale**2
    assert found.stable_rank.half_width == pytest.approx(found.frobenius_squared.half_width / scale, rel=1e-9)


def test_an_eigenvalue_that_few_directions_see_is_in_the_error() -> None:
    """Directions with equal and tiny shares of one eigenvalue 7 have no spread; n q^2 has the variance 2 (n - 1) / (n + 2)."""
    nodes = torch.tensor([[0.0, 7.0]], **DOUBLE).repeat(4, 1)
    share = torch.tensor([[0.999, 0.001]], **DOUBLE).repeat(4, 1)
    found = SpectralMeasure(12, torch.full((2,), 9.0, **DOUBLE), 1e-16, nodes, share).estimate(lambda t: t)
    assert found.value == pytest.approx(18 + 10 * 0.007)
    assert found.half_width == pytest.approx(1.959963985 * 7 * math.sqrt(2 * 9 / 12) / 2, rel=1e-9)
    spread = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], **DOUBLE)
    wide = SpectralMeasure(12, torch.full((2,), 9.0, **DOUBLE), 1e-16, nodes, spread).estimate(lambda t: t)
    assert wide.half_width == pytest.approx(3.182446305 * 70 * math.sqrt(1 / 3) / 2, rel=1e-8)  # Student, 3, of 0, 70, 0, 70
    unseen = torch.tensor([[0.0, 100.0]], **DOUBLE).repeat(4, 1), torch.tensor([[1.0, 0.0]], **DOUBLE).repeat(4, 1)
    assert SpectralMeasure(12, torch.zeros(0, **DOUBLE), 1e-16, *unseen).estimate(lambda t: t).half_width == 0.0


def test_the_error_of_the_effective_rank_is_that_of_its_linearisation() -> None:
    """A small change of the nodes' weights moves the ratio by the sum of 2 r |t| - r^2 t^2, r = sum |t| / sum t^2."""
    found = hk.spectrum(aslinearoperator(np.diag(np.linspace(-1.0, 3.0, 60))), k=2, method="lanczos", directions=6, steps=30)
    sums = torch.stack([found.measure.sums(torch.abs), found.measure.sums(torch.square)])
    means, change = sums.mean(1), sums - sums.mean(1, keepdim=True)

    def rank(at: torch.Tensor) -> torch.Tensor:
        return at[0] ** 2 / at[1]

    slopes = torch.autograd.functional.jacobian(rank, means)
    spread = float((slopes @ change).std())
    assert found.effective_rank.value == pytest.approx(float(rank(means)))
    assert found.effective_rank.half_width >= 2.570581836 * spread / math.sqrt(6) * (1 - 1e-9)  # Student, 5
    assert found.effective_rank.half_width <= 2.570581836 * spread / math.sqrt(6) * 3
