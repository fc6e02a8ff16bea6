"""The residual stream by layer: variance, update ratio, alignment, angles; the loss without a block, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.torch_state import wide
from hessiankit.training.depth.blocks import Blocks, hidden_state, hooks
from hessiankit.training.sharpness.batches import BatchedLoss


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
        rho: Numbers by ``"block"``, and ``"attention"`` (x' - x) and ``"feedforward"`` (y - x') where x' is known; L of each.
        update_ratio: Ratios by the same names.
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
    """Sums over the counted tokens of all batches: rows of numbers by layer, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens = 0
        self.has_middles = True

    def add(self, stream: list[Tensor], middles: list[Tensor | None], keep: Tensor) -> None:
        """Add the tokens of one batch that ``keep`` (...) counts: of x_1, ..., x_{L+1}, each (..., d), and x'_l, None
        where not known.
        """
        self.tokens += int(keep.sum())
        self.has_middles &= all(x is not None for x in middles)
        xs = [_tokens(x, keep) for x in stream]
        middle_tokens = [_tokens(x, keep) for x in middles if x is not None] if self.has_middles else []
        rows = {"moments": [_moments(x) for x in xs], "block": [_branch(x, y) for x, y in pairwise(xs)]}
        if self.has_middles:
            rows["middle"] = [_moments(x) for x in middle_tokens]
            rows["attention"] = [_branch(x, y) for x, y in zip(xs[:-1], middle_tokens, strict=True)]
            rows["feedforward"] = [_branch(x, y) for x, y in zip(middle_tokens, xs[1:], strict=True)]
        for name, row in rows.items():
            sums = torch.stack(row, 1).cpu().double()
            self.sums[name] = self.sums[name] + sums if name in self.sums else sums

    def result(self) -> StreamStatistics:
        """Return the means."""
        kinds = ("block", "attention", "feedforward") if self.has_middles else ("block",)
        means = {name: [tuple(row) for row in (sums / self.tokens).tolist()] for name, sums in self.sums.items()}
        rho, ratio = ({kind: means[kind][k] for kind in kinds} for k in (0, 1))
        variance, second = means["moments"]
        return StreamStatistics(variance, second, rho, ratio, means["middle"][0] if self.has_middles else None, self.tokens)


def _tokens(x: Tensor, keep: Tensor) -> Tensor:
    """Return the counted tokens (tokens, d) in float64, where the device has it."""
    return x.detach()[keep].to(wide(x.device))


def _moments(x: Tensor) -> Tensor:
    return torch.stack([x.var(-1, correction=0).sum(), x.square().mean(-1).sum()])


def _branch(x: Tensor, y: Tensor) -> Tensor:
    f = y - x
    size, length = f.norm(dim=-1), x.norm(dim=-1)
    cosine = (f * x).sum(-1) / (size * length)
    return torch.stack([torch.where(size > 0, cosine, 0.0).sum(), (size / length).sum()])  # a branch of zeros has no direction


@dataclass(frozen=True, eq=False)
class AngularDistances(WithDict):
    """d(x^l, x^{l+n}) = arccos(cos(x^l, x^{l+n})) / pi (The Curse of Depth, Eq. 1), a mean over tokens, in [0, 1].

    x^l is the input of block l, x^{L+1} the last output before the final norm; the authors' code uses the final norm's output
    instead, and the last token of a window, which may be padding.

    Attributes:
        all: (L+1, L+1) symmetric in float64, entry [i, j] = d(x^{i+1}, x^{j+1}), mean over the counted tokens.
        last: Matrix of that form, over the last counted token of each sequence.
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
        descriptions = " and ".join(f"{tuple(z.shape)} {z.dtype} on {z.device}" for z in (x, y))
        raise InputError(
            f"angular_distance: x and y are {descriptions}; pass two dense real tensors (..., d) of one shape, dtype and device"
        )
    u, v = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
    return 2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)) / math.pi


class AngleSums:
    """Sums of angular distances over all counted tokens, and over the last one of each sequence, of all batches."""

    def __init__(self, n_layers: int) -> None:
        self.sums = torch.zeros(2, n_layers + 1, n_layers + 1, dtype=torch.float64, device="cpu")
        self.tokens = [0, 0]

    def add(self, stream: list[Tensor], keep: Tensor, last: Tensor) -> None:
        """Add the tokens of one batch that ``keep`` (...) counts, and among them the ``last`` ones of sequences."""
        states = [_tokens(x, keep) for x in stream]
        for k, mask in enumerate((keep, last)):
            self.tokens[k] += int(mask.sum())
        is_last = last[keep]
        for i, x in enumerate(states):
            for j in range(i + 1, len(states)):
                d = angular_distance(x, states[j])
                self.sums[0, i, j] += d.sum().cpu()
                self.sums[1, i, j] += d[is_last].sum().cpu()

    def result(self) -> AngularDistances:
        """Return the means."""
        return AngularDistances(*((s + s.T) / n for s, n in zip(self.sums, self.tokens, strict=True)))


@dataclass(frozen=True)
class PruningDrop(WithDict):
    """Loss and accuracy with block l removed, minus those of the whole model (The Curse of Depth, Fig. 2, without a formula).

    Attributes:
        loss: Loss of the whole model.
        accuracy: Accuracy of the whole model, the share of counted labels with the largest logit; None for squared error.
        loss_change: L numbers; positive where removing the block does damage.
        accuracy_change: L numbers; negative where it does damage. None for squared error.
        metric: A metric of the user's own with all blocks; None without one.
        metric_change: L changes of that metric.
    """

    loss: float
    accuracy: float | None
    loss_change: tuple[float, ...]
    accuracy_change: tuple[float, ...] | None
    metric: float | None = None
    metric_change: tuple[float, ...] | None = None


def pruning_drop(
    data: BatchedLoss, blocks: Blocks, *, metric: Callable[[], float] | None = None, tell: Callable[[int, int], None]
) -> PruningDrop:
    """Return the change of loss and accuracy, and of a metric of the user's own, with each block removed.

    Every block keeps its layer-dependent factor (LayerNorm Scaling's 1 / sqrt(l)). The authors' script instead deletes a
    block and reloads the model, which gives every later block the factor of the layer before.
    """
    loss, accuracy = data.evaluate()
    reference_metric = None if metric is None else metric()
    losses, accuracies, metrics = [], [], list[float]()
    for k, block in enumerate(blocks.modules):
        tell(k, len(blocks))
        with removed(block):
            pruned_loss, pruned_accuracy = data.evaluate()
            if metric is not None and reference_metric is not None:
                metrics.append(metric() - reference_metric)
        losses.append(pruned_loss - loss)
        if accuracy is not None and pruned_accuracy is not None:
            accuracies.append(pruned_accuracy - accuracy)
    accuracy_change = None if accuracy is None else tuple(accuracies)
    return PruningDrop(
        loss, accuracy, tuple(losses), accuracy_change, reference_metric, None if metric is None else tuple(metrics)
    )


@contextmanager
def removed(block: nn.Module) -> Iterator[None]:
    """Replace a block by the identity on its hidden state; other outputs are kept."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = hidden_state(args, kwargs)[1]
        return type(output)((x, *output[1:])) if type(output) in (tuple, list) else x

    with hooks([block], post_hook=hook):
        yield


def gradient_norms(data: BatchedLoss, blocks: list[dict[str, nn.Parameter]]) -> tuple[float, ...]:
    """Return ||dL/dtheta_l||_2 for the parameters theta_l of each block, L the mean loss over all data.

    The paper's Theorem 4.3 speaks of dy_L/dW_1, a Jacobian; its bound does not hold as printed. This is what an optimiser sees.
    """
    parameters = {id(p): p for block in blocks for p in block.values()}
    gradients = zip(parameters, data.gradient(list(parameters.values())), strict=True)
    squares = {key: float(g.double().square().sum()) for key, g in gradients}
    return tuple(math.sqrt(math.fsum(squares[id(p)] for p in block.values())) for block in blocks)
