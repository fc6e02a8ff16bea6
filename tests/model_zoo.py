"""What the tests of other people's architectures share: generic parameters, arithmetic that stays in float64, one check."""

from __future__ import annotations

from typing import Any

from curvature_reference import draw
from torch import Tensor, nn

import hessiankit as hk
from benchmarks.architectures import ATTENTIONS, InDouble, generic
from hessiankit.verify.check_report import CheckReport

__all__ = ["ATTENTIONS", "QUICK", "InDouble", "checked", "generic", "images"]

QUICK = ("reverse-over-reverse", "jvp(grad)")


def checked(module: nn.Module, inputs: Any, target: Tensor | None = None, **options: Any) -> CheckReport:
    """Assert that two healthy references confirm the Hessian to 1e-10, and that none of it was left to autograd."""
    report = hk.check(module, inputs, target, **{"against": QUICK, **options})
    assert report, f"{report.verdict}\n" + "\n".join(report.health_lines())
    assert len(report.healthy_groups) >= 2
    assert report.hessian.fallbacks == ()
    quick = [row.max_rel_error for row in report.rows if row.reference in QUICK]
    assert quick
    assert max(quick) <= 1e-10
    return report


def images(seed: int = 3) -> Tensor:
    """Two images of two channels, 4 x 4."""
    return draw(2, 2, 4, 4, seed=seed)
