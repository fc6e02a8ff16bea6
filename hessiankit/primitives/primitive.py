"""Primitive operations: value, jvp, vjp and the contracted second derivative.

The exact Hessian of a scalar loss over any graph of primitives is one sum,

    H = sum over primitives v of   J_v^T  [ lambda_v . D^2 phi_v ]  J_v ,

with J_v the Jacobian of v's inputs with respect to the parameters and lambda_v the adjoint of v's output.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hessiankit.primitives.directions import ALONE, add_at

Inputs: TypeAlias = Sequence[Tensor]
Tangents: TypeAlias = Sequence[Tensor | None]
Covectors: TypeAlias = tuple[Tensor | None, ...]


Role: TypeAlias = Literal["weight", "transposed weight", "gain", "bias", "term", "table"]
"""Ways in which a parameter enters rows x: x W, x W^T, x o gamma for the normalised x, x + b, any x + T, or its rows by index."""


class Kind(ABCMeta):
    """Abstract classes without virtual subclasses: ``isinstance`` is that of ordinary classes, which is several times faster."""

    __instancecheck__ = type.__instancecheck__


class Primitive(metaclass=Kind):
    """One differentiable operation phi(x_1, ..., x_m), known by four closed-form actions.

    Tangents and covectors carry one leading axis of any length S in front of the shape of the value that they
    belong to: a batch of directions is pushed or pulled in one call. ``None`` is zero.
    """

    is_linear: bool = False
    """True when phi is affine in all its inputs together, so that its second derivative vanishes."""

    is_product: bool = False
    """True when phi is linear in each input by itself, so that a single moving input has no second derivative."""

    is_entrywise: bool = False
    """True when entries are treated one by one, where no moving input is broadcast."""

    is_quick: bool = False
    """True when tangents take a few passes over its values, as entry by entry or in a norm, and no product of matrices."""

    selects: bool = False
    """True when each entry of the output is an entry of the only input."""

    calls: int = 1
    """Rough number of operations of torch that one direction takes, beside those that all directions share."""

    has_one_value: bool = False
    """True when :meth:`value` is that of one point, whatever the inputs."""

    regular: tuple[float, ...] = ()
    """Number of each input at which the derivatives are finite, for entries that :meth:`singular` finds."""

    def singular(self, inputs: Inputs, output: Tensor) -> Tensor | None:
        """Return the entries of the output at which a first or second derivative is not finite; None where there are none."""
        return None

    def choice_axes(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the axes of the input along which sizes choose one entry, as in a maximum; empty where none does."""
        return ()

    @property
    def roles(self) -> Mapping[int, Role]:
        """Roles in which inputs that are parameters enter the output, row by row of the first input, by their position."""
        return {}

    def multiplications(self, inputs: Inputs, output: Tensor) -> int:
        """Return the multiply-adds of products of matrices that a value takes."""
        return 0

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

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        """Return the three actions at one point, for many products: what they share is computed once.

        Args:
            inputs: The point.
            adjoint: Adjoint of the output, of its shape; None if only first derivatives are needed.
            needs: The inputs whose covectors are read; None: all.
        """
        return Linearised(self, inputs, adjoint, needs)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        """Tell whether row r of the output moves only with row r of the moving inputs.

        Rows are indexed by the first ``axes`` axes of the output and of every moving input; the other inputs are
        constant (weights shared by all rows). False is always safe: it only costs speed.
        """
        return False

    def separable(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        """Tell whether the contracted second derivative couples no two rows of the moving inputs.

        True wherever rows stay apart altogether; a loss that sums over rows is separable although it mixes them.
        """
        return self.rowwise(inputs, axes, motion)


class AffineByEntry(Primitive):
    """An affine map of each entry by itself."""

    is_linear = True

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return True


class ByLinearising(Primitive):
    """A primitive whose actions are those of what :meth:`linearise` returns. The actions are not themselves differentiable."""

    @abstractmethod
    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
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


class Entrywise(ByLinearising):
    """N = f(X), entry by entry; inputs (X,)."""

    is_entrywise = is_quick = True

    @abstractmethod
    def derivatives(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return f(x), f'(x) and f''(x), entry by entry; None for a second derivative that is zero."""

    def value(self, *inputs: Tensor) -> Tensor:
        return self.derivatives(inputs[0])[0]

    def linearise(self, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None) -> Linearised:
        _, first, second = self.derivatives(inputs[0])
        return LinearisedEntrywise(self, inputs, first, None if adjoint is None or second is None else adjoint * second)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return axes <= inputs[0].ndim


class CovectorSum:
    """A covector (S, *shape) summed in given memory: the first term is written, the others are added.

    >>> total = CovectorSum(torch.empty(1, 2))
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
            if out.is_cpu and not out.is_contiguous() and out[0].numel() < ALONE:  # which torch multiplies one by one
                self.add(torch.bmm(a, b))
            else:
                torch.bmm(a, b, out=out) if self.empty else out.baddbmm_(a, b)
        self.empty = False

    def add_rows(self, at: Tensor, rows: Tensor) -> None:
        """Add rows (S, n, ...) to those at some indices (n,) of the second axis."""
        add_at(self.close(), 1, at, rows)

    def close(self) -> Tensor:
        """Return the sum: zeros where nothing was added."""
        if self.empty:
            self.memory.zero_()
        self.empty = False
        return self.memory


class Nowhere(CovectorSum):
    """A sum that discards its terms; products are not computed."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0, device="cpu"))

    def add(self, term: Tensor) -> None:
        """Do nothing."""

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Do nothing."""

    def add_rows(self, at: Tensor, rows: Tensor) -> None:
        """Do nothing."""


Sums: TypeAlias = "Sequence[CovectorSum | None]"


class Linearised:
    """phi at its inputs, with the adjoint of its output where the second derivative is needed.

    Tangents and covectors are those of :class:`hessiankit.primitives.primitive.Primitive`. Results must not be written
    into: they may be the argument, or a view.

    Args:
        primitive: phi.
        inputs: The point.
        adjoint: The derivative of the loss with respect to the output, of its shape; None where no tangents are pulled.
        needs: The inputs whose covectors are read; None: all.
    """

    def __init__(
        self, primitive: Primitive, inputs: Inputs, adjoint: Tensor | None = None, needs: Sequence[bool] | None = None
    ) -> None:
        self.primitive, self.inputs = primitive, inputs
        self.adjoint_or_none = adjoint
        self.needs = tuple(needs) if needs is not None else (True,) * len(inputs)

    @property
    def factor(self) -> Tensor | None:
        """Factor of the tangents in a map of one input entry by entry; None for other maps."""
        return None

    @property
    def bend(self) -> Tensor | None:
        """Factor [adjoint . D^2 phi] of the tangents in a map of one input entry by entry; None where it vanishes."""
        return None

    @property
    def matrix(self) -> Tensor | None:
        """Matrix (k, j) that multiplies all rows of the first input of a product; None for other maps."""
        return None

    def forget(self) -> None:
        """Release values that no action reads; inputs keep their shapes only."""
        if not self.primitive.reads_values:
            self.inputs = tuple(map(hollow, self.inputs))

    def hold(self, inputs: Inputs) -> None:
        """Hold inputs, as large ones as a matrix, in the types that they are stored in, and widen them in each action."""

    @property
    def is_nonlinear(self) -> bool:
        """Whether the second derivative can be nonzero: there is an adjoint, and the primitive is not affine."""
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
        """Return, for each input, D phi^T bar + [adjoint . D^2 phi] t; None is zero, or not wanted."""
        first = None if bar is None else self.primitive.vjp(self.inputs, bar)
        if tangents is None:
            return first or (None,) * len(self.inputs)
        second = self.primitive.curvature(self.inputs, self.adjoint, tangents)
        return second if first is None else tuple(plus(a, b) for a, b in zip(first, second, strict=True))

    def push_and_pull(self, bar: Tensor | None, tangents: Tangents) -> tuple[Tensor, Covectors]:
        """Return :meth:`push` and :meth:`pull` of the same tangents."""
        return self.push(tangents), self.pull(bar, tangents)

    def pull_into(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Covectors:
        """Do as :meth:`pull`, but add the covectors of inputs that have a sum to it, and return None for them."""
        return into(sums, self.pull(bar, tangents))

    def pull_parts(self, bar: Tensor | None, tangents: Tangents | None, sums: Sums) -> Sequence[Tensor | PartOfCovectors | None]:
        """Do as :meth:`pull_into`; covectors that are zero outside a part of an input may be returned as that part."""
        return self.pull_into(bar, tangents, sums)


class PartOfCovectors:
    """Covectors (S, *shape) that are zero outside a part; others are added to them in place.

    Of a value that is read in n parts, a sum of n whole tensors would pass over n^2 parts.

    Args:
        part: The part of such covectors, as a view of them.
        shape: Shape of the value.
        bar: Covectors of the part.
    """

    def __init__(self, part: Callable[[Tensor], Tensor], shape: torch.Size, bar: Tensor) -> None:
        self.part, self.shape, self.bar = part, shape, bar
        self.memory: Tensor | None = None  # with what has been added

    def dense(self) -> Tensor:
        """Return the covectors."""
        if self.memory is None:
            self.memory = self.bar.new_zeros(len(self.bar), *self.shape)
            self.part(self.memory).copy_(self.bar)
        return self.memory

    def plus(self, other: Tensor | PartOfCovectors) -> PartOfCovectors:
        """Add other covectors of the same value, and return the sum."""
        total = self.dense()
        if isinstance(other, PartOfCovectors) and other.memory is None and len(other.bar) == len(total):
            other.part(total).add_(other.bar)
        else:
            self.memory = total + (other.dense() if isinstance(other, PartOfCovectors) else other)
        return self


class LinearisedEntrywise(Linearised):
    """One input, entry by entry: sigma'(x), and adjoint o sigma''(x), which is None where sigma'' vanishes."""

    def __init__(self, primitive: Primitive, inputs: Inputs, first: Tensor, second: Tensor | None) -> None:
        super().__init__(primitive, inputs)
        self.first, self.bent = first, second

    @property
    def factor(self) -> Tensor | None:
        """sigma'(x)."""
        return self.first

    @property
    def bend(self) -> Tensor | None:
        """adjoint o sigma''(x)."""
        return self.bent

    def forget(self) -> None:
        """Keep the derivatives alone."""
        self.inputs = (hollow(self.inputs[0]),)

    @property
    def is_nonlinear(self) -> bool:
        """Whether sigma'' is not zero throughout."""
        return self.bent is not None

    def push(self, tangents: Tangents) -> Tensor:
        """Return sigma' o t."""
        return total(self.primitive, tangents[0]) * self.first

    def pull(self, bar: Tensor | None, tangents: Tangents | None = None) -> Covectors:
        """Return sigma' o bar + (adjoint o sigma'') o t."""
        out = None if bar is None else bar * self.first
        t = None if tangents is None else tangents[0]
        if t is None or self.bent is None:
            return (out,)
        return (t * self.bent if out is None else torch.addcmul(out, t, self.bent, out=out),)


def into(sums: Sums, covectors: Covectors) -> Covectors:
    """Add covectors to their sums where there are any; return the others, None in their place."""
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


def total(owner: object, *terms: Tensor | None) -> Tensor:
    """Return the sum of the terms of a tangent, where None is zero.

    Raises:
        ValueError: if every term is None.
    """
    present = [t for t in terms if t is not None]
    if not present:
        raise ValueError(f"{type(owner).__name__}.jvp: every tangent is None; at least one input must move")
    return sum(present[1:], start=present[0])


def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a + b, where None is zero."""
    return b if a is None else a if b is None else a + b
