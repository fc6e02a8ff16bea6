"""Models in DistributedDataParallel, and models whose parameters FSDP2's ``fully_shard`` has spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from hessiankit.support.errors import InputError
from hessiankit.training.ranks import Ranks


def unwrapped(who: str, model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the model itself; refuse FSDP's first generation."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        raise InputError(
            f"{who}: the model is FullyShardedDataParallel, which flattens parameters; shard it with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    reshard(model)
    return model


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP2 keeps after a forward pass, so that ``parameters()`` are the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Save the caller's gradients and restore them afterwards; yield a function that clears those of a backward pass.

    ``model.zero_grad()`` would not: after a forward pass the outermost module's parameters are the gathered ones.
    """
    gradients = [(p, p.grad) for p in model.parameters()]

    def clear() -> None:
        for p, _ in gradients:
            p.grad = None

    try:
        clear()
        yield clear
    finally:
        reshard(model)
        for p, gradient in gradients:
            p.grad = gradient
