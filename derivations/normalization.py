r"""LayerNorm and RMSNorm at a point: one formula in vec_r, read with a centring matrix C or with C = I.

Row i of X in R^{L x d} is centred and divided by its scale, with ^X = P X C the normalised rows:

```math
s_i = \sqrt{\|Cx_i\|^2/d + \varepsilon},\qquad P = \mathrm{diag}(1/s),\qquad Y = \hat X\,\mathrm{diag}(\gamma) + 1_L\beta^\top
```

"Closing the Curvature Gap" treats LayerNorm with gamma = 1, beta = 0, eps = 0; its own formulas (Theorems 2 and 3) are
in ``derivations.layernorm_theorems``. The forms below are shorter, hold for every gain, shift and eps, and give RMSNorm
by C -> I_d (which the paper does not have). eps enters through s alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from derivations.arrays import Array, Scalar, as_array, is_exact, reciprocal, scale, sqrt
from derivations.layernorm_theorems import LayerNormTheorems, theorem2_jacobian, theorem3_hessian
from derivations.matrix import Commutation, Diagonal, DiagonalLift, Identity, Matrix, Named, Ones, in_letters, kron
from derivations.operation import OperationAt, shape_of
from derivations.row_blocks import Centring, RowBlocks
from derivations.vecr import kron_derivative_right, vec_r_column

__all__ = ["LayerNormAt", "LayerNormTheorems", "RMSNormAt", "theorem2_jacobian", "theorem3_hessian"]


@dataclass(frozen=True, eq=False)
class _NormalizationAt(OperationAt):
    """Base class of LayerNormAt and RMSNormAt: every formula, in terms of the matrix C."""

    X: Array
    gamma: Array | None = None

    def __post_init__(self) -> None:
        if self.X.ndim != 2:
            raise ValueError(f"{self._name}: X must be one sequence, an L x d array; got shape {shape_of(self.X)}")
        d = int(self.X.shape[1])
        for name, shape in self.arguments.items():
            if name != "X" and shape != (d,):
                raise ValueError(f"{self._name}: {name} must have shape ({d},), one entry for each column of X; got {shape}")

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    @abstractmethod
    def C(self) -> Matrix:
        """The d x d matrix that a row is multiplied with before it is scaled."""

    @property
    @abstractmethod
    def _constants(self) -> tuple[Array | None, Scalar | Array]:
        """The shift beta (or None) and eps."""

    # The named objects -----------------------------------------------------------------------------------------------

    @cached_property
    def M(self) -> Array:
        """The rows before scaling, M = X C, of shape (L, d)."""
        return (self.C @ self.X.T).T

    @cached_property
    def s(self) -> Array:
        """The row scales s_i = sqrt(||M_i||^2 / d + eps_i), as a column of shape (L, 1)."""
        rows, d = shape_of(self.X)
        squares = scale(Fraction(1, d), (self.M * self.M).sum(1).reshape(rows, 1))
        s = sqrt(squares + self._row_eps())
        zero = [i for i, value in enumerate(s.reshape(-1).tolist()) if value == 0]
        if zero:
            kind = "constant" if isinstance(self.C, Centring) else "zero"
            raise ValueError(f"{self._name}: the scale of row {zero[0]} is 0. It needs eps > 0 or rows that are not {kind}.")
        return s

    def _row_eps(self) -> Any:
        rows, eps = int(self.X.shape[0]), self._constants[1]
        if isinstance(eps, (list, tuple)) or hasattr(eps, "shape"):
            eps = as_array(eps).reshape(-1, 1)
            if eps.shape[0] not in (1, rows) or is_exact(eps) != is_exact(self.X):
                raise ValueError(
                    f"{self._name}: eps must be a number or an array like X with one entry for each of its {rows} rows"
                )
            return eps
        if not is_exact(self.X):
            return float(eps)
        if isinstance(eps, float) and not eps.is_integer():
            raise ValueError(f"{self._name}: X is exact, so eps must be too: got the float {eps!r}, pass a Fraction")
        return Fraction(eps) if isinstance(eps, float) else eps

    @cached_property
    def X_hat(self) -> Array:
        """The normalised rows P X C, of shape (L, d)."""
        rows = self.M * reciprocal(self.s)
        if self.alone is None or not is_exact(rows):
            return rows
        from derivations.smooth_sign import smooth_sign  # SymPy is slow to import

        return smooth_sign(self.M, self._row_eps(), rows)

    @cached_property
    def P(self) -> Matrix:
        """P = diag(1/s), L x L."""
        return Diagonal(reciprocal(self.s), "s^{-1}")

    @cached_property
    def V(self) -> Matrix:
        """V = blockdiag(^x_i) = diag(vec_r ^X) (I_L (x) 1_d), Ld x L."""
        return Named(in_letters("V"), RowBlocks(self.X_hat, r"\hat x_i"), "the normalised rows")

    @cached_property
    def gain(self) -> Matrix:
        """Gamma = diag(gamma), d x d; the identity where there is no gain."""
        return Identity(int(self.X.shape[1])) if self.gamma is None else Diagonal(self.gamma, r"\gamma")

    @cached_property
    def alone(self) -> Matrix | None:
        """diag(eps / s^2), L x L, where rows move along ^x alone: two entries with a mean taken off, or one; else None.

        There C - ^x ^x^T / d = (eps / s^2) C, of which the difference loses all digits where eps is small beside the variance.
        """
        eps, d = self._row_eps(), int(self.X.shape[1])
        if d != (2 if isinstance(self.C, Centring) else 1):
            return None
        inverse = reciprocal(self.s * self.s)
        return Diagonal(inverse * eps if hasattr(eps, "shape") else scale(eps, inverse), r"\varepsilon s^{-2}")

    @cached_property
    def core(self) -> Matrix:
        """I_L (x) C - V V^T / d, Ld x Ld: the Jacobian before the rows are divided by their scales."""
        rows, d = self.X.shape
        if self.alone is not None:
            return kron(self.alone, self.C)
        return kron(Identity(int(rows)), self.C) - Fraction(1, int(d)) * (self.V @ self.V.T)

    @cached_property
    def J0(self) -> Matrix:
        """The Jacobian with respect to X for gamma = 1: (P (x) I_d) (I_L (x) C - V V^T / d), Ld x Ld."""
        return kron(self.P, Identity(int(self.X.shape[1]))) @ self.core

    # Value and derivatives -------------------------------------------------------------------------------------------

    @cached_property
    def value(self) -> Array:
        """Y = ^X diag(gamma) + 1_L beta^T, of shape (L, d)."""
        beta = self._constants[0]
        scaled = self.X_hat if self.gamma is None else self.X_hat * self.gamma.reshape(1, -1)
        return scaled if beta is None else scaled + beta.reshape(1, -1)

    def _jacobian(self, name: str) -> Matrix:
        r"""Return dY/dX, dY/dgamma or dY/dbeta.

        dY/dX     = (P (x) Gamma) (I_L (x) C - V V^T / d)      Ld x Ld
        dY/dgamma = diag(vec_r ^X) (1_L (x) I_d)                Ld x d
        dY/dbeta  = 1_L (x) I_d                                 Ld x d
        """
        rows, d = shape_of(self.X)
        if name == "X":
            return kron(self.P, self.gain) @ self.core
        repeated = kron(Ones(rows), Identity(d))
        return repeated if name == "beta" else Diagonal(self.X_hat, r"\operatorname{vec}_r(\hat X)") @ repeated

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        r"""Return the derivative of dY/d(name_i) with respect to name_j.

        With E_n = (e_1 (x) e_1, ..., e_n (x) e_n), the block in X puts d^2 x d blocks h_i / s_i^2 where they belong:

            d2Y/dX dX = (I_L (x) K_{d,L} (x) I_d) (E_L (x) I_{d^2}) (P^2 (x) Gamma (x) I_d) blockdiag(h_i)
            h_i = -(vec_r(C) x^T + C (x) x + x (x) C) / d + 3 (x (x) x) x^T / d^2        with x = ^x_i

        (where x x^T = (1 - eps / s_i^2) d C, as of two entries: h_i = -3 (eps / s_i^2) (C (x) x) / d),
        and, V being blockdiag(x), blockdiag(h_i) is written without blocks, as products with V (x) I_d. The others:

            d2Y/dX dgamma = (I_{Ld} (x) J0^T) (I_L (x) K_{d,L} (x) I_d) (vec_r I_L (x) I_{d^2}) E_d
            d2Y/dgamma dX = (I_{Ld} (x) 1_L^T (x) I_d) E_{Ld} J0

        All blocks without X, and all with beta, are zero.
        """
        rows, d = shape_of(self.X)
        if (name_i, name_j) == ("X", "X"):
            return self._curvature
        if (name_i, name_j) == ("X", "gamma"):
            spread = kron_derivative_right(Identity(rows), (d, d)) @ DiagonalLift(d)
            return kron(Identity(rows * d), self.J0.T) @ spread
        if (name_i, name_j) == ("gamma", "X"):
            return kron(Identity(rows * d), Ones(1, rows), Identity(d)) @ DiagonalLift(rows * d) @ self.J0
        return None

    @cached_property
    def _curvature(self) -> Matrix:
        rows, d = shape_of(self.X)
        per_row, V_I = Identity(rows), kron(self.V, Identity(d))  # V_I = blockdiag(x_i (x) I_d)
        weights = kron(Diagonal(reciprocal(self.s * self.s), "s^{-2}"), self.gain, Identity(d))
        spread = kron(per_row, Commutation(d, rows), Identity(d)) @ kron(DiagonalLift(rows), Identity(d * d)) @ weights
        if self.alone is not None:
            return spread @ (Fraction(-3, d) * (kron(self.alone, Identity(d * d)) @ V_I @ kron(per_row, self.C)))
        swap = Identity(rows * d * d) + kron(per_row, Commutation(d, d))  # x (x) C  ->  x (x) C + C (x) x
        linear = kron(per_row, vec_r_column(self.C)) @ self.V.T + swap @ V_I @ kron(per_row, self.C)
        blocks = Fraction(-1, d) * linear + Fraction(3, d * d) * (V_I @ self.V @ self.V.T)
        return spread @ blocks


@dataclass(frozen=True, eq=False)
class LayerNormAt(_NormalizationAt):
    r"""Y = diag(1/s) X C diag(gamma) + 1_L beta^T with C = I - 1 1^T / d, at a point.

    The paper's Sections 3 and 4.2 give the row statistics with the wrong range of summation and gamma, beta in R^m:
    corrected, they run over the d features of a row, and gamma, beta are in R^d (curvature-gap/sec3-ln, curvature-gap/sec4.2-gb).

    Args:
        X: L x d.
        gamma: (d,), the gain; None for 1, which is then no argument.
        beta: (d,), the shift; None for 0, which is then no argument.
        eps: a number, or one for each row ((L,) or (L, 1)): exact tests choose it to make the square roots rational.

    Raises:
        ValueError: if the shapes do not fit, or a scale is zero.

    >>> import torch
    >>> point = LayerNormAt(torch.tensor([[1.0, 3.0, 2.0, 2.0]]), eps=0.5)
    >>> point.s.tolist(), point.value.tolist()
    ([[1.0]], [[-1.0, 1.0, 0.0, 0.0]])
    >>> point.jacobian("X").dense()[0].tolist()  # C - x x^T / 4, first row
    [0.5, 0.0, -0.25, -0.25]
    """

    argument_names = ("X", "gamma", "beta")
    beta: Array | None = None
    eps: Scalar | Array = 0

    @property
    def _constants(self) -> tuple[Array | None, Scalar | Array]:
        return self.beta, self.eps

    @cached_property
    def C(self) -> Matrix:
        """The centring matrix I - 1 1^T / d."""
        return Centring(int(self.X.shape[1]))


@dataclass(frozen=True, eq=False)
class RMSNormAt(_NormalizationAt):
    r"""Y = diag(1/s) X diag(gamma) with s_i = sqrt(||x_i||^2 / d + eps), at a point: LayerNorm with C = I.

    Args:
        X: L x d.
        gamma: (d,), the gain; None for 1, which is then no argument.
        eps: a number, or one for each row ((L,) or (L, 1)).

    Raises:
        ValueError: if the shapes do not fit, or a scale is zero.

    >>> import torch
    >>> point = RMSNormAt(torch.tensor([[2.0, 0.0, 0.0, 0.0]]))
    >>> point.value.tolist(), point.jacobian("X").dense()[1].tolist()
    ([[2.0, 0.0, 0.0, 0.0]], [0.0, 1.0, 0.0, 0.0])
    """

    argument_names = ("X", "gamma")
    eps: Scalar | Array = 0

    @property
    def _constants(self) -> tuple[Array | None, Scalar | Array]:
        return None, self.eps

    @cached_property
    def C(self) -> Matrix:
        """The identity: RMSNorm does not centre."""
        return Identity(int(self.X.shape[1]))
