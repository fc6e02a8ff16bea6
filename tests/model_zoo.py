"""What the tests of other people's architectures share: generic parameters, arithmetic that stays in float64, one check."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from curvature_reference import draw
from torch import Tensor, nn

import hessiankit as hk
from benchmarks.architectures import ATTENTIONS, InDouble, generic

__all__ = ["ATTENTIONS", "QUICK", "InDouble", "checked", "generic", "images", "optional"]

QUICK = ("reverse-over-reverse", "jvp(grad)")


def optional(package: str) -> Any:
    """Import a package of models, or skip the test file where it is not installed."""
    _import_torchvision()
    return pytest.importorskip(package)


def _import_torchvision() -> None:
    """Import torchvision, which both packages ask for, also where its compiled half does not fit the installed torch.

    A wheel built for CUDA does not load beside a torch built for the CPU, and stops at the first operator that it misses. The
    models here use none of those operators; that their names exist is enough.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision
        except RuntimeError:
            for name in ("nms", "qnms"):
                _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import torchvision  # noqa: F401
        except ImportError:
            return


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def checked(module: nn.Module, inputs: Any, target: Tensor | None = None, **options: Any) -> hk.CheckReport:
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
