r"""Shares of the Hessian where nearly all parameters are words that the batch does not read: exactly, without their rows.

The head's entries (w, c) of such words N enter the loss by the logits $`Z = XW^T`$ alone, and nothing else moves with them:

    H[(w, c), (v, e)]  =  mean over tokens n of  X_nc X_ne (p_nw [w = v] - p_nw p_nv),        w, v in N

with the probabilities p. Sums of squares over N x N are traces of products of tokens x tokens matrices. All other rows R are
products with unit vectors; rows of words that the batch does not read, in an embedding that is not the head, are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import Transformer

TOGETHER = 32  # rows at once: as fast as more


@dataclass(frozen=True)
class Words:
    """The head's entries of words that only the head reads.

    Attributes:
        at: Positions of the entries, (N, d).
        zero: Positions of entries whose rows are zero.
        p: Probabilities of these words, (tokens, N).
        X: What the head reads, (tokens, d).
    """

    at: Tensor
    zero: Tensor
    p: Tensor
    X: Tensor

    def row(self, n: int, c: int) -> Tensor:
        """Return the row of entry (n, c) in the columns ``at``, (N, d).

        One token x = 1 with probabilities 1/2 of two words: the curvature of the softmax, 1/4 and -1/4.

        >>> zero, p, one = torch.zeros(0), torch.full((1, 2), 0.5), torch.ones(1, 1)
        >>> Words(torch.arange(2).reshape(2, 1), zero, p, one).row(0, 0).flatten().tolist()
        [0.25, -0.25]
        """
        weights = self.X[:, c] * self.p[:, n] / len(self.X)
        row = -(self.p * weights.unsqueeze(1)).T @ self.X
        row[n] += weights @ self.X
        return row

    def squares(self, scale: Tensor) -> tuple[float, float]:
        """Return the sum of the squares of S H S over N x N, S the diagonal ``scale`` (N, d), and that within single words.

        >>> zero, p, one = torch.zeros(0), torch.full((1, 2), 0.5), torch.ones(1, 1)
        >>> Words(torch.arange(2).reshape(2, 1), zero, p, one).squares(torch.ones(2, 1))
        (0.25, 0.125)
        """
        X, p, count = self.X, self.p, len(self.X)
        pairs = sum(torch.outer(x, x) * ((p * s.square()) @ p.T) for x, s in zip(X.T, scale.T, strict=True))
        outer = (X.unsqueeze(2) * X.unsqueeze(1)).flatten(1)
        weights = (scale.unsqueeze(2) * scale.unsqueeze(1)).flatten(1).square()
        without, within = ((weights * (a.T @ outer).square()).sum() / count**2 for a in (p.square(), p - p.square()))
        return float(pairs.square().sum() / count**2 - without + within), float(within)


def rows_of(operator: Any, at: Tensor) -> Tensor:
    """Return rows of a symmetric operator as products with unit vectors, (rows, P).

    >>> rows_of(torch.diag(torch.tensor([1.0, 2.0]).double()), torch.tensor([1])).tolist()
    [[0.0, 2.0]]
    """
    units = torch.zeros(operator.shape[0], len(at), dtype=torch.float64)
    units[at, torch.arange(len(at))] = 1.0
    return (operator @ units).T


def words_of(model: Transformer, x: Tensor, slices: Mapping[str, slice]) -> Words:
    """Return the words of a model's head that a batch of inputs does not read; of a head with its own weight, all."""
    head: Any = model.head
    table, absent = _positions(model, "embedding.W_E", slices), torch.ones(len(model.embedding.W_E), dtype=torch.bool)
    absent[x.unique()] = False
    inputs: list[Tensor] = []
    with torch.no_grad(), head.register_forward_pre_hook(lambda _, args: inputs.append(args[0])):
        p = model(x).flatten(0, 1).softmax(-1)
    X = inputs[0].flatten(0, 1)
    if head.W_C is None:  # tied
        return Words(table[absent], table[:0].reshape(-1), p[:, absent], X)
    return Words(_positions(model, "head.W_C", slices).T, table[absent].reshape(-1), p, X)


def _positions(model: nn.Module, name: str, slices: Mapping[str, slice]) -> Tensor:
    return torch.arange(slices[name].start, slices[name].stop).reshape(model.get_parameter(name).shape)


def word_shares(
    operator: Any, words: Words, partitions: Mapping[str, Tensor], scales: Sequence[Tensor]
) -> tuple[list[dict[str, float]], float]:
    """Return the shares of S H S by partition, for each diagonal S (P,), and the largest entry of H that was computed.

    Blocks of ``"neuron"`` keep words apart, those of the other partitions have all.
    """
    size, largest = operator.shape[0], 0.0
    others = torch.ones(size, dtype=torch.bool)
    others[words.at.reshape(-1)] = False
    twice = torch.where(others, 1.0, 2.0).to(words.X)  # columns of N: their rows are not computed
    others[words.zero] = False
    totals = [torch.zeros(1 + len(partitions), dtype=words.X.dtype) for _ in scales]
    for rows in others.nonzero()[:, 0].split(TOGETHER):
        squares = rows_of(operator, rows).square()
        largest = max(largest, float(squares.max().sqrt()))
        squares *= twice
        masks = [numbers[rows].unsqueeze(1) == numbers for numbers in partitions.values()]
        for total, scale in zip(totals, scales, strict=True):
            scaled = squares * scale.square() * scale[rows].square().unsqueeze(1)
            total += torch.stack([scaled.sum(), *(scaled[mask].sum() for mask in masks)])
    shares = []
    for total, scale in zip(totals, scales, strict=True):
        whole, within = words.squares(scale[words.at])
        sums = [whole, *(within if name == "neuron" else whole for name in partitions)]
        every = total + torch.tensor(sums, dtype=total.dtype)
        shares.append(dict(zip(partitions, (every[1:] / every[0]).tolist(), strict=True)))
    return shares, largest
