"""Operations on arrays of mpmath numbers: the value, and the transpose of the derivative, written in the plainest way.

Several hundred digits forgive every cancellation, so that nothing here is arranged to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mpmath as mp
import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
"""Of mpmath numbers."""
Pull = Callable[[Array], Sequence["Array | None"]]
"""From the adjoint of a result to those of the operands."""


def exact(x: Tensor) -> Array:
    """The numbers of a float64 tensor, as they are."""
    out = np.empty(x.numel(), dtype=object)
    out[:] = [mp.mpf(v) for v in x.detach().double().reshape(-1).tolist()]
    return out.reshape(tuple(x.shape))


def each(f: Callable[[Any], Any], x: Array) -> Array:
    return np.frompyfunc(f, 1, 1)(x)


def summed_to(shape: tuple[int, ...], x: Array) -> Array:
    """The transpose of broadcasting."""
    x = np.asarray(x, dtype=object)
    x = np.asarray(x.sum(tuple(range(x.ndim - len(shape)))), dtype=object) if x.ndim > len(shape) else x
    return np.asarray(x.sum(tuple(k for k, n in enumerate(shape) if n == 1 and x.shape[k] != 1), keepdims=True)).reshape(shape)


# Operations: (operands as they come) -> value and pull; tensors among the operands are arrays here ------------------------


def multiply(a: Array, b: Any) -> tuple[Array, Pull]:
    if not isinstance(b, np.ndarray):
        return a * mp.mpf(b), lambda w: (w * mp.mpf(b),)
    return a * b, lambda w: (summed_to(a.shape, w * b), summed_to(b.shape, w * a))


def divide(a: Array, b: float) -> tuple[Array, Pull]:
    return a / mp.mpf(b), lambda w: (w / mp.mpf(b),)


def add(a: Array, b: Array) -> tuple[Array, Pull]:
    return a + b, lambda w: (summed_to(a.shape, w), summed_to(b.shape, w))


def matmul(a: Array, b: Array) -> tuple[Array, Pull]:
    return a @ b, lambda w: (
        summed_to(a.shape, w @ b.swapaxes(-1, -2)),
        summed_to(b.shape, a.swapaxes(-1, -2) @ w) if b.ndim > 2 else a.reshape(-1, a.shape[-1]).T @ w.reshape(-1, w.shape[-1]),
    )


def linear(x: Array, W: Array, b: Array | None = None) -> tuple[Array, Pull]:
    y, pull = matmul(x, W.T)

    def back(w: Array) -> Sequence[Array | None]:
        to_x, to_W = pull(w)
        return to_x, to_W.T, *(() if b is None else (summed_to(b.shape, w),))

    return (y if b is None else y + b), back


def normalise(x: Array, gain: Array | None, shift: Array | None, eps: float, *, centred: bool) -> tuple[Array, Pull]:
    def mean(t: Array) -> Array:
        return t.sum(-1, keepdims=True) / x.shape[-1]

    m = x - mean(x) if centred else x
    r = each(lambda v: 1 / mp.sqrt(v), mean(m * m) + mp.mpf(eps))
    y = m * r
    out = y if gain is None else y * gain

    def pull(w: Array) -> Sequence[Array | None]:
        u = w if gain is None else w * gain
        u_x = u - y * mean(u * y)
        to_x = r * (u_x - mean(u) if centred else u_x)
        operands = [to_x] if gain is None else [to_x, summed_to(gain.shape, w * y)]
        return operands if shift is None else [*operands, summed_to(shift.shape, w)]

    return (out if shift is None else out + shift), pull


def layer_norm(x: Array, shape: Any, gain: Any = None, shift: Any = None, eps: float = 1e-5, *_: Any) -> tuple[Array, Pull]:
    return normalise(x, gain, shift, eps, centred=True)


def rms_norm(x: Array, shape: Any, gain: Any = None, eps: float | None = None) -> tuple[Array, Pull]:
    return normalise(x, gain, None, torch.finfo(torch.float64).eps if eps is None else eps, centred=False)


def softmax(x: Array, dim: int, *_: Any) -> tuple[Array, Pull]:
    assert dim in (-1, x.ndim - 1)
    e = each(mp.exp, x - x.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    return p, lambda w: (p * (w - (p * w).sum(-1, keepdims=True)),)


def function(f: Callable[[Any], Any], slope: Callable[[Any], Any]) -> Callable[..., tuple[Array, Pull]]:
    return lambda x, *_, **__: (each(f, x), lambda w: (w * each(slope, x),))


def logistic(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def density(x: Any) -> Any:
    return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


def cumulative(x: Any) -> Any:
    return mp.erfc(-x / mp.sqrt(2)) / 2


def gelu(x: Array, approximate: str = "none") -> tuple[Array, Pull]:
    if approximate == "none":
        return function(lambda v: v * cumulative(v), lambda v: cumulative(v) + v * density(v))(x)
    k, c = mp.sqrt(2 / mp.pi), mp.mpf("0.044715")

    def u(v: Any) -> Any:
        return 2 * k * (v + c * v**3)  # (1 + tanh(u / 2)) / 2 is the logistic function of u

    return function(
        lambda v: v * logistic(u(v)),
        lambda v: logistic(u(v)) + v * logistic(u(v)) * logistic(-u(v)) * 2 * k * (1 + 3 * c * v * v),
    )(x)


COMPUTED: dict[str, Callable[..., tuple[Array, Pull]]] = {
    "mul": multiply, "div": divide, "add": add, "neg": lambda a: (-a, lambda w: (-w,)), "matmul": matmul, "linear": linear,
    "layer_norm": layer_norm, "rms_norm": rms_norm, "softmax": softmax, "gelu": gelu,
    "tanh": function(mp.tanh, lambda v: 1 / mp.cosh(v) ** 2),
    "silu": function(lambda v: v * logistic(v), lambda v: logistic(v) * (1 + v * logistic(-v))),
    "sigmoid": function(logistic, lambda v: logistic(v) * logistic(-v)),
    "softplus": function(lambda v: v if v > 20 else mp.log(1 + mp.exp(v)), lambda v: mp.mpf(1) if v > 20 else logistic(v)),
}  # fmt: skip


def rearrange(operation: Callable[..., Any], operands: Sequence[Array], *rest: Any, **options: Any) -> tuple[Any, Any]:
    """Apply one of torch's operations that move entries about; what it returns, and the positions that it took them from.

    It is applied to the numbers 0, 1, 2, ... of the operands' entries, one after the other; -1 stands for minus infinity.
    """
    starts = np.cumsum([0, *(x.size for x in operands)])
    numbered = [torch.arange(x.size).reshape(x.shape) + int(at) for x, at in zip(operands, starts, strict=False)]
    return operation(numbered if len(numbered) > 1 else numbered[0], *rest, **options), starts


def taken(operands: Sequence[Array], positions: Tensor, starts: Array) -> tuple[Array, Pull]:
    """The entries at these positions of the operands, one after the other."""
    flat, at = np.concatenate([x.reshape(-1) for x in operands]), positions.numpy()

    def pull(w: Array) -> Sequence[Array]:
        out = np.full(flat.size + 1, mp.mpf(0))  # the last one takes what goes to -1
        np.add.at(out, at.reshape(-1), w.reshape(-1))
        return [out[a:b].reshape(x.shape) for x, a, b in zip(operands, starts[:-1], starts[1:], strict=True)]

    return np.append(flat, mp.mpf("-inf"))[at], pull


def squared_error(z: Array, target: Array) -> tuple[Array, Pull]:
    r, n = z - target, z.size
    return (r * r).sum() / n, lambda w: (2 * w * r / n,)


def cross_entropy(z: Array, labels: Array) -> tuple[Array, Pull]:
    rows, flat = z.reshape(-1, z.shape[-1]), labels.reshape(-1)
    p, _ = softmax(rows, -1)
    hit = np.zeros(rows.shape, dtype=object)
    hit[np.arange(len(flat)), flat] = 1
    return -each(mp.log, (p * hit).sum(-1)).sum() / len(flat), lambda w: ((p - hit).reshape(z.shape) * w / len(flat),)
