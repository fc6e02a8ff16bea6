"""Sharpness where every rank holds the whole model: each measures its own micro-batches, and the replicates are put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.distributed.ranks import Ranks
from hessiankit.errors import InputError
from hessiankit.estimation.replicate import Replicates, joined


def replicated(ranks: Ranks, model: nn.Module, measure: Callable[[], Replicates] | None) -> Replicates:
    """Return the replicates of all ranks' micro-batches, rank by rank, to every rank.

    What is sent: for each micro-batch and draw one number a part, for each embedding one number a draw and row, and with
    histograms one number an entry of the model.

    Args:
        ranks: The ranks.
        model: The same model on every rank.
        measure: Returns this rank's replicates; None where its share holds nothing that counts.

    Raises:
        InputError: On every rank, as the first rank raised it that could not measure.
    """
    own = ranks.together(lambda: None if measure is None else measure())
    found: list[Replicates] = [one for one in ranks.gather(own and replace(own, entries={})) if one is not None]
    if not found:
        raise InputError(f"{ranks.who}: no rank holds a label that counts; pass data on one of them at least")
    dtypes = ranks.gather(None if own is None else {name: total.dtype for name, total in own.entries.items()})
    wanted: dict[str, torch.dtype] = next(held for held in dtypes if held is not None)
    entries = {name: ranks.sum(_own(own, model, name, dtype)) for name, dtype in wanted.items()}
    return replace(joined(found), entries=entries)


def _own(own: Any, model: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    if own is not None:
        return own.entries[name]  # type: ignore[no-any-return]
    return torch.zeros_like(model.get_parameter(name), dtype=dtype, requires_grad=False)
