"""Kronecker factors against sums over labels, against exact diagonals, and by what they may not depend on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from approximation_cases import AGREED, X, Y, perceptron, point
from curvature_reference import Formula, draw, randomised
from operator_cases import LABELS, TOKENS, TiedBlock, error, tokens
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature import kronecker
from hessiankit.curvature.approximating.approximations import APPROXIMATIONS
from hessiankit.curvature.operator import hessian_operator


def expected_kfac(module: nn.Module, weight: nn.Linear, inputs: Tensor, target: Tensor) -> Tensor:
    """A (x) G of a linear layer by hooks and the sum over all labels of every position, as the layer stores its weight."""
    seen: dict[str, Tensor] = {}
    handle = weight.register_forward_hook(lambda _, x, z: seen.update(x=x[0], z=z))
    logits = module(inputs)
    handle.remove()
    flat, kept = logits.flatten(0, -2), (target != -100).reshape(-1)
    p, G = torch.softmax(flat.detach(), -1), torch.zeros(())
    reached = torch.zeros(seen["z"].shape[:-1].numel(), dtype=torch.bool)
    for row, label in itertools.product(kept.nonzero()[:, 0].tolist(), range(flat.shape[1])):
        (g,) = torch.autograd.grad(F.cross_entropy(flat[row : row + 1], torch.tensor([label])), seen["z"], retain_graph=True)
        rows = g.reshape(-1, g.shape[-1])
        G, reached = G + p[row, label] * rows.T @ rows / kept.sum(), reached | (rows != 0).any(-1)
    x = seen["x"].detach().flatten(0, -2)[reached]
    return torch.kron(G, x.T @ x / len(x))


def sequence_model() -> nn.Module:
    """Linear layers around a mean over earlier tokens, so that a row moves the outputs of later ones."""
    return Formula(lambda m, x: m.last(torch.tanh(m.first(x)).cumsum(1) / 2), first=nn.Linear(3, 4), last=nn.Linear(4, 3))


def test_kfac_is_the_expectation_over_labels_of_every_position() -> None:
    module, x = sequence_model(), draw(2, 3, 3)
    labels = torch.tensor([[0, 2, -100], [1, -100, 2]])
    at = point(module, x, labels)
    blocks = at.model("kfac")[0].to_matrix()
    for name, layer in (("first", module.first), ("last", module.last)):
        rows = at.slices[f"{name}.weight"]
        assert error(blocks[rows, rows], expected_kfac(module, layer, x, labels)) <= AGREED
    for rows in at.slices.values():
        blocks[rows, rows] = 0
    assert float(blocks.abs().max()) == 0


def dead_unit(x: Tensor, first: nn.Linear) -> Tensor:
    """Data whose first token is dead in every unit of a ReLU behind a layer."""
    x[0, 0] = torch.linalg.solve(first.weight.detach(), -first.bias.detach() - 1)
    return x


READS: dict[
    str, Any
] = {  # how logits read hidden units (B, L, 4): of the same token, the earlier ones, those that are no padding
    "the token": lambda m, h, pad: F.relu(h),
    "earlier tokens": lambda m, h, pad: F.relu(h).cumsum(1),
    "causal attention": lambda m, h, pad: F.scaled_dot_product_attention(h, h, h, is_causal=True),
    "attention with a mask": lambda m, h, pad: torch.softmax((h @ h.mT).masked_fill(pad.unsqueeze(1), -torch.inf), -1) @ h,
    "a mean with a mask": lambda m, h, pad: h + (h * ~pad.unsqueeze(-1)).sum(1, keepdim=True),
    "a block": lambda m, h, pad: m.block(h, pad),
}


def reader(name: str) -> Formula:
    first, block = nn.Linear(4, 4), hk.TransformerBlock(4, 5, 2, placement="pre", bias=True)
    parts = {"block": block} if name == "a block" else {}
    return Formula(lambda m, x, pad: m.last(READS[name](m, m.first(x), pad)), first=first, last=nn.Linear(4, 3), **parts)


@pytest.mark.parametrize("against", ["ggn", "fisher-empirical"])
@pytest.mark.parametrize("name", READS)
def test_padding_without_labels_leaves_every_approximation_where_it_was(
    name: str, against: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kronecker, "PULLED", 9)  # three classes of three positions; padding draws no labels in their place
    module, labels = reader(name), torch.tensor([[0, 2, -100], [-100, 1, 2]])
    x, pad = dead_unit(draw(2, 3, 4), module.first), torch.zeros(2, 3, dtype=torch.bool)
    options: dict[str, Any] = {"loss": "cross_entropy", "against": against, "damping": 0.01}
    plain = hk.approximations(module, (x, pad), labels, **options)
    assert set(plain.found) >= set(APPROXIMATIONS)
    for size in (1.0, 1e3):
        longer = torch.cat([x, size * draw(2, 2, 4, seed=7)], 1), torch.cat([pad, ~pad[:, :2]], 1)
        ignored = torch.cat([labels, torch.full((2, 2), -100)], 1)
        batches = [((longer[0][k : k + 1], longer[1][k : k + 1]), ignored[k : k + 1]) for k in (0, 1)]
        for found in (hk.approximations(module, longer, ignored, **options), hk.approximations(module, batches, **options)):
            for kind, row in plain.found.items():
                one, other = (r.operator.to_matrix() for r in (row, found[kind]))
                if kind == "shampoo":  # roots of factors, which turn a rounding of 1e-16 into 1e-8
                    one, other = one @ one, other @ other
                assert float((one - other).abs().max()) <= AGREED * float(one.abs().max()), (kind, size)


def test_a_row_counts_by_what_reads_it_and_not_by_its_value() -> None:
    """A labelled token that is dead counts, as do all that a maximum compares, a query with one key, and a token of two readers.

    A token that no label or index reads does not.
    """
    labels = torch.tensor([[0, 2, -100], [1, -100, 2]])
    module = reader("the token")
    x, none = dead_unit(draw(2, 3, 4), module.first), torch.zeros(2, 3, dtype=torch.bool)
    largest = Formula(lambda m, x: m.last(m.first(x).amax(1)), first=nn.Linear(4, 2), last=nn.Linear(2, 3))
    indexed = Formula(lambda m, x: m.last(torch.tanh(m.first(x))[:, 1]), first=nn.Linear(4, 2), last=nn.Linear(2, 3))
    pooled = Formula(lambda m, x: m.last(F.max_pool1d(m.first(x).mT, 3)[..., 0]), first=nn.Linear(4, 2), last=nn.Linear(2, 3))
    one_each = torch.tensor([2, 0])
    every, later = torch.tensor([[0, 2, 1], [1, 0, 2]]), torch.ones(3, 3, dtype=torch.bool).triu(1)
    fused = Formula(lambda m, x: F.scaled_dot_product_attention(m.first(x), x, x, is_causal=True), first=nn.Linear(4, 4))
    written = Formula(lambda m, x: torch.softmax(m.first(x) @ x.mT - 1e9 * later, -1) @ x, first=nn.Linear(4, 4))
    cases = [(module, (x, none), labels, x[labels != -100]), (indexed, x, one_each, x[:, 1])]
    cases += [(one, x, one_each, x.flatten(0, 1)) for one in (largest, pooled)]
    twice = Formula(lambda m, x: m.last((h := m.first(x)) + torch.tanh(h[:, :1])), first=nn.Linear(4, 2), last=nn.Linear(2, 3))
    cases += [(one, x, every, x.flatten(0, 1)) for one in (fused, written, twice)]
    for one, inputs, target, rows in cases:
        at = point(one, inputs, target)
        where = [at.slices[f"first.{name}"] for name in ("weight", "bias")]
        G, kfac = (at.model("kfac")[0].to_matrix()[part, part].contiguous() for part in reversed(where))
        assert error(kfac, torch.kron(G, rows.T @ rows / len(rows))) <= AGREED


def test_drawn_labels_tend_to_the_exact_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequence_model(), draw(2, 3, 3), torch.tensor([[0, 2, -100], [1, -100, 2]])
    exact = point(*data).model("kfac")[0].to_matrix()
    monkeypatch.setattr("hessiankit.curvature.kronecker.PULLED", 0)
    errors = []
    for draws in (16, 4096):
        monkeypatch.setattr("hessiankit.curvature.kronecker.DRAWS", draws)
        at = point(*data)
        assert at.factors.is_drawn
        errors.append(float((at.model("kfac")[0].to_matrix() - exact).norm() / exact.norm()))
    assert errors[1] < min(0.05, errors[0] / 4)  # about 1 / sqrt(4096) of each entry


def test_parameters_that_occur_twice_have_no_factors() -> None:
    module = TiedBlock().double()
    at = point(module, TOKENS, LABELS)
    assert "table.weight" not in {w.parameter for w in at.factors.weights}
    assert "block.attention.W_Q" in {w.parameter for w in at.factors.weights}
    rows = at.slices["table.weight"]
    batches = [(TOKENS[:1], LABELS[:1]), (TOKENS[1:], LABELS[1:])]
    for one in (at, *(point(module, *data, kind="hessian") for data in ((TOKENS, LABELS), (batches, None)))):  # that of the GGN
        assert error(one.model("kfac")[0].to_matrix()[rows, rows], torch.diag(at.matrix.diagonal()[rows])) <= AGREED


class Positions(nn.Module):
    """Tokens with positions of their own table, between norms; the head is another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)
        self.first, self.norm, self.head = (
            nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True),
            nn.LayerNorm(4),
            nn.Linear(4, 5),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.first(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))))


EMBEDDED = {"tied": (TiedBlock, TOKENS, LABELS), "positions": (Positions, tokens(4, 3) % 5, tokens(4, 3, seed=5) % 5)}


@pytest.mark.parametrize("name", EMBEDDED)
def test_embeddings_and_gains_have_their_exact_diagonal_at_the_price_of_the_factors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ids, labels = EMBEDDED[name]
    monkeypatch.setattr("hessiankit.curvature.operator.MOST", 0)  # of the products that an exact diagonal may take
    batches = [(ids[:1], labels[:1]), (ids[1:], labels[1:])]
    for data in ((ids, labels), (batches, None)):
        G = hessian_operator(randomised(made().double()), *data, loss="cross_entropy", kind="ggn")
        exact = G.to_matrix()
        for which in ("kfac", "ekfac"):
            C = G.approximation(which).to_matrix()
            rest = [
                n
                for n in G.names
                if ("norm" in n.lower() and n.endswith("weight")) or n in ("tokens.weight", "places.weight", "table.weight")
            ]
            assert len(rest) > 2
            for n in rest:
                rows = G.slices[n]
                assert error(C[rows, rows], torch.diag(exact.diagonal()[rows])) <= AGREED
        with pytest.raises(hk.InputError, match="the exact diagonal would take as long as"):
            G.approximation("diagonal")


@pytest.mark.parametrize("name", EMBEDDED)
def test_labels_that_are_drawn_together_tend_to_the_expectation(name: str) -> None:
    made, ids, labels = EMBEDDED[name]
    module = randomised(made().double())
    expected = hessian_operator(module, ids, labels, loss="cross_entropy", kind="ggn").approximation("kfac").to_matrix()
    errors = []
    for draws in (4, 4096):
        F_mc = hessian_operator(module, ids, labels, loss="cross_entropy", kind="fisher-mc", draws=draws)
        errors.append(float((F_mc.approximation("kfac").to_matrix() - expected).norm() / expected.norm()))
    assert errors[1] < min(0.1, errors[0] / 4)


def test_sampled_fishers_have_their_own_factors() -> None:
    module = perceptron()
    for kind in ("fisher-mc", "fisher-empirical"):
        at = point(module, X, Y, kind=kind, draws=3)
        blocks, exact = at.model("ekfac")[0].to_matrix(), at.matrix
        assert float(blocks.trace()) == pytest.approx(float(exact.trace()), rel=1e-12)
        kfac = at.model("kfac")[0].to_matrix()
        bias = at.slices["2.bias"]
        assert error(kfac[bias, bias], exact[bias, bias]) <= AGREED


READ: dict[str, Any] = {"shift": 0.0, "gradients": True}  # a module's closure would be put back with it


def gated(m: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(READ["gradients"]):
        h = torch.tanh(m.first(x + READ["shift"]))
    return m.last(h)


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"recompute": "layers"}])
@pytest.mark.parametrize(("name", "value", "said"), [("gradients", False, "gradients"), ("shift", 1.0, "losses")])
def test_factors_of_another_function_than_the_operator_are_an_error(
    name: str, value: Any, said: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag that stops a gradient and moves no value, and a number, changed after the operator was made."""
    module = Formula(gated, first=nn.Linear(3, 4), last=nn.Linear(4, 4))
    operator = hessian_operator(module, X, Y, loss="cross_entropy", kind="ggn", **options)
    monkeypatch.setitem(READ, name, value)
    with pytest.raises(hk.TraceError, match=f"different {said}"):
        operator.approximation("kfac")
