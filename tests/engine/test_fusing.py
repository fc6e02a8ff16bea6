"""What products fuse stays exact: attention written out, a head with its cross entropy, reshapes, biases; and needs less memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, gauss_newton, mse, reverse_over_reverse
from model_zoo import InDouble, generic
from operator_cases import EXACT, applied, beside_unfused, error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy, linear

from benchmarks.architectures import build
from hessiankit.curvature.operator import hessian_operator
from hessiankit.engine.linearisation import Linearisation
from hessiankit.primitives import linear_cross_entropy
from hessiankit.primitives.cast import Cast
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.linear import Add, MaskedFill, Reshape
from hessiankit.primitives.linear_cross_entropy import LinearCrossEntropy
from hessiankit.primitives.softmax import Softmax
from hessiankit.tracing import attention_fusion, head_fusion

B, H, L, E = 2, 2, 4, 2
WIDTH = H * E
X, T = draw(B, L, WIDTH), draw(B, L, WIDTH, seed=2)
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
HIDDEN = draw(B, 1, L, L, seed=5) > 0.5  # of each sample, equal for its heads; some of it above the diagonal, some below
HIDDEN[..., 0] = False
PADDED = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool()[:, None, None, :]
BIAS = draw(H, L, L, seed=6)
KEYS, VALUES = draw(E, 4, seed=8), draw(H, L, E, seed=9)
SAMPLES = draw(B, 1, L, L, seed=11)
LOWEST = torch.finfo(torch.float64).min

Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_fusion, "ENTRIES", 0)
    monkeypatch.setattr(head_fusion, "ENTRIES", 0)
    monkeypatch.setattr(linear_cross_entropy, "LOGITS", 20)  # two tokens at a time


def heads(attend: Attend, **parts: Any) -> nn.Module:
    """Self-attention: ``attend(q, k, v, module)`` for q, k, v (B, H, L, E), between projections that all move."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in (x @ m.qkv).split(WIDTH, -1))
        n = attend(q, k, v, m)
        return n.transpose(1, 2).flatten(2) @ m.out

    return Formula(forward, qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH), **parts)


products = partial(beside_unfused, attention_fusion, ScaledDotProductAttention)


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


def by_einsum(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    t = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(E)
    return torch.einsum("bhqk,bhkd->bhqd", torch.softmax(t, -1), v)


def heads_last(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    """Weights (B, L, H, L): queries before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    t = torch.einsum("bqhd,bkhd->bqhk", q, k).masked_fill(HIDDEN.transpose(1, 2), -math.inf)
    return torch.einsum("bqhk,bkhd->bqhd", torch.softmax(t, -1), v).transpose(1, 2)


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
    "causal": (softmax_of(lambda t: (t / math.sqrt(E)).masked_fill(~CAUSAL, -math.inf)), "causal"),
    "masked by samples": (softmax_of(lambda t: t.masked_fill(HIDDEN, -math.inf)), "boolean"),
    "expanded mask": (softmax_of(lambda t: t.masked_fill(HIDDEN.expand(B, H, L, L), -math.inf)), "boolean"),
    "padding": (softmax_of(lambda t: t.masked_fill(PADDED, -1e9)), "boolean"),
    "where": (softmax_of(lambda t: torch.where(CAUSAL, t, torch.tensor(LOWEST))), "causal"),
    "where, the other way": (softmax_of(lambda t: torch.where(HIDDEN, torch.tensor(-math.inf), t)), "boolean"),
    "two masks": (softmax_of(two_masks), "additive"),
    "scaled queries": (lambda q, k, v, m: torch.softmax((q * 0.4) @ k.mT, -1) @ v, "none"),
    "keys for all heads": (lambda q, k, v, m: torch.softmax(q @ k[:, :1].mT, -1) @ v[:, :1], "none"),
    "queries for all samples": (lambda q, k, v, m: torch.softmax(q[:1] @ k.mT, -1) @ v, "none"),
    "fewer keys": (lambda q, k, v, m: torch.softmax(q @ k[:, :, 1:].mT, -1) @ v[:, :, 1:], "none"),
    "constant keys": (lambda q, k, v, m: torch.softmax(q @ KEYS, -1) @ v[:, :, :4], "none"),
    "constant values": (lambda q, k, v, m: torch.softmax(q @ k.mT, -1) @ VALUES, "none"),
    "one value three times": (lambda q, k, v, m: torch.softmax(q @ q.mT, -1) @ q, "none"),
    "nanoGPT": (nano_gpt, "causal"),
    "bmm": (by_bmm, "boolean"),
    "einsum": (by_einsum, "none"),
    "einsum, heads last": (heads_last, "boolean"),
}


def kind(attention: ScaledDotProductAttention) -> str:
    mask = attention.mask
    return "causal" if attention.is_causal else "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"


@pytest.mark.parametrize("name", FORMS)
def test_written_out_attention_is_one_application(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, mask = FORMS[name]
    module = heads(attend)
    primitives, found = products(monkeypatch, module, X, T)
    attention = only_fused(primitives)
    assert kind(attention) == mask
    assert error(found, reverse_over_reverse(module, X, T, mse)) <= 1e-10


def test_softmax_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module rounds its logits and weights to 6e-8 of them; fused attention takes them from Q and K, which are not rounded."""
    module = heads(lambda q, k, v, m: F.softmax(q @ k.mT, -1, dtype=torch.float32).to(q.dtype) @ v)
    primitives, found = products(monkeypatch, module, X, T, tolerance=1e-6)
    only_fused(primitives)
    assert not [p for p in primitives if isinstance(p, Cast)]
    exact = reverse_over_reverse(heads(lambda q, k, v, m: torch.softmax(q @ k.mT, -1) @ v), X, T, mse)
    assert error(found, exact) <= 1e-6


@pytest.mark.parametrize("options", [{"kind": "ggn"}, {"recompute": "layers"}, {"micro_batch": 1}], ids=str)
def test_other_ways_to_the_same_products(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS["nanoGPT" if "micro_batch" in options else "two masks"][0]
    primitives, _ = products(monkeypatch, heads(form), X, T, **options)
    only_fused(primitives, 2 if "micro_batch" in options else 1)


def entropy(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    A = torch.softmax(q @ k.mT, -1)
    return A @ v + A.square().sum()


def logits_read(q: Tensor, k: Tensor, v: Tensor, m: Any) -> Tensor:
    t = q @ k.mT
    return torch.softmax(t / 2, -1) @ v + t.mean()


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
    "transposed weights": lambda q, k, v, m: torch.softmax(q @ k.mT, -1).mT @ v,
    "temperature that moves": lambda q, k, v, m: torch.softmax(q @ k.mT * m.out[0, 0], -1) @ v,
    "capped logits": softmax_of(lambda t: torch.tanh(t)),
    "a bias that moves, scaled": lambda q, k, v, m: torch.softmax((q @ k.mT + m.out[0, :L]) / 2, -1) @ v,
    "a bias that moves, and a mask": lambda q, k, v, m: torch.softmax(q @ k.mT + m.out[0, :L] + BIAS, -1) @ v,
    "a bias in more samples": lambda q, k, v, m: torch.softmax((q @ k.mT)[:1] + SAMPLES, -1) @ v,
    "heads exchanged": lambda q, k, v, m: torch.softmax((q @ k.mT).transpose(0, 1), -1) @ v,
    "a bias that moves, subtracted": lambda q, k, v, m: torch.softmax(q @ k.mT - m.out[0, :L], -1) @ v,
    "weights on the right": lambda q, k, v, m: (v.mT @ torch.softmax(q @ k.mT, -1)).mT,
}


@pytest.mark.parametrize("name", UNMATCHED)
def test_what_is_no_attention_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = heads(UNMATCHED[name])
    primitives, found = products(monkeypatch, module, X, T)
    assert not [p for p in primitives if isinstance(p, ScaledDotProductAttention)]
    assert [p for p in primitives if isinstance(p, Softmax)]
    assert error(found, reverse_over_reverse(module, X, T, mse)) <= 1e-10


def test_weights_that_are_the_output_or_penalised_stay() -> None:
    """The loss reads them, or they are what the Gauss-Newton part begins at."""

    def both(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        A = torch.softmax(x @ m.W @ x.mT, -1)
        return A, A @ x

    x, module = draw(4, 3), Formula(both, W=(3, 3))
    losses: list[tuple[Callable[..., Tensor], bool]] = [
        (lambda out, _: out[0].pow(3).sum() + out[1].pow(3).sum(), False),
        (lambda out, _: out[0].pow(3).sum(), False),
        (lambda out, _: out[1].pow(3).sum(), True),
    ]
    for loss, fused in losses:
        operator = hessian_operator(module, x, torch.zeros(()), loss=loss)
        assert bool([p for p in applied(operator) if isinstance(p, ScaledDotProductAttention)]) is fused
        assert error(operator.to_matrix(), reverse_over_reverse(module, x, torch.zeros(()), loss)) <= 1e-10


def test_gauss_newton_that_begins_at_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module returns its weights, and the loss reads nothing but what it attends to with them."""
    module, x = Formula(lambda m, x: torch.softmax(x @ m.W @ x.mT, -1), W=(3, 3)), draw(4, 3)
    loss: Callable[..., Tensor] = lambda A, t: (A @ x).pow(3).sum()  # noqa: E731
    primitives, found = products(monkeypatch, module, x, torch.zeros(()), loss=loss, kind="ggn")
    assert not [p for p in primitives if isinstance(p, ScaledDotProductAttention)]
    assert error(found, gauss_newton(module, x, torch.zeros(()), loss)) <= 1e-10


def test_nothing_of_the_size_of_the_weights_is_kept() -> None:
    """Neither values between the products nor a second copy of a mask that layers share."""
    length = 64

    def forward(m: Any, x: Tensor) -> Tensor:
        for W in (m.V, m.W):
            x = x + torch.softmax((0.1 * x @ W @ x.mT).masked_fill(hidden, -math.inf), -1) @ x
        return x

    hidden = (draw(length, length) > 1).fill_diagonal_(False)
    operator = hessian_operator(Formula(forward, V=(2, 2), W=(2, 2)), draw(length, 2), torch.zeros(length, 2).double())
    first, second = (p for p in applied(operator) if isinstance(p, ScaledDotProductAttention))
    assert first.mask is not None
    assert first.mask is second.mask
    (batch,) = operator._linearised
    assert not [y for y in batch._constants.values() if y.untyped_storage().nbytes() >= length * length]


@pytest.mark.parametrize("name", ["causal/gpt2", "masked/bert"])
def test_hugging_face(name: str) -> None:
    pytest.importorskip("transformers")
    instance = build(name, "eager")
    module = InDouble(instance.model)
    operator = hessian_operator(module, instance.batch, loss=None)
    attention = [p for p in applied(operator) if isinstance(p, ScaledDotProductAttention)]
    assert {kind(p) for p in attention} == {"boolean"}
    assert not any(isinstance(p, (Softmax, MaskedFill)) for p in applied(operator))


def renamed(m: Any, x: Tensor) -> Tensor:
    """Products with biases between reshapes, one of which is read twice."""
    y = torch.addmm(m.a, x.reshape(-1, 4), m.A).reshape(2, 3, 6).reshape(2, 3, 6)
    product = y.tanh().reshape(2, 9, 2).reshape(12, 3) @ m.B
    return ((product + m.b).sin() * product.reshape(2, 18).reshape(12, 3)).reshape(4, 9)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_reshapes_and_biases_are_fused_for_products(kind: str) -> None:
    module, x, target = Formula(renamed, A=(4, 6), a=(6,), B=(3, 3), b=(3,)), draw(2, 3, 4), draw(4, 9, seed=2)
    operator = hessian_operator(module, x, target, kind=kind)
    expected = (reverse_over_reverse if kind == "hessian" else gauss_newton)(module, x, target, mse)
    assert error(operator.to_matrix(), expected) <= EXACT
    primitives = [step.primitive.primitive for step in operator._linearised[0]._steps(0)]
    assert sum(isinstance(p, Reshape) for p in primitives) == 3
    assert sum(isinstance(p, Add) for p in primitives) == 1  # the product that is read twice keeps its own


CLASSES, FEATURES = 7, 3
IDS = torch.tensor([[0, 3, 6, 1], [2, 2, 5, 4]])
Head = Callable[[Any, Tensor], Tensor]


class HeadModel(nn.Module):
    """An embedding, a nonlinear layer and a head."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.table, self.mix = nn.Parameter(draw(CLASSES, FEATURES)), nn.Parameter(draw(FEATURES, FEATURES, seed=1))
        self.out, self.bias, self.head = nn.Parameter(draw(CLASSES, FEATURES, seed=2)), nn.Parameter(draw(CLASSES, seed=3)), head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self, torch.tanh(self.table[ids] @ self.mix))


def shifted(out: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(out[..., :-1, :].contiguous().view(-1, CLASSES), target[..., 1:].reshape(-1))


HEADS: dict[str, tuple[Head, Any]] = {
    "linear": (lambda m, h: linear(h, m.out), "cross_entropy"),
    "linear with a bias": (lambda m, h: linear(h, m.out, m.bias), "cross_entropy"),
    "tied": (lambda m, h: linear(h, m.table), "cross_entropy"),
    "a matrix that is computed": (lambda m, h: h @ (m.out @ m.mix).T, "cross_entropy"),
    "a constant matrix": (lambda m, h: h @ m.out.detach().T, "cross_entropy"),
    "shifted": (lambda m, h: linear(h, m.out), shifted),
    "classes second": (lambda m, h: linear(h, m.out, m.bias), lambda z, t: cross_entropy(z.transpose(1, 2), t)),
    "sum, scaled": (lambda m, h: linear(h, m.out) / 3, lambda z, t: cross_entropy(z.flatten(0, 1), t.flatten(), reduction="sum")),
    "smooth, ignored": (
        lambda m, h: linear(h, m.out, m.bias),
        lambda z, t: cross_entropy(z.flatten(0, 1), t.flatten(), ignore_index=2, label_smoothing=0.1),
    ),
}
KEPT: dict[str, tuple[Head, Any]] = {
    "logits read by more": (
        lambda m, h: linear(h, m.out),
        lambda z, t: cross_entropy(z.flatten(0, 1), t.flatten()) + z.square().mean(),
    ),
    "capped": (lambda m, h: linear(h, m.out).tanh(), "cross_entropy"),
    "scaled with a bias": (lambda m, h: linear(h, m.out, m.bias) / 3, "cross_entropy"),
}


def fused(primitives: list[Any]) -> list[LinearCrossEntropy]:
    return [p for p in primitives if isinstance(p, LinearCrossEntropy)]


def unfused(module: nn.Module, loss: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[LinearCrossEntropy]:
    """The fused heads of an operator, whose matrix and gradient have to be those without fusion."""
    return fused(beside_unfused(head_fusion, LinearCrossEntropy, monkeypatch, module, IDS, IDS, loss=loss, **options)[0])


DRAWN = {"kind": "fisher-mc", "draws": 3}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"kind": "ggn"},
    {"recompute": "layers"},
    {"kind": "fisher"},
    {"micro_batch": 1},
    DRAWN,
    {"kind": "fisher-empirical"},
    {**DRAWN, "micro_batch": 1},
)
NAMED = [(name, options) for name, (_, loss) in HEADS.items() for options in (WAYS if isinstance(loss, str) else WAYS[:3])]


@pytest.mark.parametrize(("name", "options"), NAMED, ids=str)
def test_a_head_with_its_loss_is_one_application(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    head, loss = HEADS[name]
    found = unfused(HeadModel(head), loss, monkeypatch, **options)
    assert len(found) == 1 + ("micro_batch" in options)
    assert all(p.gauss_newton is ("kind" in options) for p in found)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_head_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, loss = KEPT[name]
    assert not unfused(HeadModel(head), loss, monkeypatch)


def test_gauss_newton_that_begins_before_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module returns hidden states, and its loss holds the head: all of that curvature counts."""
    model = HeadModel(lambda m, h: h)
    (head,) = unfused(model, lambda h, t: cross_entropy((h @ OUT).flatten(0, 1), t.flatten()), monkeypatch, kind="ggn")
    assert not head.gauss_newton


OUT = draw(FEATURES, CLASSES, seed=4)


def test_nothing_of_tokens_times_classes_is_kept() -> None:
    operator = hessian_operator(HeadModel(HEADS["linear"][0]), IDS, IDS, loss="cross_entropy")
    (batch,) = operator._linearised
    assert isinstance(batch, Linearisation)
    kept = [
        *batch._constants.values(),
        *(x for step in batch._steps(0) for x in vars(step.primitive).values() if isinstance(x, Tensor)),
    ]
    assert not [x for x in kept if x.untyped_storage().nbytes() >= 8 * IDS.numel() * CLASSES]


hf = pytest.importorskip("transformers")
SIZES = {"hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": CLASSES}
SPECIAL = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **SPECIAL)),
    "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, max_position_embeddings=4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_hugging_face(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the causal models are cast to single precision, which rounds them where they are not fused."""
    module, batch = InDouble(generic(MODELS[name]())), {"input_ids": IDS, "labels": IDS}
    found = hessian_operator(module, batch, loss=None)
    monkeypatch.setattr(head_fusion, "ENTRIES", math.inf)
    expected = hessian_operator(module, batch, loss=None)
    v = draw(found.shape[0], seed=5)
    assert (len(fused(applied(found))), fused(applied(expected))) == (1, [])
    assert error(found @ v, expected @ v) <= (EXACT if name == "BERT" else 1e-6)
