"""Random programs at the edges: rows per sample, losses that read parameters, parameters changed between calls, ignored labels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, gradient_twice
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk

EXACT = 1e-10
ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [torch.tanh, torch.sigmoid, F.gelu, torch.sin, F.softplus, lambda x: x]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry; to 1 where all entries are rounding."""
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale if scale > 1e-12 else 1.0)


def answer(counts: Counter[str], what: str, call: Callable[[], Tensor], expected: Tensor, tolerance: float = EXACT) -> None:
    """Count an answer as right, or a refusal by its message; a wrong answer and a raw error fail."""
    try:
        found = call()
    except hk.HessiankitError as refusal:
        counts[f"{what}: {str(refusal)[:90]}"] += 1
        return
    assert error(found, expected) <= tolerance, what
    counts["right"] += 1


def rows_per_sample(rng: random.Random) -> Counter[str]:
    """Parameters with one row for each sample or group, read by products, contractions and norms."""
    B, n, k = rng.choice([2, 3, 5]), rng.choice([2, 3]), rng.choice([2, 4])
    first, second, act = rng.choice(ACTIVATIONS), rng.choice(ACTIVATIONS), rng.choice(ACTIVATIONS)
    pairs: list[Callable[[Any, Tensor], Tensor]] = [
        lambda s, u: torch.einsum("bd,bd->b", u, s.V),
        lambda s, u: u * s.V,
        lambda s, u: torch.einsum("bd,be->bde", u, s.V).flatten(1),
        lambda s, u: torch.bmm(u.unsqueeze(1), s.T.unsqueeze(0).expand(B, -1, -1)).squeeze(1),
        lambda s, u: u @ s.V.mT,
        lambda s, u: F.layer_norm(u, (k,)) * s.V.sum(-1, keepdim=True),
        lambda s, u: (u.unsqueeze(1) - s.V - 3.0).norm(dim=-1),
        lambda s, u: (u - s.V).norm(dim=-1),
        lambda s, u: torch.softmax(u, -1) @ s.T,
        lambda s, u: torch.stack([u, s.V]).prod(0),
    ]
    left: list[Callable[[Any, Tensor], Tensor]] = [
        lambda s, x: s.U,
        lambda s, x: s.U + x @ s.M,
        lambda s, x: s.U * (x @ s.M),
        lambda s, x: s.U.unsqueeze(1).expand(B, n, k).mean(1),
        lambda s, x: s.U[torch.arange(B).flip(0)],
        lambda s, x: torch.cat([s.U[:1], s.U[1:] * 2]),
    ]
    ends: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.square().sum(),
        lambda y: y.flatten(1 if y.ndim > 1 else 0).logsumexp(-1).sum(),
        lambda y: (y.reshape(B, -1).mean(-1) - 0.3).cosh().mean(),
        lambda y: y.reshape(B, -1).std(0, correction=0).add(1.0).log().sum() + y.pow(3).sum(),
    ]
    read, pair, end = rng.choice(left), rng.choice(pairs), rng.choice(ends)
    shapes = {"U": (B, k), "V": (B, k), "T": (k, k), "M": (n, k)}
    module = Formula(lambda s, x: end(act(pair(s, first(read(s, x)))) if rng_late else second(pair(s, read(s, x)))), **shapes)
    rng_late = rng.random() < 0.5
    seed = rng.randrange(10**6)
    for p in module.parameters():
        p.data = draw(p.numel(), seed=seed + p.numel()).view(p.shape)
    x = draw(B, n, seed=seed)
    expected = gradient_twice(module(x), list(module.parameters()))
    counts = Counter[str]()
    if not bool(expected.isfinite().all()):
        with pytest.raises(hk.InputError, match="NaN or infinite"):
            hk.hessian(module, x, loss=None)
        return Counter({"not finite, in torch too": 1})
    answer(counts, "hessian", lambda: hk.hessian(module, x, loss=None).matrix, expected)
    answer(counts, "operator", lambda: hk.hessian_operator(module, x, loss=None).to_matrix(), expected)
    answer(counts, "diagonal", lambda: hk.hessian_diagonal(module, x, loss=None).flat, expected.diagonal())
    return counts


def mixed_loss(rng: random.Random) -> Counter[str]:
    """Losses that read parameters beside the output: H is right, and the Gauss-Newton part is right or refused."""
    module = Formula(lambda s, x: act(x @ s.W) @ s.V, W=(3, 4), V=(4, 2), c=())
    act = rng.choice(ACTIVATIONS)
    seed = rng.randrange(10**6)
    for p in module.parameters():
        p.data = draw(p.numel(), seed=seed + p.numel()).view(p.shape)
    x, t, W, c = draw(5, 3, seed=seed), draw(5, 2, seed=seed + 1), module.W, module.c
    fits: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, t: (z - t).square().mean(), lambda z, t: (z - t).cosh().mean(), lambda z, t: F.softplus(-z * t).sum(),
        lambda z, t: (z * t).sum(), lambda z, t: F.cross_entropy(z, (t[:, 0] > 0).long()),
    ]  # fmt: skip
    fit = rng.choice(fits)
    terms: list[Callable[[], Tensor]] = [
        lambda: W.square().sum(),
        lambda: c.cosh(),
        lambda: (W.sum() * c).square(),
        lambda: W.norm(),
    ]
    term, factor = rng.choice(terms), rng.choice([0.1, 0.5, 2.0])
    apart: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, t: fit(z, t) + factor * term(),
        lambda z, t: (fit(z, t) - factor * term()) / torch.tensor(3.0).double(),
        lambda z, t: torch.stack([fit(z, t), term()]).sum() * factor,
        lambda z, t: fit(z, t) * term().detach(),
        lambda z, t: fit(z, t) + 0.0 * term(),
        lambda z, t: torch.cat([fit(z, t).view(1), term().view(1)]).mean(),
    ]
    mixed: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda z, t: fit(z, t) * term(),
        lambda z, t: fit(z / (1 + c**2), t),
        lambda z, t: fit(z * c, t) + term(),
        lambda z, t: (fit(z, t) + term()).square(),
        lambda z, t: fit(z + W[:, :2].sum(0), t) if fit is not fits[3] else (z * t).sum() * c,
        lambda z, t: torch.stack([fit(z, t), term()]).logsumexp(0),
        lambda z, t: torch.exp(-c) * fit(z, t) + c,
    ]
    is_mixed = rng.random() < 0.5
    loss = rng.choice(mixed if is_mixed else apart)
    leaves, counts = list(module.parameters()), Counter[str]()
    expected = gradient_twice(loss(module(x), t), leaves)
    answer(counts, "hessian", lambda: hk.hessian(module, x, t, loss=loss).matrix, expected)
    answer(counts, "operator", lambda: hk.hessian_operator(module, x, t, loss=loss).to_matrix(), expected)
    z = module(x)
    J = torch.stack([
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(one, leaves, retain_graph=True, materialize_grads=True, allow_unused=True)])
        for one in z.reshape(-1)
    ])  # fmt: skip
    second = torch.autograd.functional.hessian(lambda z: loss(z, t), z.detach()).reshape(10, 10).detach()
    G = J.T @ second @ J
    readings: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "ggn": (lambda: hk.hessian_operator(module, x, t, loss=loss, kind="ggn").to_matrix(), G),
        "outer": (lambda: hk.hessian(module, x, t, loss=loss).outer(), G),
        "ggn diagonal": (lambda: hk.hessian_diagonal(module, x, t, loss=loss, kind="ggn").flat, G.diagonal()),
    }
    for what, (call, right) in readings.items():
        seen = Counter[str]()
        answer(seen, what, call, right)
        if not is_mixed:
            counts += seen
        else:  # right or refused for this reason
            assert "right" in seen or any("has no Gauss-Newton part" in key or "combines the module's" in key for key in seen), (
                seen
            )
            counts["mixed: " + ("right" if "right" in seen else "refused")] += 1
    return counts


def swap(a: Tensor, b: Tensor) -> None:
    kept = a.data.clone()
    a.data.copy_(b.data)
    b.data.copy_(kept)


def changed_state(rng: random.Random) -> Counter[str]:
    """A product after a change of shared parameters is an error; with copies it is that of before."""
    dtype, width = rng.choice([torch.float64, torch.float32, torch.bfloat16]), rng.choice([4, 5, 6])
    module = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).double()
    seed = rng.randrange(10**6)
    for k, p in enumerate(module.parameters()):
        p.data = draw(*p.shape, seed=seed + k)
    module = module.to(dtype)
    x, t = draw(4, 3, seed=seed).to(dtype), draw(4, width, seed=seed + 1).to(dtype)
    options = rng.choice([{"snapshot": False}, {"recompute": "layers"}, {"micro_batch": 2}, {"snapshot": True}, {}])
    operator = hk.hessian_operator(module, x, t, **options)
    v = torch.randn(operator.shape[0], generator=torch.Generator().manual_seed(seed)).to(operator.torch_dtype)
    before = operator @ v
    w = rng.choice([module[2].weight, module[4].weight])
    flat, order = w.data.view(-1), torch.randperm(w.numel(), generator=torch.Generator().manual_seed(seed))
    changes: list[Callable[[], Any]] = [
        lambda: w.data.copy_(w.data[torch.randperm(len(w), generator=torch.Generator().manual_seed(seed))]),
        lambda: w.data.copy_(flat[order].view_as(w)),
        lambda: w.data.copy_(w.data.mT.clone()),
        lambda: w.data.neg_(), lambda: flat[: 2 * rng.randint(1, 4)].neg_(), lambda: w.copy_(-w), lambda: w.mul_(-1),
        lambda: swap(module[2].weight, module[4].weight), lambda: swap(module[2].bias, module[4].bias),
        lambda: setattr(w, "data", w.data.flip(0)), lambda: setattr(w, "data", w.data * 1.5),
        lambda: flat[:2].copy_(flat[:2].flip(0)), lambda: w.data[0].copy_(w.data[1]), lambda: w.data.roll(1, 0).clone(),
        lambda: flat[-1:].add_(flat[-1].abs() * 2 * torch.finfo(dtype).eps), lambda: w.zero_(), lambda: w.copy_(w.clone()),
    ]  # fmt: skip
    values = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        rng.choice(changes)()
    is_changed = any(not torch.equal(p, kept) for p, kept in zip(module.parameters(), values, strict=True))
    shares, counts = options not in ({"snapshot": True}, {}), Counter[str]()
    if shares and is_changed:
        with pytest.raises(hk.InputError, match="has been given other values since"):
            operator @ v
        counts["changed: refused"] += 1
        return counts
    try:
        after = operator @ v
    except hk.InputError as refusal:
        if not shares:
            raise
        counts[f"with equal values: {str(refusal)[:90]}"] += 1
        return counts
    assert torch.equal(after, before)
    counts["right"] += 1
    return counts


def ignored_labels(rng: random.Random) -> Counter[str]:
    """Tokens without a label, appended to samples, leave every approximation where it was, in any batches."""
    reads: list[Callable[[Any, Tensor], Tensor]] = [
        lambda s, h: h,
        lambda s, h: h + h.cumsum(1),
        lambda s, h: F.scaled_dot_product_attention(h @ s.Q, h, h, is_causal=True) + h,
        lambda s, h: F.layer_norm(h, (4,)),
        lambda s, h: h * torch.sigmoid(h @ s.Q),
    ]
    act, read, L = rng.choice(ACTIVATIONS), rng.choice(reads), rng.choice([2, 3])
    first, last = nn.Linear(3, 4, bias=rng.random() < 0.5), nn.Linear(4, 3)
    module = Formula(lambda s, x: s.last(read(s, act(s.first(x)))), first=first, last=last, Q=(4, 4))
    seed = rng.randrange(10**6)
    for k, p in enumerate(module.parameters()):
        p.data = draw(*p.shape, seed=seed + k)
    x, labels = draw(2, L, 3, seed=seed), torch.tensor([[rng.choice([0, 1, 2, -100]) for _ in range(L)] for _ in range(2)])
    labels[0, 0], labels[1, -1] = 1, 2
    size, n = rng.choice([1e-3, 1.0, 1e3]), rng.randint(1, 3)
    longer = torch.cat([x, size * draw(2, n, 3, seed=seed + 9)], 1)
    ignored = torch.cat([labels, torch.full((2, n), -100)], 1)
    options: dict[str, Any] = {
        "loss": "cross_entropy",
        "damping": 0.01,
        "against": rng.choice(["ggn", "fisher-empirical", "hessian"]),
    }
    counts = Counter[str]()
    try:
        plain = hk.approximations(module, x, labels, **options)
        others = [
            hk.approximations(module, longer, ignored, **options),
            hk.approximations(module, [(longer[:1], ignored[:1]), (longer[1:], ignored[1:])], **options),
        ]
    except hk.HessiankitError as refusal:
        counts[f"approximations: {str(refusal)[:90]}"] += 1
        return counts
    for other in others:
        for kind, row in plain.found.items():
            one, two = row.operator.to_matrix(), other[kind].operator.to_matrix()
            if kind == "shampoo":
                one, two = one @ one, two @ two
            assert error(two, one) <= 1e-9, (kind, options)
            counts["right"] += 1
    return counts


KINDS = (rows_per_sample, mixed_loss, changed_state, ignored_labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.exhaustive) for k in range(1, 375))])
def test_edges(kind: Callable[[random.Random], Counter[str]], seed: int) -> None:
    assert kind(random.Random(f"{kind.__name__} {seed}")).total()
