"""Structured approximations of curvature matrices, each measured against the exact one."""

from hessiankit.curvature.approximating.approximations import APPROXIMATIONS, approximations
from hessiankit.curvature.approximating.report import Approximation, ApproximationsReport

__all__ = ["APPROXIMATIONS", "Approximation", "ApproximationsReport", "approximations"]
