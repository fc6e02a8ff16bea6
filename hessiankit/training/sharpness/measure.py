"""``sharpness``: the average sharpness of each block type, from drawn labels with an interval, or exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hessiankit.curvature.diagonal import hessian_diagonal
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.support.arguments import check_whole, checked, is_sharded
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell
from hessiankit.training.partition import Part
from hessiankit.training.sharpness.batches import BatchedLoss, check_devices, evaluating
from hessiankit.training.sharpness.options import EXACT, WHO, SharpnessOptions, measured_parts
from hessiankit.training.sharpness.probe import probe, watch_lookups
from hessiankit.training.sharpness.replicate import Replicates, SquaredGradients, read, replicates
from hessiankit.training.sharpness.sharpness_report import SharpnessReport, report_of


@checked("sharpness", sharded=True)
def sharpness(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    loss: str = "cross_entropy",
    draws: int = 8,
    seed: int = 0,
    per: str = "token",
    kind: str = "fisher-mc",
    micro_batch: int | None = None,
    parts: Iterable[Part] | None = None,
    confidence: float = 0.95,
    histograms: bool = False,
    numbers: Iterable[int] | None = None,
    shift: bool | None = None,
    progress: Tell | None = None,
    exact: bool = False,
    preconditioner: Any = None,
    group: dist.ProcessGroup | None = None,
) -> SharpnessReport:
    r"""Return the average sharpness S = Tr h / # of each block type, eq. (3)-(4) of The Sharpness Disparity Principle.

    L = (1/N) sum_n -log p(y_n) over N terms, with every y_n drawn independently from the model's own softmax at temperature 1,
    and h = N grad L (.) grad L. The mean of h over the labels is the diagonal of the Fisher information of one term, which is
    the Gauss-Newton matrix of the loss (sharpness-disparity/eq3, sharpness-disparity/fisher-is-gauss-newton). h is squared in
    each micro-batch and then averaged, with the numbers of terms as weights: the same mean, and a smaller variance the smaller
    the micro-batches are (ours/eq3-micro-batches). A micro-batch costs a forward pass, and a draw a backward pass.

    Args:
        model: Any module that maps inputs to logits: a tensor (B, ..., C), an object with ``.logits``, or a tuple that
            begins with them. It is in evaluation mode during the call; modes and ``.grad`` are left as they were. Frozen
            parameters are left out, and named in the report.
        data: Inputs, with ``target``; a pair (inputs, target); a mapping of keyword arguments with ``labels``, as Hugging Face's
            collators make it; or an iterable of those. Sequences lie along axis 0.
        target: Labels of the shape of the logits without their last axis; -100 is not counted. With drawn labels, only the
            places of -100 are used. For squared error a tensor of the output's shape.
        loss: ``"cross_entropy"``, or ``"mse"``, the mean of (f - y)^2 over all entries: y is then drawn from a Gaussian of
            variance 1/2 around f, whose Fisher information is the Gauss-Newton matrix (2 / N) J^T J.
        draws: Draws of the labels; with one draw there is no standard error, and fewer than four give no sure intervals.
        seed: The label of a token is a function of seed, draw, number of its sequence and position, so it does not depend on how
            the data are split.
        per: Term of the mean: ``"token"`` (for squared error an entry), or ``"sequence"``: L is then the mean over
            sequences of the sum over a sequence's tokens, which makes every S larger by the tokens per sequence
            (sharpness-disparity/eq3-b).
        kind: ``"fisher-mc"``; ``"fisher-empirical"``: the same with the labels of the data, which is no estimate of the Fisher
            information (sharpness-disparity/eq3-labels); or, exactly and for models small enough for
            :func:`hessiankit.hessian_diagonal`, ``"ggn"``, which is ``"fisher"``, what infinitely many draws would give, and
            ``"hessian"``, the second derivative of the loss with the data's labels, which may be negative. Options of draws and
            labels are then refused.
        micro_batch: Sequences in a micro-batch; None takes each batch of ``data`` whole.
        parts: The parts that get a number each; by default ``hessiankit.training.partition.model_parts(model)``, with the flow of
            ``data`` where modules and names do not give all types.
        confidence: Coverage probability of the intervals; how often they hold is measured in ``docs/intervals.md``.
        histograms: Whether to add up h entry by entry for the histograms and the share of exact zeros, which takes as much memory
            as the parameters.
        numbers: The numbers of the sequences in the whole data, if ``data`` are a part of it.
        shift: Whether the labels of a mapping are compared one place later; None: as the model's own loss does.
        progress: Called with (what, done, total), e.g. what :func:`hessiankit.support.progress.progress_bar` yields.
        exact: Whether to compute exact values, as with ``kind="ggn"``.
        preconditioner: A diagonal P, for S in its metric, the mean of h / P: the torch optimizer that trains the model, or one
            tensor for each parameter by name, as in :func:`hessiankit.spectrum`. ||theta||^2 is then theta^T P theta.
        group: Process group whose ranks measure together, each on its own ``data`` (``[]``: none), and get the same report:
            ``torch.distributed.group.WORLD`` are all processes. None: this process alone, or all processes where ``fully_shard``
            has spread the model. Options are the same on every rank, except ``micro_batch``, ``progress`` and ``numbers``; by
            default rank 0 has the first sequences, rank 1 those after them. What equals what: ``docs/distributed.md``.

    Raises:
        InputError: If an argument cannot be used, or an output or a gradient is not finite; on all ranks of a group.
        RankError: If another rank stopped, or did not answer before the process group's time-out.
        TraceError: If exact values are asked for and torch cannot trace the model.

    Two classes with equal probability and one weight each: the scores are (x/2, -x/2) up to sign whatever is drawn, so that h is
    x^2 / 4 without error.

    >>> import torch
    >>> from hessiankit.training.partition import Part
    >>> model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    >>> _ = nn.init.zeros_(model.weight)
    >>> x, labels = torch.full((1, 1), 6.0, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    >>> report = sharpness(model, x, labels, parts=[Part("weight", "Head", "head", None, "the only one", 2)])
    >>> report.types["Head"].value, report.types["Head"].standard_error
    (9.0, 0.0)
    """
    is_exact = exact or kind in EXACT
    options_of_call = partial(
        SharpnessOptions,
        loss=loss,
        draws=draws,
        seed=seed,
        per=per,
        kind="fisher-mc" if is_exact else kind,
        micro_batch=micro_batch,
        parts=parts,
        histograms=histograms,
        numbers=numbers,
        shift=shift,
        progress=progress,
        preconditioner=preconditioner,
    )
    if group is not None or is_sharded(model):
        if is_exact:
            raise InputError("sharpness: exact values are those of one process; leave exact= and kind= out over several ranks")
        from hessiankit.training.sharpness.over_ranks import replicates_of_ranks  # loads as long as torch itself

        result = replicates_of_ranks(model, data, target, options_of_call, group, confidence=confidence)
        return report_of(result, confidence=confidence)
    check_whole("sharpness", model)
    options = options_of_call()
    if not is_exact:
        return report_of(replicates(model, data, target, options), confidence=confidence)
    label_options: dict[str, Any] = {"draws": (draws, 8), "seed": (seed, 0), "numbers": (numbers, None)}
    label_options |= {"kind": (kind, "fisher-mc")} if exact and kind != "ggn" else {}
    if names := [name for name, (value, default) in label_options.items() if value != default]:
        request = "exact=True" if exact else f"kind={kind!r}"
        raise InputError(f"sharpness: {names[0]}= is for drawn labels, and {request} draws none; leave one out")
    return report_of(_exact_replicates(model, data, target, "ggn" if exact else kind, options))


def _exact_replicates(model: nn.Module, data: Any, target: Any, kind: str, options: SharpnessOptions) -> Replicates:
    """Return the means of h over all labels, as one draw, from :func:`hessiankit.hessian_diagonal`: no sampling."""
    start = time.perf_counter()
    batches = read(model, data, target, options)
    for batch in batches:
        check_devices(WHO, batch, model)
    selection = measured_parts(model, options.parts, options.preconditioner, batches[0])
    pairs, tokens, sequences = [], 0, 0
    with evaluating(model), torch.no_grad():
        with watch_lookups(model, selection.parts) as lookups:
            probe(model, batches, backward=False, copies=0)
            for inputs, labels in BatchedLoss(WHO, model, tuple(batches), options.loss).pairs():
                is_term = torch.ones_like(labels) if options.loss == "mse" else labels != IGNORE_INDEX
                if int(is_term.sum()):
                    tokens += int(is_term.sum())
                    sequences += int(is_term.reshape(len(labels), -1).any(1).sum())
                    pairs.append((inputs, labels))
            row_masks = {name: mask.cpu() for name, mask in lookups.items()}
        names = list(selection.parameters)
        diagonal = hessian_diagonal(model, pairs, loss=options.loss, kind=kind, params=names, max_products=None).values
    terms = tokens if options.per == "token" else sequences
    diagonal = selection.in_metric(selection.in_metric({name: x * (tokens / terms) for name, x in diagonal.items()}))
    values = [sum(float(view.double().sum()) for view in part.of(diagonal[part.parameter])) for part in selection.parts]
    sums = SquaredGradients(selection, options)
    sums.begin(terms, sequences, math.inf)
    sums.values = [torch.tensor([values], dtype=torch.float64, device="cpu")]
    sums.rows = {name: terms * diagonal[name].double().flatten(1).sum(1).cpu().unsqueeze(0) for name in row_masks}
    sums.entries = {name: x * terms for name, x in diagonal.items()} if options.histograms else {}
    sums.unused.clear()
    return replace(sums.replicates(row_masks, start), kind=kind, seed=0)
