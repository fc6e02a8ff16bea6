"""The problems that the benchmarks pose: sizes, determinism, and the loss as a function of one vector."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.problems import GPT2, SIZES, make, parameters_of
from hessiankit.support.errors import InputError


def test_problems_have_the_papers_sizes() -> None:
    assert {name: parameters_of(name) for name in SIZES} == {
        "tiny": 112,
        "small": 704,
        "paper-mnist": 2816,
        "medium": 11264,
        "large": 720896,
    }
    for name in ("tiny", "small-affine", "paper-mnist", "L5d4f6-x2", *GPT2):
        case = make(name, 2, "float32")
        assert case.size == parameters_of(name) == sum(p.numel() for p in case.module.parameters())
        assert {p.dtype for p in case.parameters.values()} == {torch.float32}
    assert make("gpt2-untied", 1).size - make("gpt2-tied", 1).size == 64 * 32


def test_problems_are_the_same_every_time_and_look_at_the_future_never() -> None:
    first, second = (make("small-affine", 2) for _ in range(2))
    assert torch.equal(first.theta, second.theta)
    assert torch.equal(first.inputs, second.inputs)
    model, ids = make("gpt2-tied", 1).module, make("gpt2-tied", 1).inputs
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 64
    assert torch.equal(model(ids)[0, :-1], model(changed)[0, :-1])
    with pytest.raises(InputError, match="no problem is called 'huge'; there are: tiny, "):
        make("huge", 1)


def test_flat_loss_is_the_loss() -> None:
    for name, loss in (("tiny-affine", nn.MSELoss()), ("gpt2-tied", None)):
        case = make(name, 2)
        out = case.module(case.inputs)
        expected = loss(out, case.target) if loss else nn.functional.cross_entropy(out.transpose(1, 2), case.target)
        torch.testing.assert_close(case.flat_loss(case.theta), expected, rtol=1e-12, atol=0)
