"""Variance, second moment, update ratio and alignment by layer, from the stream of hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KINDS = ("block", "attention", "feedforward")


@dataclass(frozen=True)
class StreamStatistics:
    r"""What the stream does with depth (The Curse of Depth, Sec. 2 and Figs. 4, 7, 8).

    With x_l the input of block l (x_{L+1} the last output, before the final norm), f_l = x_{l+1} - x_l, and E the mean over
    the counted tokens:

        variance[l]       E Var_features(x_l)          centred, divided by d
        second_moment[l]  E ||x_l||^2 / d              what RMSNorm divides by
        rho[l]            E cos(x_l, f_l)              the rho of Eqs. 21-23 (corrected: Var grows by 2 rho sigma sigma_f)
        update_ratio[l]   E ||f_l|| / ||x_l||

    The paper does not say how it averages. Where a block ends in a norm (Post-Norm), f_l is not what its branches return.

    Attributes:
        variance: L + 1 numbers.
        second_moment: L + 1 numbers.
        rho: By ``"block"``, and ``"attention"`` (x' - x) and ``"feedforward"`` (y - x') where x' is known; L numbers each.
        update_ratio: The same.
        middle_variance: Variance of x'_l, L numbers; None where x' is not known in every block.
        tokens: Tokens averaged over.
    """

    variance: tuple[float, ...]
    second_moment: tuple[float, ...]
    rho: dict[str, tuple[float, ...]]
    update_ratio: dict[str, tuple[float, ...]]
    middle_variance: tuple[float, ...] | None
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python numbers."""
        return {
            "variance": list(self.variance),
            "second_moment": list(self.second_moment),
            "rho": {kind: list(values) for kind, values in self.rho.items()},
            "update_ratio": {kind: list(values) for kind, values in self.update_ratio.items()},
            "middle_variance": None if self.middle_variance is None else list(self.middle_variance),
            "tokens": self.tokens,
        }


class StreamSums:
    """Sums over tokens, a batch at a time."""

    def __init__(self, n_layers: int) -> None:
        self.moments = torch.zeros(2, n_layers + 1, dtype=torch.float64)  # variance, second moment
        self.middle = torch.zeros(n_layers, dtype=torch.float64)
        self.branches = torch.zeros(len(KINDS), 2, n_layers, dtype=torch.float64)  # rho, update ratio
        self.has_middles = True
        self.tokens = 0

    def add(self, stream: list[Tensor], middles: list[Tensor | None], keep: Tensor) -> None:
        """Add the tokens of one batch.

        Args:
            stream: x_1, ..., x_{L+1}, each (..., d).
            middles: x'_l, or None where it is not known.
            keep: Which tokens count, booleans (...).
        """
        self.tokens += int(keep.sum())
        self.has_middles &= all(x is not None for x in middles)
        x = _tokens(stream[0], keep)
        for k in range(len(stream)):
            self.moments[0, k] += x.var(-1, correction=0).sum().cpu()
            self.moments[1, k] += x.square().mean(-1).sum().cpu()
            if k == len(stream) - 1:
                break
            y, middle = _tokens(stream[k + 1], keep), middles[k]
            self._branch(0, k, x, y)
            if self.has_middles and middle is not None:
                between = _tokens(middle, keep)
                self.middle[k] += between.var(-1, correction=0).sum().cpu()
                self._branch(1, k, x, between)
                self._branch(2, k, between, y)
            x = y

    def _branch(self, kind: int, k: int, x: Tensor, y: Tensor) -> None:
        f = y - x
        sizes = f.norm(dim=-1), x.norm(dim=-1)
        cosine = (f * x).sum(-1) / (sizes[0] * sizes[1])
        self.branches[kind, 0, k] += torch.where(sizes[0] > 0, cosine, 0.0).sum().cpu()  # a branch of zeros has no direction
        self.branches[kind, 1, k] += (sizes[0] / sizes[1]).sum().cpu()

    def result(self) -> StreamStatistics:
        """Return the means."""
        kinds = KINDS if self.has_middles else KINDS[:1]
        rho = {kind: _mean(self.branches[k, 0], self.tokens) for k, kind in enumerate(kinds)}
        ratio = {kind: _mean(self.branches[k, 1], self.tokens) for k, kind in enumerate(kinds)}
        middle = _mean(self.middle, self.tokens) if self.has_middles else None
        variance, second = (_mean(row, self.tokens) for row in self.moments)
        return StreamStatistics(variance, second, rho, ratio, middle, self.tokens)


def _tokens(x: Tensor, keep: Tensor) -> Tensor:
    """Return the counted tokens (tokens, d) in float64, where the device has it."""
    return x.detach()[keep].to(torch.float32 if x.device.type == "mps" else torch.float64)


def _mean(sums: Tensor, tokens: int) -> tuple[float, ...]:
    return tuple((sums / tokens).tolist())
