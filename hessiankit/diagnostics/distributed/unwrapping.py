"""The plain module inside DistributedDataParallel, and a whole replica of a model sharded by FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hessiankit.diagnostics.distributed.ranks import Ranks
from hessiankit.support.errors import InputError


def unwrapped(who: str, model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, or the model itself.

    Raises:
        InputError: For the first generation of FSDP, whose flat parameters have lost their names.
    """
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


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model has parameters that are spread over the ranks (FSDP2's ``fully_shard``)."""
    return any(isinstance(m, FSDPModule) for m in model.modules()) or any(isinstance(p, DTensor) for p in model.parameters())


@torch.no_grad()
def filled(ranks: Ranks, model: nn.Module, replica: nn.Module | None) -> nn.Module:
    """Write the whole parameters and buffers of a sharded model into a plain one, on every rank, and return that.

    Memory: on each rank the replica, and one whole parameter at a time beside it.

    Args:
        ranks: The ranks.
        model: The sharded model.
        replica: A module of the same architecture that is not sharded. Its values are overwritten, its mode becomes the
            model's.
    """

    def check() -> nn.Module:
        if replica is None:
            raise InputError(
                f"{ranks.who}: the model is sharded by fully_shard, and products need it whole; pass replica=, the same "
                "architecture built once more, which the parameters are written into (each rank has to have room for it)"
            )
        if is_sharded(replica):
            raise InputError(f"{ranks.who}: replica is sharded too; build it without fully_shard")
        sharded, own = _shapes(model), _shapes(replica)
        different = next((name for name in {**sharded, **own} if sharded.get(name) != own.get(name)), None)
        if different is not None:
            raise InputError(
                f"{ranks.who}: {different!r} is {own.get(different, 'missing')} in replica and "
                f"{sharded.get(different, 'missing')} in the model; expected the same architecture and dtype"
            )
        return replica

    found = ranks.together(check)
    targets = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        with ranks.exchange():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
        targets[name].copy_(whole)
    for copy, original in zip(found.modules(), model.modules(), strict=True):
        copy.training = original.training
    return found


def _shapes(model: nn.Module) -> dict[str, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: f"{tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}" for name, x in named}
