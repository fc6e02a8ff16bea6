"""Verification: references that take other routes, their health, exact arithmetic, and the one call that joins them."""

from hessiankit.verify.check import CheckReport, CheckRow, check
from hessiankit.verify.exact import ExactRow, check_exact
from hessiankit.verify.health import Health, examine
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import REFERENCES, Unsupported, run_references
from hessiankit.verify.routes import RouteTable, routes

__all__ = [
    "REFERENCES",
    "CheckReport",
    "CheckRow",
    "ExactRow",
    "Health",
    "Problem",
    "RouteTable",
    "Unsupported",
    "check",
    "check_exact",
    "examine",
    "routes",
    "run_references",
]
