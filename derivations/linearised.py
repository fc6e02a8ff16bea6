"""A primitive linearised once at a point, so that what does not depend on the vector is computed once for many products.

A product with the Hessian asks two things of every application (see :mod:`hessiankit.engine.linearisation`): its tangent, and the
covectors of its inputs, which the first derivative makes of the second-order adjoint and the second one of the tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from derivations.primitive import Covectors, Inputs, Primitive, Tangents


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


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b, where None stands for zero."""
    return b if a is None else a if b is None else a + b
