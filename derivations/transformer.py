r"""The post-norm transformer block Y = LN(X + F(X)), Z = LN(Y + FFN(Y)) in the objects of Theorem 10.

"Closing the Curvature Gap" writes every second derivative of the block as (Eq. 6 and 12)

```math
H_{tr}^{(i,j)} = (J_Z\otimes I_{n_i})\,\xi_{ij} + (I_{Ld_V}\otimes B_i^\top)\,H_ZB_j,\qquad
B_i = \frac{\partial S}{\partial W_i},\qquad \xi_{ij} = \frac{\partial B_i}{\partial W_j},
```

with S = Y + FFN(Y). As printed, 5 of the 25 blocks of the five weights are right, 9 are wrong at generic sizes and 11
lack a formula. Here are all of them, for smooth activations too, and those of the biases, of the
gains and shifts of the norms, of W_O and of X.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from derivations.activation_functions import Kind
from derivations.arrays import Array, Scalar
from derivations.attention import AttentionAt
from derivations.composition import GaussNewton
from derivations.feedforward import FeedForwardAt
from derivations.matrix import Dense, Identity, Matrix, Zero, kron
from derivations.normalization import LayerNormAt
from derivations.operation import Shape, expect_names, shape_of, size
from derivations.vecr import contract

_ATTENTION = ("X", "W_Q", "W_K", "W_V", "W_O")
_NORM_1 = {"gamma_1": "gamma", "beta_1": "beta"}
_FEEDFORWARD = ("W_1", "b_1", "W_2", "b_2")
_NORM_2 = {"gamma_2": "gamma", "beta_2": "beta"}


@dataclass(frozen=True, eq=False)
class PostNormBlockAt:
    r"""Y = LN(X + F(X)), Z = LN(Y + sigma(Y W_1 + 1 b_1^T) W_2 + 1 b_2^T) for one sequence, with its derivatives in vec_r.

    Arguments go by name, "W_1" or in the paper's short form "1" (and "2", "K", "Q", "V", "O").

    Args:
        X: L x d_V, the tokens.
        W_Q, W_K: d_V x d_K.
        W_V: d_V x d_V, or d_V x d_v with W_O.
        W_1, W_2: d_V x d_ff and d_ff x d_V.
        b_1, b_2: d_ff and d_V entries, or None.
        gamma_1, beta_1, gamma_2, beta_2: d_V entries, gain and shift of each norm, or None.
        W_O: d_v x d_V, or None.
        mask, scale, weights: as in ``AttentionAt``.
        eps: that of both norms, or a pair (tuple); each a number or an array of one for each row.
        activation: as in ``FeedForwardAt``.

    Raises:
        ValueError: if the shapes do not conform.

    A norm takes away what its rows have in common, so a shift of the second bias by a constant does nothing:

    >>> import torch
    >>> draw = lambda *shape: torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float64).reshape(shape).cos()
    >>> W_1, W_2 = draw(3, 4), draw(4, 3)
    >>> point = PostNormBlockAt(draw(2, 3), draw(3, 2), draw(3, 2), draw(3, 3), W_1, W_2, b_2=draw(1, 3)[0])
    >>> bool((point.jacobian("b_2") @ torch.ones(3, dtype=torch.float64)).abs().max() < 1e-12)
    True
    """

    X: Array
    W_Q: Array
    W_K: Array
    W_V: Array
    W_1: Array
    W_2: Array
    b_1: Array | None = None
    b_2: Array | None = None
    gamma_1: Array | None = None
    beta_1: Array | None = None
    gamma_2: Array | None = None
    beta_2: Array | None = None
    W_O: Array | None = None
    mask: Array | None = None
    eps: Any = 0
    activation: Kind = "relu"
    scale: Scalar | None = None
    weights: Array | None = None

    # The four chapters that the block is made of ---------------------------------------------------------------------

    @cached_property
    def attention(self) -> AttentionAt:
        """F at X."""
        weights = (self.W_Q, self.W_K, self.W_V, self.W_O)
        return AttentionAt(self.X, *weights, mask=self.mask, scale=self.scale, weights=self.weights)

    @cached_property
    def norm_1(self) -> LayerNormAt:
        """The first norm at X + F(X)."""
        return LayerNormAt(self.X + self.attention.value, self.gamma_1, self.beta_1, self._eps[0])

    @cached_property
    def feedforward(self) -> FeedForwardAt:
        """The feed-forward network with its residual, at Y."""
        return FeedForwardAt(self.Y, self.W_1, self.W_2, self.b_1, self.b_2, self.activation)

    @cached_property
    def norm_2(self) -> LayerNormAt:
        """The second norm at S."""
        return LayerNormAt(self.S, self.gamma_2, self.beta_2, self._eps[1])

    @property
    def _eps(self) -> tuple[Any, Any]:
        return (self.eps[0], self.eps[1]) if isinstance(self.eps, tuple) else (self.eps, self.eps)

    # Values and first derivatives ------------------------------------------------------------------------------------

    @property
    def Y(self) -> Array:
        """Y = LN(X + F(X)), L x d_V."""
        return self.norm_1.value

    @property
    def S(self) -> Array:
        """S = Y + FFN(Y), L x d_V."""
        return self.feedforward.value

    @property
    def Z(self) -> Array:
        """Z = LN(S), L x d_V: the output."""
        return self.norm_2.value

    @cached_property
    def J_Y(self) -> Matrix:
        """dY/d(X + F), the Jacobian of the first norm (Theorem 2)."""
        return self.norm_1.jacobian("X")

    @cached_property
    def H_Y(self) -> Matrix:
        """The second derivative of the first norm with respect to X + F; Theorem 3 misprints it (curvature-gap/thm3-full,
        curvature-gap/thm3-full2)."""
        return self.norm_1.hessian("X", "X")

    @cached_property
    def J_Z(self) -> Matrix:
        """dZ/dS, the Jacobian of the second norm (Theorem 2)."""
        return self.norm_2.jacobian("X")

    @cached_property
    def H_Z(self) -> Matrix:
        """The second derivative of the second norm with respect to S; Theorem 3 misprints it (curvature-gap/thm3-full,
        curvature-gap/thm3-full2)."""
        return self.norm_2.hessian("X", "X")

    @cached_property
    def D_sigma(self) -> Matrix:
        """diag(vec_r sigma'(Y W_1 + 1 b_1^T)); for ReLU the indicator of Y W_1 > 0, as Theorem 10 has it."""
        return self.feedforward.D_1

    @cached_property
    def J_SY(self) -> Matrix:
        """dS/dY = (I_L (x) W_2^T) D_sigma (I_L (x) W_1^T) + I; corrected (curvature-gap/thm9-jsy): Theorem 9 has 1{X > 0}."""
        return self.feedforward.jacobian("Y")

    def G(self, k: str) -> Matrix:
        """Return d(X + F)/dk for an attention weight or X; for weights it is dF/dW_k.

        Corrected (curvature-gap/g-clash): Theorem 4 calls dY/dW_k by this name, Theorem 10 needs dF/dW_k.
        """
        name = self._known("G", k)[0]
        slope = self.attention.jacobian(name)
        return slope + Identity(slope.shape[0]) if name == "X" else slope

    def Phi(self, k: str, ell: str) -> Matrix:
        """Return d2F/dk dl for attention weights (Lemma 2, corrected) or X."""
        return self.attention.hessian(*self._known("Phi", k, ell))

    def B(self, i: str) -> Matrix:
        """Return B_i = dS/di, L d_V x n_i: of a feed-forward weight directly, else J_SY J_Y G_k through Y."""
        (name,) = self._known("B", i)
        if name in _NORM_2:
            return Zero(self._out, size(self.arguments[name]))
        return self.feedforward.jacobian(name) if name in _FEEDFORWARD else self.J_SY @ self._dY(name)

    def xi(self, i: str, j: str) -> Matrix:
        """Return xi_ij = dB_i/dj, of shape (L d_V n_i) x n_j (Theorem 10, corrected and completed).

        With a, b of the feed-forward network, k, l of attention and the first norm, and S_ab, S_aY, S_YY the network's second
        derivatives (for k, l attention weights, dY_k = J_Y G_k and Y_kl = (I (x) G_k^T) H_Y G_l + (J_Y (x) I) Phi_kl):

            xi_ab = S_ab             xi_12 and xi_21 corrected (claims of these names); xi_11 = 0 for ReLU only
            xi_ak = S_aY dY_k        xi_1k corrected (claim xi_1k): I_{n_k} in the print is I_{n_1}; xi_2k as printed
            xi_ka = (I (x) dY_k^T) S_Ya                           not printed (claims xi_k1, xi_k2)
            xi_kl = (J_SY (x) I) Y_kl + (I (x) dY_k^T) S_YY dY_l  the last term vanishes for ReLU (claims xi_kl, T-xi-smooth)
        """
        name_i, name_j = self._known("xi", i, j)
        n_i, n_j = size(self.arguments[name_i]), size(self.arguments[name_j])
        if name_i in _NORM_2 or name_j in _NORM_2:
            return Zero(self._out * n_i, n_j)
        left = name_i if name_i in _FEEDFORWARD else "Y"
        right = name_j if name_j in _FEEDFORWARD else "Y"
        block = self.feedforward.hessian(left, right)
        if left == "Y":
            block = kron(Identity(self._out), self._dY(name_i).T) @ block
        if right == "Y":
            block = block @ self._dY(name_j)
        if left == right == "Y":
            block = kron(self.J_SY, Identity(n_i)) @ self._d2Y(name_i, name_j) + block
        return block

    def H_tr(self, i: str, j: str) -> Matrix:
        """Return d2Z/di dj = (J_Z (x) I) xi_ij + (I (x) B_i^T) H_Z B_j, of shape (L d_V n_i) x n_j (Eq. 6 and 12).

        The gain and shift of the second norm have B = 0 and enter through that norm's own mixed derivatives. Corrected
        (claim sym-claim): H_tr^(j,i) is H_tr^(i,j) transposed slice by slice, not equal to it.
        """
        name_i, name_j = self._known("H_tr", i, j)
        left, right = _NORM_2.get(name_i, "X"), _NORM_2.get(name_j, "X")
        block = self.norm_2.hessian(left, right)
        if left == "X":
            block = kron(Identity(self._out), self.B(name_i).T) @ block
        if right == "X":
            block = block @ self.B(name_j)
        return kron(self.J_Z, Identity(size(self.arguments[name_i]))) @ self.xi(name_i, name_j) + block

    def loss_hessian(self, target: Array, i: str, j: str) -> GaussNewton:
        r"""Return block (i, j) of the Hessian of ||Z - Target||_F^2 / (L d_V), in its outer and functional parts (Eq. 7).

        ```math
        \frac{2}{Ld_V}\big(J_i^\top J_j + (\mathrm{vec}_r(Z - \mathrm{Target})^\top\otimes I_{n_i})\,H_{tr}^{(i,j)}\big)
        ```

        Corrected (curvature-gap/eq7, curvature-gap/eq7-l): the print leaves 2/(L d_V) out of the second term, and does not
        normalise the loss.

        Args:
            target: L x d_V.
            i: the parameter of the rows.
            j: the parameter of the columns.
        """
        name_i, name_j = self._known("loss_hessian", i, j)
        if shape_of(target) != shape_of(self.Z):
            raise ValueError(f"loss_hessian: the target needs the output's shape {shape_of(self.Z)}, got {shape_of(target)}")
        c = Fraction(2, self._out)
        residual = Dense((self.Z - target).reshape(1, -1), r"\operatorname{vec}_r(Z-T)^\top")
        outer = self.jacobian(name_i).T @ self.jacobian(name_j)
        functional = contract(residual, self.H_tr(name_i, name_j), size(self.arguments[name_i]))
        return GaussNewton(c * outer, c * functional)

    # The uniform interface -------------------------------------------------------------------------------------------

    @cached_property
    def arguments(self) -> dict[str, Shape]:
        """The arguments in the order of the computation; those that are None are left out."""
        every = {name: getattr(self, name) for name in (*_ATTENTION, *_NORM_1, *_FEEDFORWARD, *_NORM_2)}
        return {name: shape_of(array) for name, array in every.items() if array is not None}

    @property
    def value(self) -> Array:
        """Z, L x d_V."""
        return self.Z

    def jacobian(self, name: str) -> Matrix:
        """Return dZ/di = J_Z B_i (Theorem 4), or the second norm's own derivative for its gain and shift."""
        (name,) = self._known("jacobian", name)
        return self.norm_2.jacobian(_NORM_2[name]) if name in _NORM_2 else self.J_Z @ self.B(name)

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return H_tr^(i,j)."""
        return self.H_tr(name_i, name_j)

    # Helpers ---------------------------------------------------------------------------------------------------------

    def _dY(self, k: str) -> Matrix:
        """dY/dk for what comes before the feed-forward network: J_Y G_k, or the first norm's gain and shift."""
        return self.norm_1.jacobian(_NORM_1[k]) if k in _NORM_1 else self.J_Y @ self.G(k)

    def _d2Y(self, k: str, ell: str) -> Matrix:
        """d2Y/dk dl = (I (x) G_k^T) H_Y G_l + (J_Y (x) I) Phi_kl, and its like for the first norm's gain and shift."""
        left, right = _NORM_1.get(k, "X"), _NORM_1.get(ell, "X")
        block = self.norm_1.hessian(left, right)
        if left == "X":
            block = kron(Identity(self._out), self.G(k).T) @ block
        if right == "X":
            block = block @ self.G(ell)
        if left == right == "X":
            block = block + kron(self.J_Y, Identity(size(self.arguments[k]))) @ self.Phi(k, ell)
        return block

    @property
    def _out(self) -> int:
        return size(shape_of(self.X))

    def _known(self, asked: str, *names: str) -> tuple[str, ...]:
        """The full names of arguments, after a check that they exist."""
        full = tuple(f"W_{name}" if f"W_{name}" in self.arguments else str(name) for name in names)
        expect_names(self, asked, *full)
        return full
