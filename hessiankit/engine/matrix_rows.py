"""A reader of block rows that adds them to a symmetric matrix, or to a panel of it."""

from __future__ import annotations

import torch
from torch import Tensor

from hessiankit.engine.block_rows import Columns, shifted
from hessiankit.engine.contractions import add_between, add_equal_columns
from hessiankit.engine.jacobians import GainJacobian, ParameterJacobian, WeightJacobian
from hessiankit.engine.parameter_blocks import add_pair
from hessiankit.engine.storage import SymmetricStorage


class MatrixRows:
    """Adds A + A^T to a matrix; a :class:`hessiankit.engine.block_rows.Reader`.

    Of two parameters one block is added to, that above the diagonal, which :meth:`SymmetricStorage.mirror` copies below it.

    Args:
        matrix: What is added to.
    """

    def __init__(self, matrix: SymmetricStorage) -> None:
        self.matrix = matrix

    def add_rows(self, u: ParameterJacobian, start: int, stop: int, rows: Tensor, columns: Columns) -> None:
        """Add rows of some outputs of a Jacobian."""
        if isinstance(u, WeightJacobian):
            rows = (rows.transpose(0, 1) if u.transposed else rows).flatten(0, 1)
        runs = u.runs(start, stop)
        for name, cut, entries in columns.pieces:
            if not self.matrix.wants(u.parameter, name):
                continue
            block = self.matrix.block(u.parameter, name)
            self.matrix.touch(block)
            for span, at in runs:
                block[at, entries] += rows[span, cut]
                if name == u.parameter:
                    block[entries, at] += rows[span, cut].T

    def add_pair(
        self, u: ParameterJacobian, of_u: tuple[int, int], v: ParameterJacobian, of_v: tuple[int, int], K: Tensor, *, same: bool
    ) -> None:
        """Add the sum over rows of two Jacobians; of one parameter that two of them share, and its transpose."""
        if not self.matrix.wants(u.parameter, v.parameter):
            return
        both = u.parameter == v.parameter and not same
        into = None if both else self._view(u, of_u, v, of_v, K)
        if into is not None:
            self.matrix.keep(add_between(u.part(*of_u), v.part(*of_v), K, into, same=same))
            return
        some_u, some_v = u.part(*of_u), v.part(*of_v)
        part = K.new_zeros(some_u.size, some_v.size)
        rest = add_pair(some_u, some_v, K, part, same=False)
        if rest is not None:
            rest.add()
        self._scatter(u, of_u, v, of_v, part, both=both)

    def add_columns(self, u: ParameterJacobian, of_u: tuple[int, int], v: ParameterJacobian, k: Tensor) -> None:
        """Add the sum over rows of two Jacobians between equal outputs."""
        if not self.matrix.wants(u.parameter, v.parameter):
            return
        into = None if u.parameter == v.parameter else self._view(u, of_u, v, of_u, k)
        if into is None:
            self.add_pair(u, of_u, v, of_u, torch.diag_embed(k), same=False)
        else:
            self.matrix.touch(into)
            add_equal_columns(u.part(*of_u), v.part(*of_u), k, into)

    def finish(self) -> None:
        """Add the sums that the compiled kernels have left, those to one block together."""
        self.matrix.finish()

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
        into = u.unfold(v.unfold(block, 1).narrow(1 + v.is_weight, of_v[0], of_v[1] - of_v[0]), 0)
        return into.narrow(int(u.is_weight), of_u[0], of_u[1] - of_u[0])

    def _scatter(
        self,
        u: ParameterJacobian,
        of_u: tuple[int, int],
        v: ParameterJacobian,
        of_v: tuple[int, int],
        part: Tensor,
        *,
        both: bool,
    ) -> None:
        block = self.matrix.block(u.parameter, v.parameter)
        self.matrix.touch(block)
        for span, entries in u.runs(*of_u):
            for cut, at in v.runs(*of_v):
                block[entries, at] += part[span, cut]
                if both:
                    block[at, entries] += part[span, cut].T
