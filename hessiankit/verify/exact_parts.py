"""The rational cases of the chapters that layers are put together from: maps, products, gains, embeddings, group norms.

The references index entries, head by head and row by row, and know nothing of commutations or Kronecker products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from derivations.affine import AffineAt
from derivations.arrays import Array
from derivations.composition import Composite
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, mean_rows, merge_heads, rotary, split_heads, take_row
from derivations.matrix import Matrix
from derivations.operation import Operation, Renamed, Shape, Variable
from derivations.softmax import SoftmaxAt
from derivations.token_embedding import TokenEmbeddingAt
from hessiankit.verify import jets
from hessiankit.verify.exact_case import Case, Comparison, Draw, JetReference, against
from hessiankit.verify.jets import SCALE, FormalExponential, Variables, rational_turns, turned

Build = Callable[[Draw], Iterator[Comparison]]


def operation(chapter: Callable[..., Operation], reference: Callable[..., Array], **shapes: Shape) -> Build:
    """Build a chapter at drawn arguments of the given shapes, against a function of jets by the same names."""

    def build(draw: Draw) -> Iterator[Comparison]:
        point = {name: draw.array(*shape) for name, shape in shapes.items()}
        variables = Variables(point)
        yield from against(chapter(**point), JetReference(variables, reference(**variables.arrays)))

    return build


def linear_map(matrix: Matrix, reference: Callable[[Array], Array], before: Shape, after: Shape) -> Build:
    """Build a linear map of vec_r against the entries it should move."""
    return operation(lambda X: LinearMapAt(X, matrix, after), reference, X=before)


def by_head(X: Array, heads: int, repeat: int = 1) -> Array:
    """Return the rows (head, copy, token) of an L x (heads width) array."""
    width = X.shape[1] // heads
    rows = [[X[t, h * width + k] for k in range(width)] for h in range(heads) for _ in range(repeat) for t in range(len(X))]
    return np.array(rows, dtype=object)


def by_token(X: Array, heads: int) -> Array:
    """Return the heads of one token side by side."""
    length = len(X) // heads
    return np.array([[x for h in range(heads) for x in X[h * length + t]] for t in range(length)], dtype=object)


def head_product(heads: int, kind: str) -> Build:
    """Build scores or mixtures with L = 2, S = 3, k = 2 and (mixtures) v = 4."""
    k, columns = (2, 2) if kind == "scores" else (3, 4)

    def chapter(P: Array, R: Array) -> Operation:
        return HeadProductAt(P, R, heads, kind, SCALE)  # type: ignore[arg-type]

    def reference(P: Array, R: Array) -> Array:
        rows = []
        for n, p in enumerate(P):
            of_head = R[n // 2 * 3 : n // 2 * 3 + 3]
            others = of_head if kind == "scores" else of_head.T
            rows.append([sum(x * y for x, y in zip(p, other, strict=True)) * SCALE for other in others])
        return np.array(rows, dtype=object)

    return operation(chapter, reference, P=(2 * heads, k), R=(3 * heads, columns))


def group_norm(*names: str, kind: str = "layernorm") -> Build:
    """Build the norm of two groups of three features with L = 2, at chosen eps."""

    def build(draw: Draw) -> Iterator[Comparison]:
        point = {"X": draw.array(2, 6), **{name: draw.array(6) for name in names}}
        variables = Variables(point)
        norm = jets.layer_norm if kind == "layernorm" else jets.rms_norm
        halves = [norm(variables["X"][:, start : start + 3]) for start in (0, 3)]
        output = np.concatenate([half for half, _ in halves], 1)
        eps = [half[row] for row in range(2) for _, half in halves]
        if "gamma" in names:
            output = output * variables["gamma"]
        if "beta" in names:
            output = output + variables["beta"]
        yield from against(GroupNormRowsAt(**point, groups=2, eps=eps, kind=kind), JetReference(variables, output))

    return build


def grouped_query_attention(draw: Draw) -> Iterator[Comparison]:
    """Build causal attention of two query heads on one head of keys and values, with rotations, by the chain rule."""
    shapes = {"X": (3, 3), "W_Q": (3, 4), "W_K": (3, 2), "W_V": (3, 2)}
    point = {name: draw.array(*shape) for name, shape in shapes.items()}
    variables, exp, mask = Variables(point), FormalExponential(draw.seed), np.tril(np.ones((3, 3), dtype=bool))
    X, W_Q, W_K, W_V = variables.arrays.values()
    heads = []
    for h in range(2):
        logits = SCALE * turned(X @ W_Q[:, 2 * h : 2 * h + 2], 3) @ turned(X @ W_K, 3).T
        heads.append(jets.softmax(logits, exp, mask) @ (X @ W_V))
    output = np.concatenate(heads, 1)

    cos, sin = rational_turns(3)
    tokens = Variable("X", point["X"])

    def projected(name: str, n_heads: int) -> Operation:
        affine = Composite(Renamed(AffineAt(point["X"], point[name]), {"W": name}), {"X": tokens})
        return moved(affine, split_heads(3, n_heads, 2, 2 // n_heads), (6, 2))

    Q, K = (moved(projected(name, n), rotary(3, 2, 2, cos=cos, sin=sin), (6, 2)) for name, n in (("W_Q", 2), ("W_K", 1)))
    scores = Composite(HeadProductAt(Q.value, K.value, 2, "scores", SCALE), {"P": Q, "R": K})
    stacked = np.concatenate([mask, mask])
    A = Composite(SoftmaxAt(scores.value, stacked, jets.softmax(scores.value, exp, stacked)), {"T": scores})
    V = projected("W_V", 1)
    mixed = Composite(HeadProductAt(A.value, V.value, 2, "mix"), {"P": A, "R": V})
    yield from against(moved(mixed, merge_heads(3, 2, 2), (3, 4)), JetReference(variables, output))


def moved(inner: Operation, matrix: Matrix, shape: Shape) -> Operation:
    """Return an operation followed by a linear map of vec_r."""
    return Composite(LinearMapAt(inner.value, matrix, shape), {"X": inner})


def _taken(E: Array) -> Array:
    return np.stack([E[3], E[0], E[3]])


def _scaled(X: Array, a: Array) -> Array:
    factor: Any = a.reshape(-1)[0]
    return np.array([[x * factor for x in row] for row in X], dtype=object)


_COS, _SIN = rational_turns(3)

PARTS: tuple[Case, ...] = (
    Case("affine", "X W", "L=2 d=3 m=4", operation(AffineAt, lambda X, W: X @ W, X=(2, 3), W=(3, 4))),
    Case("affine", "X W + b", "L=2 d=3 m=4", operation(AffineAt, jets.linear, X=(2, 3), W=(3, 4), b=(4,))),
    Case("linear_map", "split heads", "L=3 H=2 w=2", linear_map(split_heads(3, 2, 2), lambda X: by_head(X, 2), (3, 4), (6, 2))),
    Case(
        "linear_map",
        "split and repeat heads",
        "L=2 H=2 w=3 r=2",
        linear_map(split_heads(2, 2, 3, 2), lambda X: by_head(X, 2, 2), (2, 6), (8, 3)),
    ),
    Case("linear_map", "merge heads", "L=3 H=2 w=2", linear_map(merge_heads(3, 2, 2), lambda X: by_token(X, 2), (6, 2), (3, 4))),
    Case(
        "linear_map",
        "rotary embedding",
        "L=3 H=2 w=2",
        linear_map(rotary(3, 2, 2, cos=_COS, sin=_SIN), lambda X: turned(X, 3), (6, 2), (6, 2)),
    ),
    Case("linear_map", "last row", "L=3 d=2", linear_map(take_row(3, 2, -1), lambda X: X[2:], (3, 2), (1, 2))),
    Case(
        "linear_map",
        "mean of rows",
        "L=3 d=2",
        linear_map(mean_rows(3, 2), lambda X: X.sum(0).reshape(1, -1) / 3, (3, 2), (1, 2)),
    ),
    Case("head_products", "scores, one head", "L=2 S=3 k=2", head_product(1, "scores")),
    Case("head_products", "scores, two heads", "L=2 S=3 k=2", head_product(2, "scores")),
    Case("head_products", "mixtures, one head", "L=2 S=3 v=4", head_product(1, "mix")),
    Case("head_products", "mixtures, two heads", "L=2 S=3 v=4", head_product(2, "mix")),
    Case("head_products", "grouped queries, rotations, causal mask, all pairs", "L=3 d=3 H=2 w=2", grouped_query_attention),
    Case("gains", "X diag(v)", "2x3", operation(ColumnScaleAt, lambda X, v: X @ np.diag(v), X=(2, 3), v=(3,))),
    Case("gains", "a X", "2x3", operation(ScalarScaleAt, _scaled, X=(2, 3), a=())),
    Case("gains", "X o Y", "2x3", operation(HadamardAt, lambda X, Y: X * Y, X=(2, 3), Y=(2, 3))),
    Case("token_embedding", "rows of E", "L=3 V=4 d=2", operation(lambda E: TokenEmbeddingAt([3, 0, 3], E), _taken, E=(4, 2))),
    Case("group_normalization", "two groups", "L=2 d=6", group_norm()),
    Case("group_normalization", "two groups, gamma, beta", "L=2 d=6", group_norm("gamma", "beta")),
    Case("group_normalization", "two groups, RMS norm, gamma", "L=2 d=6", group_norm("gamma", kind="rmsnorm")),
)
