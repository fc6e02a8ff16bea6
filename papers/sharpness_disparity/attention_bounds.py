r"""Theorem 4.2 of The Sharpness Disparity Principle, corrected: attention and the gain in front of it.

Y = X + sum_h A_h X_Norm W_V^g W_O^h, A_h = softmax(c X_Norm W_Q^h (X_Norm W_K^g)^T + mask), where H query heads share H_kv heads
of keys and values (grouped-query attention; g is the group of h) and any mask leaves every token something to see. With rows
x_i of X_Norm, g_i of G = dQ/dY, and C_i^h = X_Norm^T (diag(a_i) - a_i a_i^T) X_Norm, the covariance of what row i sees,

    dW_O^h = (A_h X_Norm W_V^g)^T G                      dW_V^g = sum_{h in g} X_Norm^T A_h^T G W_O^hT
    dW_Q^h = c sum_i x_i g_i W_O^hT W_V^gT C_i W_K^g     dW_K^g = c sum_{h in g} sum_i C_i W_V^g W_O^h g_i^T x_i W_Q^h

A covariance is at most the square of the largest token, with any number of tokens: where the print has (n sqrt(D))^3 ||gamma||^3
||dA/dM||_F / sqrt(D) for W_Q and W_K (ours/thm4.2-sharper), sqrt(n) (D - 1)^{3/2} ||gamma||^3 / sqrt(D) is enough, and attained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from derivations.bounds.block_norms import spectral_norm
from papers.sharpness_disparity.gradient_bounds import GradientBounds, NormedInput, doubles, euler_bounds, standardised


class HeadNorms(NamedTuple):
    """Norms of the tokens averaged by the weights A_h of one query head.

    Args:
        mean: ||A_h X_Norm||_2.
        column: the largest norm of a column of A_h X_std.
        covariance: max_i ||C_i||_2.
        deviation: the largest standard deviation of a column of X_std under a row of A_h.
    """

    mean: float
    column: float
    covariance: float
    deviation: float

    @classmethod
    def a_priori(cls, inputs: NormedInput) -> HeadNorms:
        """Return bounds for any weights: the norm of a mean is at most the largest norm.

        >>> HeadNorms.a_priori(NormedInput.a_priori(4, 5, 1.0))
        HeadNorms(mean=4.0, column=4.0, covariance=4.0, deviation=2.0)
        """
        root = math.sqrt(inputs.n)
        return cls(root * inputs.rho, root * inputs.entry, inputs.covariance, inputs.entry)

    @classmethod
    def measured(cls, A: Tensor, X_std: Tensor, gamma: Tensor) -> HeadNorms:
        """Return the norms at a point.

        Args:
            A: (n, n), attention weights, rows of probabilities.
            X_std: (n, D).
            gamma: (D,).

        >>> uniform = torch.full((2, 2), 0.5)
        >>> HeadNorms.measured(uniform, torch.tensor([[2.0], [-2.0]]), torch.tensor([3.0]))
        HeadNorms(mean=0.0, column=0.0, covariance=36.0, deviation=2.0)
        """
        mean = A @ X_std
        centred = X_std - mean[:, None]  # (n, n, D): token j seen from row i
        variance = (A[:, :, None] * centred.square()).sum(1)
        C = (centred * gamma).mT @ (A[:, :, None] * centred * gamma)
        column, covariance = torch.linalg.vector_norm(mean, dim=0).max(), torch.linalg.matrix_norm(C, 2).max()
        return cls(spectral_norm(mean * gamma), float(column), float(covariance), math.sqrt(float(variance.max())))


@dataclass(frozen=True)
class AttentionGradientNorms:
    """Norms of an attention layer that Theorem 4.2 needs.

    Args:
        inputs: the norm in front.
        gradient: ||dQ/dY||_F.
        head_dim: width of the queries and keys of one head.
        q: ||W_Q||_2 for every query head.
        k: ||W_K||_2 for every head of keys and values; head h reads number h // (H / H_kv).
        v: ||W_V||_2 for every head of keys and values.
        o: ||W_O||_2 of the whole output projection.
        value_dim: width of the values of one head, or None for ``head_dim``.
        scale: c, or None for 1 / sqrt(head_dim).
        heads: norms from the attention weights, or None for their bounds by the other norms.
        lower: bounds from below that are known.

    Raises:
        ValueError: if the query heads cannot be shared out.
    """

    inputs: NormedInput
    gradient: float
    head_dim: int
    q: tuple[float, ...]
    k: tuple[float, ...]
    v: tuple[float, ...]
    o: float
    value_dim: int | None = None
    scale: float | None = None
    heads: tuple[HeadNorms, ...] | None = None
    lower: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.k or len(self.k) != len(self.v) or len(self.q) % len(self.k) or not self.q:
            counts = f"{len(self.q)} of queries, {len(self.k)} of keys, {len(self.v)} of values"
            raise ValueError(f"AttentionGradientNorms: heads {counts}; expected H, H_kv and H_kv with H a multiple of H_kv")

    @classmethod
    def measured(
        cls,
        X: Tensor,
        gamma: Tensor,
        W_Q: Tensor,
        W_K: Tensor,
        W_V: Tensor,
        W_O: Tensor,
        gradient: Tensor,
        *,
        heads: int = 1,
        kv_heads: int | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
        eps: float = 0.0,
        norm: str = "layernorm",
    ) -> AttentionGradientNorms:
        """Return the norms at a point.

        Args:
            X: (n, D), the input of the norm.
            gamma: (D,).
            W_Q: (D, H head_dim), one head after the other.
            W_K: (D, H_kv head_dim).
            W_V: (D, H_kv value_dim).
            W_O: (H value_dim, D).
            gradient: (n, D), dQ/dY.
            heads: H.
            kv_heads: H_kv, or None for H.
            mask: (n, n), boolean, True where a token may look, or None for everywhere.
            scale: c, or None for 1 / sqrt(head_dim).
            eps: of the norm.
            norm: ``"layernorm"`` or ``"rmsnorm"``.

        Raises:
            ValueError: if the heads or shapes do not fit, the norm is unknown, or a row of X has no scale.
        """
        arrays = (X, gamma, W_Q, W_K, W_V, W_O, gradient)
        X, gamma, W_Q, W_K, W_V, W_O, G = doubles("AttentionGradientNorms", "nD D DQ DK DV OD nD", *arrays)
        groups = heads if kv_heads is None else kv_heads
        if groups < 1 or heads % groups or W_Q.shape[1] % heads or W_K.shape[1] % groups or W_V.shape[1] % groups:
            shapes = ", ".join(f"{name} {tuple(W.shape)}" for name, W in (("W_Q", W_Q), ("W_K", W_K), ("W_V", W_V)))
            raise ValueError(f"AttentionGradientNorms: {heads} and {groups} heads for {shapes}; expected columns in equal parts")
        X_std = standardised(X, eps=eps, norm=norm)
        N = X_std * gamma
        q, k, v = W_Q.chunk(heads, 1), W_K.chunk(groups, 1), W_V.chunk(groups, 1)
        c = 1 / math.sqrt(q[0].shape[1]) if scale is None else scale
        shared = heads // groups
        found, values = [], []
        for h, W in enumerate(q):
            logits = c * N @ W @ (N @ k[h // shared]).mT
            A = torch.softmax(logits if mask is None else logits.masked_fill(~mask, -math.inf), 1)
            found.append(HeadNorms.measured(A, X_std, gamma))
            values.append(A @ N @ v[h // shared])
        product = float((G * (torch.cat(values, 1) @ W_O)).sum())
        q_norms, k_norms, v_norms = (tuple(spectral_norm(W) for W in weight) for weight in (q, k, v))
        return cls(
            inputs=NormedInput.measured(X, gamma, eps=eps, norm=norm),
            gradient=float(G.norm()),
            head_dim=q[0].shape[1],
            q=q_norms,
            k=k_norms,
            v=v_norms,
            o=spectral_norm(W_O),
            value_dim=v[0].shape[1],
            scale=c,
            heads=tuple(found),
            lower=euler_bounds(product, {"W_V": float(W_V.norm()), "W_O": float(W_O.norm())}),
        )


def theorem_4_2(norms: AttentionGradientNorms) -> GradientBounds:
    r"""Return bounds on dQ/dW_Q, dQ/dW_K, dQ/dW_V, dQ/dW_O and dQ/dgamma: Theorem 4.2, corrected (sharpness-disparity/b1-x-norm,
    sharpness-disparity/thm4.2-bound-qk).

    With x = ||X_Norm||_2, m_h = ||A_h X_Norm||_2, kappa_h = max_i ||C_i^h||_2, and q_h, k_g, v_g, o the spectral norms of the
    weights, all times ||dQ/dY||_F:

        W_O    sqrt(sum_h m_h^2 v_g^2)
        W_V    o max_g sqrt(sum_{h in g} m_h^2)
        W_Q    c x o max_h kappa_h v_g k_g
        W_K    c x o max_g v_g sqrt(sum_{h in g} kappa_h^2 q_h^2)
        gamma  o (|m' v| + c x' |kappa v k q| + c sqrt(n) rho |s sqrt(kappa) v k q|),      | | the norm over the heads

    with m'_h the largest column of A_h X_std, x' that of X_std, and s_h the largest standard deviation of a column of X_std under
    a row of A_h. Where A is not given, m_h <= sqrt(n) rho, kappa_h <= min(rho^2, x^2 / 2), and 0 for one token. All are attained:
    W_V, W_O and gamma by equal one-hot tokens, W_Q and W_K by two opposite ones that are seen equally. Bounds from below (claim
    C5) are those of W_V and W_O, in which F is linear; <W_Q, dW_Q> = <W_K, dW_K> gives none.

    >>> inputs = NormedInput.a_priori(2, 5, 0.5)  # two tokens of norm 1, x = sqrt(2)
    >>> unit = AttentionGradientNorms(inputs, gradient=1.0, head_dim=1, q=(1.0,), k=(1.0,), v=(1.0,), o=1.0)
    >>> {letter: round(bound, 12) for letter, bound in theorem_4_2(unit).upper.items() if letter in ("W_O", "W_V")}
    {'W_V': 1.414213562373, 'W_O': 1.414213562373}
    >>> round(theorem_4_2(unit).upper["W_Q"], 12)
    1.414213562373
    """
    at, groups = norms.inputs, len(norms.k)
    shared = len(norms.q) // groups
    c = 1 / math.sqrt(norms.head_dim) if norms.scale is None else norms.scale
    heads = (HeadNorms.a_priori(at),) * len(norms.q) if norms.heads is None else norms.heads
    k, v = ([w[h // shared] for h in range(len(heads))] for w in (norms.k, norms.v))
    both = [w_v * w_k * w_q for w_v, w_k, w_q in zip(v, k, norms.q, strict=True)]
    by_query = [head.covariance * w_v * w_k for head, w_v, w_k in zip(heads, v, k, strict=True)]
    by_key = [head.covariance * w_v * w_q for head, w_v, w_q in zip(heads, v, norms.q, strict=True)]
    of_keys = [head.deviation * math.sqrt(head.covariance) * w for head, w in zip(heads, both, strict=True)]
    through_values = math.hypot(*(head.column * w for head, w in zip(heads, v, strict=True)))
    through_queries = c * at.column * math.hypot(*(head.covariance * w for head, w in zip(heads, both, strict=True)))
    through_keys = c * math.sqrt(at.n) * at.rho * math.hypot(*of_keys)
    back = norms.o * norms.gradient
    upper = {
        "W_Q": c * at.x * back * max(by_query),
        "W_K": c * at.x * back * _largest_group(by_key, shared),
        "W_V": back * _largest_group([head.mean for head in heads], shared),
        "W_O": norms.gradient * math.hypot(*(head.mean * w for head, w in zip(heads, v, strict=True))),
        "gamma": back * (through_values + through_queries + through_keys),
    }
    value_dim = norms.head_dim if norms.value_dim is None else norms.value_dim
    columns = {"W_Q": len(heads) * norms.head_dim, "W_K": groups * norms.head_dim}
    columns |= {"W_V": groups * value_dim, "W_O": len(heads) * value_dim, "gamma": 1}
    return GradientBounds(upper, {letter: at.D * width for letter, width in columns.items()}, norms.lower)


def _largest_group(values: Sequence[float], shared: int) -> float:
    return max(math.hypot(*values[start : start + shared]) for start in range(0, len(values), shared))
