"""Theorems 4.1-4.3 corrected: against the gradients of autograd, and attacked by gradient ascent over all matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformer_reference as reference
from bound_problems import F64
from torch import Tensor
from transformer_reference import ACTIVATIONS, normalised

from derivations.bounds import STEEPNESS
from papers.sharpness_disparity.attention_bounds import AttentionGradientNorms, theorem_4_2
from papers.sharpness_disparity.embedding_bounds import EmbeddingNorms, theorem_4_3
from papers.sharpness_disparity.feedforward_bounds import FeedForwardNorms, GatedNorms, theorem_4_1, theorem_4_1_gated
from papers.sharpness_disparity.gradient_bounds import GradientBounds, NormedInput, average_sharpness

ROUNDING = 1 + 1e-12
NORMS = ("layernorm", "rmsnorm")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def normed(X: Tensor, gamma: Tensor, norm: str) -> Tensor:
    return normalised(X, norm=norm) * gamma[..., None, :]


def feedforward(X: Tensor, gamma: Tensor, W_1: Tensor, W_2: Tensor, *, activation: str, norm: str) -> Tensor:
    return ACTIVATIONS[activation](normed(X, gamma, norm) @ W_1) @ W_2


def gated(X: Tensor, gamma: Tensor, W_gate: Tensor, W_up: Tensor, W_down: Tensor, *, activation: str, norm: str) -> Tensor:
    N = normed(X, gamma, norm)
    return (ACTIVATIONS[activation](N @ W_gate) * (N @ W_up)) @ W_down


def attention(
    X: Tensor,
    gamma: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    W_O: Tensor,
    *,
    heads: int,
    kv_heads: int,
    causal: bool,
    norm: str,
) -> Tensor:
    N = normed(X, gamma, norm)
    return reference.attention(N, W_Q, W_K, W_V, W_O, causal=causal, heads=heads, kv_heads=kv_heads)


def gradients(
    layer: Callable[..., Tensor], leaves: dict[str, Tensor], G: Tensor, create_graph: bool = False
) -> dict[str, Tensor]:
    """dQ/dtheta of Q = <G, layer>, all leaves but X."""
    arrays = {name: t if t.requires_grad else t.clone().requires_grad_() for name, t in leaves.items()}
    wanted = [name for name in leaves if name != "X"]
    found = torch.autograd.grad((G * layer(**arrays)).sum(), [arrays[name] for name in wanted], create_graph=create_graph)
    return dict(zip(wanted, found, strict=True))


def hold(bounds: GradientBounds, found: dict[str, Tensor], scale: GradientBounds | None = None) -> dict[str, float]:
    """Assert lower <= true <= upper and the numbers of entries; return true / upper.

    A gradient that vanishes is what rounding leaves of its terms: 1e-14 of a bound on those is ``scale``.
    """
    assert set(bounds.upper) == set(found) == set(bounds.sizes)
    ratios = {}
    for letter, gradient in found.items():
        true = float(gradient.norm())
        floor = 1e-14 * scale.upper[letter] if scale else 0.0
        assert true <= bounds.upper[letter] * ROUNDING + floor, letter
        assert true * ROUNDING >= bounds.lower.get(letter, 0.0), letter
        assert bounds.sizes[letter] == gradient.numel()
        ratios[letter] = true / bounds.upper[letter] if bounds.upper[letter] else 1.0  # one token: W_Q and W_K do not matter
        low, high = bounds.sharpness(letter, terms=3)
        assert low <= average_sharpness(true, gradient.numel(), 3) * ROUNDING**2
        assert average_sharpness(max(true - floor, 0.0), gradient.numel(), 3) <= high * ROUNDING**3
    return ratios


def hold_near_and_far(theorem: Callable[..., GradientBounds], near: Any, far: Any, found: dict[str, Tensor]) -> dict[str, float]:
    """Assert that both bounds hold, and that measured norms give the closer one; return true / closer."""
    closer, wider = hold(theorem(near), found), hold(theorem(far), found)
    assert all(closer[letter] >= wider[letter] / ROUNDING for letter in found)
    return closer


class TestFeedForward:
    @staticmethod
    def point(seed: int, n: int = 4, D: int = 5, M: int = 7) -> tuple[dict[str, Tensor], Tensor]:
        shapes = {"X": (n, D), "gamma": (D,), "W_1": (D, M), "W_2": (M, D)}
        return {name: draw(*s, seed=10 * seed + k) for k, (name, s) in enumerate(shapes.items())}, draw(n, D, seed=10 * seed + 9)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("activation", STEEPNESS)
    def test_between_its_bounds(self, activation: str, norm: str) -> None:
        for seed, sizes in enumerate([(1, 3, 1), (4, 5, 7), (7, 3, 2)]):
            leaves, G = self.point(seed, *sizes)
            found = gradients(partial(feedforward, activation=activation, norm=norm), leaves, G)
            near = FeedForwardNorms.measured(**leaves, gradient=G, activation=activation, norm=norm)
            hold_near_and_far(theorem_4_1, near, replace(near, inputs=_a_priori(near.inputs, norm), slope=None, a=None), found)

    def test_lower_bounds_are_euler_identities(self) -> None:
        """<theta, dQ/dtheta> = <dQ/dY, F> for ReLU (ours/ffn-euler); for the smooth ones in W_2 alone."""
        leaves, G = self.point(3)
        for activation in ("relu", "gelu"):
            found = gradients(partial(feedforward, activation=activation, norm="layernorm"), leaves, G)
            lower = theorem_4_1(FeedForwardNorms.measured(**leaves, gradient=G, activation=activation)).lower
            assert set(lower) == ({"W_1", "W_2", "gamma"} if activation == "relu" else {"W_2"})
            for letter, bound in lower.items():
                inner = abs(float((leaves[letter] * found[letter]).sum()))
                assert bound * float(leaves[letter].norm()) == pytest.approx(inner, rel=1e-10)


class TestGated:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
    def test_between_its_bounds(self, activation: str, norm: str) -> None:
        for seed, (n, D, M) in enumerate([(1, 3, 1), (4, 5, 7)]):
            shapes = {"X": (n, D), "gamma": (D,), "W_gate": (D, M), "W_up": (D, M), "W_down": (M, D)}
            leaves = {name: draw(*s, seed=10 * seed + k) for k, (name, s) in enumerate(shapes.items())}
            G = draw(n, D, seed=99)
            found = gradients(partial(gated, activation=activation, norm=norm), leaves, G)
            near = GatedNorms.measured(**leaves, gradient=G, activation=activation, norm=norm)
            far = replace(near, inputs=_a_priori(near.inputs, norm), gate=None, up=None, h=None)
            hold_near_and_far(theorem_4_1_gated, near, far, found)
            assert set(near.lower) == {"W_up", "W_down"} | ({"W_gate"} if activation == "relu" else set())


class TestAttention:
    @staticmethod
    def point(seed: int, n: int, D: int, heads: int, kv_heads: int, d_k: int, d_v: int) -> tuple[dict[str, Tensor], Tensor]:
        shapes = {"X": (n, D), "gamma": (D,), "W_Q": (D, heads * d_k), "W_K": (D, kv_heads * d_k)}
        shapes |= {"W_V": (D, kv_heads * d_v), "W_O": (heads * d_v, D)}
        return {name: draw(*s, seed=10 * seed + k) for k, (name, s) in enumerate(shapes.items())}, draw(n, D, seed=10 * seed + 9)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 2), (4, 2), (4, 1)])
    def test_between_its_bounds(self, heads: int, kv_heads: int, causal: bool, norm: str) -> None:
        """Several heads, shared keys and values, a mask; sizes of their own for keys and values."""
        for seed, (n, D, d_k, d_v) in enumerate([(1, 3, 2, 1), (5, 4, 3, 2), (3, 6, 1, 4)]):
            leaves, G = self.point(seed, n, D, heads, kv_heads, d_k, d_v)
            shared = {"heads": heads, "kv_heads": kv_heads, "norm": norm}
            found = gradients(partial(attention, **shared, causal=causal), leaves, G)
            mask = torch.ones(n, n, dtype=torch.bool).tril() if causal else None
            near = AttentionGradientNorms.measured(**leaves, gradient=G, mask=mask, **shared)
            hold_near_and_far(theorem_4_2, near, replace(near, inputs=_a_priori(near.inputs, norm), heads=None), found)
            hold(theorem_4_2(replace(near, heads=None)), found)
            assert set(near.lower) == {"W_V", "W_O"}


class TestEmbedding:
    @pytest.mark.parametrize("positions", [False, True])
    @pytest.mark.parametrize("norm", NORMS)
    def test_between_its_bounds(self, norm: str, positions: bool) -> None:
        """sharpness-disparity/b3-bound: repeated tokens, rows that do not occur, and positions, for which the printed minimum
        fails (D4)."""
        tokens, G, gamma, W_E = torch.tensor([0, 2, 2, 1, 2]), draw(5, 4, seed=1), draw(4, seed=2), draw(6, 4, seed=3)
        W_E[5] *= 1e-6  # a token that does not occur: of no account
        P = draw(5, 4, seed=4) if positions else torch.zeros(5, 4, dtype=F64)

        def layer(X: Tensor, gamma: Tensor, W_E: Tensor) -> Tensor:
            return normed(W_E[X] + P, gamma, norm)

        arrays = {"gamma": gamma.clone().requires_grad_(), "W_E": W_E.clone().requires_grad_()}
        found = dict(zip(arrays, torch.autograd.grad((G * layer(tokens, **arrays)).sum(), arrays.values()), strict=True))
        near = EmbeddingNorms.measured(tokens, W_E, gamma, G, positions=P if positions else None, norm=norm)
        rows = W_E[tokens] + P
        least = float((rows - rows.mean(1, keepdim=True) if norm == "layernorm" else rows).norm(dim=1).min())
        far = EmbeddingNorms.a_priori(_a_priori(near.inputs, norm), 6, near.gradient, least_row=least, most=3)
        assert hold_near_and_far(theorem_4_3, near, far, found)["W_E"] > 0.1
        assert set(near.lower) == {"gamma"}

    def test_w_e_is_attained(self) -> None:
        """A gain of ones, one token four times, and a gradient orthogonal to its row and to 1."""
        W_E = torch.tensor([[3.0, -3.0, 0.0, 0.0], [9.0, 0.0, 0.0, -9.0]], dtype=F64).requires_grad_()
        tokens, gamma, G = torch.tensor([0, 0, 1, 0, 0]), torch.ones(4, dtype=F64), torch.zeros(5, 4, dtype=F64)
        G[tokens == 0] = torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=F64)
        (true,) = torch.autograd.grad((G * normed(W_E[tokens], gamma, "layernorm")).sum(), W_E)
        bound = theorem_4_3(EmbeddingNorms.measured(tokens, W_E, gamma, G)).upper["W_E"]
        assert float(true.norm()) == pytest.approx(bound, rel=1e-12)


def test_looseness() -> None:
    """The table of docs/bounds.md: n = D = 64, M = 256, causal, standard deviation 0.02; measured norms and a priori."""
    leaves, G = TestFeedForward.point(1, 64, 64, 256)
    check_loose(
        {"gamma": 52, "W_1": 4.0, "W_2": 4.9}, {"gamma": 340, "W_1": 17, "W_2": 18}, leaves, G,
        partial(feedforward, activation="relu", norm="layernorm"), theorem_4_1, FeedForwardNorms.measured, {"slope": None, "a": None},
    )  # fmt: skip
    leaves, G = TestAttention.point(1, 64, 64, 1, 1, 64, 64)
    check_loose(
        {"gamma": 200, "W_Q": 210, "W_K": 210, "W_V": 11, "W_O": 12},
        {"gamma": 2200, "W_Q": 1900, "W_K": 1900, "W_V": 52, "W_O": 60}, leaves, G,
        partial(attention, heads=1, kv_heads=1, norm="layernorm", causal=True), theorem_4_2,
        partial(AttentionGradientNorms.measured, mask=torch.ones(64, 64, dtype=torch.bool).tril()), {"heads": None},
    )  # fmt: skip


def check_loose(
    measured: dict[str, float], known: dict[str, float], leaves: dict[str, Tensor], G: Tensor, layer: Callable[..., Tensor],
    theorem: Callable[..., GradientBounds], of: Callable[..., Any], a_priori: dict[str, None],
) -> None:  # fmt: skip
    leaves = {
        name: torch.ones(64, dtype=F64) if name == "gamma" else 0.02 ** name.startswith("W") * x for name, x in leaves.items()
    }
    true, near = gradients(layer, leaves, G), of(**leaves, gradient=G)
    far = replace(near, inputs=_a_priori(near.inputs, "layernorm"), **a_priori)
    for table, norms in ((measured, near), (known, far)):
        found = {letter: bound / float(true[letter].norm()) for letter, bound in theorem(norms).upper.items()}
        assert found == pytest.approx(table, rel=0.05)


def _a_priori(inputs: NormedInput, norm: str) -> NormedInput:
    return NormedInput.a_priori(inputs.n, inputs.D, inputs.gamma, inputs.gamma_max, norm=norm)


# The attack: gradient ascent on true / bound over every matrix, from many starts at once. Each matrix is divided by its norm, so
# that a bound from norms is a number and only the true gradient moves. Where a bound is reached to 1 %, no part of it can be half.


class Attack(NamedTuple):
    """A layer, the shapes of its matrices, its bounds, the norms of an end point, and the bounds that have to be reached."""

    layer: Callable[..., Tensor]
    shapes: dict[str, tuple[int, ...]]
    theorem: Callable[[Any], GradientBounds]
    at: Any
    measured: Callable[..., Any]
    reached: tuple[str, ...]
    scales: dict[str, float]


def of_network(kind: str, norm: str) -> Attack:
    n, D, M = 2, 3, 2
    inputs = NormedInput.a_priori(n, D, 1.0, norm=norm)
    if kind == "gated":
        shapes = {"X": (n, D), "gamma": (D,), "W_gate": (D, M), "W_up": (D, M), "W_down": (M, D)}
        at, theorem = GatedNorms(inputs, M, 1.0, 1.0, 1.0, 1.0, STEEPNESS["relu"]), theorem_4_1_gated
        layer, measured = partial(gated, activation="relu", norm=norm), partial(GatedNorms.measured, activation="relu")
    else:
        shapes, theorem = {"X": (n, D), "gamma": (D,), "W_1": (D, M), "W_2": (M, D)}, theorem_4_1
        at, layer = FeedForwardNorms(inputs, M, 1.0, 1.0, 1.0), partial(feedforward, activation="relu", norm=norm)
        measured = FeedForwardNorms.measured
    return Attack(layer, shapes, theorem, at, measured, tuple(name for name in shapes if name != "X"), {})


def of_attention(q: float, k: float, n: int, heads: int, reached: str) -> Attack:
    """W_Q and W_K are attained at equal logits, which a small W_Q or W_K makes; gamma where the scores do not matter."""
    D, d_k, options = 3, 2, {"heads": heads, "kv_heads": 1, "norm": "layernorm"}
    shapes = {"X": (n, D), "gamma": (D,), "W_Q": (D, heads * d_k), "W_K": (D, d_k), "W_V": (D, d_k), "W_O": (heads * d_k, D)}
    at = AttentionGradientNorms(NormedInput.a_priori(n, D, 1.0), 1.0, d_k, (q,) * heads, (k,), (1.0,), 1.0)
    layer, measured = partial(attention, causal=False, **options), partial(AttentionGradientNorms.measured, **options)
    return Attack(layer, shapes, theorem_4_2, at, measured, tuple(reached.split()), {"W_Q": q, "W_K": k})


def of_embedding() -> Attack:
    n, D, tokens = 4, 4, torch.tensor([0, 1, 0, 0])
    inputs = NormedInput.a_priori(n, D, 1.0)  # _unit makes the least centred row of W_E sqrt(1/2) long
    return Attack(
        lambda W_E, gamma, X=None: normed(W_E[..., tokens, :], gamma, "layernorm"), {"W_E": (2, D), "gamma": (D,)}, theorem_4_3,
        EmbeddingNorms.a_priori(inputs, 2, 1.0, least_row=math.sqrt(0.5), most=3),
        lambda W_E, gamma, gradient: EmbeddingNorms.measured(tokens, W_E, gamma, gradient), ("gamma",), {},
    )  # fmt: skip


ATTACKS = {
    "feed-forward": of_network("plain", "layernorm"),
    "gated": of_network("gated", "rmsnorm"),
    "attention, small queries": of_attention(1e-3, 1.0, 2, 1, "gamma W_Q W_K W_V W_O"),
    "attention, small keys": of_attention(1.0, 1e-3, 3, 1, "W_V W_O"),
    "attention, large": of_attention(2.0, 2.0, 2, 1, "W_V W_O"),
    "two query heads that read one head of keys and values": of_attention(1e-3, 1e-3, 2, 2, "W_Q W_V W_O"),
    "embedding": of_embedding(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_gradient_ascent_reaches_and_exceeds_no_bound(name: str) -> None:
    attack, starts = ATTACKS[name], 12
    bounds = attack.theorem(attack.at)
    letters = list(bounds.upper)
    copies = [letter for letter in letters for _ in range(starts)]
    shapes = {**attack.shapes, "G": (attack.at.inputs.n, attack.at.inputs.D)}
    raw = {name: draw(len(copies), *shape, seed=k).requires_grad_() for k, (name, shape) in enumerate(shapes.items())}
    optimizer = torch.optim.Adam(raw.values(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.963)
    best = dict.fromkeys(letters, 0.0)

    def unit() -> dict[str, Tensor]:
        return {name: _unit(name, t) * attack.scales.get(name, 1.0) for name, t in raw.items()}

    for _ in range(100):
        leaves = unit()
        found = gradients(attack.layer, leaves, leaves.pop("G"), create_graph=True)
        ratios = {letter: found[letter].flatten(1).norm(dim=1) / bounds.upper[letter] for letter in letters}
        best = {letter: max(best[letter], float(ratios[letter].detach().max())) for letter in letters}
        optimizer.zero_grad()
        (-torch.stack([ratios[letter][k] for k, letter in enumerate(copies)]).sum()).backward(inputs=list(raw.values()))
        optimizer.step()
        schedule.step()
    assert max(best.values()) <= ROUNDING
    assert min(best[letter] for letter in attack.reached) >= 0.99
    ends = {name: t.detach() for name, t in unit().items()}
    for k in range(len(copies)):  # the bounds of measured norms hold at the ends
        leaves = {name: t[k] for name, t in ends.items()}
        G = leaves.pop("G")
        hold(attack.theorem(attack.measured(**leaves, gradient=G)), gradients(attack.layer, leaves, G), bounds)


def _unit(name: str, t: Tensor) -> Tensor:
    """Divide each problem's matrix by its spectral norm, a vector and dQ/dY by their length; rows of W_E get centred length sqrt(1/2)."""
    if name == "W_E":
        rows = t - t.mean(-1, keepdim=True)
        return t * math.sqrt(0.5) / rows.norm(dim=-1, keepdim=True)
    if name.startswith("W"):
        return t / torch.linalg.matrix_norm(t, 2)[..., None, None]
    return t / t.flatten(1).norm(dim=1).reshape(-1, *[1] * (t.ndim - 1))
