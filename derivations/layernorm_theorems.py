r"""Theorems 2 and 3 of "Closing the Curvature Gap": the LayerNorm Jacobian and Hessian the way the paper builds them.

LayerNorm(X) = P(X) M(X) for X in R^{L x d}, with gamma = 1, beta = 0, eps = 0, and

```math
M = X - X11^\top/d,\qquad \sigma = (M^{\circ2}1)^{\circ1/2}/\sqrt d,\qquad D = \mathrm{diag}(\sigma),\qquad P = D^{-1}
```

``derivations.normalization`` has the compact forms, for any gain, shift and eps, that these expand to. Every object of
Appendix C.2 and C.3 is here under its own letter; a name ``dA1`` denotes dA_1/dX. The printed Hessian is right in its
skeleton and wrong in four pieces, each corrected where it is defined (curvature-gap/thm3-dpkron, curvature-gap/thm3-dd,
curvature-gap/thm3-d2p, curvature-gap/thm3-da3), and one piece that it needs is not printed (curvature-gap/thm3-da2).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from derivations.arrays import Array, Scalar, inverse_sqrt, reciprocal, scale, sqrt
from derivations.matrix import Commutation, Dense, Diagonal, Identity, Matrix, Named, Ones, Zero, kron
from derivations.operation import OperationAt, shape_of
from derivations.vecr import diag_rule, inverse_rule, kron_derivative_left, kron_derivative_right, kronecker_rule, product_rule


@dataclass(frozen=True, eq=False)
class LayerNormTheorems(OperationAt):
    """LN(X) = P M at a point, with gamma = 1, beta = 0, eps = 0: the objects of Theorems 2 and 3.

    Args:
        X: L x d, no row of which is constant (Assumption 2).

    Raises:
        ValueError: if X is not a matrix, or a row of it is constant.

    >>> import torch
    >>> objects = LayerNormTheorems(torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    >>> objects.P.dense().tolist(), objects.jacobian("X").dense()[0].tolist()
    ([[1.0]], [0.5, 0.0, -0.5, 0.0])
    """

    argument_names = ("X",)
    X: Array

    def __post_init__(self) -> None:
        if self.X.ndim != 2:
            raise ValueError(f"LayerNormTheorems: X must be one sequence, an L x d array; got shape {shape_of(self.X)}")
        if any(v == 0 for v in self.norms.reshape(-1).tolist()):
            raise ValueError("LayerNormTheorems: a row of X is constant, so its scale is 0. LayerNormAt takes an eps > 0.")

    @property
    def _sizes(self) -> tuple[int, int, int]:
        rows, d = shape_of(self.X)
        return rows, d, rows * d

    @property
    def _root(self) -> Scalar:
        """1 / sqrt(d), exact in every arithmetic."""
        return inverse_sqrt(self._sizes[1], np.zeros(0, dtype=object))

    # Theorem 2 and its detailed version, Theorem 8 ---------------------------------------------------------------------

    @cached_property
    def centred(self) -> Array:
        """M as an array: the rows of X minus their means."""
        rows, d, _ = self._sizes
        return self.X - scale(Fraction(1, d), self.X.sum(1).reshape(rows, 1))

    @cached_property
    def M(self) -> Matrix:
        """M = X - X 1 1^T / d, L x d."""
        return Dense(self.centred, "M")

    @cached_property
    def norms(self) -> Array:
        """(M^{o2} 1_d)^{o1/2}, the row norms of M, of shape (L, 1). Corrected (curvature-gap/thm8-tau): the proof has 1_L."""
        return sqrt((self.centred * self.centred).sum(1)).reshape(-1, 1)

    @cached_property
    def sigma(self) -> Array:
        """sigma = (M^{o2} 1_d)^{o1/2} / sqrt(d), of shape (L, 1)."""
        return scale(self._root, self.norms)

    @cached_property
    def P(self) -> Matrix:
        """P = D^{-1} = diag^{-1}(sigma), L x L."""
        return Named("P", Diagonal(reciprocal(self.sigma), r"\sigma^{-1}"), "the row scales")

    @cached_property
    def dM(self) -> Matrix:
        """dM/dX = I - (I_L (x) 1_{d x d}) / d, Ld x Ld: the G of Theorem 3."""
        rows, d, n = self._sizes
        centring = Identity(n) - Fraction(1, d) * kron(Identity(rows), Ones(d, d))
        return Named("G", centring, r"$\partial M/\partial X$, linear in $X$")

    @cached_property
    def dP(self) -> Matrix:
        """dP/dX = (-D^{-1} (x) D^{-T}) E (...) / sqrt(d) = A_1 B_1 / sqrt(d), L^2 x Ld: the H of Theorem 3
        (curvature-gap/thm8-dp)."""
        return Named("H", self._root * (self.A1 @ self.B1), r"$\partial P/\partial X$: inverse rule for $P = D^{-1}$")

    @property
    def value(self) -> Array:
        """LN(X), L x d."""
        return self.P @ self.centred

    def _jacobian(self, name: str) -> Matrix:
        """Return dLN/dX = (P (x) I_d) dM/dX + (I_L (x) M^T) dP/dX, Ld x Ld (curvature-gap/thm2: holds as printed)."""
        return product_rule(self.P, self.dP, self.M, self.dM)

    # The factors of dP/dX = A_1 B_1 / sqrt(d), with B_1 = E A_2 B_2 and B_2 = J A_3 B_3 (Appendix C.3) ----------------------

    @cached_property
    def E(self) -> Matrix:
        """E = (e_1 (x) e_1, ..., e_L (x) e_L), L^2 x L."""
        return diag_rule(self._sizes[0])

    @cached_property
    def J(self) -> Matrix:
        """J = I_L (x) 1_d^T, L x Ld."""
        rows, d, _ = self._sizes
        return Named("J", kron(Identity(rows), Ones(1, d)), "row sums")

    @cached_property
    def A1(self) -> Matrix:
        """A_1 = -D^{-1} (x) D^{-T}, L^2 x L^2."""
        return Named("A_1", inverse_rule(self.P), "derivative of an inverse")

    @cached_property
    def A2(self) -> Matrix:
        """A_2 = diag^{-1}((M^{o2} 1)^{o1/2}), L x L."""
        inverse = Diagonal(reciprocal(self.norms), r"(M^{\circ 2}\mathbf{1})^{\circ -1/2}")
        return Named("A_2", inverse, "derivative of the square root of the row sums")

    @cached_property
    def A3(self) -> Matrix:
        """A_3 = diag(vec_r M), Ld x Ld."""
        return Named("A_3", Diagonal(self.centred, r"\operatorname{vec}_r(M)"), "derivative of the Hadamard square, halved")

    @cached_property
    def B1(self) -> Matrix:
        """B_1 = E A_2 B_2, L^2 x Ld."""
        return Named("B_1", self.E @ self.A2 @ self.B2, r"$\sqrt{d}\,\partial D/\partial X$: chain rule")

    @cached_property
    def B2(self) -> Matrix:
        """B_2 = J A_3 B_3 with B_3 = dM/dX, L x Ld."""
        return Named("B_2", self.J @ self.A3 @ self.dM, "half the derivative of the row sums of squares")

    # Theorem 3: the derivatives of those factors -----------------------------------------------------------------------

    @cached_property
    def d2M(self) -> Matrix:
        """d2M/dX2 = dB_3/dX = 0, (Ld)^2 x Ld."""
        n = self._sizes[2]
        return Zero(n * n, n)

    @cached_property
    def dA3(self) -> Matrix:
        """dA_3/dX = E_{Ld} dM/dX, (Ld)^2 x Ld. Corrected (curvature-gap/thm3-da3): the print stops at e_L instead of e_{Ld}."""
        return _derivative("A_3", diag_rule(self._sizes[2]) @ self.dM, "derivative of a diagonal matrix")

    @cached_property
    def dB2(self) -> Matrix:
        """dB_2/dX = (J (x) I)[(A_3 (x) I) dB_3/dX + (I (x) B_3^T) dA_3/dX], L(Ld) x Ld."""
        product = kron(self.J, Identity(self._sizes[2])) @ product_rule(self.A3, self.dA3, self.dM, self.d2M)
        return _derivative("B_2", product, r"product rule, $\partial G/\partial X = 0$")

    @cached_property
    def dA2(self) -> Matrix:
        """dA_2/dX = -(A_2 (x) A_2) E A_2 B_2, L^2 x Ld: needed in dB_1/dX and not printed (curvature-gap/thm3-da2)."""
        return _derivative("A_2", inverse_rule(self.A2) @ self.E @ self.A2 @ self.B2, "inverse rule")

    @cached_property
    def dB1(self) -> Matrix:
        """dB_1/dX = (E (x) I)[(A_2 (x) I) dB_2/dX + (I_L (x) B_2^T) dA_2/dX], L^2(Ld) x Ld."""
        product = kron(self.E, Identity(self._sizes[2])) @ product_rule(self.A2, self.dA2, self.B2, self.dB2)
        return _derivative("B_1", product, "product rule")

    @cached_property
    def dD(self) -> Matrix:
        """dD/dX = B_1 / sqrt(d), L^2 x Ld. Corrected (curvature-gap/thm3-dd): the print drops 1/sqrt(d)."""
        return _derivative("D", self._root * self.B1, r"$D = P^{-1} = \operatorname{diag}(\sigma)$")

    @cached_property
    def dA1(self) -> Matrix:
        """dA_1/dX by the Kronecker rule, from d(-D^{-1})/dX and dD^{-T}/dX, L^4 x Ld."""
        rows = self._sizes[0]
        minus_inverse = -inverse_rule(self.P) @ self.dD
        inverse_transposed = Commutation(rows, rows) @ inverse_rule(self.P) @ self.dD
        whole = kronecker_rule(-self.P, minus_inverse, self.P.T, inverse_transposed)
        return _derivative("A_1", whole, "derivative of a Kronecker product")

    @cached_property
    def d2P(self) -> Matrix:
        """d2P/dX2 = [(A_1 (x) I) dB_1 + (I_{L^2} (x) B_1^T) dA_1] / sqrt(d), L^2(Ld) x Ld.

        Corrected (curvature-gap/thm3-d2p): 1/sqrt(d) multiplies both terms, and only the first in print.
        """
        product = self._root * product_rule(self.A1, self.dA1, self.B1, self.dB1)
        return Named(r"\frac{\partial^2 P}{\partial X^2}", product, r"product rule for $H$")

    @cached_property
    def dPkron(self) -> Matrix:
        """d(P (x) I_d)/dX = (I_L (x) K_{d,L} (x) I_d)(I_{L^2} (x) vec_r I_d) dP/dX, (Ld)^2 x Ld.

        Corrected (curvature-gap/thm3-dpkron): the print differentiates P (x) I_L. Lemma 4 has it right.
        """
        rows, d, _ = self._sizes
        return _derivative(r"(P\otimes I)", kron_derivative_left((rows, rows), Identity(d)) @ self.dP, "Kronecker rule")

    @cached_property
    def dIMT(self) -> Matrix:
        """d(I_L (x) M^T)/dX = (I_L (x) K_{d,L} (x) I_L)(vec_r I_L (x) I_{Ld}) K_{d,L} dM/dX, (Ld)L^2 x Ld.

        As printed in C.3; Lemma 4 leaves out K_{d,L} (curvature-gap/l4-dimt).
        """
        rows, d, _ = self._sizes
        whole = kron_derivative_right(Identity(rows), (d, rows)) @ Commutation(d, rows) @ self.dM
        return _derivative(r"(I\otimes M^\top)", whole, "Kronecker rule, after that of a transpose")

    def _hessian(self, name_i: str, name_j: str) -> Matrix:
        r"""Return d2LN/dX2, (Ld)^2 x Ld: the product rule applied to the two terms of Theorem 2 (curvature-gap/thm3-skel).

        ```math
        (P\otimes I_d\otimes I)\,\partial^2M + (I\otimes(\partial M)^\top)\,\partial(P\otimes I_d)
        + (I_L\otimes M^\top\otimes I)\,\partial^2P + (I\otimes(\partial P)^\top)\,\partial(I_L\otimes M^\top)
        ```

        Corrected (curvature-gap/thm3-full) through its pieces.
        """
        rows, d, _ = self._sizes
        first = product_rule(kron(self.P, Identity(d)), self.dPkron, self.dM, self.d2M)
        return first + product_rule(kron(Identity(rows), self.M.T), self.dIMT, self.dP, self.d2P)


def _derivative(symbol: str, matrix: Matrix, rule: str) -> Matrix:
    """Return the derivative of an object with respect to X, under its name in Appendix C.3."""
    return Named(rf"\frac{{\partial {symbol}}}{{\partial X}}", matrix, rule)


def theorem2_jacobian(X: Array) -> Matrix:
    """Return dLN/dX, Ld x Ld, as in Theorem 2, for gamma = 1, beta = 0, eps = 0.

    Args:
        X: L x d, without constant rows.

    >>> import torch
    >>> theorem2_jacobian(torch.tensor([[2.0, -2.0]])).dense().tolist()  # sign(x): flat
    [[0.0, 0.0], [0.0, 0.0]]
    """
    return LayerNormTheorems(X).jacobian("X")


def theorem3_hessian(X: Array) -> Matrix:
    """Return d2LN/dX2, (Ld)^2 x Ld, as in Theorem 3, with its pieces corrected, for gamma = 1, beta = 0, eps = 0.

    Args:
        X: L x d, without constant rows.

    >>> import torch
    >>> theorem3_hessian(torch.tensor([[2.0, -2.0]])).shape
    (4, 2)
    """
    return LayerNormTheorems(X).hessian("X", "X")
