"""Structured approximations of curvature matrices, each measured against the exact one."""

from hessiankit.approximating.approximations import APPROXIMATIONS, approximations
from hessiankit.approximating.report import Approximation, ApproximationsReport

__all__ = ["APPROXIMATIONS", "Approximation", "ApproximationsReport", "approximations"]
