r"""Single-head softmax attention F = A(T) X W_V [W_O] at a point: its named objects and first derivatives.

T = c X W_Q W_K^T X^T with c = 1/sqrt(d_K), and A is the row-wise softmax of T (plus a mask). The objects are those of
"Closing the Curvature Gap", Theorem 9 and Lemma 2. With W = W_V W_O (or W_V) and U = I_L (x) (X W)^T, every first
derivative through the softmax is U A'(T) T_a, with T_a the derivative of the logits:

```math
T_Q = c\,(X\otimes XW_K),\qquad T_K = c\,(XW_Q\otimes X)\,K_{d_K,d_V},\qquad
T_X = c\,[I_L\otimes XW_KW_Q^\top + (XW_QW_K^\top\otimes I_L)\,K_{d_V,L}]
```
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from derivations.attention_hessian import input_hessian, weight_hessian
from derivations.attention_point import AttentionPoint
from derivations.matrix import Dense, Identity, Matrix, kron
from derivations.operation import expect_names


@dataclass(frozen=True, eq=False)
class AttentionAt(AttentionPoint):
    r"""F = A(T) X W_V [W_O] for one sequence X, with its Jacobians and second derivatives in vec_r.

    Args:
        X: L x d_V, the tokens.
        W_Q, W_K: d_V x d_K.
        W_V: d_V x d_v (the paper has d_v = d_V).
        W_O: d_v x d_out, the output projection, or None for none (as in the paper).
        mask: L x L, boolean (True where a token may look) or additive, or None. Every formula holds unchanged with
            the masked A.
        scale: the constant c; None for 1/sqrt(d_K).
        weights: L x L with rows that sum to one: A is taken to be this instead of softmax(T). A softmax's derivatives
            read A alone, so rational weights give exact ones.

    Raises:
        ValueError: if the shapes do not conform.

    Where all tokens are equal, attention returns that token's value and does not feel the query:

    >>> import torch
    >>> I = torch.eye(2, dtype=torch.float64)
    >>> point = AttentionAt(torch.ones(3, 2, dtype=torch.float64), I, I, 5 * I)
    >>> point.value[0].tolist(), bool(point.G_Q.dense().abs().max() < 1e-15)
    ([5.0, 5.0], True)
    """

    def _jacobian(self, name: str) -> Matrix:
        """Return dF/dX, or G_k = dF/dW_k for a weight, of shape (L d_out) x n."""
        named = {"X": "J_FX", "W_Q": "G_Q", "W_K": "G_K", "W_V": "G_V", "W_O": "G_O"}
        matrix: Matrix = getattr(self, named[name])
        return matrix

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the second derivative of F, of shape (L d_out n_i) x n_j; for two weights it is Phi_ij."""
        if "X" in (name_i, name_j):
            return input_hessian(self, name_i, name_j)
        return weight_hessian(self, name_i, name_j)

    # First derivatives of F ------------------------------------------------------------------------------------------

    @cached_property
    def G_V(self) -> Matrix:
        """dF/dW_V = A X (x) W_O^T, or A X (x) I_{d_V} without W_O (Theorem 9)."""
        return kron(self.AX, self.projection.T)

    @cached_property
    def G_O(self) -> Matrix:
        """dF/dW_O = A X W_V (x) I."""
        expect_names(self, "jacobian", "W_O")
        return kron(self.AX @ self.values, Identity(self.projection.shape[1]))

    @cached_property
    def G_Q(self) -> Matrix:
        """dF/dW_Q = (I_L (x) W_V^T X^T) dA/dT (X (x) X W_K) / sqrt(d_K) (Theorem 9)."""
        return self.U @ self.dA @ self.T_Q

    @cached_property
    def G_K(self) -> Matrix:
        """dF/dW_K = (I_L (x) W_V^T X^T) dA/dT (X W_Q (x) X) K_{d_K,d_V} / sqrt(d_K) (Theorem 9).

        Corrected (curvature-gap/g_k): the print has K_{d_V,d_K}, which is right for d_K = d_V only.
        """
        return self.U @ self.dA @ self.T_K

    @cached_property
    def J_FX(self) -> Matrix:
        """dF/dX = A (x) (W_V W_O)^T + U dA/dT T_X; the paper stops at the weights."""
        return kron(Dense(self.A, "A"), (self.values @ self.projection).T) + self.U @ self.dA @ self.T_X

    def Phi(self, k: str, ell: str) -> Matrix:
        """Return Phi_kl = dG_k/dW_l for k, l among "Q", "K", "V", "O" (Lemma 2), of shape (L d_out n_k) x n_l."""
        expect_names(self, "Phi", f"W_{k}", f"W_{ell}")
        return weight_hessian(self, f"W_{k}", f"W_{ell}")
