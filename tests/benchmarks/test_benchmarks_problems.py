"""The problems that the benchmarks pose, and the peers that the closed form is measured against: each computes what it says."""

from __future__ import annotations

import pytest
import torch
from benchmark_cases import closed, whole

from benchmarks.contest import contestants
from benchmarks.entries import Ring
from benchmarks.gpt2 import TinyGPT2
from benchmarks.problems import GPT2, SIZES, Case, make, parameters_of


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


@pytest.mark.slow
def test_every_chunked_peer_takes_a_language_model() -> None:
    torch.manual_seed(0)
    model = TinyGPT2(5, 3, d_model=4, n_heads=2, n_layers=1, tied=True).double()
    ids = torch.randint(5, (4, 4))
    case = Case("gpt2", model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), "cross_entropy")
    ring = Ring(case, whole(case), 0.05, "cpu")
    peers = [peer for peer in contestants() if peer.matrix is None and not peer.missing(case)]
    statuses = {peer.name: ring.enter(peer).status for peer in peers}
    assert statuses["vmap(jvp(grad))"] == statuses["reverse over reverse"] == "right"
    assert set(statuses.values()) <= {"right", "wrong"}  # none fails; some lose a term in the norms
    assert ring.verdict(ring.error(closed(case)()[:, ring.picks].T)) == "right"
