"""The printed bounds of Closing the Curvature Gap for a block at hand, where they are defined."""

from __future__ import annotations

from torch import Tensor, nn


def printed(block: nn.Module, x: Tensor, t: Tensor, loss: str, notes: list[str]) -> dict[str, dict[str, float]]:
    """Return "whole" or "i x j" -> kind -> value, and say in ``notes`` why a bound is not defined."""
    return {}
