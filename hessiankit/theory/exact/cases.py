"""The cases of the exact check, chapter by chapter: each closed form, the jet formula that it must equal, and the sizes.

The formulas go head by head and row by row (``JetBlock``), and know nothing of commutations or Kronecker products.
Attention, the feed-forward layer and the norms have all their dimensions different, so that a swapped index or a turned
commutation shows. Blocks and compositions, which are made of them, keep the widths small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from derivations import vecr
from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.arrays import Array
from derivations.attention import AttentionAt
from derivations.composition import Composite, gauss_newton
from derivations.embedding import TokenEmbeddingAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, mean_rows, merge_heads, rotary, split_heads, take_row
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Dense, Identity, Matrix, kron
from derivations.normalization import LayerNormAt, RMSNormAt, theorem2_jacobian, theorem3_hessian
from derivations.operation import Operation, Renamed, Shape, Total, Variable
from derivations.pooling import MeanPoolHeadAt
from derivations.softmax import SoftmaxAt
from derivations.transformer import PostNormBlockAt
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.blocks.norms import GroupNorm
from hessiankit.blocks.parts import row_softmax
from hessiankit.theory.exact.blocks import PLACEMENT_CASES, SCALE, JetBlock, rational_turns
from hessiankit.theory.exact.case import Comparison, Draw, ExactCase, against
from hessiankit.theory.exact.jets import Jet, Variables, values
from hessiankit.theory.formulas.block_at import causal_mask
from hessiankit.theory.formulas.symbols import symbol_of

Build = Callable[[Draw], Iterator[Comparison]]
Pair = Callable[[Variables, Draw], tuple[Operation, Array]]
"""An operation at a point, and its output on the jets of the point."""


# Operations of named arguments ------------------------------------------------------------------------------------------


def case(pair: Pair, shapes: Mapping[str, Shape], *, value: bool = True) -> Build:
    """Compare an operation with its output on jets, both made at drawn arguments of the given shapes (see ``against``)."""

    def build(draw: Draw) -> Iterator[Comparison]:
        point = draw.point(**shapes)
        formula, output = pair(point, draw)
        yield from against(formula, point, output, value=value)

    return build


def operation(chapter: Callable[..., Operation], formula: Callable[..., Array], **shapes: Shape) -> Build:
    """Compare a closed form at drawn arguments of the given shapes with a formula of jets by the same names."""
    return case(lambda p, _: (chapter(**p.at), formula(**p.jets)), shapes)


def linear_map(matrix: Matrix, formula: Callable[[Array], Array], input_shape: Shape, output_shape: Shape) -> Build:
    """Compare a linear map of vec_r with the entries that it should move."""
    return operation(lambda X: LinearMapAt(X, matrix, output_shape), formula, X=input_shape)


def linear(X: Array, W: Array, b: Array | None = None) -> Array:
    """Return X W + 1 b^T."""
    return X @ W if b is None else X @ W + b.reshape(1, -1)


def by_head(X: Array, heads: int, repeat: int = 1) -> Array:
    """Return the rows (head, copy, token) of an L x (heads width) array."""
    return np.concatenate([head for head in np.split(X, heads, 1) for _ in range(repeat)])


def by_token(X: Array, heads: int) -> Array:
    """Return the heads of one token side by side."""
    return np.concatenate(np.split(X, heads), 1)


def turned(X: Array, length: int) -> Array:
    """Return the rows of stacked heads of width 2, row l of each turned by the l-th rational rotation."""
    cos, sin = (np.concatenate([turns] * (len(X) // length)).reshape(-1) for turns in rational_turns(length))
    return np.stack([cos * X[:, 0] - sin * X[:, 1], sin * X[:, 0] + cos * X[:, 1]], 1)


def head_product(heads: int, kind: str, P: Shape, R: Shape) -> Build:
    """Compare the scores or mixtures of some heads."""

    def formula(P: Array, R: Array) -> Array:
        pairs = zip(np.split(P, heads), np.split(R, heads), strict=True)
        return np.concatenate([p @ (r.T if kind == "scores" else r) * SCALE for p, r in pairs])

    return operation(lambda P, R: HeadProductAt(P, R, heads, kind, SCALE), formula, P=P, R=R)  # type: ignore[arg-type]


def piecewise(kind: str, slope: Fraction) -> Build:
    """Compare relu or leaky relu off its kink."""
    relu = np.frompyfunc(lambda x: x.relu(slope), 1, 1)
    return case(lambda p, _: (ActivationAt(kind, p.at["X"], slope), relu(p.jets["X"])), {"X": (2, 3)})


# Norms, softmax, losses: roots and exponentials are drawn --------------------------------------------------------------


def norm(kind: str, *names: str, groups: int = 1) -> Build:
    """Compare a norm of two rows of three features, or of groups of three, with the named gains and shifts."""
    part, plain = GroupNorm(3 * groups, groups, kind=kind), LayerNormAt if kind == "layernorm" else RMSNormAt
    chapter: Callable[..., Operation] = plain if groups == 1 else partial(GroupNormRowsAt, groups=groups, kind=kind)

    def pair(p: Variables, draw: Draw) -> tuple[Operation, Array]:
        arrays = {f"norm.{'weight' if name == 'gamma' else 'bias'}": p.jets[name] for name in names}
        jets = JetBlock(Attention(1), arrays, draw)
        output = jets.norm(p.jets["X"], part, "norm")
        return chapter(**p.at, eps=jets.eps_of(part)), output

    return case(pair, {"X": (2, 3 * groups), **dict.fromkeys(names, (3 * groups,))})


def layer_norm_theorems(draw: Draw) -> Iterator[Comparison]:
    """Compare Theorems 2 and 3, the paper's own construction, with gamma = 1, beta = 0, eps = 0."""

    def centred(X: Array) -> tuple[Array, Array]:
        M = X - X.sum(-1)[..., None] / 4
        return M, (M * M).sum(-1) / 4

    rows: list[Array] = []
    while len(rows) < 2:
        row = draw.array(4)
        if centred(row[None])[1][0].is_square():
            rows.append(row)
    p = Variables({"X": np.stack(rows)})
    M, mean_squares = centred(p.jets["X"])
    output = M / np.frompyfunc(Jet.sqrt, 1, 1)(mean_squares[:, None])
    yield Comparison("theorem2_jacobian", theorem2_jacobian(p.at["X"]), p.jacobian(output, "X"))
    yield Comparison("theorem3_hessian", theorem3_hessian(p.at["X"]), p.hessian(output, "X", "X"))


def softmax(mask: Array | None = None) -> Build:
    """Compare a row softmax of 2 x 3 logits."""

    def pair(p: Variables, draw: Draw) -> tuple[Operation, Array]:
        T, jets = (row_softmax(logits, draw.exp, mask) for logits in (p.at["T"], p.jets["T"]))
        return SoftmaxAt(p.at["T"], mask=mask, weights=T), jets

    return case(pair, {"T": (2, 3)})


def squared_error(Z: Array, target: Array) -> Array:
    """Return mean((Z - target)^2) as an array of one entry."""
    difference = Z - target
    return np.array([(difference * difference).sum() * Fraction(1, Z.size)], dtype=object)


def mean_squared_error(p: Variables, draw: Draw) -> tuple[Operation, Array]:
    """Return the mean squared error of an output."""
    target = draw.array(*p.at["Z"].shape)
    return MeanSquaredErrorAt(p.at["Z"], target), squared_error(p.jets["Z"], target)


def log_loss(logits: Array, labels: Sequence[int], draw: Draw) -> Array:
    """Return the mean over rows of -log softmax(logits)[label] as an array of one entry; logarithms are symbols."""
    sums = np.frompyfunc(draw.exp, 1, 1)(logits).sum(1)
    losses = [draw.log(total) - row[label] for total, row, label in zip(sums, logits, labels, strict=True)]
    return np.array([sum(losses) * Fraction(1, len(losses))], dtype=object)


def cross_entropy(p: Variables, draw: Draw) -> tuple[Operation, Array]:
    """Return the cross entropy of two rows of classes."""
    logits, labels = p.at["logits"], (2, 0)
    at = CrossEntropyAt(logits, labels, weights=row_softmax(logits, draw.exp))
    return at, log_loss(p.jets["logits"], labels, draw)


def mean_pool_head(Z: Array, W_c: Array, b_c: Array | None = None) -> Array:
    """Return (1/L) 1^T Z W_c + b_c, of shape (1, C)."""
    return linear(Z.sum(0).reshape(1, -1) * Fraction(1, Z.shape[0]), W_c, b_c)


def classifier(p: Variables, draw: Draw) -> tuple[Operation, Array]:
    """Return the cross entropy of the mean-pool head, whose loss Hessian couples all of Z, W_c and b_c."""
    head = MeanPoolHeadAt(**p.at)
    loss = CrossEntropyAt(head.value, [2], weights=row_softmax(head.value, draw.exp))
    return Composite(loss, {"logits": head}), log_loss(mean_pool_head(**p.jets), [2], draw)


# Layers and blocks ------------------------------------------------------------------------------------------------------


def attention(L: int, d_V: int, d_K: int, d_v: int, d_out: int | None = None, *, causal: bool = False) -> Build:
    """Compare attention, with W_O where there is a ``d_out``."""
    part = Attention(d_V, d_k=d_K, d_v=d_v, output_projection=d_out is not None, causal=causal)
    shapes = {"X": (L, d_V), "W_Q": (d_V, d_K), "W_K": (d_V, d_K), "W_V": (d_V, d_v)}
    shapes |= {} if d_out is None else {"W_O": (d_v, d_out)}

    def pair(p: Variables, draw: Draw) -> tuple[Operation, Array]:
        jets = JetBlock(part, p.jets, draw)
        output = jets(p.jets["X"])
        mask = causal_mask(L, 1) if causal else None
        return AttentionAt(**p.at, scale=SCALE, mask=mask, weights=jets.stacked), output

    return case(pair, shapes)


def jets_by_letter(block: TransformerBlock, p: Variables, draw: Draw) -> JetBlock:
    """Return a block at those of its parameters that have their letter among some variables."""
    letters = {dotted: symbol_of(dotted).removeprefix("\\") for dotted, _ in block.named_parameters()}
    return JetBlock(block, {dotted: p.jets[letter] for dotted, letter in letters.items() if letter in p.jets}, draw)


def feed_forward(*biases: str, residual: bool = True, smooth: bool = False) -> Build:
    """Compare the feed-forward layer with L = 2, d_V = 3, d_ff = 4, with ReLU or with any smooth activation."""
    shapes = {"Y": (2, 3), "W_1": (3, 4), "W_2": (4, 3), "b_1": (4,), "b_2": (3,)}
    block = TransformerBlock(3, 4, activation="gelu" if smooth else "relu", bias=True)

    def pair(p: Variables, draw: Draw) -> tuple[Operation, Array]:
        branch = jets_by_letter(block, p, draw).feedforward(p.jets["Y"])
        at = FeedForwardAt(**p.at, residual=residual, activation=draw.smooth.derivatives if smooth else "relu")
        return at, p.jets["Y"] + branch if residual else branch

    return case(pair, {name: shapes[name] for name in ("Y", "W_1", "W_2", *biases)})


def composition(draw: Draw) -> Iterator[Comparison]:
    """Compare layer norm of a residual feed-forward layer, its name X used twice, and the Gauss-Newton parts of its loss."""
    p, block = draw.point(X=(2, 3), W_1=(3, 1), W_2=(1, 3), gamma=(3,)), TransformerBlock(3, 1, activation="gelu")
    dotted = {"feedforward.W_1": "W_1", "feedforward.W_2": "W_2", "norm_1.weight": "gamma"}
    jets = JetBlock(block, {name: p.jets[letter] for name, letter in dotted.items()}, draw)
    output, at = jets.norm_1(p.jets["X"] + jets.feedforward(p.jets["X"])), p.at
    branch = FeedForwardAt(at["X"], at["W_1"], at["W_2"], activation=draw.smooth.derivatives, residual=False)
    residual = Total(Variable("X", at["X"]), Renamed(branch, {"Y": "X"}))
    model = Composite(LayerNormAt(residual.value, at["gamma"], eps=jets.eps_of(block.norm_1)), {"X": residual})
    yield from against(model, p, output)
    target = draw.array(2, 3)
    loss = squared_error(output, target)
    for i, j in product(at, repeat=2):
        total = gauss_newton(MeanSquaredErrorAt(model.value, target), model, i, j).total
        yield Comparison(f"gauss_newton({i!r}, {j!r})", total, p.hessian(loss, i, j))


WEIGHTS = ("W_Q", "W_K", "W_V", "W_1", "W_2")


def post_norm_block(*extra: str, causal: bool = False, smooth: bool = False, loss: bool = False) -> Build:
    """Compare the post-norm block with L = 2, d_V = 3, d_K = 1, d_ff = 4 and the named extra parameters.

    With ``loss``, compare instead the 25 blocks of Eq. 7, the Hessian of its squared error with respect to the five weights.
    """
    options = {"bias": "b_1" in extra, "output_projection": "W_O" in extra, "causal": causal}
    block = TransformerBlock(3, 4, d_k=1, d_v=3, activation="gelu" if smooth else "relu", **options)  # type: ignore[arg-type]
    shapes = {symbol_of(dotted).removeprefix("\\"): tuple(p.shape) for dotted, p in block.named_parameters()}

    def build(draw: Draw) -> Iterator[Comparison]:
        p = draw.point(X=(2, 3), **{name: shapes[name] for name in (*WEIGHTS, *extra)})
        jets = jets_by_letter(block, p, draw)
        output = jets(p.jets["X"])
        at = PostNormBlockAt(
            **p.at,
            eps=(jets.eps_of(block.norm_1), jets.eps_of(block.norm_2)),
            scale=SCALE,
            weights=jets.stacked,
            mask=causal_mask(2, 1) if causal else None,
            activation=draw.smooth.derivatives if smooth else "relu",
        )
        if not loss:
            yield from against(at, p, output)
            return
        target = draw.array(2, 3)
        of_jets = squared_error(output, target)
        for i, j in product(WEIGHTS, repeat=2):
            yield Comparison(f"loss_hessian({i!r}, {j!r})", at.loss_hessian(target, i, j).total, p.hessian(of_jets, i, j))

    return build


# The rules of the calculus ----------------------------------------------------------------------------------------------


def vecr_rules(draw: Draw) -> Iterator[Comparison]:
    """Compare Properties 2-6 and Propositions 3-9 on matrices that depend on X and Y nonlinearly."""
    P, Q, E, adjoint = draw.array(4, 2), draw.array(3, 2), draw.array(2, 4), draw.array(2, 4)
    squares = draw.array(2, 3) ** 2
    p = Variables({"X": squares, "Y": draw.array(3, 4), "D": draw.array(2, 2), "v": draw.array(3)})
    X, Y, D, v = p.jets.values()
    A, B = X * X, X.T @ E  # 2 x 3 and 3 x 4, both functions of X
    (a, b), (c, e) = D
    inverse, root = np.array([[e, -b], [-c, a]], dtype=object) / (a * e - b * c), np.frompyfunc(Jet.sqrt, 1, 1)(X)
    N = (X @ Y) * (X @ Y)
    N_XY, N_YX = p.hessian(N, "X", "Y"), p.hessian(N, "Y", "X")
    scalar = np.array([(adjoint * N).sum()], dtype=object)

    def d(F: Array, name: str = "X") -> Array:
        return p.jacobian(F, name)

    def both(F: Array) -> tuple[Dense, Dense]:
        return Dense(values(F)), Dense(d(F))

    rules: list[tuple[str, Any, Array]] = [
        ("d(P X Q)/dX", vecr.sandwich(Dense(P), Dense(Q)), d(P @ X @ Q)),
        ("d(E o X)/dX", vecr.hadamard(E[:, :3]), d(E[:, :3] * X)),
        ("d(diag^{-1}(b) X)/dX", kron(vecr.row_scaling(E[:, 0]), Identity(3)), d(X / E[:, :1])),
        ("d(X kron P)/dX", vecr.kron_derivative_left((2, 3), Dense(P)), d(np.kron(X, P))),
        ("d(P kron X)/dX", vecr.kron_derivative_right(Dense(P), (2, 3)), d(np.kron(P, X))),
        ("d(A(X) B(X))", vecr.product_rule(*both(A), *both(B)), d(A @ B)),
        ("d(A(X) kron B(X))", vecr.kronecker_rule(*both(A), *both(B)), d(np.kron(A, B))),
        ("dD^{-1}/dD", vecr.inverse_rule(Dense(values(inverse))), d(inverse, "D")),
        ("d diag(v)/dv", vecr.diag_rule(3), d(np.diag(v), "v")),
        ("dX^{o2}/dX", vecr.hadamard_square_rule(squares), d(X * X)),
        ("dX^{o1/2}/dX", vecr.hadamard_sqrt_rule(squares), d(root)),
        ("dX^T/dX", vecr.transpose_rule(2, 3), d(X.T)),
        ("dF/dX from dF", vecr.identify(lambda dX: P @ dX @ Q, squares), d(P @ X @ Q)),
        ("vec_r X from vec X", vecr.vec_to_vec_r(2, 3) @ vecr.vec(squares), vecr.vec_r(squares)),
        ("d2N/dYdX from d2N/dXdY", vecr.slice_transpose(Dense(N_XY), 8, 6, 12), N_YX),
        ("d2<adjoint, N>/dXdY", vecr.contract(adjoint, Dense(N_XY), 6), p.hessian(scalar, "X", "Y")),
    ]
    for label, formula, expected in rules:
        yield Comparison(label, formula, expected)


# The table --------------------------------------------------------------------------------------------------------------

_BIASES, _GAINS = ("b_1", "b_2"), ("gamma_1", "beta_1", "gamma_2", "beta_2")
_COS, _SIN = rational_turns(3)
_MASK = np.array([[True, False, True], [True, True, True]])
_FF, _BLOCK, _KINKS = "L=2 d_V=3 d_ff=4", "L=2 d_V=3 d_K=1 d_ff=4", 2**8
_split, _merged = partial(by_head, heads=2), partial(by_token, heads=2)
_pooled = partial(operation, MeanPoolHeadAt, mean_pool_head, Z=(2, 3), W_c=(3, 4))
_tokens = [3, 0, 3]

_ROWS: tuple[tuple[Any, ...], ...] = (
    ("vecr", "rules", "X 2x3, Y 3x4, D 2x2", vecr_rules),
    ("normalization", "layer norm", "L=2 d=3", norm("layernorm")),
    ("normalization", "layer norm, gamma, beta", "L=2 d=3", norm("layernorm", "gamma", "beta")),
    ("normalization", "layer norm, Theorems 2 and 3", "L=2 d=4", layer_norm_theorems, 4),  # on the variety of rational roots
    ("normalization", "RMS norm", "L=2 d=3", norm("rmsnorm")),
    ("normalization", "RMS norm, gamma", "L=2 d=3", norm("rmsnorm", "gamma")),
    ("softmax", "softmax", "L=2 S=3", softmax()),
    ("softmax", "softmax, mask", "L=2 S=3", softmax(_MASK)),
    ("activation", "relu", "2x3", piecewise("relu", Fraction(0)), 2**6),
    ("activation", "leaky relu", "2x3", piecewise("leaky_relu", Fraction(1, 3)), 2**6),
    ("feedforward", "relu", _FF, feed_forward(), _KINKS),
    ("feedforward", "relu, biases", _FF, feed_forward(*_BIASES), _KINKS),
    ("feedforward", "relu, biases, no residual", _FF, feed_forward(*_BIASES, residual=False), _KINKS),
    ("feedforward", "any smooth activation, biases", _FF, feed_forward(*_BIASES, smooth=True)),
    ("attention", "nine Phi, X blocks", "L=3 d_V=2 d_K=4", attention(3, 2, 4, 2)),
    ("attention", "nine Phi, X blocks, causal mask", "L=3 d_V=2 d_K=4", attention(3, 2, 4, 2, causal=True)),
    ("attention", "sixteen Phi, X blocks, W_O", "L=2 d_V=3 d_K=4 d_v=5 d_out=6", attention(2, 3, 4, 5, 6)),
    ("affine", "X W", "L=2 d=3 m=4", operation(AffineAt, linear, X=(2, 3), W=(3, 4))),
    ("affine", "X W + b", "L=2 d=3 m=4", operation(AffineAt, linear, X=(2, 3), W=(3, 4), b=(4,))),
    ("linear_map", "split heads", "L=3 H=2 w=2", linear_map(split_heads(3, 2, 2), _split, (3, 4), (6, 2))),
    (
        "linear_map",
        "split and repeat heads",
        "L=2 H=2 w=3 r=2",
        linear_map(split_heads(2, 2, 3, 2), partial(by_head, heads=2, repeat=2), (2, 6), (8, 3)),
    ),
    ("linear_map", "merge heads", "L=3 H=2 w=2", linear_map(merge_heads(3, 2, 2), _merged, (6, 2), (3, 4))),
    (
        "linear_map",
        "rotary embedding",
        "L=3 H=2 w=2",
        linear_map(rotary(3, 2, 2, cos=_COS, sin=_SIN), partial(turned, length=3), (6, 2), (6, 2)),
    ),
    ("linear_map", "last row", "L=3 d=2", linear_map(take_row(3, 2, -1), lambda X: X[2:], (3, 2), (1, 2))),
    ("linear_map", "mean of rows", "L=3 d=2", linear_map(mean_rows(3, 2), lambda X: X.sum(0)[None] / 3, (3, 2), (1, 2))),
    ("head_products", "scores, one head", "L=2 S=3 k=2", head_product(1, "scores", (2, 2), (3, 2))),
    ("head_products", "scores, two heads", "L=2 S=3 k=2", head_product(2, "scores", (4, 2), (6, 2))),
    ("head_products", "mixtures, one head", "L=2 S=3 v=4", head_product(1, "mix", (2, 3), (3, 4))),
    ("head_products", "mixtures, two heads", "L=2 S=3 v=4", head_product(2, "mix", (4, 3), (6, 4))),
    ("gains", "X diag(v)", "2x3", operation(ColumnScaleAt, lambda X, v: X * v[None], X=(2, 3), v=(3,))),
    ("gains", "a X", "2x3", operation(ScalarScaleAt, lambda X, a: X * a.reshape(1, 1), X=(2, 3), a=())),
    ("gains", "X o Y", "2x3", operation(HadamardAt, lambda X, Y: X * Y, X=(2, 3), Y=(2, 3))),
    (
        "token_embedding",
        "rows of E",
        "L=3 V=4 d=2",
        operation(partial(TokenEmbeddingAt, _tokens), lambda E: E[_tokens], E=(4, 2)),
    ),
    ("group_normalization", "two groups", "L=2 d=6", norm("layernorm", groups=2)),
    ("group_normalization", "two groups, gamma, beta", "L=2 d=6", norm("layernorm", "gamma", "beta", groups=2)),
    ("group_normalization", "two groups, RMS norm, gamma", "L=2 d=6", norm("rmsnorm", "gamma", groups=2)),
    ("loss", "mean squared error", "2x3", case(mean_squared_error, {"Z": (2, 3)})),
    ("loss", "cross entropy", "L=2 C=3", case(cross_entropy, {"logits": (2, 3)}, value=False)),
    ("pooling", "mean-pool head", "L=2 d_V=3 C=4", _pooled()),
    ("pooling", "mean-pool head, bias", "L=2 d_V=3 C=4", _pooled(b_c=(4,))),
    ("composition", "layer norm of a residual, Gauss-Newton", "L=2 d_V=3 d_ff=1", composition),
    (
        "composition",
        "cross entropy of the mean-pool head",
        "L=2 d_V=3 C=4",
        case(classifier, {"Z": (2, 3), "W_c": (3, 4), "b_c": (4,)}, value=False),
    ),
    ("transformer", "post-norm block, all pairs", _BLOCK, post_norm_block(), _KINKS),
    ("transformer", "Eq. 7, the loss Hessian", _BLOCK, post_norm_block(loss=True), _KINKS),
    ("transformer", "with biases, gains, shifts", _BLOCK, post_norm_block(*_BIASES, *_GAINS), _KINKS),
    ("transformer", "with b_1 and any smooth activation", _BLOCK, post_norm_block("b_1", smooth=True)),
    ("transformer", "with W_O, causal mask", _BLOCK, post_norm_block("W_O", causal=True), _KINKS),
)
CASES: tuple[ExactCase, ...] = (*(ExactCase(*row) for row in _ROWS), *PLACEMENT_CASES)
"""Every exact case: of each chapter, and of whole blocks ("placements")."""
