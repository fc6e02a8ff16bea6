"""Fused attention as a primitive: four actions against the same formula in plain operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from action_reference import couples
from primitive_cases import QKV, draw
from primitive_cases import attention as attention_formula
from second_order_reference import relative_error

from derivations.fused_attention import ScaledDotProductAttention

SUBSETS = [m for n in (1, 2, 3) for m in itertools.combinations(range(3), n)]


def test_rows_that_are_masked_altogether_are_zero():
    inputs = draw(*QKV["batch"])
    keep = torch.tensor([[True, True, False, True, False], [False] * 5, [False, True, False, False, False]])
    attention = ScaledDotProductAttention(keep)
    assert (attention.value(*inputs)[:, 1] == 0).all()  # torch's convention
    adjoint, *tangents = draw((2, 3, 2), *((4, *x.shape) for x in inputs), seed=5)
    to_Q, to_K, to_V = attention.curvature(inputs, adjoint, tangents)
    assert (to_Q[:, :, 1] == 0).all()
    assert (to_Q[:, :, 2] == 0).all()  # a single key has weight one, wherever the query goes
    assert (to_K[:, :, [2, 4]] == 0).all()
    assert (to_V[:, :, [2, 4]] == 0).all()


def test_many_directions_are_those_of_each():
    inputs = draw((2, 3, 40, 4), (2, 3, 50, 4), (2, 3, 50, 3))
    adjoint, *tangents = draw((2, 3, 40, 3), *((25, *x.shape) for x in inputs), seed=5)  # more than one part of directions
    attention = ScaledDotProductAttention()
    together = (attention.jvp(inputs, tangents), *attention.curvature(inputs, adjoint, tangents))
    for s in (0, 12, 24):
        one = [t[s : s + 1] for t in tangents]
        alone = (attention.jvp(inputs, one), *attention.curvature(inputs, adjoint, one))
        assert all(relative_error(a[s : s + 1], b) < 1e-14 for a, b in zip(together, alone, strict=True))


LEADING = [(), (2,), (2, 2), (1, 2), (2, 1)]


@pytest.mark.parametrize("queries", LEADING)
def test_no_derivative_couples_rows_that_are_said_to_stay_apart(queries):
    attention, claims = ScaledDotProductAttention(), 0
    for keys, values in itertools.product(LEADING, repeat=2):
        inputs = draw((*queries, 2, 2), (*keys, 2, 2), (*values, 2, 2))  # many equal lengths
        out = attention_formula(*inputs).shape
        first = torch.func.jacrev(attention_formula, (0, 1, 2))(*inputs)
        weights = torch.linspace(0.3, 1.7, out.numel(), dtype=torch.float64).reshape(out)
        second = torch.func.jacfwd(
            torch.func.grad(lambda *x, w=weights: (w * attention_formula(*x)).sum(), (0, 1, 2)), (0, 1, 2)
        )(*inputs)
        for moving in SUBSETS:
            flags = [k in moving for k in range(3)]
            for axes in range(1, 1 + min(inputs[k].ndim for k in moving)):
                if attention.rowwise(inputs, axes, flags):
                    claims += 1
                    assert not any(couples(first[k], out, inputs[k].shape, axes) for k in moving)
                if attention.separable(inputs, axes, flags):
                    pairs = itertools.product(moving, repeat=2)
                    assert not any(couples(second[i][j], inputs[i].shape, inputs[j].shape, axes) for i, j in pairs)
    assert claims > 0


def test_errors():
    Q, K, V = draw(*QKV["batch"])
    with pytest.raises(ValueError, match="every tangent is None"):
        ScaledDotProductAttention().jvp((Q, K, V), (None, None, None))
    assert ScaledDotProductAttention().curvature((Q, K, V), Q, (None, None, None)) == (None, None, None)
    with pytest.raises(ValueError, match="weights are not numbers"):
        ScaledDotProductAttention().vjp((Q / 0, K, V), torch.ones(1, 2, 3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="weights are not numbers"):
        ScaledDotProductAttention(torch.full((3, 5), torch.inf)).jvp((Q, K, V), (Q.unsqueeze(0), None, None))
