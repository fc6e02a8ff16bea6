"""A primitive as a function of torch, differentiable any number of times in reverse and forward.

With N = phi(x), the derivatives of phi up to the second one are two functions, of tangents t and of covectors of N:

    Push(x, t) = D phi t,      Pull(x, W, b, t) = D phi^T b + [W . D^2 phi] t

The derivatives of these three functions are again among them. Forward mode of phi is Push; reverse mode of phi is Pull(b = W).
Reverse mode of Pull(b) with a covector u gives Push(x, u) for b and Pull(W = b, t = u) for x. Reverse mode of Push gives Pull(b)
for t and Pull(W = b, t) for x. So the closed forms of a primitive give first and second derivatives in every order of modes but
forward over forward. Forward over forward, and third derivatives, are computed by torch from the primitive written out in its
operations, and store what these store.

The three are operations of torch's, ``hessiankit::value``, ``push`` and ``pull``, so that tracers, such as that of
``torch.func.linearize``, note one operation and do not look inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hessiankit.primitives.cast import wide
from hessiankit.primitives.primitive import ByLinearising
from hessiankit.support.torch_state import full_precision

Given = Tensor | None

opaque = torch._compile._disable_dynamo
"""``torch.compiler.disable``, which leaves a function as it is between compiled parts, without the import of the compiler."""

INPUTS = 4
"""Number of inputs of a primitive here, absent ones included; not every tracer and transform takes lists of tensors."""

_PRIMITIVES: dict[str, Any] = {}  # those that functions have been made of; what torch's operations are given are names
_OUT = ", ".join(["Tensor"] * (INPUTS + 1))
_X, _T = (", ".join(f"Tensor? {letter}{k}" for k in range(INPUTS)) for letter in "xt")


@torch.library.custom_op("hessiankit::value", mutates_args=(), schema=f"(str name, {_X}) -> Tensor")
def _value(name: str, *x: Given) -> Tensor:
    with full_precision():
        return _PRIMITIVES[name].value(*_present(x))  # type: ignore[no-any-return]


@torch.library.custom_op("hessiankit::push", mutates_args=(), schema=f"(str name, {_X}, {_T}) -> Tensor")
def _push(name: str, *tensors: Given) -> Tensor:
    with full_precision():
        x, t = _halves(wide(tensors))
        out = _PRIMITIVES[name].jvp(_present(x), [None if v is None else v.unsqueeze(0) for v in t[: len(_present(x))]])
        return out[0].to(_like(name, *tensors).dtype)  # type: ignore[no-any-return]


@torch.library.custom_op(
    "hessiankit::pull",
    mutates_args=(),
    schema=f"(str name, bool[] needs, bool with_push, {_X}, {_T}, Tensor? W, Tensor? b) -> ({_OUT})",
)
def _pull(name: str, needs: Sequence[bool], with_push: bool, *tensors: Given) -> tuple[Tensor, ...]:
    with full_precision(), torch.no_grad():
        (*rest, W, b) = wide(tensors)
        x, t = _halves(rest)
        present = _present(x)
        at_point = _PRIMITIVES[name].linearise(present, W, needs[: len(present)])
        tangents = None if W is None else [None if v is None else v.unsqueeze(0) for v in t[: len(present)]]
        bar, output = None if b is None else b.unsqueeze(0), None
        if with_push:
            output, covectors = at_point.push_and_pull(bar, tangents or ())
        else:
            covectors = at_point.pull(bar, tangents)
        filled = zip(
            (*needs, with_push), (*(*covectors, None)[:INPUTS], output), _empty(name, needs, with_push, *tensors), strict=True
        )
        return tuple(y if not w else y.zero_() if c is None else c[0].to(y.dtype) for w, c, y in filled)


@_value.register_fake
@_push.register_fake
def _like(name: str, *tensors: Given) -> Tensor:
    return _PRIMITIVES[name].output_like(*_present(tensors[:INPUTS]))  # type: ignore[no-any-return]


@_pull.register_fake
def _empty(name: str, needs: Sequence[bool], with_push: bool, *tensors: Given) -> tuple[Tensor, ...]:
    first = tensors[0]
    assert first is not None
    out = [torch.empty_like(x) if w and x is not None else first.new_empty(0) for w, x in zip(needs, tensors, strict=False)]
    return (*out, _like(name, *tensors) if with_push else first.new_empty(0))


def _present(x: Sequence[Given]) -> Sequence[Given]:
    """Return the inputs of a primitive without absent ones at the end."""
    return x if x[-1] is not None else x[:-1]


@dataclass(frozen=True, eq=False)
class Call:
    """Name of a primitive, and how to read the tensors of a call.

    Attributes:
        stacks: Whether all calls of a ``vmap`` are one call, with an extra leading axis on every tensor. If not, they are
            made one after the other.
        needs: Whether the covector of each input is returned.
        with_push: Whether Push(x, t), an intermediate result of the covectors, is returned after them.
    """

    name: str
    stacks: bool = False
    needs: tuple[bool, ...] = ()
    with_push: bool = False

    def written_out(self, *x: Given) -> Tensor:
        """Return the primitive's value, of operations that torch differentiates any number of times."""
        return _PRIMITIVES[self.name].written_out(*_present(x))  # type: ignore[no-any-return]


def call(primitive: ByLinearising, *inputs: Given, stacks: bool = False) -> Tensor:
    """Return phi(inputs) as a differentiable function of torch.

    Args:
        primitive: A primitive whose fields are not tensors. Besides its actions it has ``written_out(*inputs)``, its value in
            operations that torch differentiates any number of times, and ``output_like(*inputs)``, an empty output.
        inputs: Tensors, or None for optional ones; integers and booleans are constants.
        stacks: Whether a leading axis is a stack of calls, as in :class:`Call`.
    """
    name = " ".join([type(primitive).__name__, *map(str, vars(primitive).values())])
    _PRIMITIVES.setdefault(name, primitive)
    return _Value.apply(Call(name, stacks), *inputs, *(None,) * (INPUTS - len(inputs)))  # type: ignore[no-any-return]


class _Primitive(Function):
    """Common part of the three functions. The tensors of a call are the inputs, and those that each function names."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], of: Call, *tensors: Given) -> Any:
        """Return a stack of calls, and that it lies along the first axis."""
        dims = in_dims[1:]
        if of.stacks:
            out = cls.apply(of, *(_stack(x, at, info.batch_size) for x, at in zip(tensors, dims, strict=True)))
        else:
            calls = [
                cls.apply(of, *(x if x is None or at is None else x.select(at, i) for x, at in zip(tensors, dims, strict=True)))
                for i in range(info.batch_size)
            ]
            out = tuple(map(torch.stack, zip(*calls, strict=True))) if isinstance(calls[0], tuple) else torch.stack(calls)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.of, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class _Value(_Primitive):
    """phi(x)."""

    @staticmethod
    def forward(of: Call, *x: Given) -> Tensor:
        return _value(of.name, *x)

    @staticmethod
    def backward(ctx: Any, bar: Given) -> Any:
        x = ctx.saved_tensors
        return None, *_pulled(ctx.of, x, _needed(ctx, 0, x), None, bar, (None,) * len(x))

    @staticmethod
    def jvp(ctx: Any, _: None, *t: Given) -> Any:
        return _Push.apply(ctx.of, *ctx.saved_tensors, *t)


class _Push(_Primitive):
    """D phi(x) t, for tensors x, t."""

    @staticmethod
    def forward(of: Call, *tensors: Given) -> Tensor:
        return _push(of.name, *tensors)

    @staticmethod
    def backward(ctx: Any, bar: Given) -> Any:
        of, n = ctx.of, INPUTS
        x, t = _halves(ctx.saved_tensors)
        to_x = _pulled(of, x, _needed(ctx, 0, x), bar, None, t)
        return None, *to_x, *_pulled(of, x, _needed(ctx, n, t), None, bar, (None,) * n)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Given) -> Any:
        x, _t = _halves(ctx.saved_tensors)
        at_x, at_t = _halves(tangents)
        if all(v is None for v in at_x):
            return _Push.apply(ctx.of, *x, *at_t)
        return _along(lambda *tensors: _push_written_out(ctx.of, tensors), ctx.saved_tensors, tangents)


class _Pull(_Primitive):
    """D phi(x)^T b + [W . D^2 phi(x)] t by the wanted inputs, for tensors x, t, W, b."""

    @staticmethod
    def forward(of: Call, *tensors: Given) -> Any:
        out = _pull(of.name, of.needs, of.with_push, *tensors)
        return tuple(x for x, w in zip(out, (*of.needs, of.with_push), strict=True) if w)

    @staticmethod
    def backward(ctx: Any, *u: Given) -> Any:
        of, (*rest, W, b) = ctx.of, ctx.saved_tensors
        x, _ = _halves(rest)
        if W is not None:
            out = _transposed(lambda *tensors: _pull_written_out(of, tensors), ctx.saved_tensors, ctx.needs_input_grad[1:], u)
            return None, *out
        if all(v is None for v in u):
            return None, *(None,) * len(ctx.saved_tensors)
        directions, needs, with_push = _placed(of.needs, u), _needed(ctx, 0, x), ctx.needs_input_grad[-1]
        if not any(needs):
            return None, *(None,) * (2 * INPUTS + 1), _Push.apply(of, *x, *directions) if with_push else None
        out = _Pull.apply(Call(of.name, of.stacks, needs, with_push), *x, *directions, b, None)
        return None, *_placed(needs, out), *(None,) * (INPUTS + 1), out[-1] if with_push else None

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Given) -> Any:
        of, (*rest, W, b) = ctx.of, ctx.saved_tensors
        if W is not None:
            return _along(lambda *tensors: _pull_written_out(of, tensors), ctx.saved_tensors, tangents)
        x, at_x = rest[:INPUTS], tangents[:INPUTS]
        return _Pull.apply(of, *x, *at_x, None if all(v is None for v in at_x) else b, tangents[-1])


def _pulled(of: Call, x: Sequence[Given], needs: tuple[bool, ...], W: Given, b: Given, t: Sequence[Given]) -> Sequence[Given]:
    """Return Pull of the wanted inputs, None for the others, or None for all if there is nothing to pull."""
    if not any(needs) or (b is None and (W is None or all(v is None for v in t))):
        return [None] * INPUTS
    return _placed(needs, _Pull.apply(Call(of.name, of.stacks, needs), *x, *t, W, b))


def _needed(ctx: Any, first: int, tensors: Sequence[Given]) -> tuple[bool, ...]:
    """Tell which of some tensors of a call need a covector; the first one is the call's ``first``."""
    return tuple(x is not None and ctx.needs_input_grad[1 + first + k] for k, x in enumerate(tensors))


def _placed(needs: Sequence[bool], covectors: Sequence[Given]) -> list[Given]:
    """Return covectors of all inputs, None for those not wanted."""
    rest = iter(covectors)
    return [next(rest) if w else None for w in needs]


def _halves(tensors: Sequence[Given]) -> tuple[Sequence[Given], Sequence[Given]]:
    """Return the inputs of the primitive, and their tangents."""
    return tensors[:INPUTS], tensors[INPUTS:]


def _stack(x: Given, at: int | None, count: int) -> Given:
    """Return a tensor with the axis of a stack in front, repeated where it has none."""
    return x if x is None else x.expand(count, *x.shape) if at is None else x.movedim(at, 0)


def _push_written_out(of: Call, tensors: Sequence[Given]) -> Tensor:
    x, t = _halves(tensors)
    return _along(of.written_out, x, t)  # type: ignore[no-any-return]


def _pull_written_out(of: Call, tensors: Sequence[Given]) -> tuple[Tensor, ...]:
    (*rest, W, b) = tensors
    x, t = _halves(rest)

    def pulled(bar: Given) -> Callable[..., Any]:
        return lambda *x: tuple(c for c, w in zip(_transposed(of.written_out, x, of.needs, (bar,)), of.needs, strict=True) if w)

    out = _along(pulled(W), x, t)
    out = out if b is None else tuple(map(torch.add, out, pulled(b)(*x)))
    return (*out, _along(of.written_out, x, t)) if of.with_push else out


def _along(function: Callable[..., Any], tensors: Sequence[Given], input_tangents: Sequence[Given]) -> Any:
    """Return the derivative of a function along tangents of those of its tensors that move."""
    at = [k for k, v in enumerate(input_tangents) if v is not None]
    points, directions = (tuple(xs[k] for k in at) for xs in (tensors, input_tangents))
    return torch.func.jvp(lambda *values: function(*_with(tensors, at, values)), points, directions)[1]


def _transposed(
    function: Callable[..., Any], tensors: Sequence[Given], needs: Sequence[bool], bars: Sequence[Given]
) -> list[Given]:
    """Return the covectors of a function's tensors, None for those not wanted."""
    at = [k for k, (x, w) in enumerate(zip(tensors, needs, strict=True)) if x is not None and w]
    result: Any = torch.func.vjp(lambda *arguments: function(*_with(tensors, at, arguments)), *(tensors[k] for k in at))
    out, pullback = result
    values = out if isinstance(out, tuple) else (out,)
    filled = tuple(torch.zeros_like(y) if u is None else u.to(y.dtype) for y, u in zip(values, bars, strict=True))
    return _with([None] * len(tensors), at, pullback(filled if isinstance(out, tuple) else filled[0]))


def _with(tensors: Sequence[Given], at: Sequence[int], values: Sequence[Given]) -> list[Given]:
    out = list(tensors)
    for k, x in zip(at, values, strict=True):
        out[k] = x
    return out
