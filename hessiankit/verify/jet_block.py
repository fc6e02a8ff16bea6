"""A transformer block on jets, on which the equations of ``hessiankit.blocks.placements`` run in place of a block.

It is written with the primitives of ``hessiankit.verify.jets`` head by head, column by column and row by row, and shares
nothing with the chapters of ``derivations``. It records the numbers in place of roots and exponentials (``eps`` of each row that
was normalised, ``weights`` of the attention), so that closed forms are evaluated at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from torch import nn

from derivations.arrays import Array
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm
from hessiankit.verify import jets
from hessiankit.verify.jets import FormalExponential, Jet


@dataclass
class JetBlock:
    """A block at arrays of jets, under the names that equations use; its ``factor`` must be rational.

    Args:
        block: whose structure is taken: its kinds of norms, heads, masks.
        arrays: its parameters by their dotted names, as jets.
        exp: the exponential of the softmax.
        smooth: the function that is taken for an activation that is not piecewise linear.
        choose: (mean square of a row) -> an eps that gives it a root.
        eps: of the rows that were normalised, by (norm, the row's values); filled by running the equation.
        weights: of the attention, stacked over the heads; filled by running the equation.
    """

    block: TransformerBlock
    arrays: Mapping[str, Array]
    exp: FormalExponential
    smooth: Callable[[Any], Any]
    choose: Callable[[Any], Any]
    eps: dict[tuple[nn.Module, tuple[Any, ...]], Any] = field(default_factory=dict)
    weights: Array | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a norm, the factor or a parameter of the block."""
        if name.startswith("__"):
            raise AttributeError(name)
        part = getattr(self.block, name)
        if isinstance(part, nn.Parameter):
            return self.arrays[name]
        if isinstance(part, nn.Module):
            return lambda X: self._norm(name, part, X)
        return part

    def attention(self, X: Array) -> Array:
        """Return the self-attention branch."""
        part, get = self.block.attention, self._of("attention")
        q, k, v = (self._normed("full", W.lower(), jets.linear(X, get(f"W_{W}"), get(f"b_{W}"))) for W in "QKV")
        shared, length = part.n_heads // part.n_kv_heads, len(X)
        mask = np.tril(np.ones((length, length), dtype=bool)) if part.causal else None
        weights, mixed = [], []
        for h in range(part.n_heads):
            Q, K, V = (
                self._normed("head", letter, _columns(x, n, w))
                for letter, x, n, w in (("q", q, h, part.d_k), ("k", k, h // shared, part.d_k), ("v", v, h // shared, part.d_v))
            )
            if part.rotary:
                Q, K = jets.turned(Q, length), jets.turned(K, length)
            A = jets.softmax(jets.SCALE * (Q @ K.T), self.exp, mask)
            weights.append(jets.values(A))
            mixed.append(self._normed("head", "c", A @ V))
        self.weights = np.concatenate(weights, 0)
        C = self._normed("full", "c", np.concatenate(mixed, 1))
        return C if part.W_O is None else jets.linear(C, get("W_O"), get("b_O"))

    def feedforward(self, Y: Array) -> Array:
        """Return the feed-forward branch."""
        part, get = self.block.feedforward, self._of("feedforward")
        U = jets.linear(Y, get("W_1"), get("b_1"))
        if part.W_G is not None:
            gate = _each(self.smooth, jets.linear(Y, get("W_G"), get("b_G")))
            return jets.linear(gate * U, get("W_2"), get("b_2"))
        return jets.linear(_each(PIECEWISE.get(part.activation, self.smooth), U), get("W_2"), get("b_2"))

    def eps_of(self, norm: nn.Module, X: Array) -> Array:
        """Return the eps that the rows of X, or its groups of features row by row, had in this norm.

        Raises:
            ValueError: if this norm has not had such a row, so that the closed form has another value in front of it.
        """
        keys = [(norm, tuple(row)) for row in X.reshape(-1, norm.size if isinstance(norm, GroupNorm) else X.shape[1])]
        if any(key not in self.eps for key in keys):
            raise ValueError(f"the closed form normalises rows that the block does not: {norm} of {tuple(X.shape)}")
        return np.array([self.eps[key] for key in keys], dtype=object)

    def _of(self, part: str) -> Callable[[str], Array | None]:
        return lambda name: self.arrays.get(f"{part}.{name}")

    def _normed(self, scope: str, letter: str, X: Array) -> Array:
        """Return queries, keys, values or context after their norm, if this is the scope of it."""
        part = self.block.attention
        norm = getattr(part, f"norm_{letter}")
        return X if norm is None or part.norm_scope != scope else self._norm(f"attention.norm_{letter}", norm, X)

    def _norm(self, dotted: str, norm: nn.Module, X: Array) -> Array:
        """Return the rows of X, or their groups of features, centred (LayerNorm only) and scaled; then gain and shift."""
        groups = norm.groups if isinstance(norm, GroupNorm) else 1
        centred = isinstance(norm, nn.LayerNorm) or (isinstance(norm, GroupNorm) and norm.kind == "layernorm")
        width, parts = X.shape[1] // groups, []
        for g in range(groups):
            part = _columns(X, g, width)
            eps = np.array([self._chosen(norm, row, centred) for row in jets.values(part)], dtype=object)
            parts.append((jets.layer_norm if centred else jets.rms_norm)(part, eps=eps)[0])
        out = np.concatenate(parts, 1)
        gamma, beta = (self.arrays.get(f"{dotted}.{name}") for name in ("weight", "bias"))
        out = out if gamma is None else out * gamma.reshape(1, -1)
        return out if beta is None else out + beta.reshape(1, -1)

    def _chosen(self, norm: nn.Module, row: Array, centred: bool) -> Any:
        """Return the eps of a row, the same for equal rows (a key head that serves several queries)."""
        key, width = (norm, tuple(row)), Fraction(1, len(row))
        if key not in self.eps:
            row = row - row.sum() * width if centred else row
            self.eps[key] = self.choose((row * row).sum() * width)
        return self.eps[key]


def _columns(X: Array, n: int, width: int) -> Array:
    """Return the n-th group of columns."""
    return X[:, n * width : (n + 1) * width]


def _each(function: Callable[[Any], Any], X: Array) -> Array:
    return np.frompyfunc(function, 1, 1)(X)


PIECEWISE: dict[str, Callable[[Any], Any]] = {
    "relu": Jet.relu,
    "leaky_relu": lambda x: x.relu(Fraction(1, 100)),
    "identity": lambda x: x,
}
