"""A recorded run: a graph of nodes with the interface of ``torch.fx``, and the tensors that belong to it."""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.fx.node import map_aggregate

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Node:
    """One step of a computation.

    Attributes:
        op: "placeholder" for an argument, "get_attr" for a tensor found ready, "call_function", "segment" for a value of which
            autograd knows what it depends on, although no operation was seen, or "output".
        target: The operation, or the name of an argument or a tensor.
        args: Positional arguments of the operation; nodes stand for tensors.
        kwargs: Keyword arguments of the operation.
        name: Name that no other node of the graph has.
        all_input_nodes: The nodes in ``args`` and ``kwargs``, each once.
        users: The nodes that this one is an input of.
        has_gradient: Whether gradients were on when it was made.
    """

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    all_input_nodes: tuple[Node, ...]
    users: list[Node] = field(default_factory=list)
    has_gradient: bool = True

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
        self._names = dict.fromkeys(dir(builtins), 1)  # "sum_1" is the first sum, as in torch.fx

    def add(
        self, op: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, *, name: str | None = None
    ) -> Node:
        """Append a node; ``name``, or else that of the target, gets a number where another node has it."""
        kwargs = kwargs or {}
        inputs = dict.fromkeys(instances(Node, *args, *kwargs.values()))
        node = Node(op, target, args, kwargs, self._unique(name or str(target)), tuple(inputs))
        for input_node in inputs:
            input_node.users.append(node)
        self.nodes.append(node)
        return node

    def remove_last(self) -> None:
        """Take back the node that was added last."""
        node = self.nodes.pop()
        for input_node in node.all_input_nodes:
            input_node.users.remove(node)

    def clear(self) -> None:
        """Take the nodes apart: they refer to one another, so that their memory would wait for a garbage collection."""
        for node in self.nodes:
            node.users.clear()
        self.nodes.clear()

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}_{count}" if count else name


def map_nodes(function: Callable[[Node], Any], tree: Any) -> Any:
    """Return nested containers with ``function`` applied to their nodes."""
    return map_aggregate(tree, lambda x: function(x) if isinstance(x, Node) else x)


Edge: TypeAlias = "tuple[Any, int]"  # a function of autograd's graph, and which of its outputs


@dataclass(frozen=True)
class Unseen:
    """A value known only from autograd's graph.

    Attributes:
        root: A copy of the value that is part of the graph.
        edges: Recorded values that it is computed from; the arguments of its node, in order.
        names: Functions of autograd between them; none where the value is one of them, written into without gradients.
        leaves: Leaves that it depends on, with their memory and version when it was made.
    """

    root: Tensor
    edges: tuple[GradientEdge, ...]
    names: tuple[str, ...]
    leaves: tuple[tuple[Tensor, Tensor, int], ...]


def edges_behind(function: Any, end: Edge | None = None) -> dict[Edge, None]:
    """Return every edge that a function's derivative is passed on to, directly or not, except through ``end``."""
    edges: dict[Edge, None] = {}
    functions, queue = {function}, [function]
    while queue:
        for edge in queue.pop().next_functions:
            if edge[0] is not None and edge != end:
                edges[edge] = None
                if edge[0] not in functions:
                    functions.add(edge[0])
                    queue.append(edge[0])
    return edges


NUMBER = (bool, int, float, complex)


@dataclass
class Recording:
    """A graph, and tensors that belong to it.

    Attributes:
        graph: Operations of the run.
        constants: Tensors that existed before the run: ``get_attr`` nodes carry their names.
        values: Results of operations that would return the same if they were run again by themselves.
        unseen: Descriptions of values that come from no operation that was seen: "segment" nodes stand for them.
        course: The operations that the function called, in order, each followed by the number that it read, if any.
    """

    graph: Graph = field(default_factory=Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Node, Tensor] = field(default_factory=dict)
    unseen: dict[Node, Unseen] = field(default_factory=dict)
    course: list[Any] = field(default_factory=list)

    @property
    def reads_numbers(self) -> bool:
        """Whether the function reads numbers out of tensors, on which its branches may depend."""
        return any(isinstance(step, NUMBER) for step in self.course)


def instances(kind: type[T], *trees: Any) -> list[T]:
    """Return the objects of a class in nested containers such as operations take and return, in order.

    >>> instances(int, 1, [2, None], {"x": "three", "y": (4,)})
    [1, 2, 4]
    """
    objects: list[T] = []
    for x in trees:
        if isinstance(x, kind):
            objects.append(x)
        elif isinstance(x, (tuple, list, deque)):
            objects += instances(kind, *x)
        elif isinstance(x, dict):
            objects += instances(kind, *x.values())
    return objects


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return instances(Tensor, tree)


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor within those that transforms of torch.func wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
