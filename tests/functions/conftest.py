"""Heads of a few logits that count as large."""

from __future__ import annotations

import pytest

from hessiankit.primitives import linear_cross_entropy


@pytest.fixture
def small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits from 21 entries on are a large head's."""
    monkeypatch.setattr(linear_cross_entropy, "LOGITS", 20)
