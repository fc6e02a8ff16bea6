"""Data loaders of Hugging Face collators: every call takes them, however they are cut, and none hangs on one without an end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from curvature_reference import assert_one_clear_error, gradient_twice
from meter import Meter
from operator_cases import error
from readings import READINGS, assert_readings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import hessiankit as hk
from hessiankit.request import data as reading

EXACT = 1e-10
SPECIAL = {"vocab_size": 7, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
ROWS = [[2, 3, 4], [5, 6, 2, 3, 4, 6], [4, 4], [3, 2, 5, 6, 6], [1, 2, 3, 3]]
CUTS = (2, 3, 5)
"""Sizes of a batch: with a ragged last one, with rows padded to several lengths, and all at once."""


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"w{k}": k for k in range(7)}, unk_token="w1"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1", mask_token="w1")


def gpt2(kind: str = "GPT2LMHeadModel", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 5, "initializer_range": 0.5}
    return getattr(hf, kind)(hf.GPT2Config(**SPECIAL, **sizes, **options)).double().eval()


def causal(size: int, **options: Any) -> DataLoader[Any]:
    collate = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return DataLoader([{"input_ids": row} for row in ROWS], batch_size=size, collate_fn=collate, **options)


def classes(size: int) -> DataLoader[Any]:
    rows = [{"input_ids": row, "label": len(row) % 3} for row in ROWS]
    return DataLoader(rows, batch_size=size, collate_fn=hf.DataCollatorWithPadding(tokenizer()))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], DataLoader[Any]]]] = {
    "causal": (gpt2, causal),
    "classes": (lambda: gpt2("GPT2ForSequenceClassification", num_labels=3), classes),
}


@cache
def expected(name: str) -> tuple[Tensor, float]:
    """The Hessian and the loss, one row without padding at a time, by torch's double backward."""
    model = CASES[name][0]()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        terms, count = torch.zeros((), dtype=torch.float64), 0
        for row in ROWS:
            logits = model(torch.tensor([row])).logits[0]
            logits = logits[:-1] if name == "causal" else logits.unsqueeze(0)
            labels = torch.tensor(row[1:] if name == "causal" else [len(row) % 3])
            terms = terms + F.cross_entropy(logits, labels, reduction="sum")
            count += len(labels)
        return gradient_twice(terms / count, list(model.parameters())), float((terms / count).detach())


@pytest.mark.parametrize("name", CASES)
def test_results_do_not_depend_on_how_a_loader_cuts_the_data(name):
    make, loader = CASES[name]
    model, (H, loss) = make(), expected(name)
    for size in CUTS:
        found = hk.hessian(model, loader(size), loss="cross_entropy")
        assert error(found.matrix, H) <= EXACT
        assert found.loss == pytest.approx(loss, rel=1e-13)
    for options in ({}, {"micro_batch": 1}, {"micro_batch": 2}, {"recompute": "layers"}):
        assert error(hk.hessian_operator(model, loader(2), loss="cross_entropy", **options).to_matrix(), H) <= EXACT


@pytest.mark.parametrize("name", CASES)
def test_the_models_own_loss_is_taken_where_none_is_given(name):
    """Whole data in one batch, in several, and as a pair of tokens and labels."""
    make, loader = CASES[name]
    model, (H, loss) = make(), expected(name)
    for size in (1, 3, len(ROWS)):
        found = hk.hessian(model, loader(size))
        assert error(found.matrix, H) <= EXACT
        assert found.loss == pytest.approx(loss, rel=1e-12)
    ids = torch.tensor([[2, 3, 4, 5]])
    labels = ids if name == "causal" else torch.tensor([1])
    own = float(model(input_ids=ids, labels=labels).loss.detach())
    for data in ((ids, labels), ({"input_ids": ids}, labels), ({"input_ids": ids, "labels": labels},)):
        assert hk.hessian(model, *data, params="*wte*", lazy=True).loss == pytest.approx(
            own, rel=1e-6
        )  # which the library rounds to float32


def test_a_loss_with_more_than_a_cross_entropy_is_the_models_own():
    """A penalty beside it: the loss has no name, and several batches have no weights."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            result = self.model(input_ids=input_ids, labels=labels)
            result.loss = result.loss + self.model.lm_head.weight.square().sum()
            return result

    model, ids = Penalised(), torch.tensor([[2, 3, 4, 5]])
    own = float(model(ids, ids).loss.detach())
    assert hk.hessian(model, {"input_ids": ids, "labels": ids}, params="*ln_f*", lazy=True).loss == pytest.approx(
        own, rel=1e-6
    )  # which the library rounds to float32
    with pytest.raises(hk.InputError, match="with loss=None the weights of several batches are unknown"):
        hk.hessian(model, [{"input_ids": ids, "labels": ids}] * 2, params="*ln_f*")


def test_a_penalty_without_value_is_part_of_the_models_own_loss():
    """At its minimum it moves no digit of the loss, and adds 2 to the diagonal of the Hessian."""

    class Anchored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()
            self.anchor = self.model.transformer.ln_f.weight.detach().clone()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            result = self.model(input_ids=input_ids, labels=labels)
            if labels is not None:
                result.loss = result.loss + (self.model.transformer.ln_f.weight - self.anchor).square().sum()
            return result

    model, ids = Anchored(), torch.tensor([[2, 3, 4, 5]])
    data, params = {"input_ids": ids, "labels": ids}, "*ln_f.weight"
    without = hk.hessian(model, data, loss="cross_entropy", params=params).matrix
    assert error(hk.hessian(model, data, params=params).matrix, without + 2 * torch.eye(4).double()) <= 1e-6  # float32 on the way


def test_first_contact_is_told_what_to_do():
    ids = torch.tensor([[2, 3, 4, 5]])
    with pytest.raises(hk.InputError, match=r"^hessian: call model\.eval\(\) first: 'transformer.drop' is a dropout layer"):
        hk.hessian(gpt2().train(), {"input_ids": ids, "labels": ids})
    with pytest.raises(hk.InputError, match=r"target is torch.int64, .* pass loss='cross_entropy' for labels of classes"):
        hk.hessian(nn.Linear(3, 4), torch.ones(2, 3), torch.tensor([1, 2]))
    with pytest.warns(UserWarning, match="the target is a copy of the inputs, and no label of a pair is shifted"):
        hk.hessian(gpt2(), ids, ids, loss="cross_entropy", params="*ln_f*", lazy=True)


def test_every_call_takes_a_loader():
    model, (H, loss) = gpt2(), expected("causal")
    data: dict[str, Any] = {"loss": "cross_entropy"}
    readings = {name: READINGS[name] for name in ("hessian_diagonal", "frobenius_norms")}
    assert_readings(H, model, causal(2), readings=readings, tolerance=EXACT, floor=EXACT, **data)
    measured = hk.approximations(model, causal(2), of=["diagonal"], **data)
    assert measured.frobenius == pytest.approx(float(H.norm()), rel=1e-10)
    along = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    slices = hk.loss_slices(model, causal(2), along=along, points=3, **data).slices
    assert float(slices[0].losses[1]) == pytest.approx(loss, rel=1e-12)
    assert hk.depth_diagnostics(model, causal(2), what=("variance",)).stream.tokens == sum(map(len, ROWS))
    values, spectrum = torch.linalg.eigvalsh(H), hk.spectrum(model, causal(2), k=1, bottom=1, **data)
    assert spectrum.eigenvalues.tolist() == pytest.approx([float(values[-1]), float(values[0])], rel=1e-6)


def test_labels_at_their_own_places():
    """Of a masked model, which does not predict the next token."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 7}
    model = hf.BertForMaskedLM(hf.BertConfig(**sizes, pad_token_id=0, initializer_range=0.5)).double().eval()
    ids, labels = torch.tensor([[1, 3, 4], [1, 6, 2]]), torch.tensor([[2, -100, 4], [5, -100, 2]])
    data: dict[str, Any] = {"loss": "cross_entropy", "params": ["*attention*"]}
    found = hk.hessian(model, [{"input_ids": ids, "labels": labels}], **data)
    assert error(found.matrix, hk.hessian(model, {"input_ids": ids}, labels, **data).matrix) <= EXACT


def test_one_batch_of_a_collator():
    model, batch = gpt2(), next(iter(causal(5)))
    H, loss = expected("causal")
    assert error(hk.hessian(model, batch, loss="cross_entropy").matrix, H) <= EXACT
    assert error(hk.hessian_function(model, batch, loss="cross_entropy")().matrix, H) <= EXACT
    report = hk.check(
        model, batch, loss="cross_entropy", params=["*attn*"], against=("reverse-over-reverse", "jvp(grad)"), directions=1
    )
    assert report
    assert report.hessian.loss == pytest.approx(loss, rel=1e-13)


def test_a_product_tells_how_many_batches_are_done():
    seen: list[tuple[int, int]] = []
    operator = hk.hessian_operator(gpt2(), causal(2), loss="cross_entropy", progress=lambda *at: seen.append(at))
    seen.clear()
    operator @ torch.ones(operator.shape[0], dtype=torch.float64)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_micro_batch_keeps_no_values_of_any_batch():
    kept = {}
    for options in ({}, {"micro_batch": 4}):
        for number in (1, 3):
            data = [{"input_ids": x, "labels": x} for x in torch.randint(7, (number, 4, 8))]
            with Meter() as meter:
                operator = hk.hessian_operator(gpt2(), data, loss="cross_entropy", **options)
            kept[bool(options), number] = meter.live
            del operator
    growth = {micro: kept[micro, 3] - kept[micro, 1] for micro in (False, True)}
    assert growth[True] < growth[False] / 10


X, T = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
PAIRS = TensorDataset(X, T)


class Stream(IterableDataset[Any]):
    """Batches without an end, or so many of them."""

    drawn = 0

    def __init__(self, number: int | None = None) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        for k in itertools.count():
            if k == self.number:
                return
            Stream.drawn += 1
            yield X[:2], T[:2]


class Lying:
    """An iterable of more batches than its length."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((X[:2], T[:2]))


ENDLESS: dict[str, tuple[Callable[[], Any], str]] = {
    "cycle": (lambda: itertools.cycle([(X, T)]), "data is a cycle without a length, which holds more than 1,000 batches"),
    "generator": (lambda: iter(Stream()), "a generator without a length, which holds more than 1,000 batches: it may not end"),
    "loader of a stream": (lambda: DataLoader(Stream(), batch_size=None), "a DataLoader without a length"),
    "length": (Lying, "a Lying of 2 batches by its len\\(\\), which goes on after them, as several epochs do; pass a list"),
    "with replacement": (
        lambda: DataLoader(PAIRS, 2, sampler=RandomSampler(PAIRS, replacement=True)),
        "the RandomSampler of the DataLoader draws samples more than once.*shuffle=False, or list\\(data\\)",
    ),
    "by weights": (lambda: DataLoader(PAIRS, 2, sampler=WeightedRandomSampler([1.0] * 6, 6)), "the WeightedRandomSampler of"),
    "rows of a dataset": (lambda: [{"input_ids": row} for row in ROWS], "batch 0 is a mapping without a tensor .*collate_fn=..."),
}
CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "hessian": lambda m, data: hk.hessian(m, data),
    "hessian_operator": lambda m, data: hk.hessian_operator(m, data),
    "hessian_diagonal": lambda m, data: hk.hessian_diagonal(m, data),
    "sharpness": lambda m, data: hk.sharpness(m, data, loss="mse"),
}


@pytest.mark.parametrize(
    ("case", "call"), [(case, call) for k, case in enumerate(ENDLESS) for n, call in enumerate(CALLS) if n == 0 or n % 3 == k % 3]
)
def test_data_without_an_end_are_an_error(case, call):
    make, message = ENDLESS[case]
    Stream.drawn = 0
    assert_one_clear_error(lambda: CALLS[call](nn.Linear(4, 3).double(), make()), message)
    assert Stream.drawn <= reading.MAX_BATCHES + 1


def test_data_that_fill_the_memory_before_their_end(monkeypatch):
    monkeypatch.setattr(reading, "available_memory", lambda device: 2**14)
    with pytest.raises(hk.InputError, match=r"a generator without a length, which has .* KiB in its first .* batches"):
        hk.hessian(nn.Linear(4, 3).double(), iter(Stream()))
    assert Stream.drawn < reading.MAX_BATCHES
