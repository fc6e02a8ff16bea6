r"""Bounds on the gradients of a layer's parameters, from above and from below, and on the average sharpness that they imply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


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
        """Return bounds on S = B ||g||^2 / #, Eq. 4, where parameters of a type pool squares and entries (claim C7).

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

    The theorems print D^2 for the number of parameters of a weight; for W_1 and W_2 that is D M (claim B14).

    >>> average_sharpness(6.0, 9)
    4.0
    """
    return terms * gradient_norm**2 / parameters


def euler_bounds(product: float, norms: Mapping[str, float]) -> dict[str, float]:
    r"""Return |<dQ/dY, F>| / ||theta||_F for parameters in which the layer F is homogeneous of degree 1.

    Then <theta, dQ/dtheta> = <dQ/dY, F> (Euler; claims B7, C5), and Cauchy-Schwarz gives a bound from below.

    Args:
        product: <dQ/dY, F>, F without the residual.
        norms: ||theta||_F by letter.

    >>> euler_bounds(-6.0, {"W_1": 2.0})
    {'W_1': 3.0}
    """
    return {letter: abs(product) / norm for letter, norm in norms.items() if norm > 0}
