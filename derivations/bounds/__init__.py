"""Bounds on derivatives: sharp constants of the primitives, norms of the Hessian of attention and of a block, of gradients.

Three kinds, each in its files: ``constants`` (attained), ``attention_bounds`` and ``block_bounds`` from norms alone (they hold
over a ball of weights), ``attention_structured`` and ``block_structured`` at a point (close to the true norm); bounds on
gradients, of both kinds, are in the ``sharpness_`` files. Files ending in ``_printed`` hold printed bounds, valid or not, which
``hessiankit.bounds`` and the ledger compare with the corrected ones.

Upper bounds do not order blocks (sharpness-disparity/thm4.1-support): a lower bound of one above the upper bound of the other
does.
"""

from derivations.bounds.attention_bounds import AttentionNorms, attention_a_priori
from derivations.bounds.attention_printed import (
    theorem_1_appendix_printed,
    theorem_1_printed,
    theorem_1_steps_printed,
    theorem_7_corrected,
    theorem_7_printed,
)
from derivations.bounds.attention_structured import attention_structured
from derivations.bounds.block_bounds import PostBlockNorms, post_block_a_priori
from derivations.bounds.block_norms import BlockNorms
from derivations.bounds.block_printed import (
    lemma_4_hessian_printed,
    lemma_4_jacobian_printed,
    proposition_10_printed,
    theorem_6_factors_printed,
    theorem_6_printed,
)
from derivations.bounds.block_structured import post_block_structured
from derivations.bounds.constants import (
    NormConstants,
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
from derivations.bounds.sharpness_attention import AttentionGradientNorms, HeadNorms, theorem_4_2
from derivations.bounds.sharpness_embedding import EmbeddingNorms, theorem_4_3
from derivations.bounds.sharpness_feedforward import FeedForwardNorms, GatedNorms, theorem_4_1, theorem_4_1_gated
from derivations.bounds.sharpness_norms import (
    STEEPNESS,
    GradientBounds,
    NormedInput,
    Steepness,
    average_sharpness,
    euler_bounds,
    standardised,
)

__all__ = [
    "STEEPNESS",
    "AttentionGradientNorms",
    "AttentionNorms",
    "BlockNorms",
    "EmbeddingNorms",
    "FeedForwardNorms",
    "GatedNorms",
    "GradientBounds",
    "HeadNorms",
    "NormConstants",
    "NormedInput",
    "PostBlockNorms",
    "Steepness",
    "attention_a_priori",
    "attention_structured",
    "average_sharpness",
    "euler_bounds",
    "lemma_4_hessian_printed",
    "lemma_4_jacobian_printed",
    "norm_constants",
    "norm_hessian_map_norm",
    "norm_hessian_norm",
    "norm_jacobian_norm",
    "post_block_a_priori",
    "post_block_structured",
    "proposition_10_printed",
    "row_stochastic_norm_bound",
    "softmax_hessian_map_bound",
    "softmax_hessian_stacked_bound",
    "softmax_jacobian_bound",
    "standardised",
    "theorem_1_appendix_printed",
    "theorem_1_printed",
    "theorem_1_steps_printed",
    "theorem_4_1",
    "theorem_4_1_gated",
    "theorem_4_2",
    "theorem_4_3",
    "theorem_6_factors_printed",
    "theorem_6_printed",
    "theorem_7_corrected",
    "theorem_7_printed",
    "token_covariance_bound",
    "token_cumulant_bound",
    "token_range_bound",
]
