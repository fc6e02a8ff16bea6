r"""Theorem 4.3 of The Sharpness Disparity Principle, corrected: the embedding and the gain behind it.

Y = Norm(Z; gamma), z_i = row of W_E of token i, plus a position embedding if there is one. With s_i the scale of row z_i and
J_i = (C - rho_i^2 u_i u_i^T) / s_i the Jacobian of the norm, ||J_i||_2 <= 1 / s_i, the gradient of the row of token k is

    dw_k = sum over the places i of k of J_i (gamma * g_i),     0 for tokens that do not occur

The print leaves out ||dQ/dY||_F (sharpness-disparity/thm4.3-s-we), has n sqrt(D) where sqrt(c_max D) is enough, c_max the most
often that a token occurs, and takes the least row over the whole vocabulary, where those of the tokens that occur count
(sharpness-disparity/b3-least-row).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from derivations.bounds.constants import row_scales
from papers.sharpness_disparity.gradient_bounds import GradientBounds, NormedInput, doubles, euler_bounds


@dataclass(frozen=True)
class EmbeddingNorms:
    """What Theorem 4.3 knows of Y = Norm(X W_E; gamma).

    Args:
        inputs: the norm; only its gain and ``column`` are used.
        vocabulary: rows of W_E.
        gradient: ||dQ/dY||_F.
        stretch: max over the tokens k that occur of sqrt(number of places) / least scale of them.
        lower: bounds from below that are known.
    """

    inputs: NormedInput
    vocabulary: int
    gradient: float
    stretch: float
    lower: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def a_priori(
        cls, inputs: NormedInput, vocabulary: int, gradient: float, *, least_row: float, most: int | None = None
    ) -> EmbeddingNorms:
        """Return the norms that follow from the least norm of a row.

        Args:
            inputs: the norm.
            vocabulary: rows of W_E.
            gradient: ||dQ/dY||_F.
            least_row: the least norm of a row of Z, for LayerNorm after centring; without positions, of the rows of W_E of
                tokens that occur.
            most: c_max, the most often that a token occurs, or None for n.

        Raises:
            ValueError: if the row or the number is not positive.

        >>> EmbeddingNorms.a_priori(NormedInput.a_priori(9, 4, 1.0), 50, 1.0, least_row=0.5, most=4).stretch
        8.0
        """
        most = inputs.n if most is None else most
        if least_row <= 0 or most < 1:
            raise ValueError(f"EmbeddingNorms.a_priori: least_row = {least_row}, most = {most}; expected positive numbers")
        return cls(inputs, vocabulary, gradient, math.sqrt(most * inputs.D) / least_row)

    @classmethod
    def measured(
        cls,
        tokens: Tensor,
        W_E: Tensor,
        gamma: Tensor,
        gradient: Tensor,
        *,
        positions: Tensor | None = None,
        eps: float = 0.0,
        norm: str = "layernorm",
    ) -> EmbeddingNorms:
        """Return the norms at a point.

        Args:
            tokens: (n,), numbers of rows of W_E.
            W_E: (d, D).
            gamma: (D,).
            gradient: (n, D), dQ/dY.
            positions: (n, D), added to the rows, or None.
            eps: of the norm.
            norm: ``"layernorm"`` or ``"rmsnorm"``.

        Raises:
            ValueError: if the norm is unknown, shapes do not fit, or a row has no scale.

        >>> W_E, gamma = torch.tensor([[1.0, -1.0], [0.5, -0.5]]), torch.ones(2)
        >>> EmbeddingNorms.measured(torch.tensor([0, 0, 0, 0, 1]), W_E, gamma, torch.ones(5, 2)).stretch  # sqrt(4)/1, 1/0.5
        2.0
        """
        E, gamma, G = doubles("EmbeddingNorms", "dD D nD", W_E, gamma, gradient)
        Z = E[tokens] if positions is None else E[tokens] + positions.detach().double()
        doubles("EmbeddingNorms", "nD nD", G, Z)
        rows, scales = row_scales("EmbeddingNorms", Z, eps, norm)
        steep = torch.zeros(len(E), dtype=E.dtype).scatter_reduce(0, tokens, 1 / scales[:, 0], "amax")
        stretch = float((steep * torch.bincount(tokens, minlength=len(E)).double().sqrt()).max())
        lower = euler_bounds(float((G * rows / scales * gamma).sum()), {"gamma": float(gamma.norm())})
        return cls(NormedInput.measured(Z, gamma, eps=eps, norm=norm), len(E), float(G.norm()), stretch, lower)


def theorem_4_3(norms: EmbeddingNorms) -> GradientBounds:
    r"""Return bounds on dQ/dW_E and dQ/dgamma: Theorem 4.3, corrected (sharpness-disparity/b3-bound).

        W_E    max_k sqrt(c_k) / s_k  max_j|gamma_j|  ||dQ/dY||_F,      s_k = ||w_k centred|| / sqrt(D) without eps, positions
        gamma  ||dX_Norm/dgamma||_2 ||dQ/dY||_F

    W_E is attained by a gain of equal entries and a gradient at the token with the largest quotient, orthogonal to its row and
    to 1 (D >= 3); gamma by one-hot rows. The bound from below is that of gamma: rows of dQ/dW_E are orthogonal to those of W_E.
    The number of entries of W_E counts tokens that never occur, and so does S(Emb).

    >>> norms = EmbeddingNorms.a_priori(NormedInput.a_priori(4, 5, 2.0, 1.0), 7, 3.0, least_row=5**0.5, most=4)
    >>> {letter: round(bound, 12) for letter, bound in theorem_4_3(norms).upper.items()}
    {'W_E': 6.0, 'gamma': 12.0}
    """
    at = norms.inputs
    upper = {"W_E": norms.stretch * at.gamma_max * norms.gradient, "gamma": at.column * norms.gradient}
    return GradientBounds(upper, {"W_E": norms.vocabulary * at.D, "gamma": at.D}, norms.lower)
