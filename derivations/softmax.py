r"""Row softmax: A = softmax(T), its Jacobian and its second derivative in vec_r.

With a a row of A, dA_j/dT_l = a_j (delta_jl - a_l), hence

```math
\frac{\partial A}{\partial T} = \mathrm{blockdiag}(\mathrm{diag}(a_i) - a_ia_i^\top),\qquad
\frac{\partial^2A_{ij}}{\partial T_i\,\partial T_i} = A_{ij}\,(2aa^\top + E_{jj} - \mathrm{diag}(a) - e_ja^\top - ae_j^\top)
```

Derivatives read A alone. So masked logits need nothing more: the rows and columns of masked entries vanish with A (claim
T-causal), and rational weights give exact derivatives without exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from derivations.arrays import Array, exp, is_exact
from derivations.matrix import Commutation, DiagonalLift, Identity, Matrix, kron
from derivations.operation import OperationAt, shape_of
from derivations.row_blocks import RowBlocks, RowCovariance


@dataclass(frozen=True, eq=False)
class SoftmaxAt(OperationAt):
    r"""A = softmax(T), row by row, at a point.

    Args:
        T: L x S, the logits.
        mask: L x S or anything that broadcasts to it: boolean, True where an entry takes part, or additive (0 and minus
            infinity); None for none.
        weights: L x S with rows that sum to one; taken for A in place of softmax(T).

    Raises:
        ValueError: if T is not a matrix, or the weights' shape is not T's.

    >>> point = SoftmaxAt(torch.zeros(1, 2))
    >>> point.value.tolist(), point.jacobian("T").dense().tolist()
    ([[0.5, 0.5]], [[0.25, -0.25], [-0.25, 0.25]])
    """

    argument_names = ("T",)
    T: Array
    mask: Any = None
    weights: Array | None = None

    def __post_init__(self) -> None:
        if self.T.ndim != 2:
            raise ValueError(f"SoftmaxAt: T must be an L x S array, got shape {shape_of(self.T)}")
        if self.weights is not None and shape_of(self.weights) != shape_of(self.T):
            raise ValueError(f"SoftmaxAt: weights have shape {shape_of(self.weights)}, T has {shape_of(self.T)}")

    @cached_property
    def value(self) -> Array:
        """A, of shape (L, S)."""
        return softmax(self.T, self.mask) if self.weights is None else self.weights

    @cached_property
    def V(self) -> Matrix:
        """V = blockdiag(a_i), LS x L."""
        return RowBlocks(self.value)

    def _jacobian(self, name: str) -> Matrix:
        """Return dA/dT = blockdiag(diag(a_i) - a_i a_i^T), LS x LS.

        The paper prints its value at uniform attention only, with n for L (claim dA/dM-unif).
        """
        return RowCovariance(self.value)

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        r"""Return d2A/dT2, (LS)^2 x LS: rows (i, j, k, l), columns (m, n), nonzero for i = k = m only.

            (I_L (x) K_{S,L} (x) I_S) (E_L (x) I_{S^2}) [I_L (x) E_S - (I + I_L (x) K_{S,S}) (V (x) I_S)] dA/dT

        The bracket differentiates diag(a) - a a^T in each row; the two factors in front put the S^2 x S blocks where
        they belong. A block diagonal of L x L blocks, as Lemma 2 may be read, does not conform (curvature-gap/z_2).
        """
        L, S = shape_of(self.T)
        per_row, V_I = Identity(L), kron(self.V, Identity(S))  # V_I = blockdiag(a_i (x) I_S)
        outer = (Identity(L * S * S) + kron(per_row, Commutation(S, S))) @ V_I
        place = kron(per_row, Commutation(S, L), Identity(S)) @ kron(DiagonalLift(L), Identity(S * S))
        return place @ (kron(per_row, DiagonalLift(S)) - outer) @ self.jacobian("T")


def softmax(T: Array, mask: Any = None) -> Array:
    """Return the row softmax of T over the entries that take part.

    Args:
        T: L x S; exact entries give SymPy expressions.
        mask: boolean (True where an entry takes part), additive, or None.

    Raises:
        ValueError: if a boolean mask leaves a row without entries.

    >>> softmax(torch.zeros(2, 2), torch.tensor([[True, False], [True, True]])).tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    if mask is not None:
        boolean = np.asarray(mask).dtype == bool
        if boolean and not np.broadcast_to(np.asarray(mask), shape_of(T)).any(-1).all():
            raise ValueError("softmax: the mask leaves a row without entries; each row needs at least one True")
        if not boolean:
            T = T + mask
        elif not is_exact(T):
            T = T.masked_fill(~torch.as_tensor(mask, device=T.device), -torch.inf)
    if not is_exact(T):
        return torch.softmax(T, -1)
    powers = exp(T) if mask is None or not boolean else exp(T) * np.asarray(mask).astype(int)
    return powers / powers.sum(1).reshape(-1, 1)
