r"""Checkers: what the computation of a row shows, and whether its verdict was found again.

Errors are relative to the largest entry of the reference; ratios are the left side over the right side of an inequality, so that
more than 1 is a violation. What was compared stays with the evidence and is printed by ``python -m papers show``.

>>> print(agrees(torch.ones(2), torch.ones(2), "f against autograd"))
relative error 0; f against autograd
>>> wrong(torch.zeros(2), torch.ones(2), corrected=torch.ones(2)).reproduced
True
>>> print(violated(2.0, 1.5, corrected=2.5))
violation ratio 1.33; as printed 1.33, corrected 0.8
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from papers.ascent import ATTAINED, WorstRatio
from papers.claim import Evidence

TOLERANCE = 1e-10
"""Of a closed form in float64 against another route, relative to the largest entry."""

ROUNDING = 1e-9
"""How far a ratio may be above 1 by rounding."""

SECOND = 1e-6
"""Of a reference against its second route."""

Numbers: TypeAlias = Any  # a number, or an iterable of numbers


def relative_error(found: Any, reference: Any) -> float:
    """Return max |found - reference| / max |reference|; infinity where the shapes differ or a number is missing.

    >>> relative_error([1.0, 2.5], [1.0, 2.0])
    0.25
    """
    a, b = _tensor(found), _tensor(reference)
    if a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    error = float((a - b).abs().max()) / (float(b.abs().max()) or 1.0)
    return math.inf if math.isnan(error) else error


def agrees(found: Any, reference: Any, detail: str = "", *, below: float = TOLERANCE) -> Evidence:
    """HOLDS: a formula and an independent route give the same. Pass two sequences to compare several things."""
    worst = max(_errors(found, reference))
    arrays = {"formula": found, "reference": reference}
    return Evidence(worst <= below, worst, "relative error", detail, "agreement", arrays=arrays)


def small(errors: Numbers, detail: str = "", *, below: float = TOLERANCE) -> Evidence:
    """HOLDS: all relative errors are below the tolerance."""
    worst = _largest(errors)
    return Evidence(worst <= below, worst, "relative error", detail, "agreement")


def counts(found: int, expected: int, detail: str = "") -> Evidence:
    """HOLDS: two whole numbers are equal, the second found in another way."""
    return Evidence(found == expected, found, "count", f"{detail} (expected {expected})".strip(), "agreement")


def bounded(ratios: Numbers, detail: str = "", *, attained: float | None = None) -> Evidence:
    """HOLDS: left side over right side is never above 1. A list of lists, or of ``WorstRatio``, is several.

    "attained" is said only of ratios that reach 0.99; ``attained`` also requires that they come as close to 1 as this.
    """
    several = isinstance(ratios, list) and isinstance(ratios[0], list | tuple)
    each = ratios if several else [ratios]
    worst = [_largest(r) for r in each]
    said = "; ".join(
        str(r) if isinstance(r, WorstRatio) else "attained" if w >= ATTAINED else f"sampled: worst ratio {w:.3g}"
        for r, w in zip(each, worst, strict=True)
    )
    good = max(worst) <= 1 + ROUNDING and min(worst) >= (attained or 0.0)
    text, arrays = f"{detail}{'; ' if detail else ''}{said}", {"ratios": [x for r in each for x in _sampled(r)]}
    return Evidence(good, max(worst), "violation ratio", text, "bound", arrays=arrays)


def loose(ratios: Numbers, detail: str = "", *, factor: float) -> Evidence:
    """LOOSE: never violated, and even the largest ratio stays below 1 / factor."""
    worst = _largest(ratios)
    text = f"{detail}{': ' if detail else ''}the bound is at least {1 / worst if worst else math.inf:.3g} times the true value"
    good, arrays = worst <= (1 + ROUNDING) / factor, {"ratios": _sampled(ratios)}
    return Evidence(good, worst, "violation ratio", text, "looseness", arrays=arrays)


def wrong(
    printed: Any,
    reference: Any,
    detail: str = "",
    *,
    corrected: Any,
    above: float = 1e-3,
    below: float = TOLERANCE,
    second: Any = None,
    by: str = "",
    at: Mapping[str, Any] | None = None,
) -> Evidence:
    """WRONG AS PRINTED: the printed formula differs from the reference, the corrected one does not.

    Args:
        printed: The printed formula's value, or a list of them, all to differ.
        reference: The true value by a route that shares nothing with the formulas, or a list of as many.
        detail: What was computed, in one line.
        corrected: The corrected formula's value, or a list.
        above: Below this relative error the printed formula is not called wrong.
        below: The tolerance of the corrected formula.
        second: The reference by yet another route; it must agree to 1e-6 (or ``below`` where that is larger).
        by: The second route's name.
        at: The arrays at which all of it is evaluated, kept for printing.
    """
    error, rest = min(_errors(printed, reference)), max(_errors(corrected, reference))
    good, confirmed = error > above and rest <= below, ""
    if second is not None:
        apart = max(_errors(second, reference))
        good, confirmed = good and apart <= max(SECOND, below), f"{by}, to {apart:.1g}"
    arrays = {**(at or {}), "printed": printed, "reference": reference, "corrected": corrected}
    return Evidence(
        good, error, "relative error", _both(error, rest, detail, "does not conform"), "error", arrays=arrays, second=confirmed
    )


def violated(
    left: Numbers,
    printed: Numbers,
    detail: str = "",
    *,
    corrected: Numbers,
    above: float = 1 + 1e-6,
    second: Numbers | None = None,
    by: str = "",
    at: Mapping[str, Any] | None = None,
) -> Evidence:
    """WRONG AS PRINTED: a counterexample breaks the printed inequality and not the corrected one.

    Args:
        left: Left sides, each computed without the bound: one number, or one for each point.
        printed: The printed right sides, as many.
        detail: What was computed, in one line.
        corrected: The corrected right sides, as many.
        above: Up to this ratio the printed inequality is not called violated.
        second: The left sides by another route; they must agree to 1e-6.
        by: The second route's name.
        at: The arrays of the counterexample, kept for printing.
    """
    a, b, c = _list(left), _list(printed), _list(corrected)
    worst, rest = _largest(_ratios(a, b)), _largest(_ratios(a, c))
    good, confirmed = worst > above and rest <= 1 + ROUNDING, ""
    if second is not None:
        apart = relative_error(_list(second), a)
        good, confirmed = good and apart <= SECOND, f"{by}, to {apart:.1g}"
    arrays = {**(at or {}), "left side": left, "printed right side": printed, "corrected right side": corrected}
    return Evidence(
        good, worst, "violation ratio", _both(worst, rest, detail, "infinite"), "violation", arrays=arrays, second=confirmed
    )


def assumed(holds: Evidence, fails: Numbers, *, above: float) -> Evidence:
    """HOLDS UNDER ASSUMPTION: it holds with the assumption; without it the error or the ratio exceeds ``above``."""
    without = _largest(fails)
    text = f"with the assumption: {holds}; without it {without:.3g}"
    good = holds.reproduced and without > above
    arrays = {**holds.arrays, "without": without}
    return Evidence(good, holds.number, holds.unit, text, "condition", arrays=arrays, second=holds.second)


def readings(values: Mapping[str, float], detail: str = "", *, apart: float = 1e-3) -> Evidence:
    """VAGUE: the statement can be read in several ways, and they give different numbers."""
    low, high = min(values.values()), max(values.values())
    spread = (high - low) / (abs(high) or 1.0)
    text = "; ".join(f"{name}: {value:.4g}" for name, value in values.items())
    arrays = {f"reading: {name}": value for name, value in values.items()}
    return Evidence(
        spread > apart, spread, "relative error", f"{detail}{': ' if detail else ''}{text}", "readings", arrays=arrays
    )


def measured(number: float, reproduced: bool, detail: str = "", *, unit: str = "value") -> Evidence:
    """SEEN AT THIS SIZE, NOT SEEN ... or OPEN: what a small experiment gives, and whether it is what the row says."""
    return Evidence(reproduced, number, unit, detail, "measurement")


def not_run(reason: str) -> Evidence:
    """NOT RUN, or INCONSISTENT by reading: the reason."""
    return Evidence(True, None, "", reason, "nothing")


def at_small_scale(figure: str, seen: str, reason: str) -> Evidence:
    """SEEN AT THIS SIZE, NOT SEEN ... or OPEN: what a figure of the gallery shows, and why the paper's size is not run."""
    return Evidence(True, None, "", f"python -m figures {figure}: {seen}; at the paper's size: {reason}", "figure")


def _both(printed: float, corrected: float, detail: str, infinite: str) -> str:
    found = f"{printed:.3g}" if math.isfinite(printed) else infinite
    return f"as printed {found}, corrected {corrected:.2g}{'; ' if detail else ''}{detail}"


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64)
    return torch.as_tensor(value, dtype=torch.float64)


def _errors(found: Any, reference: Any) -> list[float]:
    if isinstance(reference, list | tuple) and any(isinstance(r, Tensor) for r in reference):
        return [relative_error(f, r) for f, r in zip(found, reference, strict=True)]
    if isinstance(found, list | tuple) and (_is_scalar(reference) or isinstance(reference, int | float)):
        return [relative_error(f, reference) for f in found]  # several readings of one formula
    if not isinstance(found, Tensor) and _tensor(found).shape != _tensor(reference).shape:
        raise ValueError(f"wrong: {list(_tensor(found).shape)} numbers against {list(_tensor(reference).shape)}")
    return [relative_error(found, reference)]


def _ratios(left: list[float], right: list[float]) -> list[float]:
    return [a / b if b else (math.inf if a else 0.0) for a, b in zip(left, right, strict=True)]


def _list(values: Numbers) -> list[float]:
    return [float(v) for v in values] if isinstance(values, Iterable) and not _is_scalar(values) else [float(values)]


def _is_scalar(values: Any) -> bool:
    return isinstance(values, Tensor) and values.ndim == 0


def _sampled(ratios: Numbers) -> list[float]:
    return _list(ratios.sample if isinstance(ratios, WorstRatio) else ratios)


def _largest(values: Numbers) -> float:
    numbers = [values.sampled, values.climbed] if isinstance(values, WorstRatio) else _list(values)
    return math.inf if any(math.isnan(v) for v in numbers) else max(numbers)
