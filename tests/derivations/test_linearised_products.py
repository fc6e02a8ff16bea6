"""Products linearised at a point, with enough rows for other layouts, against torch.autograd differentiated twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from derivations.embedding import Embedding
from derivations.linear import Linear, MatMul
from derivations.primitive import CovectorSum, Nowhere, Primitive

MANY = 257


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_columns(*shape: int, seed: int) -> Tensor:
    return draw(*shape[:-2], shape[-1], shape[-2], seed=seed).mT


CASES: dict[str, tuple[Primitive, list[Tensor]]] = {
    "wide weight": (MatMul(), [draw(MANY, 3, seed=1), draw(3, 7, seed=2)]),
    "tall weight": (MatMul(), [draw(MANY, 7, seed=1), draw(7, 3, seed=2)]),
    "large weight": (MatMul(), [draw(2, 128, 65, seed=1), draw(65, 64, seed=2)]),
    "linear, wide": (Linear(), [draw(MANY, 7, seed=1), draw(3, 7, seed=2), draw(3, seed=3)]),
    "linear, tall": (Linear(), [draw(MANY, 3, seed=1), draw(7, 3, seed=2), draw(7, seed=3)]),
    "few rows": (MatMul(), [draw(5, 7, seed=1), draw(7, 3, seed=2)]),
    "stacks by rows": (MatMul(), [draw(2, 3, 5, 4, seed=1), draw(2, 3, 4, 6, seed=2)]),
    "stacks by columns": (MatMul(), [by_columns(2, 5, 4, seed=1), by_columns(2, 4, 6, seed=2)]),
}


TABLE = (Embedding(torch.tensor([[1, 0, 1]]), frozen=0), [draw(4, 2, seed=1)])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_push_and_pull_are_those_of_autograd(name: str, count: int) -> None:
    primitive, at = CASES[name]
    out = primitive.value(*at)
    adjoint, bar = draw(*out.shape, seed=7), draw(count, *out.shape, seed=8)
    everything = [draw(count, *x.shape, seed=10 + k) for k, x in enumerate(at)]
    for moving in itertools.product([False, True], repeat=len(at)):
        if not any(moving):
            continue
        at_point = primitive.linearise(at, adjoint, moving)
        at_point.forget()
        tangents = [t if moves else None for t, moves in zip(everything, moving, strict=True)]
        pushed, pulled = at_point.push(tangents), at_point.pull(bar, tangents)
        for s in range(count):
            slope, expected = _by_autograd(primitive, at, moving, adjoint, bar[s], [t[s] for t in everything])
            torch.testing.assert_close(pushed[s], slope, rtol=1e-12, atol=1e-12)
            for covector, reference in zip(pulled, expected, strict=True):
                if reference is not None:
                    assert covector is not None
                    torch.testing.assert_close(covector[s], reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("primitive", "at"), [*CASES.values(), TABLE])
def test_covectors_go_into_their_sums(primitive: Primitive, at: list[Tensor], count: int) -> None:
    out = primitive.value(*at)
    at_point = primitive.linearise(at, draw(*out.shape, seed=7))
    at_point.forget()
    bar, tangents = draw(count, *out.shape, seed=8), [draw(count, *x.shape, seed=10 + k) for k, x in enumerate(at)]
    curved = tangents if at_point.bends else None
    expected = at_point.pull(bar, curved)
    rows = torch.full((count, 3 + sum(x.numel() for x in at)), torch.nan, dtype=torch.float64)  # a part of a wider row
    pieces = rows[:, 3:].split([x.numel() for x in at], 1)
    sums = [CovectorSum(piece.view(count, *x.shape)) for piece, x in zip(pieces, at, strict=True)]
    for times in (1, 2):
        assert at_point.pull_into(bar, curved, sums) == (None,) * len(at)
        for total, covector in zip(sums, expected, strict=True):
            torch.testing.assert_close(total.close(), times * covector, rtol=1e-12, atol=1e-12)
    assert rows[:, :3].isnan().all()
    nowhere = at_point.pull_into(bar, curved, [Nowhere()] * len(at))
    assert nowhere == (None,) * len(at)


def _by_autograd(
    primitive: Primitive, at: list[Tensor], moving: tuple[bool, ...], adjoint: Tensor, bar: Tensor, t: list[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the push, and grad(<bar, phi>) + d/de grad(<adjoint, phi>)(x + e t), at the inputs that move."""
    leaves = [x.clone().requires_grad_(moves) for x, moves in zip(at, moving, strict=True)]
    moved = [x for x, moves in zip(leaves, moving, strict=True) if moves]
    directions = [d for d, moves in zip(t, moving, strict=True) if moves]
    out = primitive.value(*leaves)
    w = adjoint.clone().requires_grad_()
    slopes = torch.autograd.grad((w * out).sum(), moved, create_graph=True)
    along = torch.stack([(g * d).sum() for g, d in zip(slopes, directions, strict=True)]).sum()
    (pushed,) = torch.autograd.grad(along, w, retain_graph=True)
    second = torch.autograd.grad(along, moved, retain_graph=True, materialize_grads=True)
    first = torch.autograd.grad((bar * out).sum(), moved)
    totals = iter(a + b for a, b in zip(first, second, strict=True))
    return pushed, [next(totals) if moves else None for moves in moving]
