"""``sharpness``: the average sharpness of each block type, with its error."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hessiankit.arguments import checked
from hessiankit.estimation.replicate import replicates
from hessiankit.estimation.report import SharpnessReport, report_of
from hessiankit.parts import Part
from hessiankit.progress import Tell


@checked("sharpness")
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
) -> SharpnessReport:
    r"""Return the average sharpness S = Tr h / # of each block type, eq. (3)-(4) of The Sharpness Disparity Principle.

    L = (1/N) sum_n -log p(y_n) over N terms, with every y_n drawn independently from the model's own softmax at temperature 1,
    and h = N grad L (.) grad L. The mean of h over the labels is the diagonal of the Fisher information of one term, which is
    the Gauss-Newton matrix of the loss (claims E1, E9). The forward pass is done once for each micro-batch, and a draw costs one
    backward pass. h is squared in each micro-batch and then averaged, with the numbers of terms as weights: the
    same mean, and a smaller variance the smaller the micro-batches are (claim E8).

    Args:
        model: Any module that maps inputs to logits: a tensor (B, ..., C), an object with ``.logits``, or a tuple that
            begins with them. It is in evaluation mode during the call; modes and ``.grad`` are left as they were. Frozen
            parameters are left out, and named in the report.
        data: Inputs, with ``target``; a pair (inputs, target); a mapping of keyword arguments with ``labels``, as Hugging Face's
            collators make it (logits at one place are compared with the label at the next one); or an iterable of
            those. Sequences lie along axis 0.
        target: Labels of the shape of the logits without their last axis; -100 is not counted. With drawn labels, nothing
            else of them is used. For squared error a tensor of the output's shape.
        loss: ``"cross_entropy"``, or ``"mse"``, the mean of (f - y)^2 over all entries: y is then drawn from a Gaussian of
            variance 1/2 around f, whose Fisher information is the Gauss-Newton matrix (2 / N) J^T J.
        draws: Draws of the labels; with one draw there is no standard error.
        seed: The label of a token is a function of seed, draw, number of its sequence and position, so it does not depend on how
            the data are split.
        per: What a term is: ``"token"`` (for squared error an entry), or ``"sequence"``: L is then the mean over
            sequences of the sum over a sequence's tokens, which makes every S larger by the tokens per sequence (claim E5).
        estimator: ``"fisher"``, or ``"empirical_fisher"``: the same with the labels of the data, which is no estimate of the
            Fisher information (claim E2) and depends on the micro-batches.
        micro_batch: Sequences in a micro-batch; None takes each batch of ``data`` whole.
        parts: What is told apart; by default ``hessiankit.parts.model_parts(model)``.
        confidence: Of the intervals.
        histograms: Whether to add up h entry by entry for the histograms and the share of exact zeros, which takes as much memory
            as the parameters, and on a small batch longer than a draw.
        numbers: The numbers of the sequences in the whole data, if ``data`` are a part of it.
        shift: Whether the labels of a mapping are compared one place later; None: where they are sequences.
        progress: Called with (what, done, total), e.g. what :func:`hessiankit.progress.progress_bar` yields.

    Raises:
        InputError: If an argument cannot be used, or an output or a gradient is not finite.

    Two classes with equal probability and one weight each: the scores are (x/2, -x/2) up to sign whatever is drawn, so that h is
    x^2 / 4 without error.

    >>> import torch
    >>> from hessiankit.parts import Part
    >>> model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    >>> _ = nn.init.zeros_(model.weight)
    >>> x, labels = torch.full((1, 1), 6.0, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    >>> report = sharpness(model, x, labels, parts=[Part("weight", "Head", "head", None, "the only one", 2)])
    >>> report.types["Head"].value, report.types["Head"].standard_error
    (9.0, 0.0)
    """
    found = replicates(
        model,
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
        numbers=numbers,
        shift=shift,
        progress=progress,
    )
    return report_of(found, confidence=confidence)
