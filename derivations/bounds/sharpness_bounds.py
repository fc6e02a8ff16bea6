r"""Theorems 4.1-4.3 of The Sharpness Disparity Principle, corrected: bounds with explicit constants, all of them attained.

Each theorem is a function of the norms that it needs. They come from tensors (``measured``: close to the true gradients) or
from other norms (``NormedInput.a_priori``: whatever the tokens are), and the result bounds ||dQ/dtheta||_F from above, from below
where Euler's identity allows it, and the average sharpness S = B ||dQ/dtheta||_F^2 / #theta with exact numbers of entries.
The printed ones are in ``sharpness_printed``. Upper bounds do not order blocks (claim B16): two of them with a gap between
one's lower end and the other's upper end do.

>>> bounds = theorem_4_1(FeedForwardNorms(NormedInput.a_priori(4, 5, 1.0), M=7, gradient=1.0, w_1=2.0, w_2=3.0))
>>> bounds.sharpness("gamma")  # 24^2 / 5
(0.0, 115.2)
"""

from derivations.bounds.gradient_norms import GradientBounds, average_sharpness, euler_bounds
from derivations.bounds.sharpness_attention import AttentionGradientNorms, HeadNorms, theorem_4_2
from derivations.bounds.sharpness_embedding import EmbeddingNorms, theorem_4_3
from derivations.bounds.sharpness_feedforward import FeedForwardNorms, GatedNorms, theorem_4_1, theorem_4_1_gated
from derivations.bounds.sharpness_norms import STEEPNESS, NormedInput, Steepness, standardised

__all__ = [
    "STEEPNESS",
    "AttentionGradientNorms",
    "EmbeddingNorms",
    "FeedForwardNorms",
    "GatedNorms",
    "GradientBounds",
    "HeadNorms",
    "NormedInput",
    "Steepness",
    "average_sharpness",
    "euler_bounds",
    "standardised",
    "theorem_4_1",
    "theorem_4_1_gated",
    "theorem_4_2",
    "theorem_4_3",
]
