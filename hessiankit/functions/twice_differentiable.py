"""A context in which programs of torch have second derivatives: attention, norms, and the cross entropy of a linear head.

A :class:`TwiceDifferentiable` is a mode of torch: what the thread calls while it is on passes through it, by whatever name
the caller has imported the function, and nothing of torch is patched. Modes form a stack, so that it can be nested, and ends
with its block.

The logits of a head stay tensors as torch makes them. The mode keeps with them what they were made of; a cross entropy that
reads them is computed from that instead, and nothing of tokens times vocabulary enters the graph of the loss.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hessiankit.functions.attention import scaled_dot_product_attention
from hessiankit.functions.heads import Logits
from hessiankit.functions.primitive_function import opaque
from hessiankit.primitives.cast import wide
from hessiankit.primitives.fused_attention import TORCHS
from hessiankit.primitives.normalization import LayerNorm
from hessiankit.support.arguments import checked
from hessiankit.support.torch_state import recording
from hessiankit.tracing.decompositions import DECOMPOSITIONS, aten

LINEAR_CROSS_ENTROPY: Any = getattr(F, "linear_cross_entropy", None)  # of torch 2.13
CALLERS: frozenset[Any] = frozenset((
    F.batch_norm, F.cross_entropy, F.group_norm, F.instance_norm, F.layer_norm, F.multi_head_attention_forward,
    LINEAR_CROSS_ENTROPY,
))  # fmt: skip
"""Functions of torch in Python that call those which are replaced."""
BACKWARD: frozenset[Any] = frozenset((torch.autograd.backward, torch.autograd.grad, Tensor.backward))
"""Functions of torch that call checkpointed parts of a model again."""


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Attention by its closed forms, with dropout by torch on whole matrices."""
    if not _ATTENTION.bind(*args, **kwargs).arguments.get("dropout_p"):
        return scaled_dot_product_attention(*args, **kwargs)
    with torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH):
        return TORCHS(*args, **kwargs)


_ATTENTION = inspect.signature(scaled_dot_product_attention)


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Any:
    """Layer norm in operations of torch where its own is wrong: by transforms, and with a bias and no gain."""
    if not _is_transformed() and (weight is not None or bias is None):
        return NotImplemented
    return LayerNorm(len(shape), eps).value(*wide((x, weight, bias))).to(x.dtype)


def _is_transformed() -> bool:
    """Tell whether a transform of torch.func or forward mode is running: by some of them torch's norms are wrong."""
    return torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0


def _group_norm(x: Tensor, groups: int, weight: Tensor | None = None, *rest: Any) -> Any:
    """Group norm in its parts where torch's own is wrong: by transforms, and without a gain by batched gradients."""
    if not _is_transformed() and weight is not None:
        return NotImplemented
    return DECOMPOSITIONS[aten.group_norm.default](x, groups, weight, *rest)


def _parts_in_transforms(operation: Any) -> Callable[..., Any]:
    """Return what calls the parts of an operation where torch's own is wrong by transforms."""
    return lambda *args: DECOMPOSITIONS[operation](*args) if _is_transformed() else NotImplemented


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    TORCHS: _attention,
    torch.layer_norm: _layer_norm,
    torch.batch_norm: _parts_in_transforms(aten.batch_norm.default),
    torch.instance_norm: _parts_in_transforms(aten.instance_norm.default),
    torch.group_norm: _group_norm,
    torch._weight_norm: DECOMPOSITIONS[aten._weight_norm.default],
}
"""Function of torch -> what is called in its place, and returns NotImplemented where torch's is right."""


class TwiceDifferentiable(TorchFunctionMode):
    """The context of :func:`twice_differentiable`.

    Attributes:
        calls: Number of calls that were replaced, by the name of torch's function.
    """

    def __init__(self, calls: Counter[str] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter() if calls is None else calls
        self.logits = Logits()

    @opaque
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what replaces it."""
        kwargs = kwargs or {}
        if func is LINEAR_CROSS_ENTROPY and kwargs.get("options") is not None:
            self.calls[func.__name__] += 1
            kwargs = {**kwargs, "options": None}  # in chunks it has no second derivative, and says nothing
        if func in CALLERS or (func in BACKWARD and not recording()):
            with self:
                return _without_check(func)(*args, **kwargs)
        if recording():  # modules are traced as they are
            return (_attention if func is TORCHS else func)(*args, **kwargs)
        with self:
            value = self._substitute(func, args, kwargs)
        if value is not NotImplemented:
            self.calls[func.__name__] += 1
            return value
        value = func(*args, **kwargs)
        self.logits.watch(func, args, kwargs, value)
        return value

    def _substitute(self, function: Any, args: Any, kwargs: Any) -> Any:
        if function is torch._C._nn.cross_entropy_loss:
            return self.logits.cross_entropy(*args, **kwargs)
        return REPLACEMENTS[function](*args, **kwargs) if function in REPLACEMENTS else NotImplemented

    def __repr__(self) -> str:
        return _text(self.calls)


def _text(calls: Counter[str]) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in calls.items())
    return f"twice_differentiable: calls replaced: {counts or 'none'}"


@functools.cache
def _without_check(function: FunctionType) -> FunctionType:
    """Return a function of torch without its own check for modes, so that the mode stays active in the functions it calls."""
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    unchecked = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    unchecked.__kwdefaults__ = function.__kwdefaults__
    return unchecked


M = TypeVar("M", bound=Callable[..., Any])


@overload
def twice_differentiable() -> TwiceDifferentiable: ...
@overload
def twice_differentiable(function: M) -> M: ...
@checked("twice_differentiable")
def twice_differentiable(function: Callable[..., Any] | None = None) -> Any:
    r"""Make programs of torch twice differentiable, in every library: a block, a model or a function.

    Within ``with twice_differentiable():`` functions that the thread calls are replaced, where torch's own have no second
    derivative, a wrong one, or one that takes much memory:

    - ``scaled_dot_product_attention``, also in torch's layers, by :func:`scaled_dot_product_attention`;
    - ``cross_entropy`` of the logits of a large linear head, also in the losses of transformers, by
      :func:`linear_cross_entropy`. Between the two, rows of logits may be moved, copied or cut off, and the logits may be
      scaled and get a bias. The logits themselves are torch's, and have no part in the loss;
    - ``linear_cross_entropy`` of torch in chunks, whose second derivative is wrong;
    - ``layer_norm``, ``batch_norm``, ``instance_norm`` and ``group_norm`` in transforms of ``torch.func`` and forward mode,
      or without a gain, and ``weight_norm``.

    Nothing of torch is patched: the replacement ends with the block, holds in its thread only, and is off while hessiankit
    traces, which needs the operations themselves. Functions compiled by ``torch.compile`` run unchanged, since they have no
    double backward. Attention with dropout keeps its weights. Derivatives may be taken after the block, but for those that
    recompute a checkpointed call.

    Args:
        function: A module or a function to be called within such a block; None for the block. Of a module a shallow copy is
            returned, of its class and with the same parameters.

    Returns:
        The block, or what was passed, called within it. A block and a module print what they have replaced.

    Raises:
        InputError: If ``function`` cannot be called.

    >>> layer = torch.nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    >>> x = torch.ones(1, 3, 4)
    >>> with twice_differentiable() as block:
    ...     value, product = torch.autograd.functional.hvp(lambda x: layer(x).pow(3).sum(), x, x)
    >>> block
    twice_differentiable: calls replaced: scaled_dot_product_attention 1
    """
    if function is None:
        return TwiceDifferentiable()
    if isinstance(function, nn.Module):
        module: Any = copy.copy(function)
        module.__class__ = _class_within(module.__class__)
        module.replaced_calls = Counter()
        return module

    @functools.wraps(function)
    def within(*args: Any, **kwargs: Any) -> Any:
        with TwiceDifferentiable():
            return function(*args, **kwargs)

    return within


@functools.cache
def _class_within(base: Any) -> Any:
    """Return the subclass of ``base`` whose modules run their calls within the context."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with TwiceDifferentiable(self.replaced_calls):
            return base.__call__(self, *args, **kwargs)

    def text(self: Any) -> str:
        return f"{base.__repr__(self)}\n{_text(self.replaced_calls)}"

    names = {"__call__": call, "__repr__": text, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), names)
