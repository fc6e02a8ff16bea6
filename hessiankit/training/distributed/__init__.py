"""Curvature of a model whose data, or whose parameters, are spread over several processes (torch.distributed)."""

from hessiankit.training.distributed.measure import sharpness
from hessiankit.training.distributed.operator import DistributedOperator, ShardedOperator, hessian_operator
from hessiankit.training.distributed.ranks import RankError

__all__ = [
    "DistributedOperator",
    "RankError",
    "ShardedOperator",
    "hessian_operator",
    "sharpness",
]
