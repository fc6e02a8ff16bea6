"""Where a value that comes from no operation that was seen lies in autograd's graph: between which values that were seen.

During a recording autograd is on, so that a custom ``torch.autograd.Function``, what ``torch.vmap`` or another thread made, or
a gradient taken within a module carries its true graph. Followed back, it ends at values that were seen.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules._functions import BackwardHookFunction

from hessiankit.tracing.graph import Node

Edge: TypeAlias = "tuple[Any, int]"  # a function of autograd's graph, and which of its outputs


@dataclass(frozen=True)
class Unseen:
    """A value that autograd alone knows.

    Attributes:
        root: A copy of the value that is part of the graph.
        edges: The values that were seen and that it is made of; the arguments of its node, in order.
        names: The functions of autograd between them; none where the value is one of those, written into without gradients.
        leaves: What it depends on in the end, with their memory and version when it was made.
    """

    root: Tensor
    edges: tuple[GradientEdge, ...]
    names: tuple[str, ...]
    leaves: tuple[tuple[Tensor, Tensor, int], ...]


@dataclass(frozen=True)
class _Seen:
    """The node of a value that was seen, and where the value lies in memory."""

    node: Node
    place: tuple[Any, ...]


class Edges:
    """The nodes of values that were seen, by their edges in autograd's graph.

    Args:
        nodes: The nodes of tensors, by their ids.
        kept: The tensors.
        cut: Nodes made while gradients were off.
        stale: Ids of tensors whose values are not those of their nodes any more.
    """

    def __init__(self, nodes: Mapping[int, Node], kept: Sequence[Any], cut: Collection[Node], stale: Collection[int]) -> None:
        self._nodes, self._kept, self._cut, self._stale = nodes, kept, cut, stale
        self._seen: dict[Edge, _Seen] = {}
        self._looked_at = 0

    def clear(self) -> None:
        """Forget everything: a value has been written into, so that edges and values belong together anew."""
        self._seen.clear()
        self._looked_at = 0

    def before(self, x: Tensor) -> tuple[Edge, _Seen | None]:
        """Return the edge that a tensor comes from, and the value that was seen there, if any."""
        self.look()
        edge = _through_hooks((x.grad_fn, x.output_nr))
        return edge, self._seen.get(edge) or self._leaf(edge)

    def boundary(self, start: Edge) -> tuple[dict[Edge, Node], tuple[str, ...]]:
        """Return the edges of values that were seen behind an edge, with their nodes, and the functions passed on the way.

        None of them lies behind another: autograd's derivatives are total ones, which would count the way between the two twice.
        """
        passed: dict[Any, None] = {start[0]: None}
        while True:
            found = self._behind(passed)
            inner = [edge for edge in found if len(found) > 1 and not found.keys().isdisjoint(_all_behind(edge[0]))]
            if not inner:
                return found, tuple(dict.fromkeys(function.name() for function in passed))
            passed.update((function, None) for function, _ in inner)

    def leaves(self, start: Edge) -> tuple[Tensor, ...]:
        """Return the leaves that an edge depends on."""
        found = {id(function.variable): function.variable for function, _ in _all_behind(start[0]) if _is_leaf(function)}
        return tuple(found.values())

    def _behind(self, passed: dict[Any, None]) -> dict[Edge, Node]:
        """Walk back from functions to the next values that were seen; take the functions on the way into ``passed``."""
        found: dict[Edge, Node] = {}
        waiting = list(passed)
        while waiting:
            for edge in waiting.pop().next_functions:
                if edge[0] is None or edge[0] in passed:
                    continue
                seen = self._seen.get(edge) or self._leaf(edge)
                if seen is not None:
                    found[edge] = seen.node
                elif not _is_leaf(edge[0]):
                    passed[edge[0]] = None
                    waiting.append(edge[0])
        return found

    def look(self) -> None:
        """Take in the tensors noted since the last time."""
        for x in self._new():
            node = self._nodes.get(id(x))
            if node is not None and node not in self._cut and id(x) not in self._stale:
                self._seen[x.grad_fn, x.output_nr] = _Seen(node, place(x))

    def _new(self) -> Iterator[Tensor]:
        start, self._looked_at = self._looked_at, len(self._kept)
        for x in self._kept[start:]:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                yield x

    def _leaf(self, edge: Edge) -> _Seen | None:
        """Return the node of a leaf, such as a parameter, that was seen."""
        leaf = edge[0].variable if _is_leaf(edge[0]) else None
        node = None if leaf is None else self._nodes.get(id(leaf))
        return None if leaf is None or node is None or node.op != "placeholder" else _Seen(node, place(leaf))


def memory(x: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and x.numel() else id(x)


def place(x: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies in memory, and how."""
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.layout is torch.strided and x.numel() else (id(x),)


def _all_behind(function: Any) -> dict[Edge, None]:
    """Return every edge that a function's derivative is passed on to, near or far."""
    found: dict[Edge, None] = {}
    known, waiting = {function}, [function]
    while waiting:
        for edge in waiting.pop().next_functions:
            if edge[0] is not None:
                found[edge] = None
                if edge[0] not in known:
                    known.add(edge[0])
                    waiting.append(edge[0])
    return found


def _is_leaf(function: Any) -> bool:
    return hasattr(function, "variable")


def _through_hooks(edge: Edge) -> Edge:
    """Return the edge behind those that only call the backward hooks of a module."""
    while type(edge[0]).__name__ == f"{BackwardHookFunction.__name__}Backward":
        edge = edge[0].next_functions[edge[1]]
    return edge
