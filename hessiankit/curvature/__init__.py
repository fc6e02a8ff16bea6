"""Exact second derivatives as a user holds them: the matrix, a file of it, products, its diagonal, its norms, pictures."""

from hessiankit.curvature.dense import Hessian, hessian

__all__ = ["Hessian", "hessian"]
