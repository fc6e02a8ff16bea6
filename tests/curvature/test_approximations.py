"""Approximations of curvature against brute force, against facts from the literature, and against each other's measures."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_one_clear_error, draw, mse, randomised, reverse_over_reverse
from operator_cases import LABELS, TOKENS, TiedBlock, error, tokens
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.approximating.approximations import Point
from hessiankit.curvature.kronecker import KroneckerFactors
from hessiankit.curvature.structures import LowRankPlusDiagonal, StructuredOperator
from hessiankit.engine.problem.batches import gather

EXACT = 1e-10
X, Y, T = draw(6, 3), torch.tensor([0, 3, 1, 2, 2, 0]), draw(6, 4, seed=3)


def perceptron(*, bias: bool = True) -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4, bias=bias)))


def language_model() -> nn.Module:
    return randomised(hk.Transformer(6, 4, 5, 1, placement="pre"))


def point(module: nn.Module, inputs: Any, target: Any, *, minibatch: int = 1, **options: Any) -> Point:
    given = {"loss": "cross_entropy", "kind": "ggn", "params": None, "seed": 0, "draws": 1, "weights": None, "reduction": None}
    return Point(module, [(inputs, target)], {**given, **options}, None, "dense", None, 60, minibatch, 5)


def term_gradients(module: nn.Module, terms: Tensor) -> list[list[Tensor]]:
    return [list(torch.autograd.grad(t, list(module.parameters()), retain_graph=True)) for t in terms]


def expected_kfac(module: nn.Module, weight: nn.Linear, inputs: Tensor, target: Tensor) -> Tensor:
    """A (x) G of a linear layer by hooks and the sum over all labels of every position, as the layer stores its weight."""
    seen: dict[str, Tensor] = {}

    def keep(_m: nn.Module, x: tuple[Tensor, ...], z: Tensor) -> None:
        seen["x"], seen["z"] = x[0], z

    handle = weight.register_forward_hook(keep)
    logits = module(inputs)
    handle.remove()
    p = torch.softmax(logits.detach(), -1).reshape(-1, logits.shape[-1])
    flat, kept = logits.reshape(-1, logits.shape[-1]), (target != -100).reshape(-1)
    G = torch.zeros(())
    for row, label in itertools.product(kept.nonzero()[:, 0].tolist(), range(flat.shape[1])):
        (g,) = torch.autograd.grad(F.cross_entropy(flat[row : row + 1], torch.tensor([label])), seen["z"], retain_graph=True)
        rows = g.reshape(-1, g.shape[-1])
        G = G + p[row, label] * rows.T @ rows / kept.sum()
    x = seen["x"].detach().reshape(-1, seen["x"].shape[-1])
    return torch.kron(G, x.T @ x / len(x))


class SequenceModel(nn.Module):
    """Linear layers around a mean over earlier tokens, so that a row moves the outputs of later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        return self.last(z.cumsum(1) / 2)


def test_kfac_is_the_expectation_over_labels_of_every_position() -> None:
    module, x = randomised(SequenceModel()), draw(2, 3, 3)
    labels = torch.tensor([[0, 2, -100], [1, -100, 2]])
    model = point(module, x, labels).model("kfac")[0].to_matrix()
    H = hk.hessian(module, x, labels, loss="cross_entropy")
    for name, layer in (("first", module.first), ("last", module.last)):
        rows = H.slices[f"{name}.weight"]
        assert error(model[rows, rows], expected_kfac(module, layer, x, labels)) <= EXACT
    off = model.clone()
    for rows in H.slices.values():
        off[rows, rows] = 0
    assert float(off.abs().max()) == 0


def test_kfac_and_ekfac_of_curvlinops_on_a_perceptron() -> None:
    curvlinops = pytest.importorskip("curvlinops")
    module = perceptron()
    params = list(module.parameters())
    for name, kind in (("kfac", curvlinops.KFACLinearOperator), ("ekfac", curvlinops.EKFACLinearOperator)):
        for loss, own, target in (("cross_entropy", nn.CrossEntropyLoss(), Y), ("mse", nn.MSELoss(), T)):
            other = kind(module, own, params, [(X, target)], fisher_type="type-2", separate_weight_and_bias=True)
            expected = torch.stack([other @ e for e in torch.eye(other.shape[0], dtype=torch.float64)], 1)
            assert error(point(module, X, target, loss=loss).model(name)[0].to_matrix(), expected) <= EXACT


@pytest.mark.parametrize(("loss", "own", "target"), [("cross_entropy", nn.CrossEntropyLoss(), Y), ("mse", nn.MSELoss(), T)])
def test_exact_matrices_and_inverses_of_curvlinops(loss: str, own: nn.Module, target: Tensor) -> None:
    """Its Gauss-Newton matrix, its empirical Fisher and its KFAC's inverse with exact damping, on a perceptron."""
    curvlinops = pytest.importorskip("curvlinops")
    module = perceptron()
    arguments = (module, own, list(module.parameters()), [(X, target)])

    def dense(operator: Any) -> Tensor:
        return torch.stack([operator @ e for e in torch.eye(operator.shape[0], dtype=torch.float64)], 1)

    for kind, other in (("ggn", curvlinops.GGNLinearOperator), ("fisher-empirical", curvlinops.EFLinearOperator)):
        found = hk.hessian_operator(module, X, target, loss=loss, kind=kind)
        assert error(found.to_matrix(), dense(other(*arguments))) <= EXACT
    kfac = curvlinops.KFACLinearOperator(*arguments, fisher_type="type-2", separate_weight_and_bias=True)
    inverse = curvlinops.KFACInverseLinearOperator(kfac, damping=0.1, use_exact_damping=True)
    model = point(module, X, target, loss=loss).model("kfac")[0]
    assert isinstance(model, StructuredOperator)
    assert error(model.mapped(lambda v: 1 / (v + 0.1)).to_matrix(), dense(inverse)) <= EXACT


@pytest.mark.parametrize("make", [lambda: (perceptron(), X, Y), lambda: (language_model(), tokens(2, 3), tokens(2, 3, seed=5))])
def test_ekfac_is_the_diagonal_of_the_exact_block_in_kfacs_basis(make: Any) -> None:
    module, inputs, target = make()
    at = point(module, inputs, target)
    kfac, ekfac = at.factors.kfac(), at.factors.ekfac()
    for one, other in zip(kfac, ekfac, strict=True):
        U = one.from_basis(torch.eye(len(one.at), dtype=torch.float64))  # rows are basis vectors
        exact = at.matrix[one.at.unsqueeze(1), one.at]
        assert error(other.values, (U @ exact @ U.T).diagonal()) <= EXACT
        errors = [float((exact - U.T @ torch.diag(part.values) @ U).norm()) for part in (other, one)]
        assert errors[0] <= errors[1] + 1e-12 * float(exact.norm())  # George et al. 2018, for every layer


def test_kfac_is_exact_for_a_deep_linear_network_with_squared_error() -> None:
    """Bernacchia, Lengyel and Hennequin 2018: gradients at a layer do not depend on the sample."""
    module = randomised(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3))))
    x, target = draw(7, 4), draw(7, 4, seed=2)
    found = hk.approximations(module, x, target, against="ggn", of=["kfac", "ekfac", "tensor"])
    for name in ("kfac", "ekfac", "tensor"):
        assert float(found[name].measures.pairs.diagonal().max()) <= EXACT * float(found.pairs.max())
    nonlinear = randomised(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False)))
    off = hk.approximations(nonlinear, x, target, against="ggn", of=["kfac"])
    assert float(off["kfac"].measures.pairs[0, 0]) > 1e-3 * float(off.pairs[0, 0])  # and it is not exact in general


def test_blocks_leave_errors_only_off_the_blocks() -> None:
    module, ids, target = language_model(), tokens(2, 3), tokens(2, 3, seed=5)
    found = hk.approximations(module, ids, target, loss="cross_entropy", of=["tensor", "type", "layer"])
    truth = hk.hessian(module, ids, target, loss="cross_entropy")
    types = hk.block_types(module)
    groups: dict[str, dict[str, Any]] = {
        "tensor": {n: n for n in truth.names},
        "type": {n: types[n] for n in truth.names},
        "layer": {p.parameter: p.layer for p in types.parts},
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


def test_optimizers_of_sequences_and_squared_error() -> None:
    module = TiedBlock().double()
    at = point(module, TOKENS, LABELS)
    z = module(TOKENS)
    terms = F.cross_entropy(z.transpose(1, 2), LABELS, reduction="none").sum(1) * 3 / (LABELS != -100).sum()
    rows = torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in term_gradients(module, terms)])
    assert error(at.moments.rows * 3**0.5, rows) <= EXACT
    assert error(at.moments.mean, at.gradient) <= EXACT
    split = Point(module, [(TOKENS[:1], LABELS[:1]), (TOKENS[1:], LABELS[1:])], at.options, None, "dense", None, 60, 1, 5)
    assert error(split.moments.rows, at.moments.rows) <= EXACT
    assert error(split.gradient, at.gradient) <= EXACT
    assert split.loss == pytest.approx(at.loss, rel=1e-14)


def test_batches_change_nothing() -> None:
    module = language_model()
    ids, labels = tokens(4, 3), torch.tensor([[1, 0, 2], [-100, -100, 3], [5, 4, -100], [-100, -100, -100]])
    one = KroneckerFactors(*gather(module, ids, labels, "cross_entropy", None, kind="ggn"))
    pairs = list(zip(ids.split([1, 2, 1]), labels.split([1, 2, 1]), strict=True))
    many = KroneckerFactors(*gather(module, pairs, None, "cross_entropy", None, kind="ggn"))
    for a, b in zip(one.weights, many.weights, strict=True):
        assert (a.parameter, a.rows) == (b.parameter, b.rows)
        assert error(b.gradients, a.gradients) <= EXACT
        assert a.inputs is None or error(b.inputs, a.inputs) <= EXACT
    together, apart = (hk.approximations(module, *data, loss="cross_entropy", of=["adam"]) for data in ((ids, labels), (pairs,)))
    assert error(apart["adam"].operator.to_matrix(), together["adam"].operator.to_matrix()) <= EXACT


def test_drawn_labels_tend_to_the_exact_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = randomised(SequenceModel()), draw(2, 3, 3)
    labels = torch.tensor([[0, 2, -100], [1, -100, 2]])
    exact = point(module, x, labels).model("kfac")[0].to_matrix()
    monkeypatch.setattr("hessiankit.curvature.kronecker.PULLED", 0)
    errors = []
    for draws in (16, 4096):
        monkeypatch.setattr("hessiankit.curvature.kronecker.DRAWS", draws)
        at = point(module, x, labels)
        assert at.factors.is_drawn
        errors.append(float((at.model("kfac")[0].to_matrix() - exact).norm() / exact.norm()))
    assert errors[1] < 0.05  # about 1 / sqrt(4096) of each entry
    assert errors[1] < errors[0] / 4


def test_parameters_that_occur_twice_have_no_factors() -> None:
    module = TiedBlock().double()
    at = point(module, TOKENS, LABELS)
    assert "table.weight" not in {w.parameter for w in at.factors.weights}
    assert "block.attention.W_Q" in {w.parameter for w in at.factors.weights}
    rows = at.slices["table.weight"]
    for one in (at, point(module, TOKENS, LABELS, kind="hessian")):  # the diagonal of the GGN for both
        assert error(one.model("kfac")[0].to_matrix()[rows, rows], torch.diag(at.matrix.diagonal()[rows])) <= EXACT


def test_sampled_fishers_have_their_own_factors() -> None:
    module = perceptron()
    for kind in ("fisher-mc", "fisher-empirical"):
        at = point(module, X, Y, kind=kind, draws=3)
        blocks, exact = at.model("ekfac")[0].to_matrix(), at.matrix
        assert float(blocks.trace()) == pytest.approx(float(exact.trace()), rel=1e-12)
        kfac = at.model("kfac")[0].to_matrix()
        bias = at.slices["2.bias"]
        assert error(kfac[bias, bias], exact[bias, bias]) <= EXACT


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


def test_an_exact_approximation_by_products() -> None:
    module = randomised(nn.Linear(3, 4, bias=False))
    found = hk.approximations(module, X, T, of=["kfac"], method="products", products=24)["kfac"].measures
    assert max(found.frobenius.value, found.spectral.value + found.spectral.half_width) < 1e-12


def test_woodbury() -> None:
    U, _ = torch.linalg.qr(draw(6, 2))
    model = LowRankPlusDiagonal(U, torch.tensor([3.0, -0.5]).double(), draw(6, seed=2).abs())
    A = model.to_matrix() + 2 * torch.eye(6)
    b = draw(3, 6, seed=3)
    assert error(model.solve(b, 2.0), torch.linalg.solve(A, b.T).T) <= EXACT


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
    assert {p.name for p in tmp_path.iterdir()} == {"bars.png", "bars.csv", "pairs.png", "pairs.csv"}
    assert_one_clear_error(lambda: found["shampo"], "name='shampo' is not known")


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
        ({"against": "kfac"}, "against='kfac' is not known"),
        ({"method": "exact"}, "method='exact' is not known"),
        ({"damping": -1.0}, "damping=-1.0; pass a finite number"),
        ({"rank": 0}, "rank=0; pass 1 or more"),
        ({"minibatch": 0}, "minibatch=0; pass 1 or more"),
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: (perceptron(), X * float("nan"), T), "NaN"),
        (lambda: (perceptron(), X[:0], T[:0]), "no entries"),
        (lambda: (perceptron(), X.long(), T), "int64"),
        (lambda: (nn.Sequential(perceptron(), nn.Dropout()), X, T), "dropout"),
        (lambda: (perceptron(), X, T[:3]), "target has shape"),
    ],
)
def test_bad_data_are_one_clear_error(change: Any, said: str) -> None:
    module, inputs, target = change()
    assert_one_clear_error(lambda: hk.approximations(module, inputs, target), said)
