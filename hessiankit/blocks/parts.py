"""A block in another arithmetic: an equation of ``hessiankit.blocks.placements`` run on values that are not tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hessiankit.blocks.attention import Attention
from hessiankit.blocks.block import TransformerBlock
from hessiankit.blocks.norms import norm_of

Array = Any
"""An object array of numbers."""


def row_softmax(logits: Array, exp: Callable[[Any], Any], mask: Array | None = None) -> Array:
    """Return the softmax of each row; where ``mask`` is False the weight is exactly 0."""
    powers = np.frompyfunc(exp, 1, 1)(logits)
    powers = powers if mask is None else np.where(mask, powers, 0)
    return powers / powers.sum(1)[:, None]


class BlockParts:
    """The attention, network, norms and parameters of a block, or of an attention alone, under the names that equations use.

    Values are object arrays, and attention is written out head by head and row by row: an independent reference, without
    tensors and chapters. A subclass for numbers has ``scale`` (of the logits), ``exp``, ``root``, ``turns(length, pairs)``
    (cosines and sines of the rotary positions) and ``activation(X, kind)``; a subclass for other values overrides the methods
    that act on them.

    Args:
        block: Structure: equation, heads, kinds of norms, masks.
        arrays: Parameters by their dotted names.
    """

    def __init__(self, block: TransformerBlock | Attention, arrays: Mapping[str, Any]) -> None:
        self.block, self.arrays = block, arrays
        self.part: Attention = block if isinstance(block, Attention) else block.attention
        self.prefix = "" if isinstance(block, Attention) else "attention."

    def __call__(self, X: Any) -> Any:
        return self.attention(X) if isinstance(self.block, Attention) else self.block.equation(self, X)

    def __getattr__(self, name: str) -> Any:
        part = getattr(self.__dict__["block"], name)
        if isinstance(part, nn.Parameter):
            return self.arrays[name]
        return (lambda X: self.norm(X, part, name)) if isinstance(part, nn.Module) else part

    def attention(self, X: Any) -> Any:
        """Return the self-attention branch."""
        part, kv_heads = self.part, self.part.n_kv_heads
        heads = zip("QKV", (part.n_heads, kv_heads, kv_heads), strict=True)
        Q, K, V = (self._inner(letter.lower(), self.affine(X, self.prefix, letter), n) for letter, n in heads)
        C = self._inner("c", self.mixed(Q, K, V), part.n_heads)
        return C if part.W_O is None else self.affine(C, self.prefix, "O")

    def feedforward(self, Y: Any) -> Any:
        """Return the feed-forward branch."""
        assert isinstance(self.block, TransformerBlock)
        part, U = self.block.feedforward, self.affine(Y, "feedforward.", "1")
        gated = part.W_G is not None
        H = self.gated(self.affine(Y, "feedforward.", "G"), U) if gated else self.activation(U, part.activation)
        return self.affine(H, "feedforward.", "2")

    def _inner(self, letter: str, X: Any, heads: int) -> Any:
        """Return queries, keys, values or context after their norm, if they have one."""
        part, name = getattr(self.part, f"norm_{letter}"), f"{self.prefix}norm_{letter}"
        if part is None:
            return X
        if self.part.norm_scope == "full":
            return self.norm(X, part, name)
        return self.merge(self.norm(self.split(X, heads), part, name), heads)

    def affine(self, X: Any, prefix: str, letter: str) -> Any:
        """Return X W + 1 b^T, without b where the block has none."""
        return X @ self.arrays[f"{prefix}W_{letter}"] + self.arrays.get(f"{prefix}b_{letter}", 0)

    def gated(self, G: Any, U: Any) -> Any:
        """Return silu(G) o U."""
        return self.activation(G, "silu") * U

    def split(self, X: Any, heads: int) -> Any:
        """Return the heads of every row as rows of their own: L x (H w) to (L H) x w."""
        return X.reshape(len(X) * heads, -1)

    def merge(self, X: Any, heads: int) -> Any:
        """Return the heads side by side again."""
        return X.reshape(len(X) // heads, -1)

    def norm(self, X: Any, part: nn.Module, name: str) -> Any:
        """Return the rows of X, or their groups of features, after a norm, with its gain and shift."""
        kind, groups, _ = norm_of(part)
        rows = self.split(X, groups)
        deviation = rows - rows.sum(1)[:, None] / rows.shape[1] if kind == "layernorm" else rows
        squares = (deviation * deviation).sum(1) / rows.shape[1]
        scales = np.frompyfunc(self.root, 1, 1)(squares + self.eps(part, rows, squares))
        out = (deviation / scales[:, None]).reshape(X.shape) * self.arrays.get(f"{name}.weight", 1)
        return out + self.arrays.get(f"{name}.bias", 0)

    def eps(self, part: nn.Module, rows: Array, mean_squares: Array) -> Any:
        """Return the eps of a norm, or one eps for each of its input rows with these mean squares."""
        return norm_of(part, torch.float64)[2]

    def weights(self, logits: Array) -> Array:
        """Return the attention weights of one head, row by row."""
        return row_softmax(logits, self.exp, np.tril(np.ones(logits.shape, dtype=bool)) if self.part.causal else None)

    def mixed(self, Q: Any, K: Any, V: Any) -> Any:
        """Return the contexts of all heads side by side, from queries and keys before they are rotated, and values."""
        part = self.part
        q, k, v = np.split(Q, part.n_heads, 1), *(np.split(Y, part.n_kv_heads, 1) for Y in (K, V))
        if part.rotary:
            q, k = ([self._turned(Y) for Y in side] for side in (q, k))
        queries_per_key = part.n_heads // part.n_kv_heads
        contexts = [
            self.weights(self.scale * (q[h] @ k[h // queries_per_key].T)) @ v[h // queries_per_key] for h in range(part.n_heads)
        ]
        return np.concatenate(contexts, 1)

    def _turned(self, Y: Array) -> Array:
        """Return the rows with their pairs of entries (i, i + w/2) rotated."""
        (cos, sin), (a, b) = self.turns(len(Y), Y.shape[1] // 2), np.split(Y, 2, 1)
        return np.concatenate([cos * a - sin * b, sin * a + cos * b], 1)
