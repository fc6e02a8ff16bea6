"""Any ``nn.Module`` as a list of primitive applications with their values.

The module runs once; what is recorded are ``aten`` operations such as ``linear``, ``layer_norm`` and
``softmax``. Each one that the parameters reach becomes an :class:`Application` of a primitive.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.primitives.cast import Cast
from hessiankit.primitives.indexing import Take, Where
from hessiankit.primitives.linear import Add, Expand
from hessiankit.primitives.primitive import Linearised, PartOfCovectors, Primitive
from hessiankit.support.arguments import checked
from hessiankit.support.containers import address
from hessiankit.support.errors import HessiankitError, InputError, TraceError
from hessiankit.support.tables import Piece, Printed, sizes, table
from hessiankit.support.torch_state import one_at_a_time, ordinary_path
from hessiankit.tracing.decompositions import DECOMPOSITIONS
from hessiankit.tracing.derivative_tests import structure
from hessiankit.tracing.fallback import AutomaticDifferentiation
from hessiankit.tracing.graph import Node, Recording, Unseen, map_nodes
from hessiankit.tracing.in_place import WRITTEN_OUT, readers, without_writing, written
from hessiankit.tracing.one_dtype import converted, widened, widest
from hessiankit.tracing.recording import may_draw, record
from hessiankit.tracing.rules import RULES
from hessiankit.tracing.rules.registry import rule
from hessiankit.tracing.segment import segment
from hessiankit.tracing.source_line import at_line, first_line

aten = torch.ops.aten
WITHOUT_DERIVATIVE = frozenset(
    {aten.detach.default, aten.new_empty.default, aten.new_full.default, aten.empty_like.default, aten.full_like.default}
)
"""Operations that take no derivative, or no values, over from their input."""
ORDINARY = frozenset(operation for operation in RULES if not may_draw(operation))
"""Operations that do not have to show that they run by themselves: what they returned is taken over."""


@dataclass(frozen=True)
class Application:
    """One primitive applied: ids of its inputs (None where an optional input is absent) and of its output."""

    primitive: Primitive
    inputs: tuple[int | None, ...]
    output: int
    name: str


@dataclass(repr=False)
class Trace(Printed):
    """A module's computation: every value by id, and the applications that the parameters reach, in order.

    ``marked`` are the ids of further values that the traced call returned; None for those that the parameters do not reach.
    ``eps`` is the rounding unit of the coarsest type that the module computed in, once its values have been brought to one type,
    and ``narrow`` the types of those that were made in another. ``constants`` are the tensors that the call read besides the
    parameters, as they lie in the caller's memory; ``course`` is that of the :class:`Recording`.
    """

    values: list[Tensor] = field(default_factory=list)
    applications: list[Application] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    moving: set[int] = field(default_factory=set)
    output: int = -1
    marked: tuple[int | None, ...] = ()
    eps: float = 0.0
    narrow: dict[int, torch.dtype] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    constants: list[Tensor] = field(default_factory=list)
    course: list[Any] = field(default_factory=list)

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

    def derived(self, primitive: Primitive, inputs: tuple[int, ...], name: str, applications: list[Application]) -> int:
        """Return the id of a primitive's value at some values; if one of these moves, append the application."""
        moves = not self.moving.isdisjoint(inputs)
        output = self.add_value(primitive.value(*(self.values[at] for at in inputs)), moving=moves)
        if moves:
            applications.append(Application(primitive, inputs, output, name))
        return output

    def stored(self, at: int) -> Tensor:
        """Return a value in the type that it is stored in."""
        return list.__getitem__(self.values, at)

    def gather(self, application: Application) -> tuple[Tensor | None, ...]:
        """Return the values of an application's inputs."""
        return tuple(None if i is None else self.values[i] for i in application.inputs)

    def moving_inputs(self, application: Application) -> tuple[int | None, ...]:
        """Return the ids of an application's inputs, None for those that the parameters do not reach."""
        return tuple(at if at in self.moving else None for at in application.inputs)

    def _headline(self) -> str:
        return f"trace: {len(self.applications)} applications of primitives, parameters: {len(self.parameters)}"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        names = {at: name for name, at in self.parameters.items()} | {a.output: a.name for a in self.applications}
        rows = []
        for a in self.applications:
            read = ", ".join(names.get(at, "constant") for at in a.inputs if at is not None)
            rows.append((a.name, type(a.primitive).__name__, read, sizes(self.values[a.output].shape)))
        yield table(("value", "primitive", "of", "shape"), rows, left=4)
        if self.fallbacks:
            yield f"differentiated by torch: {', '.join(self.fallbacks)}"

    @torch.no_grad()
    def descendants(self, value: int) -> set[int]:
        """Return a value and those that are computed from it."""
        values = {value}
        for application in self.applications:
            if any(at in values for at in application.inputs):
                values.add(application.output)
        return values

    @torch.no_grad()
    def adjoints(
        self,
        scale: float = 1.0,
        apply: Apply | None = None,
        linearise: Callable[[Application, Tensor, Sequence[bool]], Linearised] | None = None,
    ) -> dict[int, Tensor]:
        """Return lambda_v = d(scale * output) / d(value v) for every value on the way to the scalar output, by id.

        One reverse sweep: lambda(inputs of v) += D phi_v^T lambda_v, which ``apply`` computes; ``linearise`` is called with an
        application, the adjoint of its output, and the inputs that move.
        """
        # an adjoint is (1, *value.shape): one direction
        adjoints = {self.output: torch.full_like(self.values[self.output], scale).unsqueeze(0)}
        for application in reversed(self.applications):
            adjoint, ids = adjoints.get(application.output), self.moving_inputs(application)
            if adjoint is not None:
                motion = [at is not None for at in ids]
                if linearise is None:
                    at_point = application.primitive.linearise(self.gather(application), None, motion)  # type: ignore[arg-type]
                else:
                    at_point = linearise(application, adjoint[0], motion)
                covectors = at_point.pull(adjoint) if apply is None else apply(partial(pull_one, at_point.pull), [adjoint])
                accumulate(adjoints, ids, covectors)
        return {at: adjoint[0] for at, adjoint in adjoints.items()}


LinearMap: TypeAlias = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
Apply: TypeAlias = Callable[[LinearMap, Sequence[Tensor | None]], Sequence[Tensor | None]]


def exactly(linear_map: LinearMap, vectors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return a linear map of vectors."""
    return linear_map(vectors)


def pull_one(pull: Callable[[Any], Sequence[Tensor | None]], bars: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return the covectors of the only one."""
    return pull(bars[0])


def accumulate(sums: dict[int, Any], ids: Sequence[int | None], covectors: Sequence[Tensor | PartOfCovectors | None]) -> None:
    """Add covectors to the sums of their values, by id; None is zero, or a value without a sum."""
    for at, covector in zip(ids, covectors, strict=True):
        if at is None or covector is None:
            continue
        present = sums.get(at)
        if isinstance(present, PartOfCovectors):
            sums[at] = present.plus(covector)
        elif isinstance(covector, PartOfCovectors):
            sums[at] = covector if present is None else covector.plus(present)
        else:
            sums[at] = covector if present is None else present + covector


@checked("trace_module")
@one_at_a_time
def trace_module(function: Callable[..., Tensor], parameters: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Trace:
    """Trace ``function(parameters, *inputs)`` into primitive applications.

    Args:
        function: Maps a dict of parameters, and the inputs, to one tensor.
        parameters: The values to differentiate with respect to, by name.
        inputs: Whatever the function takes.

    Raises:
        InputError: If an argument is of another kind.
        TraceError: If torch cannot trace the function or it does not return one tensor.
    """
    strange = next((name for name, p in parameters.items() if not isinstance(p, Tensor)), None)
    if strange is not None:
        raise InputError(f"trace: the parameter {strange!r} is a {type(parameters[strange]).__name__}; pass tensors by name")
    leaves = {name: p.detach().requires_grad_(p.is_floating_point()) for name, p in parameters.items()}
    data = torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, inputs)
    return trace_call(lambda: (function(dict(leaves), *data),), leaves)


@one_at_a_time
def trace_call(
    run: Callable[[], tuple[Any, ...]], leaves: Mapping[str, Tensor], stable_storages: Collection[int] | None = None
) -> Trace:
    """Trace a call without arguments into primitive applications; tensors that it reads are not replaced.

    Args:
        run: The call; it returns one tensor, and other values whose ids are wanted (:attr:`Trace.marked`).
        leaves: The tensors to differentiate with respect to, by name, recognised by identity.
        stable_storages: Addresses of storages that nobody writes into later (:func:`address`); other constants are copied. None:
            no copies, for a trace that is read at once.
    """
    try:
        with torch.enable_grad(), warnings.catch_warnings(), ordinary_path():  # the graph says where gradients are turned off
            warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")  # an error, where it matters
            recording = record(run, list(leaves.values()), DECOMPOSITIONS, keep_values=True)
    except HessiankitError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise TraceError(
            f"trace: torch could not trace the module ({reason}){at_line(error, ', at {}')}. "
            "Write that line in operations of torch, or compute what it needs before and pass it as an argument"
        ) from error
    try:
        with torch.no_grad():
            return _interpret(recording, {name: x.detach() for name, x in leaves.items()}, stable_storages)
    finally:
        recording.graph.clear()


def _interpret(recording: Recording, leaves: Mapping[str, Tensor], stable_storages: Collection[int] | None) -> Trace:
    result = Trace(course=recording.course)
    ids: dict[Node, int] = {}  # nodes whose values the parameters reach
    values: dict[Node, Any] = {}
    differentiable, copied_storages = True, set[int]()
    leaf_items = iter(leaves.items())
    _floors_before_roots(recording)
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            name, values[node] = next(leaf_items)
            ids[node] = result.add_value(values[node], moving=True)
            result.parameters[name] = ids[node]
        elif node.op == "get_attr":
            constant = recording.constants[str(node.target)].detach()
            result.constants.append(constant)
            if (
                stable_storages is not None and address(constant) not in stable_storages
            ):  # memory of the caller, who may write into it
                copied_storages.add(address(constant))
                constant = _copied(constant)
            values[node] = constant
        elif node.op == "segment":
            _segment(node, recording.unseen[node], result, ids, values)
        elif node.op == "output":
            output, *outputs = node.args[0]
            if not isinstance(output, Node) or output not in ids:
                raise TraceError(
                    "trace: the module's output does not depend on the parameters, or is not one tensor; return one tensor"
                )
            result.output = ids[output]
            result.marked = tuple(ids.get(x) if isinstance(x, Node) else None for x in outputs)
        elif node.target is torch._C._set_grad_enabled:
            differentiable = bool(node.args[0])
        else:
            try:
                target: Any = without_writing(node, values, ids, differentiable=differentiable)
                ran = recording.values.pop(node, None) if target in ORDINARY and target is node.target else None
                ran = None if ran is None or (copied_storages and address(ran) in copied_storages) else ran
                _record(node, target, ran, result, ids, values, differentiable)
                if target is not node.target and target is not aten.detach.default:
                    _overwrite(node, result, ids, values)
            except (HessiankitError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, NotImplementedError) as error:
                raise TraceError(
                    f"trace: torch ran {node.target} within the module, but cannot run it by itself "
                    f"({str(error).splitlines()[0]}); it works on tensors that live only there, such as dual "
                    "numbers or those of torch.func. Write it without them"
                ) from error
    result.fallbacks = tuple(dict.fromkeys(result.fallbacks))
    return result


def _floors_before_roots(recording: Recording) -> None:
    """Turn max(sqrt(s), c) into sqrt(max(s, c^2)), the same number, which has derivatives where s is 0: ``F.normalize``."""
    for node in recording.graph.nodes:
        if node.target not in (aten.clamp_min.default, aten.clamp.default):
            continue
        (root, *bounds), value = node.args, recording.values.get(node)
        low = [*bounds, *node.kwargs.values()] if node.kwargs.keys() <= {"min"} else []
        if len(low) != 1 or value is None or not isinstance(low[0], (int, float)):
            continue
        square = low[0] ** 2 if low[0] > 0 else 0.0
        if root.target is aten.sqrt.default and root.users == [node] and square >= torch.finfo(value.dtype).tiny:
            recording.values.pop(root, None)
            root.target, root.args = aten.clamp_min.default, (root.args[0], square)
            node.target, node.args, node.kwargs = aten.sqrt.default, (root,), {}


def _copied(x: Tensor) -> Tensor:
    """Return a copy that takes no more memory: expanded where the tensor is."""
    if x.layout is not torch.strided:
        return x.clone()
    return x[tuple(slice(None if step else 1) for step in x.stride())].clone().expand(x.shape)


def _record(
    node: Node,
    target: Any,
    ran: Tensor | None,
    result: Trace,
    ids: dict[Node, int],
    values: dict[Node, Any],
    differentiable: bool,
) -> None:
    """Run one node, as ``target``, unless it ``ran`` already; if a moving value enters it, append its application."""
    indexed = node.args[0] if node.target is operator.getitem else None  # one output of an operation with several
    source: Node = node if indexed is None else indexed
    inputs_in_motion = [n for n in source.all_input_nodes if n in ids]
    args, kwargs = map_nodes(values.__getitem__, (source.args, source.kwargs))
    value: Any = ran
    if ran is None:
        value = target(*args, **kwargs) if indexed is None else target(values[source], node.args[1])
    if target is not node.target:
        inputs_in_motion = inputs_in_motion if value.is_floating_point() else []  # a comparison
        value = value.to(values[written(node)[0]].dtype)  # that of the memory which the operation itself writes into
    if not differentiable or target in WITHOUT_DERIVATIVE:
        value = torch.utils._pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)
        inputs_in_motion = []
    values[node] = value
    if not inputs_in_motion or not isinstance(value, Tensor):  # Python's numbers are constants to autograd
        return
    sparse = [n for n in source.all_input_nodes if isinstance(values[n], Tensor) and values[n].layout is not torch.strided]
    if value.layout is not torch.strided or not ids.keys().isdisjoint(sparse):
        raise TraceError(
            f"trace: operation {source.target} works on sparse tensors that the parameters reach, which are not supported; use "
            "dense ones there, e.g. to_dense(). Constants may be sparse"
        )
    if value.is_complex():
        raise TraceError(f"trace: operation {source.target} returns complex numbers, which are not supported; use real ones")
    if not value.is_floating_point() or not value.numel():
        return
    by_tensor = {id(values[n]): ids[n] for n in inputs_in_motion}
    run, index = (target, None) if indexed is None else (source.target, node.args[1])
    match = None
    closed_form: Any = None if sparse else RULES.get(run)
    if closed_form is not None:
        facts = {"result": value, "output_index": index}
        match = closed_form(*args, **kwargs, **{name: facts[name] for name in _facts(closed_form)})
        if match is not None and by_tensor.keys().isdisjoint(map(id, match[1])):
            return  # this output_index comes from inputs that do not move
    if match is None:
        inputs = tuple(values[n] for n in inputs_in_motion)
        fallback = _fallback(run, source, inputs_in_motion, values, index)
        dtype = widest(x.dtype for x in inputs)  # as the derivatives are taken
        primitive = fallback
        result.fallbacks += (fallback.prove(converted(inputs, dtype)),)
    else:
        primitive, inputs = match
    for tensor in inputs:
        if tensor is not None and id(tensor) not in by_tensor:
            by_tensor[id(tensor)] = result.add_value(tensor)
    ids[node] = result.apply(primitive, tuple(None if t is None else by_tensor[id(t)] for t in inputs), value, node.name)


def _segment(node: Node, unseen: Unseen, result: Trace, ids: dict[Node, int], values: dict[Node, Any]) -> None:
    """Append a value known from autograd's graph only; a constant, if none of its inputs moves."""
    value = values[node] = unseen.root.detach()
    variables = [(edge, n) for edge, n in zip(unseen.edges, node.args, strict=True) if n in ids]
    if not variables or not value.numel():
        return
    inputs = tuple(ids[n] for _, n in variables)
    if not unseen.names:  # a value that was seen, and written into without gradients: they pass as before
        change = result.add_value(value - values[variables[0][1]])
        ids[node] = result.apply(Add(), (*inputs, change), value, node.name)
        return
    primitive = segment(unseen, [(edge, values[n]) for edge, n in variables])
    ids[node] = result.apply(primitive, inputs, value, node.name)
    result.fallbacks += (primitive.name,)


@cache
def _facts(rule: Callable[..., Any]) -> list[str]:
    """Return what a rule asks for besides the arguments of its operation."""
    parameters = inspect.signature(rule).parameters
    return [name for name in ("result", "output_index") if name in parameters]


@rule(*WRITTEN_OUT.values())
def _assignment(into: Tensor, source: Any = None, *rest: Any, **options: Any) -> tuple[Primitive, tuple[Tensor, ...]]:
    return Expand(tuple(into.shape)), (source,) if isinstance(source, Tensor) else ()


def _overwrite(node: Node, result: Trace, ids: dict[Node, int], values: dict[Node, Any]) -> None:
    """Update the values of all other tensors in the memory that a node has written."""
    value = values[node]
    for reader, old_value, source in readers(node, values):
        new, new_value = source >= 0, values[reader]
        if not bool(new.any()) or (node not in ids and reader not in ids):
            continue
        if node in ids:
            id_of_entries = result.apply(
                Take(source.clamp_min(0)), (ids[node],), value.reshape(-1)[source.clamp_min(0)], node.name
            )
        else:
            id_of_entries = result.add_value(new_value)
        if not bool(new.all()):
            id_of_rest = ids[reader] if reader in ids else result.add_value(old_value)
            id_of_entries = result.apply(Where(new), (id_of_entries, id_of_rest), new_value, node.name)
        ids.pop(reader, None)
        if id_of_entries in result.moving:
            ids[reader] = id_of_entries


def _fallback(target: Any, node: Node, variables: list[Node], values: dict[Node, Any], index: Any) -> AutomaticDifferentiation:
    node_values = {n: values[n] for n in node.all_input_nodes}  # now: a later operation may write into them
    assumed = structure(target, node.args, node.kwargs)
    if assumed is not None:
        assumed.check(target, values[node.args[assumed.position]])

    def function(*inputs: Tensor) -> Tensor:
        point = {**node_values, **dict(zip(variables, inputs, strict=True))}
        args, kwargs = converted(map_nodes(point.__getitem__, (node.args, node.kwargs)), inputs[0].dtype)
        if assumed is not None:
            at = assumed.position
            args = (*args[:at], assumed.projection(args[at]), *args[at + 1 :])
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
            value = target(*args, **kwargs)
        return value if index is None else value[index]

    return AutomaticDifferentiation(function, str(target))


def ancestors_of_output(trace: Trace) -> list[Application]:
    """Return the applications that the output depends on, in order."""
    ids, path = {trace.output}, []
    for a in reversed(trace.applications):
        if a.output in ids:
            path.append(a)
            ids.update(at for at in a.inputs if at is not None)
    return path[::-1]


def last_readers(readers: Sequence[Any]) -> dict[int, int]:
    """Return, for each value, the output of the last that reads it, among applications or other steps in order."""
    return {at: a.output for a in readers for at in a.inputs if at is not None}


class StoredValues(list[Tensor]):
    """Values by id; those that are stored in a type narrower than ``dtype`` are read in that one."""

    def __init__(self, values: Iterable[Tensor], dtype: torch.dtype) -> None:
        super().__init__(values)
        self.dtype = dtype

    def __getitem__(self, at: Any) -> Any:
        return widened(super().__getitem__(at), self.dtype)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[at] for at in range(len(self)))


def in_one_dtype(trace: Trace, *, as_stored: bool = False) -> None:
    """Convert the floating-point values of a trace, in place, to the widest type among those that the parameters reach.

    Args:
        trace: The trace.
        as_stored: Whether parameters and constants are converted where they are read alone (:meth:`Trace.stored`).
    """
    dtypes = {trace.values[at].dtype for at in trace.moving}
    trace.eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)  # constants are what they are
    dtype = widest(dtypes)
    if all(x.dtype == dtype or not x.is_floating_point() for x in trace.values):
        return
    trace.narrow = {at: x.dtype for at, x in enumerate(trace.values) if at in trace.moving and x.dtype != dtype}
    kept = {*trace.parameters.values(), *(set(range(len(trace.values))) - trace.moving)} if as_stored else set[int]()
    is_kept = [at in kept and x.itemsize < dtype.itemsize for at, x in enumerate(trace.values)]
    values = [x if keep or not x.is_floating_point() else x.to(dtype) for keep, x in zip(is_kept, trace.values, strict=True)]
    trace.values = StoredValues(values, dtype) if any(is_kept) else values
    for i, a in enumerate(trace.applications):
        if isinstance(a.primitive, Cast):
            trace.applications[i] = replace(a, primitive=replace(a.primitive, dtype=dtype))
