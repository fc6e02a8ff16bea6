"""The diagonal of the Hessian, and its trace, without the matrix: exact, or estimated where that takes too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.estimators import ScalarEstimates, scalar_estimates
from hessiankit.curvature.evaluation import automatic
from hessiankit.curvature.operator import HessianOperator, check_fallbacks
from hessiankit.engine.diagnosis import not_finite
from hessiankit.engine.diagonal_sum import DiagonalSum, TooCostly
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.fisher import NAMES
from hessiankit.request.handshake import UNCOMPARED
from hessiankit.request.read import read_request
from hessiankit.request.selection import ByName, locate
from hessiankit.request.signature import CurvatureArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_count, check_name
from hessiankit.support.tables import Piece, Printed, sizes, table
from hessiankit.support.torch_state import one_at_a_time, read_numbers

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "hessian_diagonal"
METHODS = ("exact", "auto", "estimate")
PRODUCTS = 100  # of an estimate


@dataclass(frozen=True, repr=False, eq=False)
class CurvatureDiagonal(Printed):
    """The diagonal of the Hessian of a scalar loss, or of its Gauss-Newton part; made by :func:`hessian_diagonal`.

    ``kind``, ``loss``, ``fallbacks`` and ``handshake`` are as in :class:`hessiankit.HessianOperator`.

    Attributes:
        values: By parameter name, in the parameter's shape.
        cost: About how many products with the Hessian take as long as the exact diagonal, as forecast; NaN where it was not.
        estimate: None where the values are exact; else the estimate, with an interval for every entry and trace.
        seconds: Time taken.
    """

    values: dict[str, Tensor]
    kind: str
    loss: float
    fallbacks: tuple[str, ...]
    handshake: bool = True
    cost: float = math.nan
    estimate: ScalarEstimates | None = None
    seconds: float = 0.0

    @property
    def is_estimate(self) -> bool:
        """Whether the values are estimates, not exact."""
        return self.estimate is not None

    @property
    def flat(self) -> Tensor:
        """The diagonal as one vector (P,), in the order of the rows of :attr:`hessiankit.Hessian.matrix`."""
        return torch.cat([value.reshape(-1) for value in self.values.values()])

    @cached_property
    def _numbers(self) -> dict[str, tuple[float, float, float]]:
        """The trace, the smallest and the largest entry of each parameter."""
        doubles = {name: x if x.device.type == "mps" else x.double() for name, x in self.values.items()}
        read = read_numbers(of(x) for x in doubles.values() for of in (Tensor.sum, Tensor.min, Tensor.max))
        return dict(zip(doubles, zip(read[::3], read[1::3], read[2::3], strict=True), strict=True))

    @property
    def traces(self) -> dict[str, float]:
        """The trace of the diagonal block of each parameter."""
        return {name: trace for name, (trace, _, _) in self._numbers.items()}

    @property
    def trace(self) -> float:
        """The trace of the whole matrix; an estimate has its own interval, narrower than that of the sum of :attr:`traces`."""
        return math.fsum(self.traces.values()) if self.estimate is None else self.estimate.trace.value

    def __getitem__(self, name: str) -> Tensor:
        shapes = ByName(((n, tuple(x.shape)) for n, x in self.values.items()), getattr(self.values, "aliases", None))
        parameter, rows = locate("CurvatureDiagonal", name, shapes)
        return (
            self.values[parameter] if rows is None else self.values[parameter].reshape(-1)[rows.to(self.values[parameter].device)]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return kind, loss, traces and extremes as plain Python numbers (the diagonal itself is left out)."""
        return {
            "parameters": sum(value.numel() for value in self.values.values()),
            "kind": self.kind,
            "loss": self.loss,
            "trace": self.trace,
            "fallbacks": list(self.fallbacks),
            "seconds": self.seconds,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
            "entries": {
                name: {"shape": list(self.values[name].shape), "trace": trace, "min": least, "max": most}
                for name, (trace, least, most) in self._numbers.items()
            },
        }

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, (trace, least, most) in self._numbers.items():
            cell = f"{trace:.4g}" if self.estimate is None else str(self.estimate.traces[name])
            yield name, sizes(self.values[name].shape), cell, f"{least:.4g}", f"{most:.4g}"

    def _headline(self) -> str:
        of = NAMES[self.kind]
        size = sum(value.numel() for value in self.values.values())
        trace = f"{self.trace:.6g}" if self.estimate is None else str(self.estimate.trace)
        title = f"diagonal of the {of}: {size:,} entries, trace {trace}, loss {self.loss:.6g}, {self.seconds:.2f} s"
        title += automatic(self.fallbacks)
        title += "" if self.estimate is None else f"; {self.estimate.words}"
        return title + ("" if self.handshake else UNCOMPARED)

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(_HEADERS, self._rows(), left=2, names=self.values, drop=("shape",))


_HEADERS = ("parameter", "shape", "trace", "smallest", "largest")


@checked("hessian_diagonal")
@one_at_a_time
@asks(CurvatureArguments)
def hessian_diagonal(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    batch_size: int | None = None,
    method: str = "exact",
    max_products: int | None = 1000,
    progress: Callable[[int, int], None] | None = None,
    **asked: Unpack[CurvatureArguments],
) -> CurvatureDiagonal:
    """Return the diagonal of the Hessian of ``loss(module(inputs), target)``, without forming the P x P matrix.

    At z = X W the entry of W[i, p] is sum_nn' X[n, i] X[n', i] K[(n, p), (n', p)], with K the curvature of the loss in z;
    where rows stay apart, sum_n X[n, i]^2 K_n[p, p]. Memory is that of the curvature between activations of a few samples.
    Behind attention, time grows with the cube of the tokens of a sample; it is forecast from the shapes before that work, to a
    factor of about 2, and a diagonal that would take longer than ``max_products`` products with the Hessian is refused, or
    estimated.

    ``seed`` is that of the random signs of an estimate too.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two.
        inputs: What it is called with.
        target: What the loss compares with.
        **asked: Arguments of :class:`~hessiankit.request.signature.CurvatureArguments`.
        batch_size: Samples treated at once; chosen by available work space by default.
        method: ``"exact"``; ``"estimate"``, from 100 products with the operator, with 95 % intervals, see
            :func:`hessiankit.scalar_estimates`; ``"auto"``: an estimate where the exact diagonal would be refused. An estimate
            says so in print, in ``is_estimate`` and in ``estimate``.
        max_products: Limit for the exact diagonal, in products with the Hessian of a batch that take as long; None: no limit.
        progress: Function that is called with (samples done, samples in all).

    Raises:
        InputError: If an argument cannot be used, an entry of the result is not finite, or the exact diagonal takes too long.
        TraceError: If torch cannot trace the module.

    The diagonal of the Hessian of a linear layer under squared error, 2/(L d_out) X^T X (x) I, known by hand:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> found = hessian_diagonal(layer, x, torch.zeros(2, 1, dtype=torch.float64))
    >>> found["weight"].tolist(), found.trace
    ([[2.0, 4.0]], 6.0)
    """
    start = time.perf_counter()
    check_name(WHO, "method", method, METHODS)
    if max_products is not None and max_products < 0:
        raise InputError(f"{WHO}: max_products={max_products} is negative; pass 0 or more, or None")
    check_count("batch_size", batch_size, "sample")
    request = read_request(module, inputs, target, **asked)
    curvature = request.curvature
    result = diagonal_of(request.together(), curvature.kind, method, batch_size, max_products, progress, curvature.seed)
    return replace(result, seconds=time.perf_counter() - start)


def diagonal_of(
    batches: Sequence[BatchLoss],
    kind: str,
    method: str = "auto",
    batch_size: int | None = None,
    max_products: int | None = 1000,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> CurvatureDiagonal:
    """Return the diagonal of the matrix of some batches."""
    sums = DiagonalSum(WHO, batches, batch_size, progress, math.inf if max_products is None else max_products)
    cost, estimate = math.nan, None
    try:
        if method != "estimate":
            sums.run(gauss_newton=kind != "hessian")
            cost = sums.cost
    except TooCostly as refused:
        cost = refused.products
        if method == "exact":
            raise InputError(
                f"{WHO}: the exact diagonal of {batches[0].size:,} parameters would take as long as about {cost:,.0f} products "
                f"with the Hessian, more than max_products={max_products:,}; pass method='auto' for an estimate with intervals, "
                "take scalar_estimates(hessian_operator(...)) with more products, fewer params=[...], or max_products=None"
            ) from None
    flat, value, fallbacks = sums.entries, sums.loss, tuple(dict.fromkeys(sums.fallbacks))
    if method == "estimate" or cost > sums.max_products:
        operator = HessianOperator.of(batches, kind)
        estimate = scalar_estimates(operator, products=PRODUCTS, seed=seed)
        flat, value, fallbacks = estimate.diagonal, operator.loss, operator.fallbacks
    elif fallbacks:
        check_fallbacks(batches, kind, flat)
    shapes, slices = batches[0].shapes, batches[0].slices
    values = ByName(((name, flat[slices[name]].reshape(shape)) for name, shape in shapes.items()), shapes.aliases)
    for name, x in values.items():
        if not bool(torch.isfinite(x).all()):
            raise not_finite(WHO, name, name, batches)
    return CurvatureDiagonal(values, kind, value, fallbacks, batches[0].reference is not None, cost, estimate)
