"""The exact diagonal: the same as the matrix's, and as reverse-over-reverse autograd's."""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

import pytest
import torch
from curvature_reference import Formula, cross_entropy, draw, mse, randomised, reverse_over_reverse
from engine_cases import ROWS_APART, ROWS_MEET
from meter import Meter
from torch import Tensor, nn

import hessiankit as hk
from hessiankit import hessian_diagonal
from hessiankit.engine import diagonal_sum, parts


def assert_diagonal(module: nn.Module, inputs: Any, target: Tensor | None = None, *, loss: Any = "mse", **options: Any) -> None:
    """Compare with the matrix and with autograd, and the Gauss-Newton part with the matrix's."""
    module = randomised(module).eval()
    if target is None:
        target = draw(*module(*(inputs if isinstance(inputs, tuple) else (inputs,))).shape, seed=7)
    found = hessian_diagonal(module, inputs, target, loss=loss, **options)
    matrix = hk.hessian(module, inputs, target, loss=loss, params=options.get("params"))
    names = tuple(found.values)
    assert names == matrix.names
    reference = reverse_over_reverse(module, inputs, target, {"mse": mse, "cross_entropy": cross_entropy}[loss], names)
    for expected in (matrix.matrix.diagonal(), reference.diagonal()):
        assert (found.flat - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert found.loss == pytest.approx(matrix.loss, rel=1e-13)
    gauss_newton = matrix.outer().diagonal()
    ggn = hessian_diagonal(module, inputs, target, loss=loss, kind="ggn", **options)
    assert (ggn.flat - gauss_newton).abs().max() <= 1e-12 * gauss_newton.abs().max()


BLOCKS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm, RMSNorm": {"placement": "pre", "norm": "rmsnorm"},
    "heads and biases": {"n_heads": 2, "bias": True, "attention_bias": True},
    "GELU": {"activation": "gelu"},
    "causal": {"causal": True},
}


@pytest.mark.parametrize(("name", "params"), zip(BLOCKS, cycle((None, ["*W_1", "*W_2"], ["*W_K", "*W_1"]))))
def test_blocks(name: str, params: list[str] | None) -> None:
    assert_diagonal(hk.TransformerBlock(4, 5, **BLOCKS[name]), draw(2, 3, 4), params=params)


class LanguageModel(nn.Module):
    """Tokens and positions, layers, and a head that is the embedding, or a part of it."""

    def __init__(self, *, layers: int = 1, tied: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 4), nn.Parameter(torch.zeros(3, 4))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 5, batch_first=True), layers)
        self.head = nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layers(self.tokens(tokens) + self.positions))


TOKENS = torch.tensor([[1, 5, 1], [0, 2, 6]])
LABELS = torch.tensor([[3, -100, 1], [0, 6, 6]])


@pytest.mark.parametrize(("tied", "batch_size"), [(True, None), (False, 1)])
def test_language_model_with_ignored_labels(tied: bool, batch_size: int | None) -> None:
    assert_diagonal(LanguageModel(tied=tied), TOKENS, LABELS, loss="cross_entropy", batch_size=batch_size)


X, T = draw(5, 3, 4), draw(5, 3, 4, seed=7)


def behind_a_layer() -> nn.Module:
    """Tokens that parameters move meet in the attention."""
    return randomised(nn.Sequential(nn.Linear(4, 4), hk.TransformerBlock(4, 5, d_k=2, bias=True)))


def assert_parameters(found: Any, expected: Tensor) -> None:
    """Compare with a diagonal, each parameter by its own largest entry."""
    start = 0
    for name, values in found.values.items():
        theirs = expected[start : start + values.numel()]
        assert (values.reshape(-1) - theirs).abs().max() <= 1e-12 * theirs.abs().max(), name
        start += values.numel()


def test_samples_that_depend_on_each_other_are_not_split() -> None:
    assert_diagonal(ROWS_MEET["samples meet"].module(), X, batch_size=2)


def test_rows_that_stay_apart_cost_no_products() -> None:
    """All but the weights by which a token reaches others, and those that are used twice."""
    module = behind_a_layer()
    meeting = ["0.weight", "0.bias", "1.attention.W_K", "1.attention.W_V"]
    free = [name for name, _ in module.named_parameters() if name not in meeting]
    assert hessian_diagonal(module, X, T, params=free).cost == 0
    assert hessian_diagonal(module, X, T).cost > 0
    halves = Formula(lambda s, x: torch.tanh(torch.tanh(x @ s.W[:4]) @ s.W[4:]), W=(8, 4))
    assert hessian_diagonal(halves, X, T).cost == 0
    overlapping = Formula(lambda s, x: torch.tanh(torch.tanh(x @ s.W[:4]) @ s.W[3:7]), W=(8, 4))
    assert hessian_diagonal(overlapping, X, T).cost > 0
    whole_and_part = Formula(lambda s, x: torch.tanh(torch.tanh(x @ s.W) @ s.W[:, :3]), W=(4, 4))
    assert hessian_diagonal(whole_and_part, X, T[..., :3]).cost > 0
    twice = ROWS_APART["a weight used twice"].module()
    assert [hessian_diagonal(twice, X, T, params=name).cost > 0 for name in "Wb"] == [True, False]


def test_samples_in_chunks() -> None:
    steps: list[int] = []
    module = behind_a_layer()
    found = hessian_diagonal(module, X, T, batch_size=2, progress=lambda done, of: steps.append(done))
    assert steps == [2, 4, 5]
    assert_parameters(found, reverse_over_reverse(module, X, T, mse).diagonal())


def test_what_it_says_of_itself() -> None:
    module = randomised(nn.Linear(4, 2))
    found = hessian_diagonal(module, draw(3, 4), draw(3, 2))
    assert found["bias"].tolist() == pytest.approx([1.0, 1.0])  # 2 / (rows * columns) for each of the rows
    assert set(found.traces) == {"weight", "bias"}
    assert found.trace == pytest.approx(float(found.flat.sum()))
    assert found["weight"].shape == (2, 4)
    assert "diagonal of the Hessian: 10 entries" in found.table()
    assert "<caption>" in found._repr_html_()
    said = found.to_dict()
    assert said["entries"]["bias"] == {"shape": [2], "trace": 2.0, "min": 1.0, "max": 1.0}


def test_memory_is_far_below_that_of_the_matrix() -> None:
    module = randomised(nn.Sequential(*(hk.TransformerBlock(16, 64, n_heads=2) for _ in range(2))))
    size = sum(p.numel() for p in module.parameters())
    with Meter() as meter:
        hessian_diagonal(module, draw(1, 4, 16), draw(1, 4, 16, seed=7))
    assert meter.peak < 0.05 * 8 * size**2


@pytest.mark.parametrize("name", ["a parameter as it is", "two parameters as they are"])
def test_parameters_taken_whole_some_unit_vectors_at_a_time(name: str, small_chunks: None) -> None:
    assert_diagonal(ROWS_APART[name].module(), draw(2, 3, 4))


def attending(length: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A language model whose exact diagonal takes the cube of the tokens."""
    model = hk.Transformer(11, 8, 16, 2, n_heads=2, seed=0).double()
    tokens = torch.randint(11, (2, length), generator=torch.Generator().manual_seed(0))
    return model, tokens, tokens.flip(1)


def test_what_takes_too_long_is_refused_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, t = attending(12)
    exact = hk.hessian_diagonal(model, x, t, loss="cross_entropy")
    assert 10 < exact.cost < 1000
    assert exact.estimate is None
    some = int(exact.cost)
    with monkeypatch.context() as patch:
        patch.setattr(diagonal_sum, "read_diagonal", None)  # is not reached
        with pytest.raises(
            hk.InputError, match=rf"about {exact.cost:,.0f} products .* max_products={some:,}; .*scalar_estimates"
        ):
            hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=some)
        estimated = hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=some, method="auto")
    assert estimated.is_estimate
    assert estimated.cost == exact.cost
    assert estimated.loss == pytest.approx(exact.loss, rel=1e-13)
    assert (estimated.flat - exact.flat).abs().max() > 1e-6
    for text in (repr(estimated), estimated.table(), estimated._repr_html_()):
        assert "ESTIMATES from 100 products, 95 % intervals" in text
        assert f"{estimated.estimate.trace}" in text
    assert abs(estimated.trace - exact.trace) <= 2 * estimated.estimate.trace.half_width
    inside = (estimated.flat - exact.flat).abs() <= estimated.estimate.half_widths
    assert inside.double().mean() > 0.9
    unlimited = (
        hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=m, method=a)
        for m, a in ((None, "exact"), (some + 1, "auto"))
    )
    assert all(torch.equal(found.flat, exact.flat) and "ESTIMATE" not in str(found) for found in unlimited)
    with pytest.raises(
        hk.InputError, match=r"hessian_diagonal: method='guess' is not known; choose one of exact, auto, estimate"
    ):
        hk.hessian_diagonal(model, x, t, loss="cross_entropy", method="guess")


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_an_estimate_is_of_the_same_matrix(kind: str) -> None:
    """Of the same batches with the same weights, of the same parameters."""
    model, x, t = attending(6)
    options: dict[str, Any] = {"loss": "cross_entropy", "kind": kind, "weights": [5, 1], "params": ["*W_O", "*norm*", "*W_1"]}
    batches = [(x, t), (t, x[:, [1, 0, 3, 2, 5, 4]])]
    exact = hk.hessian_diagonal(model, batches, **options)
    options["params"] = iter(options["params"])
    found = hk.hessian_diagonal(model, iter(batches), method="estimate", **options)  # both are read once
    assert found.estimate is not None
    assert math.isnan(found.cost)
    assert (list(found.values), found.kind) == (list(exact.values), kind)
    assert ((found.flat - exact.flat).abs() <= found.estimate.half_widths).double().mean() > 0.9
    assert abs(found.trace - exact.trace) <= 2 * found.estimate.trace.half_width < exact.flat.abs().sum()


def test_products_where_they_are_cheaper_than_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, t = attending(6)
    expected = hk.hessian(model, x, t, loss="cross_entropy").matrix.diagonal()
    monkeypatch.setattr(parts.BatchPart, "is_long", True)
    monkeypatch.setattr(diagonal_sum, "read_diagonal", None)  # is not reached
    found = hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=None)
    assert found.cost == sum(p.numel() for p in model.parameters())
    assert torch.equal(hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=int(found.cost)).flat, found.flat)
    assert (found.flat - expected).abs().max() <= 1e-12 * expected.abs().max()
