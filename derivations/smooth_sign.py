"""x / sqrt(x^2 + eps): what LayerNorm gives for a row of two entries, and RMSNorm for a row of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import sympy

from derivations.arrays import Array


class SmoothSign(sympy.Function):  # type: ignore[misc]  # SymPy's classes have no types
    """x / sqrt(x^2 + eps), a function of SymPy whose derivative is a product.

    The quotient rule gives 1/s - x^2/s^3 with s^2 = x^2 + eps: a difference that loses all digits where eps is small beside x^2.

    >>> x, eps = sympy.symbols("x eps", real=True)
    >>> SmoothSign(x, eps).diff(x), SmoothSign(-x, eps), SmoothSign(x, eps).doit()
    (eps/(eps + x**2)**(3/2), -SmoothSign(x, eps), x/sqrt(eps + x**2))
    """

    nargs = 2

    @classmethod
    def eval(cls, x: Any, eps: Any) -> Any:
        """Return the quotient of numbers, and of an odd function the value at a positive multiple."""
        if x.is_number or eps.is_zero:
            return x / sympy.sqrt(x**2 + eps)
        return -cls(-x, eps) if x.could_extract_minus_sign() else None

    def fdiff(self, argindex: int = 1) -> Any:
        """Return the derivative with respect to x or eps."""
        x, eps = self.args
        return (eps if argindex == 1 else -x / 2) * (x**2 + eps) ** sympy.Rational(-3, 2)

    def doit(self, **hints: Any) -> Any:
        """Return the quotient."""
        x, eps = self.args
        return x / sympy.sqrt(x**2 + eps)


def smooth_sign(x: Array, eps: Any, otherwise: Array) -> Array:
    """Return x / sqrt(x^2 + eps) where x is symbolic, and the entries of ``otherwise`` elsewhere."""

    def entry(x: Any, eps: Any, quotient: Any) -> Any:
        return SmoothSign(x, eps) if getattr(x, "free_symbols", None) else quotient

    return np.frompyfunc(entry, 3, 1)(x, eps, otherwise)
