"""Verification: references by other routes, their health, exact arithmetic, identities, and ``check``, which joins them.

What measures besides is here by name, too: ``bounds`` (its home is :mod:`hessiankit.theory.bounding`) and ``sharpness``
(:mod:`hessiankit.training.sharpness`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hessiankit.theory.exact.check import ExactRow, check_exact, check_exact_blocks
from hessiankit.verify.check import check
from hessiankit.verify.check_jacobian import check_jacobian
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import CheckRow
from hessiankit.verify.health import Health, examine
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Unsupported, run_references

if TYPE_CHECKING:
    from hessiankit.theory.bounding.bounds import bounds
    from hessiankit.training.sharpness import sharpness

__all__ = [
    "REFERENCES", "CheckReport", "CheckRow", "ExactRow", "Health", "Problem", "Unsupported", "bounds", "check", "check_exact",
    "check_exact_blocks", "check_jacobian", "examine", "run_references", "sharpness",
]  # fmt: skip


_HOMES = {"bounds": "hessiankit.theory.bounding.bounds", "sharpness": "hessiankit.training.sharpness"}


def __getattr__(name: str) -> Any:
    """Import ``bounds`` and ``sharpness`` on first access, which the references do not need."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
