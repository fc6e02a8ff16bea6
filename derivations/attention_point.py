"""The values of single-head attention at a point, and the matrices that its derivatives are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from derivations import arrays
from derivations.arrays import Array, Scalar
from derivations.matrix import Commutation, Dense, Identity, Matrix, Named, VecIdentity, Zero, in_letters, kron
from derivations.operation import OperationAt, expect_names, shape_of, size
from derivations.softmax import SoftmaxAt


@dataclass(frozen=True, eq=False)
class AttentionPoint(OperationAt):
    """X, W_Q, W_K, W_V [and W_O] with the logits T, the weights A, and the derivatives of T and A X.

    Arguments and errors are those of :class:`derivations.attention.AttentionAt`.
    """

    argument_names = ("X", "W_Q", "W_K", "W_V", "W_O")
    X: Array
    W_Q: Array
    W_K: Array
    W_V: Array
    W_O: Array | None = None
    mask: Array | None = None
    scale: Scalar | None = None
    weights: Array | None = None

    def __post_init__(self) -> None:
        shapes = self.arguments
        d = shapes["X"][1]
        if shapes["W_Q"] != shapes["W_K"] or shapes["W_Q"][0] != d or shapes["W_V"][0] != d:
            raise ValueError(f"AttentionAt: X has {d} features, so W_Q, W_K (of one shape) and W_V need {d} rows; got {shapes}")
        if "W_O" in shapes and shapes["W_O"][0] != shapes["W_V"][1]:
            raise ValueError(f"AttentionAt: W_V W_O does not conform for shapes {shapes['W_V']} and {shapes['W_O']}")

    # The uniform interface -------------------------------------------------------------------------------------------

    @cached_property
    def value(self) -> Array:
        """F, of shape L x d_out."""
        head = self.A @ self.X @ self.W_V
        return head if self.W_O is None else head @ self.W_O

    # Values ----------------------------------------------------------------------------------------------------------

    @cached_property
    def c(self) -> Scalar:
        """The factor of the logits, 1/sqrt(d_K) unless ``scale`` says otherwise (an exact number if it is ours)."""
        exact = np.zeros(0, dtype=object)
        return arrays.inverse_sqrt(shape_of(self.W_Q)[1], exact) if self.scale is None else self.scale

    @cached_property
    def T(self) -> Array:
        """The logits T = c X W_Q W_K^T X^T before the mask, L x L (Lemma 2)."""
        return arrays.scale(self.c, self.X @ self.W_Q @ self.W_K.T @ self.X.T)

    @cached_property
    def softmax(self) -> SoftmaxAt:
        """The softmax chapter at T."""
        return SoftmaxAt(self.T, mask=self.mask, weights=self.weights)

    @property
    def A(self) -> Array:
        """The attention weights, L x L."""
        return self.softmax.value

    @property
    def F(self) -> Array:
        """The output, L x d_out: another name of ``value``."""
        return self.value

    # Matrices with their letters -------------------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> Matrix:
        """X as a matrix expression."""
        return Dense(self.X, "X")

    @cached_property
    def query(self) -> Matrix:
        """W_Q as a matrix expression."""
        return Dense(self.W_Q, "W_Q")

    @cached_property
    def key(self) -> Matrix:
        """W_K as a matrix expression."""
        return Dense(self.W_K, "W_K")

    @cached_property
    def values(self) -> Matrix:
        """W_V as a matrix expression."""
        return Dense(self.W_V, "W_V")

    @cached_property
    def projection(self) -> Matrix:
        """W_O as a matrix expression, the identity if there is none."""
        return Identity(shape_of(self.W_V)[1]) if self.W_O is None else Dense(self.W_O, "W_O")

    @cached_property
    def AX(self) -> Matrix:
        """A X, L x d_V: the averaged tokens (M_1 of the proof of Theorem 1)."""
        return Dense(self.A, "A") @ self.tokens

    @cached_property
    def U(self) -> Matrix:
        """I_L (x) (X W_V W_O)^T, of shape (L d_out) x L^2: what dA does to F."""
        return kron(Identity(self.tokens.shape[0]), (self.tokens @ self.values @ self.projection).T)

    # Derivatives of the logits and of the averaged tokens ------------------------------------------------------------

    @cached_property
    def dA(self) -> Matrix:
        """dA/dT = blockdiag(diag A_i - A_i A_i^T), L^2 x L^2 (App. C.4; claim dA/dM)."""
        return Named(r"\frac{\partial A}{\partial T}", self.softmax.jacobian("T"), "derivative of the row softmax")

    @cached_property
    def d2A(self) -> Matrix:
        """d2A/dT2, of shape L^4 x L^2: rows (i, j, k, l), columns (m, n), zero unless i = k = m (App. C.1)."""
        curvature = self.softmax.hessian("T", "T")
        return Named(r"\frac{\partial^2 A}{\partial T^2}", curvature, "second derivative of the row softmax")

    @cached_property
    def T_Q(self) -> Matrix:
        """dT/dW_Q = c (X (x) X W_K), L^2 x d_V d_K."""
        return self.c * kron(self.tokens, self.tokens @ self.key)

    @cached_property
    def T_K(self) -> Matrix:
        """dT/dW_K = c (X W_Q (x) X) K_{d_K,d_V}, L^2 x d_V d_K; corrected (curvature-gap/g_k): the print has K_{d_V,d_K}."""
        return self.c * kron(self.tokens @ self.query, self.tokens) @ self._turn

    @cached_property
    def T_X(self) -> Matrix:
        """dT/dX = c [I_L (x) X W_K W_Q^T + (X W_Q W_K^T (x) I_L) K_{d_V,L}], L^2 x L d_V."""
        length, d = self.tokens.shape
        first = kron(Identity(length), self.tokens @ self.key @ self.query.T)
        second = kron(self.tokens @ self.query @ self.key.T, Identity(length)) @ Commutation(d, length)
        return self.c * (first + second)

    @cached_property
    def Z_1(self) -> Matrix:
        """Z_1 = (I_L (x) X^T) dA/dT (X (x) X), L d_V x d_V^2 (Lemma 2): d(A X)/d(c W_Q W_K^T)."""
        X = self.tokens
        whole = kron(Identity(X.shape[0]), X.T) @ self.dA @ kron(X, X)
        reason = r"derivative of $A X$ with respect to $W_Q W_K^\top$, without the factor of the logits"
        return Named(in_letters("Z_1"), whole, reason)

    @cached_property
    def Z_2(self) -> Matrix:
        """Z_2 = (I_L (x) X^T (x) X^T (x) X^T) d2A/dT2 (X (x) X), L d_V^3 x d_V^2 (Lemma 2)."""
        X = self.tokens
        whole = kron(Identity(X.shape[0]), X.T, X.T, X.T) @ self.d2A @ kron(X, X)
        reason = r"second derivative of $A X$ with respect to $W_Q W_K^\top$, without the factor of the logits"
        return Named(in_letters("Z_2"), whole, reason)

    @cached_property
    def S(self) -> Matrix:
        """S = (I_{d_V} (x) K_{d_V,d_V}) (vec_r I_{d_V} (x) I_{d_V}), the shuffle d(x^T (x) I)/dx, d_V^3 x d_V (Lemma 2).

        Corrected (curvature-gap/s-dim): the print gives it d_V^2 rows.
        """
        d = self.tokens.shape[1]
        return Named(in_letters("S"), shuffle(d, d), r"derivative of $x^\top\otimes I$ with respect to $x$")

    @cached_property
    def R_Q(self) -> Matrix:
        """d(A X)/dW_Q = c Z_1 (I (x) W_K), L d_V x d_V d_K."""
        return self.c * self.Z_1 @ kron(Identity(self.tokens.shape[1]), self.key)

    @cached_property
    def R_K(self) -> Matrix:
        """d(A X)/dW_K = c Z_1 (W_Q (x) I) K_{d_K,d_V}, L d_V x d_V d_K."""
        return self.c * self.Z_1 @ kron(self.query, Identity(self.tokens.shape[1])) @ self._turn

    @cached_property
    def R_X(self) -> Matrix:
        """d(A X)/dX = A (x) I + (I_L (x) X^T) dA/dT T_X, L d_V x L d_V."""
        length, d = self.tokens.shape
        return kron(Dense(self.A, "A"), Identity(d)) + kron(Identity(length), self.tokens.T) @ self.dA @ self.T_X

    def logits_jacobian(self, name: str) -> Matrix:
        """Return T_a = dT/da for any argument; zero for W_V and W_O."""
        expect_names(self, "logits_jacobian", name)
        return self._derivative("T", name, self.tokens.shape[0] ** 2)

    def averaged_jacobian(self, name: str) -> Matrix:
        """Return R_a = d(A X)/da for any argument; zero for W_V and W_O."""
        expect_names(self, "averaged_jacobian", name)
        return self._derivative("R", name, size(shape_of(self.X)))

    def _derivative(self, letter: str, name: str, rows: int) -> Matrix:
        zero = Zero(rows, size(self.arguments[name]))
        return zero if name in ("W_V", "W_O") else getattr(self, f"{letter}_{name.removeprefix('W_')}")

    @property
    def _turn(self) -> Matrix:
        d, d_K = shape_of(self.W_K)
        return Commutation(d_K, d)


def shuffle(n: int, p: int) -> Matrix:
    """Return d(x^T (x) I_p)/dx = (I_p (x) K_{n,p}) (vec_r I_p (x) I_n) for x in R^n, of shape p^2 n x n.

    For n = p = d_V it is the operator S of Lemma 2.

    >>> shuffle(2, 1).dense().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return kron(Identity(p), Commutation(n, p)) @ kron(VecIdentity(p), Identity(n))
