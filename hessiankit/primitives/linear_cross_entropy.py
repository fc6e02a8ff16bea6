r"""The cross entropy of a linear head, l_i = -log softmax(h_i W^T + b)[label_i], without the logits of all tokens.

Logits, and whatever has their shape, are made for some tokens at a time, and again where a derivative needs them. With p the
probabilities of a token, g = p - y its slope and a the adjoint of its loss, tangents h', W', b' and a covector u of the losses,

```math
z' = h'W^\top + hW'^\top + b', \qquad l' = \langle g, z'\rangle, \qquad e = a\,(p\circ z' - p\,\langle p, z'\rangle) + u\,g
```

the covectors are e W + a g W' to h, e^T h + a g^T h' to W, summed over the tokens, and e to b. The Gauss-Newton part with
respect to the logits has no terms in a g.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hessiankit.primitives.cast import wide
from hessiankit.primitives.loss import CrossEntropy, LinearisedCrossEntropy, LinearisedSampledLoss, SampledLoss
from hessiankit.primitives.primitive import (
    ByLinearising,
    Covectors,
    CovectorSum,
    Inputs,
    Linearised,
    Nowhere,
    Sums,
    Tangents,
    into,
)

LOGITS, ON_AN_ACCELERATOR = 2**23, 2**26
"""Entries of logits that are made at a time: 32 megabytes of float32, of which a handful are held; 256 where launches cost."""


@dataclass(frozen=True)
class LinearCrossEntropy(ByLinearising):
    """Inputs: hidden (..., d), weight (C, d), bias (C,) or None, labels (...) of integers from 0 to C - 1 or ``ignore_index``.

    A fifth input, other labels (..., M), makes the second derivative with respect to the logits that of
    :class:`~hessiankit.primitives.loss.SampledLoss`.

    Args:
        ignore_index: The label of tokens that do not count: their loss is zero.
        label_smoothing: The share of the target distribution that is spread evenly over all classes.
        normalizer: Divisor of the sum of the losses, a 0-dimensional tensor; None: they are not summed, (...).
        gauss_newton: Whether the second derivative is that of the loss in the logits alone.

    >>> head, inputs = LinearCrossEntropy(), (torch.zeros(1, 1), torch.tensor([[1.0], [-1.0]]), None, torch.tensor([0]))
    >>> along = [torch.ones(1, 1, 1), None, None, None]
    >>> [float(c[0]) for c in (head.vjp(inputs, torch.ones(1, 1)), head.curvature(inputs, torch.ones(1), along))]
    [-1.0, 1.0]
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    normalizer: float | None = None
    gauss_newton: bool = False

    def value(self, *inputs: Tensor) -> Tensor:
        """Return the losses, in single precision at least."""
        hidden, weight, bias, labels = wide(inputs[:4])
        _check(hidden, weight, labels, self.ignore_index)
        out = hidden.new_empty(labels.numel())
        flat, classes, column = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), self._label(labels).reshape(-1, 1)
        for part in _parts(flat, len(weight)):
            logits = torch.nn.functional.linear(flat[part], weight, bias)
            loss = torch.logsumexp(logits, -1) - (1 - self.label_smoothing) * logits.gather(1, column[part]).squeeze(1)
            if self.label_smoothing:
                loss -= self.label_smoothing * logits.mean(-1)
            out[part] = loss.masked_fill_(classes[part] == self.ignore_index, 0)
        return out.reshape(labels.shape) if self.normalizer is None else out.sum() / self.normalizer

    def written_out(self, *inputs: Tensor) -> Tensor:
        """Return the losses in operations that torch differentiates any number of times, which keep the logits."""
        hidden, weight, bias, labels = wide(inputs[:4])
        log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias), -1)
        loss = -(1 - self.label_smoothing) * log_p.gather(-1, self._label(labels).unsqueeze(-1)).squeeze(-1)
        loss = (loss - self.label_smoothing * log_p.mean(-1)).masked_fill(labels == self.ignore_index, 0)
        return loss if self.normalizer is None else loss.sum() / self.normalizer

    def output_like(self, *inputs: Tensor) -> Tensor:
        """Return empty losses."""
        hidden, _, _, labels = wide([x[:0] if k < 2 else x for k, x in enumerate(inputs[:4])])
        return hidden.new_empty(labels.shape if self.normalizer is None else ())

    def multiplications(self, inputs: Inputs, output: Tensor) -> int:
        return inputs[0].numel() * len(inputs[1])

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        return LinearisedHead(self, inputs, adjoint, needs)

    def _label(self, labels: Tensor) -> Tensor:
        return labels.long().masked_fill(labels == self.ignore_index, 0)


class LinearisedHead(Linearised):
    """The loss at one point; nothing of tokens times classes is kept."""

    primitive: LinearCrossEntropy

    def push(self, tangents: Tangents) -> Tensor:
        """Return <g, z'> for each token, or the sum."""
        count = next(len(t) for t in tangents if t is not None)
        labels, token_losses = self.inputs[3], self.inputs[0].new_empty(count, self.inputs[3].numel())
        for part, at in self._chunks(count):
            token_losses[:, part] = self._moved(tangents, part).mul_(at.slope).sum(-1)
        normalizer = self.primitive.normalizer
        return token_losses.reshape(count, *labels.shape) if normalizer is None else token_losses.sum(1) / normalizer

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return the covectors of hidden, weight and bias."""
        return self.pull_into(bar, tangents, (None,) * len(self.inputs))

    def pull_into(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Covectors:
        """Pull into the sums, for some tokens at a time."""
        t = (None,) * len(self.inputs) if tangents is None else tangents
        count = next((len(x) for x in (bar, *t) if x is not None), None)
        if count is None:
            return tuple(t)
        hidden, weight, *_ = self.inputs
        d, rows = hidden.shape[-1], hidden.reshape(-1, hidden.shape[-1])
        to_hidden = hidden.new_empty(count, len(rows), d) if self.needs[0] else None
        to_weight, to_bias = (
            total or (CovectorSum(x.new_empty(count, *x.shape)) if w and x is not None else Nowhere())
            for total, w, x in zip(sums[1:3], self.needs[1:3], self.inputs[1:3], strict=True)
        )
        a = self._each(self.adjoint) if any(x is not None for x in t) else None
        u = None if bar is None else self._each(bar)
        crossed: list[Any] = [None if self.primitive.gauss_newton else x for x in t[:2]]
        e: Any
        for part, at in self._chunks(count):
            slope, e = at.slope, None
            block = None if a is None or all(x is None for x in crossed) else slope * a[0, part, None]
            if a is not None:
                e = at.bent(self._moved(t, part), a[:, part, None])
            if u is not None:
                e = slope * u[:, part, None] if e is None else e.addcmul_(slope, u[:, part, None])
            to_bias.add(e.sum(1))
            to_weight.add_product(e.mT, rows[part].expand(count, -1, -1))
            if block is not None and crossed[0] is not None:
                to_weight.add_product(block.mT.expand(count, -1, -1), crossed[0].reshape(count, -1, d)[:, part])
            for s, covector in enumerate(() if to_hidden is None else to_hidden):
                torch.mm(e[s], weight, out=covector[part])
                if block is not None and crossed[1] is not None:
                    covector[part].addmm_(block, crossed[1][s])
        sums_of_rest = [
            None if x is total or isinstance(x, Nowhere) else x.close() for x, total in ((to_weight, sums[1]), (to_bias, sums[2]))
        ]
        out = None if to_hidden is None else to_hidden.reshape(count, *hidden.shape)
        return into(sums, (out, *sums_of_rest, *(None,) * (len(self.inputs) - 3)))

    def _chunks(self, count: int) -> Iterator[tuple[slice, LinearisedCrossEntropy | LinearisedSampledLoss]]:
        """Yield some tokens at a time, and their cross entropy in the logits."""
        hidden, weight, bias, labels, *sample = self.inputs
        rows, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        loss = CrossEntropy(self.primitive.ignore_index, self.primitive.label_smoothing, 1.0)
        for part in _parts(rows, count * len(weight)):
            logits = torch.nn.functional.linear(rows[part], weight, bias)
            if sample:
                target = torch.cat((classes[part, None], sample[0].flatten(0, -2)[part]), 1)
                yield part, LinearisedSampledLoss(SampledLoss(loss), (logits, target), None, None)
            else:
                at = LinearisedCrossEntropy(loss, (logits, classes[part]), None, None)
                at.forget()
                yield part, at

    def _moved(self, tangents: Tangents, part: slice) -> Tensor:
        """z' of some tokens, (S, tokens, C)."""
        hidden, weight, *_ = self.inputs
        count, d = next(len(x) for x in tangents if x is not None), hidden.shape[-1]
        out = hidden.new_zeros(count, part.stop - part.start, len(weight))
        for s, z in enumerate(out):
            if tangents[0] is not None:
                z.addmm_(tangents[0][s].reshape(-1, d)[part], weight.mT)
            if tangents[1] is not None:
                z.addmm_(hidden.reshape(-1, d)[part], tangents[1][s].mT)
            if tangents[2] is not None:
                z.add_(tangents[2][s])
        return out

    def _each(self, x: Tensor) -> Tensor:
        """Return covectors of the output as those of each token's loss, (S, tokens)."""
        n, normalizer = self.inputs[3].numel(), self.primitive.normalizer
        return x.reshape(-1, n) if normalizer is None else (x / normalizer).reshape(-1, 1).expand(-1, n)


def _parts(tokens: Tensor, entries: int) -> Iterator[slice]:
    """Yield slices of the tokens, each with about LOGITS entries or one token."""
    step = max(1, (LOGITS if tokens.device.type == "cpu" else ON_AN_ACCELERATOR) // max(1, entries))
    for start in range(0, len(tokens), step):
        yield slice(start, min(start + step, len(tokens)))


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> None:
    targets = labels[labels != ignore_index]
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < len(weight):
        raise ValueError(
            f"linear_cross_entropy: labels from {int(targets.min())} to {int(targets.max())}, expected 0 to {len(weight) - 1}, "
            f"the rows of the weight, or ignore_index={ignore_index}; mark tokens that do not count with it"
        )
