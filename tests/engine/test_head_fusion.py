"""A head with its cross entropy is one application in products, which stay exact, and holds nothing of tokens times classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import draw
from model_zoo import InDouble, generic
from operator_cases import EXACT, error
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from derivations import linear_cross_entropy
from derivations.linear_cross_entropy import LinearCrossEntropy
from hessiankit.curvature.operator import HessianOperator, hessian_operator
from hessiankit.engine.linearisation import Linearisation
from hessiankit.tracing import head_fusion

CLASSES, WIDTH = 7, 3
IDS = torch.tensor([[0, 3, 6, 1], [2, 2, 5, 4]])
Head = Callable[["Model", Tensor], Tensor]


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_fusion, "ENTRIES", 0)
    monkeypatch.setattr(linear_cross_entropy, "LOGITS", 20)  # two tokens at a time


class Model(nn.Module):
    """An embedding, a nonlinear layer and a head."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.table, self.mix = nn.Parameter(draw(CLASSES, WIDTH)), nn.Parameter(draw(WIDTH, WIDTH, seed=1))
        self.out, self.bias, self.head = nn.Parameter(draw(CLASSES, WIDTH, seed=2)), nn.Parameter(draw(CLASSES, seed=3)), head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self, torch.tanh(self.table[ids] @ self.mix))


def shifted(out: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(out[..., :-1, :].contiguous().view(-1, CLASSES), target[..., 1:].reshape(-1))


HEADS: dict[str, tuple[Head, Any]] = {
    "linear": (lambda m, h: linear(h, m.out), "cross_entropy"),
    "linear with a bias": (lambda m, h: linear(h, m.out, m.bias), "cross_entropy"),
    "tied": (lambda m, h: linear(h, m.table), "cross_entropy"),
    "tied, by a product": (lambda m, h: h @ m.table.T, "cross_entropy"),
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
    "a part of the classes": (
        lambda m, h: linear(h, m.out)[..., :-1],
        lambda z, t: cross_entropy(z.flatten(0, 1), t.flatten().clamp_max(5)),
    ),
}


def fused(operator: HessianOperator) -> list[LinearCrossEntropy]:
    parts = [part for batch in operator._batches for part in getattr(batch, "_parts", [batch])]
    every = [a.primitive for part in parts for stretch in part._segments for a in stretch.applications]
    return [p for p in every if isinstance(p, LinearCrossEntropy)]


def both(module: nn.Module, x: Any, loss: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[LinearCrossEntropy]:
    """The fused heads of an operator, whose matrix and gradient have to be those without fusion."""
    one = hessian_operator(module, x, IDS, loss=loss, **options)
    matrix, gradient = one.to_matrix(), one.gradient
    with monkeypatch.context() as without:
        without.setattr(head_fusion, "ENTRIES", math.inf)
        other = hessian_operator(module, x, IDS, loss=loss, **options)
    assert not fused(other)
    assert error(matrix, other.to_matrix()) <= EXACT
    assert error(gradient, other.gradient) <= EXACT
    return fused(one)


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
    found = both(Model(head), IDS, loss, monkeypatch, **options)
    assert len(found) == 1 + ("micro_batch" in options)
    assert all(p.gauss_newton is ("kind" in options) for p in found)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_no_head_stays_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, loss = KEPT[name]
    assert not both(Model(head), IDS, loss, monkeypatch)


def test_gauss_newton_that_begins_before_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module returns hidden states, and its loss holds the head: all of that curvature counts."""
    model = Model(lambda m, h: h)
    (head,) = both(model, IDS, lambda h, t: cross_entropy((h @ OUT).flatten(0, 1), t.flatten()), monkeypatch, kind="ggn")
    assert not head.gauss_newton


OUT = draw(WIDTH, CLASSES, seed=4)


def test_few_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = Model(HEADS["linear"][0]), "cross_entropy"
    monkeypatch.setattr(head_fusion, "ENTRIES", IDS.numel() * CLASSES - 1)
    assert fused(hessian_operator(model, IDS, IDS, loss=loss))
    monkeypatch.setattr(head_fusion, "ENTRIES", IDS.numel() * CLASSES)
    assert not fused(hessian_operator(model, IDS, IDS, loss=loss))


def test_nothing_of_tokens_times_classes_is_kept() -> None:
    operator = hessian_operator(Model(HEADS["linear"][0]), IDS, IDS, loss="cross_entropy")
    (batch,) = operator._batches
    assert isinstance(batch, Linearisation)
    kept = [
        *batch._constants.values(),
        *(x for step in batch._steps(0) for x in vars(step.primitive).values() if isinstance(x, Tensor)),
    ]
    assert not [x for x in kept if x.untyped_storage().nbytes() >= 8 * IDS.numel() * CLASSES]


hf = pytest.importorskip("transformers")
SIZES = {"hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": CLASSES}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=CLASSES, n_positions=4, n_embd=4, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
        )
    ),
    "Llama": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, use_cache=False, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    ),
    "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, max_position_embeddings=4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_hugging_face(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the causal models are cast to single precision, which rounds them where they are not fused."""
    module = InDouble(generic(MODELS[name]()))
    v = draw(sum(p.numel() for p in module.parameters()), seed=5)
    batch = {"input_ids": IDS, "labels": IDS}
    one = hessian_operator(module, batch, loss=None)
    assert len(fused(one)) == 1
    monkeypatch.setattr(head_fusion, "ENTRIES", math.inf)
    other = hessian_operator(module, batch, loss=None)
    assert not fused(other)
    assert error(one @ v, other @ v) <= (EXACT if name == "BERT" else 1e-6)
