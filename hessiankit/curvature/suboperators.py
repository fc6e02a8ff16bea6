"""Blocks of a symmetric operator as operators: any rows and columns, the block-diagonal part of any grouping, and groupings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hessiankit.curvature.solving import SymmetricOperator
from hessiankit.curvature.tensor_operator import TensorOperator
from hessiankit.request.selection import chosen
from hessiankit.support.errors import InputError, check_name

Partition: TypeAlias = Callable[[nn.Module | None, Collection[str]], Mapping[str, Any]]
"""A function of the module (None of an operator alone) and of its parameters' names: group -> what :func:`positions` takes."""
BY = ("parameter",)
"""Words for groups that need no module."""


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

    A product takes one product with A for each block, many together; entries in no block are multiplied by zero.

    Attributes:
        groups: Name -> positions of the block's entries.
    """

    def __init__(self, whole: TensorOperator, groups: Mapping[str, Tensor]) -> None:
        super().__init__((whole.shape[0], whole.shape[1]), whole.torch_dtype, whole.device)
        self.whole, self.block_size = whole, whole.block_size
        self.groups = {name: at.to(whole.device) for name, at in groups.items()}
        self._labels = labels("block_diagonal", self.groups, whole.shape[0]).to(whole.device)

    def _rows(self, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        count = max(1, self.block_size // max(1, len(rows)))
        for numbers in torch.arange(len(self.groups), device=rows.device).split(count):
            masks = self._labels == numbers.unsqueeze(1)  # (blocks, P): each vector is cut into its parts in the blocks
            products = self.whole._rows((rows.unsqueeze(1) * masks).flatten(0, 1))
            out += (products.reshape(len(rows), len(numbers), -1) * masks).sum(1)
        return out


def labels(caller: str, groups: Mapping[str, Tensor], size: int) -> Tensor:
    """Return the number of each entry's group, (P,); the number of groups for an entry in none.

    Raises:
        InputError: Two groups share an entry.

    >>> labels("example", {"a": torch.tensor([0, 2]), "b": torch.tensor([3])}, 4).tolist()
    [0, 2, 0, 1]
    """
    numbers = torch.full((size,), len(groups), device="cpu")
    for n, (name, at) in enumerate(groups.items()):
        overlap = (numbers[at.cpu()] < n).nonzero()
        if len(overlap):
            entry = int(at[overlap[0]])
            other = list(groups)[int(numbers[entry])]
            raise InputError(f"{caller}: groups {other!r} and {name!r} share entry {entry}; pass disjoint groups")
        numbers[at.cpu()] = n
    return numbers


def groups_by(caller: str, by: Any, module: nn.Module | None, names: Collection[str]) -> Mapping[str, Any]:
    """Return the groups of a partition, or those given as a dict.

    >>> groups_by("example", lambda module, names: {name[0]: name for name in names}, None, ["weight"])
    {'w': 'weight'}
    """
    groups = by(module, names) if callable(by) and not isinstance(by, (type, nn.Module)) else by
    if not isinstance(groups, Mapping):
        raise InputError(
            f"{caller}: a partition gives a {type(groups).__name__}; pass a dict of groups, or a function that returns one"
        )
    return groups


def positions(caller: str, wanted: Any, shapes: Mapping[str, tuple[int, ...]], slices: Mapping[str, slice]) -> Tensor:
    """Return the positions in a vector of parameters, ascending, of a name, a pattern, ``"name[index]"`` or a list of these.

    >>> positions("example", ["*.b", "a.w[0]"], {"a.w": (2, 2), "a.b": (2,)}, {"a.w": slice(0, 4), "a.b": slice(4, 6)}).tolist()
    [0, 1, 4, 5]
    """
    parts = chosen(caller, wanted, shapes)
    entries = [torch.arange(slices[name].start, slices[name].stop, device="cpu") for name in parts]
    return torch.cat([at if rows is None else at[rows] for at, rows in zip(entries, parts.values(), strict=True)]).unique()


def groups_of(caller: str, by: str | Mapping[str, Any] | Partition, operator: Any, module: nn.Module | None) -> dict[str, Tensor]:
    """Return the rows of each group in an operator, or in anything else with ``slices`` and ``shapes``, ascending.

    ``by`` is one of :data:`BY`; or group -> names, patterns or slices; or name -> group; or a partition that gives one of these.

    >>> layer = nn.Linear(2, 1).double()
    >>> from hessiankit import hessian_operator
    >>> H = hessian_operator(layer, torch.ones(1, 2).double(), torch.zeros(1, 1).double())
    >>> {name: rows.tolist() for name, rows in groups_of("example", {"first": ["weight[:, 0]"], "all": "*"}, H, None).items()}
    {'first': [0], 'all': [0, 1, 2]}
    >>> groups_of("example", {"bias": "both", "weight": "both"}, H, None)
    {'both': tensor([0, 1, 2])}
    >>> groups_of("example", lambda module, names: {name.upper(): name for name in names}, H, layer)
    {'WEIGHT': tensor([0, 1]), 'BIAS': tensor([2])}
    """
    if not hasattr(operator, "slices"):
        raise InputError(f"{caller}: by needs parameters by name, which a {type(operator).__name__} does not have; leave it out")
    if isinstance(by, str):
        check_name(caller, "by", by, BY)
        return {name: torch.arange(rows.start, rows.stop, device="cpu") for name, rows in operator.slices.items()}
    members: dict[str, list[Tensor]] = {}
    for key, value in groups_by(caller, by, module, operator.slices).items():
        if not isinstance(key, str):
            raise InputError(f"{caller}: by has the key {key!r}; expected names of groups, or of parameters")
        of_names = isinstance(value, str) and (key in operator.shapes or key in operator.shapes.aliases or "[" in key)
        group, names = (value, key) if of_names else (key, value)
        members.setdefault(group, []).append(positions(caller, names, operator.shapes, operator.slices))
    if not members:
        raise InputError(f"{caller}: by has no group; name some")
    return {name: torch.cat(rows).unique() for name, rows in members.items()}
