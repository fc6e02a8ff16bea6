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


def jacobian(f: Function, point: Point, name: str, create_graph: bool = False) -> Tensor:
    """d vec_r f / d vec_r(name)^T, one reverse sweep for each output entry."""

    def along(w: Tensor) -> Tensor:
        return f(**{**point, name: w}).reshape(-1)

    rows = torch.autograd.functional.jacobian(along, point[name], create_graph=create_graph)
    return rows.reshape(-1, point[name].numel())


def hessian(f: Function, point: Point, name_i: str, name_j: str) -> Tensor:
    """d vec_r(df/d name_i) / d vec_r(name_j)^T, reverse over reverse, rows ordered (output, i)."""

    def slope(w: Tensor) -> Tensor:
        moved = {**point, name_j: w}
        inner = moved[name_i] if name_i == name_j else moved[name_i].clone().requires_grad_()
        value = f(**{**moved, name_i: inner}).reshape(-1)
        rows = []
        for entry in value:
            (row,) = torch.autograd.grad(entry, inner, create_graph=True, allow_unused=True)
            rows.append(torch.zeros_like(inner) if row is None else row)
        return torch.stack(rows).reshape(-1)

    columns = torch.autograd.functional.jacobian(slope, point[name_j])
    return columns.reshape(-1, point[name_j].numel())


def relative_error(seen: Tensor, expected: Tensor) -> float:
    """Largest entry of the difference, relative to the largest entry of the reference (absolute where that is zero)."""
    assert seen.shape == expected.shape, (seen.shape, expected.shape)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return float((seen - expected).abs().max()) / (largest or 1.0)


def check_all_blocks(operation: Any, f: Function, point: Point, tolerance: float = 1e-12) -> None:
    """Compare value, all Jacobians and all second derivatives of an operation with those of a hand-written f."""
    assert set(operation.arguments) == set(point)
    assert relative_error(operation.value, f(**point)) <= tolerance
    for i in point:
        assert tuple(operation.arguments[i]) == tuple(point[i].shape)
        assert relative_error(operation.jacobian(i).dense(point[i]), jacobian(f, point, i)) <= tolerance, i
        for j in point:
            error = relative_error(operation.hessian(i, j).dense(point[i]), hessian(f, point, i, j))
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
