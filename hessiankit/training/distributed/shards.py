"""A model that ``fully_shard`` has spread over the ranks, as products read it: a layer at a time.

An all-gather fills the parameters that the steps of a segment read (:mod:`hessiankit.engine.paged_parameters`), and their
directions; the derivatives with respect to them are reduced and scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hessiankit.engine.paged_parameters import PagedModel, PagedParameters, refill
from hessiankit.support.errors import InputError
from hessiankit.support.inner_products import Vectors
from hessiankit.training.fsdp import check_layout
from hessiankit.training.ranks import Ranks


class ShardedModel(PagedModel):
    """A model after ``fully_shard``, with a whole parameter for each sharded one.

    Within :meth:`plain` each rank gathers what it reads, when it reads it, and the others take part (:class:`ReadingRanks`): no
    rank holds all parameters, and an error on one of them leaves none waiting. Products know what all ranks read, and when.

    Attributes:
        ranks: The ranks; within :meth:`plain` they take part in what others read.
        shards: Sharded parameters, detached, by name.
        position: Number of this rank's piece.
        replicas: Number of ranks that hold the same piece.
    """

    def __init__(self, ranks: Ranks, module: nn.Module) -> None:
        self.ranks, self.shards = ReadingRanks(ranks, self), dict[str, DTensor]()
        super().__init__(ranks.who, module, next(module.parameters()).device)
        group = Bucket(ranks, list(self.shards.values())).group(Shard)
        self.position, self.replicas = dist.get_rank(group), ranks.size // dist.get_world_size(group)

    def _piece(self, name: str, parameter: Tensor) -> Tensor:
        check_layout(self.ranks, name, parameter)
        assert isinstance(parameter, DTensor)
        self.shards[name] = parameter
        return parameter.to_local()

    def like(self, name: str, piece: Tensor) -> DTensor:
        """Return a sharded tensor of this rank's piece, of the layout of a parameter."""
        shard = self.shards[name]
        mesh, layout = shard.device_mesh, shard.placements
        return DTensor.from_local(piece, mesh, layout, run_check=False, shape=shard.shape, stride=shard.stride())

    @contextmanager
    def plain(self) -> Iterator[nn.Module]:
        """Let the module be as before ``fully_shard``, with whole parameters, and neither hooks nor class of FSDP."""
        with ExitStack() as undo:
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    state = module._get_fsdp_state()
                    for hooks in (module._forward_pre_hooks, module._forward_hooks):
                        undo.callback(refill, hooks, dict(hooks))
                        for number in [number for number, hook in hooks.items() if getattr(hook, "__self__", None) is state]:
                            del hooks[number]
                    undo.callback(setattr, module, "__class__", type(module))
                    module.__class__ = type(module).__bases__[1]  # type: ignore[assignment]
            yield undo.enter_context(super().plain())

    def current(self) -> dict[str, Tensor]:
        return self.pieces

    def bring(self, names: Iterable[str]) -> None:
        """Gather parameters, which all ranks do together; within :meth:`plain` each does it by itself, for what it reads."""
        names = set(names)
        if not self.is_plain:
            self.take(names, names)
        elif names:
            self.ranks.read(names)

    def take(self, names: Iterable[str], wanted: Container[str]) -> None:
        """Gather parameters, which all ranks do together, and keep those that are wanted here."""
        for group in self._groups(sorted(names)):
            for name, value in zip(group, self.gathered(group, [self.pieces[n].unsqueeze(0) for n in group]), strict=True):
                if name in wanted:
                    self.fill(name, value[0])

    def gathered(self, names: Sequence[str], pieces: Sequence[Tensor]) -> list[Tensor]:
        rest, whole = iter(pieces), list[Tensor]()
        for group in self._groups(names):
            whole += Bucket(self.ranks, [self.shards[name] for name in group]).gather([next(rest) for _ in group])
        return whole

    def scattered(self, names: Sequence[str], terms: list[Tensor]) -> list[Tensor]:
        pieces = list[Tensor]()
        for group in self._groups(names):
            of_group = [terms.pop(0) for _ in group]
            pieces += Bucket(self.ranks, [self.shards[name] for name in group]).scatter(of_group)
        return pieces

    def _groups(self, names: Sequence[str]) -> list[list[str]]:
        """Return names in groups that one collective moves."""
        sizes = {name: self.shards[name].numel() for name in names}
        groups, room = list[list[str]](), 0.0
        for name, size in sizes.items():
            if size > room:
                groups.append([])
                room = GROUP * sum(sizes.values())
            groups[-1].append(name)
            room -= size
        return groups


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


class Pieces(Vectors):
    """Vectors of which each rank has a piece: its pieces of the parameters, one after the other.

    Args:
        model: Model whose parameters a vector has an entry for.
        names: Their names, in the order of the entries.
        ranks: The ranks, in the call that treats the vectors.
    """

    def __init__(self, model: ShardedModel, names: Sequence[str], ranks: Ranks) -> None:
        self._model, self._shards, self.ranks = model, [model.shards[name] for name in names], ranks

    def sum(self, terms: Tensor) -> Tensor:
        self.ranks.proceed()
        return self.ranks.sum(terms.clone()) / self._model.replicas

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
        self.ranks.proceed()
        factors = dict(self.ranks.gather((self._model.position, R.cpu())))
        first = sum(len(factors[k]) for k in range(self._model.position))
        Q_factors, R_total = super().qr(torch.cat([factors[k] for k in sorted(factors)]).to(Y))
        return Q @ Q_factors[first : first + len(R)], R_total


GROUP = 0.6
"""Share of a segment's parameters that one collective moves at most: half, and what is small beside it.

Its copies then fit where the sums of derivatives will be: a product holds 2.1 layers, in one collective 3.4.
"""
DRAWN = 2**20
"""Entries drawn at once: 8 MiB. A multiple of 16, as many as torch draws together on a CPU: parts are drawn as the whole is."""


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


class ShardedParameters(PagedParameters):
    """Memory of parameters that are gathered for the segments that read them."""

    def agree(self) -> None:
        """Let all ranks read in each segment what any of them does: experts without a token on one may have some on another."""
        ranks = self._model.ranks  # type: ignore[attr-defined]
        of_ranks, counts = zip(*ranks.gather((self._read, len(self._read))), strict=True)
        if len(set(counts)) > 1:
            raise InputError(
                f"{ranks.who}: the ranks' batches cut the model into {list(counts)} segments; give all ranks batches of one shape"
            )
        self._read = [sorted(set().union(*segment)) for segment in zip(*of_ranks, strict=True)]
