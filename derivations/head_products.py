r"""The two matrix products of attention, head by head: the scores c Q_h K_h^T and the mixtures A_h V_h, at a point.

The heads are stacked: Q is (H L) x d_k, with the L rows of the first head first. A product of two matrices is bilinear, so
its second derivatives are the constant mixed ones. With one head,

```math
\frac{\partial T}{\partial Q} = c\,(I_L\otimes K),\qquad \frac{\partial T}{\partial K} = c\,(Q\otimes I_S)\,K_{d_k,S},\qquad
\frac{\partial C}{\partial A} = I_L\otimes V^\top,\qquad \frac{\partial C}{\partial V} = A\otimes I
```

(Properties 2 and 5 of "Closing the Curvature Gap", and its G_K with the commutation of curvature-gap/g_k); with more,
these are block diagonal over the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from derivations.arrays import Array, Scalar, concatenate, inverse_sqrt, scale
from derivations.matrix import BlockDiagonal, Commutation, Dense, DiagonalLift, Identity, Matrix, kron
from derivations.operation import OperationAt, shape_of, size
from derivations.vecr import kron_derivative_left, kron_derivative_right


class HeadBlocks(BlockDiagonal):
    r"""blockdiag_h(B_h): blocks of one form, one a head, printed as the block of a head h.

    >>> import torch
    >>> K = torch.ones(2, 3)
    >>> HeadBlocks([kron(Identity(4), Dense(K, "K_h")) for _ in range(2)]).T.latex()
    '\\operatorname{blockdiag}_h(I_{4}\\otimes K_h^\\top)'
    """

    def __init__(self, blocks: Sequence[Matrix]) -> None:
        super().__init__(blocks)

    def transpose(self) -> Matrix:
        return HeadBlocks([block.T for block in self.blocks])

    def latex(self) -> str:
        return rf"\operatorname{{blockdiag}}_h({self.blocks[0].latex()})"


@dataclass(frozen=True, eq=False)
class HeadProductAt(OperationAt):
    r"""T_h = c P_h R_h^T ("scores") or C_h = c P_h R_h ("mix") for every head h, stacked, at a point.

    Args:
        P: (H L) x k, the queries; for "mix" (H L) x S, the attention weights.
        R: (H S) x k, the keys; for "mix" (H S) x v, the values.
        heads: H.
        kind: "scores" or "mix".
        scale: c; None for 1/sqrt(k) in scores and for 1 in mixtures.

    Raises:
        ValueError: if there is no such kind, or the shapes do not conform.

    >>> import torch
    >>> Q, K = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    >>> scores = HeadProductAt(Q, K, 1, "scores", scale=2)
    >>> scores.value.tolist(), scores.jacobian("P").latex(), scores.jacobian("R").latex()
    ([[22.0, 34.0]], '2\\,R', '2\\,\\left(P\\otimes I_{2}\\right)\\,K_{2,2}')
    >>> HeadProductAt(K, K, 2, "mix").value.tolist()[1]  # does not conform: S is 1
    Traceback (most recent call last):
        ...
    ValueError: HeadProductAt: with 2 heads, a mixture needs P (2 L, S) and R (2 S, v), got (2, 2) and (2, 2)
    """

    argument_names = ("P", "R")
    P: Array
    R: Array
    heads: int
    kind: Literal["scores", "mix"]
    scale: Scalar | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("scores", "mix"):
            raise ValueError(f"HeadProductAt: there is no kind {self.kind!r}; the kinds are 'scores' and 'mix'")
        P, R, H = *self.arguments.values(), self.heads
        fits = len(P) == len(R) == 2 and H > 0 and P[0] % H == R[0] % H == 0
        if not fits or P[1] != (R[1] if self.kind == "scores" else R[0] // H):
            wanted = f"scores need P ({H} L, k) and R ({H} S, k)" if self.kind == "scores" else _MIXTURE.format(H=H)
            raise ValueError(f"HeadProductAt: with {H} heads, {wanted}, got {P} and {R}")

    @cached_property
    def c(self) -> Scalar:
        """The factor: ``scale``, or 1/sqrt(k) for scores (exact, so that it prints so) and 1 for mixtures."""
        if self.scale is not None or self.kind == "mix":
            return 1 if self.scale is None else self.scale
        return inverse_sqrt(shape_of(self.P)[1], np.zeros(0, dtype=object))

    @cached_property
    def value(self) -> Array:
        """The products, stacked: (H L) x S scores or (H L) x v mixtures."""
        pairs = zip(self._of_heads("P"), self._of_heads("R"), strict=True)
        return scale(self.c, concatenate([P @ (R.T if self.kind == "scores" else R) for P, R in pairs], 0))

    def _jacobian(self, name: str) -> Matrix:
        """Return the derivative with respect to P or R: the formulas at the head of this chapter, blockdiag over heads."""
        blocks = [self._block(name, part, self._letter("P" if name == "R" else "R")) for part in self._others(name)]
        return self.c * (blocks[0] if self.heads == 1 else HeadBlocks(blocks))

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        r"""Return the derivative of the Jacobian of name_i with respect to name_j; it is zero for P, P and for R, R.

        The blocks B of one head are constants; with n_o and n_i the entries of its output and of argument i,

            (I_H (x) K_{n_o,H} (x) I_{n_i}) (E_H (x) B)

        puts them where output, i and j belong to one head. For one head it is B itself (Property 6):

            scores, P R:  c d(I_L (x) R)/dR                             R P:  c (I_{LS} (x) K_{S,k}) d(P (x) I_S)/dP
            mix,    P R:  c d(I_L (x) R^T)/dR^T K_{v,S}                 R P:  c d(P (x) I_v)/dP
        """
        if name_i == name_j:
            return None
        H, block = self.heads, self._second(name_i)
        if H == 1:
            return self.c * block
        of_head, out = size(self.arguments[name_i]) // H, size(shape_of(self.value)) // H
        place = kron(Identity(H), Commutation(out, H), Identity(of_head))
        return self.c * (place @ kron(DiagonalLift(H), block))

    def _block(self, name: str, other: Array, symbol: str) -> Matrix:
        """The Jacobian of one head with c = 1, from the other argument's part."""
        length, columns = shape_of(self.P)[0] // self.heads, shape_of(self.value)[1]
        matrix = Dense(other, symbol)
        if name == "P":
            return kron(Identity(length), matrix if self.kind == "scores" else matrix.T)
        spread = kron(matrix, Identity(columns))
        return spread @ Commutation(shape_of(self.P)[1], columns) if self.kind == "scores" else spread

    def _second(self, name_i: str) -> Matrix:
        """The mixed second derivative of one head with c = 1, i first."""
        (rows, k), (length, columns) = shape_of(self.R), (shape_of(self.P)[0] // self.heads, shape_of(self.value)[1])
        rows = rows // self.heads
        if name_i == "P":
            if self.kind == "scores":
                return kron_derivative_right(Identity(length), (rows, k))
            return kron_derivative_right(Identity(length), (k, rows)) @ Commutation(k, rows)
        lifted = kron_derivative_left((length, shape_of(self.P)[1]), Identity(columns))
        return kron(Identity(length * columns), Commutation(columns, k)) @ lifted if self.kind == "scores" else lifted

    def _others(self, name: str) -> list[Array]:
        return self._of_heads("R" if name == "P" else "P")

    def _of_heads(self, name: str) -> list[Array]:
        array = self.P if name == "P" else self.R
        rows = shape_of(array)[0] // self.heads
        return [array[h * rows : (h + 1) * rows] for h in range(self.heads)]

    def _letter(self, name: str) -> str:
        return name if self.heads == 1 else f"{name}_h"


_MIXTURE = "a mixture needs P ({H} L, S) and R ({H} S, v)"
