r"""The rotation of rotary position embeddings (Su et al., "RoFormer", Sections 3.2.2 and 3.4.2) as one structured matrix.

Row l of an L x w array is multiplied with R_l, which turns each pair of its entries by an angle l theta^{-2i/w}. The pairs
are (i, i + w/2), the order that Hugging Face's Llama calls ``rotate_half``; the paper pairs neighbours (2i, 2i + 1).
"""

from __future__ import annotations

from typing import Any

import torch

from derivations.arrays import Array, as_array, common, concatenate, to_float
from derivations.matrix import Identity, Matrix, kron
from derivations.matrix.leaves import transposed as transposed_symbol
from derivations.matrix.letters import in_letters
from derivations.operation import shape_of
from derivations.rotary_angles import angles


class Rotations(Matrix):
    r"""blockdiag_l(R_l), Lw x Lw, with R_l = [[diag c_l, -diag s_l], [diag s_l, diag c_l]].

    Each pair of entries is multiplied with c I + s J, J a quarter turn, whose norm is sqrt(c^2 + s^2): the norm is the
    largest of these, 1 for a rotation.

    Args:
        cos: L x w/2, the c_l.
        sin: L x w/2, the s_l.
        norm: the norm, where it is known to be 1 beyond the rounding of cos and sin.
        symbol: LaTeX of a block.

    Raises:
        ValueError: if the two are not matrices of one shape.

    >>> quarter = Rotations(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    >>> quarter.dense().tolist(), quarter.norm_bound(), quarter.T.latex()
    ([[0.0, -1.0], [1.0, 0.0]], 1.0, '\\operatorname{blockdiag}_l(R_l^\\top)')
    """

    def __init__(self, cos: Any, sin: Any, transposed: bool = False, *, norm: float | None = None, symbol: str = "R_l") -> None:
        self.cos, self.sin, self.transposed, self.norm = as_array(cos), as_array(sin), transposed, norm
        self.symbol = in_letters(symbol)
        if self.cos.ndim != 2 or shape_of(self.cos) != shape_of(self.sin):
            raise ValueError(f"Rotations: cos and sin need one shape (L, w/2), got {shape_of(self.cos)} and {shape_of(self.sin)}")
        n = 2 * shape_of(self.cos)[0] * shape_of(self.cos)[1]
        self.shape = (n, n)

    def like(self) -> Array:
        return self.cos

    def apply(self, y: Array) -> Array:
        (length, half), columns = shape_of(self.cos), int(y.shape[1])
        cos, y = common(self.cos, y)
        c, s = cos.reshape(length, half, 1), self.sin.reshape(length, half, 1)
        s = -s if self.transposed else s
        first, second = y.reshape(length, 2, half, columns)[:, 0], y.reshape(length, 2, half, columns)[:, 1]
        return concatenate([c * first - s * second, s * first + c * second], 1).reshape(2 * length * half, columns)

    def transpose(self) -> Matrix:
        result = Rotations(self.cos, self.sin, not self.transposed, norm=self.norm)
        result.symbol = self.symbol
        return result

    def norm_bound(self) -> float:
        if self.norm is not None:
            return self.norm
        return float(torch.hypot(to_float(self.cos), to_float(self.sin)).max())

    def latex(self) -> str:
        return rf"\operatorname{{blockdiag}}_l({transposed_symbol(self.symbol) if self.transposed else self.symbol})"


def rotary(
    length: int, width: int, heads: int = 1, theta: float = 10000.0, *, cos: Array | None = None, sin: Array | None = None
) -> Matrix:
    r"""Return I_H (x) blockdiag_l(R_l), which turns the rows (h, l) of a stacked (H L) x w array by their position l.

    Args:
        length: L, with positions 0, ..., L - 1.
        width: w, even.
        heads: H.
        theta: the base; entries i and i + w/2 turn by the angle l theta^{-2i/w}.
        cos: L x w/2, to be taken in place of the cosines of these angles (exact numbers, scaled or shifted positions).
        sin: L x w/2, the sines that go with them.

    Raises:
        ValueError: if the width is odd, or one of cos and sin is missing or has another shape.

    >>> rotary(3, 4, heads=2)
    Kronecker(24x24: I_{2}\otimes \operatorname{blockdiag}_l(R_l))
    >>> (rotary(2, 2) @ torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)).tolist()[2:]  # cos 1, sin 1
    [0.5403023058681398, 0.8414709848078965]
    """
    if width % 2 or (cos is None) != (sin is None):
        raise ValueError(f"rotary: expected an even width and both or none of cos and sin, got width {width}")
    norm = 1.0 if cos is None else None
    if cos is None:
        turned = angles(length, width, theta)
        cos, sin = turned.cos(), turned.sin()
    turns = Rotations(cos, sin, norm=norm)
    if shape_of(turns.cos) != (length, width // 2):
        raise ValueError(f"rotary: cos and sin need shape ({length}, {width // 2}), got {shape_of(turns.cos)}")
    return kron(Identity(heads), turns)
