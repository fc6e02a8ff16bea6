r"""Inputs and results of the Sharpness Disparity bounds: norms of a layer, bounds on its gradients and average sharpness.

X_Norm = X_std diag(gamma) goes into every layer of the theorems. For n tokens of width D, LayerNorm, eps >= 0, no shift:

    ||row of X_std||^2 <= D,    |entry| <= sqrt(D - 1),    ||row of X_Norm|| <= min(sqrt(D - 1) ||gamma||, sqrt(D) max |gamma_j|)

all of them attained, the second and third by one-hot rows (sharpness-disparity/b1-x-norm; the paper has n sqrt(D) ||gamma|| for
all of X_Norm, where sqrt(n (D - 1)) ||gamma|| is enough). For RMSNorm D - 1 is D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from derivations.bounds.block_norms import spectral_norm
from derivations.bounds.constants import is_centred, row_scales, token_covariance_bound


@dataclass(frozen=True)
class NormedInput:
    """Norms of X_Norm = X_std diag(gamma), the input of a layer behind a norm.

    Args:
        n: number of tokens.
        D: width.
        gamma: ||gamma||.
        gamma_max: max_j |gamma_j|.
        x: ||X_Norm||_2.
        rho: the largest norm of a row of X_Norm.
        entry: the largest entry of X_std.
        column: the largest norm of a column of X_std, which is ||dX_Norm/dgamma||_2.
    """

    n: int
    D: int
    gamma: float
    gamma_max: float
    x: float
    rho: float
    entry: float
    column: float

    @classmethod
    def a_priori(cls, n: int, D: int, gamma: float, gamma_max: float | None = None, *, norm: str = "layernorm") -> NormedInput:
        """Return bounds for every X, given ||gamma|| and, if known, max |gamma_j| (sharpness-disparity/b1-x-norm).

        Raises:
            ValueError: if the norm is unknown.

        >>> NormedInput.a_priori(4, 5, 3.0).x  # sqrt(n (D - 1)) ||gamma||
        12.0
        >>> round(NormedInput.a_priori(4, 4, 2.0, 1.0).x, 12)  # sqrt(n D) max |gamma_j| = 4 < sqrt(n (D - 1)) ||gamma||
        4.0
        """
        entry = math.sqrt(D - 1 if is_centred("NormedInput.a_priori", norm) else D)
        largest = gamma if gamma_max is None else gamma_max
        rho = min(entry * gamma, math.sqrt(D) * largest)
        return cls(n, D, gamma, largest, math.sqrt(n) * rho, rho, entry, math.sqrt(n) * entry)

    @classmethod
    def measured(cls, X: Tensor, gamma: Tensor, *, eps: float = 0.0, norm: str = "layernorm") -> NormedInput:
        """Return the norms at a point.

        Args:
            X: (n, D), what goes into the norm.
            gamma: (D,).
            eps: of the norm.
            norm: ``"layernorm"`` or ``"rmsnorm"``.

        Raises:
            ValueError: if the norm is unknown, or a row has no scale.

        >>> NormedInput.measured(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([3.0, 0.0])).rho
        3.0
        """
        std = standardised(X, eps=eps, norm=norm)
        N, (n, D) = std * gamma, std.shape
        rho, column = (float(torch.linalg.vector_norm(A, dim=axis).max()) for A, axis in ((N, 1), (std, 0)))
        return cls(n, D, float(gamma.norm()), float(gamma.abs().max()), spectral_norm(N), rho, float(std.abs().max()), column)

    @property
    def covariance(self) -> float:
        """A bound on ||X_Norm^T (diag(p) - p p^T) X_Norm||_2 for any probabilities p of the tokens."""
        return 0.0 if self.n == 1 else token_covariance_bound(self.x, self.rho)


def standardised(X: Tensor, *, eps: float = 0.0, norm: str = "layernorm") -> Tensor:
    """Return X_std for rows of X: divided by the root of their mean square plus eps, for LayerNorm after centring.

    Raises:
        ValueError: if the norm is unknown, or a row has no scale.

    >>> standardised(torch.tensor([[3.0, 1.0]])).tolist()
    [[1.0, -1.0]]
    """
    rows, scale = row_scales("standardised", X.double(), eps, norm)
    return rows / scale


def doubles(who: str, shapes: str, *arrays: Tensor) -> tuple[Tensor, ...]:
    """Return arrays in float64, detached, after comparing their shapes, in which one letter is one size.

    Raises:
        ValueError: if a shape is another one.

    >>> doubles("f", "nD D", torch.ones(2, 3), torch.ones(4))
    Traceback (most recent call last):
    ValueError: f: array 2 has shape (4,); expected (D) with n = 2, D = 3
    """
    sizes: dict[str, int] = {}
    for k, (array, letters) in enumerate(zip(arrays, shapes.split(), strict=True), 1):
        if array.ndim != len(letters) or any(sizes.setdefault(c, n) != n for c, n in zip(letters, array.shape, strict=True)):
            known = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
            raise ValueError(f"{who}: array {k} has shape {tuple(array.shape)}; expected ({', '.join(letters)}) with {known}")
    return tuple(array.detach().double() for array in arrays)


@dataclass(frozen=True)
class GradientBounds:
    """lower[theta] <= ||dQ/dtheta||_F <= upper[theta] for the parameters of a layer.

    Args:
        upper: bounds from above by the letter of the parameter.
        sizes: the number of its entries.
        lower: bounds from below, of the parameters for which one is known.

    >>> bounds = GradientBounds({"W_Q": 6.0, "W_K": 8.0}, {"W_Q": 16, "W_K": 4}, {"W_Q": 4.0})
    >>> bounds.sharpness("W_Q"), bounds.sharpness("W_Q", "W_K", terms=2)
    ((1.0, 2.25), (1.6, 10.0))
    """

    upper: Mapping[str, float]
    sizes: Mapping[str, int]
    lower: Mapping[str, float] = field(default_factory=dict)

    def sharpness(self, *letters: str, terms: int = 1) -> tuple[float, float]:
        """Return bounds on S = B ||g||^2 / #, Eq. 4, where parameters of a type pool squares and entries.

        Args:
            letters: the parameters of the type, W_Q and W_K for QK.
            terms: B, of which Q is the mean.

        Raises:
            ValueError: if there is no letter, or no parameter of that name.
        """
        unknown = [letter for letter in letters if letter not in self.sizes]
        if unknown or not letters:
            raise ValueError(f"sharpness: parameters {unknown}; expected one or more of {', '.join(self.sizes)}")
        size = sum(self.sizes[letter] for letter in letters)
        low, high = (math.hypot(*(bound.get(letter, 0.0) for letter in letters)) for bound in (self.lower, self.upper))
        return average_sharpness(low, size, terms), average_sharpness(high, size, terms)

    def __repr__(self) -> str:
        lines = [f"{'':6}{'entries':>10}{'||dQ/dtheta|| from':>20}{'to':>12}"]
        for letter, size in self.sizes.items():
            lines.append(f"{letter:6}{size:10}{self.lower.get(letter, 0.0):20.6g}{self.upper[letter]:12.6g}")
        return "\n".join(lines)


def average_sharpness(gradient_norm: float, parameters: int, terms: int = 1) -> float:
    r"""Return S = B ||grad||_F^2 / #parameters, Eq. 4 of The Sharpness Disparity Principle.

    The theorems print D^2 for the number of parameters of a weight; for W_1 and W_2 that is D M (sharpness-disparity/thm4.1-s-w).

    >>> average_sharpness(6.0, 9)
    4.0
    """
    return terms * gradient_norm**2 / parameters


def euler_bounds(product: float, norms: Mapping[str, float]) -> dict[str, float]:
    r"""Return |<dQ/dY, F>| / ||theta||_F for parameters in which the layer F is homogeneous of degree 1.

    Then <theta, dQ/dtheta> = <dQ/dY, F> (Euler; ours/ffn-euler, ours/attention-euler), and Cauchy-Schwarz gives a bound from
    below.

    Args:
        product: <dQ/dY, F>, F without the residual.
        norms: ||theta||_F by letter.

    >>> euler_bounds(-6.0, {"W_1": 2.0})
    {'W_1': 3.0}
    """
    return {letter: abs(product) / norm for letter, norm in norms.items() if norm > 0}
