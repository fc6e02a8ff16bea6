"""Ratios from a measurement of the sharpness: a capped power of S_Norm / S."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hessiankit.arguments import checked
from hessiankit.errors import InputError
from hessiankit.optim.ratios import Ratio

if TYPE_CHECKING:
    from hessiankit.estimation import SharpnessReport

POWER, CAP = 0.5, 4.0


@checked("measured_ratios")
def measured_ratios(
    sharpness: SharpnessReport, *, power: float = POWER, cap: float = CAP, base: str = "Norm"
) -> dict[str, Ratio]:
    r"""Return :math:`r = (S_{base} / S)^{power}`, kept within [1 / cap, cap], for every block type of a report.

    *The Sharpness Disparity Principle* (Wang et al.), Sec. 5, suggests :math:`r\propto S_{\mathrm{Norm}}/S` and then sets r by
    hand (claim H2). The default power is 1/2: Adam divides a gradient by about :math:`\sqrt h`, the root of the curvature that
    the report estimates, and the curvature that is left is :math:`h/\sqrt h=\sqrt h`. The default cap of 4 is far below the
    paper's 10, since a measurement at one step says nothing about the next thousand.

    Of the interval of r, the value nearest to 1 is used: a type that cannot be told from the base keeps the base's rate, and
    with more draws the interval shrinks to the estimate.

    Args:
        sharpness: What ``hessiankit.estimation.sharpness`` returned.
        power: Exponent, in (0, 1].
        cap: Largest ratio, at least 1; its inverse is the smallest.
        base: The block type with ratio 1.

    Raises:
        InputError: If the report has no such base, an estimate is not a positive number or has no interval, or an option is out
            of its range.
    """
    if not hasattr(sharpness, "types") or not hasattr(sharpness, "ratio"):
        seen = type(sharpness).__name__
        raise InputError(f"measured_ratios: sharpness is a {seen}; pass what hessiankit.sharpness returned.")
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

    found = {base: Ratio(1.0, 1.0, 1.0)}
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
        found[kind] = Ratio(min(max(1.0, low), high), low, high)
    return found
