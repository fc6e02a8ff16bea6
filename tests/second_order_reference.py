"""References for closed forms: reverse-over-reverse autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Tensor]
Point = dict[str, Tensor]


def random_point(seed: int, **shapes: tuple[int, ...]) -> Point:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def relative_error(seen: Tensor, expected: Tensor) -> float:
    """Largest entry of the difference, relative to the largest entry of the reference (absolute where that is zero)."""
    assert seen.shape == expected.shape, (seen.shape, expected.shape)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return float((seen - expected).abs().max()) / (largest or 1.0)


def derivatives(f: Function, point: Point) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
    """All Jacobians and second derivatives of f in vec_r, reverse over reverse in the arguments as one vector."""
    theta = torch.cat([value.reshape(-1) for value in point.values()]).requires_grad_()
    slices, start = {}, 0
    for name, value in point.items():
        slices[name], start = slice(start, start + value.numel()), start + value.numel()
    out = f(**{name: theta[slices[name]].reshape(value.shape) for name, value in point.items()}).reshape(-1)
    directions = torch.eye(start, dtype=theta.dtype)
    slopes, curvatures = [], []
    for entry in out:
        (slope,) = torch.autograd.grad(entry, theta, create_graph=True)
        rows = None
        if slope.requires_grad:
            (rows,) = torch.autograd.grad(slope, theta, directions, is_grads_batched=True, retain_graph=True, allow_unused=True)
        slopes.append(slope.detach())
        curvatures.append(torch.zeros(start, start, dtype=theta.dtype) if rows is None else rows)
    J, H = torch.stack(slopes), torch.stack(curvatures)
    jacobians = {i: J[:, slices[i]] for i in point}
    return jacobians, {(i, j): H[:, slices[i], slices[j]].reshape(-1, point[j].numel()) for i in point for j in point}


def assembled(blocks: dict[tuple[str, str], Tensor], names: Iterable[str]) -> Tensor:
    """One matrix of the blocks of all pairs of names."""
    return torch.cat([torch.cat([blocks[i, j] for j in names], 1) for i in names])


def check_all_blocks(operation: Any, f: Function, point: Point, tolerance: float = 1e-12) -> None:
    """Compare value, Jacobians and second derivatives of an operation with a hand-written f, for every pair of arguments."""
    assert set(operation.arguments) == set(point)
    assert relative_error(operation.value, f(**point)) <= tolerance
    jacobians, hessians = derivatives(f, point)
    like = next(iter(point.values()))
    for i in point:
        assert tuple(operation.arguments[i]) == tuple(point[i].shape)
        assert relative_error(operation.jacobian(i).dense(like), jacobians[i]) <= tolerance, i
    for (i, j), expected in hessians.items():
        error = relative_error(operation.hessian(i, j).dense(like), expected)
        assert error <= tolerance, (i, j, error)
