"""Curvature of a model whose data, or whose parameters, are spread over several processes (torch.distributed)."""

from hessiankit.distributed.lanczos import Eigenvalues, top_eigenvalues
from hessiankit.distributed.measure import sharpness
from hessiankit.distributed.operator import DistributedOperator, hessian_operator
from hessiankit.distributed.ranks import RankError
from hessiankit.distributed.setup import Place, init

__all__ = ["DistributedOperator", "Eigenvalues", "Place", "RankError", "hessian_operator", "init", "sharpness", "top_eigenvalues"]
