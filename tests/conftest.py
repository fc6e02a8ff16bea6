"""What every test can count on, however pytest was started and whatever is installed beside it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestModule

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes of a run share the cores

collect_ignore_glob = ["*/conftest.py"]  # looked through for doctests, they would be imported by one name


def pytest_configure() -> None:
    """Let Ctrl-C be an error, as tests of it expect: what a shell starts in the background, or nohup, begins without."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes ``-n auto`` starts: each imports torch, and more than 8 import longer than they save."""
    return min(8, os.cpu_count() or 1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let every Hessian and operator be compared with the module's own gradient in second order too, where there is one."""
    os.environ["HESSIANKIT_HANDSHAKE"] = "" if item.get_closest_marker("first_order") else "second order"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files without a slow test where only those are asked for: to import them takes longer than many a test."""
    only_slow = config.option.markexpr.startswith("slow") and collection_path.name.startswith("test_")
    return True if only_slow and "slow" not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests in the packages alone: here there are none, and the search walks through every helper and case."""
    return [collector for collector in (yield) if not isinstance(collector, DoctestModule)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests parametrized by a package that is not installed; a file with slow tests has to name the marker itself."""
    for path in {item.path for item in items if item.get_closest_marker("slow")}:
        if "slow" not in path.read_text():
            raise pytest.UsageError(
                f"{path} has tests that are marked slow elsewhere: name the marker there, for `-m slow` to find it"
            )
    if find_spec("curvlinops"):
        return
    for item in items:
        if hasattr(item, "callspec") and any(isinstance(x, str) and x == "curvlinops" for x in item.callspec.params.values()):
            item.add_marker(pytest.mark.skip(reason="curvlinops is not installed"))


def pytest_collection_finish() -> None:
    """Keep what was imported out of later garbage collections, each of which would walk through all of torch and sympy.

    And collect a tenth as often as Python does by itself: most of what a test makes is gone without.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(7_000, 20, 20)


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the compiled kernels out, which add a row to every table that compares speeds."""
    monkeypatch.setenv("HESSIANKIT_COMPILED", "0")


@pytest.fixture(scope="session")
def extensions(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled: the folder in the environment, else pytest's cache, where other processes and runs find them."""
    if os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(os.environ["TORCH_EXTENSIONS_DIR"])
    cache = getattr(pytestconfig, "cache", None)
    return cache.mkdir("extensions") if cache else tmp_path_factory.mktemp("extensions")


@pytest.fixture
def few_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn whole and written in few pixels: to write all of them takes longer than to draw."""
    from hessiankit.curvature import plot_frame

    write = plot_frame.picture_bytes

    def in_few(figure: Any, suffix: str) -> bytes:
        figure.set_dpi(20)
        return write(figure, suffix)

    monkeypatch.setattr(plot_frame, "picture_bytes", in_few)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long axes are walked in chunks of a few entries."""
    from hessiankit.engine import contractions, jacobians, sweep

    for name, most in (("CACHE", 10), ("OUTER", 7)):
        monkeypatch.setattr(contractions, name, most)
    monkeypatch.setattr(jacobians, "SCRATCH", 1)
    monkeypatch.setattr(sweep, "WORK_SPACE", 40)
