"""What products fuse stays exact: attention written out in single operations, reshapes, biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from operator_cases import EXACT, error
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.architectures import InDouble, build
from derivations.cast import Cast
from derivations.fused_attention import ScaledDotProductAttention
from derivations.indexing import Concatenate
from derivations.linear import Add, MaskedFill, Reshape
from derivations.softmax import Softmax
from hessiankit import hessian
from hessiankit.curvature.operator import HessianOperator, hessian_operator
from hessiankit.tracing import attention_fusion

B, H, L, E = 2, 2, 4, 2
WIDTH = H * E
X, T = draw(B, L, WIDTH), draw(B, L, WIDTH, seed=2)
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
HIDDEN = draw(B, 1, L, L, seed=5) > 0.5  # of each sample, equal for its heads; some of it above the diagonal, some below
HIDDEN[..., 0] = False
PADDED = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool()[:, None, None, :]
BIAS = draw(H, L, L, seed=6)
KEYS, VALUES = draw(E, 4, seed=8), draw(H, L, E, seed=9)
TEMPERATURES, SAMPLES = draw(H, 1, 1, seed=10), draw(B, 1, L, L, seed=11)
LOWEST = torch.finfo(torch.float64).min

Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fusion, "ENTRIES", 0)


def heads(attend: Attend, **parts: Any) -> nn.Module:
    """Self-attention: ``attend(q, k, v, module)`` for q, k, v (B, H, L, E), between projections that all move."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (x @ m.qkv).split(WIDTH, -1))
        n = attend(q, k, v, m)
        return n.transpose(1, 2).flatten(2) @ m.out

    return Formula(forward, qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH), **parts)


def applied(operator: HessianOperator) -> list[Any]:
    """The primitives that the operator's batches are made of."""
    parts = [part for batch in operator._batches for part in getattr(batch, "_parts", [batch])]
    return [a.primitive for part in parts for stretch in part._segments for a in stretch.applications]


def products(
    module: nn.Module, x: Any, t: Any, monkeypatch: pytest.MonkeyPatch, *, tolerance: float = EXACT, **options: Any
) -> tuple[list[Any], Tensor]:
    """The primitives and the Hessian with attention_fusion, which has to agree with the one without."""
    fused = hessian_operator(module, x, t, **options)
    found = fused.to_matrix()
    with monkeypatch.context() as without:
        without.setattr(attention_fusion, "ENTRIES", math.inf)
        plain = hessian_operator(module, x, t, **options)
        assert not [p for p in applied(plain) if isinstance(p, ScaledDotProductAttention)]
        assert error(found, plain.to_matrix()) <= tolerance
        assert error(fused.gradient, plain.gradient) <= tolerance
    return applied(fused), found


def only_fused(primitives: list[Any], count: int = 1) -> ScaledDotProductAttention:
    """The first of so many applications of fused attention, beside which there is no softmax."""
    found = [p for p in primitives if isinstance(p, ScaledDotProductAttention)]
    assert len(found) == count
    assert not any(isinstance(p, (Softmax, MaskedFill)) for p in primitives)
    return found[0]


def merged(x: Tensor) -> Tensor:
    return x.reshape(B * H, *x.shape[2:])


def nano_gpt(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    bias = torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(bias[:, :, :L, :L] == 0, float("-inf"))
    att = F.dropout(F.softmax(att, dim=-1), 0.1, training=False)
    return att @ v


def softmax_of(logits: Callable[[Tensor], Tensor]) -> Attend:
    return lambda q, k, v, m: torch.softmax(logits(q @ k.mT), -1) @ v


def by_bmm(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    q, k, v = merged(q), merged(k), merged(v)
    t = torch.bmm(q / math.sqrt(E), k.transpose(1, 2)).view(B, H, L, L).masked_fill(HIDDEN, -math.inf)
    return torch.bmm(torch.softmax(t.view(B * H, L, L), -1), v).view(B, H, L, E)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    t = torch.baddbmm(BIAS.expand(B, H, L, L).reshape(B * H, L, L), merged(q), merged(k).mT, alpha=0.5)
    return torch.bmm(torch.softmax(t, -1), merged(v)).view(B, H, L, E)


def by_einsum(mask: Tensor | None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
        t = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(E)
        t = t if mask is None else t.masked_fill(mask, -math.inf)
        return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(t, -1), v)

    return attend


def heads_last(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    """Weights (B, L, H, L): queries before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    t = torch.einsum("bqhd,bkhd->bqhk", q, k).masked_fill(HIDDEN.transpose(1, 2), -math.inf)
    return torch.einsum("bqhk,bkhd->bqhd", torch.softmax(t, -1), v).transpose(1, 2)


def heads_first(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    """Weights (H, B, L, L), which are as many heads as samples."""
    t = (q @ k.mT).transpose(0, 1).masked_fill(HIDDEN.transpose(0, 1), -math.inf)
    return torch.softmax(t, -1).transpose(0, 1) @ v


def mixed(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    """One product by einsum, the other one with an axis for each head."""
    t = torch.einsum("bhqd,bhkd->bhqk", q, k) + BIAS
    return torch.softmax(t, -1) @ v


def two_masks(t: Tensor) -> Tensor:
    return torch.where(~PADDED, t / 2 + BIAS, -math.inf).masked_fill(~CAUSAL, LOWEST)


FORMS: dict[str, tuple[Attend, str]] = {
    "no mask": (softmax_of(lambda t: t), "none"),
    "additive": (softmax_of(lambda t: t / math.sqrt(E) + BIAS), "additive"),
    "additive, from the left, subtracted": (softmax_of(lambda t: BIAS - t * 0.3), "additive"),
    "additive, subtracted": (softmax_of(lambda t: t - BIAS), "additive"),
    "additive, scaled after": (softmax_of(lambda t: (t * 2 + BIAS) / 3 * torch.tensor(0.7)), "additive"),
    "additive, minus infinity": (softmax_of(lambda t: t + torch.zeros(L, L).masked_fill(~CAUSAL, -math.inf)), "causal"),
    "additive, lowest number": (softmax_of(lambda t: t + torch.zeros(L, L).double().masked_fill(HIDDEN, LOWEST)), "boolean"),
    "divided by a tensor": (softmax_of(lambda t: t / torch.tensor(3.0).sqrt()), "none"),
    "divided by a tensor of one entry": (softmax_of(lambda t: t / torch.full((1, 1, 1, 1), 1.7)), "none"),
    "causal": (softmax_of(lambda t: (t / math.sqrt(E)).masked_fill(~CAUSAL, -math.inf)), "causal"),
    "causal, scaled after": (softmax_of(lambda t: t.masked_fill(~CAUSAL, -math.inf) / math.sqrt(E)), "causal"),
    "causal, lowest number": (softmax_of(lambda t: t.masked_fill(~CAUSAL, LOWEST)), "causal"),
    "masked by samples": (softmax_of(lambda t: t.masked_fill(HIDDEN, -math.inf)), "boolean"),
    "expanded mask": (softmax_of(lambda t: t.masked_fill(HIDDEN.expand(B, H, L, L), -math.inf)), "boolean"),
    "padding": (softmax_of(lambda t: t.masked_fill(PADDED, -1e9)), "boolean"),
    "where": (softmax_of(lambda t: torch.where(CAUSAL, t, torch.tensor(LOWEST))), "causal"),
    "where, the other way": (softmax_of(lambda t: torch.where(HIDDEN, torch.tensor(-math.inf), t)), "boolean"),
    "two masks": (softmax_of(two_masks), "additive"),
    "a bias of rows": (softmax_of(lambda t: t + BIAS[0, 0]), "additive"),
    "an axis in front": (lambda q, k, v, m: (torch.softmax((q @ k.mT)[None], -1) @ v[None])[0], "none"),
    "scaled queries": (lambda q, k, v, m: torch.softmax((q * 0.4) @ k.mT, -1) @ v, "none"),
    "keys for all heads": (lambda q, k, v, m: torch.softmax(q @ k[:, :1].mT, -1) @ v[:, :1], "none"),
    "queries for all samples": (lambda q, k, v, m: torch.softmax(q[:1] @ k.mT, -1) @ v, "none"),
    "fewer keys": (lambda q, k, v, m: torch.softmax(q @ k[:, :, 1:].mT, -1) @ v[:, :, 1:], "none"),
    "constant keys": (lambda q, k, v, m: torch.softmax(q @ KEYS, -1) @ v[:, :, :4], "none"),
    "constant values": (lambda q, k, v, m: torch.softmax(q @ k.mT, -1) @ VALUES, "none"),
    "one value three times": (lambda q, k, v, m: torch.softmax(q @ q.mT, -1) @ q, "none"),
    "nanoGPT": (nano_gpt, "causal"),
    "bmm": (by_bmm, "boolean"),
    "baddbmm": (by_baddbmm, "additive"),
    "einsum": (by_einsum(None), "none"),
    "einsum, causal": (by_einsum(~CAUSAL), "causal"),
    "einsum, masked by samples": (by_einsum(HIDDEN), "boolean"),
    "einsum, heads last": (heads_last, "boolean"),
    "heads first": (heads_first, "boolean"),
    "einsum and matmul": (mixed, "additive"),
}


def kind(attention: ScaledDotProductAttention) -> str:
    mask = attention.mask
    return "causal" if attention.is_causal else "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"


@pytest.mark.parametrize("name", FORMS)
def test_written_out_attention_is_one_application(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, mask = FORMS[name]
    module = heads(attend)
    primitives, found = products(module, X, T, monkeypatch)
    attention = only_fused(primitives)
    assert kind(attention) == mask
    assert error(found, reverse_over_reverse(module, X, T, mse)) <= 1e-10


def test_softmax_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module rounds its logits and weights to 6e-8 of them; fused attention takes them from Q and K, which are not rounded."""
    module = heads(lambda q, k, v, m: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v)
    primitives, found = products(module, X, T, monkeypatch, tolerance=1e-6)
    only_fused(primitives)
    assert not [p for p in primitives if isinstance(p, Cast)]
    exact = reverse_over_reverse(heads(lambda q, k, v, m: torch.softmax(q @ k.mT, -1) @ v), X, T, mse)
    assert error(found, exact) <= 1e-6


@pytest.mark.parametrize("options", [{"kind": "ggn"}, {"recompute": "layers"}, {"micro_batch": 1}], ids=str)
def test_other_ways_to_the_same_products(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    primitives, _ = products(
        heads(FORMS["nanoGPT" if "micro_batch" in options else "two masks"][0]), X, T, monkeypatch, **options
    )
    only_fused(primitives, 2 if "micro_batch" in options else 1)


def entropy(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    A = torch.softmax(q @ k.mT, -1)
    return A @ v + A.square().sum()


def logits_read(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    t = q @ k.mT
    return torch.softmax(t / 2, -1) @ v + t.mean()


def stacked(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    return torch.bmm(torch.softmax(merged(q @ k[:, :1].mT), -1), merged(v)).view(B, H, L, E)


UNMATCHED: dict[str, Attend] = {
    "weights read": entropy,
    "logits read": logits_read,
    "weights on both sides": lambda q, k, v, m: (A := torch.softmax(q @ k.mT, -1)) @ A @ v,
    "fill that leaves a weight": softmax_of(lambda t: t.masked_fill(HIDDEN, -3.0)),
    "where that leaves a weight": softmax_of(lambda t: torch.where(HIDDEN, torch.tensor(-3.0), t)),
    "rows that are masked altogether": softmax_of(lambda t: t.masked_fill(torch.arange(L)[:, None] == 1, LOWEST)),
    "masked, and seen again": softmax_of(lambda t: t.masked_fill(~CAUSAL, -math.inf).masked_fill(~CAUSAL, 0.0)),
    "zeros above the diagonal": softmax_of(torch.tril),
    "softmax over the queries": lambda q, k, v, m: torch.softmax(q @ k.mT, -2) @ v,
    "softmax over the heads": lambda q, k, v, m: torch.softmax(q @ k.mT, 1) @ v,
    "transposed weights": lambda q, k, v, m: torch.softmax(q @ k.mT, -1).mT @ v,
    "scaled weights": lambda q, k, v, m: (torch.softmax(q @ k.mT, -1) * 2) @ v,
    "temperature by head": softmax_of(lambda t: t * TEMPERATURES),
    "temperature that moves": lambda q, k, v, m: torch.softmax(q @ k.mT * m.out[0, 0], -1) @ v,
    "capped logits": softmax_of(lambda t: torch.tanh(t)),
    "a bias that moves, scaled": lambda q, k, v, m: torch.softmax((q @ k.mT + m.out[0, :L]) / 2, -1) @ v,
    "a bias that moves, and a mask": lambda q, k, v, m: torch.softmax(q @ k.mT + m.out[0, :L] + BIAS, -1) @ v,
    "a bias in more samples": lambda q, k, v, m: torch.softmax((q @ k.mT)[:1] + SAMPLES, -1) @ v,
    "heads exchanged": lambda q, k, v, m: torch.softmax((q @ k.mT).transpose(0, 1), -1) @ v,
    "a bias that moves, subtracted": lambda q, k, v, m: torch.softmax(q @ k.mT - m.out[0, :L], -1) @ v,
    "weights on the right": lambda q, k, v, m: (v.mT @ torch.softmax(q @ k.mT, -1)).mT,
    "keys for all heads, weights in a stack": stacked,
    "constants divided by logits": softmax_of(lambda t: torch.tensor(0.1) / t),
}


@pytest.mark.parametrize("name", UNMATCHED)
def test_what_is_no_attention_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = heads(UNMATCHED[name])
    primitives, found = products(module, X, T, monkeypatch)
    assert not [p for p in primitives if isinstance(p, ScaledDotProductAttention)]
    assert [p for p in primitives if isinstance(p, Softmax)]
    assert error(found, reverse_over_reverse(module, X, T, mse)) <= 1e-10


def test_weights_that_are_the_output_or_penalised_stay() -> None:
    """The loss reads them, or they are what the Gauss-Newton part begins at."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.W = nn.Parameter(draw(3, 3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            A = torch.softmax(x @ self.W @ x.mT, -1)
            return A, A @ x

    x, module = draw(4, 3), Both()

    def read(of: int) -> Callable[..., Tensor]:
        return lambda out, _: out[of].pow(3).sum()

    for loss, fused in ((lambda out, _: read(0)(out, _) + read(1)(out, _), False), (read(0), False), (read(1), True)):
        operator = hessian_operator(module, x, torch.zeros(()), loss=loss)
        expected = torch.autograd.functional.hessian(
            lambda W, loss=loss: loss(torch.func.functional_call(module, {"W": W}, (x,)), None), module.W.detach()
        ).reshape(9, 9)
        assert bool([p for p in applied(operator) if isinstance(p, ScaledDotProductAttention)]) is fused
        assert error(operator.to_matrix(), expected) <= 1e-10


def test_gauss_newton_that_begins_at_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module returns its weights, and the loss reads nothing but what it attends to with them."""
    module = Formula(lambda m, x: torch.softmax(x @ m.W @ x.mT, -1), W=(3, 3))
    x = draw(4, 3)
    options: dict[str, Any] = {"loss": lambda A, t: (A @ x).pow(3).sum(), "kind": "ggn"}
    primitives, found = products(module, x, torch.zeros(()), monkeypatch, **options)
    assert not [p for p in primitives if isinstance(p, ScaledDotProductAttention)]
    A = module(x).detach()
    J = torch.autograd.functional.jacobian(lambda W: torch.func.functional_call(module, {"W": W}, (x,)), module.W.detach())
    bent = torch.autograd.functional.hessian(lambda A: (A @ x).pow(3).sum(), A).reshape(16, 16)
    assert error(found, J.reshape(16, 9).T @ bent @ J.reshape(16, 9)) <= 1e-10


FIRST = torch.zeros(L, L, dtype=torch.float64)
FIRST[0] = LOWEST


@pytest.mark.parametrize("mask", [lambda t: t.masked_fill(FIRST != 0, -math.inf), lambda t: t + FIRST + FIRST])
def test_rows_without_keys_stay(mask: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a row is NaN where it is written out, and zero in fused attention; here the loss reads the others alone."""
    module = Formula(lambda m, x: (torch.softmax(mask(x @ m.W @ x.mT), -1) @ x)[:, 1:], W=(WIDTH, WIDTH))
    operator = hessian_operator(module, X, T[:, 1:], handshake=False)
    assert [p for p in applied(operator) if isinstance(p, Softmax)]


def test_a_mask_is_not_repeated_in_memory() -> None:
    attention = only_fused(applied(hessian_operator(heads(FORMS["expanded mask"][0]), X, T)))
    assert attention.mask is not None
    assert attention.mask.untyped_storage().nbytes() == B * L * L


def test_small_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    module = heads(nano_gpt)
    monkeypatch.setattr(attention_fusion, "ENTRIES", L * L)
    assert only_fused(applied(hessian_operator(module, X, T))).is_causal
    monkeypatch.setattr(attention_fusion, "ENTRIES", L * L + 1)
    assert [p for p in applied(hessian_operator(module, X, T)) if isinstance(p, Softmax)]


def test_nothing_of_the_size_of_the_weights_is_kept() -> None:
    """Neither values between the products nor a second copy of a mask that layers share."""
    length = 64

    def forward(m: Any, x: Tensor) -> Tensor:
        for W in (m.V, m.W):
            x = x + torch.softmax((x @ W @ x.mT).masked_fill(hidden, -math.inf) + lowest, -1) @ x
        return x

    hidden = (draw(length, length) > 1).fill_diagonal_(False)
    lowest = torch.zeros(length, length, dtype=torch.float64).masked_fill(hidden.roll(3, 1).fill_diagonal_(False), LOWEST)
    module, x = Formula(forward, V=(2, 2), W=(2, 2)), draw(length, 2)
    for p in module.parameters():
        p.data *= 0.1
    operator = hessian_operator(module, x, torch.zeros_like(x))
    first, second = (p for p in applied(operator) if isinstance(p, ScaledDotProductAttention))
    assert first.mask is second.mask
    assert first.mask is not None
    assert first.mask.dtype == torch.bool
    (batch,) = operator._batches
    still = [y for y in batch._constants.values() if y.untyped_storage().nbytes() >= length * length]
    assert not still


@pytest.mark.parametrize(("name", "mask"), [("causal/gpt2", "boolean"), ("causal/llama", "boolean"), ("masked/bert", "boolean")])
def test_hugging_face(name: str, mask: str) -> None:
    pytest.importorskip("transformers")
    instance = build(name, "eager")
    module = InDouble(instance.model)
    operator = hessian_operator(module, instance.batch, loss=None)
    attention = [p for p in applied(operator) if isinstance(p, ScaledDotProductAttention)]
    assert {kind(p) for p in attention} == {mask}
    assert not any(isinstance(p, (Softmax, MaskedFill)) for p in applied(operator))
    leaves, v = list(module.parameters()), draw(operator.shape[0])
    slopes = torch.autograd.grad(module(**instance.batch).loss, leaves, create_graph=True)
    along = torch.cat([slope.reshape(-1) for slope in slopes]) @ v
    expected = torch.cat([g.reshape(-1) for g in torch.autograd.grad(along, leaves)])
    assert error(operator @ v, expected) <= 1e-10


class Renamed(nn.Module):
    """Products with biases between reshapes, one of which is read twice, and a value joined to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.a = nn.Parameter(torch.randn(4, 6).double()), nn.Parameter(torch.randn(6).double())
        self.B, self.b = nn.Parameter(torch.randn(3, 3).double()), nn.Parameter(torch.randn(3).double())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.a, x.reshape(-1, 4), self.A).reshape(2, 3, 6).reshape(2, 3, 6)
        y = torch.cat([y.new_zeros(2, 0, 6), y], 1).tanh().reshape(2, 9, 2).reshape(12, 3)
        product = y @ self.B
        return ((product + self.b).sin() * product.reshape(2, 18).reshape(12, 3)).reshape(4, 9)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_reshapes_and_biases_are_fused_for_products(kind: str) -> None:
    torch.manual_seed(0)
    module, x, target = Renamed(), torch.randn(2, 3, 4).double(), torch.randn(4, 9).double()
    H = hessian(module, x, target)
    operator = hessian_operator(module, x, target, kind=kind)
    expected = H.matrix if kind == "hessian" else H.outer()
    assert float((operator.to_matrix() - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    primitives = [step.primitive.primitive for step in operator._batches[0]._steps(0)]
    assert sum(isinstance(p, Reshape) for p in primitives) == 3
    assert sum(isinstance(p, Add) for p in primitives) == 1  # the product that is read twice keeps its own
    assert not any(isinstance(p, Concatenate) for p in primitives)
