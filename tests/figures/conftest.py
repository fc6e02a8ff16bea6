"""Pictures of a few pixels: what they show is tested, and to draw them in full takes longer than the numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from figures import _kit

DPI = _kit.DPI


@pytest.fixture(scope="session", autouse=True)
def few_pixels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_kit, "DPI", 20)
        yield


@pytest.fixture
def all_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kit, "DPI", DPI)
