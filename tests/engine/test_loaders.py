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
from curvature_reference import gradient_twice
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import hessiankit as hk
from hessiankit.engine.problem import batches
from hessiankit.partition import Part

EXACT = 1e-10
SPECIAL = {"vocab_size": 7, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
ROWS = [[2, 3, 4], [5, 6, 2, 3, 4, 6], [4, 4], [3, 2, 5, 6, 6], [1, 2, 3, 3]]
CUTS = (1, 2, 3, 5)
"""Sizes of a batch: with a ragged last one, with rows padded to several lengths, and all at once."""


def tokenizer() -> Any:
    words = Tokenizer(WordLevel({f"w{k}": k for k in range(7)}, unk_token="w1"))
    return hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w1", mask_token="w1")


def gpt2(kind: str = "GPT2LMHeadModel", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2, "n_inner": 5, "initializer_range": 0.5}
    return getattr(hf, kind)(hf.GPT2Config(**SPECIAL, **sizes, **options)).double().eval()


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "intermediate_size": 5, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(vocab_size=7, pad_token_id=0, max_position_embeddings=8, initializer_range=0.5, **sizes)
    return hf.BertForMaskedLM(config).double().eval()


def causal(size: int, **options: Any) -> DataLoader[Any]:
    collate = hf.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    return DataLoader([{"input_ids": row} for row in ROWS], batch_size=size, collate_fn=collate, **options)


def masked(size: int) -> DataLoader[Any]:
    """Rows whose labels are set by hand: those at their own places, of which two a row count."""
    rows = [{"input_ids": [1, *row[1:]], "labels": [row[0], *[-100] * (len(row) - 2), row[-1]]} for row in ROWS]

    def collate(chosen: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        batch = tokenizer().pad([{"input_ids": row["input_ids"]} for row in chosen], return_tensors="pt")
        width = batch["input_ids"].shape[1]
        return {**batch, "labels": torch.tensor([row["labels"] + [-100] * (width - len(row["labels"])) for row in chosen])}

    return DataLoader(rows, batch_size=size, collate_fn=collate)


def classes(size: int) -> DataLoader[Any]:
    rows = [{"input_ids": row, "label": len(row) % 3} for row in ROWS]
    return DataLoader(rows, batch_size=size, collate_fn=hf.DataCollatorWithPadding(tokenizer()))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], DataLoader[Any]]]] = {
    "causal": (gpt2, causal),
    "masked": (bert, masked),
    "classes": (lambda: gpt2("GPT2ForSequenceClassification", num_labels=3), classes),
}


@cache
def expected(name: str) -> tuple[Tensor, float]:
    """The Hessian and the loss, one row without padding at a time, by torch's double backward."""
    make, _ = CASES[name]
    model = make()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        terms, count = torch.zeros((), dtype=torch.float64), 0
        for row in ROWS:
            if name == "masked":
                logits = model(torch.tensor([[1, *row[1:]]])).logits[0][[0, -1]]
                labels = torch.tensor([row[0], row[-1]])
            else:
                logits = model(torch.tensor([row])).logits[0]
                logits = logits[:-1] if name == "causal" else logits.unsqueeze(0)
                labels = torch.tensor(row[1:] if name == "causal" else [len(row) % 3])
            terms = terms + F.cross_entropy(logits, labels, reduction="sum")
            count += len(labels)
        return gradient_twice(terms / count, list(model.parameters())), float((terms / count).detach())


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


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
    report = hk.sharpness(model, loader(2), kind="hessian", parts=_one_type(model))
    assert report.types["Other"].value == pytest.approx(float(H.diagonal().mean()), rel=1e-9)


def _one_type(model: nn.Module) -> list[Part]:
    return [Part(name, "Other", "", None, "", p.numel()) for name, p in model.named_parameters()]


def test_every_call_takes_a_loader():
    model, (H, loss) = gpt2(), expected("causal")
    data: dict[str, Any] = {"loss": "cross_entropy"}
    diagonal = hk.hessian_diagonal(model, causal(2), **data)
    assert error(torch.cat([x.flatten() for x in diagonal.values.values()]), H.diagonal()) <= EXACT
    norms = hk.frobenius_norms(model, causal(2), **data)
    first = next(iter(norms.shapes))
    size = model.get_parameter(first).numel()
    assert norms.blocks[first, first] == pytest.approx(float(H[:size, :size].norm()), rel=1e-10)
    measured = hk.approximations(model, causal(2), of=["diagonal"], **data)
    assert measured.frobenius == pytest.approx(float(H.norm()), rel=1e-10)
    along = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    slices = hk.loss_slices(model, causal(2), along=along, points=3, **data).slices
    assert float(slices[0].losses[1]) == pytest.approx(loss, rel=1e-12)
    stream = hk.depth_diagnostics(model, causal(2), what=("variance",)).stream
    assert stream.tokens == sum(map(len, ROWS))
    spectrum = hk.spectrum(model, causal(2), k=1, **data)
    values = torch.linalg.eigvalsh(H)
    assert spectrum.eigenvalues.tolist() == pytest.approx([float(values[-1]), float(values[0])], rel=1e-6)


def test_one_batch_of_a_collator():
    model, batch = gpt2(), next(iter(causal(5)))
    H, loss = expected("causal")
    assert error(hk.hessian(model, batch, loss="cross_entropy").matrix, H) <= EXACT
    assert error(hk.hessian_function(model, batch, loss="cross_entropy")().matrix, H) <= EXACT
    report = hk.check(model, batch, loss="cross_entropy", against=["reverse-over-reverse", "jvp(grad)"])
    assert report
    assert report.hessian.loss == pytest.approx(loss, rel=1e-13)


def test_the_model_s_own_loss_takes_weights():
    model, (H, _) = gpt2(), expected("causal")
    with pytest.raises(hk.InputError, match="loss=None the weights of several batches are unknown"):
        hk.hessian(model, causal(2), loss=None)
    found = hk.hessian(model, causal(2), loss=None, weights=lambda batch, _: (batch["labels"][:, 1:] != -100).sum())
    assert error(found.matrix, H) <= 1e-5  # transformers computes its loss in float32


def test_a_monitor_reads_a_loader_once(tmp_path):
    model, (H, loss) = gpt2(), expected("causal")
    monitor = hk.Monitor(model, causal(2), tmp_path / "run.jsonl", eigenvalue=True, eigenvalue_tol=1e-8)
    record = monitor.step(0)
    assert record["loss"] == pytest.approx(loss, rel=1e-12)
    assert record["eigenvalue"]["value"] == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)


def test_a_product_tells_how_many_batches_are_done():
    seen: list[tuple[int, int]] = []
    operator = hk.hessian_operator(gpt2(), causal(2), loss="cross_entropy", progress=lambda *at: seen.append(at))
    seen.clear()
    operator @ torch.ones(operator.shape[0], dtype=torch.float64)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_micro_batch_keeps_no_values_of_any_batch():
    kept = {}
    for options in ({}, {"micro_batch": 4}):
        for number in (2, 10):
            data = [{"input_ids": x, "labels": x} for x in torch.randint(7, (number, 4, 8))]
            kept[bool(options), number] = _bytes(hk.hessian_operator(gpt2(), data, loss="cross_entropy", **options))
    growth = {micro: kept[micro, 10] - kept[micro, 2] for micro in (False, True)}
    assert growth[True] < growth[False] / 10


def _bytes(x: object) -> int:
    """The bytes of all tensors that an object holds, each storage once."""
    import gc

    storages: dict[int, int] = {}
    seen, queue = set(), [x]
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, type) or type(one).__name__ in ("module", "function", "builtin_function_or_method"):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            queue += gc.get_referents(one)
    return sum(storages.values())


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
    "cycle of a loader": (lambda: itertools.cycle(DataLoader(PAIRS, 2)), "a cycle without a length"),
    "generator": (lambda: iter(Stream()), "a generator without a length, which holds more than 1,000 batches: it may not end"),
    "loader of a stream": (lambda: DataLoader(Stream(), batch_size=None), "a DataLoader without a length"),
    "length": (Lying, "a Lying of 2 batches by its len\\(\\), which goes on after them, as several epochs do; pass a list"),
    "with replacement": (
        lambda: DataLoader(PAIRS, 2, sampler=RandomSampler(PAIRS, replacement=True)),
        "the RandomSampler of the DataLoader draws samples more than once.*shuffle=False, or list\\(data\\)",
    ),
    "two epochs": (lambda: DataLoader(PAIRS, 2, sampler=RandomSampler(PAIRS, num_samples=12)), "draws samples more than once"),
    "by weights": (lambda: DataLoader(PAIRS, 2, sampler=WeightedRandomSampler([1.0] * 6, 6)), "the WeightedRandomSampler of"),
    "rows of a dataset": (lambda: [{"input_ids": row} for row in ROWS], "batch 0 is a mapping without a tensor .*collate_fn=..."),
}
CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "hessian": lambda m, data: hk.hessian(m, data),
    "hessian_operator": lambda m, data: hk.hessian_operator(m, data),
    "hessian_diagonal": lambda m, data: hk.hessian_diagonal(m, data),
    "spectrum": lambda m, data: hk.spectrum(m, data),
    "sharpness": lambda m, data: hk.sharpness(m, data, loss="mse"),
    "loss of its own": lambda m, data: hk.hessian(m, data, loss=lambda z, t: (z - t).cosh().log().sum(), reduction="sum"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", ENDLESS)
def test_data_without_an_end_are_an_error(case, call):
    make, message = ENDLESS[case]
    Stream.drawn = 0
    with pytest.raises(hk.InputError, match=message) as caught:
        CALLS[call](nn.Linear(4, 3).double(), make())
    assert "\n" not in str(caught.value)
    assert Stream.drawn <= batches.MOST + 1


def test_a_generator_with_an_end_is_read_whatever_it_does_to_its_memory():
    whole = hk.hessian(linear := nn.Linear(4, 3).double(), X, T)
    again = hk.hessian(linear, DataLoader(Stream(3), batch_size=None))
    assert error(again.matrix, hk.hessian(linear, X[:2], T[:2]).matrix) <= EXACT
    assert error(hk.hessian(linear, list(DataLoader(PAIRS, 4, shuffle=True))).matrix, whole.matrix) <= EXACT


def test_data_that_fill_the_memory_before_their_end(monkeypatch):
    monkeypatch.setattr(batches, "available_memory", lambda device: 2**14)
    with pytest.raises(hk.InputError, match=r"a generator without a length, which has .* KiB in its first .* batches"):
        hk.hessian(nn.Linear(4, 3).double(), iter(Stream()))
    assert Stream.drawn < batches.MOST


def test_weights_without_an_end():
    with pytest.raises(hk.InputError, match="weights has 1000 numbers more than there are batches"):
        hk.hessian(nn.Linear(4, 3).double(), DataLoader(PAIRS, 2), loss=F.l1_loss, weights=itertools.repeat(1.0))
