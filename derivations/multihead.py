r"""Multi-head attention F = sum_h A_h X W_V^h W_O^h: the single-head chapter once for each head.

Each head's Jacobians and second derivatives are the single-head ones. The second derivatives of F across two heads
vanish: the heads meet only in what comes after, through J^T (.) J.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from derivations.arrays import Array, Scalar
from derivations.attention import AttentionAt
from derivations.matrix import Matrix
from derivations.operation import OperationAt, Renamed, Shape, Total, shape_of


@dataclass(frozen=True, eq=False)
class MultiHeadAttentionAt(OperationAt):
    """F = sum_h A_h X W_V^h W_O^h for one sequence X.

    Args:
        X: L x d_V, the tokens.
        heads: for each head its weights by name, ``{"W_Q": ..., "W_K": ..., "W_V": ..., "W_O": ...}``, shaped as in
            ``AttentionAt``; ``split_heads`` makes them from packed weights. Head h's arguments are "W_Q[h]" and so on.
        mask: one mask for all heads, as in ``AttentionAt``.
        scale: the factor of the logits; None for 1/sqrt(d_K) of each head.
        weights: the attention weights to take, one L x L array for each head, or None for the softmax.

    Raises:
        ValueError: if there is no head, or if outputs or shapes differ.

    >>> import torch
    >>> I = torch.eye(2, dtype=torch.float64)
    >>> head = {"W_Q": I, "W_K": I, "W_V": I}
    >>> point = MultiHeadAttentionAt(torch.ones(3, 2, dtype=torch.float64), [head, head])
    >>> point.value[0].tolist(), point.hessian("W_Q[0]", "W_K[1]")
    ([2.0, 2.0], Zero(24x4: 0_{24\\times 4}))
    """

    X: Array
    heads: Sequence[Mapping[str, Array]]
    mask: Array | None = None
    scale: Scalar | None = None
    weights: Sequence[Array] | None = None

    def __post_init__(self) -> None:
        if not self.heads or (self.weights is not None and len(self.weights) != len(self.heads)):
            count = None if self.weights is None else len(self.weights)
            raise ValueError(f"MultiHeadAttentionAt: got {len(self.heads)} heads and attention weights for {count}")
        _ = self.total

    @cached_property
    def points(self) -> tuple[AttentionAt, ...]:
        """The heads, each the single-head chapter at the point."""
        weights = [None] * len(self.heads) if self.weights is None else list(self.weights)
        common = {"mask": self.mask, "scale": self.scale}
        return tuple(AttentionAt(self.X, **head, **common, weights=A) for head, A in zip(self.heads, weights, strict=True))

    @cached_property
    def total(self) -> Total:
        """The heads under their own argument names, added up."""
        names = [{name: f"{name}[{h}]" for name in head.arguments if name != "X"} for h, head in enumerate(self.points)]
        return Total(*(Renamed(head, renamed) for head, renamed in zip(self.points, names, strict=True)))

    @property
    def arguments(self) -> dict[str, Shape]:
        """X and, for each head h, "W_Q[h]", "W_K[h]", "W_V[h]" and where it has one "W_O[h]"."""
        return self.total.arguments

    @cached_property
    def value(self) -> Array:
        """F, L x d_out."""
        return self.total.value

    def _jacobian(self, name: str) -> Matrix:
        """Return the head's G_k; for X the sum over the heads."""
        return self.total.jacobian(name)

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the second derivative: one head's if both arguments belong to it, zero across heads, for X X a sum."""
        return self.total.hessian(name_i, name_j)


def split_heads(W_Q: Array, W_K: Array, W_V: Array, W_O: Array, n_heads: int) -> list[dict[str, Array]]:
    """Return the heads' weights from packed ones: columns of W_Q, W_K, W_V and rows of W_O, in equal runs.

    Args:
        W_Q, W_K: d_V x (n_heads d_K).
        W_V: d_V x (n_heads d_v).
        W_O: (n_heads d_v) x d_out.
        n_heads: how many heads there are.

    Raises:
        ValueError: if a width is not a multiple of ``n_heads``.

    >>> import torch
    >>> W = torch.arange(8.0).reshape(2, 4)
    >>> [head["W_V"].tolist() for head in split_heads(W, W, W, W.T, 2)]
    [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]
    """
    widths = {"W_Q": shape_of(W_Q)[1], "W_K": shape_of(W_K)[1], "W_V": shape_of(W_V)[1], "W_O": shape_of(W_O)[0]}
    if any(width % n_heads for width in widths.values()):
        raise ValueError(f"split_heads: widths {widths} do not divide into {n_heads} heads")
    heads = []
    for h in range(n_heads):
        run = {name: slice(h * width // n_heads, (h + 1) * width // n_heads) for name, width in widths.items()}
        columns = {"W_Q": W_Q[:, run["W_Q"]], "W_K": W_K[:, run["W_K"]], "W_V": W_V[:, run["W_V"]]}
        heads.append({**columns, "W_O": W_O[run["W_O"]]})
    return heads
