"""What a recorder notes: the graph under construction, and which node stands for which tensor."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.fx.node import map_aggregate

from hessiankit.errors import TraceError
from hessiankit.tracing.edges import Edges, Unseen, memory, place
from hessiankit.tracing.graph import Graph, Node

aten = torch.ops.aten


@dataclass
class Recording:
    """A graph, and tensors that belong to it.

    Attributes:
        graph: What was done.
        constants: The tensors that were found ready: ``get_attr`` nodes carry their names.
        values: What operations returned that would return the same if they were run again by themselves.
        unseen: What is known of values that come from no operation that was seen: "segment" nodes stand for them.
    """

    graph: Graph = field(default_factory=Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Node, Tensor] = field(default_factory=dict)
    unseen: dict[Node, Unseen] = field(default_factory=dict)


class Notes:
    """The graph under construction, and which node stands for which tensor."""

    def __init__(self, recording: Recording, keep_values: bool) -> None:
        self.recording, self.keep_values = recording, keep_values
        self.nodes: dict[int, Node] = {}
        self.kept: list[Any] = []  # an id is a tensor's own only while the tensor lives
        self.fresh: dict[Any, Node] = {}
        self.cut: set[Node] = set()  # those made while gradients were off
        self.unseen: set[int] = set()  # memory that was filled out of sight
        self.stale: set[int] = set()  # tensors written into out of sight since they were named
        self.rewritten: set[int] = set()  # their memory
        self.complex = False  # whether any were met that have a derivative
        self._passing: set[int] = set()  # memory of values that pass gradients, and how many tensors were looked at for it
        self._passing_known = 0
        self.edges = Edges(self.nodes, self.kept, self.cut, self.stale)
        self.differentiable = True

    def placeholder(self, x: Tensor) -> None:
        """Note an argument."""
        self._name(x, self.recording.graph.add("placeholder", f"argument_{len(self.nodes)}"))

    def node_of(self, x: Any) -> Any:
        """Return the node of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        node = self.nodes.get(id(x))
        if node is not None and not (node in self.cut and x.grad_fn is not None) and id(x) not in self.stale:
            return node
        if x.grad_fn is not None:
            self.nodes[id(x)] = self._behind(x)
            self.kept.append(x)
        elif id(x) in self.stale:
            self.ready(x)
        else:
            node = self.fresh.get(place(x))
            if node is None and memory(x) in self.unseen:
                self.ready(x)
            else:
                self._name(x, self._constant(x) if node is None else node)
        self.stale.discard(id(x))
        return self.nodes[id(x)]

    def ready(self, x: Tensor) -> None:
        """Note a tensor made outside torch's operations, of Python numbers: a copy, which the function may write into."""
        self._name(x, self.call(torch.ops.aten.clone.default, (self._constant(x.clone()),), {}))

    def given(self, x: Tensor, data: Tensor) -> None:
        """Note that a tensor has got the values of another one.

        Raises:
            TraceError: If it is an argument, or has a derivative, which would stay that of the old values.
        """
        if x.grad_fn is not None or (id(x) in self.nodes and self.nodes[id(x)].op == "placeholder"):
            raise TraceError(
                "trace: a parameter, an input or a value that has a derivative is given other .data; compute a new tensor"
            )
        self._name(x, self.call(aten.detach.default, (data,), {}))

    def made_unseen(self, value: Any) -> None:
        """Remember the memory of what a transform returned: the function's own, which it may write into later."""
        for x in torch.utils._pytree.tree_leaves(value):
            if isinstance(x, Tensor):
                self.kept.append(plain := unwrapped(x))
                self.unseen.add(memory(plain))

    def written_unseen(self, tensors: Sequence[Any]) -> None:
        """Remember that some tensors, and all others on their memory, have been written into out of sight.

        Raises:
            TraceError: If one of them is a parameter.
        """
        rewritten = {memory(unwrapped(x)) for x in tensors if isinstance(x, Tensor)}
        self.rewritten |= rewritten
        for x in self._sharing(rewritten):
            if self.nodes[id(x)].op == "placeholder":
                raise TraceError("trace: a parameter is written into within the module; compute a new tensor")
            self.stale.add(id(x))

    def passes_gradients(self, tensors: Sequence[Any]) -> bool:
        """Tell whether a write into some tensors changes values that go on passing their gradients; not if data change too."""
        for x in self.kept[self._passing_known :]:
            if isinstance(x, Tensor) and x.grad_fn is not None:
                self._passing.add(memory(x))
        self._passing_known = len(self.kept)
        places = {memory(x) for x in tensors if isinstance(x, Tensor)}
        if self._passing.isdisjoint(places):
            return False
        return not any(self.nodes[id(x)].op in ("placeholder", "get_attr") for x in self._sharing(places))

    def _sharing(self, places: Collection[int]) -> Iterator[Tensor]:
        """Yield the tensors with a node that lie in some memory."""
        known = {id(x): x for x in self.kept if isinstance(x, Tensor) and id(x) in self.nodes}
        yield from (x for x in known.values() if memory(x) in places)

    def _behind(self, x: Tensor) -> Node:
        """Return a node for a tensor of which autograd knows more than was seen: what its derivative is, and by what."""
        graph = self.recording.graph
        start, before = self.edges.before(x)
        if before is not None and before.place == place(x) and id(x) not in self.stale and memory(x) not in self.rewritten:
            return before.node  # another tensor object for the same value
        boundary, names = ({start: before.node}, ()) if before is not None else self.edges.boundary(start)
        node = graph.add("segment", ", ".join(names), tuple(boundary.values()), name="segment")
        with torch._C._DisablePythonDispatcher(), torch.enable_grad():
            root = x.clone()  # of its own, whatever is written into x later
        edges = tuple(GradientEdge(*edge) for edge in boundary)
        leaves = tuple((leaf, leaf.detach(), leaf._version) for leaf in self.edges.leaves(start))
        self.recording.unseen[node] = Unseen(root, edges, names, leaves)
        return node

    def is_known(self, x: Any) -> bool:
        """Tell whether a tensor has a node."""
        return id(x) in self.nodes

    def call(self, target: Any, args: Any, kwargs: Any) -> Node:
        """Note an operation, with what its arguments stand for now."""
        args, kwargs = map_aggregate((args, kwargs), self.node_of)
        if torch.is_grad_enabled() is not self.differentiable:
            self.differentiable = not self.differentiable
            self.recording.graph.add("call_function", torch._C._set_grad_enabled, (self.differentiable,), name="set_grad_enabled")
        packet = getattr(target, "_opname", None)  # "sqrt" of aten.sqrt.default
        return self.recording.graph.add("call_function", target, args, kwargs, name=packet)

    def remove_last(self) -> None:
        """Take back an operation that returned complex numbers: what is made of them is known by autograd's graph alone."""
        self.complex = True
        self.recording.graph.remove_last()

    def made(self, node: Node, x: Tensor) -> None:
        """Note a tensor made of nothing: torch may hand it on as another object on the same memory."""
        self.fresh[place(x)] = node

    def keep(self, node: Node, value: Any) -> None:
        """Keep what an operation returned, unless something about the place where it ran, or a later write, may change that."""
        schema = getattr(node.target, "_schema", None)
        if node.target is torch.ops.aten.detach_.default:  # changes no entry
            self.edges.clear()
        elif schema is None or schema.is_mutable:
            self.edges.clear()
            self.keep_values = False
            self.recording.values.clear()
        elif (
            self.keep_values
            and isinstance(value, Tensor)
            and not value.is_inference()
            and not torch._C._is_any_autocast_enabled()
        ):
            self.recording.values[node] = value.detach()

    def result(self, node: Node, value: Any) -> None:
        """Note what an operation returned."""
        if isinstance(value, (tuple, list)):
            for i, x in enumerate(value):
                if isinstance(x, Tensor):
                    self._name(x, self.recording.graph.add("call_function", operator.getitem, (node, i), name="getitem"))
        elif isinstance(value, Tensor):
            self._name(value, node)

    def _constant(self, x: Tensor) -> Node:
        name = f"constant_{len(self.recording.constants)}"
        self.recording.constants[name] = x
        return self.recording.graph.add("get_attr", name)

    def _name(self, x: Tensor, node: Node) -> None:
        if not self.differentiable:
            self.cut.add(node)
        self.nodes[id(x)] = node
        self.kept.append(x)


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor within those that transforms of torch.func wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
