"""``sharpness`` of a model whose data, or whose parameters, are spread over several processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.data import read_data
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.training.distributed.ranks import Ranks, check_same_forward, check_same_tensors, check_versions, common
from hessiankit.training.distributed.sharded import is_sharded, labels_are_later, sharded_replicates, unwrapped
from hessiankit.training.sharpness.batches import MicroBatch
from hessiankit.training.sharpness.options import WHO, SharpnessOptions
from hessiankit.training.sharpness.replicate import Replicates, joined, read, replicates_of
from hessiankit.training.sharpness.sharpness_report import SharpnessReport, report_of


def local_batches(ranks: Ranks, module: nn.Module, data: Any, target: Any, options: SharpnessOptions) -> list[MicroBatch]:
    """Return this rank's micro-batches, none without data; sequences are numbered rank by rank, or as ``numbers`` says."""
    numbers = None if options.numbers is None else list(options.numbers)
    options = replace(options, numbers=numbers)
    has_none = data is None or (isinstance(data, (list, tuple)) and not data)
    if is_sharded(module):  # which one rank cannot call by itself
        data = ranks.together(lambda: [] if has_none else list(read_data(data, target, options.loss).pairs))
        target = None
        if options.shift is None:
            options = replace(options, shift=labels_are_later(ranks, module, data))
    batches = ranks.together(lambda: [] if has_none else read(module, data, target, options))
    ranks.agree(**{"numbers=": "not given" if numbers is None else "given"})
    numbers_by_rank = ranks.gather([number for batch in batches for number in batch.numbers])
    if numbers is None:
        first = sum(map(len, numbers_by_rank[: ranks.rank]))
        return [replace(batch, numbers=tuple(first + number for number in batch.numbers)) for batch in batches]
    counts = Counter(number for of_rank in numbers_by_rank for number in of_rank)
    duplicate = next((number for number, times in counts.items() if times > 1), None)
    if duplicate is not None:
        raise InputError(f"{ranks.who}: two ranks hold a sequence of number {duplicate}; give each sequence of all data its own")
    return batches


def replicated(ranks: Ranks, model: nn.Module, batches: list[MicroBatch], options: SharpnessOptions) -> Replicates:
    """Return the replicates of all ranks' micro-batches, rank by rank, on every rank.

    Communication: for each micro-batch and draw one number a part, for each embedding one number a draw and row, and with
    histograms one number an entry of the model.
    """
    counts = any(options.loss == "mse" or bool((batch.target != IGNORE_INDEX).any()) for batch in batches)
    local = ranks.together(lambda: replicates_of(model, batches, options) if counts else None)
    runs = [one for one in ranks.gather(local and replace(local, entries={})) if one is not None]
    if not runs:
        raise InputError(f"{ranks.who}: no rank holds a label that counts; pass data on one of them at least")
    dtypes = ranks.gather(None if local is None else {name: total.dtype for name, total in local.entries.items()})
    entries = {}
    for name, dtype in next(one for one in dtypes if one is not None).items():
        zeros = torch.zeros_like(model.get_parameter(name), dtype=dtype, requires_grad=False)
        entries[name] = ranks.sum(zeros if local is None else local.entries[name])
    return replace(joined(runs), entries=entries)


AGREED = ("loss", "draws", "seed", "per", "kind", "histograms", "shift")


@checked("sharpness", rest=SharpnessOptions, sharded=True)
def sharpness(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    confidence: float = 0.95,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> SharpnessReport:
    """Return the average sharpness of each block type over the data of all ranks: the same report on every rank.

    It equals what :func:`hessiankit.sharpness` gives one process that has all the data and the same micro-batches: the label
    of a token depends on the seed, the draw, the number of its sequence and its position, not on who draws it, and a
    micro-batch counts by its terms among all ranks' terms. Where every rank holds the whole model, a micro-batch is one of one
    rank, and the one process would be given rank 0's batches, then rank 1's, and so on. Where ``fully_shard`` has spread the
    parameters, it is the union of the ranks' micro-batches at the same step, as in training; the one process would be given
    these unions, and ``numbers``.

    Args:
        model: Model, the same on every rank: a plain module, DistributedDataParallel, or sharded by ``fully_shard``.
        data: This rank's data, as in :func:`hessiankit.sharpness`; ``[]`` where it has none. Shares may differ in size.
        target: Labels of one batch.
        confidence: Coverage probability of the intervals.
        group: The process group; by default all processes. Without torch.distributed, the only process.
        **options: Options of :func:`hessiankit.sharpness`, the same on every rank but for these: ``micro_batch``, the sequences
            of this rank in a micro-batch; ``progress``, called on the ranks that pass it; ``numbers``, the numbers of this rank's
            sequences in the whole data, by default rank 0 has the first ones, rank 1 those after them (a ``DistributedSampler``
            without shuffling gives rank r the numbers r, r + size, r + 2 size, ...).

    Raises:
        InputError: On every rank, the same line, if an argument of any rank cannot be used, or if the ranks hold different
            models or pass different options.
        RankError: If another rank stopped, or did not answer before the process group's time-out.

    >>> import torch
    >>> from hessiankit.training.partition import Part
    >>> model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    >>> _ = nn.init.zeros_(model.weight)
    >>> x, labels = torch.full((1, 1), 6.0, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    >>> sharpness(model, x, labels, parts=[Part("weight", "Head", "head", None, "the only one", 2)]).types["Head"].value
    9.0
    """
    ranks = Ranks(WHO, group)
    check_versions(ranks)

    def checked_options() -> SharpnessOptions:
        local = SharpnessOptions(**options)
        if local.preconditioner is not None:
            raise InputError(f"{WHO}: preconditioner= is read by one process; leave it out over several ranks")
        return local

    settings = ranks.together(checked_options)
    ranks.agree(**{name: getattr(settings, name) for name in AGREED}, confidence=confidence)
    module = ranks.together(lambda: unwrapped(WHO, model))
    ranks.agree(**{"whether fully_shard has spread the parameters": is_sharded(module)})
    cut = local_batches(ranks, module, data, target, settings)
    check_same_tensors(ranks, dict(module.named_buffers()), "buffer")
    if is_sharded(module):
        return report_of(sharded_replicates(ranks, module, cut, settings), confidence=confidence)
    check_same_tensors(ranks, dict(module.named_parameters()), "parameter")
    if ranks.size > 1:
        first = [one.part(slice(0, 1)).on(torch.device("cpu")) for one in cut[:1]]
        check_same_forward(ranks, module, common(ranks, first))
    return report_of(replicated(ranks, module, cut, settings), confidence=confidence)
