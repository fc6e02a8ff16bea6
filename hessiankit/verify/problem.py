"""The scalar loss of a user's module, called as the user calls it, which every reference differentiates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.checks import check_tensors
from hessiankit.request.data import as_one_argument
from hessiankit.request.first_call import check_fit
from hessiankit.request.loss import Loss, LossArgument, read_loss
from hessiankit.request.read import read_request
from hessiankit.request.state import Held
from hessiankit.support.containers import arguments, map_tensors
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import one_at_a_time, ordinary_path
from hessiankit.tracing.stopped import held_values
from hessiankit.verify.in_place import placed, preserved

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Problem:
    """A module, a batch and a loss: one scalar function of the parameters named in ``params``.

    The module is the user's own, called as the user calls it: ``loss(module(*inputs), target)``, with its own Parameter
    objects. A reference at another point changes them in place and restores them (:meth:`at`). The flat vector ``theta``
    stacks ``vec_r`` of the parameters in the order of ``params``; entry (i, j) of the Hessian is the derivative of entry i of
    the gradient along entry j.

    Args:
        module: The function under study, in evaluation mode where it has dropout.
        inputs: One tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        target: Target that the loss compares the outputs with; None where the loss needs no target.
        loss: ``"mse"`` (mean of the squared differences over all entries), ``"cross_entropy"`` (mean over the labelled
            rows: logits (B, C) or (B, L, C), integer labels (B,) or (B, L), label -100 ignored), a callable
            ``(outputs, target) -> scalar``, or None when the module returns the loss (a scalar, or an object or dict with
            ``loss``; the named losses read ``logits`` of one).
        params: Name -> value at which to differentiate; empty: every parameter of the module that requires a gradient,
            as it is.
        read: Loss as the closed forms use it; None: read when it is needed.

    Raises:
        InputError: An unknown loss or parameter name, a wrong shape, mixed dtypes or devices, nothing to differentiate.

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> weight = {"weight": torch.tensor([[1.0, 2.0]], dtype=torch.float64)}
    >>> x, t = torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64)
    >>> problem = Problem(layer, x, t, "mse", weight)
    >>> problem.value, problem.size, problem.slices["weight"]
    (4.0, 2, slice(0, 2, None))
    """

    module: nn.Module
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]
    target: Any = None
    loss: LossArgument = "mse"
    params: dict[str, Tensor] = field(default_factory=dict)
    read: BatchLoss | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Fill in and check ``params``."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters())
        params = self.params or {name: p for name, p in tensors.items() if p.requires_grad and p.numel()}
        tensors |= dict(self.module.named_buffers())
        for name, value in params.items():
            if name not in tensors:
                raise InputError(f"Problem: no parameter named '{name}'; the module has {', '.join(tensors) or 'none'}.")
            if value.shape != tensors[name].shape:
                raise InputError(
                    f"Problem: '{name}' has shape {tuple(value.shape)}; the module expects {tuple(tensors[name].shape)}."
                )
        if not params:
            raise InputError("Problem: no parameter to differentiate; give `params` or set requires_grad.")
        check_tensors(self.module, params, one_dtype=True)
        object.__setattr__(self, "inputs", as_one_argument(self.module, self.inputs))
        object.__setattr__(self, "target", self.own_loss.prepared(self.target))
        object.__setattr__(self, "params", {name: value.detach() for name, value in params.items()})

    @cached_property
    def own(self) -> dict[str, Tensor]:
        """The module's own tensors of these names: Parameter objects, or buffers."""
        tensors = {**dict(self.module.named_buffers()), **dict(self.module.named_parameters())}
        return {name: tensors[name] for name in self.params}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Range of each parameter in ``theta``."""
        slices, start = {}, 0
        for name, value in self.params.items():
            slices[name] = slice(start, start + value.numel())
            start += value.numel()
        return slices

    @cached_property
    def theta(self) -> Tensor:
        """The flat vector of all parameters, of length P."""
        return torch.cat([value.reshape(-1) for value in self.params.values()])

    @cached_property
    def size(self) -> int:
        """P, the number of scalars to differentiate with respect to."""
        return sum(value.numel() for value in self.params.values())

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the parameters."""
        return next(iter(self.params.values())).dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self.params.values())).device

    @cached_property
    def own_loss(self) -> Loss:
        """The loss of the request."""
        return read_loss(self.loss)

    @cached_property
    def batch(self) -> BatchLoss:
        """The loss at ``params`` as the closed forms use it, without a gradient to compare with."""
        if self.read is not None:
            return self.read.moved(self.params)
        with self.at():
            request = read_request(
                self.module, self.inputs, self.target, loss=self.loss, params=list(self.params), handshake=False
            )
            return request.only()

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Cut a flat vector into named parameters."""
        return {name: theta[self.slices[name]].reshape(value.shape) for name, value in self.params.items()}

    def largest(self, vectors: Tensor) -> Tensor:
        """Return the largest absolute entry of vectors (..., P) in each parameter, (n, ...)."""
        return torch.stack([vectors[..., part].abs().amax(-1) for part in self.slices.values()])

    # The user's own call -----------------------------------------------------------------------------------------------

    @contextmanager
    def at(self, point: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Move the module's own parameters to a point (``params`` by default), gradients on; restore all afterwards."""
        values = self.params if point is None else point
        placement, parts = placed((self.own[name], value) for name, value in values.items()), (self.module, self.loss)
        with ordinary_path(*parts), preserved(*parts), torch.inference_mode(False), torch.enable_grad(), placement:
            yield

    def near(self, params: dict[str, Tensor]) -> Problem:
        """Return the same problem at other values of the same parameters."""
        return replace(self, params=params)

    def call(self, stopped: AbstractContextManager[Any] | None = None) -> Tensor:
        """Return ``loss(module(inputs), target)`` at the parameters as they are now, a scalar; within :meth:`at`."""
        with stopped or nullcontext():
            loss = self._loss_of(self.module)
        parameter = next((name for name, p in self.own.items() if not p.requires_grad), None)
        if parameter is not None:
            raise InputError(
                f"Problem: a call of the module turns requires_grad off for '{parameter}', so that torch's gradient leaves it "
                "out; turn it off before, or leave it on."
            )
        return loss

    def _loss_of(self, module: Callable[..., Any]) -> Tensor:
        return self.own_loss.value(outputs_of(module, self.inputs, self.own_loss), self.target)

    def gradient(self, stopped: AbstractContextManager[Any] | None = None) -> list[Tensor]:
        """Return the gradient of :meth:`call` with respect to each parameter; within :meth:`at`."""
        loss, parameters = self.call(stopped), list(self.own.values())
        if not loss.requires_grad:
            return [torch.zeros_like(p) for p in parameters]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]

    @cached_property
    def stopped(self) -> AbstractContextManager[Any]:
        """The values that torch's gradient holds constant, at ``params``: a context for :meth:`call` at other points."""
        with self.at():
            return held_values(self.call)

    def flat_gradient(self) -> Tensor:
        """Return the gradient at ``params`` as one vector (P)."""
        with self.at():
            return torch.cat([g.reshape(-1) for g in self.gradient()])

    @cached_property
    def value(self) -> float:
        """The loss at ``params``, checked to be finite and the same when evaluated twice."""
        with self.at():
            check_fit(self.own_loss, outputs_of(self.module, self.inputs, self.own_loss), self.target, self.device)
            first, second = (float(self.call().detach()) for _ in range(2))
        if first != first or abs(first) == float("inf"):
            raise InputError(f"Problem: the loss is {first}; expected a finite number. Check the inputs and the labels.")
        if abs(first - second) > 1e4 * torch.finfo(self.dtype).eps * max(abs(first), abs(second)):
            raise InputError(
                f"Problem: two evaluations of the loss differ ({first!r}, {second!r}), so it has no Hessian; "
                "call module.eval() or take the randomness out."
            )
        return first

    # The loss as a function of a vector: torch.func exchanges the parameters that it finds by name ------------------------

    @one_at_a_time
    def swapped_loss(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the loss at named parameters, by ``torch.func.functional_call``; :attr:`swap_fault` says if it misses any."""
        constants = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        # A clone, because a module that updates a buffer (running statistics) must not remember being examined.
        constants = {name: value.detach().clone() for name, value in constants.items() if name not in values}

        def module(*args: Any, **kwargs: Any) -> Any:
            return functional_call(self.module, {**constants, **values}, args, kwargs)

        state = Held(self.module)  # functional_call does not put back the parameters of a module that has two names
        try:
            with plain_formulas(), ordinary_path(self.module, self.loss), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # in module.to()
                return self._loss_of(module)
        finally:
            state.restore()

    def flat_loss(self, theta: Tensor) -> Tensor:
        """Return :meth:`swapped_loss` at a flat vector."""
        return self.swapped_loss(self.unflatten(theta))

    @cached_property
    def swap_fault(self) -> str:
        """Why ``flat_loss`` is not the module's own loss (what differs, and in which parameter), or "" if it is."""
        with torch.enable_grad():
            theta = self.theta.clone().requires_grad_()
            loss = self.flat_loss(theta)
            swapped = torch.autograd.grad(loss, theta)[0] if loss.requires_grad else torch.zeros_like(theta)
        return self.difference("torch.func exchanges parameters by name, and so", float(loss.detach()), swapped)

    def difference(self, route: str, loss: float, gradient: Tensor) -> str:
        """Say where a route's loss or gradient (P) differs from the module's own beyond rounding; "" where it does not."""
        slack = 1e5 * torch.finfo(self.dtype).eps
        why = "a parameter is reached past the module's attributes: a list, a closure, a hook, the loss"
        if not abs(loss - self.value) <= slack * max(abs(self.value), 1e-30):
            return f"{route} gives the loss {loss:.6g}; the module's own is {self.value:.6g}: {why}"
        reference = self.flat_gradient()
        is_near = (gradient - reference).abs() <= slack * reference.abs().amax()
        parameter = next((name for name, part in self.slices.items() if not bool(is_near[part].all())), None)
        return "" if parameter is None else f"{route} gives another gradient in {parameter!r} than the module's own: {why}"


def outputs_of(module: Callable[..., Any], inputs: Any, loss: Loss) -> Any:
    """Call a module, and return what its loss reads."""
    positional, keywords = arguments(inputs)
    return loss.read(module(*positional, **keywords))


@contextmanager
def plain_formulas() -> Iterator[None]:
    """Run attention and some other operations by plain formulas: their kernels lack a second derivative or a forward mode."""
    with ordinary_path(), sdpa_kernel(SDPBackend.MATH), _PlainFormulas():
        yield


class _PlainFormulas(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, or its plain formula."""
        return PLAIN.get(func, func)(*args, **(kwargs or {}))


def _gated(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _bags(*args: Any, **options: Any) -> Tensor:
    """Return the sum or mean of the rows of each bag, one bag after the other."""
    bound = _OF_BAGS.bind(*args, **options)
    bound.apply_defaults()
    tokens, weight, offsets = (bound.arguments[name] for name in ("input", "weight", "offsets"))
    shares, padding, mode = (bound.arguments[name] for name in ("per_sample_weights", "padding_idx", "mode"))
    ends = list(range(0, tokens.numel() + 1, tokens.shape[1])) if offsets is None else offsets.tolist()
    if offsets is not None and not bound.arguments["include_last_offset"]:
        ends.append(tokens.numel())
    tokens, bags = tokens.reshape(-1), []
    for start, end in pairwise(ends):
        at = [k for k in range(start, end) if padding is None or int(tokens[k]) != padding % len(weight)]
        rows = weight[tokens[at]] if shares is None else weight[tokens[at]] * shares.reshape(-1)[at].unsqueeze(1)
        bags.append(rows.sum(0) / max(len(at), 1) if mode == "mean" else rows.sum(0))
    return torch.stack(bags)


_OF_BAGS = signature(torch.nn.functional.embedding_bag)
PLAIN: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.glu: _gated,
    torch._weight_norm: _weight_norm,
    torch.nn.functional.embedding_bag: _bags,
}
"""Functions of torch that have kernels without a second derivative or forward mode, and what they are in other operations."""


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return nested containers with their floating tensors in another dtype; None keeps each dtype."""
    return tree if dtype is None else map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)
