"""Any ``nn.Module`` as a list of primitive applications with their values.

Torch's own tracer runs the module once; what it records are ``aten`` operations such as ``linear``, ``layer_norm`` and
``softmax``. Each one that the parameters reach becomes an :class:`Application` of a primitive.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from derivations.primitive import Primitive
from hessiankit.decompositions import DECOMPOSITIONS
from hessiankit.errors import TraceError
from hessiankit.fallback import AutomaticDifferentiation
from hessiankit.in_place import check_kind, without_writing
from hessiankit.primitives import RULES


@dataclass(frozen=True)
class Application:
    """One primitive applied: ids of its inputs (None where an optional input is absent) and of its output."""

    primitive: Primitive
    inputs: tuple[int | None, ...]
    output: int
    name: str


@dataclass
class Trace:
    """A module's computation: every value by id, and the applications that the parameters reach, in order."""

    values: list[Tensor] = field(default_factory=list)
    applications: list[Application] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    moving: set[int] = field(default_factory=set)
    output: int = -1
    fallbacks: tuple[str, ...] = ()

    def add_value(self, value: Tensor, *, moving: bool = False) -> int:
        """Store a value and return its id."""
        self.values.append(value)
        if moving:
            self.moving.add(len(self.values) - 1)
        return len(self.values) - 1

    def apply(self, primitive: Primitive, inputs: tuple[int | None, ...], value: Tensor, name: str) -> int:
        """Append an application and return the id of its output."""
        output = self.add_value(value, moving=True)
        self.applications.append(Application(primitive, inputs, output, name))
        return output

    def gather(self, application: Application) -> tuple[Tensor | None, ...]:
        """Return the values of an application's inputs."""
        return tuple(None if i is None else self.values[i] for i in application.inputs)


@contextmanager
def ordinary_path() -> Iterator[None]:
    """Keep torch's transformer layers off their fused path for inference, which has no derivative and shortens padded batches."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def trace(function: Callable[..., Tensor], parameters: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Trace:
    """Trace ``function(parameters, *inputs)`` into primitive applications.

    Args:
        function: Maps a dict of parameters, and the inputs, to one tensor.
        parameters: The values to differentiate with respect to, by name.
        inputs: Anything that torch's tracer takes: tensors, nested tuples and dicts of them.

    Raises:
        TraceError: If torch cannot trace the function or it does not return one tensor.
    """
    names = list(parameters)
    leaves = [parameters[name].detach() for name in names]
    flat, spec = torch.utils._pytree.tree_flatten(inputs)
    data = [x for x in flat if isinstance(x, Tensor)]

    def run(weights: list[Tensor], tensors: list[Tensor]) -> Tensor:
        given = iter(tensors)
        rebuilt = torch.utils._pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in flat], spec)
        with ordinary_path():
            return function(dict(zip(names, weights, strict=True)), *rebuilt)

    try:
        with torch.enable_grad():  # so that the graph says where the module itself turns gradients off
            graph = make_fx(run, DECOMPOSITIONS, pre_dispatch=True)(leaves, data)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).split(chr(10))[0]}"
        raise TraceError(
            f"trace: torch could not trace the module ({reason}). "
            "A module must not branch on the values of its tensors, nor turn them into Python numbers; "
            "move such decisions into arguments."
        ) from error
    return _interpret(graph, names, leaves, data)


def _interpret(graph: torch.fx.GraphModule, names: list[str], leaves: list[Tensor], data: list[Tensor]) -> Trace:
    result = Trace()
    ids: dict[torch.fx.Node, int] = {}  # nodes whose values the parameters reach
    known: dict[torch.fx.Node, Any] = {}
    fallbacks: list[str] = []
    differentiable = True
    given = iter([*leaves, *data])
    for position, node in enumerate(graph.graph.nodes):
        if node.op == "placeholder":
            known[node] = next(given)
            if position < len(names):
                ids[node] = result.add_value(known[node], moving=True)
                result.parameters[names[position]] = ids[node]
        elif node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
        elif node.op == "output":
            outputs = torch.utils._pytree.tree_leaves(node.args)
            if len(outputs) != 1 or outputs[0] not in ids:
                raise TraceError(
                    "trace: the module's output does not depend on the parameters, or is not one tensor; return one tensor"
                )
            result.output = ids[outputs[0]]
        elif node.target is torch._C._set_grad_enabled:
            differentiable = bool(node.args[0])
        else:
            fallbacks += _record(node, result, ids, known, differentiable)
    result.fallbacks = tuple(dict.fromkeys(fallbacks))
    return result


def _record(
    node: torch.fx.Node, result: Trace, ids: dict[torch.fx.Node, int], known: dict[torch.fx.Node, Any], differentiable: bool
) -> list[str]:
    """Run one node; if a moving value enters it, append its application. Return the name of a fallback, if any."""
    indexed = node.args[0] if node.target is operator.getitem else None  # one output of an operation with several
    source: torch.fx.Node = node if indexed is None else indexed  # type: ignore[assignment]
    moving = [n for n in source.all_input_nodes if n in ids]
    target: Any = without_writing(node, known, ids, differentiable=differentiable)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
    value = _run(target, args, kwargs)
    if target is not node.target:
        check_kind(node, value, known)
    if not differentiable or target is torch.ops.aten.detach.default:
        value = torch.utils._pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)
        moving = []
    known[node] = value
    if not moving or not isinstance(value, Tensor):
        return []
    if value.is_complex():
        raise TraceError(f"trace: operation {source.target} returns complex numbers, which are not supported; use real ones")
    if not value.is_floating_point():
        return []
    by_tensor = {id(known[n]): ids[n] for n in moving}
    run, index = (target, None) if indexed is None else (source.target, node.args[1])
    match = None
    if (found := RULES.get(run)) is not None:
        wanted = inspect.signature(found).parameters
        args, kwargs = torch.fx.map_arg((source.args, source.kwargs), lambda n: known[n])
        match = found(*args, **kwargs, **{k: v for k, v in (("result", value), ("piece", index)) if k in wanted})
        if match is not None and not any(id(tensor) in by_tensor for tensor in match[1]):
            return []  # this piece comes from inputs that do not move
    if match is None:
        primitive, inputs, missing = _fallback(run, source, moving, known, index), tuple(known[n] for n in moving), [str(run)]
    else:
        (primitive, inputs), missing = match, []
    for tensor in inputs:
        if tensor is not None and id(tensor) not in by_tensor:
            by_tensor[id(tensor)] = result.add_value(tensor)
    ids[node] = result.apply(primitive, tuple(None if t is None else by_tensor[id(t)] for t in inputs), value, node.name)
    return missing


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, and refuse one that draws random numbers."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    before = _random_states(kwargs) if may_draw else []
    with torch.no_grad():
        value = target(*args, **kwargs)
    after = _random_states(kwargs) if may_draw else []
    if not all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        raise TraceError(
            f"trace: operation {target} draws random numbers, so the loss is random; "
            "call module.eval(), or pass the numbers as an input"
        )
    return value


def _random_states(kwargs: Mapping[str, Any]) -> list[Tensor]:
    given = [value.get_state() for value in kwargs.values() if isinstance(value, torch.Generator)]
    return [*given, torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _fallback(
    target: Any, node: torch.fx.Node, moving: list[torch.fx.Node], known: dict[torch.fx.Node, Any], index: Any
) -> Primitive:
    def function(*inputs: Tensor) -> Tensor:
        replaced = dict(zip(moving, inputs, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: replaced.get(n, known[n]))
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
            value = target(*args, **kwargs)
        return value if index is None else value[index]

    return AutomaticDifferentiation(function, str(target))
