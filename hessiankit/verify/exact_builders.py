"""Exact comparisons: closed forms with formulas of jets (rational arithmetic) or of symbols, a function for each operation.

The references index entries, head by head and row by row, and know nothing of commutations or Kronecker products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

from derivations.activation import KINDS, ActivationAt
from derivations.affine import AffineAt
from derivations.arrays import Array
from derivations.attention import AttentionAt
from derivations.composition import Composite, gauss_newton
from derivations.feedforward import FeedForwardAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, merge_heads, rotary, split_heads
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix
from derivations.multihead import MultiHeadAttentionAt
from derivations.normalization import LayerNormAt, RMSNormAt, theorem2_jacobian, theorem3_hessian
from derivations.operation import Operation, Renamed, Shape, Total, Variable
from derivations.pooling import MeanPoolHeadAt
from derivations.softmax import SoftmaxAt
from derivations.transformer import PostNormBlockAt
from hessiankit.verify import jets
from hessiankit.verify.exact_case import ExactComparison, ExactPoint, RationalDraw, against
from hessiankit.verify.exact_symbolic import SymbolicReference, symbols
from hessiankit.verify.jets import SCALE, FormalFunction, Jet, rational_turns, turned, values

Build = Callable[[RationalDraw], Iterator[ExactComparison]]


# Operations of named arguments ------------------------------------------------------------------------------------------


def operation(chapter: Callable[..., Operation], reference: Callable[..., Array], **shapes: Shape) -> Build:
    """Compare a closed form at drawn arguments of the given shapes with a formula of jets or symbols by the same names."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p = draw.point(**shapes)
        yield from against(chapter(**p.at), p.reference(reference(**p.variables)))

    return build


def linear_map(matrix: Matrix, reference: Callable[[Array], Array], before: Shape, after: Shape) -> Build:
    """Compare a linear map of vec_r with the entries that it should move."""
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


def rotation(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare the rotations of two rows by any numbers in place of cosines and sines."""
    cos, sin, p = symbols("c", 2, 1), symbols("s", 2, 1), draw.point(X=(2, 2))
    at = LinearMapAt(p.at["X"], rotary(2, 2, cos=cos, sin=sin), (2, 2))
    yield from against(at, p.reference(turned(p.variables["X"], 2, (cos, sin))))


def heads_and_back(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare the split of rows into two heads, and that it is undone by merging them."""
    p, split = draw.point(X=(2, 4)), split_heads(2, 2, 2)
    X = p.variables["X"]
    yield from against(LinearMapAt(p.at["X"], split, (4, 2)), p.reference(np.concatenate([X[:, :2], X[:, 2:]], 0)))
    yield from against(LinearMapAt(p.at["X"], merge_heads(2, 2, 2) @ split, (2, 4)), p.reference(X))


def head_product(heads: int, kind: str, P: Shape, R: Shape, scale: Any = None) -> Build:
    """Compare the scores or mixtures of some heads; without ``scale``, with the factor that they have by default."""
    default = 1 / sympy.sqrt(P[1]) if kind == "scores" else 1

    def reference(P: Array, R: Array) -> Array:
        rows = []
        for n, p in enumerate(P):
            h = n // (len(P) // heads)
            of_head = R[h * (len(R) // heads) : (h + 1) * (len(R) // heads)]
            others = of_head if kind == "scores" else of_head.T
            factor = default if scale is None else scale
            rows.append([sum(x * y for x, y in zip(p, other, strict=True)) * factor for other in others])
        return np.array(rows, dtype=object)

    return operation(lambda P, R: HeadProductAt(P, R, heads, kind, scale), reference, P=P, R=R)  # type: ignore[arg-type]


def column_scaled(X: Array, v: Array) -> Array:
    """Return X diag(v)."""
    return np.stack([x * v for x in X])


def scaled(X: Array, a: Array) -> Array:
    """Return a X."""
    factor: Any = a.reshape(-1)[0]
    return np.array([[x * factor for x in row] for row in X], dtype=object)


# Norms, softmax, activations: roots and exponentials are chosen -----------------------------------------------------------

NORMS: dict[str, tuple[Any, Callable[..., tuple[Array, Array]]]] = {
    "layernorm": (LayerNormAt, jets.layer_norm),
    "rmsnorm": (RMSNormAt, jets.rms_norm),
}


def normalization(kind: str, L: int, d: int, *names: str, eps: bool = True) -> Build:
    """Compare a norm of L rows with the named gains and shifts, with chosen eps or with eps = 0."""
    chapter, formula = NORMS[kind]

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        if eps:
            p = draw.point(X=(L, d), **dict.fromkeys(names, (d,)))
            output, chosen = formula(**p.variables, eps=draw.eps)
            yield from against(chapter(**p.at, eps=draw.closed(chosen)), p.reference(output))
        else:
            X = rows_of_rational_scale(draw, centred=kind == "layernorm")
            p = draw.lift({"X": X, **{name: draw.array(d) for name in names}})
            yield from against(chapter(**p.at, eps=0), p.reference(formula(**p.variables, eps=0)[0]))

    return build


def rows_of_rational_scale(draw: RationalDraw, *, centred: bool) -> Array:
    """Draw a 2 x 4 array whose rows have a positive rational standard deviation (or root mean square)."""

    def accepted(row: Array) -> bool:
        M = row - row.sum() * Fraction(1, 4) if centred else row
        q = 64 * (M * M).sum() * Fraction(1, 4)  # an integer: M has denominators of at most 8
        return q > 0 and math.isqrt(int(q)) ** 2 == q

    return draw.rows(2, 4, accepted)


def layer_norm_theorems(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare Theorems 2 and 3, the paper's own construction, with gamma = 1, beta = 0, eps = 0."""
    X = rows_of_rational_scale(draw, centred=True)
    p = draw.lift({"X": X})
    reference = p.reference(jets.layer_norm(p.variables["X"], eps=0)[0])
    yield ExactComparison("theorem2_jacobian", theorem2_jacobian(X), reference.jacobian("X"))
    yield ExactComparison("theorem3_hessian", theorem3_hessian(X), reference.hessian("X", "X"))


def group_norm(kind: str, L: int, width: int, *names: str) -> Build:
    """Compare the norm of two groups of features at chosen eps."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p = draw.point(X=(L, 2 * width), **dict.fromkeys(names, (2 * width,)))
        halves = [NORMS[kind][1](X, eps=draw.eps) for X in np.split(p.variables["X"], 2, 1)]
        output = np.concatenate([half for half, _ in halves], 1) * p.variables.get("gamma", 1) + p.variables.get("beta", 0)
        eps = draw.closed(np.array([chosen[row] for row in range(L) for _, chosen in halves], dtype=object))
        yield from against(GroupNormRowsAt(**p.at, groups=2, eps=eps, kind=kind), p.reference(output))

    return build


def softmax(L: int, S: int, mask: Array | None = None) -> Build:
    """Compare a row softmax of L x S logits."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p, exp = draw.point(T=(L, S)), draw.exponential()
        at = SoftmaxAt(p.at["T"], mask=mask, weights=draw.weights(p.at["T"], exp, mask))
        yield from against(at, p.reference(jets.softmax(p.variables["T"], exp, mask)))

    return build


def piecewise(kind: str, slope: Fraction) -> Build:
    """Compare relu or leaky relu off its kink."""
    function = np.frompyfunc(lambda x: x.relu(slope), 1, 1)
    return operation(lambda X: ActivationAt(kind, X, negative_slope=slope), lambda X: function(X), X=(2, 3))


def smooth(kind: str) -> Build:
    """Compare an activation of two symbols of either sign."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        X = np.array([sympy.symbols("x_0 x_1", real=True)], dtype=object)
        yield from against(ActivationAt(kind, X), SymbolicReference({"X": X}, np.frompyfunc(SMOOTH[kind], 1, 1)(X)))

    return build


SMOOTH: dict[str, Callable[[Any], Any]] = {
    "gelu": lambda x: x * (1 + sympy.erf(x / sympy.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + sympy.tanh(sympy.sqrt(2 / sympy.pi) * (x + sympy.Rational(44715, 10**6) * x**3))) / 2,
    "silu": lambda x: x / (1 + sympy.exp(-x)),
    "tanh": sympy.tanh,
}


@contextmanager
def formal_activation(seed: str, function: FormalFunction | None = None) -> Iterator[FormalFunction]:
    """Teach the activation chapter a kind "formal" whose value and derivatives are drawn: by default rationals."""
    function = function or FormalFunction(seed)

    def derivatives(x: Array, negative_slope: Any) -> tuple[Array, Array, Array]:
        taylor: Any = np.frompyfunc(function.taylor, 1, 3)(x)
        return taylor[0], taylor[1], taylor[2]

    KINDS["formal"] = derivatives
    try:
        yield function
    finally:
        del KINDS["formal"]


# Layers, losses, blocks -----------------------------------------------------------------------------------------------


def feed_forward(*biases: str, residual: bool = True, smooth: bool = False) -> Build:
    """Compare the feed-forward layer with L = 2, d_V = 3, d_ff = 4, with ReLU or with any smooth activation."""
    shapes = {"Y": (2, 3), "W_1": (3, 4), "W_2": (4, 3), "b_1": (4,), "b_2": (3,)}

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p = draw.point(**{name: shapes[name] for name in ("Y", "W_1", "W_2", *biases)})
        with formal_activation(draw.seed) as formal:
            output = jets.feed_forward(**p.variables, residual=residual, activation=formal if smooth else Jet.relu)
            at = FeedForwardAt(**p.at, residual=residual, activation="formal" if smooth else "relu")
            yield from against(at, p.reference(output))

    return build


def causal(L: int) -> Array:
    """Return the causal mask: True where a token attends to itself or to one before it."""
    return np.tril(np.ones((L, L), dtype=bool))


def attention(L: int, d_V: int, d_K: int, d_v: int, d_out: int | None = None, *, mask: Array | None = None) -> Build:
    """Compare attention, with W_O where there is a ``d_out``."""
    shapes = {"X": (L, d_V), "W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_v)}
    shapes |= {} if d_out is None else {"W_O": (d_v, d_out)}

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p, exp, options = draw.point(**shapes), draw.attention_exponential(), {"scale": draw.scale, "mask": mask}
        output = jets.attention(**p.variables, **options, exp=exp)  # type: ignore[arg-type]
        weights = draw.attention_weights(p.at, exp, mask)
        yield from against(AttentionAt(**p.at, **options, weights=weights), p.reference(output))

    return build


def multi_head_attention(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare two heads with L = 2, d_V = 3, d_K = 1, d_v = 1, d_out = 2, and all blocks across them."""
    X, exp = draw.array(2, 3), draw.exponential()
    shapes = {"W_Q": (3, 1), "W_K": (3, 1), "W_V": (3, 1), "W_O": (1, 2)}
    heads = [{name: draw.array(*shape) for name, shape in shapes.items()} for _ in range(2)]
    p = draw.lift({"X": X, **{f"{name}[{h}]": W for h, head in enumerate(heads) for name, W in head.items()}})
    of_head = [{name: p.variables[f"{name}[{h}]"] for name in shapes} for h in range(2)]
    output = sum(jets.attention(p.variables["X"], **head, scale=SCALE, exp=exp) for head in of_head)
    weights = [draw.attention_weights({"X": X, **head}, exp) for head in heads]
    yield from against(MultiHeadAttentionAt(X, heads, scale=SCALE, weights=weights), p.reference(output))  # type: ignore[arg-type]


def grouped_query_attention(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare causal attention of two query heads on one head of keys and values, with rotations, by the chain rule."""
    p = draw.point(X=(3, 3), W_Q=(3, 4), W_K=(3, 2), W_V=(3, 2))
    exp, mask = draw.exponential(), causal(3)
    X, W_Q, W_K, W_V = p.variables.values()
    heads = []
    for h in range(2):
        logits = SCALE * turned(X @ W_Q[:, 2 * h : 2 * h + 2], 3) @ turned(X @ W_K, 3).T
        heads.append(jets.softmax(logits, exp, mask) @ (X @ W_V))
    output = np.concatenate(heads, 1)

    cos, sin = rational_turns(3)
    tokens = Variable("X", p.at["X"])

    def projected(name: str, n_heads: int) -> Operation:
        affine = Composite(Renamed(AffineAt(p.at["X"], p.at[name]), {"W": name}), {"X": tokens})
        return moved(affine, split_heads(3, n_heads, 2, 2 // n_heads), (6, 2))

    Q, K = (moved(projected(name, n), rotary(3, 2, 2, cos=cos, sin=sin), (6, 2)) for name, n in (("W_Q", 2), ("W_K", 1)))
    scores = Composite(HeadProductAt(Q.value, K.value, 2, "scores", SCALE), {"P": Q, "R": K})
    stacked = np.concatenate([mask, mask])
    A = Composite(SoftmaxAt(scores.value, stacked, jets.softmax(scores.value, exp, stacked)), {"T": scores})
    V = projected("W_V", 1)
    mixed = Composite(HeadProductAt(A.value, V.value, 2, "mix"), {"P": A, "R": V})
    yield from against(moved(mixed, merge_heads(3, 2, 2), (3, 4)), p.reference(output))


def moved(inner: Operation, matrix: Matrix, shape: Shape) -> Operation:
    """Return an operation followed by a linear map of vec_r."""
    return Composite(LinearMapAt(inner.value, matrix, shape), {"X": inner})


def mean_squared_error(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare the mean squared error of a 2 x 3 output."""
    p, target = draw.point(Z=(2, 3)), draw.array(2, 3)
    yield from against(MeanSquaredErrorAt(p.at["Z"], target), p.reference(jets.mean_squared_error(p.variables["Z"], target)))


def cross_entropy(*labels: int) -> Build:
    """Compare the cross entropy of rows of 3 classes; its value is a logarithm and is left out."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p, exp = draw.point(logits=(len(labels), 3)), draw.exponential()
        output = jets.cross_entropy(p.variables["logits"], labels, exp)
        at = CrossEntropyAt(p.at["logits"], labels, weights=draw.weights(p.at["logits"], exp))
        yield from against(at, p.reference(output), value=False)

    return build


def classifier(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare the cross entropy of the mean-pool head, whose loss Hessian couples all of Z, W_c and b_c."""
    p, exp = draw.point(Z=(2, 3), W_c=(3, 4), b_c=(4,)), draw.exponential()
    head = MeanPoolHeadAt(**p.at)
    output = jets.cross_entropy(jets.mean_pool_head(**p.variables), [2], exp)
    loss = CrossEntropyAt(head.value, [2], weights=jets.softmax(head.value, exp))
    yield from against(Composite(loss, {"logits": head}), p.reference(output), value=False)


def composition(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare layer norm of a residual feed-forward layer, its name X used twice, and the Gauss-Newton parts of its loss."""
    p = draw.point(X=(2, 3), W_1=(3, 1), W_2=(1, 3), gamma=(3,))
    v, at = p.variables, p.at
    with formal_activation(draw.seed) as formal:
        network = jets.feed_forward(v["X"], v["W_1"], v["W_2"], residual=False, activation=formal)
        output, eps = jets.layer_norm(v["X"] + network, v["gamma"])
        branch = FeedForwardAt(at["X"], at["W_1"], at["W_2"], activation="formal", residual=False)
        residual = Total(Variable("X", at["X"]), Renamed(branch, {"Y": "X"}))
        model = Composite(LayerNormAt(residual.value, at["gamma"], eps=eps), {"X": residual})
        yield from against(model, p.reference(output))
        target = draw.array(2, 3)
        loss = p.reference(jets.mean_squared_error(output, target))
        for i in at:
            for j in at:
                total = gauss_newton(MeanSquaredErrorAt(model.value, target), model, i, j).total
                yield ExactComparison(f"gauss_newton({i!r}, {j!r})", total, loss.hessian(i, j))


BLOCK_SHAPES = {
    "X": (2, 3), "W_Q": (3, 1), "W_K": (3, 1), "W_V": (3, 3), "W_O": (3, 3), "W_1": (3, 4), "W_2": (4, 3),
    "b_1": (4,), "b_2": (3,), "gamma_1": (3,), "beta_1": (3,), "gamma_2": (3,), "beta_2": (3,),
}  # fmt: skip
WEIGHTS = ("W_Q", "W_K", "W_V", "W_1", "W_2")


def block_point(draw: RationalDraw, *extra: str) -> ExactPoint:
    """Return the arguments of the post-norm block with L = 2, d_V = 3, d_K = 1, d_ff = 4 and the named extra parameters."""
    return draw.point(**{name: BLOCK_SHAPES[name] for name in ("X", *WEIGHTS, *extra)})


def block_at(draw: RationalDraw, at: dict[str, Array], exp: Any, eps: tuple[Array, Array], **options: Any) -> PostNormBlockAt:
    """Return the closed form of a block, at the rational attention weights of its arguments."""
    return PostNormBlockAt(**at, eps=eps, scale=SCALE, weights=draw.attention_weights(at, exp, options.get("mask")), **options)


def post_norm_block(*extra: str, mask: Array | None = None, smooth: bool = False) -> Build:
    """Compare the whole post-norm block, with the named extra parameters."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        p, exp = block_point(draw, *extra), draw.exponential()
        with formal_activation(draw.seed) as formal:
            activation = formal if smooth else Jet.relu
            output, eps = jets.post_norm_block(p.variables, scale=SCALE, exp=exp, mask=mask, activation=activation)
            at = block_at(draw, p.at, exp, eps, mask=mask, activation="formal" if smooth else "relu")
            yield from against(at, p.reference(output))

    return build


def block_loss(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare the 25 blocks of Eq. 7, the Hessian of the squared error of a block in its five weights."""
    p, exp, target = block_point(draw), draw.exponential(), draw.array(2, 3)
    Z, eps = jets.post_norm_block(p.variables, scale=SCALE, exp=exp)
    block, loss = block_at(draw, p.at, exp, eps), p.reference(jets.mean_squared_error(Z, target))
    for i in WEIGHTS:
        for j in WEIGHTS:
            yield ExactComparison(f"loss_hessian({i!r}, {j!r})", block.loss_hessian(target, i, j).total, loss.hessian(i, j))


def two_blocks(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Compare two stacked post-norm blocks with L = 2, d_V = 3, d_K = d_v = d_ff = 1: the chain rule to depth two."""
    shapes = {"W_Q": (3, 1), "W_K": (3, 1), "W_V": (3, 1), "W_O": (1, 3), "W_1": (3, 1), "W_2": (1, 3)}
    layers = [{name: draw.array(*shape) for name, shape in shapes.items()} for _ in range(2)]
    exp, X = draw.exponential(), draw.array(2, 3)
    p = draw.lift({"X": X, **{f"{name}[{n}]": W for n, layer in enumerate(layers) for name, W in layer.items()}})
    whole: Operation = Variable("X", X)
    output, value = p.variables["X"], X
    with formal_activation(draw.seed) as formal:
        for n, layer in enumerate(layers):
            lifted = {name: p.variables[f"{name}[{n}]"] for name in shapes}
            output, eps = jets.post_norm_block({"X": output, **lifted}, scale=SCALE, exp=exp, activation=formal)
            block = block_at(draw, {"X": value, **layer}, exp, eps, activation="formal")
            renamed = Renamed(block, {name: f"{name}[{n}]" for name in shapes})
            whole, value = Composite(renamed, {"X": whole}), values(output)
        yield from against(whole, p.reference(output))
