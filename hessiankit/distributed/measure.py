"""``sharpness`` of a model whose data, or whose parameters, are spread over several processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hessiankit.distributed.agreement import check_same_tensors, check_versions
from hessiankit.distributed.ranks import Ranks
from hessiankit.distributed.replicated import replicated
from hessiankit.distributed.sharded import sharded
from hessiankit.distributed.shares import counts, share
from hessiankit.distributed.unwrapping import is_sharded, unwrapped
from hessiankit.errors import InputError
from hessiankit.estimation.replicate import Replicates, check_options, replicates
from hessiankit.estimation.report import SharpnessReport, report_of
from hessiankit.parts import Part
from hessiankit.progress import Tell

WHO = "sharpness"


def sharpness(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    loss: str = "cross_entropy",
    draws: int = 8,
    seed: int = 0,
    per: str = "token",
    estimator: str = "fisher",
    micro_batch: int | None = None,
    parts: Iterable[Part] | None = None,
    confidence: float = 0.95,
    histograms: bool = False,
    numbers: Iterable[int] | None = None,
    shift: bool | None = None,
    progress: Tell | None = None,
    group: dist.ProcessGroup | None = None,
) -> SharpnessReport:
    """Return the average sharpness of each block type over the data of all ranks: the same report on every rank.

    It equals what :func:`hessiankit.sharpness` gives one process that has all the data and the same micro-batches: the label
    of a token depends on the seed, the draw, the number of its sequence and its position, not on who draws it, and a
    micro-batch counts by its terms among all ranks' terms. What a micro-batch is:

    - Where every rank holds the whole model (a plain module, or DistributedDataParallel), it is a micro-batch of one rank. The
      one process would be given rank 0's batches, then rank 1's, and so on.
    - Where ``fully_shard`` has spread the parameters, it is the union of the ranks' micro-batches at the same step, as in
      training. The one process would be given these unions, and ``numbers`` to tell it which sequence is which.

    Args:
        model: The same model on every rank.
        data: This rank's data, as in :func:`hessiankit.sharpness`; ``[]`` where it has none. Shares may differ in size.
        target: Labels of one batch.
        loss: As in :func:`hessiankit.sharpness`, like all options down to ``progress``; the same on every rank.
        draws: Draws of the labels.
        seed: Of the labels.
        per: ``"token"`` or ``"sequence"``.
        estimator: ``"fisher"`` or ``"empirical_fisher"``.
        micro_batch: Sequences of this rank in a micro-batch.
        parts: What is told apart; by default ``model_parts`` of the model.
        confidence: Of the intervals.
        histograms: Whether to make histograms.
        numbers: The numbers of this rank's sequences in the whole data; by default rank 0 has the first ones, rank 1 those
            after them. A ``DistributedSampler`` without shuffling gives rank r the numbers r, r + size, r + 2 size, ...
        shift: Whether the labels of a mapping are compared one place later.
        progress: Called with (what, done, total), on the ranks that pass it.
        group: The process group; by default all processes. Without torch.distributed, the only process.

    Raises:
        InputError: On every rank, the same line, if an argument of any rank cannot be used, or if the ranks hold different
            models or pass different options.
        RankError: If another rank stopped, or did not answer before the process group's time-out.

    One process, and the example of :func:`hessiankit.sharpness`:

    >>> import torch
    >>> model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    >>> _ = nn.init.zeros_(model.weight)
    >>> x, labels = torch.full((1, 1), 6.0, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    >>> sharpness(model, x, labels, parts=[Part("weight", "Head", "head", None, "the only one", 2)]).types["Head"].value
    9.0
    """
    ranks = Ranks(WHO, group)
    parts = None if parts is None else tuple(getattr(parts, "parts", parts))
    check_versions(ranks)
    ranks.agree(
        loss=loss, draws=draws, seed=seed, per=per, estimator=estimator, confidence=confidence, histograms=histograms, shift=shift
    )
    module = ranks.together(lambda: _checked(model, loss, draws, seed, per, estimator))
    ranks.agree(**{"whether fully_shard has spread the parameters": is_sharded(module)})
    data = list(data) if isinstance(data, Iterable) and not isinstance(data, (Tensor, Mapping, list, tuple)) else data
    batches = share(ranks, data, target, micro_batch=micro_batch, shift=shift, numbers=numbers)
    check_same_tensors(ranks, dict(module.named_buffers()), "buffer")
    if is_sharded(module):
        found, drawn = sharded(
            ranks,
            module,
            batches,
            loss=loss,
            draws=draws,
            seed=seed,
            per=per,
            estimator=estimator,
            parts=parts,
            histograms=histograms,
            progress=progress,
        )
        return replace(report_of(found, confidence=confidence), histograms=drawn)
    check_same_tensors(ranks, dict(module.named_parameters()), "parameter")

    def measure() -> Replicates:
        return replicates(
            module,
            data,
            target,
            loss=loss,
            draws=draws,
            seed=seed,
            per=per,
            estimator=estimator,
            micro_batch=micro_batch,
            parts=parts,
            histograms=histograms,
            numbers=[number for batch in batches for number in batch.numbers],
            shift=shift,
            progress=progress,
        )

    something = any(counts(batch, loss) for batch in batches)
    return report_of(replicated(ranks, module, measure if something else None), confidence=confidence)


def _checked(model: Any, loss: str, draws: int, seed: int, per: str, estimator: str) -> nn.Module:
    check_options(loss, draws, seed, per, estimator)
    if not isinstance(model, nn.Module):
        raise InputError(f"{WHO}: expected a torch.nn.Module, got {type(model).__name__}")
    return unwrapped(WHO, model)
