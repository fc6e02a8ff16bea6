"""Columns of the Hessian of a module's loss in 400 digits, and what storing every number in float64 would do to them.

The module's own operations are read from torch, before they are taken apart, and evaluated on arrays of numbers that keep a tape; a
difference of two gradients is a column. Several hundred digits forgive every cancellation, so that operations are written in the
plainest way. Nothing is shared with hessiankit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mpmath as mp
import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

DIGITS, STEP = 400, "1e-120"
HALF_ULP = 2.0**-53
Array = np.ndarray[Any, Any]
"""Of ``Number`` or, where nothing depends on parameters or inputs, of mpmath's own."""


class Number:
    """A number of mpmath with its derivatives in those that it was computed from; ``stored`` ones pass a moved adjoint on."""

    __slots__ = ("adjoint", "parents", "stored", "value")
    tape: list[Number] = []  # noqa: RUF012

    def __init__(self, value: Any, *parents: tuple[Number, Any], stored: bool = False) -> None:
        self.value, self.parents, self.stored, self.adjoint = value, parents, stored, None
        self.tape.append(self)

    def __add__(self, other: Any) -> Number:
        if isinstance(other, Number):
            return Number(self.value + other.value, (self, 1), (other, 1))
        return Number(self.value + mp.mpf(other), (self, 1))

    def __mul__(self, other: Any) -> Number:
        if isinstance(other, Number):
            return Number(self.value * other.value, (self, other.value), (other, self.value))
        return Number(self.value * mp.mpf(other), (self, mp.mpf(other)))

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Number:
        return self * -1

    def __sub__(self, other: Any) -> Number:
        return self + -other

    def __rsub__(self, other: Any) -> Number:
        return -self + other

    def __truediv__(self, other: Any) -> Number:
        return self * (1 / other)

    def __rtruediv__(self, other: Any) -> Number:
        return self.apply(lambda x: 1 / x, lambda x: -1 / x**2) * other

    def apply(self, f: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Number:
        """Return a function of the number."""
        return Number(f(self.value), (self, slope(self.value)))


def exact(x: Tensor, lift: Callable[[Any], Any] = mp.mpf) -> Array:
    """The numbers of a float64 tensor, as they are."""
    out = np.empty(x.numel(), dtype=object)
    out[:] = [lift(mp.mpf(v)) for v in x.detach().double().reshape(-1).tolist()]
    return out.reshape(tuple(x.shape))


def value(x: Any) -> Any:
    return x.value if isinstance(x, Number) else x


def each(f: Callable[[Any], Any]) -> Callable[..., Array]:
    """A function of every entry; further arguments of torch's are left aside."""
    return lambda x, *_, **__: np.asarray(np.frompyfunc(f, 1, 1)(x))


def elementary(f: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: x.apply(f, slope) if isinstance(x, Number) else f(x)


exp = elementary(mp.exp, mp.exp)
log = elementary(mp.log, lambda x: 1 / x)
sqrt = elementary(mp.sqrt, lambda x: 1 / (2 * mp.sqrt(x)))
erfc = elementary(mp.erfc, lambda x: -2 / mp.sqrt(mp.pi) * mp.exp(-x * x))


# Operations of torch ----------------------------------------------------------------------------------------------------


def linear(x: Array, W: Array, b: Array | None = None) -> Array:
    return x @ W.T if b is None else x @ W.T + b


def normalise(x: Array, gain: Array | None, shift: Array | None, eps: float, *, centred: bool) -> Array:
    def mean(t: Array) -> Array:
        return t.sum(-1, keepdims=True) / x.shape[-1]

    m = x - mean(x) if centred else x
    y = m / each(sqrt)(mean(m * m) + mp.mpf(eps))
    y = y if gain is None else y * gain
    return y if shift is None else y + shift


def layer_norm(x: Array, shape: Any, gain: Any = None, shift: Any = None, eps: float = 1e-5, *_: Any) -> Array:
    return normalise(x, gain, shift, eps, centred=True)


def rms_norm(x: Array, shape: Any, gain: Any = None, eps: float | None = None) -> Array:
    return normalise(x, gain, None, torch.finfo(torch.float64).eps if eps is None else eps, centred=False)


def softmax(x: Array, dim: int, *_: Any) -> Array:
    assert dim in (-1, x.ndim - 1)
    e = each(exp)(x - each(value)(x).max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logistic(x: Any) -> Any:
    return 1 / (1 + exp(-x))


def gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "none":
        return each(lambda v: v * erfc(-v / mp.sqrt(2)) / 2)(x)
    k, c = mp.sqrt(2 / mp.pi), mp.mpf("0.044715")
    return each(lambda v: v * logistic((v + v * v * v * c) * (2 * k)))(x)  # (1 + tanh(u / 2)) / 2 is the logistic function of u


COMPUTED: dict[str, Callable[..., Array]] = {
    "mul": lambda a, b: a * b, "div": lambda a, b: a / mp.mpf(b), "add": lambda a, b: a + b, "neg": lambda a: -a,
    "matmul": lambda a, b: a @ b, "linear": linear, "layer_norm": layer_norm, "rms_norm": rms_norm, "softmax": softmax, "gelu": gelu,
    "tanh": each(lambda v: 1 - 2 / (1 + exp(2 * v))), "silu": each(lambda v: v * logistic(v)), "sigmoid": each(logistic),
    "softplus": each(lambda v: v if value(v) > 20 else log(1 + exp(v))),
}  # fmt: skip


def squared_error(z: Array, target: Tensor) -> Any:
    r = z - exact(target)
    return (r * r).sum() / z.size


def cross_entropy(z: Array, labels: Tensor) -> Any:
    rows = softmax(z.reshape(-1, z.shape[-1]), -1)
    return -each(log)(rows[np.arange(len(rows)), labels.numpy().reshape(-1)]).sum() / len(rows)


def rearrange(operation: Callable[..., Any], operands: list[Array], *rest: Any, **options: Any) -> Any:
    """Apply one of torch's operations that move entries about; what it returns holds the operands' entries, or is a list of such.

    It is applied to the numbers 0, 1, 2, ... of the entries of all operands, one after the other; -1 stands for minus infinity.
    """
    starts = np.cumsum([0, *(x.size for x in operands)])
    numbered = [torch.arange(x.size).reshape(x.shape) + int(at) for x, at in zip(operands, starts, strict=False)]
    moved = operation(numbered if len(numbered) > 1 else numbered[0], *rest, **options)
    entries = np.array([*(v for x in operands for v in x.reshape(-1)), mp.mpf("-inf")], dtype=object)
    return entries[moved.numpy()] if isinstance(moved, Tensor) else [entries[part.numpy()] for part in moved]


# The tape of a module ---------------------------------------------------------------------------------------------------


class ManyDigits:
    """The loss of a module, as a function of its parameters.

    Args:
        module: Of operations that are ``COMPUTED`` here, or that only move entries about.
        inputs: One tensor.
        target: As ``hk.hessian`` takes it.
        loss: "mse" or "cross_entropy".
    """

    def __init__(self, module: nn.Module, inputs: Tensor, target: Tensor, loss: str) -> None:
        names, self.leaves = [n for n, _ in module.named_parameters()], [*(p.detach() for p in module.parameters()), inputs]
        with torch.no_grad():
            run = make_fx(
                lambda *at: torch.func.functional_call(module, dict(zip(names, at, strict=False)), at[-1:]), pre_dispatch=True
            )
            self.graph = run(*self.leaves).graph
        self.loss, self.target = squared_error if loss == "mse" else cross_entropy, target
        self.slopes: dict[int | None, tuple[list[Any], list[Any]]] = {}  # at the point itself

    def column(self, k: int, *, rounded: int | None = None) -> Tensor:
        """Return the derivative of the gradient by entry k of all parameters, one after the other.

        Args:
            k: The entry.
            rounded: A seed: every operand, result and adjoint, and the tangent of each, is then moved by up to half a unit in
                the last place of float64, as if stored in it, while each operation and its derivatives stay exact. What that
                changes is lost to any method that keeps these numbers in float64; what it does not change is not.
        """
        with mp.workdps(DIGITS):
            if rounded not in self.slopes:
                here = _Run(rounded, None)
                self.slopes[rounded] = here.gradient(self, k, mp.mpf(0)), here.seen
            (slope, seen), h = self.slopes[rounded], mp.mpf(STEP)
            ahead = _Run(rounded, iter(seen)).gradient(self, k, h)
            return torch.tensor([float((b - a) / h) for a, b in zip(slope, ahead, strict=True)], dtype=torch.float64)


class _Run:
    """One evaluation; ``base`` are the numbers that were stored in a run without the step, in their order."""

    def __init__(self, rounded: int | None, base: Iterator[Any] | None) -> None:
        self.seen: list[Any] = []
        self.base, self.random = base, None if rounded is None else np.random.default_rng(rounded)

    def gradient(self, of: ManyDigits, k: int, step: Any) -> list[Any]:
        Number.tape = []
        leaves = [exact(leaf, Number) for leaf in of.leaves]
        parameters = [x for leaf in leaves[:-1] for x in leaf.reshape(-1)]
        parameters[k].value += step
        values = dict(zip((node for node in of.graph.nodes if node.op == "placeholder"), leaves, strict=True))
        for node in of.graph.nodes:
            if node.op == "call_function":
                values[node] = self._apply(node, torch.fx.map_arg((node.args, node.kwargs), values.__getitem__))
        (output,) = of.graph.output_node().all_input_nodes
        loss = of.loss(self._stored(values[output], of_adjoint=True), of.target)
        loss.adjoint = mp.mpf(1)
        for number in reversed(Number.tape):
            if number.adjoint is not None:
                w = self._moved(number.adjoint) if number.stored else number.adjoint
                for parent, slope in number.parents:
                    parent.adjoint = w * slope if parent.adjoint is None else parent.adjoint + w * slope
        return [mp.mpf(0) if x.adjoint is None else x.adjoint for x in parameters]

    def _apply(self, node: Node, given: tuple[Any, dict[str, Any]]) -> Any:
        """Evaluate one operation; what depends neither on parameters nor on the inputs stays torch's."""
        (first, *rest), options = given
        kind = str(getattr(node.target, "__name__", "")).split(".")[0]
        if kind == "getitem":
            return first[rest[0]]
        if not any(isinstance(a, np.ndarray) for a in [first, *rest, *(first if isinstance(first, (list, tuple)) else ())]):
            assert callable(node.target)
            return node.target(first, *rest, **options)
        if kind in COMPUTED:
            operands = [exact(a) if isinstance(a, Tensor) else a for a in (first, *rest)]
            return self._stored(COMPUTED[kind](*(self._stored(a, of_adjoint=True) for a in operands), **options))
        if kind == "masked_fill":
            assert rest[1] == -torch.inf
            rest = [rest[0], -1]
        operation: Any = (lambda x, *_, **__: x) if kind == "to" else node.target
        return rearrange(operation, list(first) if isinstance(first, (list, tuple)) else [first], *rest, **options)

    def _stored(self, x: Any, *, of_adjoint: bool = False) -> Any:
        if self.random is None or not isinstance(x, np.ndarray):
            return x
        return each(
            lambda v: Number(self._moved(v.value), (v, 1), stored=of_adjoint) if isinstance(v, Number) else self._moved(v)
        )(x)

    def _moved(self, x: Any) -> Any:
        if self.random is None or x == mp.mpf("-inf"):
            return x
        own, of_tangent = 1 + self.random.uniform(-HALF_ULP, HALF_ULP, 2)
        if self.base is None:
            self.seen.append(x)
            return x * own
        before = next(self.base)
        return before * own + (x - before) * of_tangent
