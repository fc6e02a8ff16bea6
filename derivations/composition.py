r"""The chain rule to second order, to any depth, and the Gauss-Newton split of a loss Hessian.

For out = g(x(theta), p), with g_x, g_p, g_xx ... the derivatives of the outer operation (Eq. 6 of Closing the
Curvature Gap, extended to any depth):

    J        = [ g_x J_x,  g_p ]
    H_tt     = (g_x (x) I) H_x + (I (x) J_x^T) g_xx J_x
    H_tp     = (I (x) J_x^T) g_xp,      H_pt = g_px J_x,      H_pp = g_pp .

All five are one sum over the arguments a, b of g, with J_{a,i} the derivative of argument a with respect to parameter i
(an identity where a is the parameter itself):

    J_i  = sum_a g_a J_{a,i},      H_ij = sum_a (g_a (x) I_{n_i}) H_{a,ij} + sum_{a,b} (I (x) J_{a,i}^T) g_ab J_{b,j} .
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from derivations.arrays import Array, is_exact
from derivations.matrix import Identity, Matrix, Zero, add, kron
from derivations.operation import Operation, OperationAt, Shape, Variable, expect_names, shape_of, size, union_of_arguments


@dataclass(frozen=True, eq=False)
class Composite(OperationAt):
    """An operation with other operations put in for some of its arguments: itself an operation, so that depth is free.

    Args:
        outer: the operation g, built at the values that the inner operations have.
        inner: argument of g -> the operation put in its place. Arguments of g that are not listed stay arguments of
            the whole, under their own names; a name that occurs in several places is one argument, used several times
            (tied weights). ``Renamed`` keeps two layers' names apart.

    Raises:
        ValueError: if an inner operation has not the shape, or the value, of the argument that it replaces, or if
            one name would belong to two shapes.

    >>> import torch
    >>> X, Y = Variable("X", torch.ones(1, 3)), Variable("Y", torch.ones(1, 3))
    >>> Composite(Y, {"Y": X}).jacobian("X")
    Identity(3x3: I_{3})
    """

    outer: Operation
    inner: Mapping[str, Operation]

    def __post_init__(self) -> None:
        expect_names(self.outer, "arguments", *self.inner)
        for name, operation in self.inner.items():
            asked, seen = tuple(self.outer.arguments[name]), shape_of(operation.value)
            if asked != seen:
                raise ValueError(f"Composite: argument {name!r} has shape {asked}, the operation put in for it {seen}")
            point = getattr(self.outer, name, None)
            if point is not None and not is_exact(point):
                gap, scale = float(abs(point - operation.value).max()), float(abs(point).max())
                if not gap <= 1e-6 * (1.0 + scale):
                    raise ValueError(
                        f"Composite: the outer operation was built at a {name!r} that differs by {gap:.3g} from the value of the "
                        f"operation put in for it. Build the outer operation at that operation's .value."
                    )
        _ = self.arguments  # checks that equal names have equal shapes

    @cached_property
    def _sources(self) -> dict[str, Operation]:
        """Every argument of the outer operation, as an operation on the parameters of the whole."""
        open_ones = {name: _Parameter(name, shape) for name, shape in self.outer.arguments.items()}
        return {**open_ones, **self.inner}

    @property
    def value(self) -> Array:
        """The value of the outer operation."""
        return self.outer.value

    @cached_property
    def arguments(self) -> dict[str, Shape]:
        """The arguments of the inner operations and those of the outer one that stay open."""
        return union_of_arguments("Composite", *self._sources.values())

    def _jacobian(self, name: str) -> Matrix:
        """Return J_i = sum_a g_a J_{a,i} over the arguments a that depend on the parameter."""
        return self._once(("J", name), lambda: add(*(self.through(a, name) for a in self.reading(name))))

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return H_ij = sum_a (g_a (x) I) H_{a,ij} + sum_{a,b} (I (x) J_{a,i}^T) g_ab J_{b,j}, without its zero terms."""
        left, right = self.reading(name_i), self.reading(name_j)
        terms = [self.through(a, name_i, name_j) for a in left if a in right]
        return add(*terms, *(self.between(a, b, name_i, name_j) for a in left for b in right))

    def through(self, a: str, *names: str) -> Matrix:
        """Return the term of argument a: g_a J_{a,i} of the first derivative, (g_a (x) I_{n_i}) H_{a,ij} of the second."""
        source, n_out = self._sources[a], size(shape_of(self.value))
        if len(names) == 1:
            return self._slope(a) @ source.jacobian(*names)
        n_i, n_j = (size(self.arguments[name]) for name in names)
        inner = source.hessian(*names)
        return Zero(n_out * n_i, n_j) if isinstance(inner, Zero) else kron(self._slope(a), Identity(n_i)) @ inner

    def between(self, a: str, b: str, name_i: str, name_j: str) -> Matrix:
        """Return the term (I (x) J_{a,i}^T) g_ab J_{b,j} of the second derivative."""
        curvature = self._curvature(a, b)
        if isinstance(curvature, Zero):
            return Zero(size(shape_of(self.value)) * size(self.arguments[name_i]), size(self.arguments[name_j]))
        return self._pull(a, name_i) @ curvature @ self._sources[b].jacobian(name_j)

    def _slope(self, a: str) -> Matrix:
        """g_a."""
        return self._once(("g", a), lambda: self.outer.jacobian(a))

    def _curvature(self, a: str, b: str) -> Matrix:
        """g_ab."""
        return self._once(("g", a, b), lambda: self.outer.hessian(a, b))

    def _pull(self, a: str, name: str) -> Matrix:
        """I (x) J_{a,i}^T."""
        n_out = size(shape_of(self.value))
        return self._once(("pull", a, name), lambda: kron(Identity(n_out), self._sources[a].jacobian(name).T))

    @cached_property
    def _built(self) -> dict[tuple[str, ...], Matrix]:
        return {}

    def _once(self, key: tuple[str, ...], build: Callable[[], Matrix]) -> Matrix:
        """Build an expression the first time that it is needed: each pair of parameters uses it again."""
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]

    def reading(self, name: str) -> dict[str, Operation]:
        """Return the arguments of the outer operation that depend on the parameter ``name``, with their operations."""
        return {a: source for a, source in self._sources.items() if name in source.arguments}


@dataclass(frozen=True, eq=False)
class GaussNewton:
    r"""A block of a loss Hessian in its two parts (Eq. 3 of Closing the Curvature Gap).

        H_ij = J_i^T L'' J_j  +  (L' (x) I_{n_i}) d2f/dW_i dW_j

    ``outer`` is the first part (generalised Gauss-Newton), ``functional`` the second; all are n_i x n_j.
    L' is the row d loss / d vec_r(f)^T: the formula holds in this reading (curvature-gap/eq3).

    >>> import torch
    >>> from derivations.loss import MeanSquaredErrorAt
    >>> X = Variable("X", torch.ones(1, 2))
    >>> block = gauss_newton(MeanSquaredErrorAt(X.value, torch.zeros(1, 2)), X, "X", "X")
    >>> block, block.total.dense().tolist()
    (GaussNewton(2x2: outer Identity, functional Zero), [[1.0, 0.0], [0.0, 1.0]])
    """

    outer: Matrix
    functional: Matrix

    def __repr__(self) -> str:
        rows, columns = self.outer.shape
        return f"GaussNewton({rows}x{columns}: outer {type(self.outer).__name__}, functional {type(self.functional).__name__})"

    @property
    def total(self) -> Matrix:
        """The block of the Hessian: the sum of the two parts."""
        return self.outer + self.functional


def gauss_newton(loss: Operation, model: Operation, name_i: str, name_j: str) -> GaussNewton:
    """Return block (i, j) of the Hessian of loss(model) in its outer and functional parts.

    Args:
        loss: an operation with one output entry and one argument, built at ``model.value``.
        model: the operation whose arguments are the parameters.
        name_i: the parameter of the rows.
        name_j: the parameter of the columns.

    Raises:
        ValueError: if the loss is not a scalar function of exactly one argument of the model's output shape.
    """
    names = list(loss.arguments)
    if size(shape_of(loss.value)) != 1 or len(names) != 1:
        raise ValueError(f"gauss_newton: expected a scalar loss of one argument, got arguments {names}, value {loss.value!r}")
    Composite(loss, {names[0]: model})  # checks that the loss is built at the model's output
    slope, curvature = loss.jacobian(names[0]), loss.hessian(names[0], names[0])
    outer = model.jacobian(name_i).T @ curvature @ model.jacobian(name_j)
    return GaussNewton(outer, kron(slope, Identity(size(model.arguments[name_i]))) @ model.hessian(name_i, name_j))


class _Parameter(Variable):
    """An open argument: a variable of which only the shape is known."""

    def __init__(self, name: str, shape: Shape) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "value", _Shaped(tuple(shape)))


@dataclass(frozen=True, eq=False)
class _Shaped:
    shape: Shape
