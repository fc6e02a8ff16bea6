"""Jacobians of the blocks, and the Hessian and Gauss-Newton matrix of the loss with respect to each block's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.curvature.operator import hessian_operator
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.lanczos import RitzValue
from hessiankit.training.depth.blocks import WHO, Blocks, recording
from hessiankit.training.depth.products import (
    Estimator,
    HessianProducts,
    JacobianProducts,
    Measured,
    by_route,
    mean_of,
    probes,
    root,
    trace_of,
)
from hessiankit.training.sharpness.batches import BatchedLoss


@dataclass(frozen=True)
class Jacobians(WithDict):
    """Jacobians J_l = dy_l / dx_l of the blocks and of the stack, at the data (The Curse of Depth, Eqs. 8 and 35, corrected).

    A state holds all tokens and features of a micro-batch, padding too; with n entries ||J||_F / sqrt(n) is the rms gain, the
    factor on the length of a random direction. Sequences do not interact in a transformer, so the spectral norm of a batch is
    the largest over its sequences. Several micro-batches: the largest spectral norm; the rms over all.

    Attributes:
        spectral: ||J_l - I||_2, L of them.
        rms: ||J_l - I||_F / sqrt(n), L of them.
        whole_spectral: ||dy_L / dx_1||_2, which the paper's Theorem 3.3 bounds (its "Euclidean norm").
        gain: ||dy_L / dx_1||_F / sqrt(n). With branches of degree 1 (ReLU or linear after a norm) close to
            sigma_{L+1} / sigma_1 at initialisation.
        product_error: ||J_L ... J_1 v - (dy_L / dx_1) v|| / ||(dy_L / dx_1) v||, a random v: above rounding only if the blocks
            exchange more than the hidden state. (In print the product has L - 1 factors; L are right.)
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


def jacobians(data: BatchedLoss, blocks: Blocks, estimator: Estimator, *, tell: Callable[[int, int], None]) -> Jacobians:
    """Return the Jacobians' norms; all unit vectors are probes where the state of every micro-batch is small enough.

    Memory: the model's graph twice over for one micro-batch, as in a training step with second derivatives, and 20 states.
    """
    count = len(blocks) + 1  # of matrices: J_l - I of every block, and J of the stack
    spectral: list[list[RitzValue]] = [[] for _ in range(count)]  # by micro-batch
    squares: list[list[list[float]]] = [[] for _ in range(count)]
    sizes, error = [], 0.0
    for batch in data.batches:
        with torch.no_grad(), recording(blocks) as record:
            data.run(batch)
        sizes.append(record.inputs[0].numel())
    draws = estimator.draws_for(max(sizes))
    for number, batch in enumerate(data.batches):
        with recording(blocks, leaves="first") as record:
            data.run(batch)
        stack = JacobianProducts(record.outputs[-1], record.inputs[0])
        with recording(blocks, leaves="each") as record:
            data.run(batch)
        branches = [JacobianProducts(y - x, x) for x, y in zip(record.inputs, record.outputs, strict=True)]  # J_l - I
        like, shift = record.inputs[0].detach(), 7919 * number
        for k, A in enumerate((*branches, stack)):
            tell(number * count + k, len(data.batches) * count)
            spectral[k].append(estimator.largest_singular_value(A.gram, like.reshape(-1), shift))
            lengths = [float(A.forward(z).double().square().sum()) for z in probes(like, draws, estimator.seed + shift)]
            squares[k].append(lengths if draws is not None else [math.fsum(lengths)])
        (v,) = probes(like, 1, estimator.seed + shift)
        product, reference = v, stack.forward(v)
        for A in branches:
            product = product + A.forward(product)
        error = max(error, float((product - reference).norm() / reference.norm()))
    sums = [[math.fsum(column) for column in zip(*batch_values, strict=True)] for batch_values in squares]
    *rms, gain = (root(mean_of(values, exact=draws is None), sum(sizes)) for values in sums)
    *norms, whole_norm = (max(batch_values, key=lambda norm: norm.value) for batch_values in spectral)
    return Jacobians(tuple(norms), tuple(rms), whole_norm, gain, error, sum(sizes), draws)


KINDS = ("hessian", "ggn")
METHODS = ("auto", "exact", "autograd")
SMALL = 2**15
"""Parameters of all blocks up to which the closed forms are tried first."""
Numbers: TypeAlias = "tuple[RitzValue, Measured]"


@dataclass(frozen=True)
class LayerCurvature(WithDict):
    """The diagonal blocks H_ll, l a layer, of the Hessian of the mean loss over all data, or of its Gauss-Newton part.

    H_ll is the curvature with respect to the parameters of block l alone, without the coupling of layers: lambda_max of the whole
    Hessian is at least the largest of these. It is not invariant: with LayerNorm Scaling written as a gain gamma / sqrt(l), the
    same function has another block for gamma.

    Attributes:
        kind: ``"hessian"`` or ``"ggn"`` (J^T L'' J, without the model's own curvature).
        top: lambda_max by layer.
        trace: Trace by layer.
        method: ``"exact"``: closed forms, the traces exact; ``"autograd"``: two reverse passes a product, the traces exact or
            from random probes.
        draws: Probes of the traces; None where these are exact.
        sizes: Parameters by layer.
        reason: Reason why ``"auto"`` did not take the closed forms, or "".
    """

    kind: str
    top: tuple[RitzValue, ...]
    trace: tuple[Measured, ...]
    method: str
    draws: int | None
    sizes: tuple[int, ...]
    reason: str = ""

    def __str__(self) -> str:
        name = "Hessian" if self.kind == "hessian" else "Gauss-Newton"
        how = "closed forms" if self.method == "exact" else "two reverse passes of autograd"
        traces = "exact traces" if self.draws is None else f"traces from {self.draws} random probes"
        worst = max(t.relative for t in self.top)
        why = f" ({self.reason})" if self.reason else ""
        return f"{name} by layer: products by {how}{why}, {traces}; largest residual of lambda_max: {worst:.1e} of it"


def layer_curvature(
    data: BatchedLoss,
    blocks: list[dict[str, nn.Parameter]],
    kind: str,
    *,
    method: str,
    estimator: Estimator,
    tell: Callable[[int, int], None],
) -> LayerCurvature:
    """Return lambda_max and trace of each block's matrix.

    ``"auto"`` is exact where the blocks have at most 32768 parameters in all and the model can be traced.
    """
    empty = next((k for k, block in enumerate(blocks) if not block), None)
    if empty is not None:
        raise InputError(f"{WHO}: block {empty + 1} has no parameters, so that there is no curvature in them; leave it out")
    sizes = tuple(sum(p.numel() for p in block.values()) for block in blocks)

    def exact() -> tuple[list[Numbers], int | None]:
        pairs, names = data.pairs(), list(dict.fromkeys(name for block in blocks for name in block))
        traces = hessian_diagonal(data.model, pairs, loss=data.loss, params=names, kind=kind, max_products=None).traces

        def of(k: int) -> Numbers:
            operator = hessian_operator(data.model, pairs, loss=data.loss, params=list(blocks[k]), kind=kind)
            top = estimator.largest_eigenvalue(operator.__matmul__, operator.gradient)
            return top, Measured(sum(traces[name] for name in blocks[k]))

        return each(of), None

    def autograd() -> tuple[list[Numbers], int | None]:
        draws = estimator.draws_for(max(sizes))
        products = HessianProducts(data, [list(block.values()) for block in blocks], kind)

        def of(k: int) -> Numbers:
            like = next(iter(blocks[k].values())).new_zeros(sizes[k])
            top = estimator.largest_eigenvalue(products.of(k), like)
            return top, trace_of(products.of(k), like, draws, estimator.seed + k)

        return each(of), draws

    def each(of: Callable[[int], Numbers]) -> list[Numbers]:
        numbers = []
        for k in range(len(blocks)):
            tell(k, len(blocks))
            numbers.append(of(k))
        return numbers

    (numbers, draws), route, reason = by_route(method, sum(sizes), SMALL, ("exact", exact), autograd)
    top, trace = zip(*numbers, strict=True)
    return LayerCurvature(kind, top, trace, route, draws, sizes, reason)
