"""The rules of bounded values, one by one: never below what autograd or the extremal case gives, and equal to it where it is sharp."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from curvature_reference import draw
from torch import Tensor

import hessiankit as hk
from hessiankit.blocks import ACTIVATIONS
from hessiankit.request.read import read_request
from hessiankit.theory.bounding.a_priori import _on_a_sphere, a_priori
from hessiankit.theory.bounding.rules import (
    Bounded,
    BoundedParameter,
    Magnitudes,
    activation,
    affine,
    constant,
    gain_and_shift,
    hadamard,
    merge,
    mixed,
    norm,
    shifted,
    split,
)
from hessiankit.theory.bounding.structured import structured

ROUNDING = 1 + 1e-12
WORST = math.log(0.5 + math.sqrt(3) / 6) - math.log(0.5 - math.sqrt(3) / 6)
"""The logit at which the third cumulant of a weight, p (1 - p) (1 - 2p), is largest: p = 1/2 +- sqrt(3)/6."""


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scalar(value: float) -> Tensor:
    return f64([[value]])


def parameter(name: str, values: object, radius: float = 0.0) -> BoundedParameter:
    return BoundedParameter(name, values if isinstance(values, Tensor) else f64(values), radius)


def itself(name: str, centre: Tensor) -> Bounded:
    """A value that is a parameter: its Jacobian in itself is the identity, its second derivative zero."""
    one = Magnitudes({name: 1.0})
    sizes = float(torch.linalg.matrix_norm(centre, 2)), float(centre.norm()), float(centre.norm(dim=1).max())
    return Bounded(
        centre, *sizes, one, Magnitudes(), Magnitudes(), diameter=float(torch.cdist(centre, centre).max()), jacobian_row=one
    )


def context(Q: Tensor, K: Tensor, V: Tensor, c: float, heads: int, groups: int) -> Tensor:
    """Softmax attention with heads side by side, ``groups`` of which read the same keys and values."""
    columns = []
    for h, q in enumerate(Q.chunk(heads, 1)):
        k, v = (Y.chunk(heads // groups, 1)[h // groups] for Y in (K, V))
        columns.append(torch.softmax(c * q @ k.T, -1) @ v)
    return torch.cat(columns, 1)


def attended(Q: Tensor, K: Tensor, V: Tensor, c: float, heads: int = 1, groups: int = 1) -> Bounded:
    """The bounds of attention where queries, keys and values are parameters."""
    C = context(Q, K, V, c, heads, groups)
    return mixed(itself("Q", Q), itself("K", K), itself("V", V), c, C, heads=heads, groups=groups)


def share(true: float, limit: float) -> float:
    return true / limit if limit else (math.inf if true > 1e-14 else 0.0)


def ratios(Q: Tensor, K: Tensor, V: Tensor, A: Tensor, c: float, heads: int = 1, groups: int = 1) -> dict[tuple[str, str], float]:
    """True norm over bound of every block of the Hessian of <A, C(Q, K, V)>, and of the Jacobian of C, by autograd."""
    named = {"Q": Q, "K": K, "V": V}
    Z = attended(Q, K, V, c, heads, groups)
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
    for seed in range(6):
        size = 10 ** (seed / 2 - 1.5)
        Q, K, V = (
            draw(3, 2 * heads, seed=seed) * size,
            draw(3, 2 * heads // groups, seed=seed + 50),
            draw(3, 2 * heads // groups, seed=seed + 90),
        )
        A = draw(3, 2 * heads, seed=seed + 130)
        assert max(ratios(Q, K + shift, V + shift, A, 0.7, heads, groups).values()) <= ROUNDING


ONE = f64([[1.0], [-1.0]])


def test_the_second_derivatives_of_attention_are_attained():
    """Two keys, with the weight of one where its third cumulant is largest."""
    kappa, c = 0.8, 0.6
    Q, A = f64([[WORST / (2 * c * kappa)], [0.0]]), f64([[1.0], [0.0]])
    found = ratios(Q, kappa * ONE, ONE, A, c)
    assert found["K", "K"] == pytest.approx(1.0, rel=1e-6)
    assert found["Q", "Q"] == pytest.approx(1.0, rel=1e-6)


def test_the_second_derivatives_of_two_heads_that_share_keys_and_values_are_nearly_attained():
    """Each asks from a row of its own, so that nothing is lost between them."""
    kappa, c, eye = 0.8, 0.6, torch.eye(2, dtype=torch.float64)
    assert ratios(WORST / (2 * c * kappa) * eye, kappa * ONE, ONE, eye, c, 2, 2)["K", "K"] == pytest.approx(1.0, rel=1e-6)
    assert ratios(1.5 * eye, 0 * ONE, ONE, eye, c, 2, 2)["V", "K"] == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("groups", [1, 2])
def test_where_each_head_asks_from_a_row_of_its_own_the_bounds_of_attention_are_attained(groups):
    """Two keys of equal weight, values 1 and -1; two heads that read them ask from two rows. Shared keys or one head, every factor."""
    c, kappa, q, eye = 0.6, 0.8, 1.7, torch.eye(2, dtype=torch.float64)[:groups, :groups]
    along_q = ratios(0 * eye, kappa * ONE, ONE, eye, c, groups, groups)
    assert along_q["Q", "jacobian"] == pytest.approx(1.0, rel=1e-9)
    assert along_q["V", "Q"] == pytest.approx(1.0, rel=1e-9)
    along_k = ratios(q * eye, 0 * ONE, ONE, eye, c, groups, groups)
    assert along_k["K", "jacobian"] == pytest.approx(1.0, rel=1e-9)
    assert along_k["V", "K"] == pytest.approx(1.0, rel=1e-9)
    assert ratios(0 * eye, 0 * ONE, ONE, eye, c, groups, groups)["Q", "K"] == pytest.approx(1.0, rel=1e-9)  # the covariance


@pytest.mark.parametrize("groups", [1, 2])
def test_the_third_cumulant_of_queries_and_keys_is_attained(groups):
    """Of two keys it is the product of the three differences times p (1 - p) (1 - 2 p): two heads share one unit vector dQ."""
    c, kappa, q = 0.6, 0.8, 1.7
    Z = attended(q * torch.eye(groups, dtype=torch.float64), kappa * ONE, ONE, c, groups, groups)
    p = 1 / (1 + math.exp(-WORST))
    cumulant = 2.0 * (2 * kappa) * (math.sqrt(2) * q) * abs(p * (1 - p) * (1 - 2 * p))
    assert Z.hessian_row["Q", "K"] == pytest.approx(c * c * cumulant * math.sqrt(groups), rel=1e-9)


def test_all_rows_of_all_heads_may_read_one_value():
    """Peaked weights: C repeats a row of V in every row and for every head that shares it, and so does its change."""
    V = f64([[3.0, 4.0], [0.0, 0.0]])
    for heads, groups, width in ((4, 2, 4), (2, 2, 2), (2, 1, 2), (1, 1, 2)):
        Q, K = f64([[1e3] * width] * 3), f64([[1.0] * (width // groups), [0.0] * (width // groups)])
        C, Z = context(Q, K, V, 1.0, heads, groups), attended(Q, K, V, 1.0, heads, groups)
        assert Z.row == pytest.approx(5 * math.sqrt(groups), rel=1e-9)
        assert float(C.norm(dim=1).max()) == pytest.approx(Z.row, rel=1e-9)
        assert Z.frobenius == Z.spectral == pytest.approx(float(C.norm()), rel=1e-9)
        assert Z.jacobian["V"] == pytest.approx(math.sqrt(3 * groups), rel=1e-9)
        # 2 of the 4 terms of the drift are 0: only V moves, by 0.5
        moving = replace(itself("V", V), drift=0.5)
        Z = mixed(itself("Q", Q), itself("K", K), moving, 1.0, C, heads=heads, groups=groups)
        assert Z.drift == pytest.approx(0.5 * math.sqrt(3 * groups), rel=1e-9)


def test_a_shift_of_all_values_moves_each_row_once_for_each_head_that_shares_it():
    for heads in (1, 2):
        Q, K, V = torch.zeros(3, heads).double(), draw(3, 1), draw(3, 1, seed=2)
        C, moved = context(Q, K, V, 1.0, heads, heads), shifted(constant(V), parameter("b", [0.0], 0.25))
        Z = mixed(constant(Q), constant(K), moved, 1.0, C, heads=heads, groups=heads)
        assert Z.jacobian["b"] == pytest.approx(math.sqrt(3 * heads), rel=1e-9)  # every entry of C moves with b


def second_derivative(function, x: Tensor, u: Tensor) -> Tensor:
    """d^2/dt^2 of function(x + t u) at 0, by forward differentiation twice."""

    def slope(at: Tensor) -> Tensor:
        return torch.func.jvp(function, (at,), (u,))[1]

    return torch.func.jvp(slope, (x,), (u,))[1]


def test_the_root_of_split_is_attained_by_a_gradient_that_all_heads_share():
    """x / rms(x) of two entries: along (sqrt(1/3), sqrt(2/3)) in polar axes the second derivative is longest; turn it to (1, 1)."""
    x = f64([1.0, 0.0])
    u = f64([math.sqrt(1 / 3), math.sqrt(2 / 3)])

    def rms(at: Tensor) -> Tensor:
        return at / at.square().mean().sqrt()

    longest = second_derivative(rms, x, u)
    angle = math.pi / 4 - math.atan2(float(longest[1]), float(longest[0]))
    turn = f64([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    x, u = turn @ x, turn @ u
    true = float(second_derivative(rms, x, u).sum())  # the heads' gradients are 1 each, of length 1
    bare = norm(itself("x", x.unsqueeze(0)), layernorm=False, eps=0.0)
    assert float(second_derivative(rms, x, u).norm()) == pytest.approx(bare.hessian_row["x", "x"], rel=1e-9)
    heads = split(bare, 2)
    assert true == pytest.approx(heads.hessian_row["x", "x"], rel=1e-9)
    assert heads.centre.shape == (2, 1)
    assert heads.hessian_all == bare.hessian_all
    assert heads.jacobian == bare.jacobian
    assert split(bare, 1) is bare


def test_sizes_of_heads_apart_and_together_are_attained():
    """Equal rows of heads make a row sqrt(heads) times as long; one head beside zeros is as long as the whole."""
    equal = f64([[3.0, 4.0]] * 4)
    side = merge(itself("Y", equal), 2)
    assert (side.row, side.spectral) == pytest.approx((5 * math.sqrt(2), 10), rel=1e-9)
    assert merge(itself("Y", f64([[3.0, 4.0], [0.0, 0.0]])), 2).row == pytest.approx(5.0, rel=1e-9)
    row = f64([[3.0, 0.0, 0.0, 3.0]])  # as rows of heads, orthogonal: a smaller spectral norm
    parted = split(itself("Y", row.reshape(1, 4)), 2)
    assert parted.spectral == pytest.approx(float(row.norm()), rel=1e-9)
    one = f64([[1.0, 1.0, 1.0, 1.0]])
    assert split(itself("Y", one), 2).spectral == pytest.approx(2.0, rel=1e-9)  # equal heads: attained


def test_numbers_attain_every_term_of_sums_products_and_affine_maps():
    """With one entry each norm is a magnitude, so that a rule is exact: derivatives of (x w + b) v and of w u, by hand."""
    x, w, b, v, u = 1.3, 0.7, 0.4, 2.0, 0.9
    Z = affine(affine(constant(scalar(x)), parameter("w", [[w]]), parameter("b", [b])), parameter("v", [[v]]))
    assert Z.jacobian == pytest.approx({"w": x * v, "b": v, "v": x * w + b}, rel=1e-9)
    assert (Z.spectral, Z.frobenius, Z.row) == pytest.approx(((x * w + b) * v,) * 3, rel=1e-9)
    assert {pair: value for pair, value in Z.hessian_all.items() if value} == pytest.approx(
        {("w", "v"): x, ("v", "w"): x, ("b", "v"): 1.0, ("v", "b"): 1.0}, rel=1e-9
    )
    assert (Z + 3.0 * Z).jacobian == pytest.approx({n: 4 * g for n, g in Z.jacobian.items()}, rel=1e-9)
    assert (Z + -3.0 * Z).hessian_all["w", "v"] == pytest.approx(4 * x, rel=1e-9)
    product = hadamard(itself("w", scalar(w)), itself("u", scalar(u)))
    assert product.jacobian == pytest.approx({"w": u, "u": w}, rel=1e-9)
    assert product.hessian_row == pytest.approx({("w", "u"): 1.0, ("u", "w"): 1.0}, rel=1e-9)
    assert (product.frobenius, product.row) == pytest.approx((w * u, w * u), rel=1e-9)
    moved = hadamard(replace(itself("w", scalar(w)), drift=0.1), replace(itself("u", scalar(u)), drift=0.2))
    assert moved.drift == pytest.approx(0.1 * u + 0.2 * w, rel=1e-9)


@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "tanh"])
def test_the_constants_of_an_activation_are_attained(kind):
    """Largest slope, second derivative and chord by differentiating on a grid."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64, requires_grad=True)
    value = ACTIVATIONS[kind](z)
    (slope,) = torch.autograd.grad(value.sum(), z, create_graph=True)
    second = torch.autograd.grad(slope.sum(), z)[0] if slope.requires_grad else 0 * z.detach()
    slope = slope.detach()
    chord = (value / z).detach().abs()
    X = replace(itself("x", scalar(0.3)), drift=0.5)
    Y = activation(X, kind, ACTIVATIONS[kind](X.centre))
    assert Y.jacobian["x"] == pytest.approx(float(slope.abs().max()), rel=1e-6)
    assert Y.drift == pytest.approx(0.5 * float(slope.abs().max()), rel=1e-6)
    assert Y.hessian_row["x", "x"] == pytest.approx(float(second.abs().max()), rel=1e-6)
    assert (Y.row, Y.frobenius, Y.spectral) == pytest.approx((0.3 * float(chord[chord.isfinite()].max()),) * 3, rel=1e-3)


def test_a_gain_attains_its_second_derivative_with_the_value():
    """Y diag(s): |dY|_F |ds|_inf, twice differentiated once in each."""
    Y = itself("y", scalar(0.6)) * parameter("s", [1.5])
    assert Y.jacobian == pytest.approx({"y": 1.5, "s": 0.6}, rel=1e-9)
    assert Y.hessian_all == pytest.approx({("y", "s"): 1.0, ("s", "y"): 1.0}, rel=1e-9)


def test_how_far_a_value_moves_over_a_ball():
    """Numbers in place of matrices, where the ends of the intervals are the worst case: every drift is attained."""
    x, w, v, b, r = -1.3, 0.7, 2.0, 0.4, (0.2, 0.5, 0.3)
    Y = affine(constant(scalar(x)), parameter("W", [[w]], r[0]), parameter("b", [b], r[2]))
    assert Y.drift == pytest.approx(abs(x) * r[0] + r[2], rel=1e-11)
    Z = affine(Y, parameter("V", [[v]], r[1]))
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
    Y = constant(f64([[1.0, 2.0], [1.0, -2.0]]))
    number, features = (parameter("s", [3.0] * n, 0.5) for n in (1, 2))
    assert (Y * number).jacobian["s"] == pytest.approx(math.sqrt(10), rel=1e-9)
    assert (Y * features).jacobian["s"] == pytest.approx(math.sqrt(8), rel=1e-9)
    assert (Y * number).drift == pytest.approx(0.5 * math.sqrt(10), rel=1e-9)


@pytest.mark.parametrize("options", [{}, {"rotary": True, "n_kv_heads": 1}, {"causal": True}])
def test_without_a_residual_only_the_gauss_newton_term_is_left(options):
    """The value at the centre is the block's own, so with that for the target the bound of a pair is g_i g_j."""
    torch.manual_seed(0)
    block = hk.TransformerBlock(8, 3, 2, "pre", activation="gelu", **options).double()
    x = draw(3, 8)
    norms = a_priori(block, x, block(x).detach()).matrix
    torch.testing.assert_close(norms.square(), torch.outer(norms.diagonal(), norms.diagonal()), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("layernorm", [True, False])
def test_a_ball_that_reaches_a_row_of_scale_zero(layernorm):
    """There the Jacobian of a norm is 1 / sqrt(eps), and the bound is that; with half the radius, the Jacobian where rows are smallest."""
    eps, x, W = 0.04, scalar(2.0), f64([[3.0, -3.0]])  # of mean 0, so centred or not is the same
    for share in (1.0, 0.5):
        X = affine(constant(x), parameter("W", W, share * float(W.norm())))
        Y = norm(X, layernorm=layernorm, eps=eps)
        smallest = math.sqrt((2 * 3 * (1 - share)) ** 2 + eps)
        assert Y.jacobian["W"] == pytest.approx(2.0 / smallest, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_what_cancels_at_the_end_stays_below_the_structured_bound(seed):
    """Rows of a norm have one length, so ||Z||^2 has no curvature: what is left of two large terms is their rounding."""
    torch.manual_seed(seed)
    block = hk.TransformerBlock(4, 3, affine=False, eps=0.0, activation="gelu").double()
    x = draw(1, 3, 4, seed=seed) * 1e-3
    H, own = hk.hessian(block, x, 0 * x), structured(read_request(block, x, 0 * x).only())
    size = float(torch.linalg.matrix_norm(H.outer(), 2))
    assert H.spectral_norm() <= own.whole <= 1e-9 * size
    for i, j in H.pairs():
        assert H.spectral_norm(i, j) <= own.pairs[i, j]


def test_what_cancels_at_the_end_does_so_behind_a_gain_too():
    """A gain of ones leaves the rows of one length: the weights have no curvature, in the bound neither."""
    torch.manual_seed(0)
    block, x = hk.TransformerBlock(4, 3, eps=0.0, activation="gelu").double(), draw(1, 3, 4)
    own = structured(read_request(block, x, 0 * x).only())
    assert own.pairs["norm_2.weight", "norm_2.weight"] > 0.1
    assert own.pairs["feedforward.W_2", "feedforward.W_2"] <= 1e-9


@pytest.mark.parametrize("layernorm", [True, False])
def test_sizes_and_drift_of_a_norm_with_gain_are_attained(layernorm):
    """With eps = 0 and one gain for all entries every row has length 3 sqrt(d); with a large eps a norm is division by its root."""
    X, gain = draw(3, 4), parameter("g", [-3.0] * 4)
    rows = X - X.mean(1, keepdim=True) if layernorm else X
    value = -3 * rows / rows.square().mean(1, keepdim=True).sqrt()
    Y = gain_and_shift(norm(constant(X), layernorm=layernorm, eps=0.0), gain, None)
    assert Y.frobenius == pytest.approx(float(value.norm()), rel=1e-9)
    assert Y.row == pytest.approx(float(value.norm(dim=1).max()), rel=1e-9)
    assert Y.spectral >= float(torch.linalg.matrix_norm(value, 2))
    flat = f64([[1.0, -1.0]])
    moving = affine(constant(scalar(2.0)), parameter("W", flat, 0.5))
    large = norm(moving, layernorm=layernorm, eps=100.0)
    assert large.drift == pytest.approx(2.0 * 0.5 / 10, rel=0.05)
    peaked = f64([[5.0, 0.0]])  # normalised: (sqrt(2), 0), which a gain's first entry moves
    gain = parameter("g", flat[0], 0.25)
    still, one = (gain_and_shift(norm(constant(rows), layernorm=False, eps=0.0), gain, None) for rows in (flat, peaked))
    assert still.drift == one.drift == pytest.approx(0.25 * math.sqrt(2), rel=1e-9)


def test_a_shift_along_a_row_attains_the_longest_row():
    X = constant(f64([[3.0, 4.0], [0.0, 1.0]]))
    Y = affine(X, parameter("W", torch.eye(2, dtype=torch.float64)), parameter("b", [6.0, 8.0], 0.5))
    assert Y.row == pytest.approx(5.0 + 10.5, rel=1e-9)


def test_gainless_norms_at_the_end_need_no_gauss_newton_term():
    # ||Z||_F is all but constant on the output of LayerNorm, so only the target's part in the tangent space counts
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    block = hk.TransformerBlock(4, 3, affine=False, eps=0.0).double()
    assert a_priori(block, x, torch.zeros_like(x)).whole < 1e-8
    assert hk.hessian(block, x[None], torch.zeros_like(x)[None]).spectral_norm() < 1e-12
    t = torch.randn(3, 4, dtype=torch.float64)
    shifted = t + f64([[1.0], [-30.0], [5.0]])
    assert a_priori(block, x, shifted).whole < 10 * a_priori(block, x, t).whole
    for eps in (1e-3, 1.0, 30.0):
        block = hk.TransformerBlock(4, 3, affine=False, eps=eps, activation="gelu").double()
        for target in (torch.zeros_like(x), t):
            assert hk.hessian(block, x[None], target[None]).spectral_norm() <= a_priori(block, x, target).whole


@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("layernorm", [True, False])
def test_the_end_on_a_sphere_is_nearly_sharp(eps, layernorm):
    # Z = norm(x W) of one token x of length 1: every direction of the row is reached, so the constants show
    d, draw = 4, torch.Generator().manual_seed(3)
    x = torch.nn.functional.normalize(torch.randn(1, 3, generator=draw, dtype=torch.float64))
    W, ratios = torch.randn(3, d, generator=draw, dtype=torch.float64), []
    for size in (0.0, 1.0, 10.0):
        for _ in range(3):
            T = size * torch.randn(1, d, generator=draw, dtype=torch.float64)

            def loss(W, T=T):
                m = x @ W
                m = m - m.mean(1, keepdim=True) if layernorm else m
                return ((m / ((m * m).mean(1, keepdim=True) + eps).sqrt() - T) ** 2).mean()

            H = torch.autograd.functional.hessian(loss, W).reshape(3 * d, 3 * d)
            Z = norm(affine(constant(x), parameter("W", W)), layernorm=layernorm, eps=eps)
            limit = float(_on_a_sphere(Z, Z.sphere, T, ("W",)))
            true = float(torch.linalg.matrix_norm(H, 2))
            assert true <= limit * (1 + 1e-9) + 1e-12
            ratios.append(true / limit if limit else 0.0)
    assert max(ratios) > 0.3


def test_heads_that_read_different_rows_have_a_longer_row_than_any_value():
    """Two heads without shared values, the first reads row 0 and the second row 1, of which each has its own half."""
    at = f64([[1e3, 1e3]]), f64([[1.0, 0.0], [0.0, 1.0]]), f64([[3.0, 0.0], [0.0, 3.0]])
    row = float(context(*at, 1.0, 2, 1).norm())
    assert attended(*at, 1.0, 2, 1).row == pytest.approx(row, rel=1e-9) == pytest.approx(3 * math.sqrt(2), rel=1e-9)


def test_equal_keys_or_values_have_no_second_derivative():
    """Norms are large and ranges 0: the queries do not matter, or the keys do not."""
    Q, K, V = draw(3, 2), 9 * draw(1, 2, seed=2).repeat(3, 1), draw(3, 2, seed=3)
    Z = attended(Q, K, V, 0.7)
    assert Z.hessian_row["Q", "Q"] == Z.jacobian["Q"] == Z.hessian_all["V", "Q"] == 0.0
    Z = attended(Q, V, K, 0.7)
    assert Z.hessian_row["Q", "Q"] == Z.hessian_row["K", "K"] == Z.jacobian["K"] == Z.hessian_all["Q", "K"] == 0.0
