"""References for closed forms: reverse-over-reverse autograd, and symbolic differentiation evaluated at exact numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import sympy
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


def symbols(name: str, *shape: int) -> np.ndarray:
    """An object array of real symbols."""
    flat = [sympy.Symbol(f"{name}_{'_'.join(map(str, index))}", real=True) for index in np.ndindex(*shape)]
    return np.array(flat, dtype=object).reshape(shape)


def exact_jacobian(outputs: Any, inputs: np.ndarray) -> sympy.Matrix:
    """d vec_r(outputs) / d vec_r(inputs)^T by symbolic differentiation."""
    flat = np.array(outputs, dtype=object).reshape(-1)
    return sympy.Matrix(len(flat), inputs.size, lambda i, j: sympy.diff(flat[i], inputs.reshape(-1)[j]))


def exact_hessian(outputs: Any, inputs_i: np.ndarray, inputs_j: np.ndarray) -> sympy.Matrix:
    """d vec_r(d outputs / d inputs_i) / d vec_r(inputs_j)^T by symbolic differentiation."""
    return exact_jacobian(exact_jacobian(outputs, inputs_i).tolist(), inputs_j)


def at(expression: sympy.Matrix, values: dict[Any, Any]) -> sympy.Matrix:
    """Put exact numbers in for the symbols."""
    numbers = {s: sympy.Rational(v.numerator, v.denominator) if hasattr(v, "numerator") else v for s, v in values.items()}
    return expression.applyfunc(lambda entry: entry.subs(numbers))


def same(left: sympy.Matrix, right: sympy.Matrix) -> bool:
    """Exact equality, entry by entry."""
    return left.shape == right.shape and all(sympy.simplify(entry) == 0 for entry in left - right)
