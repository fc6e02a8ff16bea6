"""The actions of a primitive against the matrices of its chapter in ``derivations``: two faces of one operation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from second_order_reference import random_point, relative_error

from derivations.activation import ActivationAt
from derivations.activation_functions import KINDS
from derivations.affine import AffineAt
from derivations.embedding import TokenEmbeddingAt
from derivations.gains import HadamardAt
from derivations.head_products import HeadProductAt
from derivations.linear_map import LinearMapAt, mean_rows
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import OperationAt
from derivations.softmax import SoftmaxAt
from hessiankit.primitives.activation import Activation
from hessiankit.primitives.embedding import Embedding
from hessiankit.primitives.linear import MatMul, Multiply
from hessiankit.primitives.loss import CrossEntropy, MeanSquaredError
from hessiankit.primitives.normalization import LayerNorm, RMSNorm
from hessiankit.primitives.pooling import Mean
from hessiankit.primitives.primitive import Primitive
from hessiankit.primitives.softmax import Softmax


class Pair(NamedTuple):
    """A primitive, its chapter as a function of the inputs that move, their shapes, and constant inputs behind them."""

    primitive: Primitive
    chapter: Callable[..., OperationAt]
    shapes: dict[str, tuple[int, ...]]
    constants: Sequence[torch.Tensor] = ()


TOKENS, LABELS, TARGET = torch.tensor([2, 0, 2, 1]), torch.tensor([4, 0, 2]), random_point(7, T=(3, 5))["T"]
NORM = {"X": (3, 4), "gamma": (4,)}
PAIRS = {
    "affine": Pair(MatMul(), AffineAt, {"X": (4, 3), "W": (3, 2), "b": (2,)}),
    "product of heads": Pair(MatMul(), lambda P, R: HeadProductAt(P, R, 1, "mix"), {"P": (2, 3), "R": (3, 4)}),
    "entrywise product": Pair(Multiply(), HadamardAt, {"X": (3, 2), "Y": (3, 2)}),
    "embedding": Pair(Embedding(TOKENS, 1), lambda E: TokenEmbeddingAt(TOKENS, E, 1), {"E": (3, 2)}),
    "mean of rows": Pair(Mean((0,), True), lambda X: LinearMapAt(X, mean_rows(4, 3), (1, 3)), {"X": (4, 3)}),
    "softmax": Pair(Softmax(-1), SoftmaxAt, {"T": (3, 4)}),
    "layer norm": Pair(LayerNorm(1, 0.3), lambda **p: LayerNormAt(**p, eps=0.3), {**NORM, "beta": (4,)}),
    "layer norm of pairs": Pair(LayerNorm(1, 0.3), lambda X: LayerNormAt(X, eps=0.3), {"X": (3, 2)}),
    "root mean square": Pair(RMSNorm(1, 0.3), lambda **p: RMSNormAt(**p, eps=0.3), NORM),
    "squared error": Pair(MeanSquaredError(15.0, True), lambda Z: MeanSquaredErrorAt(Z, TARGET), {"Z": (3, 5)}, (TARGET,)),
    "cross entropy": Pair(CrossEntropy(), lambda logits: CrossEntropyAt(logits, LABELS), {"logits": (3, 5)}, (LABELS,)),
    **{kind: Pair(Activation(kind), lambda X, k=kind: ActivationAt(k, X), {"X": (3, 4)}) for kind in KINDS},
}


@pytest.mark.parametrize("name", PAIRS)
def test_actions_are_products_with_the_matrices(name: str) -> None:
    primitive, chapter, shapes, constants = PAIRS[name]
    point = random_point(0, **shapes)
    at, inputs, names = chapter(**point), [*point.values(), *constants], list(shapes)
    value = primitive.value(*inputs)
    adjoint = random_point(1, w=value.shape)["w"]
    assert relative_error(value.reshape(at.value.shape), at.value) <= 1e-14
    tangents = list(random_point(2, **{n: (1, *shape) for n, shape in shapes.items()}).values())
    pulled = primitive.vjp(inputs, adjoint.unsqueeze(0))
    for k, i in enumerate(names):
        J = at.jacobian(i).dense(value)
        alone = [t if n == k else None for n, t in enumerate(tangents)] + [None] * len(constants)
        assert relative_error(primitive.jvp(inputs, alone).reshape(-1), J @ tangents[k].reshape(-1)) <= 1e-13
        assert relative_error(pulled[k].reshape(-1), J.T @ adjoint.reshape(-1)) <= 1e-13
    for (_, i), (k, j) in itertools.product(enumerate(names), repeat=2):
        alone = [t if n == k else None for n, t in enumerate(tangents)] + [None] * len(constants)
        covector = primitive.curvature(inputs, adjoint, alone)[names.index(i)]
        matrix = at.hessian(i, j).dense(value).reshape(value.numel(), point[i].numel(), -1)
        expected = torch.einsum("o,oij,j->i", adjoint.reshape(-1), matrix, tangents[k].reshape(-1))
        seen = torch.zeros_like(expected) if covector is None else covector.reshape(-1)
        assert relative_error(seen, expected) <= 1e-13
