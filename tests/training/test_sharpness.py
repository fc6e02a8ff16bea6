"""The estimator of eq. (3)-(4): unbiased by enumeration of all labels, and biased where the paper's conditions are broken."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from sharpness_cases import (
    drawn_by,
    everything,
    expectation,
    expected_squares,
    plain_parts,
    relative,
    squares,
    tiny,
    tokens,
    vectors,
)  # fmt: skip
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.support.errors import InputError
from hessiankit.training.partition import model_parts
from hessiankit.training.sharpness import joined, replicates, report_of, sharpness


@pytest.fixture(scope="module")
def case():
    """A model, two sequences of two positions of which one is not counted, and the Fisher diagonal's trace by part."""
    model, x, y = tiny(), tokens(2, 2), tokens(2, 2, seed=2)
    y[1, 1] = -100
    return model, x, y, expected_squares(model, x, y != -100, model_parts(model))


@pytest.mark.parametrize(("micro_batch", "terms"), [(None, [3]), (1, [2, 1])])
def test_mean_over_all_label_vectors_is_the_fisher_diagonal(case, micro_batch, terms):
    """Also in micro-batches of unequal counts."""
    model, x, y, fisher = case
    sampler, probabilities, draws = everything(model(x), y != -100)
    assert draws == 27
    with drawn_by(sampler):
        found = replicates(model, x, y, draws=draws, micro_batch=micro_batch)
    assert found.terms.tolist() == terms
    assert relative(expectation(found, probabilities), fisher) < 1e-12
    assert float((found.values.std(1) / found.values.mean(1))[0].min()) > 0.1  # a draw alone is far from it


def test_labels_of_the_data(case):
    """Squared gradients of the mean loss, whose cross terms the data's labels leave."""
    model, x, y, fisher = case
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    found = expectation(replicates(model, x, y, kind="fisher-empirical"), torch.ones(1).double())
    assert relative(found, 3 * squares(loss, model, model_parts(model))) < 1e-12
    assert relative(found, fisher) > 0.1
    assert "EMPIRICAL Fisher" in sharpness(model, x, y, kind="fisher-empirical").table()


def test_squared_error_over_all_signs_is_the_gauss_newton_trace():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    x, parts = torch.randn(2, 2, generator=torch.Generator().manual_seed(1)).double(), plain_parts(model)
    signs = 2.0 * vectors(4, 2).double().reshape(16, 2, 2) - 1.0  # of the moments of a Gaussian that the mean of squares needs
    with drawn_by(lambda *_: signs):
        found = replicates(model, x, torch.zeros(2, 2).double(), loss="mse", draws=16, parts=parts)
    wanted = sum(squares(entry, model, parts) for entry in model(x).flatten()) * 2 / 4
    assert found.terms.tolist() == [4]
    assert relative(expectation(found, torch.full((16,), 1 / 16).double()), wanted) < 1e-12
    exact = sharpness(model, x, torch.zeros(2, 2).double(), loss="mse", parts=parts, exact=True)
    traces = torch.tensor([exact.tensors[part.name].value * part.size for part in parts], dtype=torch.float64)
    assert relative(traces, wanted) < 1e-10


@pytest.mark.parametrize("split", [1, 2, 3])
def test_a_sequence_has_its_labels_wherever_it_is(split):
    """The labels of the whole, told apart by the values of each sequence alone."""
    model, x, y, options = tiny(), tokens(5, 3), tokens(5, 3, seed=2), {"draws": 3, "micro_batch": 1, "histograms": True}
    alone = replicates(model, x, y, **options)
    rows = [range(i, min(i + split, 5)) for i in range(0, 5, split)]
    again = joined([replicates(model, x[list(own)], y[list(own)], numbers=own, **options) for own in rows])
    assert again.sequences == 5
    torch.testing.assert_close(again.values, alone.values, rtol=1e-12, atol=0)
    for name in ("rows", "entries", "seen"):
        torch.testing.assert_close(getattr(again, name), dict(getattr(alone, name)), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_per_sequence_is_larger_by_the_tokens_of_a_sequence(micro_batch):
    model, x, y = tiny(), tokens(4, 3), tokens(4, 3, seed=2)
    y[0, 1:] = -100
    y[3] = -100
    by_token, by_sequence = (sharpness(model, x, y, per=per, micro_batch=micro_batch, draws=3) for per in ("token", "sequence"))
    assert (by_token.terms, by_sequence.terms, by_sequence.sequences) == (7, 3, 3)
    exact = [sharpness(model, x, y, per=per, exact=True) for per in ("token", "sequence")]
    for kind in by_token.types:
        assert by_sequence.types[kind].value == pytest.approx(by_token.types[kind].value * 7 / 3, rel=1e-12)
        assert exact[1].types[kind].value == pytest.approx(exact[0].types[kind].value * 7 / 3, rel=1e-12)
    assert by_sequence.order == by_token.order


def test_same_seed_same_numbers_and_nothing_global_moves(case):
    model, x, y, _ = case
    state = torch.get_rng_state()
    first, again, other = (sharpness(model, x, y, seed=seed) for seed in (7, 7, 8))
    assert first.types == again.types
    assert first.types["QK"] != other.types["QK"]
    assert torch.equal(state, torch.get_rng_state())
    few, many = (replicates(model, x, y, draws=draws).values for draws in (2, 5))
    assert torch.equal(few, many[:, :2])  # more draws begin with the same ones


def test_exact_values_do_not_depend_on_labels_or_batches(case):
    model, x, y, wanted = case
    flipped = torch.where(y == -100, y, (y + 1) % 3)
    for labels, options in ((y, {"exact": True}), (flipped, {"kind": "ggn"}), (y, {"kind": "fisher", "micro_batch": 1})):
        found = sharpness(model, x, labels, **options)
        assert relative(found.replicates.values[0, 0], wanted) < 1e-10
        assert (found.kind, found.draws, found.types["QK"].standard_error) == (options.get("kind", "ggn"), 0, 0.0)
        with pytest.raises(InputError, match=r"draws= is for drawn labels, and .* draws none"):
            sharpness(model, x, labels, draws=3, **options)


def test_exact_hessian_is_the_second_derivative_with_the_data_labels(case):
    """S of the norms, and the scale-free one: sum over tensors of Tr H_t ||theta_t||^2 / # of t, over the entries of all."""
    model, x, y, _ = case
    found = sharpness(model, x, y, kind="hessian")
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    norms = {part.parameter: model.get_parameter(part.parameter) for part in model_parts(model) if part.type == "Norm"}
    assert len({p.square().mean().item() for p in norms.values()}) > 1
    traces = {}
    for name, p in norms.items():
        (g,) = torch.autograd.grad(loss, p, create_graph=True)
        traces[name] = sum(float(torch.autograd.grad(g[i], p, retain_graph=True)[0][i]) for i in range(len(g)))
        assert found.tensors[name].value == pytest.approx(traces[name] / p.numel(), rel=1e-10)
    total = sum(traces[name] * float(p.detach().square().mean()) for name, p in norms.items())
    assert found.scale_free["Norm"].value == pytest.approx(total / sum(p.numel() for p in norms.values()), rel=1e-10)


def test_report_is_a_function_of_the_replicates():
    model, x, y = tiny(), tokens(4, 3), tokens(4, 3, seed=2)
    found = replicates(model, x, y, draws=4)
    report = report_of(found, confidence=0.5)
    parts = found.parts
    for kind in report.types:
        own = [k for k, part in enumerate(parts) if part.type == kind]
        size = sum(parts[k].size for k in own)
        assert report.types[kind].value == pytest.approx(float(found.values[0, :, own].sum(1).mean()) / size, rel=1e-12)
        each = [float(found.values[0, :, k].mean()) / parts[k].size for k in own]
        assert report.mean_of_tensors[kind].value == pytest.approx(sum(each) / len(each), rel=1e-12)
    whole = sum(one.value * one.entries for one in report.types.values())
    for groups in (report.layers, report.type_layers, report.tensors):
        assert sum(one.value * one.entries for one in groups.values()) == pytest.approx(whole, rel=1e-12)
    narrow, wide = (report_of(found, confidence=c).types["QK"] for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value < narrow.high < wide.high


def test_histograms_hold_every_entry_and_agree_with_the_sum():
    model, x, y = tiny(vocab=7), tokens(2, 2, vocab=3), tokens(2, 2, seed=2)
    found = replicates(model, x, y, draws=3, histograms=True)
    for name, p in model.named_parameters():
        total = sum(float(found.values[0, :, k].sum()) for k, part in enumerate(found.parts) if part.parameter == name)
        assert float(found.entries[name].sum()) == pytest.approx(total * int(found.terms), rel=1e-12)
        assert found.entries[name].shape == p.shape
    report = report_of(found)
    for kind, one in report.histograms.items():
        assert one.entries == report.types[kind].entries == sum(one.counts) + one.zeros
    assert "zeros" in report.table()
    assert report_of(replicates(model, x, y, draws=3)).types == report.types


def test_quotients_and_order():
    model, x, y = tiny(), tokens(4, 3), tokens(4, 3, seed=2)
    report = sharpness(model, x, y, draws=16)
    quotient = report.ratio("QK")
    assert quotient.value == pytest.approx(report.types["Norm"].value / report.types["QK"].value)
    assert quotient.low < quotient.value < quotient.high
    assert report.ratio("QK", base="QK").standard_error == 0
    for a, b in itertools.pairwise(report.order):
        mark = "<" if report.ratio(a, base=b).low > 1 else "~"
        assert f"{a} {mark} {b}" in report.ordering
    with pytest.raises(InputError, match="no 'Head' among the measured types; pass one of Emb, QK, VO, FFN, Norm"):
        report.ratio("Head")


def test_replicates_that_do_not_belong_together():
    model, x, y = tiny(), tokens(2, 3), tokens(2, 3, seed=2)
    first = replicates(model, x, y, draws=2)
    with pytest.raises(InputError, match=r"joined\(\) was given nothing"):
        joined([])
    with pytest.raises(InputError, match="Replicates whose seed differ; repeat the measurements alike"):
        joined([first, replicates(model, x, y, draws=2, seed=1)])
    with torch.no_grad():
        model.final_norm.weight.mul_(2)
    with pytest.raises(InputError, match="of different parameters; measure all of them at one point"):
        joined([first, replicates(model, x, y, draws=2)])


def test_too_few_draws_or_likely_labels_are_said():
    x, y = tokens(2, 3), tokens(2, 3, seed=2)
    assert "2 draws are too few for sure intervals" in sharpness(tiny(), x, y, draws=2).table()
    assert "sure intervals" not in sharpness(tiny(), x, y, draws=8).table()
    confident = tiny()
    with torch.no_grad():
        confident.final_norm.weight.mul_(100)
        p = torch.softmax(confident(x).double(), -1).amax(-1)
    y[0, 1] = -100
    report, unlikely = sharpness(confident, x, y, draws=8, micro_batch=1), float((1 - p)[y != -100].sum())
    assert f"{8 * unlikely:.2g} of all labels drawn are expected not to be the likeliest ones" in report.table()
    single = sharpness(tiny(), x, y, draws=1)
    row = next(line.split() for line in single.table().splitlines() if line.startswith("QK "))
    assert row[3:5] == ["n.a.", "n.a."]
    assert "n.a.: errors come from the differences between draws" in single.table()
    assert str(single.types["QK"]).endswith("+- n.a. (95%: n.a.)")


def test_to_dict_is_json_and_prints(capsys):
    model, x, y = tiny(layers=2), tokens(2, 3), tokens(2, 3, seed=2)
    report = sharpness(model, x, y, draws=1)  # with NaN for errors
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert found["types"]["QK"]["standard_error"] is None
    assert found["layers"].keys() == {"outside", "0", "1"}
    assert {(row["type"], row["layer"]) for row in found["type_layers"]} >= {("QK", 0), ("Norm", None)}
    text = sharpness(model, x, y, draws=2, micro_batch=1).table()
    assert "mean over 6 tokens of 2 sequences, 2 draws, 2 micro-batches" in text
    assert "from flat to sharp: " in text


@pytest.mark.parametrize("by_name", [False, True])
def test_sharpness_in_the_metric_of_an_optimizer(by_name: bool) -> None:
    torch.manual_seed(0)
    model = hk.Transformer(5, 4, 4, 1, n_heads=2, placement="pre", max_len=4).double()
    tokens, labels = torch.randint(5, (3, 4)), torch.randint(5, (3, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    P = {n: (optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**5)).sqrt() + 1e-8 for n, p in model.named_parameters()}
    P = {n: x * (1 - 0.9**5) for n, x in P.items()}  # the step divides by it, the first moment being corrected
    fisher = hk.hessian_diagonal(model, tokens, labels, loss="cross_entropy", kind="ggn")
    given = {n: x.detach() for n, x in P.items()} if by_name else optimizer
    exact = sharpness(model, tokens, labels, kind="ggn", preconditioner=given)
    drawn = sharpness(model, tokens, labels, draws=64, confidence=0.999, preconditioner=given)
    for name, found in exact.tensors.items():
        assert found.value == pytest.approx(float((fisher[name] / P[name]).mean()), rel=1e-10)
        assert drawn.tensors[name].low <= found.value <= drawn.tensors[name].high
    assert f"in the metric of {'diagonal' if by_name else 'AdamW'}" in str(exact)
    with pytest.raises(InputError, match="preconditioner is no diagonal"):
        sharpness(model, tokens, labels, preconditioner=torch.eye(len(fisher.flat), dtype=torch.float64))


class Unnamed(nn.Module):
    """Attention whose names and order say nothing: the fused weight makes keys, values and queries."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b, self.c = nn.Embedding(7, 4), nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 7)

    def forward(self, t: Tensor) -> Tensor:
        x = self.e(t)
        k, v, q = self.a(x).split(4, -1)
        return self.c(x + self.b(torch.softmax(q @ k.mT / 2, -1) @ v))  # type: ignore[no-any-return]


def test_types_by_the_flow_of_the_data(tmp_path: Path) -> None:
    """The parts of a model whose names say nothing are those that the flow of the first batch shows."""
    model, data = Unnamed().double(), (tokens(3, 4, vocab=7), tokens(3, 4, vocab=7, seed=2))
    parts = hk.block_types(model, inputs=data[0]).parts
    for options in ({}, {"exact": True}):
        found, expected = (hk.sharpness(model, data, **options, **more) for more in ({}, {"parts": parts}))
        assert found.replicates.parts == parts
        assert torch.equal(found.replicates.values, expected.replicates.values)
    assert hk.Monitor(model, data, tmp_path / "run.jsonl").parts == parts
