r"""A Hessian in 80-digit arithmetic, to decide whether a bound is violated or float64 ran out of digits.

Where logits lie far apart, the float64 Hessian of a softmax may be wrong by 1e-3 and more, whoever computes it. So a norm that
exceeds a bound is looked at again: the loss is evaluated anew in mpmath, and with w the singular vector of the block,

    ||H_ij w|| / ||w|| <= ||H_ij||_2,    u^T H w ~ [f(hu + hw) - f(hu - hw) - f(-hu + hw) + f(-hu - hw)] / 4h^2,

at h = 1e-25, which leaves some 25 digits. Only if this lower bound exceeds the bound is the bound violated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mpmath
import numpy as np
from torch import Tensor

from derivations.rotary_angles import angles
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.blocks.parts import Array, BlockParts
from papers.curvature_gap.problems import BoundProblem

DIGITS, STEP = 80, "1e-25"

_exp, _tanh, _erf = (np.frompyfunc(f, 1, 1) for f in (mpmath.exp, mpmath.tanh, mpmath.erf))
_positive = np.frompyfunc(lambda x: max(x, mpmath.mpf(0)), 1, 1)


def norm_from_below(problem: BoundProblem, rows: slice, columns: slice, start: Tensor, *, rounds: int = 1) -> float:
    """Return a lower bound on the norm of a block of the Hessian, by power iteration in 80 digits from a float64 vector.

    Args:
        problem: Its loss.
        rows: Entries of the parameters, in the order of ``named_parameters``.
        columns: The same.
        start: A vector of the columns' length, best the singular vector of the float64 block.
        rounds: Times that w is replaced by H_ij^T H_ij w first.
    """
    with mpmath.workdps(DIGITS):
        point, f = _point(problem), _loss(problem)
        w = _exact(start)
        for _ in range(rounds):
            u = _product(f, point, rows, columns, w)
            if not any(u):
                return 0.0
            w = _product(f, point, columns, rows, u / _length(u))
        return float(_length(_product(f, point, rows, columns, w)) / _length(w)) if any(w) else 0.0


def _product(f: Callable[[Array], Any], point: Array, rows: slice, columns: slice, w: Array) -> Array:
    """H[rows, columns] w by mixed differences."""
    h = mpmath.mpf(STEP)
    along = np.zeros_like(point)
    along[columns] = w * (h / _length(w))
    found = []
    for i in range(rows.start, rows.stop):
        unit = np.zeros_like(point)
        unit[i] = h
        found.append(f(point + unit + along) - f(point + unit - along) - f(point - unit + along) + f(point - unit - along))
    return np.array(found, dtype=object) * (_length(w) / (4 * h * h))


def _point(problem: BoundProblem) -> Array:
    return np.concatenate([_exact(p).reshape(-1) for p in problem.module.parameters()])


def _length(v: Array) -> Any:
    return mpmath.sqrt(sum(x * x for x in v))


def _exact(A: Tensor) -> Array:
    return np.vectorize(mpmath.mpf, otypes=[object])(A.detach().numpy())


def _loss(problem: BoundProblem) -> Callable[[Array], Any]:
    shapes = [(name, tuple(p.shape)) for name, p in problem.module.named_parameters()]
    x = _exact(problem.x)
    target = problem.target if problem.loss == "cross_entropy" else _exact(problem.target)

    def f(theta: Array) -> Any:
        values, at = {}, 0
        for name, shape in shapes:
            values[name] = theta[at : at + math.prod(shape)].reshape(shape)
            at += math.prod(shape)
        Z = _MpfParts(problem.module, values)(x)
        if problem.loss == "mse":
            return ((Z - target) ** 2).sum() / Z.size
        top = Z.max(1)
        log = [mpmath.log(row.sum()) for row in _exp(Z - top[:, None])]
        return sum(log[i] + top[i] - Z[i, int(k)] for i, k in enumerate(target)) / len(Z)

    return f


class _MpfParts(BlockParts):
    """A block on arrays of mpf."""

    exp, root = staticmethod(mpmath.exp), staticmethod(mpmath.sqrt)

    def __init__(self, block: TransformerBlock | Attention, arrays: Mapping[str, Array]) -> None:
        super().__init__(block, arrays)
        self.scale = 1 / mpmath.sqrt(self.part.d_k)

    def turns(self, length: int, pairs: int) -> tuple[Array, Array]:
        turn = angles(length, 2 * pairs, self.part.rotary_theta)  # in float64 as the block has them: data of the problem
        return _exact(turn.cos()), _exact(turn.sin())

    def activation(self, X: Array, kind: str) -> Array:
        return _ACTIVATIONS[kind](X)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "relu": _positive,
    "leaky_relu": lambda x: _positive(x) - mpmath.mpf("0.01") * _positive(-x),
    "tanh": _tanh,
    "silu": lambda x: x / (1 + _exp(-x)),
    "gelu": lambda x: x * (1 + _erf(x / mpmath.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + _tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))) / 2,
}
