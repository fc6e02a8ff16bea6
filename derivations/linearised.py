"""A primitive linearised once at a point, so that what does not depend on the vector is computed once for many products.

A product with the Hessian asks two things of every application (see :mod:`hessiankit.engine.linearisation`): its tangent, and the
covectors of its inputs, which the first derivative makes of the second-order adjoint and the second one of the tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from derivations.primitive import Covectors, Inputs, Primitive, Tangents


class Sum:
    """A covector (S, *shape) that grows in memory given for it: the first term is written, the others are added.

    >>> total = Sum(torch.empty(1, 2))
    >>> total.add(torch.ones(1, 2))
    >>> total.add(torch.ones(1, 2))
    >>> total.close().tolist()
    [[2.0, 2.0]]
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.empty = memory, True

    def add(self, term: Tensor) -> None:
        """Add a covector."""
        self.memory.copy_(term) if self.empty else self.memory.add_(term)
        self.empty = False

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a b, for matrices, or for stacks (S, ., .) of them; one of the two may be a single matrix for all."""
        out = self.memory
        if len(out) == 1:
            out, a, b = out[0], *(x.reshape(x.shape[-2:]) for x in (a, b))
            torch.mm(a, b, out=out) if self.empty else out.addmm_(a, b)
        else:
            a, b = (x.expand(len(out), *x.shape[-2:]) for x in (a, b))
            torch.bmm(a, b, out=out) if self.empty else out.baddbmm_(a, b)
        self.empty = False

    def add_rows(self, at: Tensor, rows: Tensor) -> None:
        """Add rows (S, n, ...) to those at some indices (n,) of the second axis."""
        self.close().index_add_(1, at, rows)

    def close(self) -> Tensor:
        """Return the sum: zeros where nothing was added."""
        if self.empty:
            self.memory.zero_()
        self.empty = False
        return self.memory


class Nowhere(Sum):
    """Takes what nobody asks for; products are not even computed."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0))

    def add(self, term: Tensor) -> None:
        """Do nothing."""

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Do nothing."""

    def add_rows(self, at: Tensor, rows: Tensor) -> None:
        """Do nothing."""


Sums: TypeAlias = "Sequence[Sum | None]"


class Linearised:
    """phi at its inputs, with the adjoint of its output where the second derivative is asked for.

    Tangents and covectors are those of :class:`derivations.primitive.Primitive`. What is returned is not to be written
    into: it may be the argument, or a view.

    Args:
        primitive: phi.
        inputs: The point.
        adjoint: The derivative of the loss with respect to the output, of its shape; None where no tangents are pulled.
        wanted: The inputs whose covectors are read; None: all.
    """

    def __init__(
        self, primitive: Primitive, inputs: Inputs, adjoint: Tensor | None = None, wanted: Sequence[bool] | None = None
    ) -> None:
        self.primitive, self.inputs = primitive, inputs
        self.adjoint_or_none = adjoint
        self.wanted = tuple(wanted) if wanted is not None else (True,) * len(inputs)

    def forget(self) -> None:
        """Let go of values that no action reads: of the inputs, their shapes stay."""
        if not self.primitive.reads_values:
            self.inputs = tuple(map(hollow, self.inputs))

    @property
    def bends(self) -> bool:
        """Whether tangents are worth pulling: False if the second derivative vanishes, here or everywhere."""
        return self.adjoint_or_none is not None and not self.primitive.is_linear

    @property
    def adjoint(self) -> Tensor:
        """The adjoint, where there is one."""
        if self.adjoint_or_none is None:
            raise ValueError(f"{type(self.primitive).__name__}: linearised without an adjoint, so no tangents can be pulled")
        return self.adjoint_or_none

    def push(self, tangents: Tangents) -> Tensor:
        """Return sum_k D_k phi [t_k], of shape (S, *output.shape)."""
        return self.primitive.jvp(self.inputs, tangents)

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return, for each input, D phi^T bar + [adjoint . D^2 phi] t; None stands for zero, and for what is not wanted."""
        first = None if bar is None else self.primitive.vjp(self.inputs, bar)
        if tangents is None:
            return first or (None,) * len(self.inputs)
        second = self.primitive.curvature(self.inputs, self.adjoint, tangents)
        return second if first is None else tuple(plus(a, b) for a, b in zip(first, second, strict=True))

    def pull_into(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Covectors:
        """As :meth:`pull`, but add the covectors of inputs that have a sum to it, and return None for them."""
        return into(sums, self.pull(bar, tangents))


class Entrywise(Linearised):
    """One input, entry by entry: sigma'(x), and adjoint o sigma''(x), which is None where sigma'' vanishes."""

    def __init__(
        self,
        primitive: Primitive,
        inputs: Inputs,
        first: Tensor,
        bent: Tensor | None,
    ) -> None:
        super().__init__(primitive, inputs)
        self.first, self.bent = first, bent

    def forget(self) -> None:
        """Keep the derivatives alone."""
        self.inputs = (hollow(self.inputs[0]),)

    @property
    def bends(self) -> bool:
        """Whether sigma'' is not zero throughout."""
        return self.bent is not None

    def push(self, tangents: Tangents) -> Tensor:
        """Return sigma' o t."""
        if tangents[0] is None:
            raise ValueError(f"{type(self.primitive).__name__}.jvp: the tangent of X is None")
        return tangents[0] * self.first

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return sigma' o bar + (adjoint o sigma'') o t."""
        out = None if bar is None else bar * self.first
        t = None if tangents is None else tangents[0]
        if t is None or self.bent is None:
            return (out,)
        return (t * self.bent if out is None else torch.addcmul(out, t, self.bent, out=out),)


def into(sums: Sums, covectors: Covectors) -> Covectors:
    """Add covectors to their sums where there are any; return the others, and None in place of those."""
    for total, covector in zip(sums, covectors, strict=True):
        if total is not None and covector is not None:
            total.add(covector)
    return tuple(c if total is None else None for total, c in zip(sums, covectors, strict=True))


def hollow(x: Tensor) -> Tensor:
    """Return a tensor of x's shape, type and device whose entries are one number in memory; None stays None.

    >>> hollow(torch.zeros(3, 4)).untyped_storage().nbytes()
    4
    """
    return x if x is None else x.new_zeros(()).expand(x.shape)


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b, where None stands for zero."""
    return b if a is None else a if b is None else a + b
