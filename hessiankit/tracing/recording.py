"""What operations a function runs, as a graph: torch's tracer without its bookkeeping, some ten times faster.

``make_fx(pre_dispatch=True)`` gives every tensor a proxy, copies metadata and compiles the graph; here each ``aten``
operation is noted as it runs, on the tensors themselves. The graph is the same. Autograd watches meanwhile: a tensor that
it knows to depend on the parameters, and of which no operation was seen, is an error and never a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hessiankit.errors import TraceError

try:
    from torch._dispatch.python import enable_python_dispatcher
except ImportError:  # a torch that has moved it: ``can_record`` says so
    enable_python_dispatcher = None  # type: ignore[assignment,misc]

aten = torch.ops.aten
_INTERNALS: Any = torch._C
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass
class Recording:
    """A graph, and the tensors that it found ready: ``get_attr`` nodes carry their names."""

    graph: Graph = field(default_factory=Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)


def record(
    function: Callable[..., Any],
    arguments: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    parameters: int = 0,
) -> Recording:
    """Run a function of tensors and return what it did.

    Where torch lacks what this needs of it, ``make_fx`` does the same more slowly.

    Args:
        function: Called with copies of the arguments on the same memory, one by one.
        arguments: Each becomes a placeholder, in order.
        decompositions: Operations to be replaced by what a Python function makes of them, unless it returns NotImplemented.
        parameters: How many arguments, from the first on, are differentiated.

    Raises:
        TraceError: If something that depends on the parameters is computed where it cannot be seen.

    >>> graph = record(lambda x: (x * 2).sum(), [torch.ones(3)], {}).graph
    >>> [str(node.target) for node in graph.nodes if node.op == "call_function"]
    ['aten.mul.Tensor', 'aten.sum.default']
    """
    if not can_record():
        return _by_make_fx(function, arguments, decompositions)
    recording = Recording()
    notes = _Notes(recording)
    given = [x.detach().requires_grad_(k < parameters and x.is_floating_point()) for k, x in enumerate(arguments)]
    for argument in given:
        notes.placeholder(argument)
    with enable_python_dispatcher(), _Outside(notes), _Recorder(notes, decompositions):
        result = function(*given)
    recording.graph.output(torch.utils._pytree.tree_map(notes.node_of, result))
    return recording


def can_record() -> bool:
    """Tell whether this torch has the internals that :func:`record` stands on."""
    needed = (
        (_INTERNALS, "_DisablePythonDispatcher"),
        (getattr(_INTERNALS, "DispatchKey", None), "PreDispatch"),
        (getattr(_INTERNALS, "_TorchDispatchModeKey", None), "PROXY"),
        (getattr(_INTERNALS, "_functorch", None), "is_functorch_wrapped_tensor"),
        (getattr(_INTERNALS, "_functorch", None), "get_unwrapped"),
        (getattr(_INTERNALS, "_functorch", None), "maybe_current_level"),
    )
    return enable_python_dispatcher is not None and all(hasattr(where, name) for where, name in needed)


def _by_make_fx(
    function: Callable[..., Any], arguments: Sequence[Tensor], decompositions: Mapping[Any, Callable[..., Any]]
) -> Recording:
    """Record by torch's own tracer."""
    tracer = make_fx(function, decomposition_table=dict(decompositions), pre_dispatch=True, _error_on_data_dependent_ops=False)
    module = tracer(*arguments)
    names = [str(node.target) for node in module.graph.nodes if node.op == "get_attr"]
    return Recording(module.graph, {name: getattr(module, name) for name in names})


class _Notes:
    """The graph under construction, and which node stands for which tensor."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.nodes: dict[int, Node] = {}
        self.kept: list[Any] = []  # an id is a tensor's own only while the tensor lives
        self.fresh: dict[Any, Node] = {}
        self.cut: set[Node] = set()  # those made while gradients were off
        self.unseen: set[int] = set()  # memory that a transform filled
        self.differentiable = True

    def placeholder(self, x: Tensor) -> None:
        """Note an argument."""
        self._name(x, self.recording.graph.placeholder(f"argument_{len(self.nodes)}"))

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
                self.kept.append(plain := _unwrapped(x))
                self.unseen.add(_memory(plain))

    def is_known(self, x: Any) -> bool:
        """Tell whether a tensor has a node."""
        return id(x) in self.nodes

    def call(self, target: Any, args: Any, kwargs: Any) -> Node:
        """Note an operation, with what its arguments stand for now."""
        args, kwargs = map_aggregate((args, kwargs), self.node_of)
        if torch.is_grad_enabled() is not self.differentiable:
            self.differentiable = not self.differentiable
            self.recording.graph.call_function(torch._C._set_grad_enabled, (self.differentiable,))
        packet = getattr(target, "_opname", None)  # "sqrt" of aten.sqrt.default
        return self.recording.graph.create_node("call_function", target, tuple(args), kwargs, name=packet)

    def made(self, node: Node, x: Tensor) -> None:
        """Note a tensor made of nothing: torch may hand it on as another object on the same memory."""
        self.fresh[_place(x)] = node

    def result(self, node: Node, value: Any) -> None:
        """Note what an operation returned."""
        if isinstance(value, (tuple, list)):
            for i, x in enumerate(value):
                if isinstance(x, Tensor):
                    self._name(x, self.recording.graph.call_function(operator.getitem, (node, i)))
        elif isinstance(value, Tensor):
            self._name(value, node)

    def _constant(self, x: Tensor) -> Node:
        name = f"constant_{len(self.recording.constants)}"
        self.recording.constants[name] = x
        return self.recording.graph.create_node("get_attr", name)

    def _name(self, x: Tensor, node: Node) -> None:
        if not self.differentiable and id(x) not in self.nodes:
            self.cut.add(node)
        self.nodes[id(x)] = node
        self.kept.append(x)


@cache
def _twin(operation: Any) -> Any:
    """Return ``aten.addcmul.default`` for ``aten.addcmul_.default``; None for an operation that does not write into its input."""
    packet, _, overload = str(operation).removeprefix("aten.").partition(".")
    return getattr(getattr(aten, packet[:-1], None), overload, None) if packet.endswith("_") else None


def _moves(*arguments: Any) -> bool:
    """Tell whether autograd knows a tensor among some arguments to depend on the parameters."""
    return any(isinstance(x, Tensor) and _unwrapped(x).requires_grad for x in torch.utils._pytree.tree_leaves(arguments))


def _unwrapped(x: Tensor) -> Tensor:
    """Return the tensor within those that transforms of torch.func wrap around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and x.numel() else id(x)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in memory, and how."""
    return (x.data_ptr(), x.dtype, x.shape, x.stride()) if x.layout is torch.strided and x.numel() else (id(x),)


class _Recorder(ProxyTorchDispatchMode):
    """Sees every operation before torch takes it apart. (Torch admits only modes of this class there.)"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the first recording of a process the import of torch's compiler."""
        return False

    def __init__(self, notes: _Notes, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack: list[Any] = []
        self.notes, self.decompositions = notes, decompositions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or the operations that it consists of, and note it."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if torch._C._functorch.maybe_current_level() is not None:
            return self._transformed(func, args, kwargs)
        if (taken_apart := self._parts(func, args, kwargs)) is not NotImplemented:
            return taken_apart
        if func is aten.lift_fresh.default:
            self.notes.ready(args[0])
            return args[0]
        if func is aten.detach_.default and not self.notes.is_known(args[0]):
            return args[0]
        node = self.notes.call(func, args, kwargs)
        with torch._C._DisablePythonDispatcher():
            value = func(*args, **kwargs)
        self.notes.result(node, value)
        if isinstance(value, Tensor) and not node.all_input_nodes:
            self.notes.made(node, value)
        return value

    def _parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operations that one consists of; one that writes, as its twin that does not, and a copy."""
        twin = _twin(func) if func not in self.decompositions else None
        if func in self.decompositions or (twin in self.decompositions and _moves(args, kwargs)):
            with self:
                parts = self.decompositions[twin or func](*args, **kwargs)
                return parts if twin is None or parts is NotImplemented else args[0].copy_(parts)
        return NotImplemented

    def _transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation within a transform of torch.func, such as a mask that vmap makes: of constants only."""
        if _moves(args, kwargs):
            raise TraceError(
                f"trace: {func} runs within a transform of torch.func (vmap, grad, jvp ...) on a value that the parameters "
                "reach; write it for whole batches, or give the derivative as a formula"
            )
        with torch._C._DisablePythonDispatcher():
            value = func(*args, **kwargs)
        self.notes.made_unseen(value)
        return value


class _Outside(TorchFunctionMode):
    """Sees what changes a tensor without an operation: other ``.data``."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call through."""
        value = func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            self.notes.given(*args)
        return value
