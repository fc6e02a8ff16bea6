"""A model whose parameters lie elsewhere, on the host or as pieces on several processes, and are brought where they are read.

Each parameter has a whole one beside it, whose memory is freed. The trace is of the module with the whole ones. Where the steps
of a segment run, forward and back, those that they read are filled; their directions are brought too, and the derivatives with
respect to them are taken away: no vector of the model's size is where products are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hessiankit.engine.checkpoints import CheckpointSegment
from hessiankit.engine.parameter_memory import ParameterMemory, Sums
from hessiankit.primitives.primitive import CovectorSum
from hessiankit.request.state import ModuleState
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import has_memory
from hessiankit.tracing.trace import Trace


class PagedModel:
    """A model whose parameters lie on the host, with a whole parameter on a device for each.

    Attributes:
        who: The function that is called, the prefix of every message.
        module: The model.
        pieces: This process's part of each parameter, detached, by name.
        whole: Whole parameters by name; they have memory where they are read alone.
        memories: Names of parameters by the storages of whole ones.
        is_plain: Whether the module has the whole parameters.
    """

    def __init__(self, who: str, module: nn.Module, device: torch.device) -> None:
        self.who, self.module, self.device = who, module, device
        self.pieces: dict[str, Tensor] = {}
        self.whole: dict[str, nn.Parameter] = {}
        self.memories: dict[int, str] = {}
        self.is_plain = False
        self._values: dict[str, Tensor] = {}
        self._readers: dict[str, int] = {}
        for name, p in module.named_parameters():
            piece = self._piece(name, p.detach())
            whole = torch.empty(p.shape, dtype=piece.dtype, device=device)
            whole.untyped_storage().resize_(0)
            self.pieces[name], self._values[name], self._readers[name] = piece, whole, 0
            self.memories[whole.untyped_storage()._cdata] = name
            self.whole[name] = nn.Parameter(whole, requires_grad=p.requires_grad)

    def _piece(self, name: str, parameter: Tensor) -> Tensor:
        """Return this process's part of a parameter."""
        if not has_memory(parameter):
            raise InputError(f"{self.who}: {name!r} is a {type(parameter).__name__}, which offload= cannot move; leave it out")
        return parameter

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Let the module have whole parameters, and its buffers on their device.

        A parameter has memory while a module that it belongs to is called, and in each operation that reads it elsewhere.
        """
        names_of = {id(p): name for name, p in self.module.named_parameters()}
        buffers = {id(x): x.to(self.device) for x in self.module.buffers()}
        with ExitStack() as undo:
            for module in list(self.module.modules()):
                for content in (module._forward_pre_hooks, module._forward_hooks, module._buffers, module._parameters):
                    undo.callback(refill, content, dict(content))
                module._buffers.update((key, buffers[id(x)]) for key, x in module._buffers.items() if x is not None)
                names = {key: names_of[id(p)] for key, p in module._parameters.items() if p is not None}
                module._parameters.update((key, self.whole[name]) for key, name in names.items())
                if names or module is self.module:
                    self._watch(module, list(names.values()))
            undo.callback(setattr, self, "is_plain", False)
            self.is_plain = True
            try:
                with _Reads(self):
                    yield self.module
            except BaseException:  # whoever prints what the traceback holds reads no memory that is not there
                for whole in (*self.whole.values(), *self._values.values()):
                    whole.data = whole.new_empty(0)
                raise

    def _watch(self, module: nn.Module, names: list[str]) -> None:
        """Fill parameters while a module is called."""
        calls: list[ExitStack] = []

        def begin(*_: Any) -> None:
            calls.append(ExitStack())
            calls[-1].enter_context(self.present(names))

        def end(*_: Any) -> None:
            calls.pop().close()

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)

    @contextmanager
    def present(self, names: Iterable[str]) -> Iterator[None]:
        """Let whole parameters have their values within the context."""
        names = list(names)
        absent = {name for name in names if not self._readers[name]}
        with unseen() if self.is_plain else nullcontext():
            self.bring(absent)
        for name in names:
            self._readers[name] += 1
        try:
            yield
        finally:
            for name in names:
                self._readers[name] -= 1
            self._free(names)

    @contextmanager
    def empty(self, names: Iterable[str]) -> Iterator[None]:
        """Let parameters have memory without values within the context: torch makes no view of memory that is not there."""
        absent = [name for name in names if not self._readers[name]]
        for name in absent:
            self._allocate(name)
        try:
            yield
        finally:
            self._free(absent)

    def absent(self, tensors: Iterable[Any]) -> set[str]:
        """Return the names of the parameters whose memory some tensors view, and that is not there."""
        storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor) and has_memory(x) and x.numel()]
        return {self.memories[s._cdata] for s in storages if not s.nbytes() and s._cdata in self.memories}

    @contextmanager
    def moved(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Let some parameters have other values within the context."""
        pieces, self.pieces = self.pieces, {**self.pieces, **values}
        try:
            yield
        finally:
            self.pieces = pieces

    def fill(self, name: str, value: Tensor) -> None:
        """Copy a value to a whole parameter."""
        self._allocate(name).copy_(value)

    def _allocate(self, name: str) -> Tensor:
        whole = self._values[name]
        whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
        return whole

    def _free(self, names: Iterable[str]) -> None:
        for whole in (self._values[name] for name in names if not self._readers[name]):
            whole.untyped_storage().resize_(0)

    def current(self) -> dict[str, Tensor]:
        """Return the present parts of the module's parameters, also while whole ones are in their place."""
        return self.pieces if self.is_plain else {name: p.detach() for name, p in self.module.named_parameters()}

    # Transport: from the host and back; between processes, of a subclass ----------------------------------------------------

    def bring(self, names: Iterable[str]) -> None:
        """Fill whole parameters."""
        for name in names:
            self.fill(name, self.pieces[name])

    def gathered(self, names: Sequence[str], pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole of stacks of pieces of some parameters: (S, *piece) to (S, *shape)."""
        return [x.to(self.device) for x in pieces]

    def scattered(self, names: Sequence[str], terms: list[Tensor]) -> list[Tensor]:
        """Return pieces of stacks of derivatives: (S, *shape) to (S, *piece); each term is taken off the list."""
        return [terms.pop(0).to(self.pieces[name].device) for name in names]


class _Reads(TorchDispatchMode):
    """Lets a whole parameter have memory in each operation that reads it."""

    supports_higher_order_operators = True

    def __init__(self, model: PagedModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = self._model.absent(tree_leaves((args, kwargs)))
        if not names:
            return func(*args, **kwargs)
        with self._model.empty(names) if getattr(func, "is_view", False) else self._model.present(names):
            return func(*args, **kwargs)


@contextmanager
def unseen() -> Iterator[None]:
    """Hide operations within the context from recorders: they are not the module's."""
    disabled = torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
    with disabled[0], disabled[1], disabled[2], torch.no_grad():
        yield


def refill(content: dict[Any, Any], copy: Mapping[Any, Any]) -> None:
    """Restore the entries of a dict from a copy."""
    content.clear()
    content.update(copy)


class PagedState(ModuleState):
    """The state of a module with whole parameters, whose values are the pieces, which are compared with later ones."""

    def __init__(self, model: PagedModel, *callables: Any) -> None:
        self._model = model
        super().__init__(model.module, *callables, share=True)
        self.values |= model.pieces

    @contextmanager
    def present(self, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        with self._model.moved(values or {}), super().present():
            self.is_present = self.is_present and not values
            yield

    def slopes(self, value: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
        """Return derivatives as pieces' devices hold them; each leaves the device once it is complete."""
        at = {id(whole): name for name, whole in self._model.whole.items()}
        slopes: dict[int, Tensor] = {}

        def move(leaf: Tensor) -> None:
            assert leaf.grad is not None
            slopes[id(leaf)], leaf.grad = leaf.grad.to(self._model.pieces[at[id(leaf)]].device), None

        with ExitStack() as hooks:
            for leaf in leaves:
                hooks.callback(leaf.register_post_accumulate_grad_hook(move).remove)
            torch.autograd.backward(value, inputs=list(leaves))
        return [slopes.get(id(leaf)) for leaf in leaves]

    def _shared(self) -> dict[str, Tensor]:
        return self._model.current()

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Yield the names of buffers that have other values now; parameters are brought anew before they are read."""
        yield from super().changed((name, x) for name, x in tensors if name not in self._model.whole)


class _LateSum(CovectorSum):
    """A sum whose memory is there from its first term on, while the directions of other parameters are brought."""

    def __init__(self, like: Tensor, count: int) -> None:
        self._like, self._count, self.empty = like, count, True

    @cached_property
    def memory(self) -> Tensor:  # type: ignore[override]
        """The sum."""
        return self._like.new_empty(self._count, *self._like.shape)


class PagedParameters(ParameterMemory):
    """Memory of parameters that are brought for the segments that read them; vectors are rows of the pieces.

    Args:
        model: The model.
        weight: Factor of the derivatives.
    """

    def __init__(self, model: PagedModel, weight: float = 1.0) -> None:
        self._model, self._weight = model, weight

    def begin(self, trace: Trace, ids: Mapping[str, int], segments: Sequence[CheckpointSegment]) -> None:
        super().begin(trace, ids, segments)
        model = self._model
        self._names, self._read = {at: name for name, at in ids.items()}, list[list[str]]()
        if trace.fallbacks:
            raise InputError(
                f"{model.who}: {trace.fallbacks[0]} has no closed form yet, without which parameters are not brought layer by "
                "layer; write it in other operations, or pass a whole model that lies on the device"
            )
        for segment in segments:
            places = {at for a in segment.applications for at in (*a.inputs, a.output) if at is not None}
            held = (x for a in segment.applications for x in vars(a.primitive).values() if isinstance(x, Tensor))
            values = [*map(trace.stored, places), *held]
            storages = (x.untyped_storage()._cdata for x in values if has_memory(x))
            views = {model.memories[storage] for storage in storages if storage in model.memories}
            self._read.append(sorted(views | {self._names[at] for at in places if at in self._names}))

    @property
    def size(self) -> int:
        return sum(self._model.pieces[name].numel() for name in self._names.values())

    @contextmanager
    def present(self, k: int) -> Iterator[None]:
        with self._model.present(self._read[k]):
            yield

    def tangents(self, rows: Tensor, k: int) -> dict[int, Tensor]:
        names, pieces = self._moving(k), self._views(rows)
        whole = self._model.gathered(list(names.values()), [pieces[at].to(self.values[at].dtype) for at in names])
        return dict(zip(names, whole, strict=True))

    @contextmanager
    def sums(self, rows: Tensor) -> Iterator[Sums]:
        pieces = self._views(rows.zero_())

        @contextmanager
        def opened(k: int) -> Iterator[Mapping[int, CovectorSum]]:
            names = self._moving(k)
            sums: dict[int, CovectorSum] = {at: _LateSum(self.values[at], len(rows)) for at in names}
            yield sums
            terms = [sums.pop(at).close().to(rows.dtype).mul_(self._weight) for at in names]
            for at, total in zip(names, self._model.scattered(list(names.values()), terms), strict=True):
                pieces[at] += total

        yield opened

    def _moving(self, k: int) -> dict[int, str]:
        """Return the names of the parameters that segment k reads and that directions move, by id."""
        return {at: name for at, name in self._names.items() if name in self._read[k]}

    def _views(self, rows: Tensor) -> dict[int, Tensor]:
        shapes = {at: self._model.pieces[name].shape for at, name in self._names.items()}
        pieces = rows.split([shape.numel() for shape in shapes.values()], 1)
        return {at: piece.view(len(rows), *shape) for (at, shape), piece in zip(shapes.items(), pieces, strict=True)}
