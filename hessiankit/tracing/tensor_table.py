"""The tensors of a run with the nodes that stand for them, and the memory that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hessiankit.support.containers import address
from hessiankit.tracing.graph import Node, unwrapped

View: TypeAlias = "tuple[Any, ...]"


def view_key(x: Tensor) -> View:
    """Return a key of the entries of memory that a tensor views, and of how it reads them."""
    if x.layout is not torch.strided or not x.numel():
        return (id(x),)
    return (address(x), x.storage_offset(), x.dtype, x.shape, x.stride(), x.is_neg())


@dataclass(eq=False, slots=True)
class TensorRecord:
    """A tensor with its node.

    Attributes:
        tensor: The tensor; no other one gets its id as long as the record holds it.
        node: The node that stands for it; None for a result of a transform of torch.func, which has none yet.
        was_constant: Whether it had no derivative when it was recorded; results of scripted functions get one later.
        is_stale: Whether it was written into since then where no operation was seen.
    """

    tensor: Tensor
    node: Node | None
    was_constant: bool
    is_stale: bool = False

    @property
    def is_valid(self) -> bool:
        """Whether the node stands for the tensor as it is now: the same entries, which pass gradients as its graph says."""
        if self.node is None or self.is_stale:
            return False
        if self.node.has_gradient and not self.was_constant:
            return True
        function = self.tensor.grad_fn
        return function is None or (self.node.has_gradient and type(function).__name__ != "CppFunction")


@dataclass(slots=True)
class Memory:
    """A piece of memory that tensors share.

    Attributes:
        is_external: Whether it existed before the function ran and is no argument's, as a buffer's; None as long as no node
            stands for a tensor in it.
        is_hidden: Whether it was filled where no operation was seen.
        is_overwritten: Whether it was written into where no operation was seen.
        records: Records of tensors in it, those with a later record included.
    """

    is_external: bool | None = None
    is_hidden: bool = False
    is_overwritten: bool = False
    records: list[TensorRecord] = field(default_factory=list)


class TensorTable:
    """The record of each tensor of a run, and its memory.

    Attributes:
        history: Every record that was made, in order.
    """

    def __init__(self) -> None:
        self.history: list[TensorRecord] = []
        self._records: dict[int, TensorRecord] = {}
        self._memories: defaultdict[int, Memory] = defaultdict(Memory)

    def add(self, x: Tensor, node: Node | None) -> Memory:
        """Record a tensor, in place of an earlier record of it, and return its memory."""
        record, memory = TensorRecord(x, node, not x.requires_grad), self.memory(x)
        self._records[id(x)] = record
        self.history.append(record)
        memory.records.append(record)
        return memory

    def record(self, x: Tensor) -> TensorRecord | None:
        """Return the last record of a tensor, if any."""
        return self._records.get(id(x))

    def node(self, x: Tensor) -> Node | None:
        """Return the node of a tensor, if any."""
        record = self.record(x)
        return None if record is None else record.node

    def memory(self, x: Tensor) -> Memory:
        """Return the memory of a tensor."""
        return self._memories[address(x)]

    def memories(self, tensors: Iterable[Any]) -> list[Memory]:
        """Return the memory of those arguments of a call that are tensors, within wrappers of torch.func or not."""
        addresses = {address(unwrapped(x)) for x in tensors if isinstance(x, Tensor)}
        return [self._memories[at] for at in addresses]

    def sharing(self, tensors: Iterable[Any]) -> list[TensorRecord]:
        """Return the records of all tensors that share memory with some tensors."""
        records = (record for memory in self.memories(tensors) for record in memory.records)
        return [record for record in records if self._records[id(record.tensor)] is record]
