"""A model that ``fully_shard`` has spread over the ranks, as products read it: a layer at a time.

Each sharded parameter has a whole one beside it, whose memory is freed. The trace is of a module with the whole ones; where the
steps of a segment run, forward and back, an all-gather fills those that they read. The directions of these parameters are
gathered too, and the derivatives with respect to them are reduced and scattered: no rank holds a vector of the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hessiankit.engine.checkpoints import CheckpointSegment
from hessiankit.engine.parameter_memory import ParameterMemory, Sums
from hessiankit.primitives.primitive import CovectorSum
from hessiankit.request.state import ModuleState
from hessiankit.support.errors import InputError
from hessiankit.tracing.trace import Trace
from hessiankit.training.distributed.ranks import Ranks


class ShardedModel:
    """A model after ``fully_shard``, with a whole parameter for each sharded one.

    Attributes:
        module: The model.
        shards: Sharded parameters, detached, by name.
        whole: Whole parameters by name; they have memory within :meth:`present` alone.
        position: Number of this rank's piece.
        replicas: Number of ranks that hold the same piece.
    """

    def __init__(self, ranks: Ranks, module: nn.Module) -> None:
        self.ranks, self.module = ranks, module
        self.shards: dict[str, DTensor] = {}
        self.whole: dict[str, nn.Parameter] = {}
        self._readers: dict[str, int] = {}
        for name, p in module.named_parameters():
            check_layout(ranks, name, p)
            assert isinstance(p, DTensor)
            self.shards[name], self._readers[name] = p.detach(), 0  # type: ignore[assignment]
            whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            whole.untyped_storage().resize_(0)
            self.whole[name] = nn.Parameter(whole, requires_grad=p.requires_grad)
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
        """Let the module be as before ``fully_shard``: whole parameters, and neither hooks nor class of FSDP."""
        whole_of = {id(p): self.whole[name] for name, p in self.module.named_parameters()}
        with ExitStack() as undo:
            for module in list(self.module.modules()):
                for key, p in module._parameters.items():
                    if id(p) in whole_of:
                        undo.callback(module._parameters.__setitem__, key, p)
                        module._parameters[key] = whole_of[id(p)]
                if isinstance(module, FSDPModule):
                    state = module._get_fsdp_state()
                    for hooks in (module._forward_pre_hooks, module._forward_hooks):
                        undo.callback(_refill, hooks, dict(hooks))
                        for number in [number for number, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                            del hooks[number]
                    undo.callback(setattr, module, "__class__", type(module))
                    module.__class__ = type(module).__bases__[1]  # type: ignore[assignment]
            yield self.module

    @contextmanager
    def present(self, names: Iterable[str]) -> Iterator[None]:
        """Let whole parameters have their values, of all ranks' pieces, within the context."""
        names = list(names)
        absent = [name for name in names if not self._readers[name]]
        bucket = Bucket(self.ranks, [self.shards[name] for name in absent])
        values = bucket.gather([self.shards[name].to_local().unsqueeze(0) for name in absent])
        for name, value in zip(absent, values, strict=True):
            whole = self.whole[name]
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
            whole.data.copy_(value[0])
        del values
        for name in names:
            self._readers[name] += 1
        try:
            yield
        finally:
            for name in names:
                self._readers[name] -= 1
                if not self._readers[name]:
                    self.whole[name].untyped_storage().resize_(0)


def _refill(hooks: dict[int, Any], content: Mapping[int, Any]) -> None:
    hooks.clear()
    hooks.update(content)


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
            [self._rows(x, shard, self._longest(shard)).reshape(-1) for x, shard in zip(pieces, self._shards, strict=True)]
        )
        group = self.group(Shard)
        whole = packed.new_empty(dist.get_world_size(group), packed.numel())
        with self._ranks.exchange():
            dist.all_gather_into_tensor(whole.view(-1), packed, group=group)
        S, start, tensors = len(pieces[0]), 0, []
        for shard in self._shards:
            axis, longest = _axis(shard), self._longest(shard)
            rest = [n for k, n in enumerate(shard.shape) if k != axis]
            stop = start + S * longest * math.prod(rest)
            rows = (
                whole[:, start:stop].view(len(whole), S, longest, *rest).movedim(0, 1).flatten(1, 2)
            )  # (S, ranks x longest, *rest)
            tensors.append(rows[:, : shard.shape[axis]].movedim(1, axis + 1))
            start = stop
        return tensors

    def scatter(self, terms: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's pieces of the sums over the ranks: (S, *shape) to (S, *piece)."""
        if not terms:
            return []
        group = self.group(Shard)
        size, S, columns = dist.get_world_size(group), len(terms[0]), []
        for x, shard in zip(terms, self._shards, strict=True):
            rows = self._rows(x, shard, size * self._longest(shard))
            columns.append(rows.unflatten(1, (size, -1)).movedim(1, 0).reshape(size, -1))
        packed = torch.cat(columns, 1)
        total = packed.new_empty(packed.shape[1])
        with self._ranks.exchange():
            dist.reduce_scatter_tensor(total, packed.view(-1), group=group)
            if self._shards[0].device_mesh.ndim > 1:
                dist.all_reduce(total, group=self.group(Replicate))
        pieces, start = [], 0
        for shard in self._shards:
            axis, local = _axis(shard), shard.to_local()
            rest = [n for k, n in enumerate(shard.shape) if k != axis]
            stop = start + S * self._longest(shard) * math.prod(rest)
            rows = total[start:stop].view(S, self._longest(shard), *rest)[:, : local.shape[axis]]
            pieces.append(rows.movedim(1, axis + 1))
            start = stop
        return pieces

    def group(self, kind: type[Placement]) -> dist.ProcessGroup:
        """Return the ranks that hold different pieces (Shard), or those that hold the same one (Replicate)."""
        mesh, placements = self._shards[0].device_mesh, self._shards[0].placements
        return mesh.get_group(next(k for k, p in enumerate(placements) if isinstance(p, kind)))

    def _longest(self, shard: DTensor) -> int:
        return -(-shard.shape[_axis(shard)] // dist.get_world_size(self.group(Shard)))

    @staticmethod
    def _rows(x: Tensor, shard: DTensor, length: int) -> Tensor:
        """Return a stack of pieces with the sharded axis behind the first one, filled up to a length."""
        rows = x.movedim(_axis(shard) + 1, 1)
        return torch.cat([rows, rows.new_zeros(len(rows), length - rows.shape[1], *rows.shape[2:])], 1)


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
        self._names = {at: name for name, at in ids.items()}
        names = {p.untyped_storage()._cdata: name for name, p in self._model.whole.items()}
        read = []
        for segment in segments:
            places = {at for a in segment.applications for at in (*a.inputs, a.output) if at is not None}
            held = (x for a in segment.applications for x in vars(a.primitive).values() if isinstance(x, Tensor))
            values = [*(trace.values[at] for at in places), *held]
            views = {names.get(x.untyped_storage()._cdata) for x in values if x.layout is torch.strided}
            read.append({name for name in names.values() if name in views or ids.get(name) in places})
        of_ranks = self._model.ranks.gather(read)  # experts without a token on one rank may have some on another
        who, counts = self._model.ranks.who, [len(of_rank) for of_rank in of_ranks]
        if len(set(counts)) > 1:
            raise InputError(
                f"{who}: the ranks' batches cut the model into {counts} segments; give all ranks batches of one shape"
            )
        converted = next((name for name, at in ids.items() if self.values[at].dtype != self._model.shards[name].dtype), None)
        if converted is not None:
            raise InputError(
                f"{who}: {converted!r} is {self._model.shards[converted].dtype}, and the model also computes in "
                f"{self.values[ids[converted]].dtype}; bring a sharded model to that type, e.g. model.float() before fully_shard"
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
            terms = [total.close().to(rows.dtype).mul_(self._weight) for total in sums.values()]
            sums.clear()
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
