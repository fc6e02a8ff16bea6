"""Factors on the learning rate by block type, as a run's description holds them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from hessiankit.optim import PRESETS
from hessiankit.parts import model_parts

Ratios: TypeAlias = tuple[tuple[str, float], ...]
"""(block type, factor on the learning rate), sorted; types that are not named have 1."""


def ratios_of(factors: Mapping[str, float]) -> Ratios:
    """Return factors in the one way to write them, to three digits, without those that are 1.

    >>> ratios_of({"Norm": 1.0, "QK": 8.0, "Emb": 3.14159})
    (('Emb', 3.14), ('QK', 8.0))
    """
    shortened = {kind: float(f"{factor:.3g}") for kind, factor in factors.items()}
    return tuple(sorted((kind, factor) for kind, factor in shortened.items() if factor != 1.0))


PAPER = ratios_of(PRESETS["paper"])
"""The Sharpness Disparity Principle, eq. (5): Emb 10, QK 8, FFN 6, VO 4 on the learning rate of the norms."""


def entries_by_type(model: nn.Module) -> dict[str, int]:
    """Return the number of parameters' entries of each block type."""
    found: dict[str, int] = {}
    for part in model_parts(model):
        found[part.type] = found.get(part.type, 0) + part.size
    return found


def weighted_ratio(ratios: Ratios, entries: Mapping[str, int]) -> float:
    """Return the mean factor over all entries: the uniform factor with the same learning rate integrated over the parameters.

    >>> weighted_ratio((("Emb", 10.0),), {"Emb": 1, "Norm": 3})
    3.25
    """
    factors = dict(ratios)
    return sum(count * factors.get(kind, 1.0) for kind, count in entries.items()) / sum(entries.values())
