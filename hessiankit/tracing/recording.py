"""The graph of the operations that a function runs: each ``aten`` operation is noted as it runs, on the tensors themselves.

Nothing is put in the place of a tensor, so the function cannot tell that it is watched, and a parameter is recognised however
it is reached. The graph is that of ``make_fx(pre_dispatch=True)``, which gives every tensor a proxy, some ten times faster.
Autograd watches meanwhile: a tensor that it knows to depend on the parameters, and of which no operation was seen, is an error
and never a constant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from hessiankit.support.errors import TraceError
from hessiankit.support.kernels import plain
from hessiankit.support.torch_state import RECORDING, full_precision
from hessiankit.tracing.graph import NUMBER, Recording, tensors_in, unwrapped
from hessiankit.tracing.graph_builder import GraphBuilder
from hessiankit.tracing.in_place import functional_twin, overwritten
from hessiankit.tracing.source_line import source_line
from hessiankit.tracing.tensor_table import view_key

aten = torch.ops.aten

_ODD = 0x1E3779B97F4A7C15  # multiplication by it, modulo 2^64, mixes the bits of a number
_SILENT_READS: frozenset[Any] = frozenset((Tensor.numpy, Tensor.__array__, Tensor.tolist, torch.tensor, torch.as_tensor))


def dtype_of_autocast(function: Callable[..., Any], args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the type that autocast brings the arguments of an operation to; None where it leaves them unchanged.

    Torch does not tell. The operation is run as it is, and without autocast on arguments of each type that autocast knows: what
    returns the same bits is what autocast does.

    Raises:
        TraceError: None of them does.

    >>> x = torch.randn(2, 2)
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     dtype_of_autocast(torch.mm, (x, x), {}), dtype_of_autocast(torch.relu, (x,), {})
    (torch.bfloat16, None)
    """
    tensors = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
    device = tensors[0].device.type if tensors else "cpu"
    if not tensors or not torch.is_autocast_enabled(device) or getattr(getattr(function, "_schema", None), "is_mutable", False):
        return None
    with torch.no_grad(), torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch():
        results = tensors_in(function(*args, **kwargs))
        with full_precision():
            for dtype in (None, torch.get_autocast_dtype(device), torch.float32):
                if dtype is not None and all(x.dtype == dtype for x in tensors):
                    continue
                try:
                    plain = tensors_in(function(*cast_to(dtype, args), **cast_to(dtype, kwargs)))
                except RuntimeError:  # types that do not go together without autocast
                    continue
                if all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(results, plain, strict=True)):
                    return dtype
    name = getattr(function, "__name__", str(function))
    raise TraceError(
        f"trace: autocast changes what {name} returns in a way that cannot be traced; leave torch.autocast out, and convert the "
        "module, e.g. module.bfloat16()"
    )


def cast_to(dtype: torch.dtype | None, tree: Any) -> Any:
    """Return nested arguments, their floating-point tensors in a type but for those in float64, which autocast leaves alone."""
    if dtype is None:
        return tree

    def cast(x: Any) -> Any:
        eligible = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return torch.utils._pytree.tree_map(cast, tree)


try:
    from torch._dispatch.python import enable_python_dispatcher
except ImportError:  # a torch that has moved it: ``can_record`` says so
    enable_python_dispatcher = None  # type: ignore[assignment,misc]

_INTERNALS: Any = torch._C
_NEW = frozenset(getattr(aten, name).default for name in ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty"))
_NORM = aten.linalg_vector_norm.default  # its backward is zero at a vector of zeros, where that of its parts is not finite
_PRODUCTS = (aten.matmul.default, aten.linear.default)  # whole where both are matrices: to enter a mode takes as long as they do
_DEVICE = torch.ops.prim.device.default
_DUAL = (aten._make_dual.default, aten._unpack_dual.default)
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_WATCHED = frozenset((Tensor.expand_as, *_HOOKS, *_SILENT_READS, *_GRADIENTS, _SET_DATA))


def record(
    function: Callable[[], Any],
    leaves: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    keep_values: bool = False,
    course: list[Any] | None = None,
) -> Recording:
    """Run a function without arguments and return the recording of its operations on some tensors.

    Args:
        function: Run once, as it is; whatever it reads besides the leaves is a constant.
        leaves: Tensors recognised by identity, however the function reaches them; each becomes a placeholder, in order. Those
            that require a gradient are what is differentiated.
        decompositions: Operation -> Python function that replaces it, unless it returns NotImplemented.
        keep_values: Whether to keep what operations return.
        course: An empty list to use for :attr:`Recording.course`.

    Raises:
        TraceError: If something that depends on the leaves is computed where it cannot be seen, or if this torch lacks the
            internals that recording needs.

    >>> x = torch.ones(3, requires_grad=True)
    >>> recording = record(lambda: (x * x.sum().item()).sum(), [x], {})
    >>> [str(node.target) for node in recording.graph.nodes if node.op == "call_function"]
    ['aten.sum.default', 'aten.item.default', 'aten.mul.Tensor', 'aten.sum.default']
    >>> [str(step) for step in recording.course]
    ['aten.sum.default', 'aten.item.default', '3.0', 'aten.mul.Tensor', 'aten.sum.default']
    """
    if not can_record():
        raise TraceError(
            f"trace: torch {torch.__version__} lacks internals that recording a module stands on; install a version that "
            "hessiankit was run with (2.6 to 2.15)"
        )
    recording = Recording(course=[] if course is None else course)
    builder = GraphBuilder(recording, keep_values)
    for leaf in leaves:
        builder.placeholder(leaf)
    recorder = _Recorder(builder, decompositions)
    # a Hessian taken within the function is plain torch: kernels write where the recorder does not look
    token = RECORDING.set(builder.stands_for)
    try:
        with plain(), enable_python_dispatcher(), _FunctionMode(recorder), recorder:
            result = function()
    finally:
        RECORDING.reset(token)
    recording.graph.add("output", "output", (torch.utils._pytree.tree_map(builder.node_of, result),))
    return recording


class _Apart(BaseException):
    """Ends a recording at the first step that differs from another course."""


class _Course(list[Any]):
    """A course that is compared with another one as it is taken."""

    def __init__(self, reference: Sequence[Any]) -> None:
        super().__init__()
        self.other = reference

    def append(self, step: Any) -> None:
        expected = self.other[len(self)] if len(self) < len(self.other) else None
        super().append(step)
        is_number = isinstance(step, (float, complex)) and isinstance(expected, (float, complex))  # which is rounded
        if step != expected and not is_number:
            raise _Apart(step, expected)


def leaves_course(function: Callable[[], Any], leaves: Sequence[Tensor], reference: Sequence[Any]) -> tuple[Any, Any, str] | None:
    """Return the first step of a function that differs from another course, the other's step, and the user's line; or None."""
    course = _Course(reference)
    try:
        record(function, leaves, {}, course=course)
    except _Apart as apart:
        return (*apart.args, source_line(apart))
    return (None, reference[len(course)], "") if len(course) < len(reference) else None


@cache
def may_draw(operation: Any) -> bool:
    """Tell whether an operation draws random numbers, at least with some arguments."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def _random_states(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    states = [value.get_state() for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return [*states, torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def can_record() -> bool:
    """Tell whether this torch has the internals that :func:`record` needs."""
    internals = (
        (_INTERNALS, "_DisablePythonDispatcher"),
        (_INTERNALS, "_ForceDispatchKeyGuard"),
        (_INTERNALS, "_is_any_autocast_enabled"),
        (getattr(_INTERNALS, "DispatchKey", None), "PreDispatch"),
        (getattr(_INTERNALS, "_TorchDispatchModeKey", None), "PROXY"),
        (getattr(_INTERNALS, "_functorch", None), "is_functorch_wrapped_tensor"),
        (getattr(_INTERNALS, "_functorch", None), "get_unwrapped"),
        (getattr(_INTERNALS, "_functorch", None), "maybe_current_level"),
    )
    return enable_python_dispatcher is not None and all(hasattr(owner, name) for owner, name in internals)


def _moves(*arguments: Any) -> bool:
    """Tell whether autograd knows a tensor among some arguments to depend on the parameters."""
    return any(unwrapped(x).requires_grad for x in tensors_in(arguments))


def _is_complex(values: Any) -> bool:
    """Tell whether one of the arguments or results of an operation is complex and has a derivative."""
    return any(x.is_complex() and x.requires_grad for x in tensors_in(values))


class _Recorder(ProxyTorchDispatchMode):
    """Sees every operation before torch takes it apart. (Torch admits only modes of this class there.)"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare the first recording of a process the import of torch's compiler."""
        return False

    def __init__(self, builder: GraphBuilder, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack: list[Any] = []
        self.builder, self.decompositions = builder, decompositions
        self.has_complex = False  # whether an operation returned complex numbers that have a derivative

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or the operations that it consists of, and note it."""
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        self.builder.recording.course.append(func)
        if torch._C._functorch.maybe_current_level() is not None:
            return self._untraced(func, args, kwargs)  # within a transform of torch.func, such as vmap
        if (value := self._parts(func, args, kwargs)) is not NotImplemented:
            return value
        if func is aten.lift_fresh.default:
            self.builder.ready(args[0])
            return args[0]
        if func is aten.detach_.default and self.builder.tensors.node(args[0]) is None:
            return args[0]
        return self._run(func, args, kwargs)

    def _run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Note an operation, and run it."""
        if self._is_untraced(operation, args, kwargs):
            return self._untraced(operation, args, kwargs)
        if torch._C._is_any_autocast_enabled() and (cast := dtype_of_autocast(operation, args, kwargs)) is not None:
            with self, full_precision():  # the casts are operations too
                return operation(*cast_to(cast, args), **cast_to(cast, kwargs))
        states = _random_states(args, kwargs) if may_draw(operation) else []
        with torch._C._DisablePythonDispatcher():
            if states:
                self.builder.edges.update()
            node = self.builder.call(operation, args, kwargs)
            value = operation(*args, **kwargs)
            if states and not all(map(torch.equal, states, _random_states(args, kwargs))):
                self.builder.recording.graph.remove_last()  # to run it again would give other numbers
                self.builder.add_untraced(value)
                self.builder.write_untraced(overwritten(operation, args, kwargs))
                return value
            is_input = not torch.is_grad_enabled() and isinstance(value, Tensor) and any(value is x for x in args)
            if is_input and not overwritten(operation, args, kwargs):  # to(dtype) of what has it, say: gradients pass through it
                self.builder.recording.graph.remove_last()
                return value
            if _is_complex(value):
                self.has_complex = True
                self.builder.recording.graph.remove_last()  # what is made of it is known by autograd's graph alone
                return value
            self.builder.keep(node, value)
            if isinstance(value, NUMBER):
                self.builder.recording.course.append(value)
        self.builder.result(node, value)
        if isinstance(value, Tensor) and (not node.all_input_nodes or operation in _NEW):
            self.builder.creations[view_key(value)] = node
        return value

    def _is_untraced(self, operation: Any, args: Any, kwargs: Any) -> bool:
        """Tell whether autograd's graph says more of a call than its operation: of complex numbers, and of writing without it."""
        if operation in _DUAL or (self.has_complex and _is_complex((args, kwargs))):
            return True
        targets = overwritten(operation, args, kwargs)
        if not targets or (torch.is_grad_enabled() and _moves(args, kwargs)):
            return False
        return self.builder.is_external(targets) or self.builder.passes_gradients(targets)

    def _untraced(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation without noting it: autograd knows how its result depends on the parameters."""
        targets = overwritten(operation, args, kwargs)
        with torch._C._DisablePythonDispatcher():
            if targets:
                self.builder.edges.update()  # they belong to the values before
                self.builder.keep_constants(targets)
            value = operation(*args, **kwargs)
        self.builder.add_untraced(value)
        if targets:
            self.builder.write_untraced(targets)
        return value

    def _parts(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operations that one consists of; one that writes, as its twin that does not, and a copy."""
        twin = None if func in self.decompositions else functional_twin(func)
        operation = func if twin is None else twin
        if operation not in self.decompositions or (twin is not None and not _moves(args, kwargs)):
            return NotImplemented
        if operation in _PRODUCTS and min(x.ndim for x in args[:2]) >= 2:
            return NotImplemented
        course = self.builder.recording.course
        length = len(course)
        with self:
            value = self.decompositions[operation](*args, **kwargs)
            del course[length:]  # what the function itself called alone
            if operation is _NORM and value is not NotImplemented:
                value = self._by_itself(operation, args, kwargs, value)
            return value if twin is None or value is NotImplemented else args[0].copy_(value)

    def _by_itself(self, operation: Any, args: Any, kwargs: Any, parts: Tensor) -> Tensor:
        """Return an operation's own result in place of that of its parts, so that autograd's graph has its backward."""
        with torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch():
            value: Tensor = operation(*args, **kwargs)
        self.builder.stands_for(value, parts)
        return value


if (_cond := getattr(torch.ops.higher_order, "cond", None)) is not None:

    @_cond.py_impl(_Recorder)
    def _branch(recorder: _Recorder, condition: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Any) -> Any:
        """Run the branch of ``torch.cond`` that is taken at this point, as Python's ``if`` does."""
        with recorder:
            return (true if bool(condition) else false)(*operands)


def _mark_read(x: Tensor) -> None:
    """Read one number that changes with any entry: the sum, for integers a hash."""
    if x.is_floating_point() or x.is_complex():
        x.sum().item()
        return
    position = torch.arange(1, x.numel() + 1, device=x.device) * _ODD
    ((position ^ (position >> 31)) * _ODD * x.reshape(-1)).sum().item()


def _is_linearized() -> bool:
    """Tell whether ``torch.func.linearize`` is running; it traces its function where no operation is seen."""
    return any(frame.f_code is torch.func.linearize.__code__ for frame, _ in walk_stack(None))


class _FunctionMode(TorchFunctionMode):
    """Sees Python's calls that read values out of tensors, or replace a tensor's ``.data``, without an operation.

    A read that leaves nothing in the graph is marked there by an ``aten.item``.
    """

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call through."""
        if "nested" in getattr(func, "__name__", ""):
            raise TraceError(
                "trace: the module makes a nested tensor (rows of several lengths, jagged), whose operations are not supported; "
                "pad the rows to one length and mask the padding, or call the module on one sequence at a time, a batch each"
            )
        if func not in _WATCHED:
            return func(*args, **(kwargs or {}))
        if func is Tensor.expand_as and _is_linearized():
            raise TraceError(
                "trace: the module calls torch.func.linearize, whose map takes the parameters for constants, so that gradients "
                "of its results leave them out; use torch.func.jvp"
            )
        if func in _HOOKS:  # of gradients, which no one takes here but the tracer itself
            return None if func is Tensor.retain_grad else RemovableHandle(OrderedDict())
        if func in _SILENT_READS:
            for x in tensors_in(args):
                _mark_read(x)
            args = (args[0].detach(), *args[1:]) if func is Tensor.tolist else args
        has_new_data = func == _SET_DATA and view_key(args[0]) != view_key(args[1])
        with torch._C._DisablePythonDispatcher() if func in _GRADIENTS else nullcontext():
            value = func(*args, **(kwargs or {}))
        if func in _GRADIENTS:
            self.recorder.builder.add_untraced(value)
        if has_new_data:
            self.recorder.builder.given(*args)
        return value
