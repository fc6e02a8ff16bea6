"""A model that ``fully_shard`` has spread over the ranks, as products read it: a layer at a time.

Each sharded parameter has a whole one beside it, whose memory is freed. The trace is of a module with the whole ones; where the
steps of a segment run, forward and back, an all-gather fills those that they read. The directions of these parameters are
gathered too, and the derivatives with respect to them are reduced and scattered: no rank holds a vector of the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hessiankit.engine.checkpoints import CheckpointSegment
from hessiankit.engine.parameter_memory import ParameterMemory, Sums
from hessiankit.primitives.primitive import CovectorSum
from hessiankit.request.state import ModuleState
from hessiankit.support.errors import InputError
from hessiankit.support.inner_products import Vectors
from hessiankit.support.torch_state import has_memory
from hessiankit.tracing.trace import Trace
from hessiankit.training.distributed.ranks import Ranks


class ShardedModel:
    """A model after ``fully_shard``, with a whole parameter for each sharded one.

    Within :meth:`plain` each rank gathers what it reads, when it reads it, and the others take part (:class:`ReadingRanks`): no
    rank holds all parameters, and an error on one of them leaves none waiting. Products know what all ranks read, and when.

    Attributes:
        ranks: The ranks; within :meth:`plain` they take part in what others read.
        module: The model.
        shards: Sharded parameters, detached, by name.
        whole: Whole parameters by name; they have memory where they are read alone.
        position: Number of this rank's piece.
        replicas: Number of ranks that hold the same piece.
        memories: Names of parameters by the storages of whole ones.
        is_plain: Whether ranks gather what they read, each by itself.
    """

    def __init__(self, ranks: Ranks, module: nn.Module) -> None:
        self.ranks, self.module = ReadingRanks(ranks, self), module
        self.shards: dict[str, DTensor] = {}
        self.whole: dict[str, nn.Parameter] = {}
        self.memories: dict[int, str] = {}
        self.is_plain = False
        self._values: dict[str, Tensor] = {}
        self._readers: dict[str, int] = {}
        for name, p in module.named_parameters():
            check_layout(ranks, name, p)
            assert isinstance(p, DTensor)
            self.shards[name], self._readers[name] = p.detach(), 0  # type: ignore[assignment]
            self.whole[name] = nn.Parameter(self._without_memory(name), requires_grad=p.requires_grad)
        group = Bucket(ranks, list(self.shards.values())).group(Shard)
        self.position, self.replicas = dist.get_rank(group), ranks.size // dist.get_world_size(group)

    @property
    def pieces(self) -> dict[str, Tensor]:
        """This rank's piece of each parameter, by name."""
        return {name: shard.to_local() for name, shard in self.shards.items()}

    def like(self, name: str, piece: Tensor) -> DTensor:
        """Return a sharded tensor of this rank's piece, of the layout of a parameter."""
        shard = self.shards[name]
        mesh, layout = shard.device_mesh, shard.placements
        return DTensor.from_local(piece, mesh, layout, run_check=False, shape=shard.shape, stride=shard.stride())

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Let the module be as before ``fully_shard``: whole parameters, and neither hooks nor class of FSDP.

        A parameter has memory while a module that it belongs to is called, and in each operation that reads it elsewhere.
        """
        names_of = {id(p): name for name, p in self.module.named_parameters()}
        with ExitStack() as undo:
            for module in list(self.module.modules()):
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    undo.callback(_refill, hooks, dict(hooks))
                if isinstance(module, FSDPModule):
                    state = module._get_fsdp_state()
                    for hooks in (module._forward_pre_hooks, module._forward_hooks):
                        for number in [number for number, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                            del hooks[number]
                    undo.callback(setattr, module, "__class__", type(module))
                    module.__class__ = type(module).__bases__[1]  # type: ignore[assignment]
                names = [names_of[id(p)] for p in module._parameters.values() if id(p) in names_of]
                for key, p in module._parameters.items():
                    if id(p) in names_of:
                        undo.callback(module._parameters.__setitem__, key, p)
                        module._parameters[key] = self.whole[names_of[id(p)]]
                if names or module is self.module:
                    self._watch(module, names)
            undo.callback(setattr, self, "is_plain", False)
            self.is_plain = True
            with _Reads(self):
                yield self.module

    def _watch(self, module: nn.Module, names: list[str]) -> None:
        """Let parameters have memory while a module is called."""
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
        """Let whole parameters have their values, of all ranks' pieces, within the context; all ranks enter it together.

        Within :meth:`plain` a rank enters it by itself, for what it reads.
        """
        names = list(names)
        absent = {name for name in names if not self._readers[name]}
        if not self.is_plain:
            self.take(absent, absent)
        elif absent:
            with _unseen():
                self.ranks.read(absent)
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
        self._allocate(absent)
        try:
            yield
        finally:
            self._free(absent)

    def absent(self, tensors: Iterable[Any]) -> set[str]:
        """Return the names of the parameters whose memory some tensors view, and that is not there."""
        storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor) and has_memory(x) and x.numel()]
        return {self.memories[s._cdata] for s in storages if not s.nbytes() and s._cdata in self.memories}

    def _without_memory(self, name: str) -> Tensor:
        """Return a tensor of the shape of a parameter, which :meth:`present` fills."""
        shard = self.shards[name]
        whole = torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)
        whole.untyped_storage().resize_(0)
        self.memories[whole.untyped_storage()._cdata] = name
        self._values[name] = whole
        return whole

    def _allocate(self, names: Iterable[str]) -> None:
        for whole in (self._values[name] for name in names):
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)

    def _free(self, names: Iterable[str]) -> None:
        for whole in (self._values[name] for name in names if not self._readers[name]):
            whole.untyped_storage().resize_(0)

    def take(self, names: Iterable[str], wanted: Container[str]) -> None:
        """Gather parameters, which all ranks do together, and keep those that are wanted here."""
        names = sorted(names)
        bucket = Bucket(self.ranks, [self.shards[name] for name in names])
        values = bucket.gather([self.shards[name].to_local().unsqueeze(0) for name in names])
        self._allocate(name for name in names if name in wanted)
        for name, value in zip(names, values, strict=True):
            if name in wanted:
                self._values[name].copy_(value[0])


class ReadingRanks(Ranks):
    """Ranks that serve reads before every collective call: while any rank reads a parameter, all of them gather it.

    Args:
        ranks: The ranks.
        model: Model whose parameters are read.
    """

    def __init__(self, ranks: Ranks, model: ShardedModel) -> None:
        vars(self).update(vars(ranks))
        self._model = model

    def read(self, names: Container[str]) -> bool:
        """Gather parameters, and those that other ranks read now; return whether any did."""
        marks = torch.tensor([name in names for name in self._model.shards], dtype=torch.int32, device="cpu")
        union = [name for name, count in zip(self._model.shards, self.sum(marks).tolist(), strict=True) if count]
        self._model.take(union, names)
        return bool(union)

    def gather(self, value: Any) -> list[Any]:
        while self._model.is_plain and self.read(()):
            pass
        return super().gather(value)


class _Reads(TorchDispatchMode):
    """Lets a whole parameter have memory in each operation that reads it."""

    supports_higher_order_operators = True

    def __init__(self, model: ShardedModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = self._model.absent(tree_leaves((args, kwargs)))
        if not names:
            return func(*args, **kwargs)
        if getattr(func, "is_view", False):
            with self._model.empty(names):
                return func(*args, **kwargs)
        with self._model.present(names):
            return func(*args, **kwargs)


@contextmanager
def _unseen() -> Iterator[None]:
    """Let no recorder of torch's operations see those within the context, which are none of the module's."""
    disabled = torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
    with disabled[0], disabled[1], disabled[2], torch.no_grad():
        yield


def _refill(hooks: dict[int, Any], content: Mapping[int, Any]) -> None:
    hooks.clear()
    hooks.update(content)


class Pieces(Vectors):
    """Vectors of which each rank has a piece: its pieces of the parameters, one after the other.

    Args:
        model: Model whose parameters a vector has an entry for.
        names: Their names, in the order of the entries.
    """

    def __init__(self, model: ShardedModel, names: Sequence[str]) -> None:
        self._model, self._shards = model, [model.shards[name] for name in names]

    def sum(self, terms: Tensor) -> Tensor:
        return self._model.ranks.sum(terms.clone()) / self._model.replicas

    def drawn(self, draw: Callable[[int], Tensor], size: int) -> Tensor:
        """Return the entries here of the vector that one process would draw; all are drawn, some at a time."""
        total, pool, pieces = sum(shard.numel() for shard in self._shards), torch.empty(0, dtype=torch.float64, device="cpu"), []
        for shard in self._shards:
            while len(pool) < shard.numel():
                step = total if total < 2 * DRAWN else DRAWN
                total -= step
                pool = torch.cat([pool, draw(step)])
            whole, pool = pool[: shard.numel()].view(shard.shape), pool[shard.numel() :].clone()
            axis, local = _axis(shard), shard.to_local().shape
            first = min(self._model.position * Bucket(self._model.ranks, [shard]).longest(shard), shard.shape[axis])
            pieces.append(whole.narrow(axis, first, local[axis]).reshape(-1))
        return torch.cat(pieces)

    def qr(self, Y: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q, this rank's rows, and R, by the QR factorisation of all ranks' factors R one upon the other."""
        Q, R = super().qr(Y)
        factors = dict(self._model.ranks.gather((self._model.position, R.cpu())))
        first = sum(len(factors[k]) for k in range(self._model.position))
        Q_factors, R_total = super().qr(torch.cat([factors[k] for k in sorted(factors)]).to(Y))
        return Q @ Q_factors[first : first + len(R)], R_total


DRAWN = 2**20
"""Entries drawn at once: 8 MiB. A multiple of 16, as many as torch draws together on a CPU: parts are drawn as the whole is."""


def check_layout(ranks: Ranks, name: str, p: Tensor) -> None:
    """Refuse parameters that are not spread by ``fully_shard`` over all ranks, with or without replicas."""
    if not isinstance(p, DTensor):
        raise InputError(f"{ranks.who}: {name!r} is not sharded, while others are; shard the whole model, without ignored_params")
    kinds = [type(placement) for placement in p.placements]
    if not set(kinds) <= {Shard, Replicate} or kinds.count(Shard) != 1 or p.device_mesh.size() != ranks.size:
        raise InputError(
            f"{ranks.who}: {name!r} is laid out as {p.placements} over {p.device_mesh.size()} of {ranks.size} ranks; expected "
            "fully_shard over all ranks of the group, with or without replicas; tensor, pipeline and expert parallelism are not "
            "supported"
        )


class Bucket:
    """Sharded tensors of one mesh that one collective moves: a rank's pieces one after the other, as long as the longest."""

    def __init__(self, ranks: Ranks, shards: Sequence[DTensor]) -> None:
        self._ranks, self._shards = ranks, shards

    def gather(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole of stacks of pieces: (S, *piece) to (S, *shape)."""
        if not pieces:
            return []
        packed = torch.cat(
            [self._rows(x, shard, self.longest(shard)).reshape(-1) for x, shard in zip(pieces, self._shards, strict=True)]
        )
        group = self.group(Shard)
        whole = packed.new_empty(dist.get_world_size(group), packed.numel())
        with self._ranks.exchange():
            dist.all_gather_into_tensor(whole.view(-1), packed, group=group)
        S, start, tensors = len(pieces[0]), 0, []
        for shard in self._shards:
            axis, longest = _axis(shard), self.longest(shard)
            rest = [n for k, n in enumerate(shard.shape) if k != axis]
            stop = start + S * longest * math.prod(rest)
            rows = (
                whole[:, start:stop].view(len(whole), S, longest, *rest).movedim(0, 1).flatten(1, 2)
            )  # (S, ranks x longest, *rest)
            tensors.append(rows[:, : shard.shape[axis]].movedim(1, axis + 1))
            start = stop
        return tensors

    def scatter(self, terms: list[Tensor]) -> list[Tensor]:
        """Return this rank's pieces of the sums over the ranks: (S, *shape) to (S, *piece); each term is taken off the list."""
        if not terms:
            return []
        group = self.group(Shard)
        size, S, start = dist.get_world_size(group), len(terms[0]), 0
        lengths = [S * shard.numel() // shard.shape[_axis(shard)] * self.longest(shard) for shard in self._shards]
        packed = terms[0].new_empty(size, sum(lengths))
        for shard, length in zip(self._shards, lengths, strict=True):
            rows = self._rows(terms.pop(0), shard, size * self.longest(shard))
            packed[:, start : start + length] = rows.unflatten(1, (size, -1)).movedim(1, 0).reshape(size, -1)
            start += length
            del rows
        total = packed.new_empty(packed.shape[1])
        with self._ranks.exchange():
            dist.reduce_scatter_tensor(total, packed.view(-1), group=group)
            if self._shards[0].device_mesh.ndim > 1:
                dist.all_reduce(total, group=self.group(Replicate))
        pieces, start = [], 0
        for shard in self._shards:
            axis, local = _axis(shard), shard.to_local()
            rest = [n for k, n in enumerate(shard.shape) if k != axis]
            stop = start + S * self.longest(shard) * math.prod(rest)
            rows = total[start:stop].view(S, self.longest(shard), *rest)[:, : local.shape[axis]]
            pieces.append(rows.movedim(1, axis + 1))
            start = stop
        return pieces

    def group(self, kind: type[Placement]) -> dist.ProcessGroup:
        """Return the ranks that hold different pieces (Shard), or those that hold the same one (Replicate)."""
        mesh, placements = self._shards[0].device_mesh, self._shards[0].placements
        return mesh.get_group(next(k for k, p in enumerate(placements) if isinstance(p, kind)))

    def longest(self, shard: DTensor) -> int:
        """Return the length of the longest piece along the sharded axis."""
        return -(-shard.shape[_axis(shard)] // dist.get_world_size(self.group(Shard)))

    @staticmethod
    def _rows(x: Tensor, shard: DTensor, length: int) -> Tensor:
        """Return a stack of pieces with the sharded axis behind the first one, filled up to a length."""
        rows = x.movedim(_axis(shard) + 1, 1)
        missing = length - rows.shape[1]
        return torch.cat([rows, rows.new_zeros(len(rows), missing, *rows.shape[2:])], 1) if missing else rows


def _axis(shard: DTensor) -> int:
    """Return the axis along which a tensor is sharded."""
    return next(p.dim for p in shard.placements if isinstance(p, Shard))


class ShardedState(ModuleState):
    """The state of a module with whole parameters, of which the pieces are compared with later ones."""

    def __init__(self, model: ShardedModel, *callables: Any) -> None:
        self._model = model
        super().__init__(model.module, *callables, share=True)

    def _shared(self) -> dict[str, Tensor]:
        return self._model.pieces

    def changed(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Yield the names of buffers that have other values now; parameters are gathered anew before they are read."""
        yield from super().changed((name, x) for name, x in tensors if name not in self._model.whole)


class ShardedParameters(ParameterMemory):
    """Memory of parameters that are gathered for the segments that read them; vectors are rows of this rank's pieces.

    Args:
        model: The model.
        weight: Factor of this rank's derivatives in the sum over the ranks.
    """

    def __init__(self, model: ShardedModel, weight: float) -> None:
        self._model, self._weight = model, weight

    def begin(self, trace: Trace, ids: Mapping[str, int], segments: Sequence[CheckpointSegment]) -> None:
        super().begin(trace, ids, segments)
        self._names, self._read = {at: name for name, at in ids.items()}, []
        converted = next((name for name, at in ids.items() if self.values[at].dtype != self._model.shards[name].dtype), None)
        if converted is not None:
            raise InputError(
                f"{self._model.ranks.who}: {converted!r} is {self._model.shards[converted].dtype}, and the model also computes "
                f"in {self.values[ids[converted]].dtype}; bring a sharded model to that type, "
                "e.g. model.float() before fully_shard"
            )
        for segment in segments:
            places = {at for a in segment.applications for at in (*a.inputs, a.output) if at is not None}
            held = (x for a in segment.applications for x in vars(a.primitive).values() if isinstance(x, Tensor))
            values = [*(trace.values[at] for at in places), *held]
            storages = (x.untyped_storage()._cdata for x in values if has_memory(x))
            views = {self._model.memories[storage] for storage in storages if storage in self._model.memories}
            self._read.append(sorted(views | {self._names[at] for at in places if at in self._names}))

    def agree(self) -> None:
        """Let all ranks read in each segment what any of them does: experts without a token on one may have some on another."""
        of_ranks, counts = zip(*self._model.ranks.gather((self._read, len(self._read))), strict=True)
        if len(set(counts)) > 1:
            raise InputError(
                f"{self._model.ranks.who}: the ranks' batches cut the model into {list(counts)} segments; give all ranks "
                "batches of one shape"
            )
        self._read = [sorted(set().union(*segment)) for segment in zip(*of_ranks, strict=True)]

    @property
    def size(self) -> int:
        return sum(self._model.shards[name].to_local().numel() for name in self._names.values())

    @contextmanager
    def present(self, k: int) -> Iterator[None]:
        with self._model.present(self._read[k]):
            yield

    def tangents(self, rows: Tensor, k: int) -> dict[int, Tensor]:
        shards, pieces = self._shards(k), self._views(rows)
        bucket = Bucket(self._model.ranks, list(shards.values()))
        whole = bucket.gather([pieces[at].to(self.values[at].dtype) for at in shards])
        return dict(zip(shards, whole, strict=True))

    @contextmanager
    def sums(self, rows: Tensor) -> Iterator[Sums]:
        pieces = self._views(rows.zero_())

        @contextmanager
        def opened(k: int) -> Iterator[Mapping[int, CovectorSum]]:
            shards = self._shards(k)
            sums = {at: CovectorSum(self.values[at].new_empty(len(rows), *shard.shape)) for at, shard in shards.items()}
            yield sums
            terms = [sums.pop(at).close().to(rows.dtype).mul_(self._weight) for at in shards]
            for at, total in zip(shards, Bucket(self._model.ranks, list(shards.values())).scatter(terms), strict=True):
                pieces[at] += total

        yield opened

    def _shards(self, k: int) -> dict[int, DTensor]:
        """Return the shards of the parameters that segment k reads and that directions move, by id."""
        return {at: self._model.shards[name] for at, name in self._names.items() if name in self._read[k]}

    def _views(self, rows: Tensor) -> dict[int, Tensor]:
        shapes = {at: self._model.shards[name].to_local().shape for at, name in self._names.items()}
        pieces = rows.split([shape.numel() for shape in shapes.values()], 1)
        return {at: piece.view(len(rows), *shape) for (at, shape), piece in zip(shapes.items(), pieces, strict=True)}
