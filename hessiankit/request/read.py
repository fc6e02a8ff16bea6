"""The one entry: from the arguments of a call to a :class:`Request`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hessiankit.request.batch_loss import BatchLoss, ModulePoint
from hessiankit.request.data import AUTO, Counts, Weights, read_data
from hessiankit.request.first_call import first_call
from hessiankit.request.fisher import Curvature
from hessiankit.request.loss import Loss, LossArgument, read_loss, trained_parameters
from hessiankit.request.model import read_point
from hessiankit.request.second_order import SECOND_ORDER, Handshaking, is_second_order
from hessiankit.request.selection import Params, check_context, repeatable
from hessiankit.request.state import ModuleState
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import hand_back_memory
from hessiankit.tracing.graph import edges_behind


@dataclass(frozen=True)
class Request:
    """Module, data, loss and parameters of a call, read and checked; made by :func:`read_request`.

    The loss of all batches is sum_b count_b loss_b, divided by the sum of the counts where the reduction is "mean".

    Attributes:
        point: The module, and the parameters to differentiate with respect to.
        loss: The loss as it was passed; that of a batch also knows its closed form.
        curvature: Matrix to compute: the Hessian, or a Gauss-Newton matrix.
        pairs: (inputs, target) of each batch, which are drawn once.
        counts: Weight of each batch, and the rule that combines them.
        handshake: Whether results are compared with the module's own loss and gradient.
        second_order: Whether products are compared with differences of the module's own gradient.
    """

    point: ModulePoint
    loss: Loss
    curvature: Curvature
    pairs: Iterator[tuple[Any, Any]]
    counts: Counts
    handshake: bool
    second_order: bool

    def batches(self) -> Iterator[BatchLoss]:
        """Yield the loss of each batch that counts, once; the module is called on each as it comes."""
        first, batch = 0, None
        for number, (inputs, target) in enumerate(self.pairs):
            if count := self.counts.of(number, inputs, target):
                if batch is not None:
                    hand_back_memory(self.point.size)  # what was freed after earlier batches
                batch_loss = first_call(self.point, self.loss, inputs, target, handshake=self.handshake)
                if batch is None:
                    _warn_of_constants(batch_loss)
                batch = self.curvature.of(replace(batch_loss, count=count, first=first))
                yield batch
            first += len(target) if isinstance(target, Tensor) and target.ndim else 1
        self.counts.check_used()
        if batch is None:
            raise InputError("request: the data hold no batch that counts; pass at least one pair (inputs, target)")

    def together(self) -> list[BatchLoss]:
        """Return the loss of every batch, with its share in the loss of all of them."""
        return self.shared(list(self.batches()))

    def only(self) -> BatchLoss:
        """Return the loss of the only batch.

        Raises:
            InputError: There are several.
        """
        if self.counts.is_many:
            raise InputError("request: several batches; pass one (inputs, target=...)")
        return next(self.batches())

    def shared(self, batches: Sequence[BatchLoss]) -> list[BatchLoss]:
        """Return batches with their shares in the loss of all of them."""
        total = 1.0 if self.counts.is_sum else math.fsum(batch.count for batch in batches)
        return [replace(batch, share=batch.count / total) for batch in batches]


def read_request(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    loss: LossArgument = AUTO,
    params: Params = None,
    weights: Weights = None,
    reduction: str | None = None,
    handshake: Handshaking = True,
    kind: str = "hessian",
    seed: int = 0,
    draws: int = 1,
    state: Callable[..., ModuleState] = ModuleState,
    compares: bool = False,
) -> Request:
    """Read and check what every computation asks for; later code sees no argument in the user's form.

    The module, the parameters, the loss and the weights are checked here, once; each batch as it is drawn.

    Args:
        module: Argument of :func:`hessiankit.hessian`, like ``inputs`` and ``target``; :class:`RequestArguments` explains
            the others.
        state: Function that records the state of the module and of the loss.
        compares: Whether the caller can compare second derivatives with differences of the module's own gradient.

    Raises:
        InputError: An argument cannot be used: the message says which, what was seen and what to pass.

    >>> layer = nn.Linear(2, 1)
    >>> data = [(Tensor(1, 2).zero_(), Tensor(1, 1).zero_()), (Tensor(3, 2).zero_(), Tensor(3, 1).zero_())]
    >>> [(batch.size, batch.share) for batch in read_request(layer, data).together()]
    [(3, 0.25), (3, 0.75)]
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"request: expected a torch.nn.Module, got {type(module).__name__}")
    curvature, second_order = Curvature(kind, seed, draws), is_second_order(handshake)
    if handshake == SECOND_ORDER and not (compares and kind == "hessian"):
        where = f"with kind={kind!r}" if compares else "in other calls than hessian and hessian_operator"
        raise InputError(f"request: handshake={handshake!r} compares products with the Hessian; {where} pass handshake=True")
    check_context("request", module)
    is_many, pairs, loss = read_data(inputs, target, loss, module)
    criterion = read_loss(loss)
    counts = Counts(criterion, weights, reduction, is_many=is_many)
    point = read_point(module, repeatable(params), criterion.function, state)
    return Request(point, criterion, curvature, pairs, counts, bool(handshake), second_order and kind == "hessian")


def _warn_of_constants(batch: BatchLoss) -> None:
    """Warn of parameters that the loss depends on, are trained, and are none of the module's."""
    trained = trained_parameters(batch.loss.function, batch.module)
    if not trained:
        return
    with batch.at():
        value = batch.value()
        functions = [] if value.grad_fn is None else [function for function, _ in edges_behind(value.grad_fn)]
        leaves = {id(getattr(function, "variable", None)) for function in functions}
    constants = [name for name, p in trained.items() if id(p) in leaves]
    if constants:
        warnings.warn(
            f"hessiankit: trained parameters of the loss are constants here: {', '.join(constants)}; a module that returns its "
            "loss, with loss=None, includes them; requires_grad_(False) marks them as constants",
            stacklevel=2,
        )
