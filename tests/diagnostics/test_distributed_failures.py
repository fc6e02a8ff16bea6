"""A rank that is killed, stands still or fails: the others stop with one line that names it, and do not wait beyond the time-out."""

from __future__ import annotations

from typing import Any

import distributed_worker as worker
import pytest
import torch
from test_distributed import found_by_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")]


LOST = "RankError: sharpness: rank {} of 2 lost the others after "
SAID = {  # way -> the rank that is left, words of its message, seconds at least
    "last": (0, "rank 1 did not arrive (killed, stuck, or too far behind); read that rank's log", 0.0),
    "first": (1, "the store of the process group, which knows who is missing, does not answer", 0.0),
    "stuck": (0, "rank 1 did not arrive", worker.STUCK),
    "tokens": (0, ": rank 1 stopped with InputError: TokenEmbedding: token ids from 100 to ", 0.0),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by_ranks(tmp_path_factory.mktemp("failures"), 2, *SAID)


@pytest.mark.parametrize("how", SAID)
def test_the_rank_that_is_left_names_the_other_one(said: dict[str, Any], how: str) -> None:
    """At once where a rank is killed (``"first"`` holds the store) or fails; after its time-out where it is stuck."""
    left, words, least = SAID[how]
    found = said[f"{how}-{left}"]
    assert found["said"].startswith(LOST.format(left))
    assert words in found["said"]
    assert "\n" not in found["said"]
    assert least <= found["seconds"] < 30  # the group's time-out is 60
