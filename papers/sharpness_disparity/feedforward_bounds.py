r"""Theorem 4.1 of The Sharpness Disparity Principle, corrected: a feed-forward network and the gain in front of it.

Y = X + F(Norm(X; gamma)) without biases, and a loss Q with the gradient G = dQ/dY (n x D):

    F = sigma(M) W_2, M = X_Norm W_1        dW_2 = A^T G       dW_1 = X_Norm^T E,    E = G W_2^T * sigma'(M)
    F = (sigma(T) * U) W_down, T = X_Norm W_gate, U = X_Norm W_up      (SwiGLU: sigma = silu)
                                            dW_down = h^T G    dW_up = X_Norm^T E_u, E_u = G W_down^T * sigma(T)
                                                               dW_gate = X_Norm^T E_g, E_g = G W_down^T * U * sigma'(T)
    dgamma_j = sum_i (X_std * dQ/dX_Norm)_ij

with * entry by entry. The factors between G and a parameter enter by their spectral norms: the print has ||dA/dM||_F, up to
sqrt(n M) times as large, and n sqrt(D) where sqrt(n (D - 1)) is enough.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from derivations.activation_functions import derivatives
from derivations.bounds.block_norms import spectral_norm
from derivations.bounds.constants import STEEPNESS, Steepness
from papers.sharpness_disparity.gradient_bounds import GradientBounds, NormedInput, doubles, euler_bounds, standardised

HOMOGENEOUS = ("identity", "relu", "leaky_relu")
"""Activations with sigma(c z) = c sigma(z) for c > 0."""


@dataclass(frozen=True)
class FeedForwardNorms:
    """Norms that Theorem 4.1 needs for Y = X + sigma(X_Norm W_1) W_2.

    Args:
        inputs: the norm in front.
        M: hidden width.
        gradient: ||dQ/dY||_F.
        w_1: ||W_1||_2.
        w_2: ||W_2||_2.
        steepness: of sigma.
        slope: max |sigma'| at the point, or None for ``steepness.slope``.
        a: ||A||_2, or None for its bound by the other norms.
        lower: bounds from below that are known.
    """

    inputs: NormedInput
    M: int
    gradient: float
    w_1: float
    w_2: float
    steepness: Steepness = STEEPNESS["relu"]
    slope: float | None = None
    a: float | None = None
    lower: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measured(
        cls,
        X: Tensor,
        gamma: Tensor,
        W_1: Tensor,
        W_2: Tensor,
        gradient: Tensor,
        *,
        activation: str = "relu",
        eps: float = 0.0,
        norm: str = "layernorm",
    ) -> FeedForwardNorms:
        """Return the norms at a point.

        Args:
            X: (n, D), the input of the norm.
            gamma: (D,).
            W_1: (D, M).
            W_2: (M, D).
            gradient: (n, D), dQ/dY.
            activation: a kind of ``derivations.activation``.
            eps: of the norm.
            norm: ``"layernorm"`` or ``"rmsnorm"``.

        Raises:
            ValueError: if the norm or the activation is unknown, shapes do not fit, or a row of X has no scale.
        """
        X, gamma, W_1, W_2, G = doubles("FeedForwardNorms", "nD D DM MD nD", X, gamma, W_1, W_2, gradient)
        A, slopes, _ = derivatives(activation, (standardised(X, eps=eps, norm=norm) * gamma) @ W_1)
        product, linear = float((G * (A @ W_2)).sum()), {"W_2": W_2}
        if activation in HOMOGENEOUS:
            linear |= {"W_1": W_1, "gamma": gamma}
        return cls(
            inputs=NormedInput.measured(X, gamma, eps=eps, norm=norm),
            M=W_1.shape[1],
            gradient=float(G.norm()),
            w_1=spectral_norm(W_1),
            w_2=spectral_norm(W_2),
            steepness=STEEPNESS[activation],
            slope=float(slopes.abs().max()),
            a=spectral_norm(A),
            lower=euler_bounds(product, {letter: float(theta.norm()) for letter, theta in linear.items()}),
        )


def theorem_4_1(norms: FeedForwardNorms) -> GradientBounds:
    r"""Return bounds on dQ/dW_1, dQ/dW_2 and dQ/dgamma: Theorem 4.1, corrected (sharpness-disparity/thm4.1-w2,
    sharpness-disparity/thm4.1-activation).

        W_1    sup|sigma'| ||X_Norm||_2 ||W_2||_2 ||dQ/dY||_F
        W_2    ||A||_2 ||dQ/dY||_F,    ||A||_2 <= sup|sigma(z)/z| sqrt(n) rho ||W_1||_2
        gamma  sup|sigma'| ||dX_Norm/dgamma||_2 ||W_1||_2 ||W_2||_2 ||dQ/dY||_F

    All three are attained: by one token, X and gamma one-hot, M = 1 and dQ/dY along W_2. Bounds from below are those of Euler
    (ours/ffn-euler): all three for a homogeneous sigma, that of W_2 for any.

    >>> theorem_4_1(FeedForwardNorms(NormedInput.a_priori(4, 5, 1.0), M=7, gradient=1.0, w_1=2.0, w_2=3.0)).upper
    {'W_1': 12.0, 'W_2': 8.0, 'gamma': 24.0}
    """
    at, slope = norms.inputs, norms.steepness.slope if norms.slope is None else norms.slope
    back = slope * norms.w_2 * norms.gradient  # ||E||_F
    a = norms.steepness.chord * math.sqrt(at.n) * at.rho * norms.w_1 if norms.a is None else norms.a
    upper = {"W_1": at.x * back, "W_2": a * norms.gradient, "gamma": at.column * norms.w_1 * back}
    return GradientBounds(upper, {"W_1": at.D * norms.M, "W_2": at.D * norms.M, "gamma": at.D}, norms.lower)


@dataclass(frozen=True)
class GatedNorms:
    """Norms that Theorem 4.1 needs for Y = X + (sigma(X_Norm W_gate) * X_Norm W_up) W_down.

    Args:
        inputs: the norm in front.
        M: hidden width.
        gradient: ||dQ/dY||_F.
        w_gate: ||W_gate||_2.
        w_up: ||W_up||_2.
        w_down: ||W_down||_2.
        steepness: of sigma.
        gate: max |sigma(T)|, or None for its bound by the other norms.
        up: max |U * sigma'(T)|, or None.
        h: ||sigma(T) * U||_2, or None.
        lower: bounds from below that are known.
    """

    inputs: NormedInput
    M: int
    gradient: float
    w_gate: float
    w_up: float
    w_down: float
    steepness: Steepness = STEEPNESS["silu"]
    gate: float | None = None
    up: float | None = None
    h: float | None = None
    lower: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measured(
        cls,
        X: Tensor,
        gamma: Tensor,
        W_gate: Tensor,
        W_up: Tensor,
        W_down: Tensor,
        gradient: Tensor,
        *,
        activation: str = "silu",
        eps: float = 0.0,
        norm: str = "rmsnorm",
    ) -> GatedNorms:
        """Return the norms at a point.

        Arguments and errors are those of :meth:`FeedForwardNorms.measured`; W_gate and W_up are (D, M), W_down is (M, D).
        """
        arrays = (X, gamma, W_gate, W_up, W_down, gradient)
        X, gamma, W_gate, W_up, W_down, G = doubles("GatedNorms", "nD D DM DM MD nD", *arrays)
        N = standardised(X, eps=eps, norm=norm) * gamma
        gate, slopes, _ = derivatives(activation, N @ W_gate)
        U = N @ W_up
        h, product = gate * U, float((G * ((gate * U) @ W_down)).sum())
        linear = {"W_up": W_up, "W_down": W_down, **({"W_gate": W_gate} if activation in HOMOGENEOUS else {})}
        return cls(
            inputs=NormedInput.measured(X, gamma, eps=eps, norm=norm),
            M=W_up.shape[1],
            gradient=float(G.norm()),
            w_gate=spectral_norm(W_gate),
            w_up=spectral_norm(W_up),
            w_down=spectral_norm(W_down),
            steepness=STEEPNESS[activation],
            gate=float(gate.abs().max()),
            up=float((U * slopes).abs().max()),
            h=spectral_norm(h),
            lower=euler_bounds(product, {letter: float(theta.norm()) for letter, theta in linear.items()}),
        )


def theorem_4_1_gated(norms: GatedNorms) -> GradientBounds:
    r"""Return bounds on the gradients of a gated network, SwiGLU for one, which Theorem 4.1 leaves out
    (sharpness-disparity/thm4.1-activation).

        W_up    ||X_Norm||_2 max|sigma(T)| ||W_down||_2 ||dQ/dY||_F,           max|sigma(T)| <= chord rho ||W_gate||_2
        W_gate  ||X_Norm||_2 max|U sigma'(T)| ||W_down||_2 ||dQ/dY||_F,        max|U sigma'(T)| <= slope rho ||W_up||_2
        W_down  ||h||_2 ||dQ/dY||_F,                                           ||h||_2 <= max|sigma(T)| sqrt(n) rho ||W_up||_2
        gamma   ||dX_Norm/dgamma||_2 (max|sigma(T)| ||W_up||_2 + max|U sigma'(T)| ||W_gate||_2) ||W_down||_2 ||dQ/dY||_F

    Bounds from below: the network is linear in W_up and in W_down, and in W_gate where sigma is homogeneous.

    >>> inputs = NormedInput.a_priori(1, 2, 1.0, norm="rmsnorm")
    >>> unit = GatedNorms(inputs, M=3, gradient=1.0, w_gate=1.0, w_up=1.0, w_down=1.0, steepness=STEEPNESS["relu"])
    >>> {letter: round(bound, 12) for letter, bound in theorem_4_1_gated(unit).upper.items()}
    {'W_gate': 2.0, 'W_up': 2.0, 'W_down': 2.0, 'gamma': 4.0}
    """
    at, sigma = norms.inputs, norms.steepness
    gate = sigma.chord * at.rho * norms.w_gate if norms.gate is None else norms.gate
    up = sigma.slope * at.rho * norms.w_up if norms.up is None else norms.up
    h = gate * math.sqrt(at.n) * at.rho * norms.w_up if norms.h is None else norms.h
    back = norms.w_down * norms.gradient
    upper = {
        "W_gate": at.x * up * back,
        "W_up": at.x * gate * back,
        "W_down": h * norms.gradient,
        "gamma": at.column * (gate * norms.w_up + up * norms.w_gate) * back,
    }
    size = at.D * norms.M
    return GradientBounds(upper, {"W_gate": size, "W_up": size, "W_down": size, "gamma": at.D}, norms.lower)
