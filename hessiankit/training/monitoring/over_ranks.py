"""A monitor of a model that ``fully_shard`` has spread: all ranks measure, rank 0 writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hessiankit.training.fsdp import unwrapped
from hessiankit.training.ranks import Ranks
from hessiankit.training.sharpness.batches import MicroBatch
from hessiankit.training.sharpness.options import SharpnessOptions
from hessiankit.training.sharpness.over_ranks import local_batches, loss_of_ranks

WHO = "monitor"


class MonitorRanks(Ranks):
    """The processes that train a model, all of the program."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(WHO)
        self._model = unwrapped(WHO, model)

    def batches(self, data: Any) -> list[tuple[Any, Tensor]]:
        """Return this rank's batches, none without data."""
        return [(batch.inputs, batch.target) for batch in local_batches(self, self._model, data, None, SharpnessOptions())]

    def loss(self, batches: Sequence[tuple[Any, Tensor]]) -> float:
        """Return the mean cross entropy over the labels of all ranks that count."""
        cut = [MicroBatch(inputs, target, tuple(range(len(target)))) for inputs, target in batches]
        return loss_of_ranks(self, self._model, cut)
