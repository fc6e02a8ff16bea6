"""The rational cases: closed forms at rational points against jets, at tiny sizes.

Attention, the feed-forward layer and the norms have all their dimensions different, so that a swapped index or a turned
commutation shows. Blocks and compositions, which are made of them, keep the widths small.

The references index entries, head by head and row by row, and know nothing of commutations or Kronecker products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np

from derivations.activation import KINDS, ActivationAt
from derivations.affine import AffineAt
from derivations.arrays import Array
from derivations.attention import AttentionAt
from derivations.composition import Composite, gauss_newton
from derivations.feedforward import FeedForwardAt
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, mean_rows, merge_heads, rotary, split_heads, take_row
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix
from derivations.multihead import MultiHeadAttentionAt
from derivations.normalization import LayerNormAt, RMSNormAt, theorem2_jacobian, theorem3_hessian
from derivations.operation import Operation, Renamed, Shape, Total, Variable
from derivations.pooling import MeanPoolHeadAt
from derivations.softmax import SoftmaxAt
from derivations.token_embedding import TokenEmbeddingAt
from derivations.transformer import PostNormBlockAt
from hessiankit.verify import jets
from hessiankit.verify.exact_case import ExactCase, ExactComparison, JetReference, RationalDraw, against
from hessiankit.verify.exact_vecr import on_jets, vecr_rules
from hessiankit.verify.jets import SCALE, FormalExponential, FormalFunction, Jet, Variables, rational_turns, turned, values

Build = Callable[[RationalDraw], Iterator[ExactComparison]]


def operation(chapter: Callable[..., Operation], reference: Callable[..., Array], **shapes: Shape) -> Build:
    """Build a chapter at drawn arguments of the given shapes, against a function of jets by the same names."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
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

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
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


def grouped_query_attention(draw: RationalDraw) -> Iterator[ExactComparison]:
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

PARTS: tuple[ExactCase, ...] = (
    ExactCase("affine", "X W", "L=2 d=3 m=4", operation(AffineAt, lambda X, W: X @ W, X=(2, 3), W=(3, 4))),
    ExactCase("affine", "X W + b", "L=2 d=3 m=4", operation(AffineAt, jets.linear, X=(2, 3), W=(3, 4), b=(4,))),
    ExactCase(
        "linear_map", "split heads", "L=3 H=2 w=2", linear_map(split_heads(3, 2, 2), lambda X: by_head(X, 2), (3, 4), (6, 2))
    ),
    ExactCase(
        "linear_map",
        "split and repeat heads",
        "L=2 H=2 w=3 r=2",
        linear_map(split_heads(2, 2, 3, 2), lambda X: by_head(X, 2, 2), (2, 6), (8, 3)),
    ),
    ExactCase(
        "linear_map", "merge heads", "L=3 H=2 w=2", linear_map(merge_heads(3, 2, 2), lambda X: by_token(X, 2), (6, 2), (3, 4))
    ),
    ExactCase(
        "linear_map",
        "rotary embedding",
        "L=3 H=2 w=2",
        linear_map(rotary(3, 2, 2, cos=_COS, sin=_SIN), lambda X: turned(X, 3), (6, 2), (6, 2)),
    ),
    ExactCase("linear_map", "last row", "L=3 d=2", linear_map(take_row(3, 2, -1), lambda X: X[2:], (3, 2), (1, 2))),
    ExactCase(
        "linear_map",
        "mean of rows",
        "L=3 d=2",
        linear_map(mean_rows(3, 2), lambda X: X.sum(0).reshape(1, -1) / 3, (3, 2), (1, 2)),
    ),
    ExactCase("head_products", "scores, one head", "L=2 S=3 k=2", head_product(1, "scores")),
    ExactCase("head_products", "scores, two heads", "L=2 S=3 k=2", head_product(2, "scores")),
    ExactCase("head_products", "mixtures, one head", "L=2 S=3 v=4", head_product(1, "mix")),
    ExactCase("head_products", "mixtures, two heads", "L=2 S=3 v=4", head_product(2, "mix")),
    ExactCase("head_products", "grouped queries, rotations, causal mask, all pairs", "L=3 d=3 H=2 w=2", grouped_query_attention),
    ExactCase("gains", "X diag(v)", "2x3", operation(ColumnScaleAt, lambda X, v: X @ np.diag(v), X=(2, 3), v=(3,))),
    ExactCase("gains", "a X", "2x3", operation(ScalarScaleAt, _scaled, X=(2, 3), a=())),
    ExactCase("gains", "X o Y", "2x3", operation(HadamardAt, lambda X, Y: X * Y, X=(2, 3), Y=(2, 3))),
    ExactCase(
        "token_embedding", "rows of E", "L=3 V=4 d=2", operation(lambda E: TokenEmbeddingAt([3, 0, 3], E), _taken, E=(4, 2))
    ),
    ExactCase("group_normalization", "two groups", "L=2 d=6", group_norm()),
    ExactCase("group_normalization", "two groups, gamma, beta", "L=2 d=6", group_norm("gamma", "beta")),
    ExactCase("group_normalization", "two groups, RMS norm, gamma", "L=2 d=6", group_norm("gamma", kind="rmsnorm")),
)


def normalization(kind: str, *names: str, eps: bool = True) -> Build:
    """Build a layer norm or RMS norm with the named gains and shifts, with chosen eps or (d = 4) with eps = 0."""
    kinds: dict[str, tuple[Any, Any]] = {"layer": (LayerNormAt, jets.layer_norm), "rms": (RMSNormAt, jets.rms_norm)}
    operation, reference = kinds[kind]

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        d = 3 if eps else 4
        X = draw.array(2, d) if eps else rows_of_rational_scale(draw, centred=kind == "layer")
        point = {"X": X, **{name: draw.array(d) for name in names}}
        variables = Variables(point)
        output, used = reference(**variables.arrays, eps=None if eps else 0)
        yield from against(operation(**point, eps=used if eps else 0), JetReference(variables, output))

    return build


def rows_of_rational_scale(draw: RationalDraw, *, centred: bool) -> Array:
    """Draw a 2 x 4 array whose rows have a positive rational standard deviation (or root mean square)."""

    def accepted(row: Array) -> bool:
        M = row - row.sum() * Fraction(1, 4) if centred else row
        q = 64 * (M * M).sum() * Fraction(1, 4)  # an integer: M has denominators of at most 8
        return q > 0 and math.isqrt(int(q)) ** 2 == q

    return draw.rows(2, 4, accepted)


def layer_norm_theorems(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build Theorems 2 and 3, the paper's own construction, with gamma = 1, beta = 0, eps = 0."""
    X = rows_of_rational_scale(draw, centred=True)
    variables = Variables({"X": X})
    reference = JetReference(variables, jets.layer_norm(variables["X"], eps=0)[0])
    yield ExactComparison("theorem2_jacobian", theorem2_jacobian(X), reference.jacobian("X"))
    yield ExactComparison("theorem3_hessian", theorem3_hessian(X), reference.hessian("X", "X"))


def softmax(mask: Array | None = None) -> Build:
    """Build a row softmax at formal weights."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        T, exp = draw.array(2, 3), FormalExponential(draw.seed)
        variables = Variables({"T": T})
        at = SoftmaxAt(T, mask=mask, weights=jets.softmax(T, exp, mask))
        yield from against(at, JetReference(variables, jets.softmax(variables["T"], exp, mask)))

    return build


def activation(kind: str, slope: Fraction) -> Build:
    """Build relu or leaky relu off its kink."""

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        X = draw.array(2, 3)
        variables = Variables({"X": X})
        output = np.frompyfunc(lambda x: x.relu(slope), 1, 1)(variables["X"])
        yield from against(ActivationAt(kind, X, negative_slope=slope), JetReference(variables, output))

    return build


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


def feed_forward(*biases: str, residual: bool = True, smooth: bool = False) -> Build:
    """Build the feed-forward layer with L = 2, d_V = 3, d_ff = 4, with ReLU or with any smooth activation."""
    shapes = {"Y": (2, 3), "W_1": (3, 4), "W_2": (4, 3), "b_1": (4,), "b_2": (3,)}

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {name: draw.array(*shapes[name]) for name in ("Y", "W_1", "W_2", *biases)}
        variables = Variables(point)
        with formal_activation(draw.seed) as formal:
            output = jets.feed_forward(**variables.arrays, residual=residual, activation=formal if smooth else Jet.relu)
            at = FeedForwardAt(**point, residual=residual, activation="formal" if smooth else "relu")
            yield from against(at, JetReference(variables, output))

    return build


def causal(L: int) -> Array:
    """Return the mask that lets a token see itself and what is before it."""
    return np.tril(np.ones((L, L), dtype=bool))


def attention(projected: bool = False, mask: Array | None = None) -> Build:
    """Build attention with L = 3, d_V = 2, d_K = 4, or with W_O and L = 2, d_V = 3, d_K = 4, d_v = 5, d_out = 6."""
    L, d_V, d_v = (2, 3, 5) if projected else (3, 2, 2)
    shapes = {"X": (L, d_V), "W_Q": (d_V, 4), "W_K": (d_V, 4), "W_V": (d_V, d_v), "W_O": (d_v, 6)}

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {name: draw.array(*shape) for name, shape in shapes.items() if projected or name != "W_O"}
        options: dict[str, Any] = {"scale": SCALE, "mask": mask}
        exp, variables = FormalExponential(draw.seed), Variables(point)
        output = jets.attention(**variables.arrays, **options, exp=exp)
        weights = attention_weights(point["X"], point, exp, mask)
        yield from against(AttentionAt(**point, **options, weights=weights), JetReference(variables, output))

    return build


def multi_head_attention(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build two heads with L = 2, d_V = 3, d_K = 1, d_v = 1, d_out = 2, and all blocks across them."""
    X, exp = draw.array(2, 3), FormalExponential(draw.seed)
    shapes = {"W_Q": (3, 1), "W_K": (3, 1), "W_V": (3, 1), "W_O": (1, 2)}
    heads = [{name: draw.array(*shape) for name, shape in shapes.items()} for _ in range(2)]
    variables = Variables({"X": X, **{f"{name}[{h}]": W for h, head in enumerate(heads) for name, W in head.items()}})
    of_head = [{name: variables[f"{name}[{h}]"] for name in shapes} for h in range(2)]
    output = sum(jets.attention(variables["X"], **head, scale=SCALE, exp=exp) for head in of_head)
    at = MultiHeadAttentionAt(X, heads, scale=SCALE, weights=[attention_weights(X, head, exp) for head in heads])
    yield from against(at, JetReference(variables, output))


def attention_weights(X: Array, point: dict[str, Array], exp: FormalExponential, mask: Array | None = None) -> Array:
    """Return the rational attention matrix at a point: the softmax of the logits with formal weights."""
    return jets.softmax(jets.attention_logits(X, point["W_Q"], point["W_K"], SCALE), exp, mask)


def mean_squared_error(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the mean squared error of a 2 x 3 output."""
    Z, target = draw.array(2, 3), draw.array(2, 3)
    variables = Variables({"Z": Z})
    output = jets.mean_squared_error(variables["Z"], target)
    yield from against(MeanSquaredErrorAt(Z, target), JetReference(variables, output))


def cross_entropy(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the cross entropy of 2 rows of 3 classes at formal weights; its value is a logarithm and is left out."""
    logits, labels, exp = draw.array(2, 3), [2, 0], FormalExponential(draw.seed)
    variables = Variables({"logits": logits})
    output = jets.cross_entropy(variables["logits"], labels, exp)
    at = CrossEntropyAt(logits, labels, weights=jets.softmax(logits, exp))
    yield from against(at, JetReference(variables, output), value=False)


def mean_pool_head(*biases: str) -> Build:
    """Build the mean-pool head with L = 2, d_V = 3, C = 4."""
    shapes = {"Z": (2, 3), "W_c": (3, 4), "b_c": (4,)}

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {name: draw.array(*shapes[name]) for name in ("Z", "W_c", *biases)}
        variables = Variables(point)
        yield from against(MeanPoolHeadAt(**point), JetReference(variables, jets.mean_pool_head(**variables.arrays)))

    return build


def composition(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build layer norm of a residual feed-forward layer, its name X used twice, and the Gauss-Newton parts of its loss."""
    point = {"X": draw.array(2, 3), "W_1": draw.array(3, 1), "W_2": draw.array(1, 3), "gamma": draw.array(3)}
    variables = Variables(point)
    v = variables.arrays
    with formal_activation(draw.seed) as formal:
        network = jets.feed_forward(v["X"], v["W_1"], v["W_2"], residual=False, activation=formal)
        output, eps = jets.layer_norm(v["X"] + network, v["gamma"])
        branch = FeedForwardAt(point["X"], point["W_1"], point["W_2"], activation="formal", residual=False)
        residual = Total(Variable("X", point["X"]), Renamed(branch, {"Y": "X"}))
        model = Composite(LayerNormAt(residual.value, point["gamma"], eps=eps), {"X": residual})
        yield from against(model, JetReference(variables, output))
        target = draw.array(2, 3)
        loss = JetReference(variables, jets.mean_squared_error(output, target))
        for i in point:
            for j in point:
                total = gauss_newton(MeanSquaredErrorAt(model.value, target), model, i, j).total
                yield ExactComparison(f"gauss_newton({i!r}, {j!r})", total, loss.hessian(i, j))


def classifier(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the cross entropy of the mean-pool head, whose loss Hessian couples all of Z, W_c and b_c."""
    point = {"Z": draw.array(2, 3), "W_c": draw.array(3, 4), "b_c": draw.array(4)}
    exp, variables, head = FormalExponential(draw.seed), Variables(point), MeanPoolHeadAt(**point)
    output = jets.cross_entropy(jets.mean_pool_head(**variables.arrays), [2], exp)
    loss = CrossEntropyAt(head.value, [2], weights=jets.softmax(head.value, exp))
    yield from against(Composite(loss, {"logits": head}), JetReference(variables, output), value=False)


BLOCK_SHAPES = {
    "X": (2, 3), "W_Q": (3, 1), "W_K": (3, 1), "W_V": (3, 3), "W_O": (3, 3), "W_1": (3, 4), "W_2": (4, 3),
    "b_1": (4,), "b_2": (3,), "gamma_1": (3,), "beta_1": (3,), "gamma_2": (3,), "beta_2": (3,),
}  # fmt: skip


def post_norm_block(*extra: str, mask: Array | None = None, smooth: bool = False) -> Build:
    """Build the whole post-norm block with L = 2, d_V = 3, d_K = 1, d_ff = 4 and the named extra parameters."""
    names = ("X", "W_Q", "W_K", "W_V", "W_1", "W_2", *extra)

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        point = {name: draw.array(*BLOCK_SHAPES[name]) for name in names}
        exp, variables = FormalExponential(draw.seed), Variables(point)
        with formal_activation(draw.seed) as formal:
            activation = formal if smooth else Jet.relu
            output, eps = jets.post_norm_block(variables.arrays, scale=SCALE, exp=exp, mask=mask, activation=activation)
            options: dict[str, Any] = {"mask": mask, "activation": "formal" if smooth else "relu"}
            yield from against(_block(point, exp, eps, **options), JetReference(variables, output))

    return build


def _block(point: dict[str, Array], exp: FormalExponential, eps: tuple[Array, Array], **options: Any) -> PostNormBlockAt:
    """Return the chapter's block at a point, at the rational attention weights there."""
    weights = attention_weights(point["X"], point, exp, options.get("mask"))
    return PostNormBlockAt(**point, eps=eps, scale=SCALE, weights=weights, **options)


def block_loss(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build the 25 blocks of Eq. 7, the Hessian of the squared error of a block in its five weights."""
    weights = ("W_Q", "W_K", "W_V", "W_1", "W_2")
    point = {name: draw.array(*BLOCK_SHAPES[name]) for name in ("X", *weights)}
    exp, target, variables = FormalExponential(draw.seed), draw.array(2, 3), Variables(point)
    Z, eps = jets.post_norm_block(variables.arrays, scale=SCALE, exp=exp)
    block, loss = _block(point, exp, eps), JetReference(variables, jets.mean_squared_error(Z, target))
    for i in weights:
        for j in weights:
            yield ExactComparison(f"loss_hessian({i!r}, {j!r})", block.loss_hessian(target, i, j).total, loss.hessian(i, j))


def two_blocks(draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build two stacked post-norm blocks with L = 2, d_V = 3, d_K = d_v = d_ff = 1: the chain rule to depth two."""
    shapes = {"W_Q": (3, 1), "W_K": (3, 1), "W_V": (3, 1), "W_O": (1, 3), "W_1": (3, 1), "W_2": (1, 3)}
    layers = [{name: draw.array(*shape) for name, shape in shapes.items()} for _ in range(2)]
    exp, X = FormalExponential(draw.seed), draw.array(2, 3)
    variables = Variables({"X": X, **{f"{name}[{n}]": W for n, layer in enumerate(layers) for name, W in layer.items()}})
    whole: Operation = Variable("X", X)
    output, value = variables["X"], X
    with formal_activation(draw.seed) as formal:
        for n, layer in enumerate(layers):
            lifted = {name: variables[f"{name}[{n}]"] for name in shapes}
            output, eps = jets.post_norm_block({"X": output, **lifted}, scale=SCALE, exp=exp, activation=formal)
            block = _block({"X": value, **layer}, exp, eps, activation="formal")
            renamed = Renamed(block, {name: f"{name}[{n}]" for name in shapes})
            whole, value = Composite(renamed, {"X": whole}), values(output)
        yield from against(whole, JetReference(variables, output))


_BIASES = ("b_1", "b_2")
_GAINS = ("gamma_1", "beta_1", "gamma_2", "beta_2")

RATIONAL: tuple[ExactCase, ...] = (
    ExactCase("vecr", "rules", "X 2x3, Y 3x4, D 2x2", lambda draw: vecr_rules(draw, on_jets)),
    ExactCase("normalization", "layer norm", "L=2 d=3", normalization("layer")),
    ExactCase("normalization", "layer norm, gamma, beta", "L=2 d=3", normalization("layer", "gamma", "beta")),
    ExactCase("normalization", "layer norm, gamma, beta, eps=0", "L=2 d=4", normalization("layer", "gamma", "beta", eps=False)),
    ExactCase("normalization", "layer norm, Theorems 2 and 3", "L=2 d=4", layer_norm_theorems),
    ExactCase("normalization", "RMS norm", "L=2 d=3", normalization("rms")),
    ExactCase("normalization", "RMS norm, gamma", "L=2 d=3", normalization("rms", "gamma")),
    ExactCase("normalization", "RMS norm, gamma, eps=0", "L=2 d=4", normalization("rms", "gamma", eps=False)),
    ExactCase("softmax", "softmax", "L=2 S=3", softmax()),
    ExactCase("softmax", "softmax, mask", "L=2 S=3", softmax(np.array([[True, False, True], [True, True, True]]))),
    ExactCase("activation", "relu", "2x3", activation("relu", Fraction(0))),
    ExactCase("activation", "leaky relu", "2x3", activation("leaky_relu", Fraction(1, 3))),
    ExactCase("feedforward", "relu", "L=2 d_V=3 d_ff=4", feed_forward()),
    ExactCase("feedforward", "relu, biases", "L=2 d_V=3 d_ff=4", feed_forward(*_BIASES)),
    ExactCase("feedforward", "relu, biases, no residual", "L=2 d_V=3 d_ff=4", feed_forward(*_BIASES, residual=False)),
    ExactCase("feedforward", "any smooth activation, biases", "L=2 d_V=3 d_ff=4", feed_forward(*_BIASES, smooth=True)),
    ExactCase("attention", "nine Phi, X blocks", "L=3 d_V=2 d_K=4", attention()),
    ExactCase("attention", "nine Phi, X blocks, causal mask", "L=3 d_V=2 d_K=4", attention(mask=causal(3))),
    ExactCase("attention", "sixteen Phi, X blocks, W_O", "L=2 d_V=3 d_K=4 d_v=5 d_out=6", attention(projected=True)),
    ExactCase("attention", "two heads", "L=2 d_V=3 d_K=1 d_v=1 d_out=2", multi_head_attention),
    *PARTS,
    ExactCase("loss", "mean squared error", "2x3", mean_squared_error),
    ExactCase("loss", "cross entropy", "L=2 C=3", cross_entropy),
    ExactCase("pooling", "mean-pool head", "L=2 d_V=3 C=4", mean_pool_head()),
    ExactCase("pooling", "mean-pool head, bias", "L=2 d_V=3 C=4", mean_pool_head("b_c")),
    ExactCase("composition", "layer norm of a residual, Gauss-Newton", "L=2 d_V=3 d_ff=1", composition),
    ExactCase("composition", "cross entropy of the mean-pool head", "L=2 d_V=3 C=4", classifier),
    ExactCase("composition", "two stacked post-norm blocks", "L=2 d_V=3, other widths 1", two_blocks),
    ExactCase("transformer", "post-norm block, all pairs", "L=2 d_V=3 d_K=1 d_ff=4", post_norm_block()),
    ExactCase("transformer", "Eq. 7, the loss Hessian", "L=2 d_V=3 d_K=1 d_ff=4", block_loss),
    ExactCase("transformer", "with biases, gains, shifts", "L=2 d_V=3 d_K=1 d_ff=4", post_norm_block(*_BIASES, *_GAINS)),
    ExactCase("transformer", "with b_1 and any smooth activation", "L=2 d_V=3 d_K=1 d_ff=4", post_norm_block("b_1", smooth=True)),
    ExactCase("transformer", "with W_O, causal mask", "L=2 d_V=3 d_K=1 d_ff=4", post_norm_block("W_O", mask=causal(2))),
)
