"""What every test can count on, however pytest was started and whatever is installed beside it."""

from __future__ import annotations

import gc
import os
import signal
from importlib.util import find_spec

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes of a run share the cores


def pytest_configure() -> None:
    """Let Ctrl-C be an error, as tests of it expect: what a shell starts in the background, or nohup, begins without."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of a package that is not installed where they are parametrized by its name."""
    if find_spec("curvlinops"):
        return
    for item in items:
        if hasattr(item, "callspec") and any(isinstance(x, str) and x == "curvlinops" for x in item.callspec.params.values()):
            item.add_marker(pytest.mark.skip(reason="curvlinops is not installed"))


def pytest_collection_finish() -> None:
    """Keep what was imported out of later garbage collections, each of which would walk through all of torch and sympy."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the compiled kernels out, which add a row to every table that compares speeds."""
    monkeypatch.setenv("HESSIANKIT_COMPILED", "0")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long axes are walked in chunks of a few entries."""
    from hessiankit.engine import column_blocks, parameter_blocks

    for name, most in (("CACHE", 10), ("OUTER", 7), ("SCRATCH", 1)):
        monkeypatch.setattr(parameter_blocks, name, most)
    monkeypatch.setattr(column_blocks, "ENTRIES", 40)
