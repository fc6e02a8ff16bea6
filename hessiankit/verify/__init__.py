"""Verification: references by other routes, their health, exact arithmetic, identities, and ``check``, which joins them."""

from hessiankit.theory.exact.check import ExactRow, check_exact, check_exact_blocks
from hessiankit.verify.check import check
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import CheckRow
from hessiankit.verify.health import Health, examine
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Unsupported, run_references

__all__ = [
    "REFERENCES", "CheckReport", "CheckRow", "ExactRow", "Health", "Problem", "Unsupported", "check", "check_exact",
    "check_exact_blocks", "examine", "run_references",
]  # fmt: skip
