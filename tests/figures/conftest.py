"""Figures in few pixels, each drawn once: what they show is tested, and to draw them in full takes longer than the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from figure_sizes import CURVATURE, DIGITS, RUNS

from figures import _digits, _kit, _trained

DPI = _kit.DPI


@pytest.fixture(scope="session", autouse=True)
def few_pixels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kit, "DPI", 20)
        yield


@pytest.fixture
def all_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kit, "DPI", DPI)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Path]]:
    """Draw a figure, once for all tests and in one folder, where figures find each other's runs; return its files by their ends."""
    out, made = tmp_path_factory.mktemp("figures"), dict[str, dict[str, Path]]()

    def draw(name: str) -> dict[str, Path]:
        if name not in made:
            module = import_module(f"figures.{name}")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_digits, "QUICK", DIGITS)
                patch.setattr(_trained, "QUICK", {**RUNS, **CURVATURE}[name].runs)
                for attribute, value in {**RUNS, **CURVATURE}[name].patches(module).items():
                    patch.setattr(module, attribute, value)
                made[name] = {path.name.removeprefix(name): path for path in module.draw(out, quick=True)}
        return made[name]

    return draw
