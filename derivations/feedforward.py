r"""The feed-forward network with its residual, S = Y + sigma(Y W_1 + 1 b_1^T) W_2 + 1 b_2^T, at a point.

Five Jacobians and 25 second derivatives. With the pre-activations
U = Y W_1 + 1 b_1^T, P_2 = I_L (x) W_2^T, D_r = diag(vec_r sigma^(r)(U)), and Q_a = dU/da for a in {Y, W_1, b_1},

```math
Q_Y = I_L\otimes W_1^\top,\qquad Q_{W_1} = Y\otimes I_{d_{ff}},\qquad Q_{b_1} = 1_L\otimes I_{d_{ff}},\qquad
\frac{\partial S}{\partial a} = P_2D_1Q_a + [a = Y]\,I,\qquad \frac{\partial S}{\partial W_2} = \sigma(U)\otimes I,\qquad
\frac{\partial S}{\partial b_2} = 1_L\otimes I
```
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from derivations.activation import ActivationAt
from derivations.activation_functions import Kind
from derivations.arrays import Array
from derivations.matrix import Commutation, Dense, Diagonal, DiagonalLift, Identity, Matrix, Ones, Zero, kron
from derivations.operation import OperationAt, shape_of, size
from derivations.vecr import kron_derivative_left, kron_derivative_right


@dataclass(frozen=True, eq=False)
class FeedForwardAt(OperationAt):
    r"""S = Y + sigma(Y W_1 + 1 b_1^T) W_2 + 1 b_2^T for one sequence Y, with its derivatives in vec_r.

    Args:
        Y: L x d_V.
        W_1: d_V x d_ff.
        W_2: d_ff x d_out.
        b_1: d_ff entries, or None for none.
        b_2: d_out entries, or None for none.
        activation: "relu", "gelu", "silu" or another kind that ``ActivationAt`` knows.
        residual: whether Y is added; then d_out = d_V.

    Raises:
        ValueError: if the shapes do not conform.

    >>> import torch
    >>> ones = torch.ones(1, 1, dtype=torch.float64)
    >>> point = FeedForwardAt(2 * ones, 3 * ones, 5 * ones)  # S = y + 5 * max(3 * y, 0) = 16 y around y = 2
    >>> [point.jacobian(name).dense().item() for name in ("Y", "W_1", "W_2")], point.hessian("Y", "W_1").dense().item()
    ([16.0, 10.0, 6.0], 5.0)
    """

    argument_names = ("Y", "W_1", "W_2", "b_1", "b_2")
    Y: Array
    W_1: Array
    W_2: Array
    b_1: Array | None = None
    b_2: Array | None = None
    activation: Kind = "relu"
    residual: bool = True

    def __post_init__(self) -> None:
        shapes = self.arguments
        d, (rows, d_ff), (d_ff_2, d_out) = shapes["Y"][1], shapes["W_1"], shapes["W_2"]
        if d != rows or d_ff != d_ff_2 or (self.residual and d_out != d):
            raise ValueError(f"FeedForwardAt: Y W_1, its product with W_2, and the residual need to conform; got {shapes}")
        for name, asked in (("b_1", d_ff), ("b_2", d_out)):
            if shapes.get(name, (asked,)) != (asked,):
                raise ValueError(f"FeedForwardAt: {name} needs shape ({asked},), got {shapes[name]}")

    # The uniform interface -------------------------------------------------------------------------------------------

    @cached_property
    def value(self) -> Array:
        """S, of shape L x d_out."""
        out = self.sigma.value @ self.W_2
        out = out if self.b_2 is None else out + self.b_2
        return out + self.Y if self.residual else out

    def _jacobian(self, name: str) -> Matrix:
        """Return dS/da, of shape (L d_out) x n_a (B_1, B_2 and J_SY of Theorem 10, and those of the biases).

        Corrected (curvature-gap/thm9-b1, curvature-gap/thm9-b1line, curvature-gap/thm9-jsy): Theorem 9 prints the indicator of X
        > 0 where it is Y W_1 > 0.
        """
        d_out = shape_of(self.W_2)[1]
        if name == "W_2":
            return kron(Dense(self.sigma.value, r"\sigma(U)"), Identity(d_out))
        if name == "b_2":
            return kron(Ones(self._length), Identity(d_out))
        through = self.P_2 @ self.D_1 @ self.Q(name)
        return through + Identity(through.shape[0]) if name == "Y" and self.residual else through

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return d2S/da db, of shape (L d_out n_a) x n_b; for a, b in {Y, W_1, b_1}, with E = E_{L d_ff},

            d_b dS/da      = (P_2 (x) Q_a^T) E D_2 Q_b + (P_2 D_1 (x) I) dQ_a/db
            d2S/da dW_2    = (I (x) (D_1 Q_a)^T) d(I_L (x) W_2^T)/dW_2
            d2S/dW_2 da    = d(sigma(U) (x) I)/d sigma(U) D_1 Q_a .

        D_2 = 0 for piecewise linear sigma, off the kinks. Corrected (claim xi_12): what the paper prints as d2S/dW_1 dW_2
        is d2S/dW_2 dW_1, and what it prints as the latter (claim xi_21) is no derivative.
        """
        d_out = shape_of(self.W_2)[1]
        n_i = size(self.arguments[name_i])
        inner = ("Y", "W_1", "b_1")
        if name_i in inner and name_j in inner:
            Q_i, Q_j = self.Q(name_i), self.Q(name_j)
            curved = kron(self.P_2, Q_i.T) @ DiagonalLift(Q_i.shape[0]) @ self.D_2 @ Q_j
            return curved + kron(self.P_2 @ self.D_1, Identity(n_i)) @ self._second_preactivation(name_i, name_j)
        if name_i in inner and name_j == "W_2":
            return kron(Identity(self._length * d_out), (self.D_1 @ self.Q(name_i)).T) @ self._lifted(self.W_2)
        if name_i == "W_2" and name_j in inner:
            shape = shape_of(self.sigma.value)
            return kron_derivative_left((shape[0], shape[1]), Identity(d_out)) @ self.D_1 @ self.Q(name_j)
        return None

    # Named objects ---------------------------------------------------------------------------------------------------

    @cached_property
    def U(self) -> Array:
        """The pre-activations Y W_1 + 1 b_1^T, L x d_ff."""
        product = self.Y @ self.W_1
        return product if self.b_1 is None else product + self.b_1

    @cached_property
    def sigma(self) -> ActivationAt:
        """The activation chapter at U."""
        return ActivationAt(self.activation, self.U)

    @cached_property
    def P_2(self) -> Matrix:
        """P_2 = I_L (x) W_2^T."""
        return kron(Identity(self._length), Dense(self.W_2, "W_2").T)

    @cached_property
    def D_1(self) -> Matrix:
        """diag(vec_r sigma'(U)); for ReLU the D_sigma of Theorem 10."""
        return Diagonal(self.sigma.first, r"\operatorname{vec}_r\,\sigma'(U)")

    @cached_property
    def D_2(self) -> Matrix:
        """diag(vec_r sigma''(U)), zero for a piecewise linear sigma off its kinks."""
        second, n = self.sigma.second, self.D_1.shape[0]
        return Zero(n, n) if second is None else Diagonal(second, r"\operatorname{vec}_r\,\sigma''(U)")

    def Q(self, name: str) -> Matrix:
        """Return Q_a = dU/da for a in {Y, W_1, b_1}."""
        d_ff = shape_of(self.W_1)[1]
        if name == "Y":
            return kron(Identity(self._length), Dense(self.W_1, "W_1").T)
        return kron(Dense(self.Y, "Y") if name == "W_1" else Ones(self._length), Identity(d_ff))

    def _second_preactivation(self, name_i: str, name_j: str) -> Matrix:
        """dQ_a/db: U is bilinear in Y and W_1."""
        (length, d), d_ff = shape_of(self.Y), shape_of(self.W_1)[1]
        if (name_i, name_j) == ("W_1", "Y"):
            return kron_derivative_left((length, d), Identity(d_ff))
        if (name_i, name_j) == ("Y", "W_1"):
            return self._lifted(self.W_1)
        return Zero(length * d_ff * size(self.arguments[name_i]), size(self.arguments[name_j]))

    def _lifted(self, weight: Array) -> Matrix:
        """d(I_L (x) N^T)/dN for N of the weight's shape; corrected (claim xi_21-step2): the print turns K the wrong way."""
        rows, columns = shape_of(weight)
        return kron_derivative_right(Identity(self._length), (columns, rows)) @ Commutation(columns, rows)

    @property
    def _length(self) -> int:
        return shape_of(self.Y)[0]
