"""The problems that the benchmarks pose, and the peers that the closed form is measured against: each computes what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmark_cases import closed, whole
from torch import Tensor, nn

from benchmarks.contest import contestants
from benchmarks.entries import Ring
from benchmarks.gpt2 import TinyGPT2
from benchmarks.packaged import installed, jax_hessian
from benchmarks.peers import JVP, compiled, plain_columns
from benchmarks.problems import GPT2, SIZES, Case, make, parameters_of
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


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_every_chunked_peer_takes_a_language_model(tied: bool) -> None:
    torch.manual_seed(0)
    model = TinyGPT2(5, 3, d_model=4, n_heads=2, n_layers=1, tied=tied).double()
    ids = torch.randint(5, (4, 4))
    case = Case("gpt2", model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), "cross_entropy")
    ring = Ring(case, whole(case), 0.05, "cpu")
    peers = [peer for peer in contestants() if peer.matrix is None and not peer.missing(case)]
    statuses = {peer.name: ring.enter(peer).status for peer in peers}
    assert statuses["vmap(jvp(grad))"] == statuses["reverse over reverse"] == "right"
    assert set(statuses.values()) <= {"right", "wrong"}  # none fails; some lose a term in the norms
    assert ring.verdict(ring.error(closed(case)()[:, ring.picks].T)) == "right"


def test_compiled_peer_pads_to_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compile_nothing(function: Callable[..., Tensor], **_: Any) -> Callable[..., Tensor]:
        def run(theta: Tensor, V: Tensor) -> Tensor:
            seen.append(len(V))
            return function(theta, V)

        return run

    monkeypatch.setattr(torch, "compile", compile_nothing)
    case = make("tiny", 1)
    entry = Ring(case, whole(case), 1.0, "cpu").enter(compiled(JVP, case, 24))
    assert (entry.status, entry.chunk, set(seen)) == ("right", 24, {24})


@pytest.mark.skipif(not installed("jax"), reason="jax is not installed")
def test_the_block_in_jax_is_the_block() -> None:
    matrix = jax_hessian().matrix
    assert matrix is not None
    for name in ("tiny-affine-x2", "tiny"):
        case = make(name, 2)
        columns = list(range(0, case.size, 7))
        torch.testing.assert_close(matrix(case)[:, columns].T, plain_columns(case, columns), rtol=0, atol=1e-12)
