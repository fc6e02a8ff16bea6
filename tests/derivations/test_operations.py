"""Every chapter in vec_r against reverse over reverse: values, Jacobians, second derivatives, structure, errors."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from second_order_reference import check_all_blocks, random_point, relative_error
from torch import Tensor, einsum
from transformer_reference import ACTIVATIONS, attention, cross_entropy, feedforward, layer_norm, rms_norm

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.attention import AttentionAt
from derivations.embedding import TokenEmbeddingAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import ColumnScaleAt, HadamardAt, ScalarScaleAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, mean_rows, merge_heads, split_heads, take_row
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation
from derivations.pooling import MeanPoolHeadAt
from derivations.rotary import Rotations, rotary
from derivations.selection import Selection
from derivations.softmax import SoftmaxAt


def check_structure(matrix: Matrix, like: Tensor, *, sharp: bool = False) -> None:
    """Compare action, transpose and norm bound with the dense matrix; ``sharp`` asks for the norm itself."""
    dense = matrix.dense(like)
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(0)
    y, z = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (columns, rows))
    largest = float(dense.abs().max()) or 1.0
    assert tuple(dense.shape) == matrix.shape
    assert float((matrix @ y - dense @ y).abs().max()) <= 1e-12 * largest
    assert float((matrix.T @ z - dense.T @ z).abs().max()) <= 1e-12 * largest
    assert torch.equal(matrix.T.T.dense(like), dense)
    norm, bound = float(torch.linalg.matrix_norm(dense, 2)), matrix.norm_bound()
    assert bound >= norm * (1 - 1e-12)
    if sharp:
        assert abs(bound - norm) <= 1e-12 * norm, (bound, norm)


def check_structure_of_all_blocks(operation: Any, like: Tensor, *, sharp: tuple[str, ...] = ()) -> None:
    """Check every Jacobian and every second derivative; ``sharp`` names the Jacobians whose norm bound is the norm."""
    for i in operation.arguments:
        check_structure(operation.jacobian(i), like, sharp=i in sharp)
        for j in operation.arguments:
            check_structure(operation.hessian(i, j), like)


class Case(NamedTuple):
    """A chapter at a point, the same function of its arguments, and the Jacobians whose norm bound is the norm."""

    make: Callable[..., Any]
    f: Callable[..., torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    sharp: str = ""


TOKENS, LABELS, TARGET = torch.tensor([4, 1, 4]), torch.tensor([4, 0, 2]), random_point(51, T=(3, 4))["T"]
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()
ADDITIVE = torch.zeros(3, 3, dtype=torch.float64).masked_fill(~CAUSAL, -torch.inf)
CASES = {
    "affine": Case(AffineAt, lambda X, W, b: X @ W + b, {"X": (4, 3), "W": (3, 2), "b": (2,)}, "XWb"),
    "affine without bias": Case(AffineAt, lambda X, W: X @ W, {"X": (4, 3), "W": (3, 2)}, "XW"),
    "embedding": Case(lambda E: TokenEmbeddingAt(TOKENS, E), lambda E: F.embedding(TOKENS, E), {"E": (5, 2)}, "E"),
    "column scale": Case(ColumnScaleAt, lambda X, v: X * v, {"X": (3, 4), "v": (4,)}, "X"),
    "scalar scale": Case(ScalarScaleAt, lambda X, a: a * X, {"X": (3, 2), "a": ()}, "Xa"),
    "scalar of one entry": Case(ScalarScaleAt, lambda X, a: a * X, {"X": (3, 2), "a": (1,)}, "Xa"),
    "entrywise product": Case(HadamardAt, lambda X, Y: X * Y, {"X": (3, 2), "Y": (3, 2)}, "XY"),
    "first row": Case(lambda X: LinearMapAt(X, take_row(3, 4, 0), (1, 4)), lambda X: X[:1], {"X": (3, 4)}, "X"),
    "last row": Case(lambda X: LinearMapAt(X, take_row(3, 4, -1), (1, 4)), lambda X: X[-1:], {"X": (3, 4)}, "X"),
    "mean of rows": Case(
        lambda X: LinearMapAt(X, mean_rows(4, 3), (1, 3)), lambda X: X.mean(0, keepdim=True), {"X": (4, 3)}, "X"
    ),
    "merged heads": Case(
        lambda X: LinearMapAt(X, merge_heads(3, 2, 4), (3, 8)),
        lambda X: X.view(2, 3, 4).transpose(0, 1).reshape(3, 8),
        {"X": (6, 4)},
        "X",
    ),
    "head": Case(
        MeanPoolHeadAt, lambda Z, W_c, b_c: Z.mean(0, keepdim=True) @ W_c + b_c, {"Z": (2, 3), "W_c": (3, 5), "b_c": (5,)}
    ),
    "head without bias": Case(MeanPoolHeadAt, lambda Z, W_c: Z.mean(0, keepdim=True) @ W_c, {"Z": (4, 2), "W_c": (2, 1)}),
    "mean squared error": Case(
        lambda Z: MeanSquaredErrorAt(Z, TARGET), lambda Z: (Z - TARGET).square().mean().reshape(1, 1), {"Z": (3, 4)}
    ),
    "cross entropy": Case(
        lambda logits: CrossEntropyAt(logits, LABELS),
        lambda logits: cross_entropy(LABELS)(logits).reshape(1, 1),
        {"logits": (3, 5)},
    ),
    "attention, additive mask and scale": Case(
        lambda **p: AttentionAt(**p, mask=ADDITIVE, scale=0.3),
        lambda **p: attention(**p, causal=True, scale=0.3),
        {"X": (3, 4), "W_Q": (4, 2), "W_K": (4, 2), "W_V": (4, 4)},
    ),
    "feed-forward without residual": Case(
        lambda **p: FeedForwardAt(**p, activation="gelu", residual=False),
        lambda **p: feedforward(**p, kind="gelu", residual=False),
        {"Y": (3, 4), "W_1": (4, 5), "W_2": (5, 2), "b_1": (5,), "b_2": (2,)},
    ),
}
for repeat in (1, 3):
    CASES[f"split heads, {repeat} times"] = Case(
        lambda X, r=repeat: LinearMapAt(X, split_heads(3, 2, 4, r), (6 * r, 4)),
        lambda X, r=repeat: X.view(3, 2, 4).transpose(0, 1).repeat_interleave(r, 0).reshape(-1, 4),
        {"X": (3, 8)},
        "X",
    )
for kind, subscripts, heads in (("scores", "hlk,hsk->hls", 1), ("scores", "hlk,hsk->hls", 2), ("mix", "hls,hsv->hlv", 3)):
    CASES[f"{kind} of {heads} heads"] = Case(
        lambda P, R, h=heads, k=kind: HeadProductAt(P, R, h, k, scale=0.75),
        lambda P, R, h=heads, s=subscripts: 0.75 * einsum(s, P.view(h, 2, -1), R.view(h, 3, -1)).reshape(h * 2, -1),
        {"P": (heads * 2, 4 if kind == "scores" else 3), "R": (heads * 3, 4)},
        "PR",
    )
CASES["mix of 1 heads"] = Case(lambda P, R: HeadProductAt(P, R, 1, "mix"), lambda P, R: P @ R, {"P": (2, 3), "R": (3, 4)}, "PR")
for names in ("X", "X gamma", "X beta", "X gamma beta"):
    shapes = {"X": (3, 4), "gamma": (4,), "beta": (4,)}
    given = {n: shapes[n] for n in names.split()}
    for eps in (0.0, 0.7):
        CASES[f"layer norm {names} {eps}"] = Case(
            lambda e=eps, **p: LayerNormAt(**p, eps=e), lambda e=eps, **p: layer_norm(e)(**p), given
        )
        if "beta" not in names:
            CASES[f"rms norm {names} {eps}"] = Case(
                lambda e=eps, **p: RMSNormAt(**p, eps=e), lambda e=eps, **p: rms_norm(e)(**p), given
            )
    for kind, norm, groups in (("layernorm", layer_norm, 2), ("layernorm", layer_norm, 3), ("rmsnorm", rms_norm, 2)):
        if kind == "layernorm" or "beta" not in names:
            CASES[f"group norm {names} {kind} {groups}"] = Case(
                lambda g=groups, k=kind, **p: GroupNormRowsAt(groups=g, eps=0.3, kind=k, **p),
                lambda X, gamma=1.0, beta=0.0, g=groups, n=norm: n(0.3)(X.reshape(2, g, -1)).reshape(2, 6) * gamma + beta,
                {name: (2, 6) if name == "X" else (6,) for name in names.split()},
            )
for shape in (1, 3), (4, 2):
    CASES[f"layer norm of {shape}"] = Case(
        lambda X, gamma, beta: LayerNormAt(X, gamma, beta, 0.1),
        layer_norm(0.1),
        {"X": shape, "gamma": shape[1:], "beta": shape[1:]},
    )
for shape in (3, 3), (2, 4), (4, 2), (1, 5), (3, 1):
    CASES[f"softmax {shape}"] = Case(SoftmaxAt, lambda T: T.exp() / T.exp().sum(-1, keepdim=True), {"T": shape}, "T")
for name, mask in {"boolean": CAUSAL, "of numpy": CAUSAL.numpy(), "additive": ADDITIVE}.items():
    CASES[f"softmax, mask {name}"] = Case(
        lambda T, m=mask: SoftmaxAt(T, mask=m), lambda T: T.masked_fill(~CAUSAL, -torch.inf).softmax(-1), {"T": (3, 3)}, "T"
    )
for kind, f in ACTIVATIONS.items():
    CASES[f"activation {kind}"] = Case(lambda X, k=kind: ActivationAt(k, X), lambda X, f=f: f(X), {"X": (3, 4)})
for kind, (L, d, d_ff), biases in (
    ("relu", (3, 4, 5), ()),
    ("relu", (4, 3, 2), ("b_1", "b_2")),
    ("gelu", (3, 4, 5), ("b_1", "b_2")),
    ("silu", (4, 3, 2), ("b_1",)),
):
    shapes = {"Y": (L, d), "W_1": (d, d_ff), "W_2": (d_ff, d), "b_1": (d_ff,), "b_2": (d,)}
    CASES[f"feed-forward {kind} {biases}"] = Case(
        lambda k=kind, **p: FeedForwardAt(**p, activation=k),
        lambda k=kind, **p: feedforward(**p, kind=k),
        {name: shape for name, shape in shapes.items() if name[0] != "b" or name in biases},
    )
for causal, (L, d, d_K, d_v, d_out) in (
    (False, (3, 4, 2, 4, None)),
    (True, (3, 4, 2, 5, None)),
    (True, (3, 2, 4, 3, 5)),
    (False, (4, 3, 2, 5, 2)),
):
    shapes = {"X": (L, d), "W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, d_v), **({"W_O": (d_v, d_out)} if d_out else {})}
    CASES[f"attention {L} {d} {d_K} {d_v} {d_out}"] = Case(
        lambda c=causal, **p: AttentionAt(**p, mask=CAUSAL if c else None), lambda c=causal, **p: attention(**p, causal=c), shapes
    )


@pytest.mark.parametrize("name", CASES)
def test_all_blocks(name: str) -> None:
    make, f, shapes, sharp = CASES[name]
    point = random_point(0, **shapes)
    operation = make(**point)
    assert isinstance(operation, Operation)
    check_all_blocks(operation, f, point)
    check_structure_of_all_blocks(operation, next(iter(point.values())), sharp=tuple(sharp))
    first = next(iter(shapes))
    for ask in (lambda: operation.jacobian("nothing"), lambda: operation.hessian(first, "nothing")):
        with pytest.raises(ValueError, match="no argument is called 'nothing'"):
            ask()


X, V = torch.ones(2, 3), torch.ones(3)
SCORES = {"P": torch.ones(4, 5), "R": torch.ones(6, 5)}


EXACT = np.array([[Fraction(1), Fraction(-2), Fraction(4)]], dtype=object)
ONE, SQUARE, GAIN = torch.ones(1, 1), torch.ones(2, 2), torch.ones(4)
ATTENTION = {"X": torch.ones(3, 4), "W_Q": torch.ones(4, 2), "W_K": torch.ones(4, 2), "W_V": torch.ones(4, 4)}
NETWORK = {"Y": torch.ones(3, 4), "W_1": torch.ones(4, 5), "W_2": torch.ones(5, 4)}
MALFORMED: list[tuple[Callable[[], Any], str]] = [
    (lambda: AffineAt(X, X), r"AffineAt: expected X \(L, d\), W \(d, m\) and b \(m,\), got"),
    (
        lambda: TokenEmbeddingAt(TOKENS.reshape(1, 3), X),
        r"expected integer tokens \(L,\) and E \(V, d\), got int64 tokens of shape \(1, 3\)",
    ),
    (lambda: TokenEmbeddingAt([5], torch.ones(5, 2)), "there is no row 5 of 5"),
    (lambda: ColumnScaleAt(X, V[:2]), r"ColumnScaleAt: expected X \(L, d\) and v \(d,\), got \(2, 3\) and \(2,\)"),
    (lambda: ScalarScaleAt(X, V), r"ScalarScaleAt: a must be one number, of shape \(\) or \(1,\), got \(3,\)"),
    (lambda: HadamardAt(X, V), r"HadamardAt: X and Y need one shape, got \(2, 3\) and \(3,\)"),
    (
        lambda: HeadProductAt(**SCORES, heads=4, kind="scores"),
        r"with 4 heads, scores need P \(4 L, k\) and R \(4 S, k\), got \(4, 5\) and \(6, 5\)",
    ),
    (lambda: HeadProductAt(**SCORES, heads=2, kind="score"), "there is no kind 'score'; the kinds are 'scores' and 'mix'"),
    (
        lambda: LinearMapAt(X, mean_rows(2, 3), (2, 3)),
        r"LinearMapAt: X of shape \(2, 3\) to \(2, 3\) needs a matrix of shape \(6, 6\)",
    ),
    (lambda: Selection([0, 2], 2), "Selection: there is no row 2 of 2; rows are numbered 0 to 1"),
    (lambda: take_row(3, 4, 3), "take_row: there is no row 3 of 3"),
    (lambda: GroupNormRowsAt(torch.eye(2, 6), 4), r"X must be L x d with d a multiple of the 4 groups, got \(2, 6\)"),
    (lambda: GroupNormRowsAt(torch.eye(2, 6), 2, kind="rms"), "there is no kind 'rms'; the kinds are 'layernorm' and 'rmsnorm'"),
    (lambda: LayerNormAt(torch.ones(3, 4), gamma=V), r"LayerNormAt: gamma must have shape \(4,\)"),
    (lambda: RMSNormAt(torch.ones(1, 3, 4)), "one sequence"),
    (lambda: LayerNormAt(torch.tensor([[1.0, 2.0], [3.0, 3.0]])).value, r"scale of row 1 is 0.*not constant"),
    (lambda: RMSNormAt(torch.zeros(1, 2)).value, r"scale of row 0 is 0.*not zero"),
    (lambda: LayerNormAt(EXACT, eps=1e-5).s, "pass a Fraction"),
    (lambda: LayerNormAt(torch.eye(3, 4), eps=torch.ones(2)).s, "one entry for each of its 3 rows"),
    (lambda: SoftmaxAt(SQUARE, mask=torch.tensor([[True, True], [False, False]])).value, "row without entries"),
    (lambda: ActivationAt("swish", ONE), "no kind 'swish'; the kinds are identity, relu"),
    (lambda: MeanPoolHeadAt(X, torch.ones(2, 4)), "expected Z"),
    (lambda: MeanSquaredErrorAt(torch.ones(1, 2), torch.ones(2, 1)), "the target"),
    (lambda: CrossEntropyAt(torch.ones(2, 5), [0, 5]), "need L labels below C"),
    (lambda: FeedForwardAt(**{**NETWORK, "W_1": NETWORK["W_1"].T}), "need to conform"),
    (lambda: FeedForwardAt(**NETWORK, b_1=GAIN), r"b_1 needs shape \(5,\)"),
    (lambda: AttentionAt(**ATTENTION).Phi("Q", "O"), "no argument is called 'W_O'"),
    (lambda: AttentionAt(**ATTENTION, W_O=torch.ones(3, 2)), "does not conform"),
    (lambda: TokenEmbeddingAt(torch.tensor([0.5]), X), "got float32 tokens"),
    (lambda: HeadProductAt(**SCORES, heads=2, kind="mix"), r"with 2 heads, a mixture needs P \(2 L, S\) and R \(2 S, v\)"),
    (lambda: Selection([-1], 2), "there is no row -1 of 2"),
    (lambda: GroupNormRowsAt(torch.eye(2, 6), 2, V), r"gamma and beta must have shape \(6,\)"),
    (lambda: SoftmaxAt(V), "L x S"),
    (lambda: SoftmaxAt(SQUARE, weights=X), "weights have shape"),
    (lambda: MeanPoolHeadAt(X, torch.ones(3, 4), V), "expected Z"),
    (lambda: CrossEntropyAt(torch.ones(2, 5), [0]), "need L labels below C"),
    (lambda: FeedForwardAt(**{**NETWORK, "W_2": torch.ones(5, 2)}), "need to conform"),
    (lambda: AttentionAt(**{**ATTENTION, "W_K": ATTENTION["W_K"][:3]}), "need 4 rows"),
    (lambda: rotary(5, 6, cos=ONE), "both or none of cos and sin"),
    (lambda: Rotations(X, X[:1]), r"Rotations: cos and sin need one shape \(L, w/2\)"),
    (lambda: rotary(5, 3), "expected an even width"),
    (lambda: rotary(4, 6, cos=ONE, sin=ONE), r"cos and sin need shape \(4, 3\), got \(1, 1\)"),
]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case[1][:40])
def test_malformed_arguments(case: tuple[Callable[[], Any], str]) -> None:
    make, message = case
    with pytest.raises(ValueError, match=message):
        make()


LENGTH, WIDTH, HEADS = 5, 6, 2


def rotate_half(x):
    return torch.cat((-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1)


def turned(x, theta):
    """q cos + rotate_half(q) sin for x of shape (HEADS, LENGTH, WIDTH), as in Hugging Face's modeling_llama."""
    inverse_frequencies = 1.0 / (theta ** (torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH))
    frequencies = torch.outer(torch.arange(LENGTH, dtype=torch.float64), inverse_frequencies)
    angles = torch.cat((frequencies, frequencies), -1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


@pytest.mark.parametrize("theta", [10000.0, 7.0])
def test_it_is_rotate_half(theta):
    x = random_point(0, x=(HEADS, LENGTH, WIDTH))["x"]
    matrix = rotary(LENGTH, WIDTH, HEADS, theta)
    assert relative_error((matrix @ x.reshape(-1)).reshape(HEADS, LENGTH, WIDTH), turned(x, theta)) <= 1e-15
    check_structure(matrix, x, sharp=True)


def test_exact_and_scaled_angles():
    cos, sin = (np.array([[Fraction(n, 5)], [Fraction(2 * n, 5)]], dtype=object) for n in (3, 4))
    matrix = rotary(2, 2, cos=cos, sin=sin)
    assert (matrix @ np.array([5, 0, 0, 5], dtype=object)).tolist() == [3, 4, -8, 6]
    assert (matrix.T @ matrix).dense().tolist() == np.diag([1, 1, 4, 4]).tolist()
    assert matrix.norm_bound() == pytest.approx(2, abs=1e-15)  # the second pair is also stretched
    assert rotary(2, 2, cos=cos[:1].repeat(2, 0), sin=sin[:1].repeat(2, 0)).norm_bound() == pytest.approx(1, abs=1e-15)
