"""What a primitive operation has to know: its value and three derivative actions, and nothing more.

The exact Hessian of a scalar loss over any graph of primitives is one sum,

    H = sum over primitives v of   J_v^T  [ lambda_v . D^2 phi_v ]  J_v ,

with J_v the Jacobian of v's inputs with respect to the parameters and lambda_v the adjoint of v's output.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from derivations.linearised import Linearised

Inputs: TypeAlias = Sequence[Tensor]
Tangents: TypeAlias = Sequence[Tensor | None]
Covectors: TypeAlias = tuple[Tensor | None, ...]


class Kind(ABCMeta):
    """Abstract classes without virtual subclasses: ``isinstance`` is that of ordinary classes, which is several times faster."""

    __instancecheck__ = type.__instancecheck__


class Primitive(metaclass=Kind):
    """One differentiable operation phi(x_1, ..., x_m), known by four closed-form actions.

    Tangents and covectors carry one leading axis of any length S in front of the shape of the value that they
    belong to: a batch of directions is pushed or pulled in one call. ``None`` stands for zero.
    """

    is_linear: bool = False
    """True when phi is affine in all its inputs together, so that its second derivative vanishes."""

    @property
    def reads_values(self) -> bool:
        """Whether the derivatives depend on the values of the inputs, and not on their shapes alone."""
        return not self.is_linear

    @abstractmethod
    def value(self, *inputs: Tensor) -> Tensor:
        """Return phi(inputs)."""

    @abstractmethod
    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        """Push tangents forward: sum_k D_k phi [t_k], of shape (S, *output.shape)."""

    @abstractmethod
    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        """Pull an adjoint of shape (S, *output.shape) back to each input: (S, *input_k.shape)."""

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        """Contract the second derivative with an adjoint (of the output's shape, without S) and with tangents.

        Entry k is the covector sum_j <adjoint, D_k D_j phi [., t_j]>, of shape (S, *input_k.shape), or None if zero.
        """
        if self.is_linear:
            return (None,) * len(inputs)
        raise NotImplementedError(f"{type(self).__name__} has no second derivative yet")

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, wanted: Sequence[bool] | None = None) -> Linearised:
        """Return the three actions at one point, for many products: what they share is computed once.

        Args:
            inputs: The point.
            adjoint: Of the output's shape; None where the second derivative is not asked for.
            wanted: The inputs whose covectors are read; None: all.
        """
        return Linearised(self, inputs, adjoint, wanted)

    def rowwise(self, inputs: Inputs, axes: int, moving: Sequence[bool]) -> bool:
        """Tell whether row r of the output moves only with row r of the moving inputs.

        Rows are indexed by the first ``axes`` axes of the output and of every moving input; the other inputs stand
        still (weights shared by all rows, constants). False is always safe: it only costs speed.
        """
        return False

    def separable(self, inputs: Inputs, axes: int, moving: Sequence[bool]) -> bool:
        """Tell whether the contracted second derivative couples no two rows of the moving inputs.

        True wherever rows stay apart altogether; a loss that sums over rows is separable although it mixes them.
        """
        return self.rowwise(inputs, axes, moving)


class ByLinearising(Primitive):
    """A primitive whose actions are those of what :meth:`linearise` returns. The actions are not themselves differentiable."""

    @abstractmethod
    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, wanted: Sequence[bool] | None = None) -> Linearised:
        """Return the three actions at one point."""

    @torch.no_grad()
    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        """Push tangents forward."""
        return self.linearise(inputs).push(tangents)

    @torch.no_grad()
    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        """Pull an adjoint back to each input."""
        return self.linearise(inputs).pull(adjoint)

    @torch.no_grad()
    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        """Contract the second derivative with an adjoint and with tangents."""
        return self.linearise(inputs, adjoint).pull(None, tangents)
