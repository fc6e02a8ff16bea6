"""Products with the Hessian of a model whose data, or whose parameters, are spread over processes (torch.distributed)."""

from hessiankit.training.distributed.operator import DistributedOperator, ShardedOperator, hessian_operator
from hessiankit.training.ranks import RankError

__all__ = [
    "DistributedOperator",
    "RankError",
    "ShardedOperator",
    "hessian_operator",
]
