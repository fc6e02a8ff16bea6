"""The symbolic cases of the chapters that layers are put together from: identically, at the smallest sizes that show all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import sympy

from derivations.affine import AffineAt
from derivations.arrays import Array
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, merge_heads, rotary, split_heads
from derivations.operation import Operation, Shape
from hessiankit.verify.exact_case import Case, Comparison, Draw, SymbolicReference, against
from hessiankit.verify.exact_vecr import symbols

Build = Callable[[Draw], Iterator[Comparison]]


def operation(chapter: Callable[..., Operation], reference: Callable[..., Array], **shapes: Shape) -> Build:
    """Build a chapter on symbols against a function of them, entry by entry."""

    def build(draw: Draw) -> Iterator[Comparison]:
        point = {name: symbols(name.lower(), *shape) for name, shape in shapes.items()}
        yield from against(chapter(**point), SymbolicReference(point, reference(**point)))

    return build


def affine(X: Array, W: Array, b: Array) -> Array:
    """Return sum_k x_ik w_kj + b_j."""
    rows = [[sum(x[k] * W[k, j] for k in range(len(W))) + b[j] for j in range(W.shape[1])] for x in X]
    return np.array(rows, dtype=object)


def head_product(kind: str, P: Array, R: Array, c: Any = 1) -> Array:
    """Return the scores or mixtures of two heads, each with half of the rows of P and R."""
    heads = []
    for h in range(2):
        p, r = np.split(P, 2)[h], np.split(R, 2)[h]
        heads.append(c * (p @ (r.T if kind == "scores" else r)))
    return np.concatenate(heads, 0)


def turned(cos: Array, sin: Array, X: Array) -> Array:
    """Return the rows (x, y) turned by the angles whose cosines and sines are given."""
    rows = [[c * x - s * y, s * x + c * y] for (x, y), c, s in zip(X, cos.reshape(-1), sin.reshape(-1), strict=True)]
    return np.array(rows, dtype=object)


def rotation(draw: Draw) -> Iterator[Comparison]:
    """Build the rotations of two rows by any numbers in place of cosines and sines."""
    X, cos, sin = symbols("x", 2, 2), symbols("c", 2, 1), symbols("s", 2, 1)
    at = LinearMapAt(X, rotary(2, 2, cos=cos, sin=sin), (2, 2))
    yield from against(at, SymbolicReference({"X": X}, turned(cos, sin, X)))


def heads_and_back(draw: Draw) -> Iterator[Comparison]:
    """Build the split of rows into two heads, and that it is undone by merging them."""
    X = symbols("x", 2, 4)
    split = split_heads(2, 2, 2)
    by_head = np.concatenate([X[:, :2], X[:, 2:]], 0)
    yield from against(LinearMapAt(X, split, (4, 2)), SymbolicReference({"X": X}, by_head))
    yield from against(LinearMapAt(X, merge_heads(2, 2, 2) @ split, (2, 4)), SymbolicReference({"X": X}, X))


def group_norm(kind: str, width: int, *names: str) -> Build:
    """Build the norm of two groups of a row with eps = s^2 - (mean square), so that the scales are symbols."""

    def build(draw: Draw) -> Iterator[Comparison]:
        d = 2 * width
        point = {"X": symbols("x", 1, d), **{name: symbols(name, d) for name in names}}
        eps, s, parts, chosen = symbols("eps", 2), symbols("s", 2), [], {}
        for g in range(2):
            x = point["X"][:, g * width : (g + 1) * width]
            x = x - x.sum() / sympy.Integer(width) if kind == "layernorm" else x
            square = (x**2).sum() / sympy.Integer(width)
            parts.append(x / sympy.sqrt(square + eps[g]))
            chosen[eps[g]] = s[g] ** 2 - square
        output = np.concatenate(parts, 1) * point.get("gamma", np.ones(d, dtype=object))
        output = output if "beta" not in names else output + point["beta"]
        at = GroupNormRowsAt(**point, groups=2, eps=np.array(list(chosen.values()), dtype=object), kind=kind)
        yield from against(at, SymbolicReference(point, output, chosen))

    return build


SYMBOLIC_PARTS: tuple[Case, ...] = (
    Case("affine", "X W + b", "L=2 d=2 m=3", operation(AffineAt, affine, X=(2, 2), W=(2, 3), b=(3,))),
    Case(
        "head_products",
        "scores, two heads",
        "L=1 S=2 k=2",
        operation(
            lambda P, R: HeadProductAt(P, R, 2, "scores"),
            partial(head_product, "scores", c=1 / sympy.sqrt(2)),
            P=(2, 2),
            R=(4, 2),
        ),
    ),
    Case(
        "head_products",
        "mixtures, two heads",
        "L=1 S=2 v=2",
        operation(lambda P, R: HeadProductAt(P, R, 2, "mix"), partial(head_product, "mix"), P=(2, 2), R=(4, 2)),
    ),
    Case("linear_map", "rotary embedding", "L=2 w=2", rotation),
    Case("linear_map", "split and merge heads", "L=2 H=2 w=2", heads_and_back),
    Case("gains", "X diag(v)", "2x3", operation(ColumnScaleAt, lambda X, v: np.stack([x * v for x in X]), X=(2, 3), v=(3,))),
    Case("gains", "a X", "2x2", operation(ScalarScaleAt, lambda X, a: a[0] * X, X=(2, 2), a=(1,))),
    Case("gains", "X o Y", "2x2", operation(HadamardAt, lambda X, Y: X * Y, X=(2, 2), Y=(2, 2))),
    Case("group_normalization", "two groups, gamma, beta, eps", "L=1 d=4", group_norm("layernorm", 2, "gamma", "beta")),
    Case("group_normalization", "two groups, RMS norm, gamma, eps", "L=1 d=4", group_norm("rmsnorm", 2, "gamma")),
)
