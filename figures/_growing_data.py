"""The loss surface of a growing data set: the numbers of Figures 6 and 12 of Closing the Curvature Gap.

Everything is of single samples at two points w* and w = w* + t u: their losses, their gradients, and the second derivative
along u, from the exact Hessian of each sample (:func:`hessiankit.hessian_operator`). Means over k samples follow from these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hessiankit
from hessiankit.blocks import TransformerBlock
from hessiankit.bounding.loss_surface import SurfaceReport, loss_surface_bound
from hessiankit.ledger.curvature_gap.convergence import running_means
from hessiankit.support.progress import progress_bar

LOSS = "cross_entropy"


def vector(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def moved(model: nn.Module, w: Tensor) -> nn.Module:
    """Return a copy of a model at other weights."""
    other = copy.deepcopy(model)
    nn.utils.vector_to_parameters(w.clone(), other.parameters())
    return other


@torch.no_grad()
def losses(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy of each sample, (n,)."""
    return F.cross_entropy(model(tokens), labels, reduction="none")


def gradients(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each sample's loss, n x P."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(p: dict[str, Tensor], x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, p, (x[None],)), t[None])

    found = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0), chunk_size=64)(parameters, tokens, labels)
    return torch.cat([found[name].reshape(len(tokens), -1) for name in parameters], 1)


def gradient_norms(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return ||grad L_k||, k = 1 ... n."""
    k = torch.arange(1, len(tokens) + 1, dtype=torch.float64)
    return gradients(model, tokens, labels).cumsum(0).norm(dim=1) / k


def second_derivatives(model: nn.Module, tokens: Tensor, labels: Tensor, direction: Tensor) -> Tensor:
    """Return u^T H_i u of each sample's Hessian, (n,)."""
    found = []
    with progress_bar() as tell:
        for i in range(len(tokens)):
            tell("second derivatives, sample by sample", i, len(tokens))
            H = hessiankit.hessian_operator(model, tokens[i : i + 1], labels[i : i + 1], loss=LOSS)
            found.append(direction @ (H @ direction))
    return torch.stack(found)


def converged(model: nn.Module, tokens: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Return the weights after L-BFGS on all samples, up to ``steps`` iterations."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, tolerance_grad=1e-9, tolerance_change=0.0, history_size=50,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    return vector(model)


def against_mean(values: Tensor) -> Tensor:
    """Return v_{k+1} less the mean of v_1 ... v_k, k = 1 ... n - 1: (k + 1) times what the mean changes by.

    >>> against_mean(torch.tensor([1.0, 3.0, 5.0])).tolist()
    [2.0, 3.0]
    """
    return values[1:] - running_means(values)[:-1]


@dataclass(frozen=True)
class Distance:
    """One distance ||w - w*|| = t; every number is times k + 1, medians over k.

    Attributes:
        t: The distance.
        change: |(L_{k+1} - L_k)(w) - (L_{k+1} - L_k)(w*)|.
        gradient_term: |(grad L_{k+1} - grad L_k)(w*)^T (w - w*)|: 0 under the paper's Assumption 1.
        hessian_term: 1/2 |(w - w*)^T (H_{k+1} - H_k)(w*) (w - w*)|.
        rest: |change less both terms|, before the absolute values.
        correlation_hessian: of the signed change with the Hessian's term alone, over k.
        correlation_both: with both terms.
    """

    t: float
    change: float
    gradient_term: float
    hessian_term: float
    rest: float
    correlation_hessian: float
    correlation_both: float


def distances(model: nn.Module, tokens: Tensor, labels: Tensor, seed: int, steps: Sequence[float]) -> list[Distance]:
    """Return the test with w != w* along one random unit vector u, at w = w* + t u for every t."""
    star = vector(model)
    u = torch.randn(len(star), generator=torch.Generator().manual_seed(seed), dtype=star.dtype)
    u = u / u.norm()
    here = losses(model, tokens, labels)
    slope = against_mean(gradients(model, tokens, labels) @ u)
    bend = against_mean(second_derivatives(model, tokens, labels, u))
    found = []
    for t in steps:
        change = against_mean(losses(moved(model, star + t * u), tokens, labels) - here)
        first, second = t * slope, 0.5 * t**2 * bend
        a, b, c, d = (float(x.abs().median()) for x in (change, first, second, change - first - second))
        found.append(Distance(t, a, b, c, d, correlation(change, second), correlation(change, first + second)))
    return found


def correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation of two series.

    >>> correlation(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([5.0, 3.0, 1.0]))
    -1.0
    """
    return round(float(torch.corrcoef(torch.stack([x, y]))[0, 1]), 12)


def bound_problem(samples: int, steps: int) -> tuple[TransformerBlock, Tensor, Tensor]:
    """Return a post-norm block (gelu) that takes noise off the patches of digits, trained, with its samples.

    The bound of Theorem 7 is of a block with a squared error, so it takes a problem of that kind: 16 patches of 2 x 2, d_ff 8.
    """
    from figures._digits import ImageSpec

    tokens = ImageSpec().data()[0][:samples]
    noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = TransformerBlock(4, 8, activation="gelu").double()
    adam = torch.optim.Adam(block.parameters(), lr=0.01)
    for _ in range(steps):
        adam.zero_grad()
        F.mse_loss(block(tokens + 0.5 * noise), tokens).backward()
        adam.step()
    return block, tokens + 0.5 * noise, tokens


def bounded(samples: int, steps: int, t: float) -> SurfaceReport:
    """Return the repaired Theorem 7 at w = w* + t u, u a random unit vector."""
    block, inputs, targets = bound_problem(samples, steps)
    star = vector(block)
    u = torch.randn(len(star), generator=torch.Generator().manual_seed(1), dtype=star.dtype)
    point = dict(moved(block, star + t * u / u.norm()).named_parameters())
    return loss_surface_bound(block, inputs, targets, {name: p.detach() for name, p in point.items()})


def moving_average(values: Tensor, weight: float = 0.05) -> Tensor:
    """Return the exponential moving average, each new number with this weight.

    >>> moving_average(torch.tensor([1.0, 3.0]), 0.5).tolist()
    [1.0, 2.0]
    """
    average, found = float(values[0]), []
    for value in values.tolist():
        average += weight * (value - average)
        found.append(average)
    return torch.tensor(found, dtype=values.dtype)


def log_spaced(count: int, points: int = 120) -> list[int]:
    """Return whole numbers from 1 to ``count``, evenly in log scale.

    >>> log_spaced(4, 3)
    [1, 2, 4]
    """
    return sorted({round(math.exp(math.log(count) * i / (points - 1))) for i in range(points)})
