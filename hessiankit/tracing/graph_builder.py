"""The graph of a run, built operation by operation."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from hessiankit.support.errors import TraceError
from hessiankit.tracing.edges import Edges
from hessiankit.tracing.graph import Node, Recording, tensors_in, unwrapped
from hessiankit.tracing.tensor_table import TensorTable, View, view_key

aten = torch.ops.aten


class GraphBuilder:
    """A recording under construction.

    Attributes:
        recording: The recording so far.
        keep_values: Whether results of operations are kept: until the first one that writes into memory.
        differentiable: Whether gradients are on at the end of the graph.
        tensors: Nodes and memory of the tensors that were met.
        edges: Positions of these tensors in autograd's graph.
        creations: Nodes of tensors made without inputs, by what they view: torch may return such a tensor as another object.
    """

    def __init__(self, recording: Recording, keep_values: bool) -> None:
        self.recording, self.keep_values = recording, keep_values
        self.differentiable = True
        self.tensors = TensorTable()
        self.edges = Edges(self.tensors)
        self.creations: dict[View, Node] = {}

    def placeholder(self, x: Tensor) -> None:
        """Note an argument."""
        self._name(x, self.recording.graph.add("placeholder", f"argument_{len(self.recording.graph.nodes)}"))

    def call(self, target: Any, args: Any, kwargs: Any) -> Node:
        """Note an operation, with the present nodes of its arguments."""
        args, kwargs = map_aggregate((args, kwargs), self.node_of)
        if torch.is_grad_enabled() is not self.differentiable:
            self.differentiable = not self.differentiable
            self.recording.graph.add("call_function", torch._C._set_grad_enabled, (self.differentiable,), name="set_grad_enabled")
        packet = getattr(target, "_opname", None)  # "sqrt" of aten.sqrt.default
        return self.recording.graph.add("call_function", target, args, kwargs, name=packet)

    def result(self, node: Node, value: Any) -> None:
        """Note what an operation returned."""
        if isinstance(value, (tuple, list)):
            for i, x in enumerate(value):
                if isinstance(x, Tensor):
                    self._name(x, self.recording.graph.add("call_function", operator.getitem, (node, i), name="getitem"))
        elif isinstance(value, Tensor):
            self._name(value, node)

    def keep(self, node: Node, value: Any) -> None:
        """Keep the result of an operation, unless the context in which it ran, or a later write, may change it."""
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable:
            self.edges.clear()
            if node.target is not aten.detach_.default:  # which changes no entry
                self.keep_values = False
                self.recording.values.clear()
        elif (
            self.keep_values
            and isinstance(value, Tensor)
            and not value.is_inference()
            and not torch._C._is_any_autocast_enabled()
        ):
            self.recording.values[node] = value.detach()

    # Nodes of tensors -------------------------------------------------------------------------------------------------

    def node_of(self, x: Any) -> Any:
        """Return the node of a tensor; other values unchanged."""
        if not isinstance(x, Tensor):
            return x
        record = self.tensors.record(x)
        if record is not None and record.is_valid:
            return record.node
        is_stale = record is not None and record.is_stale
        if x.grad_fn is None:
            self._name_constant(x, is_stale)
        else:
            self.tensors.add(x, self._node_by_autograd(x, is_stale or self.tensors.memory(x).is_overwritten))
        return self.tensors.node(x)

    def _node_by_autograd(self, x: Tensor, is_overwritten: bool) -> Node:
        """Return a node for a tensor whose derivative autograd knows, though its operations were not recorded."""
        start, position = self.edges.position(x)
        if position is not None and position.view == view_key(x) and not is_overwritten:
            return position.node  # another tensor object for the same value
        boundary, names = ({start: position.node}, ()) if position is not None else self.edges.boundary(start)
        node = self.recording.graph.add("segment", ", ".join(names), tuple(boundary.values()), name="segment")
        self.recording.unseen[node] = self.edges.unseen(x, start, boundary, names)
        return node

    def _name_constant(self, x: Tensor, is_stale: bool) -> None:
        """Give a tensor without a derivative, and without a valid node, one."""
        node, memory = None if is_stale else self.creations.get(view_key(x)), self.tensors.memory(x)
        if node is not None:
            self._name(x, node)
        elif memory.is_hidden or is_stale:
            self.ready(x)
        else:
            if memory.is_external is None:
                memory.is_external = True
            self._name(x, self._constant(x))

    def ready(self, x: Tensor) -> None:
        """Note a tensor made outside torch's operations, of Python numbers: a copy, which the function may write into."""
        self._name(x, self.call(aten.clone.default, (self._constant(x.clone()),), {}))

    def given(self, x: Tensor, data: Tensor) -> None:
        """Record that a tensor now has the values of another one.

        Raises:
            TraceError: If it is an argument, or has a derivative, which would stay that of the old values.
        """
        node = self.tensors.node(x)
        if x.grad_fn is not None or (node is not None and node.op == "placeholder"):
            raise TraceError(
                "trace: a parameter, an input or a value that has a derivative is given other .data; compute a new tensor"
            )
        self._name(x, self.call(aten.detach.default, (data,), {}))

    def stands_for(self, x: Tensor, twin: Tensor) -> None:
        """Note a tensor of the same entries as another one, made in another way."""
        self._name(x, self.node_of(twin))

    def _constant(self, x: Tensor) -> Node:
        name = f"constant_{len(self.recording.constants)}"
        self.recording.constants[name] = x
        return self.recording.graph.add("get_attr", name)

    def _name(self, x: Tensor, node: Node) -> None:
        if not self.differentiable:
            node.has_gradient = False
        memory = self.tensors.add(x, node)
        memory.is_external = bool(memory.is_external)

    # Memory that is written into -----------------------------------------------------------------------------------------

    def add_untraced(self, value: Any) -> None:
        """Remember the memory of a transform's result, which the function owns and may write into later."""
        for x in map(unwrapped, tensors_in(value)):
            self.tensors.memory(x).is_hidden = True
            if self.tensors.record(x) is None:
                self.tensors.add(x, None)

    def write_untraced(self, tensors: Sequence[Any]) -> None:
        """Remember that some tensors, and all others on their memory, have been written into without a recorded operation."""
        for memory in self.tensors.memories(tensors):
            memory.is_overwritten = True
        for record in self.tensors.sharing(tensors):
            if record.node is not None and record.node.op == "placeholder":
                raise TraceError("trace: a parameter is written into within the module; compute a new tensor")
            record.is_stale = record.node is not None

    def is_external(self, tensors: Sequence[Any]) -> bool:
        """Tell whether tensors lie in memory allocated before the run, such as a buffer's, that is no argument's."""
        memories = self.tensors.memories(tensors)
        return all(memory.is_external or (memory.is_external is None and not memory.is_hidden) for memory in memories)

    def keep_constants(self, tensors: Sequence[Any]) -> None:
        """Replace constants in the memory of some tensors by copies before it is written into."""
        for record in self.tensors.sharing(tensors):
            if record.node is not None and record.node.op == "get_attr":
                name = record.node.target
                self.recording.constants[name] = self.recording.constants[name].clone()

    def passes_gradients(self, tensors: Sequence[Any]) -> bool:
        """Tell whether a write into some tensors changes values that pass gradients on, and no arguments or constants."""
        records = self.tensors.sharing(tensors)
        kinds = {record.node.op for record in records if record.node is not None}
        return any(record.tensor.grad_fn is not None for record in records) and kinds.isdisjoint(("placeholder", "get_attr"))
