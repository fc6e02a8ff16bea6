"""The handshake of second order: is H v, for a generic vector v, the change of the module's own gradient along v?"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.cancellation import ROUNDING, rounding_errors
from hessiankit.request.handshake import scale_of_gradient
from hessiankit.request.loss_trace import loss_trace
from hessiankit.support.errors import InputError, TraceError
from hessiankit.support.torch_state import read_numbers
from hessiankit.tracing.derivative_tests import FEWER_WEIGHTS, estimates, rounding
from hessiankit.tracing.segment_probe import generic_direction
from hessiankit.tracing.stopped import held_values

Handshaking: TypeAlias = bool | str
SECOND_ORDER = "second order"
VARIABLE = "HESSIANKIT_HANDSHAKE"
"""Environment variable that makes ``handshake="second order"`` the default, for the tests of a project."""

TOLERANCE = 100.0
"""A difference of so many times what rounding explains is none: differences at one step leave a part of it open."""

OTHER_STEPS = (1e-2, 1e-3, 1e-4, 1e-6)
"""Steps that are tried where the first one disagrees: a kink may lie within it, or the gradient bend too much."""


def is_second_order(handshake: Handshaking) -> bool:
    """Tell whether the second derivative is to be compared too.

    Raises:
        InputError: ``handshake`` is neither a truth value nor "second order".
    """
    if isinstance(handshake, str) and handshake != SECOND_ORDER:
        raise InputError(f"handshake={handshake!r} is not known; pass True, False or {SECOND_ORDER!r}")
    return handshake == SECOND_ORDER or (handshake is True and os.environ.get(VARIABLE) == SECOND_ORDER)


@torch.no_grad()
def compare_second_order(batches: Sequence[BatchLoss], eps: float, product: Callable[[Tensor], Tensor]) -> None:
    """Compare a product (P,) to (P,) with central differences of the module's own gradient, along one generic vector.

    Two gradients, and one forward pass that records what torch holds constant; more where the first step disagrees. In half
    precision differences have no correct digits, and nothing is compared.

    Args:
        batches: The batches.
        eps: Rounding unit of the coarsest dtype that the module computes in.
        product: The product with the Hessian.

    Raises:
        TraceError: The two differ by more than rounding at every step.
    """
    point, tolerance = batches[0].parameters, TOLERANCE * rounding(eps)
    if tolerance > 1:
        return
    tangents = generic_direction(point, batches[0].still)
    flat = product(torch.cat([tangents[name].reshape(-1).to(batches[0].dtype) for name in point]))
    products = [
        part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in point.values()]), point.values(), strict=True)
    ]
    contexts = [held_values(partial(_first_call, batch)) for batch in batches]

    def gradient(at: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = [torch.zeros_like(x) for x in at]
        for batch, context in zip(batches, contexts, strict=True):
            slopes = batch.own_gradient(dict(zip(point, at, strict=True)), context).gradient
            for x, name in zip(total, point, strict=True):
                slope = slopes[name]
                if slope is not None:
                    x += batch.share * slope
        return tuple(total)

    values, direction = tuple(point.values()), tuple(tangents[name] for name in point)

    def gaps(steps: Sequence[float], weights: Sequence[float], rounding_error: float) -> Iterator[tuple[float, str]]:
        for step in steps:
            for differences in estimates(gradient, values, direction, (step,), weights):
                pairs = dict(zip(point, zip(products, differences, strict=True), strict=True))
                yield _largest_gap(pairs, ROUNDING * rounding_error / step)

    if any(gap <= tolerance for gap, _ in gaps((eps ** (1 / 3),), (0.5,), eps * _steepest(batches[0]))):
        return
    eps, error = _rounding(batches, tangents)
    tolerance = TOLERANCE * rounding(eps)
    if tolerance > 1:
        return
    disagreements = []
    for gap, name in gaps((eps ** (1 / 3), *OTHER_STEPS), FEWER_WEIGHTS, error):
        disagreements.append((gap, name))
        if gap <= tolerance:
            return
    gap, name = min(disagreements, default=(math.inf, next(iter(point))))
    raise TraceError(
        f"trace: H v for a generic vector v differs from central differences of the module's own gradient, by {gap:.1e} of its "
        f"largest entry with respect to {name!r}: a second derivative is wrong, or the loss has a kink here; nothing is "
        "returned. hessiankit.check names the block; handshake=True compares the first derivative alone"
    )


def _first_call(batch: BatchLoss, context: AbstractContextManager[Any]) -> None:
    with batch.at(), context:
        batch.value()


def _steepest(batch: BatchLoss) -> float:
    """Return the largest entry of the gradient that the module's own call had."""
    slopes = [] if batch.reference is None else batch.reference.gradient.values()
    return max(read_numbers(x.abs().max() for x in slopes if x is not None), default=0.0)


def _rounding(batches: Sequence[BatchLoss], tangents: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the rounding unit of the coarsest dtype of the computation, and the size of a gradient's rounding errors."""
    units, errors = [], []
    for batch in batches:
        units.append(loss_trace(batch).trace.eps)
        gradient, product = rounding_errors(batch, tangents)
        scale = scale_of_gradient(batch, batch.own_gradient())
        errors.append(batch.share * max(scale, *(float(x.abs().max()) for kind in (gradient, product) for x in kind.values())))
    return max(units), max(units) * math.fsum(errors)


def _largest_gap(pairs: dict[str, tuple[Tensor, Tensor | None]], noise: float) -> tuple[float, str]:
    """Return the largest difference, beyond noise, relative to the largest entry of its parameter, and the parameter.

    A parameter whose entries are far below those of the whole is measured by these, as its rounding errors are.
    """
    terms: list[Tensor] = []
    for product, difference in pairs.values():
        terms += [product, product, product] if difference is None else [product, difference, product - difference]
    numbers = iter(read_numbers(x.abs().max() for x in terms))
    rows = {name: (max(next(numbers), next(numbers)), next(numbers)) for name in pairs}
    floor = torch.finfo(terms[0].dtype).eps ** 0.25 * max(size for size, _ in rows.values())
    gaps = [(max(gap - noise, 0.0) / (size + floor or 1.0), name) for name, (size, gap) in rows.items()]
    return max(gaps)
