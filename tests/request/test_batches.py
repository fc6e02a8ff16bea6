"""Many batches give the Hessian of one big batch: unequal sizes and lengths, padding, ignored labels, mean and sum, every loss of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_one_clear_error, cross_entropy, draw, reverse_over_reverse
from loss_reference import CUTS, Padded, by_autograd, sequences, token_loss
from operator_cases import EXACT, error
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hessiankit as hk

IDS, MASK, LABELS = sequences()
PAIRS = [({"input_ids": IDS[rows, :n], "attention_mask": MASK[rows, :n]}, LABELS[rows, :n]) for rows, n in CUTS]
BOTH = [hk.hessian, hk.hessian_operator]


def matrix(found: Any) -> Tensor:
    return found.to_matrix() if isinstance(found, hk.HessianOperator) else found.matrix


def regression() -> nn.Module:
    return Formula(lambda m, x: torch.tanh(m.lin(x)), lin=nn.Linear(4, 3))


X, T = draw(6, 4), draw(6, 3, seed=2)
SPLIT = list(zip(X.split([1, 3, 2]), T.split([1, 3, 2]), strict=True))
CLASSES = torch.tensor([0, 2, -100, 1, -100, 2])


@pytest.mark.parametrize("call", BOTH)
def test_padded_sequences_of_unequal_lengths(call: Callable[..., Any]) -> None:
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK), LABELS))
    found = call(Padded("object"), PAIRS, loss="cross_entropy")
    assert error(matrix(found), expected) <= EXACT
    assert found.loss == pytest.approx(float(token_loss(Padded()(IDS, MASK), LABELS).detach()), rel=1e-14)
    summed = call(Padded("object"), PAIRS, loss="cross_entropy", reduction="sum")
    assert error(matrix(summed), expected * (LABELS != -100).sum()) <= EXACT


@pytest.mark.parametrize("call", BOTH)
def test_module_that_returns_its_loss_with_its_own_counts(call: Callable[..., Any]) -> None:
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK)[:, :-1], LABELS[:, 1:]))
    inputs = [{**x, "labels": labels} for x, labels in PAIRS]

    def counted(batch: dict[str, Tensor], target: None) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()  # the shift drops the first label of each row

    counts = [int(counted(batch, None)) for batch in inputs]
    for data in (inputs, iter(inputs)):
        for weights in (counted, counts):
            again = inputs if data is inputs else iter(inputs)
            assert error(matrix(call(Padded("dict"), again, loss=None, weights=weights)), expected) <= EXACT
    naive = [float((batch["labels"] != -100).sum()) for batch in inputs]
    assert error(matrix(call(Padded("dict"), inputs, loss=None, weights=naive)), expected) > 1e-3  # why it is not guessed


@pytest.mark.parametrize("call", BOTH)
def test_batch_without_labels_counts_nothing(call: Callable[..., Any]) -> None:
    expected = matrix(call(Padded(), PAIRS, loss="cross_entropy"))
    empty = (PAIRS[0][0], torch.full_like(PAIRS[0][1], -100))
    for module, loss in ((Padded(), "cross_entropy"), (Transposed(), nn.CrossEntropyLoss())):
        assert error(matrix(call(module, [empty, *PAIRS, empty], loss=loss)), expected) <= EXACT
    inputs = [{**x, "labels": labels} for x, labels in [*PAIRS, empty]]
    weighted = call(Padded("loss"), inputs, loss=None, weights=[4, 5, 1, 0])  # whose loss is 0/0
    assert error(matrix(weighted), matrix(call(Padded("loss"), inputs[:3], loss=None, weights=[4, 5, 1]))) <= EXACT


class Transposed(Padded):
    """Logits (N, C, L), as torch's losses expect them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, attention_mask).mT


def test_classes_on_the_second_axis() -> None:
    """As many tokens as classes, so that only the loss says which axis is which."""
    expected = by_autograd(Padded(), lambda m: token_loss(m(IDS, MASK), LABELS))
    assert error(hk.hessian(Transposed(), (IDS, MASK), LABELS, loss=nn.CrossEntropyLoss()).matrix, expected) <= EXACT


CASES: dict[str, tuple[Any, Any]] = {
    "mse": ("mse", T),
    "HuberLoss": (nn.HuberLoss(delta=0.7), T),
    "CrossEntropyLoss, another label ignored": (nn.CrossEntropyLoss(ignore_index=2), CLASSES.clamp_min(0)),
    "CrossEntropyLoss, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
    "MSELoss, mean": (nn.MSELoss(), T),
    "cross_entropy": ("cross_entropy", CLASSES),
    "CrossEntropyLoss, mean": (nn.CrossEntropyLoss(), CLASSES),
    "CrossEntropyLoss, sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "CrossEntropyLoss, class weights": (nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.25]).double()), CLASSES),
    "CrossEntropyLoss, smoothed, class weights": (
        nn.CrossEntropyLoss(torch.tensor([0.5, 2.0, 1.25]).double(), label_smoothing=0.2),
        CLASSES,
    ),
    "CrossEntropyLoss, probabilities": (nn.CrossEntropyLoss(), torch.softmax(T, -1)),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), torch.sigmoid(T)),
    "own, weights": (lambda z, t: (z - t).cosh().log().mean(), T),
    "own, sum": (lambda z, t: (z - t).cosh().log().sum(), T),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("call", BOTH)
def test_split_equals_whole(call: Callable[..., Any], name: str) -> None:
    loss, target = CASES[name]
    reference = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}.get(loss, loss) if isinstance(loss, str) else loss
    expected = by_autograd(regression(), lambda m: reference(m(X), target))
    assert error(matrix(call(regression(), X, target, loss=loss)), expected) <= EXACT
    own = {"own, weights": {"weights": lambda x, t: len(x)}, "own, sum": {"reduction": "sum"}}.get(name, {})
    for cuts in ([1, 3, 2], [6]):
        pairs = zip(X.split(cuts), target.split(cuts), strict=True)
        assert error(matrix(call(regression(), pairs, loss=loss, **own)), expected) <= EXACT, cuts


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
def test_named_losses_summed(name: str) -> None:
    target = T if name == "mse" else CLASSES
    loss = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}[name]
    expected = by_autograd(regression(), lambda m: loss(m(X), target, reduction="sum"))
    for call in BOTH:
        assert error(matrix(call(regression(), X, target, loss=name, reduction="sum")), expected) <= EXACT
    found = hk.hessian(regression(), X, target, loss=name, reduction="sum")
    assert found.loss == pytest.approx(float(loss(regression()(X), target, reduction="sum").detach()), rel=1e-14)
    mean = hk.hessian(regression(), X, target, loss=name)
    assert error(found.outer(), mean.outer() * (T.numel() if name == "mse" else 4)) <= EXACT


def test_loader_progress_outer_part_and_one_pair() -> None:
    seen: list[tuple[int, int]] = []
    loader = DataLoader(TensorDataset(X, T), batch_size=4)
    found = hk.hessian(regression(), loader, progress=lambda *at: seen.append(at), batch_size=3)
    whole = hk.hessian(regression(), X, T)
    assert seen == [(3, 6), (4, 6), (6, 6)]
    assert error(found.matrix, whole.matrix) <= EXACT
    assert error(found.outer(), whole.outer()) <= EXACT
    assert error(found.functional(), whole.functional()) <= EXACT
    assert torch.equal(hk.hessian(regression(), (X, T)).matrix, whole.matrix)


def test_loader_that_reuses_its_memory_and_later_training_leave_the_result_alone() -> None:
    module = regression()
    expected = hk.hessian(module, X, T)
    outer, blocks = expected.outer(), expected.matrix

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        inputs, target = torch.empty(2, 4).double(), torch.empty(2, 3).double()
        for start in (0, 2, 4):
            inputs.copy_(X[start : start + 2])
            target.copy_(T[start : start + 2])
            yield inputs, target

    results = [call(module, loader(), **lazy) for call in BOTH for lazy in ({}, {"lazy": True}) if call is hk.hessian or not lazy]
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    for found in results:
        assert error(matrix(found), blocks) <= EXACT
        assert not isinstance(found, hk.Hessian) or error(found.outer(), outer) <= EXACT


BAD: dict[str, tuple[Callable[[Callable[..., Any]], object], str]] = {
    "callable": (lambda c: c(regression(), SPLIT, loss=lambda z, t: z.sum()), "the weights of several batches are unknown. Pass weights"),
    "loss=None": (lambda c: c(Padded("loss"), [{**x, "labels": y} for x, y in PAIRS], loss=None), "loss=None the weights of several"),
    "too few weights": (lambda c: c(regression(), SPLIT, loss=F.l1_loss, weights=[1, 2]), "weights ends before batch 2"),
    "too many weights": (lambda c: c(regression(), SPLIT, weights=[1, 2, 3, 4]), "weights has 1 numbers more"),
    "negative weight": (lambda c: c(regression(), SPLIT, weights=[1, -2, 3]), "weight of batch 1 is -2.0"),
    "only zeros": (lambda c: c(regression(), SPLIT, weights=[0, 0, 0]), "no batch that counts"),
    "weights of a sum": (lambda c: c(regression(), SPLIT, loss=nn.MSELoss(reduction="sum"), weights=[1, 2, 3]), "a sum over all batches needs none"),
    "contradiction": (lambda c: c(regression(), SPLIT, loss=nn.MSELoss(), reduction="sum"), "the loss has reduction='mean'"),
    "unknown reduction": (lambda c: c(regression(), SPLIT, reduction="max"), "reduction='max' is not known"),
    "not pairs": (lambda c: c(regression(), [X, X, X]), "batch 0 is a Tensor; expected a pair"),
    "wrong shape in a later batch": (lambda c: c(regression(), [*SPLIT, (X, T[:1])]), "target has shape"),
}  # fmt: skip


@pytest.mark.parametrize(("k", "case"), enumerate(BAD))
def test_one_clear_error(k: int, case: str) -> None:
    make, message = BAD[case]
    assert_one_clear_error(lambda: make(BOTH[k % 2]), message)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()])
def test_losses_of_torch_that_equal_a_named_one_are_cut_into_samples_too(loss: nn.Module) -> None:
    target = CLASSES if isinstance(loss, nn.CrossEntropyLoss) else T
    seen: list[tuple[int, int]] = []
    found = hk.hessian(regression(), X, target, loss=loss, batch_size=2, progress=lambda *at: seen.append(at))
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert error(found.matrix, by_autograd(regression(), lambda m: loss(m(X), target))) <= EXACT
    assert found.fallbacks == ()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    module, x, labels = Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 3)), draw(5, 4), torch.tensor([0, 2, 1, 1, 0])
    narrow = labels.to(dtype)
    expected = reverse_over_reverse(module, x, labels, cross_entropy)
    assert_readings(expected, module, x, narrow, loss="cross_entropy", readings=in_turn(0))
    assert narrow.dtype == dtype
    for kind in ("fisher-mc", "fisher-empirical"):
        wide = hk.hessian_operator(module, x, labels, loss="cross_entropy", kind=kind).to_matrix()
        assert torch.equal(hk.hessian_operator(module, x, narrow, loss="cross_entropy", kind=kind).to_matrix(), wide)
    own = nn.CrossEntropyLoss(weight=draw(3).exp())
    if dtype is torch.uint8:  # which torch's own losses take
        assert torch.equal(hk.hessian(module, x, narrow, loss=own).matrix, hk.hessian(module, x, labels, loss=own).matrix)
    else:
        with pytest.raises(hk.InputError, match="expected target dtype to be Long or Byte"):
            hk.hessian(module, x, narrow, loss=own)


WITHOUT_SECOND_DERIVATIVE: dict[str, tuple[Any, Tensor, str]] = {
    "CTC": (
        lambda z, t: F.ctc_loss(z.log_softmax(-1).unsqueeze(1), t, torch.tensor([5]), torch.tensor([2])),
        torch.tensor([[1, 2]]),
        "aten.ctc_loss",
    ),
    "multi-margin": (nn.MultiMarginLoss(), torch.tensor([0, 2, 1, 1, 0]), "aten.multi_margin_loss"),
}


@pytest.mark.parametrize("name", WITHOUT_SECOND_DERIVATIVE)
def test_losses_of_which_torch_has_no_second_derivative(name: str) -> None:
    loss, target, operation = WITHOUT_SECOND_DERIVATIVE[name]
    module, x = Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 3)), draw(5, 4)
    with pytest.raises(hk.TraceError, match=f"{operation}.* has no closed form here, and torch cannot differentiate it twice"):
        hk.hessian(module, x, target, loss=loss)
