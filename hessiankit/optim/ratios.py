"""Ratios r of a block type's learning rate to that of the norms: the paper's, and gentler ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType

from hessiankit.errors import InputError
from hessiankit.parts import TYPES


@dataclass(frozen=True)
class Ratio:
    """A learning rate over the base rate, with the interval of the measurement behind it.

    Attributes:
        value: The ratio that is used.
        low: Lower end of its interval; None where it was set by hand.
        high: Upper end.

    Raises:
        InputError: The value is no positive number, or an end of the interval is negative or no number.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.value, Real) and 0 < self.value < math.inf):
            raise InputError(f"Ratio: value={self.value!r}; expected a positive number")
        for name, end in (("low", self.low), ("high", self.high)):
            if end is not None and not (isinstance(end, Real) and end >= 0):
                raise InputError(f"Ratio: {name}={end!r}; expected an end of its interval, a number of at least 0, or None")


def _by_order(emb: float, qk: float, ffn: float, vo: float) -> Mapping[str, float]:
    return MappingProxyType({"Emb": emb, "QK": qk, "FFN": ffn, "VO": vo, "Norm": 1.0})


PRESETS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "paper": _by_order(10.0, 8.0, 6.0, 4.0),
        "8/6/4/3": _by_order(8.0, 6.0, 4.0, 3.0),
        "6/4/3/2": _by_order(6.0, 4.0, 3.0, 2.0),
        "adam-mini": _by_order(4.0, 1.0, 4.0, 4.0),
        "conservative": _by_order(3.0, 2.8, 2.4, 2.0),
        "none": _by_order(1.0, 1.0, 1.0, 1.0),
    }
)
"""Ratios by name. Of The Sharpness Disparity Principle (Wang et al.): ``paper`` is Eq. 5, ``8/6/4/3`` and ``6/4/3/2`` are the
other two settings of Fig. 10 (Emb/QK/FFN/VO), ``adam-mini`` is what Sec. 6.3 found for Adam-mini. ``conservative`` is ours: about
the square roots of Eq. 5. ``none`` is plain training with the same groups."""


def preset(name: str, optimizer: str = "adamw") -> tuple[str, Mapping[str, float]]:
    """Return (name, ratios) of a preset; ``"paper"`` is what the paper used for that optimizer.

    Raises:
        InputError: If there is no such preset.

    >>> preset("paper")[1]["QK"], preset("paper", "lion")[1]["QK"], preset("paper", "adam_mini")[1]["QK"]
    (8.0, 8.0, 1.0)
    """
    if name == "paper" and optimizer == "adam_mini":
        name = "adam-mini"
    if name not in PRESETS:
        raise InputError(
            f"blockwise_lr: ratios={name!r} is no preset; expected one of {', '.join(PRESETS)}, 'measured', or a mapping from "
            "block type to ratio."
        )
    return name, PRESETS[name]


def by_type(ratios: Mapping[str, float | Ratio]) -> dict[str, Ratio]:
    """Return a ratio for every block type; 1 where the mapping has none.

    Raises:
        InputError: If a key is no block type, or a ratio is not a positive number.

    >>> by_type({"Emb": 10})["Emb"].value, by_type({"Emb": 10})["QK"].value
    (10.0, 1.0)
    """
    unknown = sorted(set(ratios) - set(TYPES))
    if unknown:
        raise InputError(f"blockwise_lr: ratios has {unknown[0]!r}, which is no block type; expected some of {', '.join(TYPES)}.")
    found = dict.fromkeys(TYPES, Ratio(1.0))
    for kind, given in ratios.items():
        if not isinstance(given, Ratio) and not 0 < float(given) < math.inf:
            raise InputError(f"blockwise_lr: the ratio of {kind} is {float(given)}; expected a positive number.")
        found[kind] = given if isinstance(given, Ratio) else Ratio(float(given))
    return found
