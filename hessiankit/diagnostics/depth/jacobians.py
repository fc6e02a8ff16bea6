"""How far each block is from the identity, and what the whole stack does to a change of its input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hessiankit.diagnostics.depth.blocks import Blocks
from hessiankit.diagnostics.depth.estimates import Measured, Ritz, first_vector, mean_of, probes, root
from hessiankit.diagnostics.depth.recording import Data, recording
from hessiankit.support.lanczos import lanczos


@dataclass(frozen=True)
class Jacobians:
    """Jacobians J_l = dy_l / dx_l of the blocks and of the stack, at the data (The Curse of Depth, Eqs. 8 and 35, corrected).

    A state holds all tokens and features of a micro-batch, padding too; with n entries ||J||_F / sqrt(n) is the rms gain: what
    J does to the length of a random direction. Sequences do not meet in a transformer, so that the spectral norm of a batch is
    that of its worst sequence. Several micro-batches: the largest spectral norm; the rms over all.

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

    spectral: tuple[Ritz, ...]
    rms: tuple[Measured, ...]
    whole_spectral: Ritz
    gain: Measured
    product_error: float
    size: int
    draws: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python numbers."""
        return {
            "spectral": [vars(s) for s in self.spectral],
            "rms": [vars(r) for r in self.rms],
            "whole_spectral": vars(self.whole_spectral),
            "gain": vars(self.gain),
            "product_error": self.product_error,
            "size": self.size,
            "draws": self.draws,
        }

    def __str__(self) -> str:
        how = "all unit vectors" if self.draws is None else f"{self.draws} random probes"
        worst = max(s.relative for s in self.spectral)
        return (
            f"||dy_L/dx_1||: spectral {self.whole_spectral}, rms gain {self.gain} ({how}); J_L...J_1 equals it to "
            f"{self.product_error:.1e}; largest residual of ||J_l - I||_2: {worst:.1e} of it"
        )


class LinearMap:
    """The Jacobian dy/dx of a graph, as products from both sides.

    J^T u is linear in u, so that its derivative in u is J: two reverse passes make a forward one (Townsend 2017), without
    asking every operation for a forward rule. The graph is made once; a product is one pass through it.
    """

    def __init__(self, y: Tensor, x: Tensor) -> None:
        self.x, self.y = x, y
        self.u = torch.zeros_like(y, requires_grad=True)
        self.back = self._gradient(y, x, self.u, create_graph=True)

    def forward(self, v: Tensor) -> Tensor:
        """Return J v."""
        return torch.zeros_like(self.y) if self.back is None else _or_zero(self._gradient(self.back, self.u, v), self.y)

    def adjoint(self, w: Tensor) -> Tensor:
        """Return J^T w."""
        return _or_zero(self._gradient(self.y, self.x, w), self.x)

    @staticmethod
    def _gradient(y: Tensor, x: Tensor, w: Tensor, *, create_graph: bool = False) -> Tensor | None:
        if not y.requires_grad:
            return None
        return torch.autograd.grad(y, x, w, create_graph=create_graph, retain_graph=True, allow_unused=True)[0]


def _or_zero(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if x is None else x


@dataclass
class _Sums:
    """What one map adds up over micro-batches."""

    values: list[float] = field(default_factory=list)
    spectral: Ritz | None = None

    def add(self, squares: list[float], spectral: Ritz) -> None:
        self.values = [a + b for a, b in zip(self.values or [0.0] * len(squares), squares, strict=True)]
        if self.spectral is None or spectral.value > self.spectral.value:
            self.spectral = spectral


def jacobians(
    data: Data,
    blocks: Blocks,
    *,
    draws: int,
    exact_below: int,
    tol: float,
    products: int,
    seed: int,
    tell: Callable[[int, int], None],
) -> Jacobians:
    """Return the Jacobians' norms.

    Memory: the model's graph twice over for one micro-batch, as in a training step with second derivatives, and 20 states.

    Args:
        data: The data; labels are not read.
        blocks: The blocks.
        draws: Random probes of the rms.
        exact_below: Where the state of every micro-batch has at most this many entries, all unit vectors are taken instead.
        tol: Of Lanczos's residual, relative to the squared singular value.
        products: Products with A^T A at most.
        seed: Of the probes and of Lanczos's first vector.
        tell: Called with (maps done, in all).
    """
    sums = [_Sums() for _ in range(len(blocks) + 1)]
    error, size, done = 0.0, 0, 0
    sizes = [_state(data, batch, blocks).numel() for batch in data.batches]
    exact = max(sizes) <= exact_below
    for number, batch in enumerate(data.batches):
        with recording(blocks, leaves="first") as found:
            data.output(batch)
        whole = LinearMap(found.outputs[-1], found.inputs[0])
        with recording(blocks, leaves="each") as found:
            data.output(batch)
        maps = [LinearMap(y, x) for x, y in zip(found.inputs, found.outputs, strict=True)]
        size += sizes[number]
        start = seed + 7919 * number
        for k, one in enumerate([*maps, whole]):
            tell(done, len(data.batches) * len(sums))
            done += 1
            minus = k < len(maps)
            sums[k].add(_squares(one, minus, None if exact else draws, start), _spectral(one, minus, tol, products, start))
        (v,) = probes(whole.x, 1, start)
        left, right = v, whole.forward(v)
        for one in maps:
            left = one.forward(left)
        error = max(error, float((left - right).norm() / right.norm()))
    rms = [root(mean_of(s.values, exact=exact), size) for s in sums]
    spectral = [s.spectral for s in sums if s.spectral is not None]
    return Jacobians(tuple(spectral[:-1]), tuple(rms[:-1]), spectral[-1], rms[-1], error, size, None if exact else draws)


@torch.no_grad()
def _state(data: Data, batch: Any, blocks: Blocks) -> Tensor:
    with recording(blocks) as found:
        data.output(batch)
    return found.inputs[0]


def _squares(one: LinearMap, minus_identity: bool, draws: int | None, seed: int) -> list[float]:
    """Return ||A z||^2 of each probe, A = J - I or J; of several micro-batches the same probe's are added."""
    found = []
    for z in probes(one.x, draws, seed):
        Az = one.forward(z) - z if minus_identity else one.forward(z)
        found.append(float(Az.double().square().sum()))
    return found if draws is not None else [math.fsum(found)]


def _spectral(one: LinearMap, minus_identity: bool, tol: float, products: int, seed: int) -> Ritz:
    shape = one.x.shape

    def square(v: Tensor) -> Tensor:
        v = v.reshape(shape)
        Av = one.forward(v) - v if minus_identity else one.forward(v)
        back = one.adjoint(Av) - Av if minus_identity else one.adjoint(Av)
        return back.reshape(-1)

    found = lanczos(square, first_vector(one.x.reshape(-1), seed), tol=tol, most=products)
    value = math.sqrt(max(found.value, 0.0))
    return Ritz(value, found.residual / value if value else 0.0, found.products, found.converged)
