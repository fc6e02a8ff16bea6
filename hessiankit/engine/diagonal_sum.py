"""The diagonal of the Hessian of one batch or many: by sweeps, or by products with unit vectors where these take less."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessiankit.engine.diagnosis import without_effect
from hessiankit.engine.diagonal_rows import read_diagonal
from hessiankit.engine.jacobians import ParameterJacobian
from hessiankit.engine.linearisation import Linearisation
from hessiankit.engine.parts import CHUNK, WORKSPACE, is_split, parts
from hessiankit.engine.product_rows import product_cost
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.handshake import Handshake
from hessiankit.support.errors import TraceError

FASTER = 4.0
"""Speed of a sweep, whose directions stay together and are not pulled back, relative to a product with the Hessian, where both
take the same by shape; measured on encoders and language models of 64 tokens and more (2 to 5; smaller models more)."""


class TooCostly(Exception):
    """The diagonal would take longer than the allowed number of products with the Hessian."""

    def __init__(self, products: float) -> None:
        super().__init__(products)
        self.products = products


@dataclass
class DiagonalSum:
    """The weighted sum of the diagonals of several batches.

    Args:
        caller: Name that starts an error message.
        batches: One request a batch, for the same parameters.
        batch_size: Samples of a chunk, or None.
        progress: Called with (samples done, samples in all).
        max_products: Number of products with its Hessian; :class:`TooCostly` is raised where a batch would take longer.

    Attributes:
        entries: The diagonal so far.
        cost: Number of products with the Hessian of the same cost, for the costliest batch; rows that stay apart count zero.
        loss: The loss.
        fallbacks: Operations that were differentiated automatically.
    """

    caller: str
    batches: Sequence[BatchLoss]
    batch_size: int | None
    progress: Callable[[int, int], None] | None
    max_products: float = math.inf

    def __post_init__(self) -> None:
        first = self.batches[0]
        self.entries = torch.zeros(first.size, dtype=first.dtype, device=first.device)
        self.samples, self.done = sum(batch.n_samples for batch in self.batches), 0
        self.loss, self.cost, self.fallbacks = 0.0, 0.0, list[str]()

    def run(self, *, gauss_newton: bool) -> None:
        """Add all batches."""
        has_effect = False
        for batch in self.batches:
            try:
                handshake, split = Handshake(batch), is_split(batch, self.batch_size)
                with batch.at(), torch.no_grad():
                    value = self._add(batch, handshake, split=split, gauss_newton=gauss_newton)
                handshake.close()
                has_effect = True
            except TraceError:
                if batch.reached():
                    raise
                value = batch.own_value()  # nothing that is asked for has an effect on this batch
            self.loss += batch.share * value
        if not has_effect:
            raise without_effect(self.caller, self.batches[0].parameters)

    def _add(self, batch: BatchLoss, handshake: Handshake, *, split: bool, gauss_newton: bool) -> float:
        """Add one batch and return its loss."""
        value, offset = 0.0, self.done
        for part in parts(batch, self.batch_size, split=split, gauss_newton=gauss_newton, is_diagonal=True):
            value += part.loss
            self.fallbacks += part.traced_loss.trace.fallbacks
            products = product_cost(part.paths.trace, batch.size, batch.dtype.itemsize)
            estimate = batch.size * part.cost.coupled / (FASTER * products.numbers)  # products that take as long
            if part.is_long or estimate > batch.size:
                self._announce(batch.size)
                linearised = Linearisation(
                    part.batch, gauss_newton=gauss_newton, handshake=handshake, traced_loss=part.traced_loss
                )
                self._products(linearised, batch)
            else:
                self._announce(estimate)
                handshake.add(part.paths.trace, part.paths.adjoints, batch.share)
                read_diagonal(part.paths, part.sections, self._add_entries)
            self.done = offset + part.stop
            if self.progress is not None:
                self.progress(self.done, self.samples)
        return value

    def _add_entries(self, u: ParameterJacobian, values: Tensor) -> None:
        into = self.entries[self.batches[0].slices[u.parameter]]
        for span, entries in u.runs():
            into[entries] += values[span].to(into.dtype)

    def _announce(self, products: float) -> None:
        self.cost = max(self.cost, products)
        if self.cost > self.max_products:
            raise TooCostly(self.cost)

    def _products(self, linearised: Linearisation, batch: BatchLoss) -> None:
        """Add the diagonal of a linearised batch by products with unit vectors."""
        step = max(1, min(WORKSPACE // linearised.bytes_per_vector, CHUNK // (batch.size * batch.dtype.itemsize)))
        for at in torch.arange(batch.size, device=batch.device).split(step):
            units = self.entries.new_zeros(at.numel(), batch.size)
            units.diagonal(int(at[0])).fill_(1.0)
            self.entries[at] += batch.share * linearised.product(units).diagonal(int(at[0]))
