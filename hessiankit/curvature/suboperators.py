"""Blocks of a symmetric operator as operators: any rows and columns, and the block-diagonal part of any grouping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hessiankit.curvature.solving import SymmetricOperator
from hessiankit.curvature.tensor_operator import TensorOperator
from hessiankit.request.selection import chosen
from hessiankit.support.errors import InputError

Partition: TypeAlias = Callable[[nn.Module | None, Collection[str]], Mapping[str, Any]]
"""A function of the module (None of an operator alone) and of its parameters' names: group -> what :func:`positions` takes."""


class SubOperator(TensorOperator):
    """The block A[rows, columns] of a symmetric operator A; made by ``operator[rows, columns]``.

    A product takes one product with A.

    Attributes:
        rows: Positions in the vectors of A, ascending; so are ``columns``.

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> H = hk.hessian_operator(layer, x, torch.zeros(2, 1, dtype=torch.float64))
    >>> H["weight"].to_matrix().tolist(), H["bias", "weight"].to_matrix().tolist()
    ([[2.0, 2.0], [2.0, 4.0]], [[2.0, 2.0]])
    >>> H.block_diagonal().to_matrix().tolist()
    [[2.0, 2.0, 0.0], [2.0, 4.0, 0.0], [0.0, 0.0, 2.0]]
    """

    def __init__(self, whole: TensorOperator, rows: Tensor, columns: Tensor) -> None:
        super().__init__((len(rows), len(columns)), whole.torch_dtype, whole.device)
        self.whole, self.rows, self.columns = whole, rows.to(whole.device), columns.to(whole.device)
        self.block_size = whole.block_size

    def _rows(self, rows: Tensor) -> Tensor:
        inside = rows.new_zeros(len(rows), self.whole.shape[1])
        inside[:, self.columns] = rows
        return self.whole._rows(inside)[:, self.rows]

    def _adjoint(self) -> SubOperator:
        return SubOperator(self.whole, self.columns, self.rows)


class BlockDiagonalOperator(SymmetricOperator):
    """The block-diagonal part of a symmetric operator A; made by ``operator.block_diagonal(groups)``.

    A product takes one product with A for each block; entries in no block are multiplied by zero.

    Attributes:
        groups: Name -> positions of the block's entries.
    """

    def __init__(self, whole: TensorOperator, groups: Mapping[str, Tensor]) -> None:
        super().__init__((whole.shape[0], whole.shape[1]), whole.torch_dtype, whole.device)
        self.whole, self.block_size = whole, whole.block_size
        self.groups = {name: at.to(whole.device) for name, at in groups.items()}
        taken = torch.zeros(whole.shape[0], dtype=torch.int64, device=whole.device)
        for at in self.groups.values():
            taken[at] += 1
        if bool((taken > 1).any()):
            twice = int((taken > 1).nonzero()[0])
            names = [name for name, at in self.groups.items() if bool((at == twice).any())]
            raise InputError(f"block_diagonal: groups {names[0]!r} and {names[1]!r} share entry {twice}; pass disjoint groups")

    def _rows(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for at in self.groups.values():
            out[:, at] = SubOperator(self.whole, at, at)._rows(rows[:, at])
        return out


def groups_by(who: str, by: Any, module: nn.Module | None, names: Collection[str]) -> Mapping[str, Any]:
    """Return the groups of a partition, or those given as a dict.

    >>> groups_by("example", lambda module, names: {name[0]: name for name in names}, None, ["weight"])
    {'w': 'weight'}
    """
    groups = by(module, names) if callable(by) and not isinstance(by, (type, nn.Module)) else by
    if not isinstance(groups, Mapping):
        raise InputError(
            f"{who}: a partition gives a {type(groups).__name__}; pass a dict of groups, or a function that returns one"
        )
    return groups


def positions(who: str, wanted: Any, shapes: Mapping[str, tuple[int, ...]], slices: Mapping[str, slice]) -> Tensor:
    """Return the positions in a vector of parameters, ascending, of a name, a pattern, ``"name[index]"`` or a list of these.

    >>> positions("example", ["*.b", "a.w[0]"], {"a.w": (2, 2), "a.b": (2,)}, {"a.w": slice(0, 4), "a.b": slice(4, 6)}).tolist()
    [0, 1, 4, 5]
    """
    parts = chosen(who, wanted, shapes)
    every = [torch.arange(slices[name].start, slices[name].stop, device="cpu") for name in parts]
    return torch.cat([at if rows is None else at[rows] for at, rows in zip(every, parts.values(), strict=True)]).unique()
