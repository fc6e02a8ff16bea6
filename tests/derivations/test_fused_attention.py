"""Fused attention as a primitive: four actions against the same formula in plain operations."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from action_reference import check_actions
from second_order_reference import relative_error
from torch import Tensor

from derivations.fused_attention import ScaledDotProductAttention

SHAPES = {
    "one sequence": ((3, 4), (5, 4), (5, 2)),
    "batch": ((2, 3, 4), (2, 5, 4), (2, 5, 2)),
    "batch and heads": ((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2)),
    "queries repeated": ((1, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 2)),
    "keys repeated": ((2, 3, 5, 4), (2, 1, 6, 4), (2, 3, 6, 2)),
    "values repeated": ((2, 3, 5, 4), (2, 3, 6, 4), (6, 2)),
    "only values in batches": ((5, 4), (6, 4), (2, 3, 6, 2)),
    "each in its own axis": ((2, 1, 1, 5, 4), (3, 1, 6, 4), (7, 6, 2)),
}
SUBSETS = [m for n in (1, 2, 3) for m in itertools.combinations(range(3), n)]


def draw(*shapes: tuple[int, ...], seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def plain(Q: Tensor, K: Tensor, V: Tensor, B: Tensor | None = None, *, keep: Tensor | None = None, scale: float = 0.5) -> Tensor:
    """The formula with exponentials; entries and rows that are masked get weight zero."""
    T = scale * torch.einsum("...le,...se->...ls", Q, K)
    T = T if B is None else T + B
    powers = T.exp() if keep is None else torch.where(keep, T.exp(), 0.0)
    total = powers.sum(-1, keepdim=True)
    return torch.einsum("...ls,...sv->...lv", powers / torch.where(total == 0, 1.0, total), V)


def hand_written_second_order(f, inputs, adjoint, tangents):
    """The contracted second derivative by reverse over reverse."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad((adjoint * f(*leaves)).sum(), leaves, create_graph=True)
    along = sum((g * t).sum() for g, t in zip(first, tangents, strict=True))
    return torch.autograd.grad(along, leaves)


@pytest.mark.parametrize("moving", SUBSETS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_actions(shapes, moving):
    check_actions(ScaledDotProductAttention(), plain, draw(*SHAPES[shapes]), moving)


@pytest.mark.parametrize("shapes", ["one sequence", "batch and heads", "each in its own axis"])
def test_curvature_by_double_backward(shapes):
    inputs = draw(*SHAPES[shapes])
    adjoint, *tangents = draw(plain(*inputs).shape, *SHAPES[shapes], seed=4)
    seen = ScaledDotProductAttention().curvature(inputs, adjoint, [t.unsqueeze(0) for t in tangents])
    for covector, expected in zip(seen, hand_written_second_order(plain, inputs, adjoint, tangents), strict=True):
        assert relative_error(covector[0], expected) <= 1e-13


@pytest.mark.parametrize("moving", SUBSETS)
def test_scale(moving):
    inputs = draw(*SHAPES["batch and heads"])
    check_actions(ScaledDotProductAttention(scale=-1.3), lambda *x: plain(*x, scale=-1.3), inputs, moving)
    check_actions(ScaledDotProductAttention(scale=0.0), lambda *x: plain(*x, scale=0.0), inputs, [2])


@pytest.mark.parametrize("moving", SUBSETS)
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 6), (6, 3)])
def test_causal(queries, keys, moving):
    keep = torch.arange(keys) <= torch.arange(queries).unsqueeze(-1)
    inputs = draw((2, queries, 4), (2, keys, 4), (2, keys, 3))
    check_actions(ScaledDotProductAttention(is_causal=True), lambda *x: plain(*x, keep=keep), inputs, moving)


MASKS = [(5, 6), (1, 6), (3, 5, 6), (2, 1, 5, 6), (2, 1, 1, 6), (2, 3, 5, 6)]


@pytest.mark.slow
@pytest.mark.parametrize("moving", SUBSETS)
@pytest.mark.parametrize("shape", MASKS)
def test_constant_masks(shape, moving):
    inputs = draw(*SHAPES["batch and heads"])
    (B,) = draw(shape, seed=9)
    keep = B < 0.4
    check_actions(ScaledDotProductAttention(keep), lambda *x: plain(*x, keep=keep), inputs, moving)
    check_actions(ScaledDotProductAttention(B), lambda *x: plain(*x, B), inputs, moving)
    hidden = B.masked_fill(~keep, -torch.inf)
    check_actions(ScaledDotProductAttention(hidden), lambda *x: plain(*x, B, keep=keep), inputs, moving)


@pytest.mark.parametrize("moving", [(0, 1, 2, 3), (3,), (0, 3), (2, 3)])
@pytest.mark.parametrize("shape", MASKS)
def test_a_mask_that_moves(shape, moving):
    inputs = draw(*SHAPES["batch and heads"], shape)
    check_actions(ScaledDotProductAttention(), plain, inputs, moving)


def test_rows_that_are_masked_altogether_are_zero():
    inputs = draw(*SHAPES["batch"])
    keep = torch.tensor([[True, True, False, True, False], [False] * 5, [False, True, False, False, False]])
    attention = ScaledDotProductAttention(keep)
    assert (attention.value(*inputs)[:, 1] == 0).all()  # torch's convention
    check_actions(attention, lambda *x: plain(*x, keep=keep), inputs, (0, 1, 2))
    adjoint, *tangents = draw((2, 3, 2), *((4, *x.shape) for x in inputs), seed=5)
    to_Q, to_K, to_V = attention.curvature(inputs, adjoint, tangents)
    assert (to_Q[:, :, 1] == 0).all()
    assert (to_Q[:, :, 2] == 0).all()  # a single key has weight one, wherever the query goes
    assert (to_K[:, :, [2, 4]] == 0).all()
    assert (to_V[:, :, [2, 4]] == 0).all()


@pytest.mark.parametrize("moving", SUBSETS)
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_grouped_query_heads(groups, moving):
    inputs = draw((2, 6, 3, 4), (2, groups, 5, 4), (2, groups, 5, 2))
    (B,) = draw((6, 3, 5), seed=8)

    def repeated(Q: Tensor, K: Tensor, V: Tensor, B: Tensor | None = None) -> Tensor:
        index = torch.arange(6) // (6 // groups)
        return plain(Q, K[:, index], V[:, index], B)

    check_actions(ScaledDotProductAttention(enable_gqa=True), repeated, inputs, moving)
    check_actions(ScaledDotProductAttention(enable_gqa=True), repeated, [*inputs, B], [*moving, 3])
    assert ScaledDotProductAttention(enable_gqa=True).rowwise(inputs, 1, (True,) * 3)
    assert ScaledDotProductAttention(enable_gqa=True).rowwise(inputs, 2, (True,) * 3) == (groups == 6)


def test_a_common_shift_of_the_keys_changes_nothing():
    inputs = draw(*SHAPES["batch"])
    shift = draw((4, 2, 1, 4), seed=6)[0].expand(4, 2, 5, 4)
    adjoint = torch.ones(2, 3, 2, dtype=torch.float64)
    assert ScaledDotProductAttention().jvp(inputs, (None, shift, None)).abs().max() < 1e-14
    to_Q, to_K, to_V = ScaledDotProductAttention().curvature(inputs, adjoint, (None, shift, None))
    assert max(float(w.abs().max()) for w in (to_K, to_V)) < 1e-14
    M_shift = to_Q.abs().max()  # the adjoint of T sums to zero in every row
    assert M_shift < 1e-14


def test_a_single_key_has_weight_one():
    inputs = draw((2, 3, 4), (2, 1, 4), (2, 1, 2))
    adjoint, *tangents = draw((2, 3, 2), *((4, *x.shape) for x in inputs), seed=6)
    assert torch.equal(ScaledDotProductAttention().jvp(inputs, tangents), tangents[2].expand(4, 2, 3, 2))
    assert all((w == 0).all() for w in ScaledDotProductAttention().curvature(inputs, adjoint, tangents))


def test_large_logits():
    Q, K, V = draw(*SHAPES["batch"])
    adjoint, *tangents = draw((2, 3, 2), *((4, *x.shape) for x in (Q, K, V)), seed=5)
    assert all(torch.isfinite(w).all() for w in ScaledDotProductAttention().curvature((1e3 * Q, K, V), adjoint, tangents))


def test_many_directions_are_those_of_each():
    inputs = draw((2, 3, 40, 4), (2, 3, 50, 4), (2, 3, 50, 3))
    adjoint, *tangents = draw((2, 3, 40, 3), *((25, *x.shape) for x in inputs), seed=5)  # more than one part of directions
    attention = ScaledDotProductAttention()
    together = (attention.jvp(inputs, tangents), *attention.curvature(inputs, adjoint, tangents))
    for s in (0, 12, 24):
        one = [t[s : s + 1] for t in tangents]
        alone = (attention.jvp(inputs, one), *attention.curvature(inputs, adjoint, one))
        assert all(relative_error(a[s : s + 1], b) < 1e-14 for a, b in zip(together, alone, strict=True))


def test_which_rows_stay_apart():
    attention, everything = ScaledDotProductAttention(), (True, True, True)
    inputs = draw(*SHAPES["batch and heads"])
    assert [attention.rowwise(inputs, axes, everything) for axes in (1, 2, 3, 4)] == [True, True, False, False]
    assert [attention.rowwise(inputs, axes, (True, False, False)) for axes in (2, 3, 4)] == [True, True, False]
    assert not attention.rowwise(inputs, 3, (False, False, True))
    keys = draw(*SHAPES["keys repeated"])
    assert [attention.rowwise(keys, axes, everything) for axes in (1, 2)] == [True, False]
    assert attention.rowwise(keys, 2, (True, False, True))
    values = draw(*SHAPES["values repeated"])
    assert attention.rowwise(values, 3, (True, False, False))
    assert not attention.rowwise(values, 1, (False, False, True))
    biased = [*inputs, *draw((2, 1, 5, 6))]
    assert [attention.rowwise(biased, axes, (*everything, True)) for axes in (1, 2)] == [True, False]


LEADING = [(), (2,), (2, 2), (1, 2), (2, 1)]


def couples(block: Tensor, out: torch.Size, into: torch.Size, axes: int) -> bool:
    """Tell whether a Jacobian, of shape (*out, *into), has entries between different rows of the first axes."""
    rows = out[:axes].numel()
    entries = block.reshape(rows, -1, rows, into[axes:].numel()).abs().amax((1, 3))
    return out[:axes] != into[:axes] or bool((entries - entries.diagonal().diag()).any())


@pytest.mark.parametrize("queries", LEADING)
def test_no_derivative_couples_rows_that_are_said_to_stay_apart(queries):
    attention, claims = ScaledDotProductAttention(), 0
    for keys, values in itertools.product(LEADING, repeat=2):
        inputs = draw((*queries, 2, 2), (*keys, 2, 2), (*values, 2, 2))  # many equal lengths
        out = plain(*inputs).shape
        first = torch.func.jacrev(plain, (0, 1, 2))(*inputs)
        weights = torch.linspace(0.3, 1.7, out.numel(), dtype=torch.float64).reshape(out)
        second = torch.func.jacfwd(torch.func.grad(lambda *x, w=weights: (w * plain(*x)).sum(), (0, 1, 2)), (0, 1, 2))(*inputs)
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


def test_float32():
    inputs = draw(*SHAPES["batch and heads"])
    adjoint, *tangents = draw((2, 3, 5, 2), *((4, *x.shape) for x in inputs), seed=5)
    double = ScaledDotProductAttention().curvature(inputs, adjoint, tangents)
    single = ScaledDotProductAttention().curvature([x.float() for x in inputs], adjoint.float(), [t.float() for t in tangents])
    assert all(relative_error(a.double(), b) < 2e-6 for a, b in zip(single, double, strict=True))


def test_torch_alone_has_no_second_derivative():
    inputs = [x.requires_grad_() for x in draw(*SHAPES["batch and heads"])]
    inputs[2] = draw((2, 3, 6, 4))[0].requires_grad_()  # torch's fused kernel wants E_v = E
    grads = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(sum(g.sum() for g in grads), inputs)


def test_errors():
    Q, K, V = draw(*SHAPES["batch"])
    with pytest.raises(ValueError, match="every tangent is None"):
        ScaledDotProductAttention().jvp((Q, K, V), (None, None, None))
    assert ScaledDotProductAttention().curvature((Q, K, V), Q, (None, None, None)) == (None, None, None)
    with pytest.raises(ValueError, match="weights are not numbers"):
        ScaledDotProductAttention().vjp((Q / 0, K, V), torch.ones(1, 2, 3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="weights are not numbers"):
        ScaledDotProductAttention(torch.full((3, 5), torch.inf)).jvp((Q, K, V), (Q.unsqueeze(0), None, None))
