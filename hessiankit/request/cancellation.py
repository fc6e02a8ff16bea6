"""Rounding errors of derivatives whose terms cancel: the sum consists of the rounding errors of its terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.loss_trace import loss_trace
from hessiankit.tracing.segment_probe import products
from hessiankit.tracing.trace import LinearMap

ROUNDING = 64.0
"""Roundings that a result may differ by, each by one unit in the last place: the longest chains of the tests differ by 20."""

CHANGE = 2.0**-10
"""Relative size of the random changes: far above rounding, and small enough for a linear answer."""


SAMPLES = 3
"""Sweeps whose root mean square counts: with one, every twelfth error would be a tenth of its usual size."""


@torch.no_grad()
def rounding_errors(
    batch: BatchLoss, direction: Mapping[str, Tensor], *, gauss_newton: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the size of rounding errors of gradient and product, by parameter, for a unit roundoff of 1: times the dtype's eps.

    Every adjoint, tangent and covector on the way changes entry by entry by a random amount, as rounding does: relative to
    its size, and to that of the same map of the same vectors with random signs, in which less cancels.

    Source: Vignes, A stochastic arithmetic for reliable scientific computation, Math. Comput. Simul. 35 (1993).
    """
    trace_of_loss = loss_trace(batch)
    loss_side = trace_of_loss.loss_side() if gauss_newton else None
    generator = torch.Generator().manual_seed(0)

    def gaussian(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu").to(x)

    def rounded(linear_map: LinearMap, vectors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        results = linear_map(vectors)
        signed_results = linear_map([None if x is None else x * gaussian(x).sign() for x in vectors])
        pairs = zip(results, signed_results, strict=True)
        return [x if x is None or y is None else x + CHANGE * (x.abs() + y.abs()) * gaussian(x) for x, y in pairs]

    exact = products(trace_of_loss.trace, direction, loss_side)
    samples = [products(trace_of_loss.trace, direction, loss_side, rounded) for _ in range(SAMPLES)]

    def spread(kind: int) -> dict[str, Tensor]:
        changes = {n: torch.stack([sample[kind][n] - x for sample in samples]) for n, x in exact[kind].items()}
        return {n: x.square().mean(0).sqrt() / CHANGE for n, x in changes.items()}

    return spread(0), spread(1)
