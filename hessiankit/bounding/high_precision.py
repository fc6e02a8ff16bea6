r"""A Hessian in 80-digit arithmetic, to decide whether a bound is violated or float64 ran out of digits.

Where logits lie far apart, the float64 Hessian of a softmax may be wrong by 1e-3 and more, whoever computes it. So a norm that
exceeds a bound is looked at again: the loss is evaluated anew in mpmath, and with w the singular vector of the block,

    ||H_ij w|| / ||w|| <= ||H_ij||_2,    u^T H w ~ [f(hu + hw) - f(hu - hw) - f(-hu + hw) + f(-hu - hw)] / 4h^2,

at h = 1e-25, which leaves some 25 digits. Only if this lower bound exceeds the bound is the bound violated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor, nn

from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.blocks.norms import norm_of
from hessiankit.bounding.problems import BoundProblem

DIGITS, STEP = 80, "1e-25"
Array = Any
"""An ndarray of mpf."""

_exp, _tanh, _erf, _sqrt = (np.frompyfunc(f, 1, 1) for f in (mpmath.exp, mpmath.tanh, mpmath.erf, mpmath.sqrt))
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
        parts = _MpfParts(problem.module, values)
        Z = parts.attention(x) if isinstance(problem.module, Attention) else problem.module.equation(parts, x)
        if problem.loss == "mse":
            return ((Z - target) ** 2).sum() / Z.size
        top = Z.max(1)
        log = [mpmath.log(row.sum()) for row in _exp(Z - top[:, None])]
        return sum(log[i] + top[i] - Z[i, int(k)] for i, k in enumerate(target)) / len(Z)

    return f


class _MpfParts:
    """A block's parts, on arrays of mpf."""

    def __init__(self, block: TransformerBlock | Attention, values: dict[str, Array]) -> None:
        self.block, self.values = block, values
        self.prefix = "" if isinstance(block, Attention) else "attention."
        self.part: Attention = block if isinstance(block, Attention) else block.attention

    def __getattr__(self, name: str) -> Any:
        part = getattr(self.__dict__["block"], name)
        if isinstance(part, nn.Parameter):
            return self.values[name]
        return (lambda X: self._norm(X, part, name)) if isinstance(part, nn.Module) else part

    def attention(self, X: Array) -> Array:
        """Self-attention."""
        part = self.part
        q, k, v = (self._heads(X, letter, n) for letter, n in zip("QKV", (part.n_heads, *[part.n_kv_heads] * 2), strict=True))
        shared = part.n_heads // part.n_kv_heads
        heads = [self._context(q[h], k[h // shared], v[h // shared]) for h in range(part.n_heads)]
        if part.norm_c is not None and part.norm_scope == "head":
            heads = [self._norm(c, part.norm_c, f"{self.prefix}norm_c") for c in heads]
        C = np.concatenate(heads, axis=1)
        if part.norm_c is not None and part.norm_scope == "full":
            C = self._norm(C, part.norm_c, f"{self.prefix}norm_c")
        return C if part.W_O is None else self._affine(C, f"{self.prefix}W_O", f"{self.prefix}b_O")

    def feedforward(self, Y: Array) -> Array:
        """The feed-forward network."""
        assert isinstance(self.block, TransformerBlock)
        part = self.block.feedforward
        H = self._affine(Y, "feedforward.W_1", "feedforward.b_1")
        if part.W_G is not None:
            H = _activation("silu", self._affine(Y, "feedforward.W_G", "feedforward.b_G")) * H
        else:
            H = _activation(part.activation, H)
        return self._affine(H, "feedforward.W_2", "feedforward.b_2")

    def _affine(self, X: Array, weight: str, bias: str) -> Array:
        out = X @ self.values[weight]
        return out + self.values[bias] if bias in self.values else out

    def _heads(self, X: Array, letter: str, heads: int) -> list[Array]:
        part, name = getattr(self.part, f"norm_{letter.lower()}"), f"{self.prefix}norm_{letter.lower()}"
        Y = self._affine(X, f"{self.prefix}W_{letter}", f"{self.prefix}b_{letter}")
        if part is not None and self.part.norm_scope == "full":
            Y = self._norm(Y, part, name)
        pieces = np.split(Y, heads, axis=1)
        if part is not None and self.part.norm_scope == "head":
            pieces = [self._norm(piece, part, name) for piece in pieces]
        return [self._rotated(piece) for piece in pieces] if letter != "V" and self.part.rotary else pieces

    def _rotated(self, Y: Array) -> Array:
        # the angles as the block has them, in float64, since they are data of the problem
        from derivations.rotary import angles

        turn = angles(Y.shape[0], Y.shape[1], self.part.rotary_theta).repeat(1, 2).double()
        half = Y.shape[1] // 2
        return Y * _exact(turn.cos()) + np.concatenate([-Y[:, half:], Y[:, :half]], axis=1) * _exact(turn.sin())

    def _context(self, q: Array, k: Array, v: Array) -> Array:
        logits = q @ k.T / mpmath.sqrt(self.part.d_k)
        rows = []
        for i, row in enumerate(logits):
            seen = i + 1 if self.part.causal else len(row)
            p = _exp(row[:seen] - row[:seen].max())
            rows.append((p / p.sum()) @ v[:seen])
        return np.array(rows, dtype=object)

    def _norm(self, X: Array, part: nn.Module, name: str) -> Array:
        kind, groups, eps = norm_of(part, torch.float64)
        rows = X.reshape(len(X) * groups, -1)
        rows = rows - rows.sum(1)[:, None] / rows.shape[1] if kind == "layernorm" else rows
        scale = _sqrt((rows * rows).sum(1) / rows.shape[1] + eps)
        out = (rows / scale[:, None]).reshape(X.shape)
        out = out * self.values[f"{name}.weight"] if f"{name}.weight" in self.values else out
        return out + self.values[f"{name}.bias"] if f"{name}.bias" in self.values else out


def _activation(kind: str, x: Array) -> Array:
    if kind == "gelu":
        return x * (1 + _erf(x / mpmath.sqrt(2))) / 2
    if kind == "gelu_tanh":
        return x * (1 + _tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))) / 2
    if kind == "silu":
        return x / (1 + _exp(-x))
    if kind == "tanh":
        return _tanh(x)
    if kind == "leaky_relu":
        return _positive(x) - mpmath.mpf("0.01") * _positive(-x)
    return _positive(x) if kind == "relu" else x
