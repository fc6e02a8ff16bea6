"""What a recorder notes: the graph under construction, and which node stands for which tensor."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from hessiankit.errors import TraceError
from hessiankit.tracing.graph import Graph, Node

aten = torch.ops.aten


@dataclass
class Recording:
    """A graph, and tensors that belong to it.

    Attributes:
        graph: What was done.
        constants: The tensors that were found ready: ``get_attr`` nodes carry their names.
        values: What operations returned that would return the same if they were run again by themselves.
    """

    graph: Graph = field(default_factory=Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    values: dict[Node, Tensor] = field(default_factory=dict)


class Notes:
    """The graph under construction, and which node stands for which tensor."""

    def __init__(self, recording: Recording, keep_values: bool) -> None:
        self.recording, self.keep_values = recording, keep_values
        self.nodes: dict[int, Node] = {}
        self.kept: list[Any] = []  # an id is a tensor's own only while the tensor lives
        self.fresh: dict[Any, Node] = {}
        self.cut: set[Node] = set()  # those made while gradients were off
        self.unseen: set[int] = set()  # memory that a transform filled
        self.differentiable = True

    def placeholder(self, x: Tensor) -> None:
        """Note an argument."""
        self._name(x, self.recording.graph.add("placeholder", f"argument_{len(self.nodes)}"))

    def node_of(self, x: Any) -> Any:
        """Return the node of a tensor; anything else as it is."""
        if not isinstance(x, Tensor):
            return x
        node = self.nodes.get(id(x))
        if (node is None or node in self.cut) and x.grad_fn is not None:
            raise TraceError(
                f"trace: a value that the parameters reach comes from {x.grad_fn.name()}, which is not an operation that can be "
                "seen: a torch.autograd.Function, a transform of torch.func, a gradient taken within the module, another thread; "
                "write it in operations of torch, or detach() it to treat it as a constant"
            )
        if node is None:
            node = self.fresh.get(_place(x))
            if node is None and _memory(x) in self.unseen:
                self.ready(x)
            else:
                self._name(x, self._constant(x) if node is None else node)
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
                self.unseen.add(_memory(plain))

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

    def made(self, node: Node, x: Tensor) -> None:
        """Note a tensor made of nothing: torch may hand it on as another object on the same memory."""
        self.fresh[_place(x)] = node

    def keep(self, node: Node, value: Any) -> None:
        """Keep what an operation returned, unless something about the place where it ran, or a later write, may change that."""
        if getattr(node.target, "_schema", None) is None or node.target._schema.is_mutable:
            self.keep_values = False
            self.recording.values.clear()
        elif isinstance(value, Tensor) and not value.is_inference() and not torch._C._is_any_autocast_enabled():
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
        if not self.differentiable and id(x) not in self.nodes:
            self.cut.add(node)
        self.nodes[id(x)] = node
        self.kept.append(x)


def unwrapped(x: Tensor) -> Tensor:
    """Return the tensor within those that transforms of torch.func wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and x.numel() else id(x)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and how."""
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.layout is torch.strided and x.numel() else (id(x),)
