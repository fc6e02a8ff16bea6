"""Second derivatives of the loss of one batch or many: the whole matrix, or single blocks, on demand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from hessiankit.curvature.planning import check_workspace
from hessiankit.engine.assembly import assemble
from hessiankit.engine.diagnosis import not_finite
from hessiankit.engine.linearisation import linearise
from hessiankit.engine.parts import CHUNK, WORKSPACE
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.cancellation import ROUNDING, rounding_errors
from hessiankit.request.fisher import check_fits
from hessiankit.request.loss_trace import nearby
from hessiankit.request.second_order import compare_second_order
from hessiankit.support.errors import InputError, TraceError
from hessiankit.support.memory import available_memory, check_matrix
from hessiankit.support.torch_state import computed_later
from hessiankit.tracing.derivative_tests import generic

Progress = Callable[[int, int], None]
Look = Callable[[int], None]
CHANGED = (
    "hessian: something that the module or the loss reads has changed since this result was made: {}; read what you need before "
    "it changes, or call hessian again"
)
NEARBY = (0.1, 1e-3)  # distances of generic parameters from the given ones; the second where the first has no finite loss


class Evaluation:
    """The sum of the losses of batches, each times its share, at fixed parameters; matrices are computed on demand and cached."""

    def __init__(
        self,
        batches: Sequence[BatchLoss],
        batch_size: int | None,
        progress: Progress | None,
        *,
        second_order: bool = False,
    ) -> None:
        self.batches, self.batch_size, self.progress = tuple(batches), batch_size, progress
        self.second_order = second_order
        self.asymmetry = math.nan
        self.fallbacks: tuple[str, ...] = ()
        self.seconds = 0.0
        self._whole: Tensor | None = None
        self._loss: float | None = None
        self._blocks: dict[tuple[str, str], Tensor] = {}
        self._of_panels: Sequence[BatchLoss] = self.batches
        self._nearby: list[float] | None = None  # the losses at generic parameters, when the result was made

    def seal(self) -> None:
        """Record the module's loss at generic parameters; what is computed later, without a matrix, is compared with it.

        Loss and gradient at the parameters themselves do not show everything that a second derivative depends on: the strength
        of a penalty at its minimum, for instance.
        """
        self._nearby = self._generic_losses() if self.handshake else None

    def _generic_losses(self) -> list[float]:
        point = cache(partial(nearby, self.batches[0]))
        at_points = ((_value_at(batch, point(size)) for size in NEARBY) for batch in self.batches)
        return [next(filter(math.isfinite, values), math.nan) for values in at_points]

    def _check_unchanged(self) -> None:
        """Raise TraceError if the module or the loss computes something else than when the result was made."""
        unit, matrix = ROUNDING * torch.finfo(self.batches[0].dtype).eps, self._whole
        if self._nearby is not None:
            for recorded, present in zip(self._nearby, self._generic_losses(), strict=True):
                if math.isfinite(recorded) and not abs(recorded - present) <= unit * max(abs(recorded), abs(present)):
                    raise TraceError(CHANGED.format(f"at generic parameters the loss was {recorded:.8g}, and is {present:.8g}"))
        elif matrix is not None and self.handshake:
            signs = generic(matrix[0], 0).sign()
            products = [batch.share * linearise(batch, gauss_newton=False).product(signs[None])[0] for batch in self.batches]
            gap, size = (
                float(x.abs().max()) for x in (sum(products) - matrix @ signs, torch.linalg.vector_norm(matrix, 1, dim=1))
            )
            if not gap <= unit * size and not gap <= unit * self._rounding(outer=False):
                raise TraceError(CHANGED.format(f"its product with a generic vector is off by {gap / size:.1e}"))

    @property
    def handshake(self) -> bool:
        """Whether results are compared with the module's own loss and gradient."""
        return all(batch.reference is not None for batch in self.batches)

    @property
    def is_complete(self) -> bool:
        """Whether the whole matrix has been computed."""
        return self._whole is not None

    @property
    @computed_later
    def loss(self) -> float:
        """The loss, from a forward pass if no matrix has been computed."""
        if self._loss is None:
            values = [batch.own_value() if batch.reference is None else batch.reference.loss for batch in self.batches]
            self._loss = math.fsum(batch.share * value for batch, value in zip(self.batches, values, strict=True))
        return self._loss

    @computed_later
    def whole(self, into: Tensor | None = None) -> Tensor:
        """Return the P x P matrix; the first time it is computed in ``into``, if that is given."""
        if self._whole is None:
            self._check_unchanged()
            self._whole = self._matrix(self.batches, self.progress, outer=False, into=into)
            self._blocks.clear()
        return self._whole

    def take(self, matrix: Tensor, asymmetry: float, fallbacks: tuple[str, ...]) -> None:
        """Set the P x P matrix, its asymmetry and fallbacks, when it was computed by panels."""
        self._compare(self.batches, matrix)
        self._whole, self._loss, self.asymmetry, self.fallbacks = matrix, self.loss, asymmetry, fallbacks

    @computed_later
    def outer(self) -> Tensor:
        """Return the Gauss-Newton part of the P x P matrix, of a loss that reads one tensor of the module's."""
        for batch in self.batches:
            check_fits(batch, "ggn")
        self._check_unchanged()
        return self._matrix(self.batches, None, outer=True)

    @computed_later
    def block(self, i: str, j: str) -> Tensor:
        """Return the block of two parameters, without computing any other."""
        if self._whole is not None:
            slices = self.batches[0].slices
            return self._whole[slices[i], slices[j]]
        if (i, j) not in self._blocks:
            self._check_unchanged()
            batches = self._only(i, j)
            part, slices = self._matrix(batches, None, outer=False), batches[0].slices
            self._blocks |= {(a, b): part[slices[a], slices[b]] for a in slices for b in slices}
        return self._blocks[i, j]

    @computed_later
    def part(self, i: str, rows: Tensor | None, j: str, columns: Tensor | None) -> Tensor:
        """Return some rows and columns of the block of two parameters (None: all of them).

        A few are computed by products with the Hessian of the two parameters, without the block.
        """
        if rows is None and columns is None:
            return self.block(i, j)
        first = self._only(i, j)[0]
        entries = [torch.arange(at.start, at.stop, device="cpu") for at in (first.slices[i], first.slices[j])]
        u, v = (at if chosen is None else at[chosen] for at, chosen in zip(entries, (rows, columns), strict=True))
        is_few = 2 * min(len(u), len(v)) <= len(entries[0]) + len(entries[1])
        if is_few and self._whole is None and (i, j) not in self._blocks:
            return self._products(i, j, v, u).T if len(u) < len(v) else self._products(i, j, u, v)
        block = self.block(i, j)
        block = block if rows is None else block[rows.to(block.device)]
        return block if columns is None else block[:, columns.to(block.device)]

    def _products(self, i: str, j: str, keep: Tensor, along: Tensor) -> Tensor:
        """Return some rows and columns of the Hessian of two parameters, by products with the unit vectors of the columns."""
        start = time.perf_counter()
        self._check_unchanged()
        batches = self._only(i, j)
        size, device = batches[0].size, batches[0].device
        keep, along = keep.to(device), along.to(device)
        total = torch.zeros(len(along), len(keep), dtype=batches[0].dtype, device=device)
        with torch.no_grad():
            for batch in batches:
                linearised = linearise(batch, gauss_newton=False)
                step = max(1, WORKSPACE // linearised.bytes_per_vector)
                for positions, out in zip(along.split(step), total.split(step), strict=True):
                    units = total.new_zeros(len(positions), size).scatter_(1, positions.unsqueeze(1), 1.0)
                    out.add_(linearised.product(units)[:, keep], alpha=batch.share)
                self.fallbacks = tuple(dict.fromkeys(self.fallbacks + linearised.fallbacks))
        if not bool(torch.isfinite(total).all()):
            raise not_finite("hessian", i, j, batches)
        self.seconds += time.perf_counter() - start
        return total.T

    def _only(self, *names: str) -> list[BatchLoss]:
        return [replace(t, parameters={n: p for n, p in t.parameters.items() if n in names}) for t in self.batches]

    @cached_property
    @computed_later
    def unused(self) -> tuple[str, ...]:
        """The parameters that the loss does not depend on in any batch."""
        names: Iterable[str] = self.batches[0].parameters
        if self._whole is not None:  # a nonzero entry shows an effect
            diagonal = self._whole.diagonal()
            flat = [n for n, rows in self.batches[0].slices.items() if not bool(diagonal[rows].any())]
            names = [n for n in flat if not bool(self._whole[self.batches[0].slices[n]].any())]
        reaching: set[str] = set().union(*(batch.reached() for batch in self.batches)) if names else set()
        return tuple(name for name in names if name not in reaching)

    def _matrix(
        self, batches: Sequence[BatchLoss], progress: Progress | None, *, outer: bool, into: Tensor | None = None
    ) -> Tensor:
        start = time.perf_counter()
        first = batches[0]
        if into is None:
            smallest = min(CHUNK, first.size**2 * first.dtype.itemsize)
            check_matrix("hessian", first.size, first.size, first.dtype, first.device, workspace=smallest)
        matrix = SymmetricStorage(first.slices, first.dtype, first.device, None if into is None else into.zero_())
        value, fallbacks = self._add_all(matrix, batches, progress, self.look(first), outer=outer)
        asymmetry = matrix.mirror()
        check_finite(matrix, batches)
        self.check_symmetric(matrix, asymmetry, value, fallbacks, outer=outer)
        if not outer:
            self._compare(batches, matrix.data)
            self.asymmetry = asymmetry if math.isnan(self.asymmetry) else max(self.asymmetry, asymmetry)
            self.fallbacks = fallbacks
            self._loss = value
            self.seconds += time.perf_counter() - start
        return matrix.data

    @property
    def _eps(self) -> float:
        """The rounding unit of the coarsest dtype of the modules' tensors and of the result."""
        kinds = {x.dtype for batch in self.batches for _, x, _ in batch.state.tensors() if x.is_floating_point()}
        return max(torch.finfo(kind).eps for kind in (self.batches[0].dtype, *kinds))

    def _compare(self, batches: Sequence[BatchLoss], matrix: Tensor) -> None:
        if self.second_order:
            compare_second_order(batches, self._eps, lambda v: matrix @ v)

    def check_symmetric(
        self, matrix: SymmetricStorage, asymmetry: float, loss: float, fallbacks: tuple[str, ...], *, outer: bool = False
    ) -> None:
        """Raise if half the digits of the largest entry differ between H and its transpose.

        Unless all of H is rounding: of the loss, or of terms that cancel in it.
        """
        eps = self._eps
        allowed = eps**0.5
        if asymmetry <= allowed:
            return
        low, high = torch.aminmax(matrix.data)
        largest, difference = max(-float(low), float(high)), asymmetry * matrix.largest()
        error = difference / largest
        if error <= allowed or largest <= allowed * abs(loss):
            return
        if difference > ROUNDING * eps * self._rounding(outer=outer):
            raise InputError(
                f"hessian: H and its transpose differ by {error:.1e} of the largest entry, more than rounding ({allowed:.1e})"
                f"{automatic(fallbacks)}. An operation has a wrong second derivative or overflows, or terms cancel; write it in "
                "other operations, or use a wider dtype"
            )

    def _rounding(self, *, outer: bool) -> float:
        """Return the largest rounding error of the product with random signs, for a unit roundoff of 1."""
        direction = {name: generic(x, k).sign() for k, (name, x) in enumerate(self.batches[0].parameters.items())}
        errors = ((batch.share, rounding_errors(batch, direction, gauss_newton=outer)[1]) for batch in self.batches)
        return math.fsum(share * max(float(x.abs().max()) for x in products.values()) for share, products in errors)

    def panel(
        self, parts: Sequence[tuple[range, range]], n: int, *, outer: bool = False, look: Look | None = None
    ) -> tuple[SymmetricStorage, float, tuple[str, ...]]:
        """Return the n-th panel, its blocks (i, j) for i not after j only, the loss, and the fallbacks.

        ``parts`` are all panels: rows and columns as positions of parameters. Loss and gradient are compared with the module's
        own in the first panel that is computed.
        """
        first, (rows, columns), samples = self.batches[0], parts[n], sum(batch.n_samples for batch in self.batches)
        panel = SymmetricStorage(first.slices, first.dtype, first.device, rows=rows, columns=columns)
        tell = None if self.progress is None else _shifted(self.progress, n * samples, len(parts) * samples)
        loss, fallbacks = self._add_all(panel, self._of_panels, tell, look, outer=outer)
        self._of_panels = [batch.unchecked() for batch in self.batches]
        return panel, loss, fallbacks

    def tell(self, n: int, parts: Sequence[tuple[range, range]]) -> None:
        """Report the samples of the n-th panel as done, for a caller that computed it itself."""
        samples = sum(batch.n_samples for batch in self.batches)
        if self.progress is not None:
            self.progress((n + 1) * samples, len(parts) * samples)

    def _add_all(
        self, matrix: SymmetricStorage, batches: Sequence[BatchLoss], progress: Progress | None, look: Look | None, *, outer: bool
    ) -> tuple[float, tuple[str, ...]]:
        """Add all batches to a matrix or a panel of it; return the loss and the fallbacks."""
        samples, finished = sum(batch.n_samples for batch in batches), 0
        values: list[float] = []
        fallbacks: list[str] = list(self.fallbacks)
        for batch in batches:
            tell = None if progress is None else _shifted(progress, finished, samples)
            try:
                value, names = assemble(
                    batch, matrix, batch_size=self.batch_size, progress=tell, gauss_newton=outer, on_memory=look
                )
            except TraceError:
                if batch.reached():
                    raise
                value, names = batch.own_value(), ()  # no parameter has an effect on it
            values.append(batch.share * value)
            fallbacks += names
            finished += batch.n_samples
        return math.fsum(values), tuple(dict.fromkeys(fallbacks))

    @staticmethod
    def look(first: BatchLoss) -> Look:
        """Return a check that the derivatives of a chunk fit beside the matrix."""
        matrix, free = first.size * first.size * first.dtype.itemsize, available_memory(first.device)
        return lambda taken: check_workspace(taken, matrix, first.device, free)


def _value_at(batch: BatchLoss, point: Mapping[str, Tensor]) -> float:
    """Return the loss at some parameters; NaN where the module raises, as a Cholesky factorisation may."""
    try:
        return batch.own_value(point)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a module may raise outside its domain
        return math.nan


def check_finite(matrix: SymmetricStorage, batches: Sequence[BatchLoss]) -> None:
    """Raise the error for the first block of a mirrored matrix, or of a panel of it, that is not finite, if one is."""
    names = list(matrix.slices)
    pairs = ((names[i], names[j]) for i in matrix.rows for j in matrix.columns) if not matrix.is_finite else ()
    for i, j in pairs:
        if not bool(torch.isfinite(matrix.block(i, j)).all()):
            raise not_finite("hessian", i, j, batches)


def automatic(fallbacks: Sequence[str]) -> str:
    """Return a clause that names the operations that were differentiated automatically, or ""."""
    return f"; differentiated automatically: {', '.join(fallbacks)}" if fallbacks else ""


def _shifted(progress: Progress, offset: int, samples: int) -> Progress:
    return lambda done, _: progress(offset + done, samples)
