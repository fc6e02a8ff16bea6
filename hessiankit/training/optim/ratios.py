"""Ratios r of a block type's learning rate to that of the norms: the paper's, gentler ones, and those of a measured sharpness."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.training.partition import TYPES


@dataclass(frozen=True)
class Ratio:
    """A learning rate over the base rate, with the interval of its measurement.

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
other two settings of Fig. 10 (Emb/QK/FFN/VO), ``adam-mini`` of Sec. 6.3 is for Adam-mini. ``conservative``, not in the paper,
is about the square roots of Eq. 5. ``none`` is plain training with the same groups."""


def by_type(ratios: Mapping[str, float | Ratio]) -> dict[str, Ratio]:
    """Return a ratio for every block type; 1 where the mapping has none.

    >>> by_type({"Emb": 10})["Emb"].value, by_type({"Emb": 10})["QK"].value
    (10.0, 1.0)
    """
    extras = sorted(set(ratios) - set(TYPES))
    if extras:
        raise InputError(f"blockwise_lr: ratios has {extras[0]!r}, which is no block type; expected some of {', '.join(TYPES)}.")
    factors = dict.fromkeys(TYPES, Ratio(1.0))
    for kind, ratio in ratios.items():
        if not isinstance(ratio, Ratio) and not 0 < float(ratio) < math.inf:
            raise InputError(f"blockwise_lr: the ratio of {kind} is {float(ratio)}; expected a positive number.")
        factors[kind] = ratio if isinstance(ratio, Ratio) else Ratio(float(ratio))
    return factors


POWER, CAP = 0.5, 4.0


@checked("measured_ratios")
def measured_ratios(sharpness: Any, *, power: float = POWER, cap: float = CAP, base: str = "Norm") -> dict[str, Ratio]:
    r"""Return :math:`r = (S_{base} / S)^{power}`, clipped to [1 / cap, cap], for every block type of a report.

    *The Sharpness Disparity Principle* (Wang et al.), Sec. 5, suggests :math:`r\propto S_{\mathrm{Norm}}/S` and then sets r by
    hand. The default power is 1/2: Adam divides a gradient by about :math:`\sqrt h`, the root of the curvature that
    the report estimates, and the remaining curvature is :math:`h/\sqrt h=\sqrt h`. The default cap of 4 is far below the
    paper's 10, since one measurement does not predict the next thousand steps.

    Of the interval of r, the value nearest to 1 is used: a type whose interval contains 1 has the base's rate, and
    with more draws the interval shrinks to the estimate.

    Args:
        sharpness: Report that ``hessiankit.training.sharpness.sharpness`` returned.
        power: Exponent, in (0, 1].
        cap: Largest ratio, at least 1; its inverse is the smallest.
        base: The block type with ratio 1.

    Raises:
        InputError: If the report has no such base, an estimate is not a positive number or has no interval, or an option is out
            of its range.
    """
    if not hasattr(sharpness, "types") or not hasattr(sharpness, "ratio"):
        type_name = type(sharpness).__name__
        raise InputError(f"measured_ratios: sharpness is a {type_name}; pass what hessiankit.sharpness returned.")
    if not 0 < power <= 1:
        raise InputError(f"measured_ratios: power={power}; expected a number in (0, 1].")
    if not (math.isfinite(cap) and cap >= 1):
        raise InputError(f"measured_ratios: cap={cap}; expected a number of at least 1.")
    if base not in sharpness.types:
        raise InputError(
            f"measured_ratios: the report has no {base!r} to compare with, only {', '.join(sharpness.types)}; choose base= "
            "among them."
        )

    def bounded(quotient: float) -> float:
        return float(min(cap, max(1 / cap, max(quotient, 0.0) ** power)))

    ratios = {base: Ratio(1.0, 1.0, 1.0)}
    for kind in sharpness.types:
        if kind == base:
            continue
        quotient = sharpness.ratio(kind, base=base)
        if not (math.isfinite(quotient.value) and quotient.value > 0):
            raise InputError(
                f"measured_ratios: S({base}) / S({kind}) is {quotient.value}; expected a positive number. Give its ratio by hand."
            )
        if not (math.isfinite(quotient.low) and not math.isnan(quotient.high)):
            raise InputError(
                f"measured_ratios: S({base}) / S({kind}) = {quotient.value:.3g} has the interval [{quotient.low}, "
                f"{quotient.high}]; measure with more draws."
            )
        low, high = bounded(quotient.low), bounded(quotient.high)
        ratios[kind] = Ratio(min(max(1.0, low), high), low, high)
    return ratios
