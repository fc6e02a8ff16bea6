"""One scalar loss as a function of named parameters: what every reference differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from hessiankit.errors import InputError
from hessiankit.request.calling import Loss, arguments, read_outputs
from hessiankit.torch_state import one_at_a_time, ordinary_path

IGNORED_LABEL = -100


@dataclass(frozen=True, eq=False)
class Problem:
    """A module, a batch and a loss: one scalar function of the parameters named in ``params``.

    Parameters of the module that ``params`` leaves out stay fixed at the values that they have there, and so do its
    buffers (the module itself is never modified). The flat vector ``theta`` stacks ``vec_r`` of the parameters in the
    order of ``params``; entry (i, j) of the Hessian is the derivative of entry i of the gradient along entry j.

    Args:
        module: The function under study, in evaluation mode where it has dropout.
        inputs: One tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        target: What the loss compares the outputs with; None where the loss needs no target.
        loss: ``"mse"`` (mean of the squared differences over all entries), ``"cross_entropy"`` (mean over the labelled
            rows: logits (B, C) or (B, L, C), integer labels (B,) or (B, L), label -100 ignored), a callable
            ``(outputs, target) -> scalar``, or None when the module returns the loss (a scalar, or an object or dict with
            ``loss``; the named losses read ``logits`` of one).
        params: Name -> value at which to differentiate; empty: every parameter of the module that requires a gradient.

    Raises:
        InputError: An unknown loss or parameter name, a wrong shape, mixed dtypes or devices, nothing to differentiate.

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> weight = {"weight": torch.tensor([[1.0, 2.0]], dtype=torch.float64)}
    >>> x, t = torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.tensor([[1.0]], dtype=torch.float64)
    >>> problem = Problem(layer, x, t, "mse", weight)
    >>> problem.loss_value(problem.params).item(), problem.size, problem.slices["weight"]
    (4.0, 2, slice(0, 2, None))
    """

    module: nn.Module
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]
    target: Any = None
    loss: Loss = "mse"
    params: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Fill in and check ``params``."""
        known: dict[str, Tensor] = dict(self.module.named_parameters())
        chosen = self.params or {name: p for name, p in known.items() if p.requires_grad and p.numel()}
        known |= dict(self.module.named_buffers())
        for name, value in chosen.items():
            if name not in known:
                raise InputError(f"Problem: no parameter named '{name}'; the module has {', '.join(known) or 'none'}.")
            if value.shape != known[name].shape:
                raise InputError(
                    f"Problem: '{name}' has shape {tuple(value.shape)}; the module expects {tuple(known[name].shape)}."
                )
        kinds = {(value.dtype, value.device) for value in chosen.values()}
        if len(kinds) > 1:
            seen = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise InputError(f"Problem: the parameters are of several kinds ({seen}); cast the module to one of them.")
        if not chosen or not next(iter(kinds))[0].is_floating_point:
            raise InputError("Problem: no floating-point parameter to differentiate; give `params` or set requires_grad.")
        if isinstance(self.loss, str) and self.loss not in _LOSSES:
            raise InputError(f"Problem: unknown loss '{self.loss}'; expected 'mse', 'cross_entropy', a callable or None.")
        object.__setattr__(self, "params", {name: value.detach().clone() for name, value in chosen.items()})

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in ``theta``."""
        slices, start = {}, 0
        for name, value in self.params.items():
            slices[name] = slice(start, start + value.numel())
            start += value.numel()
        return slices

    @cached_property
    def theta(self) -> Tensor:
        """The flat vector of all parameters, of length P."""
        return torch.cat([value.reshape(-1) for value in self.params.values()])

    @property
    def size(self) -> int:
        """P, the number of scalars to differentiate with respect to."""
        return self.theta.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the parameters."""
        return self.theta.dtype

    def unflatten(self, theta: Tensor) -> dict[str, Tensor]:
        """Cut a flat vector into named parameters."""
        return {name: theta[self.slices[name]].reshape(value.shape) for name, value in self.params.items()}

    def flat_loss(self, theta: Tensor) -> Tensor:
        """Return the loss at a flat vector of parameters."""
        return self.loss_value(self.unflatten(theta))

    @one_at_a_time
    def loss_value(self, params: dict[str, Tensor]) -> Tensor:
        """Return the loss at ``params`` (those left out keep the problem's values).

        Where ``params`` are of another type than the problem (complex, for the complex-step derivative), everything
        floating follows them: inputs, target, buffers and the fixed parameters.

        Raises:
            ValueError: The outputs do not fit the target or the loss.
        """
        params = {**self.params, **params}
        fixed = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        # A clone, because a module that updates a buffer (running statistics) must not remember being examined.
        fixed = {name: value.detach().clone() for name, value in fixed.items() if name not in params}
        inputs, target = self.inputs, self.target
        dtype = next(iter(params.values())).dtype
        if dtype != self.dtype:
            fixed, inputs, target = (_cast(x, dtype) for x in (fixed, inputs, target))
        args, kwargs = arguments(inputs)
        with differentiable_attention():
            outputs = read_outputs("Problem", self.loss, functional_call(self.module, {**fixed, **params}, args, kwargs))
            if self.loss is None:
                return _scalar(outputs)
            return _scalar(self.loss(outputs, target)) if callable(self.loss) else _LOSSES[self.loss](outputs, target)

    @cached_property
    def value(self) -> float:
        """The loss at ``theta``, checked to be finite and the same when evaluated twice.

        Raises:
            ValueError: It is not finite, or two evaluations differ.
        """
        with torch.no_grad():
            first, second = (self.loss_value(self.params).item() for _ in range(2))
        if first != first or abs(first) == float("inf"):
            raise InputError(f"Problem: the loss is {first}; expected a finite number. Check the inputs and the labels.")
        if abs(first - second) > 1e4 * torch.finfo(self.dtype).eps * max(abs(first), abs(second)):
            raise InputError(
                f"Problem: two evaluations of the loss differ ({first!r}, {second!r}), so it has no Hessian; "
                "call module.eval() or take the randomness out."
            )
        return first


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Run attention by its plain formula: the fused kernels have neither a second derivative nor a forward mode."""
    with ordinary_path(), sdpa_kernel(SDPBackend.MATH):
        yield


def mean_square(outputs: Tensor, target: Tensor | None) -> Tensor:
    """Return the mean of the squared differences over all entries.

    It is written out because ``jvp(grad(f))`` raises through ``torch.nn.functional.mse_loss``.

    >>> mean_square(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])).item()
    2.0
    """
    _expect_tensors("mse", outputs, target)
    if target is None or outputs.shape != target.shape:
        seen = None if target is None else tuple(target.shape)
        raise InputError(f"mse: outputs have shape {tuple(outputs.shape)}, the target {seen}; expected the same shape.")
    return (outputs - target).square().mean()


def labelled_cross_entropy(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return the mean cross entropy over the rows whose label is not -100; logits lie along the last axis.

    >>> labelled_cross_entropy(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, -100, -100]])).exp().item()
    4.0
    """
    _expect_tensors("cross_entropy", logits, labels)
    if labels is None or labels.is_floating_point() or labels.shape != logits.shape[:-1]:
        seen = None if labels is None else f"{labels.dtype} of shape {tuple(labels.shape)}"
        raise InputError(
            f"cross_entropy: logits {tuple(logits.shape)} need integer labels {tuple(logits.shape[:-1])}; got {seen}."
        )
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=IGNORED_LABEL)


_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {"mse": mean_square, "cross_entropy": labelled_cross_entropy}


def _expect_tensors(loss: str, outputs: Any, target: Any) -> None:
    for role, value in (("outputs", outputs), ("target", target)):
        if not isinstance(value, Tensor) and not (role == "target" and value is None):
            raise InputError(
                f"{loss}: the {role} are a {type(value).__name__}; expected a tensor. "
                "Pass a callable (outputs, target) -> scalar as the loss."
            )


def _scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"Problem: the loss must be one number; got {seen}. Pass loss='mse' or a callable that reduces it.")
    return value.reshape(())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, dtype) for item in value)
    return value
