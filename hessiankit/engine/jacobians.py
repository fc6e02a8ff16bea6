"""Parameter Jacobians: how a value z moves with a parameter that enters it, row by row.

At z = X W + b, at z = x_hat o gamma + beta and at z = W[tokens],

    dz[n, o] = sum_i X[n, i] dW[i, o]        X (x) I
    dz[n, o] = x_hat[n, o] dgamma[o]         a diagonal; ones in place of x_hat for a bias
    dz[n, o] = dW[tokens[n], o]              a selection

so that curvature K_nn' between rows of two such values becomes a block of the Hessian by sums over rows,
H = sum_nn' (x_n x_n'^T) (x) K_nn' for two weights. Nothing of size (rows x outputs x parameters) is formed.

A *site* is a value that is linear in some parameters, row by row; :func:`find_sites` reads them off a trace.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hessiankit.primitives.directions import add_at, together
from hessiankit.tracing.trace import Application, Trace

SCRATCH = 2**21
"""Entries that are made before they are added: 16 MiB in float64, less than a cache of the last level."""


@dataclass(frozen=True, eq=False)
class ParameterJacobian(ABC):
    """The Jacobian of a value z (R, p) with respect to one parameter.

    Args:
        parameter: Name of the parameter.
        at: Positions in vec_r of the parameter's entries that enter, in order; None: all.
    """

    parameter: str
    at: Tensor | None

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of entries of the parameter that z depends on."""

    @abstractmethod
    def vjp_by_group(self, x: Tensor) -> Tensor:
        """Return J^T x for covectors x (G, m, p, c) of G groups of m rows, summed in each group: (G, size, c)."""

    def vjp(self, x: Tensor) -> Tensor:
        """Return J^T x for covectors x (R, p, c), summed over all rows: (size, c)."""
        return self.vjp_by_group(x.unsqueeze(0))[0]

    @abstractmethod
    def add_vjp(self, x: Tensor, into: Tensor) -> None:
        """Add J^T x, group by group, for covectors x (S, G, m, p) of G groups of m rows, to ``into`` (S, G, size)."""

    @abstractmethod
    def columns(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Return the columns of J of entries ``start`` to ``stop`` as tangents (stop - start, *like.shape)."""

    @abstractmethod
    def part(self, start: int, stop: int) -> ParameterJacobian:
        """Return the Jacobian of the outputs ``start`` to ``stop``, in the entries that reach them."""

    @abstractmethod
    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Return J^T x of :meth:`part` for x (R, stop - start, c), (size, c); of a weight with axes (inputs, outputs, c)."""

    @abstractmethod
    def diagonal(self, D: Tensor) -> Tensor:
        """Return the diagonal (size,) of J^T K J from K between equal columns, D (G, m, m', p); an entry reaches one column."""

    @abstractmethod
    def reaches_one_column(self) -> bool:
        """Tell whether each entry of the parameter reaches one column of z alone."""

    def unfold(self, x: Tensor, dim: int) -> Tensor:
        """Return a view of x whose axis ``dim``, of :attr:`size`, is that of the outputs; of a weight, (inputs, outputs)."""
        return x

    def runs(self, start: int = 0, stop: int | None = None) -> list[tuple[slice, slice]]:
        """Return the entries of :meth:`part` as runs: positions among these entries, and in vec_r of the parameter."""
        k = self._entries(start, stop)
        return _runs(k if self.at is None else self.at.reshape(-1)[k])

    def _entries(self, start: int, stop: int | None) -> slice | Tensor:
        """Positions of the entries of :meth:`part` among those of the Jacobian."""
        return slice(0, self.size)


@dataclass(frozen=True, eq=False)
class WeightJacobian(ParameterJacobian):
    """X (x) I for z = X W, X (R, i); W is stored as (i, p) or, ``transposed``, as (p, i)."""

    X: Tensor
    width: int
    transposed: bool

    @property
    def size(self) -> int:
        return self.X.shape[1] * self.width

    def unfold(self, x: Tensor, dim: int) -> Tensor:
        if self.transposed:
            return x.unflatten(dim, (self.width, -1)).transpose(dim, dim + 1)
        return x.unflatten(dim, (-1, self.width))

    def vjp_by_group(self, x: Tensor) -> Tensor:
        groups, m, p, c = x.shape
        w = self.X.reshape(-1, m, self.X.shape[1])  # (groups, m, i)
        result = (w.mT @ x.reshape(groups, m, p * c)).reshape(groups, -1, p, c)
        return (result.transpose(1, 2) if self.transposed else result).reshape(groups, -1, c)

    def add_vjp(self, x: Tensor, into: Tensor) -> None:
        groups, m, p = x.shape[1:]
        X = self.X.reshape(groups, m, -1)
        left_factor, right_factor, axes = (x.mT, X, (p, -1)) if self.transposed else (X.mT, x, (-1, p))
        into.unflatten(2, axes).add_(torch.matmul(left_factor, right_factor) if m > 1 else left_factor * right_factor)

    def columns(self, start: int, stop: int, like: Tensor) -> Tensor:
        k = torch.arange(start, stop, device=like.device)
        inputs = self.X.shape[1]
        i, p = (k % inputs, k // inputs) if self.transposed else (k // self.width, k % self.width)
        tangents = like.new_zeros(stop - start, len(self.X), self.width)
        tangents[torch.arange(stop - start, device=like.device), :, p] = self.X.T[i]
        return tangents.reshape(-1, *like.shape)

    def part(self, start: int, stop: int) -> WeightJacobian:
        if stop - start == self.width:
            return self
        at = None if self.at is None else self.at.reshape(-1)[self._entries(start, stop)]
        return replace(self, at=at, width=stop - start)

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        return (self.X.T @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])

    def diagonal(self, D: Tensor) -> Tensor:
        groups, m, _, p = D.shape
        if m == 1:
            sums = self.X.square().T @ D.reshape(groups, p)  # (i, p)
        else:  # over pairs of rows of a group, some columns at a time
            X = self.X.reshape(groups, 1, m, -1)
            step = max(1, together(SCRATCH, X) // (len(self.X) * X.shape[3]))
            parts = [(((K @ X) * X).sum((0, 2))) for K in D.permute(0, 3, 1, 2).split(step, 1)]
            sums = torch.cat(parts).T
        return (sums.T if self.transposed else sums).reshape(-1)

    def reaches_one_column(self) -> bool:
        return True

    def _entries(self, start: int, stop: int | None) -> slice | Tensor:
        inputs = self.X.shape[1]
        if stop is None or stop - start == self.width:
            return slice(0, self.size)
        if self.transposed:
            return slice(start * inputs, stop * inputs)
        rows = torch.arange(inputs, device=self.X.device).unsqueeze(1)
        return (self.width * rows + torch.arange(start, stop, device=self.X.device)).reshape(-1)


@dataclass(frozen=True, eq=False)
class GainJacobian(ParameterJacobian):
    """diag(X[n]) for z = X o gamma, X (R, p)."""

    X: Tensor

    @property
    def size(self) -> int:
        return self.X.shape[1]

    def vjp_by_group(self, x: Tensor) -> Tensor:
        if self.is_ones:
            return x.sum(1)
        m, p = x.shape[1:3]
        return (self.X.reshape(-1, m, p, 1) * x).sum(1)

    def add_vjp(self, x: Tensor, into: Tensor) -> None:
        into += x.sum(2) if self.is_ones else (x * self.X.reshape(x.shape[1:])).sum(2)

    def columns(self, start: int, stop: int, like: Tensor) -> Tensor:
        tangents = like.new_zeros(stop - start, *self.X.shape)
        k = torch.arange(stop - start, device=like.device)
        tangents[k, :, start + k] = self.X.T[start:stop]
        return tangents.reshape(-1, *like.shape)

    def part(self, start: int, stop: int) -> GainJacobian:
        if stop - start == self.size:
            return self
        return GainJacobian(self.parameter, None if self.at is None else self.at.reshape(-1)[start:stop], self.X[:, start:stop])

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        return x.sum(0) if self.is_ones else torch.einsum("rp,rpc->pc", self.X[:, start:stop], x)

    def diagonal(self, D: Tensor) -> Tensor:
        groups, m, _, p = D.shape
        if self.is_ones:
            return D.sum((0, 1, 2))
        X = self.X.reshape(groups, m, p)
        return torch.einsum("gmp,gmnp,gnp->p", X, D, X)

    def reaches_one_column(self) -> bool:
        return True

    def _entries(self, start: int, stop: int | None) -> slice | Tensor:
        return slice(start, self.size if stop is None else stop)

    @property
    def is_ones(self) -> bool:
        """Whether the parameter is a bias."""
        return self.X.stride() == (0, 0)


@dataclass(frozen=True, eq=False)
class IndexJacobian(ParameterJacobian):
    """A selection: z[n, o] is entry ``at[index[n, o]]`` of the parameter."""

    index: Tensor

    @property
    def size(self) -> int:
        assert self.at is not None
        return self.at.numel()

    def vjp_by_group(self, x: Tensor) -> Tensor:
        groups, m, p, c = x.shape
        shift = torch.arange(groups, device=x.device).reshape(-1, 1) * self.size
        into = x.new_zeros(groups * self.size, c)
        add_at(into, 0, (self.index.reshape(groups, m * p) + shift).reshape(-1), x.reshape(-1, c))
        return into.reshape(groups, self.size, c)

    def add_vjp(self, x: Tensor, into: Tensor) -> None:
        index = self.index.reshape(1, x.shape[1], -1).expand(len(x), -1, -1)
        if x.device.type == "cpu":
            into.scatter_add_(2, index, x.flatten(2))
        else:  # in the same order always
            at = torch.meshgrid(*(torch.arange(n, device=x.device) for n in index.shape[:2]), indexing="ij")
            torch._index_put_impl_(into, (*(a.unsqueeze(2) for a in at), index), x.flatten(2), True, True)

    def columns(self, start: int, stop: int, like: Tensor) -> Tensor:
        entries = torch.arange(start, stop, device=like.device).reshape(-1, 1, 1)
        return (self.index == entries).to(like).reshape(-1, *like.shape)

    def part(self, start: int, stop: int) -> IndexJacobian:
        return replace(self, index=self.index[:, start:stop])

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        index = self.index[:, start:stop].reshape(-1)
        return add_at(x.new_zeros(self.size, x.shape[2]), 0, index, x.reshape(-1, x.shape[2]))

    def diagonal(self, D: Tensor) -> Tensor:
        groups, m, _, p = D.shape
        index = self.index.reshape(groups, m, p)
        rows = D.sum(2) if m == 1 else (D * (index.unsqueeze(2) == index.unsqueeze(1))).sum(2)
        return add_at(D.new_zeros(self.size), 0, index.reshape(-1), rows.reshape(-1))

    def reaches_one_column(self) -> bool:
        column = torch.arange(self.index.shape[1], device=self.index.device).expand_as(self.index)
        home = column.new_zeros(self.size)
        home[self.index.reshape(-1)] = column.reshape(-1)
        return bool((home[self.index] == column).all())


@dataclass(frozen=True, eq=False)
class IdentityJacobian(ParameterJacobian):
    """The identity, for a parameter taken whole: its entries are coordinates ``start`` to ``start + count`` of the place."""

    start: int
    count: int

    @property
    def size(self) -> int:
        return self.count

    def vjp_by_group(self, x: Tensor) -> Tensor:
        return x[:, 0, self.start : self.start + self.count]

    def add_vjp(self, x: Tensor, into: Tensor) -> None:
        into += x.flatten(2)[:, :, self.start : self.start + self.count]

    def columns(self, start: int, stop: int, like: Tensor) -> Tensor:
        tangents = like.new_zeros(stop - start, like.numel())
        tangents.diagonal(self.start + start).fill_(1.0)
        return tangents.reshape(-1, *like.shape)

    def part(self, start: int, stop: int) -> IdentityJacobian:
        first, last = max(self.start, start), min(self.start + self.count, stop)
        at = None if self.at is None else self.at.reshape(-1)[self._entries(start, stop)]
        return IdentityJacobian(self.parameter, at, first - start, max(0, last - first))

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        part = self.part(start, stop)
        return x[0, part.start : part.start + part.count]

    def diagonal(self, D: Tensor) -> Tensor:
        return D[0, 0, 0, self.start : self.start + self.count]

    def reaches_one_column(self) -> bool:
        return True

    def _entries(self, start: int, stop: int | None) -> slice | Tensor:
        stop = self.start + self.count if stop is None else stop
        first = max(self.start, start)
        return slice(first - self.start, max(min(self.start + self.count, stop), first) - self.start)


def key(u: ParameterJacobian) -> tuple[str, int]:
    """Return a key that is equal for Jacobians with respect to the same entries."""
    return u.parameter, id(u.at)


def _runs(entries: slice | Tensor) -> list[tuple[slice, slice]]:
    """Return consecutive entries as runs: their positions in the list, and the entries."""
    if isinstance(entries, slice):
        return [(slice(0, entries.stop - entries.start), entries)]
    if not entries.numel():
        return []
    ends = [0, *((entries[1:] != entries[:-1] + 1).nonzero().reshape(-1) + 1).tolist(), entries.numel()]
    starts = entries[ends[:-1]].tolist()
    return [(slice(x, y), slice(at, at + y - x)) for x, y, at in zip(ends[:-1], ends[1:], starts, strict=True)]


@dataclass
class Site:
    """A value (rows..., p) that is linear in some parameters, row by row.

    Attributes:
        value: Id of the value.
        jacobians: Jacobians with respect to the parameters.
        covered: Positions of the application's inputs that these parameters are.
        weight_jacobian: Jacobian of the weight or gain that multiplies the application's first input, if there is one.
    """

    value: int
    jacobians: list[ParameterJacobian]
    covered: tuple[int, ...]
    weight_jacobian: ParameterJacobian | None = None


@dataclass(frozen=True)
class EntrySelection:
    """A value whose entries are entries of one parameter: ``at`` holds their positions, None where it is the parameter."""

    parameter: str
    at: Tensor | None


def selections(trace: Trace) -> dict[int, EntrySelection]:
    """Return the values that are parameters, or entries of one parameter rearranged, by id."""
    result = {at: EntrySelection(name, None) for name, at in trace.parameters.items()}
    for a in trace.applications:
        source = result.get(a.inputs[0]) if len(a.inputs) == 1 and a.inputs[0] is not None else None
        if source is None or not a.primitive.selects:
            continue
        value = trace.values[a.inputs[0]]  # type: ignore[index]
        positions = torch.arange(value.numel(), device=value.device).reshape(value.shape) if source.at is None else source.at
        result[a.output] = EntrySelection(source.parameter, a.primitive.value(positions))
    return result


def find_sites(trace: Trace) -> dict[int, Site]:
    """Return every site of a trace, by the id of its value, in the order of the trace."""
    selection_by_value = selections(trace)
    uses = Counter(at for a in trace.applications for at in a.inputs if at is not None)
    sites: dict[int, Site] = {}
    for a in trace.applications:
        site = _site(trace, a, selection_by_value, sites, uses)
        if site is not None:
            sites[a.output] = site
    return sites


def _site(
    trace: Trace,
    a: Application,
    selection_by_value: Mapping[int, EntrySelection],
    sites: dict[int, Site],
    uses: Mapping[int, int],
) -> Site | None:
    roles = a.primitive.roles
    if not roles:
        return None
    inputs, value = trace.gather(a), trace.values[a.output]
    x = inputs[0]
    if value.ndim < 2 or x is None or not value.is_floating_point():
        return None
    rows, width = value.shape[:-1].numel(), value.shape[-1]

    def selected(position: int) -> EntrySelection | None:
        at = a.inputs[position] if position < len(a.inputs) else None
        return None if at is None else selection_by_value.get(at)

    def vector(position: int) -> ParameterJacobian | None:
        """The Jacobian of a gain or a bias, one entry for each column."""
        s = selected(position)
        if s is None or inputs[position].shape != (width,) or not _injective(s.at):  # type: ignore[union-attr]
            return None
        return GainJacobian(s.parameter, s.at, torch.ones((), dtype=value.dtype, device=value.device).expand(rows, width))

    def product_site(position: int) -> Site | None:
        at = a.inputs[position]
        return sites.get(at) if at is not None and uses[at] == 1 else None

    jacobians: dict[int, ParameterJacobian] = {}
    for position, role in roles.items():
        s = selected(position)
        if role == "table":
            s = selection_by_value.get(a.output)
            return None if s is None or s.at is None else Site(a.output, [_index(s, value)], (position,))
        if role == "term":
            shapes = x.shape, inputs[1].shape  # type: ignore[union-attr]
            return None if a.inputs[0] == a.inputs[1] else _of_a_sum(a, value, selected, vector, shapes, product_site)
        if role in ("weight", "transposed weight"):
            if a.inputs[0] == a.inputs[position]:
                return None
            if s is not None and inputs[position].ndim == 2 and _injective(s.at):  # type: ignore[union-attr]
                entries = None if s.at is None else s.at.reshape(-1)
                X = x.reshape(-1, x.shape[-1])
                jacobians[position] = WeightJacobian(s.parameter, entries, X, width, role == "transposed weight")
        elif (one := vector(position)) is not None:
            if role == "gain":
                plain = a.primitive.value(x, *([None] * (len(inputs) - 1)))  # type: ignore[arg-type]
                one = GainJacobian(one.parameter, one.at, plain.reshape(-1, width))
            jacobians[position] = one
    return Site(a.output, list(jacobians.values()), tuple(jacobians), jacobians.get(1)) if jacobians else None


def _of_a_sum(
    a: Application,
    value: Tensor,
    selection: Callable[[int], EntrySelection | None],
    vector: Callable[[int], ParameterJacobian | None],
    shapes: tuple[torch.Size, torch.Size],
    product_site: Callable[[int], Site | None],
) -> Site | None:
    """Return the site of a bias, or of a table of positions, that is added to another value."""
    tables: dict[int, ParameterJacobian] = {}
    for position, opposite in ((1, 0), (0, 1)):
        s = selection(position)
        if s is None or (shapes[opposite] != value.shape and opposite not in tables):
            continue
        if shapes[opposite] == value.shape and (bias := vector(position)) is not None:
            product = product_site(opposite)
            if product is not None and product.weight_jacobian is not None:
                product.jacobians.append(bias)  # the bias of the product just made: one site for both
                return Site(a.output, [], (position,))
            return Site(a.output, [bias], (position,))
        positions = torch.arange(shapes[position].numel(), device=value.device).reshape(shapes[position])
        tables[position] = _index(EntrySelection(s.parameter, (positions if s.at is None else s.at).expand(value.shape)), value)
    return Site(a.output, list(tables.values()), tuple(tables)) if tables else None


def _index(s: EntrySelection, value: Tensor) -> IndexJacobian:
    assert s.at is not None
    at, index = torch.unique(s.at, return_inverse=True)
    return IndexJacobian(s.parameter, at, index.reshape(-1, value.shape[-1]))


def _injective(at: Tensor | None) -> bool:
    return at is None or torch.unique(at).numel() == at.numel()
