"""Exact second derivatives: the matrix, in memory or a file, products, the diagonal, norms, pictures."""

from hessiankit.curvature.dense import Hessian, hessian

__all__ = ["Hessian", "hessian"]
