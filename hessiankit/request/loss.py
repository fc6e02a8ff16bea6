"""The loss: one object for every kind of argument, so that no later code tests which kind it was."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError, SampledLoss
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.support.errors import InputError
from hessiankit.tracing.graph import edges_behind

LossArgument: TypeAlias = "str | Callable[..., Tensor] | None"
"""A loss as a user passes it."""

NAMES = ("mse", "cross_entropy")
SAMPLED = "sampled "
"""Prefix to the name of a loss whose Gauss-Newton matrix is sampled (:class:`hessiankit.primitives.loss.SampledLoss`)."""
ENTRYWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
"""Losses of torch that average over the entries of outputs and target alike."""
BY_LABEL = (nn.CrossEntropyLoss, nn.NLLLoss)
OF_TORCH: dict[Any, type[nn.Module]] = {
    "mse": nn.MSELoss,
    "cross_entropy": nn.CrossEntropyLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
}


@dataclass(frozen=True)
class Loss:
    """A loss of what a module returns and a target.

    Attributes:
        name: ``"mse"`` or ``"cross_entropy"``, either after ``"sampled "``; "" where it has no closed form here.
        function: (part of the result, target) -> scalar, in operations of torch.
        reads: Part of the result that the function is given: ``"logits"``, one tensor; ``"loss"``, the scalar that the module
            returns; ``"all"``, whatever it returns.
        equals: The loss of torch that it is; None where that is not known.
        splits: Whether the loss depends on the parameters by :meth:`output` alone, so that it has a Gauss-Newton part.
    """

    name: str
    function: Callable[[Any, Any], Tensor]
    reads: str
    equals: nn.Module | None
    splits: bool = True

    def value(self, result: Any, target: Any) -> Tensor:
        """Return the scalar loss of what a call of the module returned.

        Raises:
            InputError: There is nothing in the result that the loss reads, or it is no scalar.
        """
        value = self.function(self.read(result), target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            description = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(
                f"request: the loss returned {description}, expected a scalar tensor; reduce it, e.g. with .mean() or .sum()"
            )
        return value.reshape(())

    def prepared(self, target: Any) -> Any:
        """Return a target as the function takes it: labels of any integer type as those of torch's loss."""
        is_labels = self.name == "cross_entropy" and isinstance(target, Tensor) and not target.is_floating_point()
        return target.long() if is_labels and target.dtype != torch.bool else target

    def read(self, result: Any) -> Any:
        """Return the part of a result that the function is given.

        Raises:
            InputError: There is no such part.

        >>> read_loss("mse").read({"logits": Tensor([1.0]), "other": 2})
        tensor([1.])
        >>> read_loss(None).read((torch.zeros(2), torch.ones(())))
        tensor(1.)
        """
        if self.reads == "all" or isinstance(result, Tensor):
            return result
        part = member(result, self.reads)
        if part is None:
            raise InputError(_missing(result, self.reads))
        return part

    def output(self, result: Any) -> Tensor | None:
        """Return the output layer; the L'' of J^T L'' J is the loss's second derivative with respect to it. None without one."""
        if not self.splits:
            return None
        return self.read(result) if self.reads == "logits" else member(result, "logits")

    @property
    def label(self) -> str:
        """The loss in a message: its name, or that of the user's own function."""
        if self.reads == "loss":
            return "loss=None"
        return f"loss={self.name!r}" if self.name else f"the loss {_name_of(self.function)!r}"

    @property
    def reduction(self) -> str | None:
        """``"mean"`` or ``"sum"`` over its terms; None where it is not known.

        >>> [read_loss(loss).reduction for loss in ("mse", nn.NLLLoss(reduction="sum"), len)]
        ['mean', 'sum', None]
        """
        return None if self.equals is None else str(self.equals.reduction)

    def count(self, target: Any) -> float | None:
        """Return what the loss divides its sum by for this target; None where it is not known.

        The entries (``"mse"`` and torch's entrywise losses); the labels that are not ignored, or the sum of their class weights
        (cross entropy and negative log-likelihood); the samples, for a target of class probabilities.

        >>> labels = torch.tensor([[0, 1, -100]])
        >>> [read_loss(loss).count(labels) for loss in ("cross_entropy", nn.CrossEntropyLoss(ignore_index=0), None)]
        [2.0, 2.0, None]
        """
        if not isinstance(target, Tensor):
            return None
        target = target if self.plain == self.name else target[:, 0]
        if isinstance(self.equals, ENTRYWISE):
            return float(target.numel())
        if not isinstance(self.equals, BY_LABEL):
            return None
        if target.is_floating_point():
            return target.numel() / (target.shape[1] if target.ndim > 1 else max(1, target.numel()))
        labels, weight = target[target != self.equals.ignore_index], self.equals.weight
        if weight is None:
            return float(labels.numel())
        if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < weight.numel()):
            return math.nan  # the loss itself says what is wrong with the labels
        return float(weight.to(torch.float64)[labels.long()].sum())

    @property
    def plain(self) -> str:
        """The name, without the prefix of a sampled loss."""
        return self.name.removeprefix(SAMPLED)

    def primitive(self, normalizer: float) -> MeanSquaredError | CrossEntropy | SampledLoss:
        """Return the closed form, with inputs (output, target)."""
        is_mse = self.plain == "mse"
        loss = MeanSquaredError(normalizer) if is_mse else CrossEntropy(ignore_index=IGNORE_INDEX, normalizer=normalizer)
        return loss if self.plain == self.name else SampledLoss(loss)

    def sampled(self) -> Loss:
        """Return the same loss for targets (B, M, ...): the data's first, drawn ones after it, of a sampled Fisher matrix."""
        function = self.function
        return replace(self, name=SAMPLED + self.name, function=lambda output, target: function(output, target[:, 0]))

    def settled(self, result: Any, value: Tensor, target: Any) -> Loss:
        """Return the loss after one call: with the closed form that it equals, and whether it has an output layer."""
        part = self.read(result)
        if self.name or (self.reads != "loss" and isinstance(part, Tensor)):
            name = self.name or _closed_form(self.equals, part, target)
            return replace(self, name=name, function=FUNCTIONS[name] if name else self.function, reads="logits")
        logits = None if isinstance(result, Tensor) else member(result, "logits")
        return replace(self, splits=logits is not None and value is not logits and is_behind(value, logits))


def read_loss(loss: LossArgument) -> Loss:
    """Read a loss that a user passes: a name, a callable, or None, where the module returns its loss.

    Raises:
        InputError: It is none of these.
    """
    if loss is None:
        return Loss("", lambda value, _: value, "loss", None)
    if isinstance(loss, str):
        if loss not in NAMES:
            raise InputError(
                f"request: loss={loss!r} is not known; pass one of {', '.join(map(repr, NAMES))}, a callable "
                "(outputs, target) -> scalar, or None if the module returns the loss itself"
            )
        return Loss(loss, FUNCTIONS[loss], "logits", OF_TORCH[loss]())
    if isinstance(loss, type):
        raise InputError(f"request: loss is the class {loss.__name__}; pass an instance, such as {loss.__name__}()")
    if not callable(loss):
        kind = type(loss).__name__
        raise InputError(f"request: loss is a {kind}; pass a name, a callable (outputs, target) -> scalar, or None")
    kind = OF_TORCH.get(loss) if getattr(loss, "__hash__", None) else None
    equals = loss if type(loss) in (*ENTRYWISE, *BY_LABEL) else None if kind is None else kind()
    inner = loss.func if isinstance(loss, partial) else loss
    of_torch = getattr(inner, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional")  # which read no objects
    return Loss("", loss, "logits" if of_torch else "all", equals)  # type: ignore[arg-type]


def member(result: Any, key: str) -> Tensor | None:
    """Return the tensor ``loss`` or ``logits`` of a module's result, by name, or by whether it is a scalar.

    A result without that name, such as an output object of diffusers, has logits if one floating-point tensor in it is no scalar.
    A tuple has a loss if one tensor in it is a scalar.

    >>> member((torch.ones(2), None), "logits"), member((torch.ones(2), torch.ones(2)), "logits") is None
    (tensor([1., 1.]), True)
    >>> member({"sample": torch.ones(2), "step": 3}, "logits")
    tensor([1., 1.])
    """
    is_tuple = isinstance(result, (tuple, list))
    entries = result if isinstance(result, Mapping) else None
    if entries is None:
        entries = dict(enumerate(result)) if is_tuple else getattr(result, "__dict__", {})
    if key in entries or hasattr(result, key):
        value = entries[key] if key in entries else getattr(result, key)
        return value if isinstance(value, Tensor) else None
    if key == "loss" and not is_tuple:
        return None
    tensors = [x for x in entries.values() if isinstance(x, Tensor) and x.is_floating_point()]
    candidates = [x for x in tensors if (x.ndim == 0) == (key == "loss")]
    return candidates[0] if len(candidates) == 1 else None


def trained_parameters(loss: Callable[..., Any], module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a loss refers to, by name, if they require a gradient and are none of the module's.

    Those of a loss that is a module, of the module that it is a method of, and of modules that a function refers to by name.

    >>> proxies = nn.Bilinear(2, 2, 1, bias=False)
    >>> [list(trained_parameters(loss, nn.Linear(2, 2))) for loss in (proxies, lambda y, t: proxies(y, t).sum())]
    [['weight'], ['proxies.weight']]
    """
    while isinstance(loss, partial):
        loss = loss.func
    referred: dict[str, Any] = {"": loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)}
    if inspect.isfunction(loss):
        referred = {name: loss.__globals__.get(name) for name in loss.__code__.co_names}
        for name, cell in zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True):
            with suppress(ValueError):  # not bound yet
                referred[name] = cell.cell_contents
    candidates: dict[str, Any] = {}
    for name, x in referred.items():
        candidates.update(x.named_parameters(name) if isinstance(x, nn.Module) else {name: x})
    trained = {n: p for n, p in candidates.items() if isinstance(p, nn.Parameter) and p.requires_grad}
    of_module = {id(p) for p in module.parameters()} if trained else ()
    return {n: p for n, p in trained.items() if id(p) not in of_module}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the squared differences; ``jvp(grad(f))`` raises through torch's ``mse_loss``."""
    return (output - target.reshape(output.shape)).square().mean()


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.reshape(-1, output.shape[-1]), target.reshape(-1), ignore_index=IGNORE_INDEX)


FUNCTIONS: dict[str, Callable[[Any, Any], Tensor]] = {"mse": mean_square, "cross_entropy": _cross_entropy}


def _closed_form(equals: nn.Module | None, output: Tensor, target: Any) -> str:
    """Return the name of the closed form that a loss of torch's is on this output and target, or "".

    >>> _closed_form(nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.tensor([0, -100]))
    'cross_entropy'
    """
    if equals is None or equals.reduction != "mean" or not isinstance(target, Tensor):
        return ""
    if isinstance(equals, nn.MSELoss) and (target.shape, target.dtype) == (output.shape, output.dtype):
        return "mse"
    if not isinstance(equals, nn.CrossEntropyLoss) or output.ndim != 2 or target.dtype != torch.int64:
        return ""  # classes on axis 1
    plain = equals.weight is None and equals.ignore_index == IGNORE_INDEX and equals.label_smoothing == 0
    return "cross_entropy" if plain and target.shape == output.shape[:1] else ""


def is_behind(value: Tensor, output: Tensor) -> bool:
    """Tell whether autograd knows a value to depend on leaves only through an output."""
    if value.grad_fn is None:
        return False
    return not any(hasattr(f, "variable") for f, _ in edges_behind(value.grad_fn, (output.grad_fn, output.output_nr)))


def _missing(result: Any, key: str) -> str:
    expectation = f"one tensor, an object or dict with {key!r}, or a tuple with one number"
    remedy = "the labels that it computes its loss from among the inputs, or loss=... and target=..."
    if key != "loss":
        expectation = f"one tensor, an object or dict with {key!r}, or an object, dict or tuple with one floating-point tensor"
        remedy = "a callable loss=f(outputs, target), which is given the whole of it, or wrap the module"
    return f"request: the module returned {_describe(result, key)}, expected {expectation}; pass {remedy}"


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _describe(outputs: Any, key: str) -> str:
    kind = type(outputs).__name__
    if isinstance(outputs, Mapping):
        names = [str(k) for k in outputs]
    elif isinstance(outputs, (tuple, list)):
        return f"{kind} (of {', '.join(type(x).__name__ for x in outputs) or 'nothing'})"
    else:
        names = [n for n in getattr(outputs, "__dict__", {}) if not n.startswith("_")]
    if key in names:
        return f"{kind} whose {key!r} is None"
    return f"{kind} (with {', '.join(map(repr, names[:8]))})" if names else kind
