"""Attention's bounds against exact Hessians by autograd twice, over scales, shapes and degenerate inputs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import mpmath
import pytest
import torch
from bound_problems import ATTENTION_SIZES, F64, Problem, attention, hessian_blocks, norm, problems, whole_hessian
from torch import Tensor

from derivations.bounds import AttentionNorms, BlockNorms, attention_a_priori, attention_structured, block_norms

ROUNDING = 1 + 1e-9


def bounds_of(p: Problem, mask: Tensor | None = None, heads: int = 1) -> tuple[BlockNorms, BlockNorms, BlockNorms]:
    """Structured, a priori with rows, a priori from spectral norms."""
    w, W_O = p.weights, p.weights.get("W_O")
    weights = (p.X, w["W_Q"], w["W_K"], w["W_V"], p.target)
    known = AttentionNorms.measured(*weights, W_O=W_O, heads=heads)
    structured = attention_structured(*weights, W_O=W_O, mask=mask, heads=heads)
    return structured, attention_a_priori(known), attention_a_priori(known.spectral_only())


def check(p: Problem, mask: Tensor | None = None) -> None:
    blocks = hessian_blocks(lambda X, w: attention(X, w, mask), p)
    whole = norm(whole_hessian(lambda X, w: attention(X, w, mask), p))
    for bound in bounds_of(p, mask):
        assert whole <= bound.whole * ROUNDING
        for (i, j), block in blocks.items():
            assert norm(block) <= bound.block(i, j) * ROUNDING + 1e-13 * whole, (i, j)


def draw(L: int, d: int, d_K: int, seed: int = 0, W_O: int | None = None) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64)

    weights = {"W_Q": normal(d, d_K), "W_K": normal(d, d_K), "W_V": normal(d, d if W_O is None else W_O)}
    if W_O is not None:
        weights["W_O"] = normal(W_O, d)
    return Problem(normal(L, d), weights, normal(L, d))


PLAIN, OUT = draw(4, 3, 2), attention(draw(4, 3, 2).X, draw(4, 3, 2).weights)
TWO_SHARE = Problem(  # the attention; the other tokens are out of reach
    torch.tensor([[1.0, 1.0], [-1.0, 1.0], [0.0, 0.0], [0.0, 0.5]], dtype=F64),
    {
        "W_Q": torch.diag(torch.tensor([0.0, 4.0], dtype=F64)),
        "W_K": 4 * torch.eye(2, dtype=F64),
        "W_V": 30 * torch.eye(2, dtype=F64),
    },
    torch.randn(4, 2, dtype=F64, generator=torch.Generator()),
)
HELD: dict[str, Problem | tuple[Problem, Tensor]] = {
    **{
        f"{name} times {factor}": (PLAIN.scaled(W_Q=0.05) if name in ("W_Q", "W_K") else PLAIN).scaled(**{name: factor})
        for name, factor in itertools.product(("W_Q", "W_K", "W_V", "target"), (1e-3, 30.0, 1e3))
    },
    **{f"sizes {s}": draw(*s) for s in ((1, 3, 2), (1, 1, 1), (2, 1, 3), (5, 2, 6), (3, 6, 2), (7, 2, 1))},
    **{f"target {k}": dataclasses.replace(PLAIN, target=t) for k, t in enumerate((torch.zeros_like(OUT), OUT, 1e3 * OUT))},
    "equal tokens": dataclasses.replace(PLAIN, X=torch.ones(4, 3, dtype=F64)),
    "unit tokens": dataclasses.replace(PLAIN, X=torch.eye(4, 3, dtype=F64)),
    "centred tokens": dataclasses.replace(PLAIN, X=PLAIN.X - PLAIN.X.mean(0)),
    "no tokens": dataclasses.replace(PLAIN, X=torch.zeros(4, 3, dtype=F64)),
    "two tokens share the attention": TWO_SHARE,
    "causal": (draw(5, 3, 2), torch.ones(5, 5, dtype=torch.bool).tril()),
    "output projection": draw(4, 3, 2, W_O=4),
}


class TestHolds:
    @pytest.mark.parametrize("kind", ["init", "large"])
    def test_on_the_problems_of_the_table(self, kind: str) -> None:
        for p in problems(kind, ATTENTION_SIZES, 6, seed=1):
            check(p)

    @pytest.mark.parametrize("name", HELD)
    def test_no_block_exceeds_its_bound(self, name: str) -> None:
        p, mask = HELD[name] if isinstance(HELD[name], tuple) else (HELD[name], None)
        check(p, mask)

    @pytest.mark.parametrize("heads", [2, 3])
    def test_heads(self, heads: int) -> None:
        """The bound's parameters are the heads' own, so that the blocks of the reference are cut accordingly."""
        p = draw(4, 3, 2 * heads, W_O=heads)
        true = norm(whole_hessian(lambda X, w: attention(X, w, None, heads), p))
        for bound in bounds_of(p, heads=heads):
            assert len(bound.names) == 4 * heads
            assert true <= bound.whole * ROUNDING
        cut = {name: W.chunk(heads, 0 if name == "W_O" else 1) for name, W in p.weights.items()}
        flat = Problem(p.X, {f"{n}.{h}": W.contiguous() for n, parts in cut.items() for h, W in enumerate(parts)}, p.target)

        def joined(X: Tensor, w: dict[str, Tensor]) -> Tensor:
            whole = {n: torch.cat([w[f"{n}.{h}"] for h in range(heads)], 0 if n == "W_O" else 1) for n in p.weights}
            return attention(X, whole, None, heads)

        for bound in bounds_of(p, heads=heads):
            for (i, j), block in hessian_blocks(joined, flat).items():
                assert norm(block) <= bound.block(i, j) * ROUNDING + 1e-13 * true


class TestTight:
    @pytest.mark.parametrize("seed", range(3))
    def test_small_blocks_are_exact(self, seed: int) -> None:
        p = draw(4, 3, 2, seed, W_O=2)
        bound = bounds_of(p)[0]
        for pair, block in hessian_blocks(attention, p).items():
            assert bound.block(*pair) == pytest.approx(norm(block), rel=1e-10)

    def test_large_blocks_keep_to_the_space_of_their_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wider than long: bounds that are not exact, yet hold."""
        p = draw(2, 5, 3, W_O=4)
        exact = bounds_of(p)[0]
        monkeypatch.setattr(block_norms, "EXACT_ENTRIES", 0)
        check(p)
        reduced = bounds_of(p)[0]
        assert bool((reduced.matrix >= exact.matrix * (1 - 1e-12)).all())
        assert reduced.whole > 1.001 * exact.whole

    def test_product_of_values_and_projection_is_exact(self) -> None:
        """(x v o - 3)^2 at v = o = 0 has the mixed derivative -6 x."""
        one = torch.ones(1, 1, dtype=F64)
        p = Problem(one, {"W_Q": 0 * one, "W_K": 0 * one, "W_V": 0 * one, "W_O": 0 * one}, 3 * one)
        assert norm(hessian_blocks(attention, p)["W_V", "W_O"]) == 6
        for bound in bounds_of(p):
            assert bound.block("W_V", "W_O") == pytest.approx(6, rel=1e-14)


class TestRegion:
    def test_monotone_in_every_norm(self) -> None:
        p = draw(4, 3, 2, W_O=2)
        known = AttentionNorms.measured(*self.arrays(p), W_O=p.weights["W_O"])
        before = attention_a_priori(known).matrix
        for field in ("x", "t", "rho", "diameter", "t_F", "tau", "q", "k", "v", "o"):
            norms = getattr(known, field)
            more = tuple(1.1 * n for n in norms) if isinstance(norms, tuple) else 1.1 * norms
            after = attention_a_priori(dataclasses.replace(known, **{field: more})).matrix
            assert bool((after >= before).all()), field
            assert field not in "qkvo" or bool((after > before).any()), field

    def test_holds_over_a_ball(self) -> None:
        p, radius, g = draw(3, 2, 2), 1.5, torch.Generator().manual_seed(3)
        bound = attention_a_priori(AttentionNorms.measured(*self.arrays(p)).inflated(radius)).whole
        for _ in range(40):
            steps = {name: torch.randn(W.shape, generator=g, dtype=F64) for name, W in p.weights.items()}
            length = math.sqrt(sum(float(s.square().sum()) for s in steps.values()))
            moved = {name: W + radius / length * steps[name] for name, W in p.weights.items()}
            assert norm(whole_hessian(attention, dataclasses.replace(p, weights=moved))) <= bound

    @staticmethod
    def arrays(p: Problem) -> tuple[Tensor, ...]:
        return (p.X, p.weights["W_Q"], p.weights["W_K"], p.weights["W_V"], p.target)


def test_saturated_softmax_against_80_digits() -> None:
    """Logit gaps of 40 and more: autograd and uncentred covariances lose their digits there, the centred ones none."""
    X = [[1.0, 0.3], [-0.7, 1.1], [0.4, -0.9]]
    weights = {"W_Q": [[6.0, 1.0], [2.0, 5.0]], "W_K": [[5.0, -1.0], [0.5, 7.0]], "W_V": [[1.0, 0.2], [-0.4, 0.8]]}
    target = [[0.5, -1.0], [2.0, 0.0], [1.0, 1.0]]
    names, at = list(weights), [entry for W in weights.values() for row in W for entry in row]

    def loss(w: list) -> mpmath.mpf:
        q, k, v = (mpmath.matrix(2, 2) for _ in names)
        for n, matrix in enumerate((q, k, v)):
            for e in range(4):
                matrix[e // 2, e % 2] = w[4 * n + e]
        x = mpmath.matrix(X)
        logits, values, total = (x * q) * (x * k).T / mpmath.sqrt(2), x * v, mpmath.mpf(0)
        for i in range(3):
            e = [mpmath.exp(logits[i, j]) for j in range(3)]
            for c in range(2):
                total += (sum(e[j] * values[j, c] for j in range(3)) / sum(e) - target[i][c]) ** 2
        return total / 6

    with mpmath.workdps(80):
        h, point = mpmath.mpf(10) ** -25, [mpmath.mpf(a) for a in at]
        H = mpmath.matrix(12, 12)
        for a in range(12):
            for b in range(a + 1):
                corners = []
                for s, t in itertools.product((1, -1), repeat=2):
                    moved = list(point)
                    moved[a] += s * h
                    moved[b] += t * h
                    corners.append(s * t * loss(moved))
                H[a, b] = H[b, a] = sum(corners) / (4 * h * h)
        blocks = {
            (i, j): H[4 * a : 4 * a + 4, 4 * b : 4 * b + 4]
            for a, i in enumerate(names)
            for j, b in zip(names, range(3), strict=True)
        }
        norms = {pair: float(max(mpmath.svd_r(block, compute_uv=False))) for pair, block in blocks.items()}
    tensors = {name: torch.tensor(W, dtype=F64) for name, W in weights.items()}
    p = Problem(torch.tensor(X, dtype=F64), tensors, torch.tensor(target, dtype=F64))
    for bound in bounds_of(p):
        for pair, true in norms.items():
            assert true <= bound.block(*pair) * (1 + 1e-12)
    for name in names:
        assert bounds_of(p)[0].block(name, name) == pytest.approx(norms[name, name], rel=1e-11)


def test_errors() -> None:
    identity = torch.eye(2, dtype=F64)
    with pytest.raises(ValueError, match=r"attention_structured: the target has shape \(1, 2\); expected that of the output"):
        attention_structured(identity, identity, identity, identity, identity[:1])
    with pytest.raises(ValueError, match="boolean mask"):
        attention_structured(identity, identity, identity, identity, identity, mask=identity)
    with pytest.raises(ValueError, match="2 heads need W_O"):
        attention_structured(identity, identity, identity, identity, identity, heads=2)
    with pytest.raises(ValueError, match="one norm for every head"):
        AttentionNorms(1, 1, 1.0, (1.0,), (1.0, 2.0), (1.0,), 1.0)
    with pytest.raises(ValueError, match="rho = -1"):
        AttentionNorms(1, 1, 1.0, (1.0,), (1.0,), (1.0,), 1.0, rho=-1.0)
    with pytest.raises(ValueError, match="radius is -1"):
        AttentionNorms(1, 1, 1.0, (1.0,), (1.0,), (1.0,), 1.0).inflated(-1)
    with pytest.raises(ValueError, match="no parameter 'W_X'"):
        attention_structured(identity, identity, identity, identity, identity).block("W_X", "W_Q")
