"""What torch's losses divide their sums by, read off the losses themselves: mean = sum / count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, cross_entropy, draw, reverse_over_reverse
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.engine.problem.calling import known_count, known_reduction, same_as

LABELS = torch.tensor([[0, 2, -100], [1, -100, -100], [2, 2, 0], [1, 0, 2]])
WEIGHT = torch.tensor([0.5, 2.0, 1.25]).double()
LOGITS = draw(4, 3, 3)
OPTIONS: list[tuple[type[nn.Module], dict[str, Any], Tensor]] = [
    (nn.MSELoss, {}, draw(4, 3, 3, seed=2)),
    (nn.L1Loss, {}, draw(4, 3, 3, seed=2)),
    (nn.HuberLoss, {"delta": 0.7}, draw(4, 3, 3, seed=2)),
    (nn.BCEWithLogitsLoss, {"pos_weight": WEIGHT}, torch.sigmoid(draw(4, 3, 3, seed=2))),
    (nn.CrossEntropyLoss, {}, LABELS),
    (nn.CrossEntropyLoss, {"ignore_index": 2}, LABELS.clamp_min(0)),
    (nn.CrossEntropyLoss, {"weight": WEIGHT}, LABELS),
    (nn.CrossEntropyLoss, {"weight": WEIGHT, "label_smoothing": 0.1}, LABELS),
    (nn.CrossEntropyLoss, {"label_smoothing": 0.1}, LABELS),
    (nn.CrossEntropyLoss, {"weight": WEIGHT}, torch.softmax(draw(4, 3, 3, seed=2), 1)),
    (nn.NLLLoss, {"weight": WEIGHT, "ignore_index": 0}, LABELS.clamp_min(0)),
]


@pytest.mark.parametrize("case", range(len(OPTIONS)))
def test_mean_is_sum_by_count(case: int) -> None:
    kind, options, target = OPTIONS[case]
    mean, total = kind(**options), kind(**options, reduction="sum")
    assert float(total(LOGITS, target) / mean(LOGITS, target)) == pytest.approx(known_count(mean, target), rel=1e-14)
    assert (known_reduction(mean), known_reduction(total)) == ("mean", "sum")


class Own(nn.MSELoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) * len(input)


@pytest.mark.parametrize("loss", [None, lambda z, t: z.sum(), Own(), nn.KLDivLoss(reduction="batchmean"), []])
def test_nothing_is_guessed(loss: Any) -> None:
    assert known_count(loss, LABELS) is None
    assert known_reduction(loss) is None
    assert known_count("mse", [1.0]) is None


def test_only_what_equals_a_named_loss_is_taken_for_it() -> None:
    assert same_as(nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)) is None  # torch refuses these
    z, rows, labels = LOGITS, LOGITS[0], torch.tensor([0, -100, 2])
    assert same_as(nn.MSELoss(), z, z + 1) == same_as(F.mse_loss, z, z) == "mse"
    assert same_as(F.cross_entropy, rows, labels) == "cross_entropy"
    for loss, outputs, target in (
        (nn.MSELoss(), z, z[:1]),
        (nn.MSELoss(), z, z.float()),
        (nn.MSELoss(reduction="sum"), z, z),
        (nn.CrossEntropyLoss(), z, LABELS),  # classes on axis 1
        (nn.CrossEntropyLoss(), rows, torch.softmax(rows, -1)),
        (nn.CrossEntropyLoss(WEIGHT), rows, labels),
        (nn.CrossEntropyLoss(ignore_index=0), rows, labels),
        (nn.CrossEntropyLoss(label_smoothing=0.1), rows, labels),
        (nn.L1Loss(), z, z),
        (lambda z, t: z, z, z),
    ):
        assert same_as(loss, outputs, target) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_labels_of_any_integer_type(dtype: torch.dtype) -> None:
    module, x, labels = Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 3)), draw(5, 4), torch.tensor([0, 2, 1, 1, 0])
    expected = reverse_over_reverse(module, x, labels, cross_entropy)
    narrow = labels.to(dtype)
    for found in (
        hk.hessian(module, x, narrow, loss="cross_entropy").matrix,
        hk.hessian_operator(module, x, narrow, loss="cross_entropy").to_matrix(),
    ):
        assert float((found - expected).abs().max()) <= 1e-12 * float(expected.abs().max())
    assert narrow.dtype == dtype
    assert hk.check(module, x, narrow, loss="cross_entropy")
    for kind in ("fisher-mc", "fisher-empirical"):
        wide = hk.hessian_operator(module, x, labels, loss="cross_entropy", kind=kind).to_matrix()
        assert torch.equal(hk.hessian_operator(module, x, narrow, loss="cross_entropy", kind=kind).to_matrix(), wide)
    for loss in (nn.CrossEntropyLoss(weight=draw(3).exp()), lambda z, t: F.nll_loss(z.log_softmax(-1), t)):
        if dtype is torch.uint8:  # which torch's own losses take
            found, wide = (hk.hessian(module, x, t, loss=loss).matrix for t in (narrow, labels))
            assert torch.equal(found, wide)
        else:
            with pytest.raises(hk.InputError, match="expected target dtype to be Long or Byte"):
                hk.hessian(module, x, narrow, loss=loss)


WITHOUT_SECOND_DERIVATIVE: dict[str, tuple[Any, Tensor, str]] = {
    "CTC": (
        lambda z, t: F.ctc_loss(z.log_softmax(-1).unsqueeze(1), t, torch.tensor([5]), torch.tensor([2])),
        torch.tensor([[1, 2]]),
        "aten.ctc_loss",
    ),
    "multi-margin": (nn.MultiMarginLoss(), torch.tensor([0, 2, 1, 1, 0]), "aten.multi_margin_loss"),
    "multi-label margin": (nn.MultiLabelMarginLoss(), torch.tensor([[0, 2, -1]] * 5), "aten.multilabel_margin_loss"),
}


@pytest.mark.parametrize("name", WITHOUT_SECOND_DERIVATIVE)
def test_losses_of_which_torch_has_no_second_derivative(name: str) -> None:
    loss, target, operation = WITHOUT_SECOND_DERIVATIVE[name]
    module, x = Formula(lambda s, x: torch.tanh(x @ s.W), W=(4, 3)), draw(5, 4)
    with pytest.raises(hk.TraceError, match=f"{operation}.* has no closed form here, and torch cannot differentiate it twice"):
        hk.hessian(module, x, target, loss=loss)
    with pytest.raises(RuntimeError, match=r"derivative for .*backward is not implemented"):
        reverse_over_reverse(module, x, target, loss)
