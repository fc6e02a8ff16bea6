"""Bounds in closed form, of attention and of the post-norm block, against exact Hessians by autograd twice."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bound_problems import (
    F64,
    Problem,
    attention,
    draw_weights,
    hessian_blocks,
    norm,
    post_block,
    whole_hessian,
)
from torch import Tensor
from transformer_reference import ACTIVATIONS

from derivations.bounds import (
    AttentionNorms,
    BlockNorms,
    PostBlockNorms,
    attention_a_priori,
    attention_structured,
    block_norms,
    post_block_a_priori,
    post_block_structured,
)

ROUNDING = 1 + 1e-9
GAINS = ("gamma_1", "gamma_2")
Held = tuple[Callable[..., Tensor], list[BlockNorms]]
"""A function of X and the weights, and bounds on the Hessian of its mean squared error; the first of them is structured."""


def drawn(seed: int, X: tuple[int, int], **shapes: tuple[int, int]) -> Problem:
    g = torch.Generator().manual_seed(seed)
    first, *weights, target = (torch.randn(*shape, generator=g, dtype=F64) for shape in (X, *shapes.values(), X))
    return Problem(first, dict(zip(shapes, weights, strict=True)), target)


def of_attention(L: int, d: int, d_K: int, seed: int = 0, W_O: int | None = None) -> Problem:
    shapes = {"W_Q": (d, d_K), "W_K": (d, d_K), "W_V": (d, W_O or d)}
    return drawn(seed, (L, d), **shapes, **({} if W_O is None else {"W_O": (W_O, d)}))


def of_block(L: int, d: int, d_K: int, d_ff: int) -> Problem:
    g = torch.Generator().manual_seed(0)
    weights = draw_weights(L, d, d_K, d_ff, g)
    return Problem(torch.randn(L, d, generator=g, dtype=F64), weights, torch.randn(L, d, generator=g, dtype=F64))


def arrays(p: Problem) -> tuple[Tensor, ...]:
    return (p.X, *(W for name, W in p.weights.items() if name != "W_O"), p.target)


SPECTRAL_ONLY: dict[str, Any] = dict.fromkeys(("rho", "diameter", "t_F", "tau"))


def attention_bounds(p: Problem, mask: Tensor | None = None, heads: int = 1) -> Held:
    """Structured, a priori with rows, a priori from spectral norms."""
    options: dict[str, Any] = {"W_O": p.weights.get("W_O"), "heads": heads}
    known = AttentionNorms.measured(*arrays(p), **options)
    structured = attention_structured(*arrays(p), mask=mask, **options)
    found = [structured, attention_a_priori(known), attention_a_priori(dataclasses.replace(known, **SPECTRAL_ONLY))]
    return (lambda X, w: attention(X, w, mask, heads)), found


def block_bounds(
    p: Problem, *, eps: float = 0.0, kind: str = "layernorm", activation: str = "relu", fixed: dict[str, Tensor] | None = None,
    a_priori: bool = True, mask: Tensor | None = None,
) -> Held:  # fmt: skip
    fixed, options = fixed or {}, {"eps": eps, "norm": kind, "mask": mask}
    found = [post_block_structured(*arrays(p), activation=activation, **fixed, **options)]
    if a_priori:
        gains = {name: value for name, value in fixed.items() if name in GAINS}
        known = PostBlockNorms.measured(*arrays(p), **gains, **options)
        found.append(post_block_a_priori(known, activation=activation))
        found.append(
            post_block_a_priori(dataclasses.replace(known, attention=dataclasses.replace(known.attention, **SPECTRAL_ONLY)))
        )
    return (lambda X, w: post_block(X, w, act=ACTIVATIONS[activation], fixed=fixed or {"": p.X}, **options)), found


def check(p: Problem, held: Held, *, exact: bool = False) -> None:
    """Check the whole and every block; ``exact`` asks the structured bound on a block for its norm."""
    f, bounds = held
    blocks, whole = hessian_blocks(f, p), norm(whole_hessian(f, p))
    floor = 1e-13 * whole if "W_1" not in p.weights else 1e-12 * (1 + whole)
    for bound in bounds:
        assert whole <= bound.whole * ROUNDING + 1e-13 * ("W_1" in p.weights)
        for pair, block in blocks.items():
            assert norm(block) <= bound.block(*pair) * ROUNDING + floor, pair
    for pair, block in blocks.items() if exact else ():
        assert bounds[0].block(*pair) == pytest.approx(norm(block), rel=1e-8, abs=1e-12 * (1 + whole)), pair


PLAIN = of_attention(4, 3, 2)
OUT = attention(PLAIN.X, PLAIN.weights)
TWO_SHARE = Problem(  # the attention; the other tokens are out of reach
    torch.tensor([[1.0, 1.0], [-1.0, 1.0], [0.0, 0.0], [0.0, 0.5]], dtype=F64),
    {
        "W_Q": torch.diag(torch.tensor([0.0, 4.0], dtype=F64)),
        "W_K": 4 * torch.eye(2, dtype=F64),
        "W_V": 30 * torch.eye(2, dtype=F64),
    },
    torch.randn(4, 2, dtype=F64, generator=torch.Generator()),
)
ATTENTION: dict[str, Problem] = {
    **{
        f"{name} times {factor}": (PLAIN.scaled(W_Q=0.05) if name in ("W_Q", "W_K") else PLAIN).scaled(**{name: factor})
        for name, factor in itertools.product(("W_Q", "W_K", "W_V", "target"), (1e-3, 30.0, 1e3))
    },
    **{f"sizes {s}": of_attention(*s) for s in ((1, 3, 2), (1, 1, 1), (2, 1, 3), (5, 2, 6), (3, 6, 2), (7, 2, 1))},
    **{f"target {k}": dataclasses.replace(PLAIN, target=t) for k, t in enumerate((torch.zeros_like(OUT), OUT, 1e3 * OUT))},
    "equal tokens": dataclasses.replace(PLAIN, X=torch.ones(4, 3, dtype=F64)),
    "unit tokens": dataclasses.replace(PLAIN, X=torch.eye(4, 3, dtype=F64)),
    "centred tokens": dataclasses.replace(PLAIN, X=PLAIN.X - PLAIN.X.mean(0)),
    "no tokens": dataclasses.replace(PLAIN, X=torch.zeros(4, 3, dtype=F64)),
    "two tokens share the attention": TWO_SHARE,
    "output projection": of_attention(4, 3, 2, W_O=4),
}


def fixed_of(d: int, d_ff: int, *names: str) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(d)
    return {name: torch.randn(d_ff if name == "b_1" else d, generator=g, dtype=F64) for name in names}


BLOCK = of_block(3, 4, 2, 5)
FLAT = dataclasses.replace(BLOCK, X=1.0 + 1e-4 * BLOCK.X).scaled(W_V=1e-4)
KINDS = ("layernorm", "rmsnorm")
BLOCKS: dict[str, tuple[Problem, dict[str, Any]]] = {
    **{
        f"{name} times {factor}": (BLOCK.scaled(W_Q=0.3).scaled(**{name: factor}), {})
        for name, factor in itertools.product(("W_V", "W_1", "W_2", "target", "X"), (1e-3, 30.0))
    },
    **{f"sizes {sizes}": (of_block(*sizes), {}) for sizes in ((1, 3, 2, 4), (2, 3, 5, 2), (5, 3, 1, 1), (2, 7, 2, 3))},
    **{
        f"{kind}, eps {eps}, target times {factor}": (BLOCK.scaled(target=factor), {"eps": eps, "kind": kind})
        for kind, eps, factor in itertools.product(KINDS, (0.0, 1e-3, 2.0), (0.0, 1.0))
    },
    **{
        f"{kind}, eps {eps}, gains": (BLOCK, {"kind": kind, "eps": eps, "fixed": fixed_of(4, 5, *GAINS)})
        for kind, eps in itertools.product(KINDS, (0.0, 0.1))
    },
    "a last gain of -2": (BLOCK, {"fixed": {"gamma_2": torch.full((4,), -2.0, dtype=F64)}}),
    "biases and shifts": (BLOCK, {"fixed": fixed_of(4, 5, *GAINS, "beta_1", "beta_2", "b_1", "b_2"), "a_priori": False}),
    "gelu": (BLOCK, {"activation": "gelu", "a_priori": False}),
    "causal": (of_block(4, 3, 2, 5), {"mask": torch.ones(4, 4, dtype=torch.bool).tril()}),
    "rows that are almost constant": (FLAT, {"eps": 1e-5}),
    "constant rows": (dataclasses.replace(FLAT, X=torch.ones(3, 4, dtype=F64)), {"eps": 1e-2}),
}


CASES: dict[str, Callable[[], None]] = {
    **{f"attention, {name}": partial(lambda p: check(p, attention_bounds(p)), p) for name, p in ATTENTION.items()},
    **{
        f"block, {name}": partial(lambda p, options: check(p, block_bounds(p, **options), exact=True), p, options)
        for name, (p, options) in BLOCKS.items()
    },
}


@pytest.mark.parametrize("name", CASES)
def test_no_block_exceeds_its_bound(name: str) -> None:
    CASES[name]()


def test_a_causal_mask() -> None:
    p = of_attention(5, 3, 2)
    check(p, attention_bounds(p, torch.ones(5, 5, dtype=torch.bool).tril()))


@pytest.mark.parametrize("heads", [2, 3])
def test_heads(heads: int) -> None:
    """The bound's parameters are the heads' own, so that the blocks of the reference are cut accordingly."""
    p = of_attention(4, 3, 2 * heads, W_O=heads)
    true = norm(whole_hessian(lambda X, w: attention(X, w, None, heads), p))
    for bound in attention_bounds(p, heads=heads)[1]:
        assert len(bound.names) == 4 * heads
        assert true <= bound.whole * ROUNDING
    cut = {name: W.chunk(heads, 0 if name == "W_O" else 1) for name, W in p.weights.items()}
    flat = Problem(p.X, {f"{n}.{h}": W.contiguous() for n, parts in cut.items() for h, W in enumerate(parts)}, p.target)

    def joined(X: Tensor, w: dict[str, Tensor]) -> Tensor:
        whole = {n: torch.cat([w[f"{n}.{h}"] for h in range(heads)], 0 if n == "W_O" else 1) for n in p.weights}
        return attention(X, whole, None, heads)

    for bound in attention_bounds(p, heads=heads)[1]:
        for (i, j), block in hessian_blocks(joined, flat).items():
            assert norm(block) <= bound.block(i, j) * ROUNDING + 1e-13 * true


@pytest.mark.parametrize(("kind", "leak"), [("leaky_relu", 0.01), ("identity", 1.0)])
def test_piecewise_linear_activations(kind: str, leak: float) -> None:
    p = of_block(3, 4, 2, 5)
    true = norm(whole_hessian(lambda X, w: post_block(X, w, act=ACTIVATIONS[kind]), p))
    assert true <= post_block_structured(*arrays(p), activation=kind).whole <= 3 * true
    assert true <= post_block_a_priori(PostBlockNorms.measured(*arrays(p), leak=leak), activation=kind).whole


def test_a_block_with_heads_and_an_output_projection() -> None:
    p = of_block(3, 4, 4, 5)
    W_O = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=F64)
    p = dataclasses.replace(p, weights={**p.weights, "W_O": W_O})
    options: dict[str, Any] = {"W_O": W_O, "heads": 2, "eps": 0.1}
    true = norm(whole_hessian(lambda X, w: post_block(X, w, eps=0.1, heads=2), p))
    structured = post_block_structured(*arrays(p), **options)
    assert structured.names[:4] == ("W_Q.0", "W_K.0", "W_V.0", "W_O.0")
    assert true <= structured.whole <= 3 * true
    assert true <= post_block_a_priori(PostBlockNorms.measured(*arrays(p), **options)).whole


@pytest.mark.parametrize("p", [of_attention(2, 5, 3, W_O=4), of_block(2, 5, 3, 6)], ids=["attention", "block"])
def test_large_blocks_keep_to_the_space_of_their_rows(p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider than long: bounds that are not exact, yet hold."""
    of = block_bounds if "W_1" in p.weights else attention_bounds
    exact = of(p)[1][0]
    monkeypatch.setattr(block_norms, "EXACT_ENTRIES", 0)
    check(p, of(p))
    reduced = of(p)[1][0]
    assert bool((reduced.matrix >= exact.matrix * (1 - 1e-12)).all())
    assert reduced.whole > 1.001 * exact.whole


# Attained, and by hand


def test_both_norms_curve() -> None:
    """L = 1, d = 3, s = tau = 1 and no weights: c = 2/3 for the last norm and as much for the first, times 2/d."""
    attention = AttentionNorms(1, 1, 1.0, (0.0,), (0.0,), (0.0,), 1.0, d_out=3)
    bound = post_block_a_priori(PostBlockNorms(attention, 0.0, 0.0, 1.0, 1.0))
    assert bound.block("W_V", "W_V") == pytest.approx(2 / 3 * (2 / 3 + 2 / 3), rel=1e-14)
    assert bound.block("W_1", "W_2") == pytest.approx(2 / 3 * math.sqrt(3), rel=1e-14)


# Over a region


@pytest.mark.parametrize(("last", "equal"), [(None, True), ([-2.0, -2.0, -2.0], True), ([2.0, 2.0, 1.0], False)])
def test_gains_are_equal_only_if_all_are(last: list[float] | None, equal: bool) -> None:
    p = of_block(3, 3, 2, 4)
    gains = {} if last is None else {"gamma_2": torch.tensor(last, dtype=torch.float64)}
    assert PostBlockNorms.measured(*arrays(p), **gains).uniform is equal


def around(p: Problem, radius: float, count: int) -> list[Problem]:
    """Problems whose weights are so far away, in random directions."""
    g, moved = torch.Generator().manual_seed(3), []
    for _ in range(count):
        steps = {name: torch.randn(W.shape, generator=g, dtype=F64) for name, W in p.weights.items()}
        length = math.sqrt(sum(float(s.square().sum()) for s in steps.values()))
        moved.append(dataclasses.replace(p, weights={name: W + radius / length * steps[name] for name, W in p.weights.items()}))
    return moved


@pytest.mark.parametrize("eps", [0.0, 0.05])
def test_a_block_over_a_ball(eps: float) -> None:
    p, radius = of_block(3, 4, 2, 5), 1e-3
    known = PostBlockNorms.measured(*arrays(p), eps=eps)
    near = known.inflated(radius)
    assert 0 < near.sigma_2 < known.sigma_2
    bound = post_block_a_priori(near).whole
    assert bound > post_block_a_priori(known).whole
    for moved in around(p, radius, 15):
        at = PostBlockNorms.measured(*arrays(moved), eps=eps)
        assert at.sigma_1 >= near.sigma_1
        assert at.sigma_2 >= near.sigma_2
        assert norm(whole_hessian(lambda X, w: post_block(X, w, eps=eps), moved)) <= bound


def test_infinite_where_a_row_may_become_constant() -> None:
    p = of_block(3, 4, 2, 5)
    assert post_block_a_priori(PostBlockNorms.measured(*arrays(p)).inflated(10.0)).whole == math.inf
    assert post_block_a_priori(PostBlockNorms.measured(*arrays(p), eps=1e-3).inflated(10.0)).whole < math.inf


IN_80_DIGITS = {"W_Q": 1.4943558538854863e-8, "W_K": 6.4516034007285565e-9, "W_V": 0.91375937306568854}


def test_saturated_softmax_keeps_its_digits() -> None:
    """Logit gaps of 40 and more: autograd and uncentred covariances lose their digits there, the centred ones none.

    The norms are those of central differences in 80 digits (mpmath, step 1e-25) of the loss written with exponentials.
    """
    X, target = ([1.0, 0.3], [-0.7, 1.1], [0.4, -0.9]), ([0.5, -1.0], [2.0, 0.0], [1.0, 1.0])
    weights = {"W_Q": ([6.0, 1.0], [2.0, 5.0]), "W_K": ([5.0, -1.0], [0.5, 7.0]), "W_V": ([1.0, 0.2], [-0.4, 0.8])}
    p = Problem(
        torch.tensor(X, dtype=F64),
        {name: torch.tensor(W, dtype=F64) for name, W in weights.items()},
        torch.tensor(target, dtype=F64),
    )
    structured = attention_bounds(p)[1][0]
    for name, true in IN_80_DIGITS.items():
        assert structured.block(name, name) == pytest.approx(true, rel=1e-11)


def test_errors() -> None:
    p = of_block(3, 4, 2, 5)
    with pytest.raises(ValueError, match=r"post_block_structured: the target has shape \(2, 4\); expected that of X, \(3, 4\)"):
        post_block_structured(*arrays(p)[:-1], p.target[:2])
    with pytest.raises(ValueError, match="row 0 has variance 0 and eps = 0"):
        post_block_structured(torch.zeros(3, 4, dtype=F64), *arrays(p)[1:])
    with pytest.raises(ValueError, match="'gelu', whose second derivative"):
        post_block_a_priori(PostBlockNorms.measured(*arrays(p)), activation="gelu")
    with pytest.raises(ValueError, match="the leak is 2"):
        PostBlockNorms.measured(*arrays(p), leak=2.0)
    with pytest.raises(ValueError, match="unknown norm"):
        post_block_structured(*arrays(p), norm="batchnorm")
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
    with pytest.raises(ValueError, match="no parameter 'W_X'"):
        attention_structured(identity, identity, identity, identity, identity).block("W_X", "W_Q")
    with pytest.raises(ValueError, match="radius is -1"):
        AttentionNorms(1, 1, 1.0, (1.0,), (1.0,), (1.0,), 1.0).inflated(-1)
