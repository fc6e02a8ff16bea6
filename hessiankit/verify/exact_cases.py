"""The table of the exact check: chapter, case and sizes.

Attention, the feed-forward layer and the norms have all their dimensions different, so that a swapped index or a turned
commutation shows. Blocks and compositions, which are made of them, keep the widths small.
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import numpy as np

from derivations.affine import AffineAt
from derivations.embedding import TokenEmbeddingAt
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.linear_map import mean_rows, merge_heads, rotary, split_heads, take_row
from derivations.pooling import MeanPoolHeadAt
from hessiankit.verify import exact_builders as b
from hessiankit.verify import jets
from hessiankit.verify.exact_case import ExactCase
from hessiankit.verify.exact_vecr import vecr_rules
from hessiankit.verify.jets import SCALE, rational_turns, turned

_BIASES, _GAINS = ("b_1", "b_2"), ("gamma_1", "beta_1", "gamma_2", "beta_2")
_COS, _SIN = rational_turns(3)
_SOME = np.array([[True, False, True], [True, True, True]])
_FF, _BLOCK = "L=2 d_V=3 d_ff=4", "L=2 d_V=3 d_K=1 d_ff=4"
_layer_norm, _rms_norm = partial(b.normalization, "layernorm"), partial(b.normalization, "rmsnorm")
_split, _merged = partial(b.by_head, heads=2), partial(b.by_token, heads=2)
_linear = b.operation(AffineAt, jets.linear, X=(2, 3), W=(3, 4), b=(4,))
_columns = partial(b.operation, ColumnScaleAt, b.column_scaled)
_product = lambda X, Y: X * Y  # noqa: E731
_pooled = partial(b.operation, MeanPoolHeadAt, jets.mean_pool_head, Z=(2, 3), W_c=(3, 4))

_RATIONAL = (
    ("vecr", "rules", "X 2x3, Y 3x4, D 2x2", vecr_rules),
    ("normalization", "layer norm", "L=2 d=3", _layer_norm(2, 3)),
    ("normalization", "layer norm, gamma, beta", "L=2 d=3", _layer_norm(2, 3, "gamma", "beta")),
    ("normalization", "layer norm, gamma, beta, eps=0", "L=2 d=4", _layer_norm(2, 4, "gamma", "beta", eps=False)),
    ("normalization", "layer norm, Theorems 2 and 3", "L=2 d=4", b.layer_norm_theorems),
    ("normalization", "RMS norm", "L=2 d=3", _rms_norm(2, 3)),
    ("normalization", "RMS norm, gamma", "L=2 d=3", _rms_norm(2, 3, "gamma")),
    ("normalization", "RMS norm, gamma, eps=0", "L=2 d=4", _rms_norm(2, 4, "gamma", eps=False)),
    ("softmax", "softmax", "L=2 S=3", b.softmax(2, 3)),
    ("softmax", "softmax, mask", "L=2 S=3", b.softmax(2, 3, _SOME)),
    ("activation", "relu", "2x3", b.piecewise("relu", Fraction(0))),
    ("activation", "leaky relu", "2x3", b.piecewise("leaky_relu", Fraction(1, 3))),
    ("feedforward", "relu", _FF, b.feed_forward()),
    ("feedforward", "relu, biases", _FF, b.feed_forward(*_BIASES)),
    ("feedforward", "relu, biases, no residual", _FF, b.feed_forward(*_BIASES, residual=False)),
    ("feedforward", "any smooth activation, biases", _FF, b.feed_forward(*_BIASES, smooth=True)),
    ("attention", "nine Phi, X blocks", "L=3 d_V=2 d_K=4", b.attention(3, 2, 4, 2)),
    ("attention", "nine Phi, X blocks, causal mask", "L=3 d_V=2 d_K=4", b.attention(3, 2, 4, 2, mask=b.causal(3))),
    ("attention", "sixteen Phi, X blocks, W_O", "L=2 d_V=3 d_K=4 d_v=5 d_out=6", b.attention(2, 3, 4, 5, 6)),
    ("attention", "two heads", "L=2 d_V=3 d_K=1 d_v=1 d_out=2", b.multi_head_attention),
    ("affine", "X W", "L=2 d=3 m=4", b.operation(AffineAt, jets.linear, X=(2, 3), W=(3, 4))),
    ("affine", "X W + b", "L=2 d=3 m=4", _linear),
    ("linear_map", "split heads", "L=3 H=2 w=2", b.linear_map(split_heads(3, 2, 2), _split, (3, 4), (6, 2))),
    (
        "linear_map",
        "split and repeat heads",
        "L=2 H=2 w=3 r=2",
        b.linear_map(split_heads(2, 2, 3, 2), partial(b.by_head, heads=2, repeat=2), (2, 6), (8, 3)),
    ),
    ("linear_map", "merge heads", "L=3 H=2 w=2", b.linear_map(merge_heads(3, 2, 2), _merged, (6, 2), (3, 4))),
    (
        "linear_map",
        "rotary embedding",
        "L=3 H=2 w=2",
        b.linear_map(rotary(3, 2, 2, cos=_COS, sin=_SIN), partial(turned, length=3), (6, 2), (6, 2)),
    ),
    ("linear_map", "last row", "L=3 d=2", b.linear_map(take_row(3, 2, -1), lambda X: X[2:], (3, 2), (1, 2))),
    ("linear_map", "mean of rows", "L=3 d=2", b.linear_map(mean_rows(3, 2), lambda X: X.sum(0)[None] / 3, (3, 2), (1, 2))),
    ("head_products", "scores, one head", "L=2 S=3 k=2", b.head_product(1, "scores", (2, 2), (3, 2), SCALE)),
    ("head_products", "scores, two heads", "L=2 S=3 k=2", b.head_product(2, "scores", (4, 2), (6, 2), SCALE)),
    ("head_products", "mixtures, one head", "L=2 S=3 v=4", b.head_product(1, "mix", (2, 3), (3, 4), SCALE)),
    ("head_products", "mixtures, two heads", "L=2 S=3 v=4", b.head_product(2, "mix", (4, 3), (6, 4), SCALE)),
    ("head_products", "grouped queries, rotations, causal mask, all pairs", "L=3 d=3 H=2 w=2", b.grouped_query_attention),
    ("gains", "X diag(v)", "2x3", _columns(X=(2, 3), v=(3,))),
    ("gains", "a X", "2x3", b.operation(ScalarScaleAt, b.scaled, X=(2, 3), a=())),
    ("gains", "X o Y", "2x3", b.operation(HadamardAt, _product, X=(2, 3), Y=(2, 3))),
    (
        "token_embedding",
        "rows of E",
        "L=3 V=4 d=2",
        b.operation(lambda E: TokenEmbeddingAt([3, 0, 3], E), lambda E: E[[3, 0, 3]], E=(4, 2)),
    ),
    ("group_normalization", "two groups", "L=2 d=6", b.group_norm("layernorm", 2, 3)),
    ("group_normalization", "two groups, gamma, beta", "L=2 d=6", b.group_norm("layernorm", 2, 3, "gamma", "beta")),
    ("group_normalization", "two groups, RMS norm, gamma", "L=2 d=6", b.group_norm("rmsnorm", 2, 3, "gamma")),
    ("loss", "mean squared error", "2x3", b.mean_squared_error),
    ("loss", "cross entropy", "L=2 C=3", b.cross_entropy(2, 0)),
    ("pooling", "mean-pool head", "L=2 d_V=3 C=4", _pooled()),
    ("pooling", "mean-pool head, bias", "L=2 d_V=3 C=4", _pooled(b_c=(4,))),
    ("composition", "layer norm of a residual, Gauss-Newton", "L=2 d_V=3 d_ff=1", b.composition),
    ("composition", "cross entropy of the mean-pool head", "L=2 d_V=3 C=4", b.classifier),
    ("composition", "two stacked post-norm blocks", "L=2 d_V=3, other widths 1", b.two_blocks),
    ("transformer", "post-norm block, all pairs", _BLOCK, b.post_norm_block()),
    ("transformer", "Eq. 7, the loss Hessian", _BLOCK, b.block_loss),
    ("transformer", "with biases, gains, shifts", _BLOCK, b.post_norm_block(*_BIASES, *_GAINS)),
    ("transformer", "with b_1 and any smooth activation", _BLOCK, b.post_norm_block("b_1", smooth=True)),
    ("transformer", "with W_O, causal mask", _BLOCK, b.post_norm_block("W_O", mask=b.causal(2))),
)


_SYMBOLIC = (
    ("vecr", "rules", "X 2x3, Y 3x4, D 2x2", vecr_rules),
    ("normalization", "layer norm", "L=1 d=3", _layer_norm(1, 3)),
    ("normalization", "layer norm, gamma, beta, eps", "L=2 d=3", _layer_norm(2, 3, "gamma", "beta")),
    ("normalization", "RMS norm, gamma, eps", "L=2 d=3", _rms_norm(2, 3, "gamma")),
    ("softmax", "softmax", "L=1 S=3", b.softmax(1, 3)),
    ("softmax", "softmax", "L=2 S=2", b.softmax(2, 2)),
    ("activation", "gelu", "1x2", b.smooth("gelu")),
    ("activation", "gelu, tanh form", "1x2", b.smooth("gelu_tanh")),
    ("activation", "silu", "1x2", b.smooth("silu")),
    ("activation", "tanh", "1x2", b.smooth("tanh")),
    ("loss", "cross entropy", "L=1 C=3", b.cross_entropy(1)),
    ("affine", "X W + b", "L=2 d=2 m=3", b.operation(AffineAt, jets.linear, X=(2, 2), W=(2, 3), b=(3,))),
    ("head_products", "scores, two heads", "L=1 S=2 k=2", b.head_product(2, "scores", (2, 2), (4, 2))),
    ("head_products", "mixtures, two heads", "L=1 S=2 v=2", b.head_product(2, "mix", (2, 2), (4, 2))),
    ("linear_map", "rotary embedding", "L=2 w=2", b.rotation),
    ("linear_map", "split and merge heads", "L=2 H=2 w=2", b.heads_and_back),
    ("gains", "X diag(v)", "2x3", _columns(X=(2, 3), v=(3,))),
    ("gains", "a X", "2x2", b.operation(ScalarScaleAt, b.scaled, X=(2, 2), a=(1,))),
    ("gains", "X o Y", "2x2", b.operation(HadamardAt, _product, X=(2, 2), Y=(2, 2))),
    ("group_normalization", "two groups, gamma, beta, eps", "L=1 d=4", b.group_norm("layernorm", 1, 2, "gamma", "beta")),
    ("group_normalization", "two groups, RMS norm, gamma, eps", "L=1 d=4", b.group_norm("rmsnorm", 1, 2, "gamma")),
    ("attention", "nine Phi, X blocks", "L=2 d_V=2 d_K=1 d_v=1", b.attention(2, 2, 1, 1)),
    ("attention", "sixteen Phi, X blocks, W_O", "L=2 d_V=2 d_K=1 d_v=1 d_out=1", b.attention(2, 2, 1, 1, 1)),
)
RATIONAL, SYMBOLIC = (tuple(ExactCase(*row) for row in rows) for rows in (_RATIONAL, _SYMBOLIC))  # type: ignore[arg-type]
"""At rational points, and on symbols, identically, at the smallest sizes."""
