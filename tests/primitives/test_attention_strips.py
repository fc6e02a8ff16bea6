"""Attention strip by strip against the same formulas on whole matrices, at sizes that no strip divides, and against autograd."""

from __future__ import annotations

import gc
import itertools
import weakref

import hypothesis
import pytest
import torch
from curvature_reference import draw, reverse_over_reverse
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hessiankit.curvature.operator import hessian_operator
from hessiankit.primitives import attention_strips, fused_attention
from hessiankit.primitives.fused_attention import AttentionInStrips, LinearisedAttention, ScaledDotProductAttention
from hessiankit.primitives.softmax import peaks


@pytest.fixture(autouse=True, params=[30, 200])
def entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of some queries of a head, and of several heads."""
    monkeypatch.setattr(attention_strips, "ENTRIES", request.param)


def qkv(*shapes: tuple[int, ...], scale: float = 1.0) -> list[Tensor]:
    return [draw(*shape, seed=k) * (scale if k < 2 else 1) for k, shape in enumerate(shapes)]


SAME = qkv(*[(2, 2, 9, 3)] * 3)
SOME = draw(9, 9, seed=5) > 0
SOME[2] = False  # a query that sees no key
CASES: dict[str, tuple[ScaledDotProductAttention, list[Tensor]]] = {
    "matrices": (ScaledDotProductAttention(), qkv((7, 3), (9, 3), (9, 5))),
    "heads": (ScaledDotProductAttention(scale=0.7), qkv((2, 2, 7, 3), (2, 2, 9, 3), (2, 2, 9, 5))),
    "causal": (ScaledDotProductAttention(is_causal=True), SAME),
    "causal, more keys": (ScaledDotProductAttention(is_causal=True), qkv((2, 7, 3), (2, 9, 3), (2, 9, 3))),
    "boolean mask": (ScaledDotProductAttention(mask=SOME), SAME),
    "padding": (ScaledDotProductAttention(mask=draw(2, 1, 1, 9, seed=7) > 0), SAME),
    "additive mask": (ScaledDotProductAttention(mask=draw(2, 1, 9, 9, seed=7)), SAME),
    "additive mask of one row": (ScaledDotProductAttention(mask=draw(1, 9, seed=7)), SAME),
    "window": (ScaledDotProductAttention(mask=torch.ones(9, 9, dtype=torch.bool).triu(-1).tril(1)), SAME),
    "constant fourth input": (ScaledDotProductAttention(), [*SAME, draw(9, 9, seed=7)]),
    "grouped queries": (
        ScaledDotProductAttention(enable_gqa=True, is_causal=True),
        qkv((2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)),
    ),
    "grouped queries, mask": (
        ScaledDotProductAttention(enable_gqa=True, mask=draw(2, 4, 9, 9, seed=7)),
        qkv((2, 4, 9, 3), (2, 2, 9, 3), (2, 2, 9, 3)),
    ),
    "broadcast": (ScaledDotProductAttention(), qkv((1, 3, 9, 3), (2, 1, 9, 3), (2, 3, 9, 3))),
    "one key almost alone": (ScaledDotProductAttention(), qkv((2, 9, 3), (2, 9, 3), (2, 9, 3), scale=30.0)),
}


ALL = (True,) * 3
MOVING = {"causal": list(itertools.product([False, True], repeat=3))}  # the tangents' paths are those of every mask and layout


@pytest.mark.parametrize("keeps_weights", [False, True])
@pytest.mark.parametrize(("name", "count"), [("causal", 1), *((name, 2) for name in CASES)])
def test_equals_the_whole_matrices(name: str, count: int, keeps_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "IN_STRIPS", 10**9 if keeps_weights else 0)
    primitive, inputs = CASES[name]
    out = primitive.value(*inputs)
    wanted = [k < 3 for k in range(len(inputs))]
    whole, strips = (f(primitive, inputs, draw(*out.shape, seed=8), wanted) for f in (LinearisedAttention, AttentionInStrips))
    strips.forget()
    bar, everything = draw(count, *out.shape, seed=9), [draw(count, *x.shape, seed=10 + k) for k, x in enumerate(inputs[:3])]
    for moving in MOVING.get(name, [ALL]):
        tangents = [*(t if m else None for t, m in zip(everything, moving, strict=True)), *[None] * (len(inputs) - 3)]
        if any(moving):
            close(strips.push(tangents), whole.push(tangents))
        for given, along in ((bar, tangents), (None, tangents)) if any(moving) else ((bar, None),):
            for found, expected in zip(strips.pull(given, along), whole.pull(given, along), strict=True):
                if expected is None or found is None:
                    assert found is None
                else:
                    close(found, expected)


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_only_small_heads_keep_their_weights(keeps_weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "IN_STRIPS", 82 if keeps_weights else 81)
    primitive, inputs = CASES["causal"]
    at_point = AttentionInStrips(primitive, inputs, inputs[2], None)
    at_point.pull(inputs[2][None], [x[None] for x in inputs])
    assert all(vars(strip).keys() >= {"A", "M"} or not keeps_weights for strip in at_point.heads.strips())
    assert bool(at_point.heads.kept) is keeps_weights
    heads = weakref.ref(at_point.heads)
    gc.disable()
    try:
        del at_point
        assert heads() is None  # at once: no cycle holds the weights
    finally:
        gc.enable()


def test_many_weights_of_all_heads_are_read_in_strips() -> None:
    """From 128 x 128 weights of all heads together; where a mask moves, they are read whole."""
    primitive = ScaledDotProductAttention()
    for heads, kind in ((3, LinearisedAttention), (4, AttentionInStrips)):
        Q, mask = torch.zeros(heads, 64, 2), torch.zeros(64, 64)
        assert type(primitive.linearise([Q, Q, Q])) is kind
        assert type(primitive.linearise([Q, Q, Q, mask], None, [True] * 4)) is LinearisedAttention


def test_tangents_need_an_adjoint() -> None:
    primitive, inputs = CASES["causal"]
    one = [draw(1, *x.shape, seed=10 + k) for k, x in enumerate(inputs)]
    with pytest.raises(ValueError, match="linearised without an adjoint"):
        AttentionInStrips(primitive, inputs, None, None).pull(None, one)


def close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


class Attention(nn.Module):
    """Grouped queries, causal, with a frozen value matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("recompute", [None, "layers"])
def test_products_through_strips_equal_reverse_over_reverse(recompute: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_attention, "IN_STRIPS", 0)
    torch.manual_seed(0)
    module, x, t = Attention().double(), draw(1, 5, 4), draw(1, 5, 8, seed=1)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    operator = hessian_operator(module, x, t, params=names, recompute=recompute)
    expected = reverse_over_reverse(module, x, t, lambda z, target: (z - target).square().mean())
    found = operator.to_matrix()
    expected = expected[: len(found), : len(found)]  # the frozen matrix comes last
    assert float((found - expected).abs().max()) <= 1e-10 * float(expected.abs().max())
    if recompute is None:
        assert any(isinstance(step.primitive, AttentionInStrips) for step in operator._linearised[0]._steps(0))


def test_weights_that_are_not_numbers_are_refused() -> None:
    Q, K, V = SAME
    with pytest.raises(ValueError, match="the attention weights are not numbers"):
        AttentionInStrips(ScaledDotProductAttention(), [Q * torch.inf, K, V], None, None).push([Q.unsqueeze(0), None, None])


@st.composite
def masked_by_tiles(draws: st.DrawFn) -> tuple[Tensor, int]:
    """An additive mask (L, S), each tile of which is zero, hidden, or of numbers, and a seed; no query sees nothing."""
    L, S = draws(st.integers(1, 8)), draws(st.integers(1, 10))
    mask, seed = torch.zeros(L, S, dtype=torch.float64), draws(st.integers(0, 9))
    for i, j in itertools.product(range(0, L, 3), range(0, S, 4)):
        tile = mask[i : i + 3, j : j + 4]
        kind = draws(st.sampled_from(["zero", "hidden", "numbers", "some hidden"]))
        numbers = draw(*tile.shape, seed=seed + 10 * i + j)
        if kind != "zero":
            tile.copy_(
                {"hidden": numbers * 0 - torch.inf, "numbers": numbers}.get(kind, numbers.masked_fill(numbers > 0, -torch.inf))
            )
    mask[mask.isneginf().all(1), draws(st.integers(0, S - 1))] = 0
    return mask, seed


@hypothesis.given(masked_by_tiles())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_masks_whose_tiles_are_zero_or_hidden(case: tuple[Tensor, int]) -> None:
    """The first two derivatives, beside those of the formula written out, by torch."""
    mask, seed = case
    L, S = mask.shape
    inputs, tangents = ([draw(n, 3, seed=seed + k) for k, n in enumerate((L, S, S))] for seed in (seed, seed + 50))
    adjoint, bar = draw(L, 3, seed=seed + 70), draw(L, 3, seed=seed + 71)

    def plain(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        weights = (Q @ K.mT / 3**0.5 + mask).exp()
        return weights / weights.sum(1, keepdim=True) @ V

    strips = AttentionInStrips(ScaledDotProductAttention(mask=mask), inputs, adjoint, [True] * 3)
    pushed = torch.func.jvp(plain, tuple(inputs), tuple(tangents))[1]
    assert (strips.push([t.unsqueeze(0) for t in tangents])[0] - pushed).abs().max() < 1e-12 * (1 + pushed.abs().max())

    def slope(*at: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(plain, *at)[1](adjoint)  # type: ignore[no-any-return]

    pulled, bent = torch.func.vjp(plain, *inputs)[1](bar), torch.func.jvp(slope, tuple(inputs), tuple(tangents))[1]
    found = strips.pull(bar.unsqueeze(0), [t.unsqueeze(0) for t in tangents])
    for covector, first, second in zip(found, pulled, bent, strict=True):
        assert covector is not None
        assert (covector[0] - first - second).abs().max() < 1e-11 * (1 + first.abs().max() + second.abs().max())


@pytest.mark.parametrize("size", [1, 63, 64, 65, 72, 80, 81, 200])
def test_the_peak_of_a_row_is_its_largest_entry(size: int) -> None:
    rows = torch.randn(40, size, 3, generator=torch.Generator().manual_seed(size))
    assert torch.equal(peaks(rows, 1), rows.argmax(1, keepdim=True))
    assert torch.equal(peaks(rows.mT.flip(1), -1), rows.mT.flip(1).argmax(-1, keepdim=True))
