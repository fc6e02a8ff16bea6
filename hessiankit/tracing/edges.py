"""Positions of values in autograd's graph.

During a recording autograd is on, so that a custom ``torch.autograd.Function``, what ``torch.vmap`` or another thread made, or
a gradient taken within a module carries its true graph. Followed back, it ends at values that were seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.modules._functions import BackwardHookFunction

from hessiankit.tracing.graph import Edge, Node, Unseen, edges_behind
from hessiankit.tracing.tensor_table import TensorTable, View, view_key


@dataclass(frozen=True)
class Position:
    """The node of a value that was seen, and where the value lies in memory."""

    node: Node
    view: View


class Edges:
    """The nodes of values that were seen, by their edges in autograd's graph."""

    def __init__(self, tensors: TensorTable) -> None:
        self._tensors = tensors
        self._positions: dict[Edge, Position] = {}
        self._count = 0  # records of the table's history that are in the positions
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def clear(self) -> None:
        """Forget everything: a write into a value gives values new edges."""
        self._positions.clear()
        self._count = 0

    def position(self, x: Tensor) -> tuple[Edge, Position | None]:
        """Return a tensor's edge in autograd's graph, and the recorded value there, if any."""
        self.update()
        edge = _without_hooks((x.grad_fn, x.output_nr))
        return edge, self._at(edge)

    def boundary(self, start: Edge) -> tuple[dict[Edge, Node], tuple[str, ...]]:
        """Return the edges of recorded values behind an edge, with their nodes, and the functions passed on the way.

        None of them lies behind another: autograd's derivatives are total ones, which would count the way between the two twice.
        """
        functions: dict[Any, None] = {start[0]: None}
        while True:
            nodes = self._nearest(functions)
            inner = [edge for edge in nodes if len(nodes) > 1 and not nodes.keys().isdisjoint(edges_behind(edge[0]))]
            if not inner:
                return nodes, tuple(dict.fromkeys(function.name() for function in functions))
            functions.update((function, None) for function, _ in inner)

    def unseen(self, x: Tensor, start: Edge, boundary: dict[Edge, Node], names: tuple[str, ...]) -> Unseen:
        """Return the part of autograd's graph between a tensor's edge ``start`` and a boundary."""
        with torch._C._DisablePythonDispatcher(), torch._C._ForceDispatchKeyGuard(*self._keys), torch.enable_grad():
            root = x.clone()  # later writes into x do not reach it; the guard serves calls beneath autograd, as in empty_like
        edges = tuple(GradientEdge(*edge) for edge in boundary)
        leaves = {id(function.variable): function.variable for function, _ in edges_behind(start[0]) if _is_leaf(function)}
        return Unseen(root, edges, names, tuple((leaf, leaf.detach(), leaf._version) for leaf in leaves.values()))

    def update(self) -> None:
        """Add the positions of tensors recorded since the last time."""
        start, self._count = self._count, len(self._tensors.history)
        for record in self._tensors.history[start:]:
            x, node = record.tensor, record.node
            if node is not None and x.grad_fn is not None and self._tensors.record(x) is record and record.is_valid:
                self._positions[x.grad_fn, x.output_nr] = Position(node, view_key(x))

    def _nearest(self, functions: dict[Any, None]) -> dict[Edge, Node]:
        """Walk back from functions to the next recorded values; add the functions on the way to ``functions``."""
        nodes: dict[Edge, Node] = {}
        queue = list(functions)
        while queue:
            for edge in queue.pop().next_functions:
                if edge[0] is None or edge[0] in functions:
                    continue
                position = self._at(edge)
                if position is not None:
                    nodes[edge] = position.node
                elif not _is_leaf(edge[0]):
                    functions[edge[0]] = None
                    queue.append(edge[0])
        return nodes

    def _at(self, edge: Edge) -> Position | None:
        """Return the value at an edge, if it was seen; a leaf only if it is an argument, such as a parameter."""
        if edge in self._positions or not _is_leaf(edge[0]):
            return self._positions.get(edge)
        leaf = edge[0].variable
        node = self._tensors.node(leaf)
        return None if node is None or node.op != "placeholder" else Position(node, view_key(leaf))


def _is_leaf(function: Any) -> bool:
    return hasattr(function, "variable")


def _without_hooks(edge: Edge) -> Edge:
    """Return the edge behind those that only call the backward hooks of a module."""
    while type(edge[0]).__name__ == f"{BackwardHookFunction.__name__}Backward":
        edge = edge[0].next_functions[edge[1]]
    return edge
