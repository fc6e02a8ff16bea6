r"""A priori bounds on the Hessian of a post-norm transformer block: from norms alone, hence over a whole ball of weights.

Y = N(X + F(X)), S = Y + sigma(Y W_1) W_2, Z = N(S), loss ||Z - target||_F^2 / (L d), sigma ReLU, leaky ReLU or the identity.
Besides norms of the weights it takes a lower bound on the standard deviations of the rows of X + F and of S: without one, and
with eps = 0, the Hessian of a LayerNorm is unbounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from derivations.arrays import Array, as_array, to_float
from derivations.bounds.attention_bounds import AttentionNorms, ResidualNorms, functional_norms, jacobian_norms
from derivations.bounds.attention_rows import split_heads
from derivations.bounds.attention_structured import as_mask
from derivations.bounds.block_norms import BlockNorms, spectral_norm
from derivations.bounds.constants import norm_constants
from derivations.bounds.norm_rows import NormRows

_PIECEWISE_LINEAR = ("relu", "leaky_relu", "identity")


@dataclass(frozen=True)
class PostBlockNorms:
    """Norms of a post-norm block, the input of its a priori bound.

    Args:
        attention: norms of the attention, of X and of the target; ``d_out`` is the width d.
        w_1: ||W_1||_2.
        w_2: ||W_2||_2.
        sigma_1: lower bound on the standard deviations (RMSNorm: root mean squares) of the rows of X + F.
        sigma_2: the same for the rows of S.
        eps: of both norms.
        gain_1: largest |gamma| of the norm after attention.
        gain_2: largest |gamma| of the last norm.
        uniform: whether all gains of the last norm are equal, as they are without gains. Then ||Z||_F cancels from the loss but
            for eps, and the shift of the last norm counts as a part of the target.

    >>> attention = AttentionNorms(2, 1, 1.0, (1.0,), (1.0,), (1.0,), 1.0, d_out=3)
    >>> PostBlockNorms(attention, 1.0, 2.0, 0.0, 1.0, eps=0.25).s_1
    0.5
    """

    attention: AttentionNorms
    w_1: float
    w_2: float
    sigma_1: float
    sigma_2: float
    eps: float = 0.0
    gain_1: float = 1.0
    gain_2: float = 1.0
    uniform: bool = True

    @property
    def s_1(self) -> float:
        """Lower bound on the divisors of the norm after attention."""
        return math.sqrt(self.sigma_1**2 + self.eps)

    @property
    def s_2(self) -> float:
        """Lower bound on the divisors of the last norm."""
        return math.sqrt(self.sigma_2**2 + self.eps)

    @classmethod
    def measured(
        cls,
        X: Array,
        W_Q: Array,
        W_K: Array,
        W_V: Array,
        W_1: Array,
        W_2: Array,
        target: Array,
        *,
        W_O: Array | None = None,
        gamma_1: Array | None = None,
        gamma_2: Array | None = None,
        eps: float = 0.0,
        norm: str = "layernorm",
        leak: float = 0.0,
        mask: Array | None = None,
        heads: int = 1,
    ) -> PostBlockNorms:
        """Return the norms of given arrays, shapes as in ``post_block_structured``, and the deviations at that point.

        With equal gains and LayerNorm only the centred rows of the target matter, and their norms are taken. Biases and shifts
        are not covered.

        Args:
            X, W_Q, W_K, W_V, W_1, W_2, target, W_O, gamma_1, gamma_2, eps, norm, mask, heads: as there.
            leak: slope of the activation below zero: 0 for ReLU, 1 for the identity.

        Raises:
            ValueError: if the leak is not between -1 and 1, as the bound takes slopes to be.
        """
        if not -1 <= leak <= 1:
            raise ValueError(f"PostBlockNorms.measured: the leak is {leak}; expected a slope between -1 and 1")
        x, q, k, v, w1, w2, t = (to_float(as_array(a)).double() for a in (X, W_Q, W_K, W_V, W_1, W_2, target))
        o = None if W_O is None else to_float(as_array(W_O)).double()
        gains = [None if g is None else to_float(as_array(g)).double() for g in (gamma_1, gamma_2)]
        heads_at = split_heads(x, q, k, v, o, None if mask is None else as_mask(mask), heads, None)
        first = NormRows(x + torch.stack([h.value for h in heads_at]).sum(0), gains[0], None, eps, norm)
        a = first.value @ w1
        last = NormRows(first.value + torch.where(a > 0, a, leak * a) @ w2, gains[1], None, eps, norm)
        uniform = gains[1] is None or bool((gains[1] == gains[1][0]).all())
        seen = t - t.mean(1, keepdim=True) if uniform and norm == "layernorm" else t
        return cls(
            attention=AttentionNorms.measured(x, q, k, v, seen, W_O=o, heads=heads),
            w_1=spectral_norm(w1),
            w_2=spectral_norm(w2),
            sigma_1=float(first.centred.square().mean(1).min().sqrt()),
            sigma_2=float(last.centred.square().mean(1).min().sqrt()),
            eps=eps,
            gain_1=1.0 if gains[0] is None else float(gains[0].abs().max()),
            gain_2=1.0 if gains[1] is None else float(gains[1].abs().max()),
            uniform=uniform,
        )

    def inflated(self, radius: float) -> PostBlockNorms:
        """Return norms and deviations that hold for all weights within Frobenius distance ``radius``.

        A row's deviation changes by at most ||change|| / sqrt(d), and X + F and S by at most radius times the norms of their
        Jacobians in the ball. Where nothing is left of a deviation and eps = 0 the bound is infinite.
        """
        wide = replace(self, attention=self.attention.inflated(radius), w_1=self.w_1 + radius, w_2=self.w_2 + radius)
        root = math.sqrt(self.attention.d_out)
        attention = math.hypot(*jacobian_norms(wide.attention).values())
        near = replace(wide, sigma_1=max(self.sigma_1 - radius * attention / root, 0.0))
        if near.s_1 == 0:
            return replace(near, sigma_2=0.0)
        return replace(near, sigma_2=max(self.sigma_2 - radius * math.hypot(*_output_jacobians(near).values()) / root, 0.0))


def post_block_a_priori(norms: PostBlockNorms, *, activation: str = "relu") -> BlockNorms:
    r"""Return bounds on the Hessian blocks of the block, in place of Theorem 6 of Closing the Curvature Gap.

    With N = L d, j = 1 + w_1 w_2, y = gain_1 sqrt(N), c = 2/sqrt(3 d), attention's g and f of ``attention_a_priori``, and

        J_1 = gain_1 / s_1,   K_1 = gain_1 c / s_1^2          first and second derivative of the first norm
        r = gain_2 tau / s_2 + gain_2^2 sqrt(d) eps / s_2^3   gradient of a row of S; its Frobenius norm R with ||T||_F, sqrt(N)
        K = gain_2 c tau / s_2^2 + gain_2^2 min(1, 3 eps / s_2^2) / s_2^2 [0 if eps = 0]     Hessian in a row of S

    and b = (j J_1 g, w_2 y, w_1 y) for attention, W_1, W_2, the blocks are 2/N times K b b^T plus

        attention     f with the gradient j J_1 R (rows j J_1 r)  +  K_1 j r g g^T
        attention, W_1: w_2 R J_1 g,    attention, W_2: w_1 R J_1 g,    W_1, W_2: y R

    (gains, eps, W_O and heads added). Unless the last norm's gains are equal, tau is replaced by
    gain_2 sqrt(d) + tau and K by gain_2^2 / s_2^2 + gain_2 c (gain_2 sqrt(d) + tau) / s_2^2.

    Args:
        norms: of the weights, and lower bounds on the deviations.
        activation: ``"relu"``, ``"leaky_relu"`` or ``"identity"``.

    Raises:
        ValueError: for a smooth activation, which would need a bound on its second derivative.

    A target that is zero leaves nothing, as all rows of Z have the same norm:

    >>> attention = AttentionNorms(2, 1, 1.0, (1.0,), (1.0,), (1.0,), 0.0, d_out=3)
    >>> post_block_a_priori(PostBlockNorms(attention, 1.0, 1.0, 1.0, 1.0)).whole
    0.0
    """
    if activation not in _PIECEWISE_LINEAR:
        raise ValueError(
            f"post_block_a_priori: the activation is {activation!r}, whose second derivative the bound has no term for; expected "
            f"one of {', '.join(map(repr, _PIECEWISE_LINEAR))}. Use post_block_structured at a point."
        )
    inner = norms.attention
    names = (*inner.names, "W_1", "W_2")
    if norms.s_1 == 0 or norms.s_2 == 0:
        return BlockNorms(names, torch.full((len(names), len(names)), math.inf, dtype=torch.float64, device="cpu"), {}, math.inf)
    d, L, j = inner.d_out, inner.length, 1 + norms.w_1 * norms.w_2
    (t_F, tau), y = inner.target_norms, norms.gain_1 * math.sqrt(L * d)
    J_1, K_1 = norms.gain_1 / norms.s_1, norms.gain_1 * _hessian_constant(d, norms.s_1, norms.eps)
    r, R, K = _at_S(norms, tau, t_F)

    b = torch.tensor(list(_output_jacobians(norms).values()), dtype=torch.float64, device="cpu")
    matrix = K * torch.outer(b, b)
    g = torch.tensor(list(jacobian_norms(inner).values()), dtype=torch.float64, device="cpu")
    pulled = ResidualNorms(j * J_1 * R, j * J_1 * R, j * J_1 * r)
    n = len(g)
    matrix[:n, :n] += functional_norms(inner, pulled) + K_1 * j * r * torch.outer(g, g)
    for column, weight in ((n, norms.w_2), (n + 1, norms.w_1)):
        matrix[:n, column] += weight * R * J_1 * g
        matrix[column, :n] += weight * R * J_1 * g
    matrix[n, n + 1] += y * R
    matrix[n + 1, n] += y * R
    parts = {"j": j, "J_1": J_1, "K_1": K_1, "gradient_S": r, "hessian_S": K, "Y": y}
    return BlockNorms(names, 2 / (L * d) * matrix, parts)


def _at_S(norms: PostBlockNorms, tau: float, t_F: float) -> tuple[float, float, float]:
    """Bounds on a row of the gradient at S, on its Frobenius norm, and on the Hessian in a row of S, times L d / 2."""
    d, L, s, g = norms.attention.d_out, norms.attention.length, norms.s_2, norms.gain_2
    c = _hessian_constant(d, s, norms.eps)
    if not norms.uniform:
        wide, wide_F = g * math.sqrt(d) + tau, g * math.sqrt(L * d) + t_F
        return g * wide / s, g * wide_F / s, g**2 / s**2 + g * c * wide
    own = g**2 * math.sqrt(d) * norms.eps / s**3
    r, R = g * tau / s + own, g * t_F / s + math.sqrt(L) * own
    return r, R, g * c * tau + g**2 / s**2 * min(1.0, 3 * norms.eps / s**2)


def _output_jacobians(norms: PostBlockNorms) -> dict[str, float]:
    """Bounds b on ||dS/dW||_2 for every weight."""
    j, y = 1 + norms.w_1 * norms.w_2, norms.gain_1 * math.sqrt(norms.attention.length * norms.attention.d_out)
    through = {name: j * norms.gain_1 / norms.s_1 * g for name, g in jacobian_norms(norms.attention).items()}
    return {**through, "W_1": norms.w_2 * y, "W_2": norms.w_1 * y}


def _hessian_constant(d: int, s: float, eps: float) -> float:
    """The map norm of the second derivative of a norm for rows with divisors of at least s."""
    here = 2 / (math.sqrt(3 * d) * s**2)
    return min(here, norm_constants(d, eps).hessian_map) if eps > 0 else here
