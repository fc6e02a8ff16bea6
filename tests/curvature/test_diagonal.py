"""The exact diagonal, and Frobenius norms of blocks, without the matrix: those of reverse-over-reverse autograd's Hessian."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, gauss_newton, mse, randomised, reverse_over_reverse
from engine_cases import ROWS_APART, ROWS_MEET
from meter import Meter
from readings import READINGS, assert_readings
from torch import Tensor, nn

import hessiankit as hk
from hessiankit import frobenius_norms, hessian_diagonal
from hessiankit.curvature import evaluation, frobenius
from hessiankit.curvature.frobenius import FrobeniusNorms
from hessiankit.engine import diagonal_sum, parts, sweep
from hessiankit.support import memory
from hessiankit.training.by_partition.partitions import heads

DIAGONAL = {"hessian_diagonal": READINGS["hessian_diagonal"]}


def assert_diagonal(module: nn.Module, x: Tensor, **options: Any) -> None:
    """Compare that of the Hessian, and of its Gauss-Newton part, with autograd."""
    target = draw(*module(x).shape, seed=7)
    for kind, derivative in (("hessian", reverse_over_reverse), ("ggn", gauss_newton)):
        expected = derivative(module, x, target, mse, options.get("params"))
        assert_readings(expected, module, x, target, readings=DIAGONAL, kind=kind, floor=1e-12, **options)


BLOCKS: dict[str, dict[str, Any]] = {
    "paper": {},
    "heads and biases": {"n_heads": 2, "bias": True, "attention_bias": True},
    "causal": {"causal": True},
}


@pytest.mark.parametrize(
    ("name", "params"),
    zip(BLOCKS, (None, ["feedforward.W_1", "feedforward.W_2"], ["attention.W_K", "feedforward.W_1"]), strict=True),
)
def test_blocks(name: str, params: list[str] | None) -> None:
    assert_diagonal(randomised(hk.TransformerBlock(4, 5, **BLOCKS[name])), draw(2, 3, 4), params=params)


X, T = draw(5, 3, 4), draw(5, 3, 4, seed=7)


def test_an_entry_in_two_columns_of_a_row() -> None:
    """Its diagonal has the curvature between the two as well."""
    where = torch.tensor([[0, 0, 1], [1, 2, 3], [3, 2, 0]])
    assert_diagonal(Formula(lambda m, x: torch.tanh(torch.tanh(x + m.p[where]) @ m.V), p=(4,), V=(3, 2)), draw(2, 3, 3))


def behind_a_layer() -> nn.Module:
    """Tokens that parameters move meet in the attention."""
    return randomised(nn.Sequential(nn.Linear(4, 4), hk.TransformerBlock(4, 5, d_k=2, bias=True)))


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
    expected = reverse_over_reverse(module, X, T, mse)
    assert_readings(expected, module, X, T, readings=DIAGONAL, batch_size=2, progress=lambda done, of: steps.append(done))
    assert steps == [2, 4, 5]


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
    options: dict[str, Any] = {"loss": "cross_entropy"}
    exact = hk.hessian_diagonal(model, x, t, **options)
    assert 10 < exact.cost < 1000
    assert exact.estimate is None
    some = int(exact.cost)
    with monkeypatch.context() as patch:
        patch.setattr(diagonal_sum, "read_diagonal", None)  # is not reached
        with pytest.raises(
            hk.InputError, match=rf"about {exact.cost:,.0f} products .* max_products={some:,}; .*scalar_estimates"
        ):
            hk.hessian_diagonal(model, x, t, max_products=some, **options)
        estimated = hk.hessian_diagonal(model, x, t, max_products=some, method="auto", **options)
    assert estimated.is_estimate
    assert estimated.cost == exact.cost
    assert estimated.loss == pytest.approx(exact.loss, rel=1e-13)
    for text in (repr(estimated), estimated.table(), estimated._repr_html_()):
        assert "ESTIMATES from 100 products, 95 % intervals" in text
        assert f"{estimated.estimate.trace}" in text
    for limit, method in ((None, "exact"), (some + 1, "auto")):
        found = hk.hessian_diagonal(model, x, t, max_products=limit, method=method, **options)
        assert torch.equal(found.flat, exact.flat)
        assert "ESTIMATE" not in str(found)
    with pytest.raises(hk.InputError, match=r"method='guess' is not known; choose one of exact, auto, estimate"):
        hk.hessian_diagonal(model, x, t, method="guess", **options)


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
    options["params"] = list(exact.values)
    operator = hk.hessian_operator(model, batches, **options)
    for seed in (0, 3):
        own = hk.hessian_diagonal(model, batches, method="estimate", seed=seed, **options)
        known = hk.scalar_estimates(operator, seed=seed)
        assert torch.allclose(own.flat, known.diagonal, rtol=0, atol=1e-9 * float(exact.flat.abs().max()))
        assert torch.equal(own.flat, found.flat) == (seed == 0)


def test_products_where_they_are_cheaper_than_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, t = attending(6)
    expected = hk.hessian(model, x, t, loss="cross_entropy").matrix.diagonal()
    monkeypatch.setattr(parts.BatchPart, "is_long", True)
    monkeypatch.setattr(diagonal_sum, "read_diagonal", None)  # is not reached
    found = hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=None)
    assert found.cost == sum(p.numel() for p in model.parameters())
    assert torch.equal(hk.hessian_diagonal(model, x, t, loss="cross_entropy", max_products=int(found.cost)).flat, found.flat)
    assert (found.flat - expected).abs().max() <= 1e-12 * expected.abs().max()


ROWS, TARGET = draw(3, 4, 6), draw(3, 4, 6, seed=2)


@pytest.fixture(autouse=True)
def small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several panels, some of them a part of the rows of one parameter."""
    monkeypatch.setattr(frobenius, "PANEL", 30_000)
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 0)


def six(**options: Any) -> nn.Module:
    return randomised(hk.TransformerBlock(6, 7, d_k=3, **options))


def assert_norms(found: FrobeniusNorms, expected: Tensor) -> None:
    """Compare every six, and all of them, with a dense matrix of the same parameters."""
    start, slices = 0, {}
    for name, shape in found.shapes.items():
        slices[name] = slice(start, start := start + torch.Size(shape).numel())
    assert expected.shape == (start, start)
    largest = float(expected.norm())
    for i, rows in slices.items():
        for j, columns in slices.items():
            norm = float(expected[rows, columns].norm())
            assert found.block(i, j) == pytest.approx(norm, rel=1e-12, abs=1e-14 * largest), (i, j)
        assert found.rows(i) == pytest.approx(float(expected[rows].norm()), rel=1e-12)
    assert found.whole == pytest.approx(largest, rel=1e-12)
    assert float(found.matrix.norm()) == pytest.approx(largest, rel=1e-12)


NORMED: dict[str, dict[str, Any]] = {"paper": {}, "pre-norm with biases": {"placement": "pre", "bias": True, "n_heads": 3}}


@pytest.mark.parametrize("name", NORMED)
def test_norms_of_blocks(name: str) -> None:
    module, steps = six(**NORMED[name]), []
    found = frobenius_norms(module, ROWS, TARGET, progress=lambda done, total: steps.append((done, total)))
    assert_norms(found, reverse_over_reverse(module, ROWS, TARGET, mse))
    assert found.loss == pytest.approx(float(mse(module(ROWS), TARGET).detach()), rel=1e-13)
    panels = steps[0][1] // 3
    assert panels > 5
    assert steps == [(3 * n, 3 * panels) for n in range(1, 1 + panels)]


def test_what_norms_say_of_themselves() -> None:
    module = randomised(nn.Linear(4, 2))
    found = frobenius_norms(module, draw(3, 4), draw(3, 2))
    assert found.block("bias", "bias") == pytest.approx(2**0.5)  # 2 / (rows * columns) for each of three rows
    assert found.block("weight", "bias") == found.block("bias", "weight")
    assert "Frobenius norm of the Hessian, 10 x 10:" in found.table()
    assert "Gauss-Newton part" in frobenius_norms(module, draw(3, 4), draw(3, 2), kind="ggn").table()
    assert "<caption>Frobenius norm" in found._repr_html_()
    said = found.to_dict()
    assert [(b["row"], b["column"]) for b in said["blocks"]] == [("weight", "weight"), ("weight", "bias"), ("bias", "bias")]
    assert (said["frobenius_norm"], said["parameters"]) == (found.whole, 10)
    with pytest.raises(hk.InputError, match=r"FrobeniusNorms.block: .*'wieght'.*weight"):
        found.block("wieght", "bias")
    with pytest.raises(hk.InputError, match=r"'weight\[0\]' is a part of a parameter, .* pass 'weight'"):
        found.block("bias", "weight[0]")


def test_memory_is_that_of_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "WORK_SPACE", 2**16)
    module, x = randomised(hk.TransformerBlock(12, 48)), draw(1, 12)
    size = sum(p.numel() for p in module.parameters())
    with Meter() as meter:
        frobenius_norms(module, x, x.flip(1), panel_bytes=2**21)
    assert meter.peak < 8 * size**2 / 2  # W_1 with itself takes an eighth of the matrix, and its derivatives as much


@pytest.mark.parametrize(
    ("options", "said"), [({"batch_size": 0}, "batch_size=0 leaves"), ({"panel_bytes": 0}, "panel_bytes=0 holds")]
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(hk.InputError, match=f"frobenius_norms: {said} no "):
        frobenius_norms(nn.Linear(4, 2), torch.zeros(3, 4), torch.zeros(3, 2), **options)


def test_what_does_not_fit_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**16)
    monkeypatch.setattr(evaluation, "SymmetricStorage", None)
    with pytest.raises(hk.OutOfMemoryError, match=r"frobenius_norms: the derivatives of one chunk of samples, "):
        frobenius_norms(six(), ROWS, TARGET)


def test_norms_of_float32_are_added_in_float64() -> None:
    module = nn.Linear(700, 1, bias=False)
    norms = frobenius_norms(module, torch.full((1, 700), 1 / 3), torch.zeros(1, 1), panel_bytes=2**25)
    assert norms.whole == pytest.approx(2 * 700 / 9, rel=1e-7)


@pytest.mark.parametrize(("kind", "batch_size"), [("hessian", None), ("ggn", 1)])
def test_at_once_where_the_matrix_fits(kind: str, batch_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batches, steps = six(), [(ROWS, TARGET), (ROWS[:2], TARGET[:2])], []
    panels = frobenius_norms(module, batches, kind=kind, weights=[3, 2])
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 2**30)
    monkeypatch.setattr(frobenius, "_by_panels", None)  # is not reached
    options: dict[str, Any] = {"kind": kind, "weights": [3, 2], "batch_size": batch_size}
    found = frobenius_norms(module, batches, progress=lambda *done: steps.append(done), **options)
    dense = hk.hessian(module, batches, weights=[3, 2])
    assert_norms(found, dense.matrix if kind == "hessian" else dense.outer())
    assert list(found.blocks) == list(panels.blocks)
    assert (found.shapes, found.kind, found.fallbacks) == (panels.shapes, panels.kind, panels.fallbacks)
    assert found.loss == pytest.approx(panels.loss, rel=1e-13)
    assert steps[-1] == (5, 5)


def test_by_panels_where_the_derivatives_do_not_fit_beside_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    module = six()
    expected = hk.hessian(module, ROWS, TARGET).matrix
    monkeypatch.setattr(frobenius, "available_memory", lambda device: 2**30)
    monkeypatch.setattr(evaluation, "available_memory", lambda device: expected.nbytes + 1000)
    panels, by_panels = list[Any](), frobenius._by_panels
    monkeypatch.setattr(frobenius, "_by_panels", lambda *a, **k: panels.append(a) or by_panels(*a, **k))
    monkeypatch.setattr(frobenius, "PANEL", 2**28)
    found = frobenius_norms(module, ROWS, TARGET)
    assert len(panels) == 1
    assert_norms(found, expected)


class Tied(nn.Module):
    """A language model of one block with heads, biases and a tied head: no group is one range of entries."""

    def __init__(self) -> None:
        super().__init__()
        self.model = hk.Transformer(5, 4, 6, 1, n_heads=2, placement="pre", activation="gelu", causal=True, max_len=3, bias=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)


TOKENS = torch.tensor([[0, 1, 4], [2, 2, 1]])
WORDS = torch.tensor([[1, 4, 3], [2, 1, 0]])


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def matrix_of(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The Hessian by reverse over reverse, and the number of every entry in it, in the shape of its parameter."""
    numbers, start = {}, 0
    for name, p in module.named_parameters():
        numbers[name] = torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel()
    return reverse_over_reverse(module, TOKENS, WORDS, cross_entropy), numbers


HEAD_1 = [f"model.blocks.0.attention.W_{role}" for role in "QKV"]
GROUPS: dict[str, tuple[Any, str, Any, int]] = {
    "neuron": ("neuron", "model.blocks.0.feedforward.W_1[2]", lambda n: [n[FFN + "W_1"][:, 2], n[FFN + "b_1"][2:3]], 46),
    "row of a table": ("neuron", "model.embedding.W_E[4]", lambda n: [n["model.embedding.W_E"][4]], 46),
    "head": ("head", "model.blocks.0.attention.head_1", lambda n: [n[name][:, 2:4] for name in HEAD_1], 15),
    "module": ("module", "model.blocks.0.norm_2", lambda n: [n["model.blocks.0.norm_2." + x] for x in ("weight", "bias")], 6),
    "layer": ("layer", "layer 0", lambda n: [x for name, x in n.items() if "blocks.0." in name], 2),
    "type": ("type", "QK", lambda n: [n["model.blocks.0.attention.W_" + x] for x in "QK"], 5),
    "labels": ({"a": ["*.W_O[0]", "*.P"]}, "a", lambda n: [n[ATTENTION + "W_O"][0], n["model.embedding.P"]], 1),
}
FFN, ATTENTION = "model.blocks.0.feedforward.", "model.blocks.0.attention."


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("panel_bytes", [None, 1, 4000], ids=["at once", "a row at a time", "by panels and products"])
def test_norms_by_partition(name: str, panel_bytes: int | None) -> None:
    by, group, members, count = GROUPS[name]
    module = randomised(Tied())
    expected, numbers = matrix_of(module)
    at = torch.cat([x.reshape(-1) for x in members(numbers)])
    s = 0.1 + draw(len(expected)).square()
    norms = frobenius_norms(module, TOKENS, WORDS, loss="cross_entropy", by=by, panel_bytes=panel_bytes, scale=s)
    assert (len(norms.groups), norms.groups[group]) == (count, len(at))
    assert norms.scaled is not None
    for found, matrix in ((norms, expected), (norms.scaled, s[:, None] * expected * s)):
        assert found.block(group, group) == pytest.approx(float(matrix[at][:, at].norm()), rel=1e-11)
        assert found.whole == pytest.approx(float(matrix.norm()), rel=1e-12)
        if sum(found.groups.values()) == len(matrix):
            assert found.rows(group) == pytest.approx(float(matrix[at].norm()), rel=1e-11)
            assert float(found.matrix.norm()) == pytest.approx(found.whole, rel=1e-12)
    assert f"in the metric of scale: {100 * norms.scaled.diagonal_share:.3g} % of the squares" in norms.table()


def test_share_of_the_diagonal_blocks_and_products_with_them() -> None:
    module = randomised(Tied())
    expected, _ = matrix_of(module)
    found = frobenius_norms(module, TOKENS, WORDS, loss="cross_entropy", by="head")
    groups = heads(module, [name for name, _ in module.named_parameters()])
    operator = hk.hessian_operator(module, TOKENS, WORDS, loss="cross_entropy", block_size=4)
    D = operator.block_diagonal(groups)
    v = draw(len(expected), 3)
    products = torch.zeros_like(v)
    for at in D.groups.values():
        products[at] = expected[at][:, at] @ v[at]
    assert float((D @ v - products).abs().max()) <= 1e-10 * float(products.abs().max())
    mask = torch.zeros_like(expected)
    for at in D.groups.values():
        mask[at.unsqueeze(1), at] = 1.0
    share = float((mask * expected).square().sum() / expected.square().sum())
    assert 0.1 < share < 0.9
    assert found.diagonal_share == pytest.approx(share, rel=1e-11)
    assert f"diagonal blocks: {100 * share:.3g} % of the squares, {len(groups)} groups" in found.table()


def test_interrupted_norms_resume(tmp_path: Path) -> None:
    module, path, steps = six(), tmp_path / "sums.npz", list[int]()
    s = 1 + torch.rand(sum(p.numel() for p in module.parameters()), generator=torch.Generator().manual_seed(0))
    expected = frobenius_norms(module, ROWS, TARGET, by="neuron", panel_bytes=400, scale=s)

    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"by": "neuron", "panel_bytes": 400, "resume": path, "scale": s}
    with pytest.raises(KeyboardInterrupt):
        frobenius_norms(module, ROWS, TARGET, progress=interrupt, **options)
    found = frobenius_norms(module, ROWS, TARGET, progress=lambda done, total: steps.append(done), **options)
    assert min(steps) > 3
    assert torch.equal(found.matrix, expected.matrix)
    assert torch.equal(found.scaled.matrix, expected.scaled.matrix)  # type: ignore[union-attr]
    assert (found.whole, found.loss) == (expected.whole, expected.loss)
    calls = [
        (lambda: frobenius_norms(module, 2 * ROWS, TARGET, **options), "holds the sums of another matrix"),
        (lambda: frobenius_norms(module, ROWS, TARGET, **{**options, "by": "head"}), "holds the sums of another matrix"),
        (lambda: frobenius_norms(module, ROWS, TARGET, **{**options, "scale": 2 * s}), "holds the sums of another matrix"),
        (lambda: frobenius_norms(module, ROWS, TARGET, scale=s[1:]), r"scale has shape .*; expected the diagonal of S, \("),
        (lambda: frobenius_norms(module, ROWS, TARGET, scale=s - s[0]), "scale has an entry that is not a positive number"),
        (lambda: frobenius_norms(six(bias=True), ROWS, TARGET, **{**options, "scale": None}), "holds the sums of another matrix"),
        (lambda: frobenius_norms(module, ROWS, TARGET, resume=tmp_path / "sums.pt"), r"pass a path that ends in '\.npz'"),
        (lambda: frobenius_norms(module, ROWS, TARGET, by="class"), "by='class' is not known; choose one of parameter, neuron"),
        (lambda: frobenius_norms(module, ROWS, TARGET, by={"a": "*.W_1", "b": "*.W_1[0]"}), "groups 'a' and 'b' share entry"),
        (lambda: expected.block("neuron", "neuron"), "FrobeniusNorms.block: name='neuron' is not known"),
    ]
    for call, message in calls:
        with pytest.raises(hk.InputError, match=message):
            call()
    path.write_bytes(b"PK broken")
    with pytest.raises(hk.InputError, match="holds no sums of panels"):
        frobenius_norms(module, ROWS, TARGET, **options)


def test_rows_by_products_of_what_is_not_finite() -> None:
    module = Formula(lambda m, x: (x @ m.W).abs().sqrt() + m.b, W=(3, 2), b=(2,))
    with torch.no_grad():
        module.W[:, 1] = 0.0
    for options in ({}, {"panel_bytes": 1}):
        with pytest.raises(hk.InputError, match=r"frobenius_norms: .*(NaN or infinite|not finite)"):
            frobenius_norms(module, draw(2, 3), draw(2, 2), **options)
