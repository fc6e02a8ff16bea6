"""hessiankit.training.distributed in a program of one process, what it refuses there, and the pieces that need no other rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from distributed_worker import MICRO_BATCH, OPTIONS, model, own, sequences
from torch import nn

import hessiankit as hk
from hessiankit.support.errors import InputError
from hessiankit.training import distributed as hd
from hessiankit.training.digest import digest
from hessiankit.training.ranks import Ranks
from hessiankit.training.sharpness import SharpnessReport, report_of, sharpness
from hessiankit.training.sharpness.options import SharpnessOptions
from hessiankit.training.sharpness.over_ranks import replicates_of_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def over_ranks(made: nn.Module, data: Any, target: Any = None, **options: Any) -> SharpnessReport:
    """Measure by all processes of the program, which are this one."""
    return report_of(replicates_of_ranks(made, data, target, partial(SharpnessOptions, **options), None))


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids)


def test_one_process_measures_what_sharpness_measures() -> None:
    tokens, labels = sequences()
    block, x = hk.TransformerBlock(4, 3).double(), torch.arange(24, dtype=torch.float64).reshape(2, 3, 4).sin()
    target = torch.full_like(x, -100.0)  # a number like others, where nothing is a label
    pairs = list(zip(tokens.split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True))
    for made, data, options in (
        (model(), (tokens, labels), {}),
        (model(), pairs, {}),
        (Logits(), {"input_ids": tokens, "labels": tokens}, {"micro_batch": MICRO_BATCH}),
        (block, (x, target), {"loss": "mse"}),
    ):
        expected = own(sharpness(made, data, **options, **OPTIONS))
        assert own(over_ranks(made, iter(data) if data is pairs else data, **options, **OPTIONS)) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_digests_tell_tensors_apart(dtype: torch.dtype) -> None:
    drawn = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    x = drawn > 0 if dtype == torch.bool else (3 * drawn).to(dtype)
    other = x.clone()
    other[2, 49] = not other[2, 49] if dtype == torch.bool else other[2, 49] + 1
    assert len({digest(x), digest(x.flip(1)), digest(x.flip(0)), digest(other), digest(x.reshape(50, 3))}) == 5
    assert digest(x.T.contiguous().T) == digest(x)


@pytest.mark.parametrize("kind", ["hessian", "ggn"])
def test_operator_of_one_process(kind: str) -> None:
    tokens, labels = sequences()
    pairs = list(zip(tokens.split(3), labels.split(3), strict=True))
    expected = hk.hessian_operator(model().eval(), pairs, loss="cross_entropy", kind=kind, params="blocks.0.*")
    found = hd.hessian_operator(model().eval(), pairs, loss="cross_entropy", kind=kind, params="blocks.0.*")
    v = torch.randn(found.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert float((found @ v - expected @ v).abs().max()) <= 1e-14 * float((expected @ v).abs().max())
    assert found.loss == pytest.approx(expected.loss, rel=1e-15)


def test_weights_of_losses_that_are_not_known() -> None:
    tokens, labels = sequences()
    cut = [(tokens[:3], labels[:3]), (tokens[3:4], labels[3:4]), (tokens[4:], labels[4:])]
    counts = [float((y != -100).sum()) for _, y in cut]

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    whole = hk.hessian_operator(model().eval(), tokens, labels, loss="cross_entropy", params="final_norm.*").to_matrix()
    some = hk.hessian_operator(model().eval(), [cut[0], cut[2]], loss="cross_entropy", params="final_norm.*").to_matrix()
    for weights, expected in (
        (counts, whole),
        ([counts[0], 0.0, counts[2]], some),
        (lambda _, y: float((y != -100).sum()), whole),
    ):
        found = hd.hessian_operator(model().eval(), cut, loss=loss, params="final_norm.*", weights=weights).to_matrix()
        assert float((found - expected).abs().max()) <= 1e-13 * float(expected.abs().max())
    with pytest.raises(InputError, match="weights has 2 numbers for 3 batches"):
        hd.hessian_operator(model().eval(), cut, loss=loss, weights=counts[:2])


def test_other_mistakes() -> None:
    with pytest.raises(InputError, match="no rank holds a label that counts"):
        over_ranks(model(), [], **OPTIONS)
    with pytest.raises(InputError, match="no rank holds a batch that counts"):
        hd.hessian_operator(model(), [], loss="cross_entropy")
    with pytest.raises(InputError, match="k=7, and"):
        Ranks("example").together(lambda: (_ for _ in ()).throw(InputError("example: k=7, and")))
    with pytest.raises(hd.RankError, match="example: KeyError: 'x'"):
        Ranks("example").together(lambda: {}["x"])
