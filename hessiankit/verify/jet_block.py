"""A transformer block on jets, on which the equations of ``hessiankit.blocks.placements`` run in place of a block.

It shares nothing with the chapters of ``derivations``. It records the numbers in place of roots and exponentials (``eps_at`` of
each row that was normalised, ``stacked`` attention weights), so that closed forms are evaluated at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from torch import nn

from derivations.arrays import Array
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm
from hessiankit.blocks.parts import BlockParts
from hessiankit.verify import jets
from hessiankit.verify.jets import FormalExponential, Jet

PIECEWISE: dict[str, Callable[[Any], Any]] = {
    "relu": Jet.relu,
    "leaky_relu": lambda x: x.relu(Fraction(1, 100)),
    "identity": lambda x: x,
}


class JetBlock(BlockParts):
    """A block at arrays of jets, under the names that equations use; its ``factor`` must be rational.

    Args:
        block: whose structure is taken: its kinds of norms, heads, masks.
        arrays: its parameters by their dotted names, as jets.
        exp: the exponential of the softmax.
        smooth: the function that is taken for an activation that is not piecewise linear.
        choose: (mean square of a row) -> an eps that gives it a root.
    """

    scale = jets.SCALE
    root = staticmethod(jets.root)
    turns = staticmethod(jets.rational_turns)

    def __init__(
        self,
        block: TransformerBlock,
        arrays: Mapping[str, Array],
        exp: FormalExponential,
        smooth: Callable[[Any], Any],
        choose: Callable[[Any], Any],
    ) -> None:
        super().__init__(block, arrays)
        self.exp, self._smooth, self._choose = exp, smooth, choose
        self._heads: list[Array] = []
        self._eps: dict[tuple[nn.Module, tuple[Any, ...]], Any] = {}

    def activation(self, X: Array, kind: str) -> Array:
        return np.frompyfunc(PIECEWISE.get(kind, self._smooth), 1, 1)(X)

    def weights(self, logits: Array) -> Array:
        """Return the attention weights of one head, and keep their values."""
        A = super().weights(logits)
        self._heads.append(jets.values(A))
        return A

    @property
    def stacked(self) -> Array:
        """The attention weights that running the equation has taken, stacked over the heads."""
        return np.concatenate(self._heads, 0)

    def eps(self, part: nn.Module, rows: Array, mean_squares: Array) -> Array:
        """Return the eps of rows, the same for equal rows (a key head that serves several queries)."""
        keys = [(part, tuple(row)) for row in jets.values(rows)]
        for key, square in zip(keys, jets.values(mean_squares), strict=True):
            if key not in self._eps:
                self._eps[key] = self._choose(square)
        return np.array([self._eps[key] for key in keys], dtype=object)

    def eps_at(self, norm: nn.Module, X: Array) -> Array:
        """Return the eps that the rows of X, or its groups of features row by row, had in this norm.

        Raises:
            ValueError: if this norm has not had such a row, so that the closed form has another value in front of it.
        """
        keys = [(norm, tuple(row)) for row in X.reshape(-1, norm.size if isinstance(norm, GroupNorm) else X.shape[1])]
        if any(key not in self._eps for key in keys):
            raise ValueError(f"the closed form normalises rows that the block does not: {norm} of {tuple(X.shape)}")
        return np.array([self._eps[key] for key in keys], dtype=object)
