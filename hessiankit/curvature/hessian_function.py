"""The Hessian as a function of a module's current parameters and of data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hessiankit.curvature.dense import Hessian, hessian
from hessiankit.request.data import AUTO, RETURNS_LOSS, read_data
from hessiankit.request.loss import LossArgument
from hessiankit.request.selection import Params, repeatable
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.tables import Piece, Printed, sizes, table

WHO = "hessian_function"


class HessianFunction(Printed):
    """The Hessian of a module's loss as a function; made by :func:`hessian_function`.

    Every call runs the module, traces it and compares the trace with the module's own loss and gradient: nothing is kept from one
    call to the next but the arguments.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, target: Any, loss: LossArgument, params: Params, batch_size: int | None
    ) -> None:
        self.module = module
        self._data = (inputs, target)
        self._options: dict[str, Any] = {"loss": loss, "params": repeatable(params), "batch_size": batch_size}
        self._shapes = hessian(module, inputs, target, lazy=True, **self._options).shapes

    @checked(WHO)
    def __call__(self, inputs: Any = None, target: Any = None, *, out: Tensor | None = None) -> Hessian:
        """Return the Hessian at the current parameters.

        Args:
            inputs: One batch; None: that of the last call that succeeded, and so for ``target``.
            target: What the loss compares with.
            out: A contiguous (P, P) tensor that takes the matrix; None: a new one.

        Raises:
            InputError: The cases of :func:`hessiankit.hessian`; or ``out`` has another shape, dtype or device than the matrix.
        """
        data = (self._data[0] if inputs is None else inputs, self._data[1] if target is None else target)
        result = hessian(self.module, *data, out=out, **self._options)
        self._data = data
        return result

    def _headline(self) -> str:
        return f"Hessian function of {sum(map(math.prod, self._shapes.values())):,} parameters"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(("parameter", "shape"), ((n, sizes(shape)) for n, shape in self._shapes.items()), left=2, names=self._shapes)


@checked(WHO)
def hessian_function(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    loss: LossArgument = AUTO,
    params: Params = None,
    batch_size: int | None = None,
) -> HessianFunction:
    """Return the Hessian as a function of the module's current parameters and of data.

    For curvature along a training run, over many batches or single samples: ``f(inputs=None, target=None, *, out=None)`` returns
    a :class:`~hessiankit.curvature.dense.Hessian`. The arguments are those of :func:`hessiankit.hessian`, with one batch.

    Raises:
        InputError: The cases of :func:`hessiankit.hessian`; or there are several batches: call the function on each.
        TraceError: The cases of :func:`hessiankit.hessian`.

    The Hessian of x w^3 with respect to w is 6 x w; here at two points:

    >>> import torch
    >>> class Cubed(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    ...     def forward(self, x):
    ...         return (x * self.w**3).sum()
    >>> cubed = Cubed()
    >>> f = hessian_function(cubed, torch.tensor([0.5], dtype=torch.float64), loss=None)
    >>> with torch.no_grad():
    ...     _ = cubed.w.fill_(5.0)
    >>> f().matrix.item(), f(torch.tensor([1.0], dtype=torch.float64)).matrix.item()
    (15.0, 30.0)
    """
    if read_data(inputs, target, loss, module).is_many:
        raise InputError(f"{WHO}: inputs are several batches; pass one, and call the function with each of them")
    is_pair = target is None and isinstance(inputs, (tuple, list)) and loss is not None
    if is_pair and not getattr(module, RETURNS_LOSS, False):
        inputs, target = inputs
    return HessianFunction(module, inputs, target, loss, params, batch_size)
