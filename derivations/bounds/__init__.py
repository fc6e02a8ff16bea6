"""Bounds on second derivatives: sharp constants of the primitives, norms of the Hessian of attention and of a post-norm block.

Three kinds, each in its files: ``constants`` (attained), ``attention_bounds`` and ``block_bounds`` from norms alone (they hold
over a ball of weights), ``attention_structured`` and ``block_structured`` at a point (close to the true norm).

Upper bounds do not order blocks (sharpness-disparity/thm4.1-support): a lower bound of one above the upper bound of the other
does.
"""

from derivations.bounds.attention_bounds import AttentionNorms, attention_a_priori
from derivations.bounds.attention_structured import attention_structured
from derivations.bounds.block_bounds import PostBlockNorms, post_block_a_priori
from derivations.bounds.block_norms import BlockNorms
from derivations.bounds.block_structured import post_block_structured
from derivations.bounds.constants import (
    STEEPNESS,
    NormConstants,
    Steepness,
    norm_constants,
    norm_hessian_map_norm,
    norm_hessian_norm,
    norm_jacobian_norm,
    row_stochastic_norm_bound,
    softmax_hessian_map_bound,
    softmax_hessian_stacked_bound,
    softmax_jacobian_bound,
    token_covariance_bound,
    token_cumulant_bound,
    token_range_bound,
)

__all__ = [
    "STEEPNESS",
    "AttentionNorms",
    "BlockNorms",
    "NormConstants",
    "PostBlockNorms",
    "Steepness",
    "attention_a_priori",
    "attention_structured",
    "norm_constants",
    "norm_hessian_map_norm",
    "norm_hessian_norm",
    "norm_jacobian_norm",
    "post_block_a_priori",
    "post_block_structured",
    "row_stochastic_norm_bound",
    "softmax_hessian_map_bound",
    "softmax_hessian_stacked_bound",
    "softmax_jacobian_bound",
    "token_covariance_bound",
    "token_cumulant_bound",
    "token_range_bound",
]
