"""Statistics of the residual stream by layer: variance, update ratio, alignment, angles between depths, gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hessiankit.diagnostics.sharpness.batches import BatchedLoss
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict

KINDS = ("block", "attention", "feedforward")


@dataclass(frozen=True)
class StreamStatistics(WithDict):
    r"""Moments, alignment and update ratio of the residual stream by layer (The Curse of Depth, Sec. 2 and Figs. 4, 7, 8).

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


class StreamSums:
    """Sums over tokens, a batch at a time."""

    def __init__(self, n_layers: int) -> None:
        self.moments = torch.zeros(2, n_layers + 1, dtype=torch.float64)  # variance, second moment
        self.middle = torch.zeros(n_layers, dtype=torch.float64)
        self.branches = torch.zeros(len(KINDS), 2, n_layers, dtype=torch.float64)  # rho, update ratio
        self.has_middles = True
        self.tokens = 0

    def add(self, stream: list[Tensor], middles: list[Tensor | None], keep: Tensor) -> None:
        """Add the tokens of one batch that ``keep`` (...) counts: of x_1, ..., x_{L+1}, each (..., d), and x'_l, None
        where not known.
        """
        self.tokens += int(keep.sum())
        self.has_middles &= all(x is not None for x in middles)
        x = _tokens(stream[0], keep)
        for k, following in enumerate([*stream[1:], None]):
            self.moments[0, k] += x.var(-1, correction=0).sum().cpu()
            self.moments[1, k] += x.square().mean(-1).sum().cpu()
            if following is None:
                break
            y, middle = _tokens(following, keep), middles[k]
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


CLIP = (1.0, 99.0)
"""Percentiles between which the authors' code clips a row before it draws it."""


@dataclass(frozen=True, eq=False)
class AngularDistances(WithDict):
    """d(x^l, x^{l+n}) = arccos(cos(x^l, x^{l+n})) / pi (The Curse of Depth, Eq. 1), a mean over tokens, in [0, 1].

    x^l is the input of block l, x^{L+1} the last output before the final norm; the authors' code takes the final norm's
    output for it, and the last token of a window, which may be padding.

    Attributes:
        all: (L+1, L+1) symmetric in float64, entry [i, j] = d(x^{i+1}, x^{j+1}), mean over the counted tokens.
        last: The same over the last counted token of each sequence.
    """

    all: Tensor
    last: Tensor

    def by_distance(self, tokens: str = "all") -> Tensor:
        """Return the matrix as the paper draws it: (L, L), row n-1 and column l-1 hold d(x^l, x^{l+n}); NaN beyond.

        Args:
            tokens: ``"all"`` or ``"last"``.
        """
        d = self.all if tokens == "all" else self.last
        L = len(d) - 1
        out = d.new_full((L, L), math.nan)
        for n in range(1, L + 1):
            out[n - 1, : L + 1 - n] = d.diagonal(n)
        return out

    def row_normalised(self, tokens: str = "all") -> Tensor:
        """Return :meth:`by_distance` with each row clipped to its percentiles 1 and 99 and stretched to [0, 1].

        That is how the authors' heat maps are made. A row then spans 0 to 1 whatever its angles are: these are no angles, and
        rows cannot be compared. A constant row becomes 0.
        """
        out = self.by_distance(tokens)
        for n, row in enumerate(out):
            known = row[: len(row) - n]
            low, high = torch.quantile(known, torch.tensor(CLIP, dtype=known.dtype) / 100)
            width = high - low
            known.copy_((known.clamp(low, high) - low) / width if width > 0 else torch.zeros_like(known))
        return out


@checked("angular_distance")
def angular_distance(x: Tensor, y: Tensor) -> Tensor:
    """Return arccos(cos(x, y)) / pi of the vectors along the last axis.

    Computed as 2 atan2(||u - v||, ||u + v||) / pi of the unit vectors u, v: the same angle, but with all digits where it is
    small, of which arccos keeps half; nothing has to be clamped.

    >>> x = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> [round(float(angular_distance(x, torch.tensor(y, dtype=torch.float64))), 12) for y in ([2.0, 0], [0, 3.0], [-1.0, 0])]
    [0.0, 0.5, 1.0]
    """
    kinds = [(tuple(z.shape), z.dtype, z.device, z.layout) for z in (x, y)]
    if kinds[0] != kinds[1] or not x.is_floating_point() or x.layout != torch.strided or not x.ndim:
        seen = " and ".join(f"{tuple(z.shape)} {z.dtype} on {z.device}" for z in (x, y))
        raise InputError(
            f"angular_distance: x and y are {seen}; pass two dense real tensors (..., d) of one shape, dtype and device"
        )
    u, v = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)) / math.pi


class AngleSums:
    """Sums over tokens, a batch at a time."""

    def __init__(self, n_layers: int) -> None:
        self.sums = torch.zeros(2, n_layers + 1, n_layers + 1, dtype=torch.float64)
        self.tokens = [0, 0]

    def add(self, stream: list[Tensor], keep: Tensor, last: Tensor) -> None:
        """Add the tokens of one batch that ``keep`` (...) counts, and those of them that are the ``last`` of a sequence."""
        is_last = last[keep]
        self.tokens[0] += int(keep.sum())
        self.tokens[1] += int(is_last.sum())
        wide = torch.float32 if keep.device.type == "mps" else torch.float64
        states = [x.detach()[keep].to(wide) for x in stream]
        for i, x in enumerate(states):
            for j in range(i + 1, len(states)):
                d = angular_distance(x, states[j])
                self.sums[0, i, j] += d.sum().cpu()
                self.sums[1, i, j] += d[is_last].sum().cpu()

    def result(self) -> AngularDistances:
        """Return the means."""
        means = [(s + s.T) / n for s, n in zip(self.sums, self.tokens, strict=True)]
        return AngularDistances(*means)


def gradient_norms(data: BatchedLoss, blocks: list[dict[str, nn.Parameter]]) -> tuple[float, ...]:
    """Return ||dL/dtheta_l||_2 for the parameters theta_l of each block, L the mean loss over all data.

    The paper's Theorem 4.3 speaks of dy_L/dW_1, a Jacobian; its bound does not hold as printed. This is what an optimiser sees.
    """
    parameters = list({id(p): p for block in blocks for p in block.values()}.values())
    if not parameters:
        return (0.0,) * len(blocks)
    sums: dict[int, Tensor] = {}
    terms = 0.0
    for batch in data.batches:
        out = data.output(batch)
        target = data.target(batch, out)
        terms += data.count(target)
        gradients = torch.autograd.grad(data.summed(out, target), parameters, allow_unused=True)
        for p, g in zip(parameters, gradients, strict=True):
            if g is not None:
                sums[id(p)] = sums[id(p)] + g if id(p) in sums else g
    squares = {key: float(g.double().square().sum()) for key, g in sums.items()}
    return tuple(math.sqrt(math.fsum(squares.get(id(p), 0.0) for p in block.values())) / terms for block in blocks)
