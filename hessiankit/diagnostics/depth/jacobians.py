"""Jacobians of the blocks and of the stack: distance from the identity, spectral norm, gain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.diagnostics.depth.autograd_products import JacobianProducts
from hessiankit.diagnostics.depth.blocks import Blocks
from hessiankit.diagnostics.depth.estimates import Estimator, Measured, mean_of, probes, root
from hessiankit.diagnostics.depth.recording import recording
from hessiankit.diagnostics.sharpness.batches import BatchedLoss, MicroBatch
from hessiankit.support.files import WithDict
from hessiankit.support.lanczos import RitzValue


@dataclass(frozen=True)
class Jacobians(WithDict):
    """Jacobians J_l = dy_l / dx_l of the blocks and of the stack, at the data (The Curse of Depth, Eqs. 8 and 35, corrected).

    A state holds all tokens and features of a micro-batch, padding too; with n entries ||J||_F / sqrt(n) is the rms gain, the
    factor on the length of a random direction. Sequences do not interact in a transformer, so that the spectral norm of a batch
    is that of its worst sequence. Several micro-batches: the largest spectral norm; the rms over all.

    Attributes:
        spectral: ||J_l - I||_2, L of them.
        rms: ||J_l - I||_F / sqrt(n), L of them.
        whole_spectral: ||dy_L / dx_1||_2, which the paper's Theorem 3.3 bounds (its "Euclidean norm").
        gain: ||dy_L / dx_1||_F / sqrt(n). With branches of degree 1 (ReLU or linear after a norm) close to
            sigma_{L+1} / sigma_1 at initialisation.
        product_error: ||J_L ... J_1 v - (dy_L / dx_1) v|| / ||(dy_L / dx_1) v||, a random v: rounding, or the blocks exchange
            more than the hidden state. (In print the product has L - 1 factors; L are right.)
        size: Entries of the states, of all micro-batches.
        draws: Random probes of the rms; None where all unit vectors were taken.
    """

    spectral: tuple[RitzValue, ...]
    rms: tuple[Measured, ...]
    whole_spectral: RitzValue
    gain: Measured
    product_error: float
    size: int
    draws: int | None

    def __str__(self) -> str:
        how = "all unit vectors" if self.draws is None else f"{self.draws} random probes"
        worst = max(s.relative for s in self.spectral)
        return (
            f"||dy_L/dx_1||: spectral {self.whole_spectral}, rms gain {self.gain} ({how}); J_L...J_1 equals it to "
            f"{self.product_error:.1e}; largest residual of ||J_l - I||_2: {worst:.1e} of it"
        )


class _Map:
    """J or J - I of one micro-batch, in products with vectors of the state's shape."""

    def __init__(self, y: Tensor, x: Tensor, *, minus_identity: bool) -> None:
        self.J, self.x, self.minus_identity = JacobianProducts(y, x), x, minus_identity

    def forward(self, v: Tensor) -> Tensor:
        return self.J.forward(v) - v if self.minus_identity else self.J.forward(v)

    def gram(self, v: Tensor) -> Tensor:
        """Return A^T A v, v flat."""
        Av = self.forward(v.reshape(self.x.shape))
        (back,) = self.J.adjoint(Av)
        return (back - Av if self.minus_identity else back).reshape(-1)

    def squares(self, draws: int | None, seed: int) -> list[float]:
        """Return ||A z||^2 of each probe; the sum over all unit vectors for draws=None."""
        squares = [float(self.forward(z).double().square().sum()) for z in probes(self.x, draws, seed)]
        return squares if draws is not None else [math.fsum(squares)]


def jacobians(data: BatchedLoss, blocks: Blocks, estimator: Estimator, *, tell: Callable[[int, int], None]) -> Jacobians:
    """Return the Jacobians' norms; all unit vectors are probes where the state of every micro-batch is small enough.

    Memory: the model's graph twice over for one micro-batch, as in a training step with second derivatives, and 20 states.
    """
    spectral: list[list[RitzValue]] = [[] for _ in range(len(blocks) + 1)]  # of each map, by micro-batch
    squares: list[list[list[float]]] = [[] for _ in spectral]
    error, total = 0.0, len(data.batches) * len(spectral)
    sizes = [_state(data, batch, blocks).numel() for batch in data.batches]
    draws = estimator.draws_for(max(sizes))
    for number, batch in enumerate(data.batches):
        with recording(blocks, leaves="first") as recorded:
            data.output(batch)
        whole = _Map(recorded.outputs[-1], recorded.inputs[0], minus_identity=False)
        with recording(blocks, leaves="each") as recorded:
            data.output(batch)
        maps = [_Map(y, x, minus_identity=True) for x, y in zip(recorded.inputs, recorded.outputs, strict=True)]
        shift = 7919 * number
        for k, one in enumerate((*maps, whole)):
            tell(number * len(spectral) + k, total)
            spectral[k].append(estimator.largest_singular_value(one.gram, one.x.reshape(-1), shift))
            squares[k].append(one.squares(draws, estimator.seed + shift))
        (v,) = probes(whole.x, 1, estimator.seed + shift)
        product, expected = v, whole.forward(v)
        for one in maps:
            product = one.J.forward(product)
        error = max(error, float((product - expected).norm() / expected.norm()))
    sums = [[math.fsum(column) for column in zip(*of_map, strict=True)] for of_map in squares]
    *rms, gain = (root(mean_of(values, exact=draws is None), sum(sizes)) for values in sums)
    *norms, whole_norm = (max(of_map, key=lambda recorded: recorded.value) for of_map in spectral)
    return Jacobians(tuple(norms), tuple(rms), whole_norm, gain, error, sum(sizes), draws)


@torch.no_grad()
def _state(data: BatchedLoss, batch: MicroBatch, blocks: Blocks) -> Tensor:
    with recording(blocks) as recorded:
        data.output(batch)
    return recorded.inputs[0]
