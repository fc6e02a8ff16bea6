"""A rank that is killed, stands still or fails: the others stop with one line that names it, and do not wait beyond the time-out."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import distributed_worker as worker
import pytest
import torch
from test_distributed import ROOT, environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")]


def start(how: str) -> list[subprocess.Popen[str]]:
    """Start two ranks by themselves, as srun would: torchrun's agent would stop the one that is left before it can speak."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "distributed_worker.py"), "unused", how]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command, env=environment(RANK=str(rank), **place), **pipes) for rank in range(2)]  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[str, float]]:
    """Return, for each way to lose a rank, what the other one said and how long it took."""
    ways = {"last": 0, "first": 1, "stuck": 0, "tokens": 0}
    started = {how: start(how) for how in ways}
    found = {}
    try:
        for how, left in ways.items():
            out, errors = started[how][left].communicate(timeout=280)
            assert out, errors[-4000:]
            told = json.loads(out.splitlines()[-1])
            found[how] = (told["said"], told["seconds"])
    finally:
        for process in (p for pair in started.values() for p in pair):
            process.kill()
            process.communicate()
    return found


LOST = "RankError: sharpness: rank {} of 2 lost the others after "
SAID = {  # way -> the rank that is left, words of its message, seconds at least
    "last": (0, "rank 1 did not arrive (killed, stuck, or too far behind); read that rank's log", 0.0),
    "first": (1, "the store of the process group, which knows who is missing, does not answer", 0.0),
    "stuck": (0, "rank 1 did not arrive", worker.STUCK),
    "tokens": (0, ": rank 1 stopped with InputError: TokenEmbedding: token ids from 100 to ", 0.0),
}


@pytest.mark.parametrize("how", SAID)
def test_the_rank_that_is_left_names_the_other_one(said: dict[str, tuple[str, float]], how: str) -> None:
    """At once where a rank is killed (``"first"`` holds the store) or fails; after its time-out where it is stuck."""
    left, words, least = SAID[how]
    line, seconds = said[how]
    assert line.startswith(LOST.format(left))
    assert words in line
    assert "\n" not in line
    assert least <= seconds < 30  # the group's time-out is 60
