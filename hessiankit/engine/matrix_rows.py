"""Block rows added to a symmetric matrix, or to a panel of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hessiankit.engine.contractions import add_between, add_equal_columns, add_selected
from hessiankit.engine.jacobians import (
    SCRATCH,
    GainJacobian,
    IdentityJacobian,
    IndexJacobian,
    ParameterJacobian,
    WeightJacobian,
    key,
)
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.primitives.directions import together

DIRECT = 2**12
"""Numbers of rows of one output from which they are added by the product that makes them."""


class Columns:
    """Columns of mixed derivatives: each parameter's entries, in the order of H.

    Columns of new places precede those of ``base``: in the order of the places, as in the matrix.

    Args:
        jacobians: Jacobians of the new places.
        base: Columns to which theirs are added.

    Attributes:
        slices: Columns of each Jacobian's entries, by :func:`key`.
        pieces: A parameter, some columns and which of its entries these are, in few runs.
        size: Number of columns.
    """

    def __init__(self, jacobians: Sequence[ParameterJacobian], base: Columns | None = None) -> None:
        self.slices: dict[tuple[str, int], slice] = {}
        self.pieces: list[tuple[str, slice, slice]] = []
        self.size = 0
        for u in jacobians:
            if key(u) not in self.slices and (base is None or key(u) not in base.slices):
                self.slices[key(u)] = slice(self.size, self.size + u.size)
                self.pieces += [(u.parameter, shifted(span, self.size), entries) for span, entries in u.runs()]
                self.size += u.size
        if base is not None:
            self.slices |= {name: shifted(span, self.size) for name, span in base.slices.items()}
            self.pieces += [(name, shifted(span, self.size), entries) for name, span, entries in base.pieces]
            self.size += base.size

    def pieces_between(self, start: int, stop: int) -> list[tuple[str, slice, slice]]:
        """Return the pieces of some columns, counted from the first one."""
        clipped = (
            (name, max(at.start, start), min(at.stop, stop), entries.start - at.start) for name, at, entries in self.pieces
        )
        return [(name, slice(a - start, b - start), slice(a + by, b + by)) for name, a, b, by in clipped if a < b]


def shifted(at: slice, by: int) -> slice:
    """Return a slice moved by some entries."""
    return slice(at.start + by, at.stop + by)


class MatrixRows:
    """Adds A + A^T to a matrix, whose summands :class:`hessiankit.engine.block_rows.BlockRows` yields.

    Only blocks on and above the diagonal receive sums; :meth:`SymmetricStorage.mirror` copies them below it.

    Args:
        matrix: Matrix that is added to.
        tied: Parameters that enter several places, so that parts of their block are not symmetric.
    """

    def __init__(self, matrix: SymmetricStorage, tied: Collection[str] = ()) -> None:
        self.matrix, self._tied = matrix, tied

    def wants(self, i: str, j: str) -> bool:
        """Tell whether the block of two parameters is stored."""
        return self.matrix.wants(i, j)

    def add_rows(
        self, u: ParameterJacobian, start: int, stop: int, Z: Tensor, pieces: Sequence[tuple[str, slice, slice]]
    ) -> None:
        """Add u^T Z for the gradient's derivative Z (R, ``start`` to ``stop``, columns) with respect to outputs of u's place."""
        matrix, order = self.matrix, self.matrix.order
        runs: list[tuple[slice, slice]] = []  # columns, and where they are in the matrix, as few runs
        for name, span, entries in pieces:
            if not matrix.wants(u.parameter, name):
                continue
            matrix.touch(u.parameter, name)
            if order[name] > order[u.parameter]:
                at = shifted(entries, matrix.slices[name].start - matrix.left.start)
                if runs and (runs[-1][0].stop, runs[-1][1].stop) == (span.start, at.start):
                    span, at = slice(runs[-1][0].start, span.stop), slice(runs.pop()[1].start, at.stop)
                runs.append((span, at))
            else:
                block = matrix.block(u.parameter, name)[:, entries]
                self._add_some(u, start, stop, Z[..., span], block, entries if name == u.parameter else None)
        rows = matrix.rows_of(u.parameter)
        for span, at in runs:
            self._add_some(u, start, stop, Z[..., span], matrix.data[rows, at], None)

    def _add_some(self, u: ParameterJacobian, start: int, stop: int, Z: Tensor, into: Tensor, columns: slice | None) -> None:
        """Add u^T Z to columns of the rows of its parameter, some outputs at a time; ``columns``: these, as entries of it."""
        runs, width = u.runs(), Z.shape[2]
        regular = len(runs) == 1 and isinstance(u, (WeightJacobian, GainJacobian))
        if regular and columns is None and isinstance(u, WeightJacobian) and into.stride(1) == 1 and into.dtype == Z.dtype:
            by_output = u.unfold(into[runs[0][1]], 0)  # (i, p, c)
            if u.X.shape[1] * width >= together(DIRECT, Z):
                for k in range(start, stop):
                    by_output[:, k].addmm_(u.X.T, Z[:, k - start])
                return
        numbers = 0 if isinstance(u, IdentityJacobian) else u.size * width  # its rows are parts of Z: none are made
        step = max(1, together(SCRATCH, Z) // numbers) if numbers else stop - start
        for first in range(start, stop, step):
            last = min(first + step, stop)
            rows = u.rows(Z[:, first - start : last - start], first, last)
            if not regular:
                self._add_entries(u, (first, last), rows, into, columns)
                continue
            u.unfold(into[runs[0][1]], 0).narrow(int(isinstance(u, WeightJacobian)), first, last - first).add_(rows)
            if columns is not None:
                self._add_transpose(u, (first, last), rows, columns)

    def _add_transpose(self, u: ParameterJacobian, of_u: tuple[int, int], rows: Tensor, columns: slice) -> None:
        """Add to the block of a parameter with itself the transpose of its rows; its entries are one run."""
        ((_, at),) = u.runs()
        transpose, outputs = rows.movedim(-1, 0), int(isinstance(u, WeightJacobian))
        into = u.unfold(self.matrix.block(u.parameter, u.parameter)[columns, at], 1)
        into.narrow(1 + outputs, of_u[0], of_u[1] - of_u[0]).add_(transpose)
        if u.parameter not in self._tied and columns.start <= at.start < at.stop <= columns.stop:
            square = u.unfold(transpose[at.start - columns.start : at.stop - columns.start], 0)
            square = square.narrow(outputs, of_u[0], of_u[1] - of_u[0])
            mirrored = square.permute(2, 3, 0, 1) if isinstance(u, WeightJacobian) else square.T
            self.matrix.asymmetries.append((square - mirrored).abs().max())

    def _add_entries(
        self, u: ParameterJacobian, of_u: tuple[int, int], rows: Tensor, into: Tensor, columns: slice | None
    ) -> None:
        """Add rows by runs of entries; to the block of a parameter with itself also their transpose."""
        complete = not isinstance(u, IndexJacobian) or of_u == (0, u.index.shape[1])  # its entries may reach other outputs too
        if isinstance(u, WeightJacobian):
            rows = (rows.transpose(0, 1) if u.transposed else rows).flatten(0, 1)
        for span, at in u.runs(*of_u):
            into[at] += rows[span]
            if columns is not None:
                self.matrix.block(u.parameter, u.parameter)[columns, at] += rows[span].T
                if complete and u.parameter not in self._tied and columns.start <= at.start < at.stop <= columns.stop:
                    square = rows[span, at.start - columns.start : at.stop - columns.start]
                    self.matrix.asymmetries.append((square - square.T).abs().max())

    def add_pair(
        self,
        u: ParameterJacobian,
        of_u: tuple[int, int],
        v: ParameterJacobian,
        of_v: tuple[int, int],
        K: Tensor,
        *,
        is_same_place: bool,
    ) -> None:
        """Add sum_n u_n^T K_n v_n for K (R, p, q) between outputs of two Jacobians, ``is_same_place`` if of one place.

        Of one parameter that two of them share its transpose is added too.
        """
        if not self.matrix.wants(u.parameter, v.parameter):
            return
        has_transpose = u.parameter == v.parameter and not is_same_place
        into = None if has_transpose else self._view(u, of_u, v, of_v, K)
        if is_same_place:
            self._compare(K)
        if into is not None:
            self.matrix.keep(
                u.parameter, v.parameter, add_between(u.part(*of_u), v.part(*of_v), K, into, is_symmetric=is_same_place)
            )
            return
        some_u, some_v = u.part(*of_u), v.part(*of_v)
        part = K.new_zeros(some_u.size, some_v.size)
        if isinstance(u, IndexJacobian) or isinstance(v, IndexJacobian):
            add_selected(some_u, some_v, K, part)
        elif (rest := add_between(some_u, some_v, K, some_u.unfold(some_v.unfold(part, 1), 0), is_symmetric=False)) is not None:
            rest.add()
        self._scatter(u, of_u, v, of_v, part, has_transpose=has_transpose)

    def add_columns(self, u: ParameterJacobian, of_u: tuple[int, int], v: ParameterJacobian, k: Tensor) -> None:
        """Add sum_n u_n^T diag(k_n) v_n for k (R, p) between the same outputs of two Jacobians."""
        if not self.matrix.wants(u.parameter, v.parameter):
            return
        into = None if u.parameter == v.parameter else self._view(u, of_u, v, of_u, k)
        if into is None:
            self.add_pair(u, of_u, v, of_u, torch.diag_embed(k), is_same_place=False)
        else:
            self.matrix.touch(u.parameter, v.parameter)
            add_equal_columns(u.part(*of_u), v.part(*of_u), k, into)

    def finish(self) -> None:
        """Add the sums that are queued for the compiled kernels, joined per block."""
        self.matrix.finish()

    def _compare(self, K: Tensor) -> None:
        """Note how far curvature (R, p, p) of a place with itself is from symmetric."""
        total = K.sum(0)
        self.matrix.skews.append(((total - total.T).abs().max(), torch.linalg.vector_norm(K)))

    def _view(
        self, u: ParameterJacobian, of_u: tuple[int, int], v: ParameterJacobian, of_v: tuple[int, int], K: Tensor
    ) -> Tensor | None:
        """Return the block with axes (inputs, outputs) of each side, if its entries lie regularly in the matrix."""
        if not all(isinstance(one, (WeightJacobian, GainJacobian)) for one in (u, v)):
            return None
        rows, columns = u.runs(), v.runs()
        block = self.matrix.block(u.parameter, v.parameter)
        if len(rows) != 1 or len(columns) != 1 or block.dtype != K.dtype:
            return None
        block = block[rows[0][1], columns[0][1]]
        into = u.unfold(v.unfold(block, 1).narrow(1 + isinstance(v, WeightJacobian), of_v[0], of_v[1] - of_v[0]), 0)
        return into.narrow(int(isinstance(u, WeightJacobian)), of_u[0], of_u[1] - of_u[0])

    def _scatter(
        self,
        u: ParameterJacobian,
        of_u: tuple[int, int],
        v: ParameterJacobian,
        of_v: tuple[int, int],
        part: Tensor,
        *,
        has_transpose: bool,
    ) -> None:
        block = self.matrix.block(u.parameter, v.parameter)
        self.matrix.touch(u.parameter, v.parameter)
        for rows, entries in u.runs(*of_u):
            for columns, at in v.runs(*of_v):
                block[entries, at] += part[rows, columns]
                if has_transpose:
                    block[at, entries] += part[rows, columns].T
