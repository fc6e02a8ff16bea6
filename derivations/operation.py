"""The uniform interface of a chapter, an operation at a point, and the operations that only join, rename or print others."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

from derivations.arrays import Array
from derivations.matrix import Identity, Matrix, Zero, add, letters

Shape = tuple[int, ...]


class HasArguments(Protocol):
    """Anything with named arguments."""

    @property
    def arguments(self) -> Mapping[str, Shape]:
        """The arguments by name, each with its shape."""


@runtime_checkable
class Operation(Protocol):
    """A twice differentiable map at a point, read in row-wise vectorisation.

    With N the value and W_i, W_j two arguments, of n_out, n_i and n_j entries:

        jacobian(i)   = d vec_r(N) / d vec_r(W_i)^T               n_out x n_i
        hessian(i, j) = d vec_r(dN/dW_i) / d vec_r(W_j)^T         (n_out n_i) x n_j, rows ordered (out, i)

    Blocks that vanish are ``Zero``. Unknown names raise ``ValueError``.
    """

    @property
    def value(self) -> Array:
        """The output at the point."""

    @property
    def arguments(self) -> Mapping[str, Shape]:
        """The arguments by name, each with its shape."""

    def jacobian(self, name: str) -> Matrix:
        """Return the first derivative with respect to one argument."""

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return the derivative of the Jacobian of argument i with respect to argument j."""


def size(shape: Shape) -> int:
    """Return the number of entries of an array of this shape.

    >>> size((3, 4)), size(())
    (12, 1)
    """
    return math.prod(map(int, shape))


def shape_of(array: Array) -> Shape:
    """Return the shape of an array as a tuple of ints, whatever its arithmetic."""
    return tuple(int(length) for length in array.shape)


def expect_names(operation: HasArguments, asked: str, *names: str) -> None:
    """Check that every name is an argument of the operation.

    Raises:
        ValueError: naming what was asked, the unknown name and the arguments that exist.
    """
    known = operation.arguments
    for name in names:
        if name not in known:
            raise ValueError(
                f"{type(operation).__name__}.{asked}({', '.join(map(repr, names))}): no argument is called {name!r}. "
                f"Its arguments are {', '.join(map(repr, known))}."
            )


class OperationAt(ABC):
    """Base class of the chapters: closed forms of one operation at a point, by argument.

    A subclass lists the attributes that are arguments (None: absent) and gives the derivatives in ``_jacobian`` and ``_hessian``.
    """

    argument_names: ClassVar[tuple[str, ...]]

    @property
    def arguments(self) -> dict[str, Shape]:
        """The arguments by name, each with its shape; those that are None are left out."""
        every = {name: getattr(self, name) for name in self.argument_names}
        return {name: shape_of(array) for name, array in every.items() if array is not None}

    @property
    @abstractmethod
    def value(self) -> Array:
        """The output at the point."""

    def jacobian(self, name: str) -> Matrix:
        """Return d vec_r(N) / d vec_r(W)^T for the argument W of this name.

        Raises:
            ValueError: if there is no such argument.
        """
        expect_names(self, "jacobian", name)
        return self._jacobian(name)

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return d vec_r(dN/dW_i) / d vec_r(W_j)^T for two arguments; ``Zero`` where it vanishes.

        Raises:
            ValueError: if there is no such argument.
        """
        expect_names(self, "hessian", name_i, name_j)
        block = self._hessian(name_i, name_j)
        if block is not None:
            return block
        shapes = self.arguments
        return Zero(size(shape_of(self.value)) * size(shapes[name_i]), size(shapes[name_j]))

    @abstractmethod
    def _jacobian(self, name: str) -> Matrix:
        """Return the Jacobian for an argument that exists."""

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the second derivative for arguments that exist, or None where it vanishes."""
        return None


def union_of_arguments(owner: str, *operations: Operation) -> dict[str, Shape]:
    """Return the arguments of several operations together; equal names are one argument.

    Raises:
        ValueError: if one name occurs with two shapes.
    """
    arguments: dict[str, Shape] = {}
    for operation in operations:
        for name, shape in operation.arguments.items():
            if arguments.setdefault(name, tuple(shape)) != tuple(shape):
                shapes = f"{arguments[name]} and {tuple(shape)}"
                raise ValueError(f"{owner}: argument {name!r} occurs with shapes {shapes}. Rename one of the two.")
    return arguments


@dataclass(frozen=True, eq=False)
class Variable:
    """A parameter or an input, as the operation that returns it.

    >>> import torch
    >>> Variable("X", torch.ones(2, 3)).jacobian("X")
    Identity(6x6: I_{6})
    """

    name: str
    value: Array

    @property
    def arguments(self) -> dict[str, Shape]:
        """The variable itself."""
        return {self.name: shape_of(self.value)}

    def jacobian(self, name: str) -> Matrix:
        """Return the identity."""
        expect_names(self, "jacobian", name)
        return Identity(size(shape_of(self.value)))

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return zero."""
        expect_names(self, "hessian", name_i, name_j)
        n = size(shape_of(self.value))
        return Zero(n * n, n)


@dataclass(frozen=True, eq=False)
class Renamed(OperationAt):
    """An operation whose arguments go by other names, so that two layers do not share theirs by accident.

    Args:
        operation: any operation.
        names: old name -> new name; arguments that are not listed keep theirs.

    Raises:
        ValueError: if an old name is unknown, or two arguments would share a new one.

    >>> import torch
    >>> Renamed(Variable("X", torch.ones(2, 3)), {"X": "block.0.X"}).arguments
    {'block.0.X': (2, 3)}
    """

    operation: Operation
    names: Mapping[str, str]

    def __post_init__(self) -> None:
        expect_names(self.operation, "arguments", *self.names)
        if len(self._old) != len(self.operation.arguments):
            raise ValueError(f"Renamed: {dict(self.names)} gives two arguments of {list(self.operation.arguments)} one name")

    @cached_property
    def _old(self) -> dict[str, str]:
        return {self.names.get(old, old): old for old in self.operation.arguments}

    @property
    def value(self) -> Array:
        """The value of the operation."""
        return self.operation.value

    @cached_property
    def arguments(self) -> dict[str, Shape]:
        """The arguments under their new names."""
        return {self.names.get(old, old): tuple(shape) for old, shape in self.operation.arguments.items()}

    def _jacobian(self, name: str) -> Matrix:
        """Return the operation's Jacobian by its new name."""
        return self.operation.jacobian(self._old[name])

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the operation's second derivative by new names."""
        return self.operation.hessian(self._old[name_i], self._old[name_j])


@dataclass(frozen=True, eq=False)
class Lettered:
    r"""An operation whose derivatives print in other letters; its arguments keep their names.

    Args:
        operation: any operation.
        names: letter of its chapter -> LaTeX (``derivations.matrix.letters``).

    >>> import torch
    >>> from derivations.affine import AffineAt
    >>> Lettered(AffineAt(torch.ones(4, 2), torch.ones(2, 1)), {"W": "W_Q"}).jacobian("X")
    Kronecker(4x8: I_{4}\otimes W_Q^\top)
    """

    operation: Operation
    names: Mapping[str, str]

    @property
    def value(self) -> Array:
        """The value of the operation."""
        return self.operation.value

    @property
    def arguments(self) -> Mapping[str, Shape]:
        """The arguments of the operation."""
        return self.operation.arguments

    def jacobian(self, name: str) -> Matrix:
        """Return the operation's Jacobian in these letters."""
        with letters(self.names):
            return self.operation.jacobian(name)

    def hessian(self, name_i: str, name_j: str) -> Matrix:
        """Return the operation's second derivative in these letters."""
        with letters(self.names):
            return self.operation.hessian(name_i, name_j)


@dataclass(frozen=True, eq=False, init=False)
class Total(OperationAt):
    """The sum of operations of one output shape, over the union of their arguments; equal names are one argument.

    A residual branch x + f(x) is ``Total(Variable("X", X), f)``: it adds I to the Jacobian and nothing to the Hessian.

    Raises:
        ValueError: if the outputs, or two arguments of one name, differ in shape.

    >>> import torch
    >>> X = Variable("X", torch.ones(1, 2))
    >>> Total(X, X).jacobian("X").dense().tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """

    terms: tuple[Operation, ...]

    def __init__(self, *terms: Operation) -> None:
        object.__setattr__(self, "terms", terms)
        shapes = [shape_of(term.value) for term in terms]
        if len(set(shapes)) != 1:
            raise ValueError(f"Total: expected one or more terms of one output shape, got {shapes}")
        _ = self.arguments

    @cached_property
    def value(self) -> Array:
        """The sum of the values."""
        total = self.terms[0].value
        for term in self.terms[1:]:
            total = total + term.value
        return total

    @cached_property
    def arguments(self) -> dict[str, Shape]:
        """The arguments of all terms."""
        return union_of_arguments("Total", *self.terms)

    def _jacobian(self, name: str) -> Matrix:
        """Return the sum of the Jacobians of the terms that depend on the argument."""
        return add(*(term.jacobian(name) for term in self.terms if name in term.arguments))

    def _hessian(self, name_i: str, name_j: str) -> Matrix | None:
        """Return the sum of the second derivatives of the terms that depend on both arguments."""
        both = [term for term in self.terms if name_i in term.arguments and name_j in term.arguments]
        return add(*(term.hessian(name_i, name_j) for term in both)) if both else None
