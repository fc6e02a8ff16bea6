"""Products linearised at a point, with enough rows for other layouts, against torch.autograd differentiated twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from derivations.linear import Linear, MatMul
from derivations.primitive import Primitive
from derivations.product_layouts import ROWS

MANY = ROWS + 1


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_columns(*shape: int, seed: int) -> Tensor:
    return draw(*shape[:-2], shape[-1], shape[-2], seed=seed).mT


CASES: dict[str, tuple[Primitive, list[Tensor]]] = {
    "wide weight": (MatMul(), [draw(MANY, 3, seed=1), draw(3, 7, seed=2)]),
    "tall weight": (MatMul(), [draw(MANY, 7, seed=1), draw(7, 3, seed=2)]),
    "large weight": (MatMul(), [draw(2, ROWS // 2, 65, seed=1), draw(65, 64, seed=2)]),
    "linear, wide": (Linear(), [draw(MANY, 7, seed=1), draw(3, 7, seed=2), draw(3, seed=3)]),
    "linear, tall": (Linear(), [draw(MANY, 3, seed=1), draw(7, 3, seed=2), draw(7, seed=3)]),
    "few rows": (MatMul(), [draw(5, 7, seed=1), draw(7, 3, seed=2)]),
    "stacks by rows": (MatMul(), [draw(2, 3, 5, 4, seed=1), draw(2, 3, 4, 6, seed=2)]),
    "stacks by columns": (MatMul(), [by_columns(2, 5, 4, seed=1), by_columns(2, 4, 6, seed=2)]),
}


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
        tangents = [t if moves else None for t, moves in zip(everything, moving, strict=True)]
        pushed, pulled = at_point.push(tangents), at_point.pull(bar, tangents)
        for s in range(count):
            slope, expected = _by_autograd(primitive, at, moving, adjoint, bar[s], [t[s] for t in everything])
            torch.testing.assert_close(pushed[s], slope, rtol=1e-12, atol=1e-12)
            for covector, reference in zip(pulled, expected, strict=True):
                if reference is not None:
                    assert covector is not None
                    torch.testing.assert_close(covector[s], reference, rtol=1e-12, atol=1e-12)


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
