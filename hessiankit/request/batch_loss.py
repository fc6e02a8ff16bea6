"""Parts of a request: a module at a point, and the loss of one batch there; frozen, and checked before they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.request.loss import Loss
from hessiankit.request.selection import ByName
from hessiankit.request.state import ModuleState
from hessiankit.support.containers import address, named_tensors, samples
from hessiankit.support.torch_state import TORCH_LOCK, ordinary_path
from hessiankit.tracing.one_dtype import widest


@dataclass(frozen=True)
class OwnGradient:
    """Loss and gradient that torch computes by the module's own call.

    Attributes:
        loss: The loss.
        gradient: Derivative by the name of the parameter; None where autograd does not reach it.
    """

    loss: float
    gradient: dict[str, Tensor | None]


@dataclass(frozen=True)
class ModulePoint:
    """A module at a point, with the parameters to differentiate with respect to.

    The module is the user's own and is called as the user calls it; values at which it is called are put into its parameters
    for that time (:meth:`ModuleState.present`).

    Attributes:
        module: The function under study.
        parameters: Name -> value, in the order of ``named_parameters()``.
        state: The module as it was.
    """

    module: nn.Module
    parameters: dict[str, Tensor]
    state: ModuleState

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Columns of each parameter in the Hessian, in the order of ``named_parameters()``."""
        columns, start = {}, 0
        for name, value in self.parameters.items():
            columns[name] = slice(start, start + value.numel())
            start += value.numel()
        return columns

    @property
    def shapes(self) -> ByName[tuple[int, ...]]:
        """Shape of each parameter, by its name."""
        name_of_leaf = {id(leaf): name for name, leaf in self.leaves.items()}
        names = self.module.named_parameters(remove_duplicate=False)
        aliases = {name: name_of_leaf[id(p)] for name, p in names if id(p) in name_of_leaf and name not in self.parameters}
        return ByName(((name, tuple(p.shape)) for name, p in self.parameters.items()), aliases)

    @cached_property
    def size(self) -> int:
        """Number of parameters P."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The module's own parameters, by name, whether or not they are still part of it."""
        tensors = {name: x for name, x, _ in self.state.tensors()}
        return {name: tensors[name] for name in self.parameters}

    @property
    def still(self) -> dict[str, int]:
        """The rows of embeddings that torch leaves out of the gradient, by the name of the parameter."""
        with self.at():
            padding_rows = {id(m.weight): m.padding_idx for m in self.module.modules() if isinstance(m, nn.Embedding)}
        rows = {name: padding_rows.get(id(leaf)) for name, leaf in self.leaves.items()}
        return {name: row for name, row in rows.items() if row is not None}

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of results: the widest of the parameters' types, at least float32."""
        return widest(p.dtype for p in self.parameters.values())

    @cached_property
    def device(self) -> torch.device:
        """Device of the parameters and of results."""
        return next(iter(self.parameters.values())).device

    @property
    def device_of_calls(self) -> torch.device:
        """Device that the module computes on, and of data."""
        return next(iter(self.leaves.values())).device

    @contextmanager
    def at(self, parameters: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Restore the module at some values of its parameters, with gradients on; afterwards restore random states."""
        if parameters is None and self.state.is_present:
            with torch.enable_grad(), self.state.present():
                yield
            return
        with TORCH_LOCK, torch.inference_mode(False), torch.enable_grad(), self.state.present(parameters):
            random = self.state.random_states()
            try:
                yield
            finally:
                random.restore()


@dataclass(frozen=True)
class BatchLoss(ModulePoint):
    """The loss of one batch: a scalar function of the parameters, checked to be one.

    Data are copies, which the caller may overwrite.

    Attributes:
        loss: Function of the module's result and the target.
        args: Positional arguments of the module's call.
        kwargs: Keyword arguments.
        target: Tensors that the loss compares with, if any.
        normalizer: Divisor of the sum of a loss with a closed form: the number of entries (mse) or of counted labels (cross
            entropy) in the whole batch.
        count: Weight of the batch among others: the number of terms in its mean loss.
        share: Factor of the loss in that of all batches.
        reference: Loss and gradient of the module's own call, which every result is compared with; None where that is off.
        first: The number of the first sample in the whole data, by which labels are drawn.
        output: The output that labels are drawn from, of the first call; None once they are drawn.
    """

    loss: Loss
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    normalizer: float = 1.0
    count: float = 1.0
    share: float = 1.0
    reference: OwnGradient | None = None
    first: int = 0
    output: Tensor | None = None

    # Within at(): the module's result and what the loss makes of it ------------------------------------------------------

    def result(self) -> Any:
        """Call the module in its present state and return its result."""
        with ordinary_path(self.module):
            return self.module(*self.args, **self.kwargs)

    def read(self) -> Any:
        """Call the module, and return the part of its result that the loss reads."""
        return self.loss.read(self.result())

    def value(self) -> Tensor:
        """Call the module and the loss, and return the scalar."""
        return self.loss.value(self.result(), self.target)

    # Torch's own answers, at any values of the parameters ---------------------------------------------------------------

    def own_value(self, parameters: Mapping[str, Tensor] | None = None) -> float:
        """Return the loss at some parameters, by the module's own call."""
        with self.at(parameters):
            return float(self.value().detach())

    def own_gradient(
        self, parameters: Mapping[str, Tensor] | None = None, context: AbstractContextManager[Any] | None = None
    ) -> OwnGradient:
        """Return the loss and its gradient at some parameters, by the module's own call and one backward of torch.

        ``context``: A context for the call: values that are held constant as torch holds them (:class:`StoppedValues`).
        """
        with self.at(parameters):
            with context or nullcontext():
                value = self.value()
            return OwnGradient(float(value.detach()), self.slopes(value))

    def slopes(self, value: Tensor) -> dict[str, Tensor | None]:
        """Return the gradient of a value that the module's own call returned."""
        leaves = self.leaves
        if not value.requires_grad:
            return dict.fromkeys(leaves)
        reachable = [p for p in leaves.values() if p.requires_grad]  # a forward may have turned one off
        of_leaf = dict(zip(map(id, reachable), self.state.slopes(value, reachable), strict=True))
        slopes = {name: of_leaf.get(id(p)) for name, p in leaves.items()}
        dense = {n: x.to_dense() for n, x in slopes.items() if x is not None and x.layout != torch.strided}
        return {n: None if x is None else dense.get(n, x).detach() for n, x in slopes.items()}

    def reached(self) -> set[str]:
        """Return the parameters that the loss depends on, at any values; all of them where autograd cannot tell."""
        try:
            reference = self.reference or self.own_gradient()
        except Exception:  # whatever a module may raise when it is differentiated
            return set(self.parameters)
        return {name for name in self.parameters if reference.gradient[name] is not None}

    # Parts --------------------------------------------------------------------------------------------------------------

    @cached_property
    def n_samples(self) -> int:
        """Number of samples: the length of the first axis that inputs and target share, else of the first tensor."""
        lengths = [int(x.shape[0]) for _, x in named_tensors((self.args, self.kwargs)) if x.ndim]
        if isinstance(self.target, Tensor) and self.target.ndim and self.target.shape[0] in lengths:
            return int(self.target.shape[0])
        return lengths[0] if lengths else 1

    @property
    def own_target(self) -> Any:
        """The user's target, without targets drawn for a sampled loss."""
        return self.target if self.loss.plain == self.loss.name else self.target[:, 0]

    @property
    def stable_addresses(self) -> set[int]:
        """Addresses of memory that nothing else writes into: the copies of the data and of the module's tensors."""
        data = (x for _, x in named_tensors((self.args, self.kwargs, self.target)))
        return {address(x) for x in (*data, *(values for _, _, values in self.state.tensors()))}

    def part(self, rows: slice | Tensor) -> BatchLoss:
        """Return the loss of some samples."""
        args, kwargs, target = samples((self.args, self.kwargs, self.target), rows, self.n_samples)
        return replace(self, args=args, kwargs=kwargs, target=target, reference=None)

    def moved(self, parameters: Mapping[str, Tensor]) -> BatchLoss:
        """Return the same loss at other values of the parameters, without a gradient to compare with."""
        return replace(self, parameters=dict(parameters), state=self.state.moved(parameters), reference=None)

    def unchecked(self) -> BatchLoss:
        """Return the same loss without the gradient to compare with."""
        return replace(self, reference=None)
