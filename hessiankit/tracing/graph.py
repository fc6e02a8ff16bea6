"""A recorded run: nodes with the interface of ``torch.fx``, the map from tensors to nodes, and positions in autograd's graph.

During a recording autograd is on, so that a custom ``torch.autograd.Function``, what ``torch.vmap`` or another thread made, or
a gradient taken within a module carries its true graph. Followed back, it ends at values that were seen.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.fx.node import map_aggregate
from torch.nn.modules._functions import BackwardHookFunction

from hessiankit.support.containers import address
from hessiankit.support.errors import TraceError


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


Edge: TypeAlias = "tuple[Any, int]"  # a function of autograd's graph, and which of its outputs


@dataclass(frozen=True)
class Unseen:
    """A value known only from autograd's graph.

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
class _Traced:
    """The node of a value that was seen, and where the value lies in memory."""

    node: Node
    view: tuple[Any, ...]


class Edges:
    """The nodes of values that were seen, by their edges in autograd's graph.

    Args:
        nodes: The nodes of tensors, by their ids.
        kept: The tensors.
        detached: Nodes made while gradients were off.
        stale: Ids of tensors whose values are not those of their nodes any more.
        bare: Ids of tensors that had no derivative when they were named; scripted functions give one to theirs later.
    """

    def __init__(
        self,
        nodes: Mapping[int, Node],
        kept: Sequence[Tensor],
        detached: Collection[Node],
        stale: Collection[int],
        bare: Collection[int],
    ) -> None:
        self._nodes, self._kept, self._detached, self._stale, self._bare = nodes, kept, detached, stale, bare
        self._seen: dict[Edge, _Traced] = {}
        self._looked_at = 0

    def clear(self) -> None:
        """Forget everything: a value has been written into, so that edges and values belong together anew."""
        self._seen.clear()
        self._looked_at = 0

    def before(self, x: Tensor) -> tuple[Edge, _Traced | None]:
        """Return a tensor's edge in autograd's graph, and the recorded value there, if any."""
        self.look()
        edge = _through_hooks((x.grad_fn, x.output_nr))
        return edge, self._seen.get(edge) or self._leaf(edge)

    def is_node_of(self, x: Tensor, node: Node) -> bool:
        """Tell whether a node stands for a tensor as it is now: the same entries, which pass gradients as its graph says."""
        scripted = id(x) in self._bare and type(x.grad_fn).__name__ == "CppFunction"
        return not ((node in self._detached or scripted) and x.grad_fn is not None) and id(x) not in self._stale

    def boundary(self, start: Edge) -> tuple[dict[Edge, Node], tuple[str, ...]]:
        """Return the edges of values that were seen behind an edge, with their nodes, and the functions passed on the way.

        None of them lies behind another: autograd's derivatives are total ones, which would count the way between the two twice.
        """
        passed: dict[Any, None] = {start[0]: None}
        while True:
            seen = self._behind(passed)
            inner = [edge for edge in seen if len(seen) > 1 and not seen.keys().isdisjoint(edges_behind(edge[0]))]
            if not inner:
                return seen, tuple(dict.fromkeys(function.name() for function in passed))
            passed.update((function, None) for function, _ in inner)

    def leaves(self, start: Edge) -> tuple[Tensor, ...]:
        """Return the leaves that an edge depends on."""
        leaves = {id(function.variable): function.variable for function, _ in edges_behind(start[0]) if _is_leaf(function)}
        return tuple(leaves.values())

    def _behind(self, passed: dict[Any, None]) -> dict[Edge, Node]:
        """Walk back from functions to the next values that were seen; take the functions on the way into ``passed``."""
        nodes: dict[Edge, Node] = {}
        waiting = list(passed)
        while waiting:
            for edge in waiting.pop().next_functions:
                if edge[0] is None or edge[0] in passed:
                    continue
                seen = self._seen.get(edge) or self._leaf(edge)
                if seen is not None:
                    nodes[edge] = seen.node
                elif not _is_leaf(edge[0]):
                    passed[edge[0]] = None
                    waiting.append(edge[0])
        return nodes

    def look(self) -> None:
        """Take in the tensors noted since the last time."""
        start, self._looked_at = self._looked_at, len(self._kept)
        for x in self._kept[start:]:
            node = self._nodes.get(id(x))
            if x.grad_fn is not None and node is not None and self.is_node_of(x, node):
                self._seen[x.grad_fn, x.output_nr] = _Traced(node, view_key(x))

    def _leaf(self, edge: Edge) -> _Traced | None:
        """Return the node of a leaf, such as a parameter, that was seen."""
        leaf = edge[0].variable if _is_leaf(edge[0]) else None
        node = None if leaf is None else self._nodes.get(id(leaf))
        return None if leaf is None or node is None or node.op != "placeholder" else _Traced(node, view_key(leaf))


def view_key(x: Tensor) -> tuple[Any, ...]:
    """Return a key of the entries of memory that a tensor views, and of how it reads them."""
    if x.layout is not torch.strided or not x.numel():
        return (id(x),)
    return (x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_neg())


def edges_behind(function: Any, end: Edge | None = None) -> dict[Edge, None]:
    """Return every edge that a function's derivative is passed on to, near or far, but not by way of ``end``."""
    edges: dict[Edge, None] = {}
    known, waiting = {function}, [function]
    while waiting:
        for edge in waiting.pop().next_functions:
            if edge[0] is not None and edge != end:
                edges[edge] = None
                if edge[0] not in known:
                    known.add(edge[0])
                    waiting.append(edge[0])
    return edges


def _is_leaf(function: Any) -> bool:
    return hasattr(function, "variable")


def _through_hooks(edge: Edge) -> Edge:
    """Return the edge behind those that only call the backward hooks of a module."""
    while type(edge[0]).__name__ == f"{BackwardHookFunction.__name__}Backward":
        edge = edge[0].next_functions[edge[1]]
    return edge


aten = torch.ops.aten


NUMBER = (bool, int, float, complex)


@dataclass
class Recording:
    """A graph, and tensors that belong to it.

    Attributes:
        graph: What was done.
        constants: The tensors that were found ready: ``get_attr`` nodes carry their names.
        values: What operations returned that would return the same if they were run again by themselves.
        unseen: What is known of values that come from no operation that was seen: "segment" nodes stand for them.
        course: The operations that the function called, in order, each followed by the number that it read, if any.
    """

    graph: Graph = field(default_factory=Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Node, Tensor] = field(default_factory=dict)
    unseen: dict[Node, Unseen] = field(default_factory=dict)
    course: list[Any] = field(default_factory=list)

    @property
    def reads_numbers(self) -> bool:
        """Whether the function reads numbers out of tensors, which may decide what it computes."""
        return any(isinstance(step, NUMBER) for step in self.course)


class GraphBuilder:
    """The graph under construction, and which node stands for which tensor."""

    def __init__(self, recording: Recording, keep_values: bool) -> None:
        self.recording, self.keep_values = recording, keep_values
        self.nodes: dict[int, Node] = {}
        self.kept: list[Tensor] = []  # an id is a tensor's own only while the tensor lives
        self.fresh: dict[Any, Node] = {}
        self.detached: set[Node] = set()  # those made while gradients were off
        self.unseen: set[int] = set()  # memory that was filled out of sight
        self.stale: set[int] = set()  # tensors written into out of sight since they were named
        self.rewritten: set[int] = set()  # their memory
        self.outside: set[int] = set()  # memory that was there before the function ran, but that of arguments
        self.inside: set[int] = set()  # other memory of values that were named
        self.complex = False  # whether any were met that have a derivative
        self._passing: set[int] = set()  # memory of values that pass gradients, and how many tensors were looked at for it
        self._passing_known = 0
        self.bare: set[int] = set()
        self.edges = Edges(self.nodes, self.kept, self.detached, self.stale, self.bare)
        self.differentiable = True
        self.keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def placeholder(self, x: Tensor) -> None:
        """Note an argument."""
        self._name(x, self.recording.graph.add("placeholder", f"argument_{len(self.nodes)}"))

    def node_of(self, x: Any) -> Any:
        """Return the node of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        node = self.nodes.get(id(x))
        if node is not None and self.edges.is_node_of(x, node):
            return node
        if x.grad_fn is not None:
            self.nodes[id(x)] = self._behind(x)
            self.kept.append(x)
        elif id(x) in self.stale:
            self.ready(x)
        else:
            node = self.fresh.get(view_key(x))
            if node is None and address(x) in self.unseen:
                self.ready(x)
            else:
                if node is None and address(x) not in self.inside:
                    self.outside.add(address(x))
                self._name(x, self._constant(x) if node is None else node)
        self.stale.discard(id(x))
        return self.nodes[id(x)]

    def ready(self, x: Tensor) -> None:
        """Note a tensor made outside torch's operations, of Python numbers: a copy, which the function may write into."""
        self._name(x, self.call(torch.ops.aten.clone.default, (self._constant(x.clone()),), {}))

    def given(self, x: Tensor, data: Tensor) -> None:
        """Record that a tensor now has the values of another one.

        Raises:
            TraceError: If it is an argument, or has a derivative, which would stay that of the old values.
        """
        if x.grad_fn is not None or (id(x) in self.nodes and self.nodes[id(x)].op == "placeholder"):
            raise TraceError(
                "trace: a parameter, an input or a value that has a derivative is given other .data; compute a new tensor"
            )
        self._name(x, self.call(aten.detach.default, (data,), {}))

    def stands_for(self, x: Tensor, other: Tensor) -> None:
        """Note a tensor of the same entries as another one, made in another way."""
        self._name(x, self.node_of(other))

    def add_untraced(self, value: Any) -> None:
        """Remember the memory of what a transform returned: the function's own, which it may write into later."""
        for x in map(unwrapped, tensors_in(value)):
            self.kept.append(x)
            self.unseen.add(address(x))

    def write_untraced(self, tensors: Sequence[Any]) -> None:
        """Remember that some tensors, and all others on their memory, have been written into out of sight."""
        rewritten = _addresses_of(tensors)
        self.rewritten |= rewritten
        for x in self._sharing(rewritten):
            if self.nodes[id(x)].op == "placeholder":
                raise TraceError("trace: a parameter is written into within the module; compute a new tensor")
            self.stale.add(id(x))

    def is_outside(self, tensors: Sequence[Any]) -> bool:
        """Tell whether tensors lie in memory that was there before, such as a buffer's, and not in an argument's."""
        return all(x in self.outside or not (x in self.inside or x in self.unseen) for x in _addresses_of(tensors))

    def keep_constants(self, tensors: Sequence[Any]) -> None:
        """Let constants in the memory of some tensors be copies: it is about to be written into."""
        for x in self._sharing(_addresses_of(tensors)):
            node = self.nodes[id(x)]
            if node.op == "get_attr":
                self.recording.constants[node.target] = self.recording.constants[node.target].clone()

    def passes_gradients(self, tensors: Sequence[Any]) -> bool:
        """Tell whether a write into some tensors changes values that pass gradients on, and no arguments or constants."""
        for x in self.kept[self._passing_known :]:
            if x.grad_fn is not None:
                self._passing.add(address(x))
        self._passing_known = len(self.kept)
        addresses = _addresses_of(tensors)
        if self._passing.isdisjoint(addresses):
            return False
        return not any(self.nodes[id(x)].op in ("placeholder", "get_attr") for x in self._sharing(addresses))

    def _sharing(self, addresses: Collection[int]) -> Iterator[Tensor]:
        """Yield the tensors with a node that lie in some memory."""
        known = {id(x): x for x in self.kept if id(x) in self.nodes}
        yield from (x for x in known.values() if address(x) in addresses)

    def _behind(self, x: Tensor) -> Node:
        """Return a node for a tensor of which autograd knows more than was seen: what its derivative is, and by what."""
        graph = self.recording.graph
        start, before = self.edges.before(x)
        if before is not None and before.view == view_key(x) and id(x) not in self.stale and address(x) not in self.rewritten:
            return before.node  # another tensor object for the same value
        boundary, names = ({start: before.node}, ()) if before is not None else self.edges.boundary(start)
        node = graph.add("segment", ", ".join(names), tuple(boundary.values()), name="segment")
        with torch._C._DisablePythonDispatcher(), torch._C._ForceDispatchKeyGuard(*self.keys), torch.enable_grad():
            root = x.clone()  # of its own, whatever is written into x later; also beneath autograd, as within empty_like
        edges = tuple(GradientEdge(*edge) for edge in boundary)
        leaves = tuple((leaf, leaf.detach(), leaf._version) for leaf in self.edges.leaves(start))
        self.recording.unseen[node] = Unseen(root, edges, names, leaves)
        return node

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
        """Record a tensor created without inputs; torch may return it later as another object on the same memory."""
        self.fresh[view_key(x)] = node

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
            self.detached.add(node)
        if (at := address(x)) not in self.outside:
            self.inside.add(at)
        (self.bare.discard if x.requires_grad else self.bare.add)(id(x))
        self.nodes[id(x)] = node
        self.kept.append(x)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _addresses_of(tensors: Sequence[Any]) -> set[int]:
    return {address(unwrapped(x)) for x in tensors if isinstance(x, Tensor)}


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor within those that transforms of torch.func wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x
