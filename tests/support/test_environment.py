"""How many threads the command line takes: the cores that other programs hold are left to them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from hessiankit.support import environment


@pytest.fixture(autouse=True)
def two_threads_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_version_is_that_of_the_code_it_names() -> None:
    versions = {
        environment.code_version(name) for name in ("hessiankit/__init__.py", "hessiankit/cli/__init__.py", "derivations")
    }
    assert len(versions) == 3
    assert environment.code_version("derivations") in versions


@pytest.mark.parametrize(
    ("idle", "threads"),
    [((18, 17, 0), 2), ((1, 17, 20), 1), ((0, 1, 20), 1)],
    ids=["both are idle", "one is busy", "both are busy, and a core that is not ours is idle"],
)
def test_threads_are_the_idle_cores(idle: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([dict.fromkeys(range(3), (0, 0)), {core: (share, 20) for core, share in enumerate(idle)}])
    monkeypatch.setattr(environment, "_ticks", lambda: next(seen))
    environment.take_free_cores()
    assert torch.get_num_threads() == threads


def test_whoever_says_how_many_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(environment, "_idle_cores", lambda: 0)
    environment.take_free_cores()
    assert torch.get_num_threads() == 2


def test_a_busy_core_is_seen() -> None:
    assert 0 <= environment._idle_cores() <= (os.cpu_count() or 1)
