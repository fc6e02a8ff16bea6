r"""What a computation shows, in the few forms in which a verdict can rest on one.

Each function compares numbers with stated thresholds and says whether the verdict was found again. Errors are relative to the
largest entry of the reference; ratios are left side over right side of an inequality, so that more than 1 is a violation.

>>> print(agrees(torch.ones(2), torch.ones(2), "f against autograd"))
relative error 0; f against autograd
>>> wrong(torch.zeros(2), torch.ones(2), corrected=torch.ones(2)).reproduced
True
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.ledger.claim import Evidence

TOLERANCE = 1e-10
"""Of a closed form in float64 against another route, relative to the largest entry."""

ATTAINED = 1e-9
"""How far a ratio may be above 1 by rounding."""

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
    scale = float(b.abs().max())
    error = float((a - b).abs().max()) / (scale or 1.0)
    return math.inf if math.isnan(error) else error


def agrees(found: Any, reference: Any, detail: str = "", *, below: float = TOLERANCE) -> Evidence:
    """HOLDS: a formula and an independent route give the same. Pass two sequences to compare several things."""
    return small(_errors(found, reference), detail, below=below)


def small(errors: Numbers, detail: str = "", *, below: float = TOLERANCE) -> Evidence:
    """HOLDS: all relative errors are below the tolerance."""
    worst = _largest(errors)
    return Evidence(worst <= below, worst, "relative error", detail, "agreement")


def counts(found: int, expected: int, detail: str = "") -> Evidence:
    """HOLDS: two whole numbers are equal, the second found in another way."""
    return Evidence(found == expected, found, "count", f"{detail} (expected {expected})".strip(), "agreement")


def bounded(ratios: Numbers, detail: str = "", *, attained: float | None = None) -> Evidence:
    """HOLDS: left side over right side is never above 1. ``attained``: it also has to come as close to 1 as this somewhere."""
    worst = _largest(ratios)
    return Evidence(worst <= 1 + ATTAINED and worst >= (attained or 0.0), worst, "violation ratio", detail, "bound")


def loose(ratios: Numbers, detail: str = "", *, factor: float) -> Evidence:
    """LOOSE: never violated, and even the largest ratio stays below 1 / factor."""
    worst = _largest(ratios)
    text = f"{detail}{': ' if detail else ''}the bound is at least {1 / worst if worst else math.inf:.3g} times the true value"
    return Evidence(worst <= (1 + ATTAINED) / factor, worst, "violation ratio", text, "looseness")


def wrong(
    printed: Any, reference: Any, detail: str = "", *, corrected: Any, above: float = 1e-3, below: float = TOLERANCE
) -> Evidence:
    """WRONG AS PRINTED: the printed formula differs from the reference, the corrected one does not."""
    return off(_errors(printed, reference), detail, corrected=_errors(corrected, reference), above=above, below=below)


def off(printed: Numbers, detail: str = "", *, corrected: Numbers, above: float = 1e-3, below: float = TOLERANCE) -> Evidence:
    """WRONG AS PRINTED, from relative errors: the least of the printed formula is above, the largest of the corrected below."""
    error, rest = min(_list(printed)), _largest(corrected)
    text = f"as printed {error:.3g}, corrected {rest:.2g}{'; ' if detail else ''}{detail}"
    return Evidence(error > above and rest <= below, error, "relative error", text, "error")


def violated(ratio: Numbers, detail: str = "", *, corrected: Numbers, above: float = 1 + 1e-6) -> Evidence:
    """WRONG AS PRINTED: a counterexample breaks the printed inequality and not the corrected one."""
    worst, rest = _largest(ratio), _largest(corrected)
    text = f"as printed {worst:.3g}, corrected {rest:.3g}{'; ' if detail else ''}{detail}"
    return Evidence(worst > above and rest <= 1 + ATTAINED, worst, "violation ratio", text, "violation")


def false(found: Any, told: Any, detail: str = "") -> Evidence:
    """WRONG AS PRINTED: what was counted, read or found by arithmetic is not what is told."""
    number = float(found) if isinstance(found, int | float) else None
    text = f"{detail}: told {told}, found {found}" if detail else f"told {told}, found {found}"
    return Evidence(found != told, number, "" if number is None else "value", text, "error")


def assumed(holds: Evidence, fails: Numbers, *, above: float) -> Evidence:
    """HOLDS UNDER ASSUMPTION: it holds with the assumption; without it the error or the ratio exceeds ``above``."""
    without = _largest(fails)
    text = f"with the assumption: {holds}; without it {without:.3g}"
    return Evidence(holds.reproduced and without > above, holds.number, holds.unit, text, "condition")


def readings(values: Mapping[str, float], detail: str = "", *, apart: float = 1e-3) -> Evidence:
    """VAGUE: the statement can be read in several ways, and they give different numbers."""
    low, high = min(values.values()), max(values.values())
    spread = (high - low) / (abs(high) or 1.0)
    text = "; ".join(f"{name}: {value:.4g}" for name, value in values.items())
    return Evidence(spread > apart, spread, "relative error", f"{detail}{': ' if detail else ''}{text}", "readings")


def measured(number: float, reproduced: bool, detail: str = "", *, unit: str = "value") -> Evidence:
    """REPRODUCED or NOT REPRODUCED: what a small experiment gives, and whether it is what the row says."""
    return Evidence(reproduced, number, unit, detail, "measurement")


def not_run(reason: str, number: float | None = None) -> Evidence:
    """NOT RUN: why it is not, with a number where arithmetic gives one."""
    return Evidence(True, number, "" if number is None else "value", reason, "nothing")


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64)
    return torch.as_tensor(value, dtype=torch.float64)


def _errors(found: Any, reference: Any) -> list[float]:
    if isinstance(reference, list | tuple) and any(isinstance(r, Tensor) for r in reference):
        return [relative_error(f, r) for f, r in zip(found, reference, strict=True)]
    return [relative_error(found, reference)]


def _list(values: Numbers) -> list[float]:
    return [float(v) for v in values] if isinstance(values, Iterable) and not _is_scalar(values) else [float(values)]


def _is_scalar(values: Any) -> bool:
    return isinstance(values, Tensor) and values.ndim == 0


def _largest(values: Numbers) -> float:
    numbers = _list(values)
    return math.inf if any(math.isnan(v) for v in numbers) else max(numbers)
