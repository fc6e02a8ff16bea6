"""The rules of bounded values, one by one: never below what autograd or the extremal case gives, and equal to it where it is sharp."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from curvature_reference import draw
from torch import Tensor

import hessiankit as hk
from hessiankit.blocks.norms import GroupNorm
from hessiankit.bounding.a_priori import a_priori
from hessiankit.bounding.rules import Bounded, BoundedParameter, affine, constant, gain_and_shift, mixed, norm
from hessiankit.bounding.structured import structured
from hessiankit.engine.problem.own_call import make_task

ROUNDING = 1 + 1e-12
WORST = math.log(0.5 + math.sqrt(3) / 6) - math.log(0.5 - math.sqrt(3) / 6)
"""The logit at which the third cumulant of a weight, p (1 - p) (1 - 2p), is largest: p = 1/2 +- sqrt(3)/6."""


def scalar(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


def itself(name: str, centre: Tensor) -> Bounded:
    """A value that is a parameter: its Jacobian in itself is the identity, its second derivative zero."""
    one = {name: 1.0}
    sizes = float(torch.linalg.matrix_norm(centre, 2)), float(centre.norm()), float(centre.norm(dim=1).max())
    return Bounded(centre, *sizes, one, {}, {}, diameter=float(torch.cdist(centre, centre).max()), jacobian_row=one)


def context(Q: Tensor, K: Tensor, V: Tensor, c: float, heads: int, groups: int) -> Tensor:
    """Softmax attention with heads side by side, ``groups`` of which read the same keys and values."""
    columns = []
    for h, q in enumerate(Q.chunk(heads, 1)):
        k, v = (Y.chunk(heads // groups, 1)[h // groups] for Y in (K, V))
        columns.append(torch.softmax(c * q @ k.T, -1) @ v)
    return torch.cat(columns, 1)


def share(true: float, limit: float) -> float:
    return true / limit if limit else (math.inf if true > 1e-14 else 0.0)


def ratios(Q: Tensor, K: Tensor, V: Tensor, A: Tensor, c: float, heads: int = 1, groups: int = 1) -> dict[tuple[str, str], float]:
    """True norm over bound of every block of the Hessian of <A, C(Q, K, V)>, and of the Jacobian of C, by autograd."""
    named = {"Q": Q, "K": K, "V": V}
    Z = mixed(*(itself(n, Y) for n, Y in named.items()), c, context(Q, K, V, c, heads, groups), heads=heads, groups=groups)
    blocks = torch.autograd.functional.hessian(lambda *at: (A * context(*at, c, heads, groups)).sum(), (Q, K, V))
    jacobians = torch.autograd.functional.jacobian(lambda *at: context(*at, c, heads, groups), (Q, K, V))
    found = {}
    for a, (i, Y) in enumerate(named.items()):
        J = jacobians[a].reshape(-1, Y.numel())
        found[i, "jacobian"] = share(float(torch.linalg.matrix_norm(J, 2)), Z.jacobian[i])
        for b, (j, W) in enumerate(named.items()):
            H = float(torch.linalg.matrix_norm(blocks[a][b].reshape(Y.numel(), W.numel()), 2))
            limit = float(A.norm(dim=1).max()) * Z.hessian_row.get((i, j), 0.0) + float(A.norm()) * Z.hessian_all.get((i, j), 0.0)
            found[i, j] = share(H, limit)
    return found


@pytest.mark.parametrize("shift", [0.0, 30.0])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (4, 2), (2, 2)])
def test_attention_stays_within_its_bounds(heads, groups, shift):
    """At generic points, and at ones far out, where ranges are much smaller than norms."""
    for seed in range(12):
        size = 10 ** (seed / 4 - 1.5)
        Q, K, V = (
            draw(3, 2 * heads, seed=seed) * size,
            draw(3, 2 * heads // groups, seed=seed + 50),
            draw(3, 2 * heads // groups, seed=seed + 90),
        )
        A = draw(3, 2 * heads, seed=seed + 130)
        assert max(ratios(Q, K + shift, V + shift, A, 0.7, heads, groups).values()) <= ROUNDING


def test_the_second_derivatives_of_attention_are_attained():
    """Two keys, with the weight of one where its third cumulant is largest."""
    kappa, c = 0.8, 0.6
    K, V = torch.tensor([[kappa], [-kappa]], dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    Q, A = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, 1, dtype=torch.float64)
    Q[0], A[0] = WORST / (2 * c * kappa), 1.0
    found = ratios(Q, K, V, A, c)
    assert found["K", "K"] == pytest.approx(1.0, rel=1e-6)
    assert found["Q", "Q"] == pytest.approx(1.0, rel=1e-6)


def test_the_second_derivatives_of_two_heads_that_share_keys_and_values_are_nearly_attained():
    """Each asks from a row of its own, so that nothing is lost between them."""
    kappa, c, eye = 0.8, 0.6, torch.eye(2, dtype=torch.float64)
    K, V = torch.tensor([[kappa], [-kappa]], dtype=torch.float64), torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert ratios(WORST / (2 * c * kappa) * eye, K, V, eye, c, 2, 2)["K", "K"] == pytest.approx(1.0, rel=1e-6)
    assert ratios(1.5 * eye, 0 * K, V, eye, c, 2, 2)["V", "K"] == pytest.approx(1 / math.sqrt(2), rel=1e-9)


def test_equal_keys_or_values_have_no_second_derivative():
    """Norms are large and ranges 0: the queries do not matter, or the keys do not."""
    Q, K, V = draw(3, 2), draw(1, 2, seed=2).expand(3, 2) * 9, draw(3, 2, seed=3)
    Z = mixed(itself("Q", Q), itself("K", K.clone()), itself("V", V), 0.7, context(Q, K, V, 0.7, 1, 1))
    assert Z.hessian_row["Q", "Q"] == Z.jacobian["Q"] == Z.hessian_all["V", "Q"] == 0.0
    Z = mixed(itself("Q", Q), itself("K", V), itself("V", K.clone()), 0.7, context(Q, V, K, 0.7, 1, 1))
    assert Z.hessian_row["Q", "Q"] == Z.hessian_row["K", "K"] == Z.jacobian["K"] == Z.hessian_all["Q", "K"] == 0.0


def test_a_bound_scales_as_its_block_does():
    """(W_Q, W_K) -> (t W_Q, W_K / t) is the same function: a second derivative by W_Q is divided by t each time, by W_K multiplied."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(4, 3, 2, "pre", n_kv_heads=1, activation="gelu", eps=0.1).double()
    x, y, t = draw(3, 4), draw(3, 4, seed=7), 3.0
    before = a_priori(block, x, y)
    with torch.no_grad():
        block.attention.W_Q.mul_(t)
        block.attention.W_K.div_(t)
    after, powers = a_priori(block, x, y), {"attention.W_Q": -1, "attention.W_K": 1}
    for i in before.names:
        for j in before.names:
            assert after[i, j] == pytest.approx(before[i, j] * t ** (powers.get(i, 0) + powers.get(j, 0)), rel=1e-9), (i, j)


def test_how_far_a_value_moves_over_a_ball():
    """Numbers in place of matrices, where the ends of the intervals are the worst case: every drift is attained."""
    x, w, v, b, r = -1.3, 0.7, 2.0, 0.4, (0.2, 0.5, 0.3)
    Y = affine(
        constant(scalar(x)),
        BoundedParameter("W", scalar(w), r[0]),
        BoundedParameter("b", torch.tensor([b], dtype=torch.float64), r[2]),
    )
    assert Y.drift == pytest.approx(abs(x) * r[0] + r[2], rel=1e-11)
    Z = affine(Y, BoundedParameter("V", scalar(v), r[1]))
    ends = [(x * (w + p * r[0]) + b + q * r[2]) * (v + s * r[1]) for p in (-1, 1) for q in (-1, 1) for s in (-1, 1)]
    at = (x * w + b) * v
    assert Z.drift == pytest.approx(max(abs(end - at) for end in ends), rel=1e-11)


def test_the_range_of_rows_is_attained_by_each_of_its_bounds():
    """Rows at opposite ends of a ball, or orthogonal ones, which have more distance than their spectral norm has."""
    for rows in ([[1.0, 0.0], [-1.0, 0.0]] * 3, [[1.0, 0.0], [0.0, 1.0]]):
        X = torch.tensor(rows, dtype=torch.float64)
        distance = float(torch.cdist(X, X).max())
        assert constant(X).range == pytest.approx(distance, rel=1e-9)
        assert replace(constant(X), diameter=math.inf).range == pytest.approx(distance, rel=1e-9)


def test_a_learnable_scale_by_its_extremal_cases():
    """A number multiplies every entry, so that its Jacobian is |Y|_F; a scale for each feature has that of the largest column."""
    Y = constant(torch.tensor([[1.0, 2.0], [1.0, -2.0]], dtype=torch.float64))
    number, features = (BoundedParameter("s", torch.full((n,), 3.0, dtype=torch.float64), 0.5) for n in (1, 2))
    assert (Y * number).jacobian["s"] == pytest.approx(math.sqrt(10), rel=1e-9)
    assert (Y * features).jacobian["s"] == pytest.approx(math.sqrt(8), rel=1e-9)
    assert (Y * number).drift == pytest.approx(0.5 * math.sqrt(10), rel=1e-9)


def test_a_group_norm_of_one_group_is_bounded_as_the_norm_itself():
    """With a large shift, and over a ball; in the gain the bound of the group norm is the better one."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(4, 3, 2, "pre", activation="gelu", eps=0.1).double()
    with torch.no_grad():
        for part in (block.norm_1, block.norm_2):
            part.weight.copy_(draw(4, seed=1))
            part.bias.copy_(3 + draw(4, seed=2))
    grouped = copy.deepcopy(block)
    for name in ("norm_1", "norm_2"):
        one = GroupNorm(4, 1, eps=0.1).double()
        one.load_state_dict(getattr(block, name).state_dict())
        setattr(grouped, name, one)
    x, y = draw(3, 4, seed=3), draw(3, 4, seed=4)
    own, found = (a_priori(module, x, y, radius=0.01) for module in (block, grouped))
    for i in own.names:
        for j in own.names:
            if "norm_1.weight" in (i, j):
                assert found[i, j] <= own[i, j] * ROUNDING
            else:
                assert found[i, j] == pytest.approx(own[i, j], rel=1e-10), (i, j)


@pytest.mark.parametrize("options", [{}, {"rotary": True, "n_kv_heads": 1}, {"causal": True}])
def test_without_a_residual_only_the_gauss_newton_term_is_left(options):
    """The value at the centre is the block's own, so with that for the target the bound of a pair is g_i g_j."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(8, 3, 2, "pre", activation="gelu", **options).double()
    x = draw(3, 8)
    norms = a_priori(block, x, block(x).detach()).norms
    torch.testing.assert_close(norms.square(), torch.outer(norms.diagonal(), norms.diagonal()), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("layernorm", [True, False])
def test_a_ball_that_reaches_a_row_of_scale_zero(layernorm):
    """There the Jacobian of a norm is 1 / sqrt(eps), and the bound is that; with half the radius, the Jacobian where rows are smallest."""
    eps, x, W = 0.04, scalar(2.0), torch.tensor([[3.0, -3.0]], dtype=torch.float64)  # of mean 0, so centred or not is the same
    for share in (1.0, 0.5):
        X = affine(constant(x), BoundedParameter("W", W, share * float(W.norm())))
        Y = norm(X, layernorm=layernorm, eps=eps)
        smallest = math.sqrt((2 * 3 * (1 - share)) ** 2 + eps)
        assert Y.jacobian["W"] == pytest.approx(2.0 / smallest, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_what_cancels_at_the_end_stays_below_the_structured_bound(seed):
    """Rows of a norm have one length, so ||Z||^2 has no curvature: what is left of two large terms is their rounding."""
    torch.manual_seed(seed)
    block = hk.TransformerBlock(4, 3, affine=False, eps=0.0, activation="gelu").double()
    x = draw(1, 3, 4, seed=seed) * 1e-3
    H, own = hk.hessian(block, x, 0 * x), structured(make_task("bounds", block, x, 0 * x, "mse"))
    size = float(torch.linalg.matrix_norm(H.outer(), 2))
    assert H.spectral_norm() <= own.whole <= 1e-9 * size
    for i, j in H.pairs():
        assert H.spectral_norm(i, j) <= own.pairs[i, j]


def test_what_cancels_at_the_end_does_so_behind_a_gain_too():
    """A gain of ones leaves the rows of one length: the weights have no curvature, in the bound neither."""
    torch.manual_seed(0)
    block, x = hk.TransformerBlock(4, 3, eps=0.0, activation="gelu").double(), draw(1, 3, 4)
    own = structured(make_task("bounds", block, x, 0 * x, "mse"))
    assert own.pairs["norm_2.weight", "norm_2.weight"] > 0.1
    assert own.pairs["feedforward.W_2", "feedforward.W_2"] <= 1e-9


@pytest.mark.parametrize("layernorm", [True, False])
def test_sizes_and_drift_of_a_norm_with_gain_are_attained(layernorm):
    """With eps = 0 and one gain for all entries every row has length 3 sqrt(d); with a large eps a norm is division by its root."""
    X, gain = draw(3, 4), BoundedParameter("g", torch.full((4,), -3.0, dtype=torch.float64), 0.0)
    rows = X - X.mean(1, keepdim=True) if layernorm else X
    value = -3 * rows / rows.square().mean(1, keepdim=True).sqrt()
    Y = gain_and_shift(norm(constant(X), layernorm=layernorm, eps=0.0), gain, None)
    assert Y.frobenius == pytest.approx(float(value.norm()), rel=1e-9)
    assert Y.row == pytest.approx(float(value.norm(dim=1).max()), rel=1e-9)
    assert Y.spectral >= float(torch.linalg.matrix_norm(value, 2))
    flat = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    moving = affine(constant(scalar(2.0)), BoundedParameter("W", flat, 0.5))
    large = norm(moving, layernorm=layernorm, eps=100.0)
    assert large.drift == pytest.approx(2.0 * 0.5 / 10, rel=0.05)
    peaked = torch.tensor([[5.0, 0.0]], dtype=torch.float64)  # normalised: (sqrt(2), 0), which a gain's first entry moves
    gain = BoundedParameter("g", flat[0], 0.25)
    still, one = (gain_and_shift(norm(constant(rows), layernorm=False, eps=0.0), gain, None) for rows in (flat, peaked))
    assert still.drift == one.drift == pytest.approx(0.25 * math.sqrt(2), rel=1e-9)


def test_a_shift_along_a_row_attains_the_longest_row():
    X = constant(torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64))
    Y = affine(
        X,
        BoundedParameter("W", torch.eye(2, dtype=torch.float64), 0.0),
        BoundedParameter("b", torch.tensor([6.0, 8.0], dtype=torch.float64), 0.5),
    )
    assert Y.row == pytest.approx(5.0 + 10.5, rel=1e-9)
