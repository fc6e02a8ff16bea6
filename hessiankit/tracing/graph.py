"""What a recording is made of: nodes with the interface of ``torch.fx``, and nothing of its bookkeeping, which takes longer."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx.node import map_aggregate


@dataclass(eq=False, slots=True)
class Node:
    """One step of a computation.

    Attributes:
        op: "placeholder" for an argument, "get_attr" for a tensor found ready, "call_function", "segment" for a value of which
            autograd knows what it depends on, although no operation was seen, or "output".
        target: The operation, or the name of an argument or a tensor.
        args: What the operation is called with; nodes stand for tensors.
        kwargs: The same, by keyword.
        name: No other node of the graph has it.
        all_input_nodes: The nodes in ``args`` and ``kwargs``, each once.
        users: The nodes that this one is an input of.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    all_input_nodes: tuple[Node, ...]
    users: list[Node] = field(default_factory=list)

    def __repr__(self) -> str:
        return self.name


class Graph:
    """Nodes in the order in which they run.

    >>> graph = Graph()
    >>> x = graph.add("placeholder", "x")
    >>> squared = graph.add("call_function", "product", (x, [x]))
    >>> squared.all_input_nodes, x.users, graph.nodes
    ((x,), [product], [x, product])
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._names: dict[str, int] = {}

    def add(
        self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, name: str | None = None
    ) -> Node:
        """Append a node; ``name``, or else that of the target, gets a number where another node has it."""
        kwargs = kwargs or {}
        inputs: dict[Node, None] = {}
        map_nodes(lambda node: inputs.setdefault(node), (args, kwargs))
        node = Node(op, target, args, kwargs, self._unique(name or str(target)), tuple(inputs))
        for entering in inputs:
            entering.users.append(node)
        self.nodes.append(node)
        return node

    def remove_last(self) -> None:
        """Take back the node that was added last."""
        node = self.nodes.pop()
        for entering in node.all_input_nodes:
            entering.users.remove(node)

    def clear(self) -> None:
        """Take the nodes apart: they refer to one another, so that their memory would wait for a garbage collection."""
        for node in self.nodes:
            node.users.clear()
        self.nodes.clear()

    def _unique(self, name: str) -> str:
        count = self._names.get(name, int(hasattr(builtins, name)))  # "sum_1" is the first sum, as in torch.fx
        self._names[name] = count + 1
        return f"{name}_{count}" if count else name


def map_nodes(function: Callable[[Node], Any], tree: Any) -> Any:
    """Return nested containers with what ``function`` makes of their nodes in the place of these."""
    return map_aggregate(tree, lambda x: function(x) if isinstance(x, Node) else x)
