"""The same report without an error, from the exact diagonal of the Gauss-Newton matrix or of the Hessian."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.arguments import checked
from hessiankit.diagonal import curvature_diagonal
from hessiankit.errors import InputError
from hessiankit.estimation.batches import IGNORED, aligned, check_devices, micro_batches
from hessiankit.estimation.calling import evaluating, forward
from hessiankit.estimation.lookups import watch_lookups
from hessiankit.estimation.probe import probe
from hessiankit.estimation.replicate import LOSSES, PER, Replicates, chosen_parts
from hessiankit.estimation.report import SharpnessReport, report_of
from hessiankit.parts import Part
from hessiankit.request.kinds import KINDS

WHO = "exact_sharpness"


@checked("exact_sharpness")
def exact_sharpness(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    loss: str = "cross_entropy",
    per: str = "token",
    kind: str = "ggn",
    micro_batch: int | None = None,
    parts: Iterable[Part] | None = None,
    histograms: bool = False,
    shift: bool | None = None,
) -> SharpnessReport:
    """Return the report that infinitely many draws of :func:`hessiankit.sharpness` would give, for small models.

    The diagonal comes from :func:`hessiankit.curvature_diagonal`: closed forms and no sampling.

    Args:
        model: As in :func:`hessiankit.sharpness`, like all arguments that are not explained here.
        data: One batch or several.
        target: The target of one batch.
        loss: ``"cross_entropy"`` or ``"mse"``.
        per: ``"token"`` or ``"sequence"``.
        kind: ``"ggn"``, the mean of h, which does not depend on the labels; or ``"hessian"``, the second derivative of the
            loss with the data's labels, which may be negative.
        micro_batch: Sequences that the model is called with at once; the result does not depend on it.
        parts: What is told apart.
        histograms: Whether to make histograms of the diagonal's entries.
        shift: Whether the labels of a mapping are the tokens themselves.

    Raises:
        InputError: If an argument cannot be used.
        TraceError: If torch cannot trace the model.

    >>> model = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    >>> _ = nn.init.zeros_(model.weight)
    >>> x, labels = torch.full((1, 1), 6.0, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    >>> part = Part("weight", "Head", "head", None, "the only one", 2)
    >>> round(exact_sharpness(model, x, labels, parts=[part]).types["Head"].value, 12)
    9.0
    """
    start = time.perf_counter()
    for name, value, known in (("loss", loss, LOSSES), ("per", per, PER), ("kind", kind, KINDS)):
        if value not in known:
            raise InputError(f"{WHO}: {name}={value!r} is not known; pass one of {', '.join(map(repr, known))}")
    chosen, parameters, frozen = chosen_parts(model, parts)
    pairs, tokens, sequences = [], 0, 0
    batches = micro_batches(WHO, data, target, micro_batch=micro_batch, shift=shift)
    with evaluating(model, WHO), torch.no_grad():
        with watch_lookups(model, chosen) as seen:
            for batch in batches:
                check_devices(WHO, batch, model)
            for batch in probe(WHO, model, batches, backward=False, copies=0):
                beside = aligned(WHO, batch, forward(model, batch, WHO).shape, loss)
                counted = torch.ones_like(beside) if loss == "mse" else beside != IGNORED
                if int(counted.sum()):
                    tokens += int(counted.sum())
                    sequences += int(counted.reshape(len(beside), -1).any(1).sum())
                    pairs.append((batch.inputs, beside))
            if not pairs:
                raise InputError(f"{WHO}: every label is {IGNORED} (not counted); keep at least one")
            looked_up = {name: mask.cpu() for name, mask in seen.items()}
        diagonal = curvature_diagonal(model, pairs, loss=loss, kind=kind, params=list(parameters), max_products=None).values
    terms = tokens if per == "token" else sequences
    diagonal = {name: x * (tokens / terms) for name, x in diagonal.items()}
    values = [sum(float(view.double().sum()) for view in part.of(diagonal[part.parameter])) for part in chosen]
    own = Replicates(
        chosen,
        torch.tensor(values, dtype=torch.float64).reshape(1, 1, -1),
        torch.tensor([terms]),
        torch.stack([part.squared_norm(parameters[part.parameter].detach()).cpu() for part in chosen]),
        {name: _row_sums(diagonal[name], terms) for name in looked_up},
        looked_up,
        {name: x * terms for name, x in diagonal.items()} if histograms else {},
        sequences,
        per,
        loss,
        kind,
        0,
        frozen,
        (),
        time.perf_counter() - start,
    )
    return report_of(own)


def _row_sums(diagonal: Tensor, terms: int) -> Tensor:
    return terms * diagonal.double().flatten(1).sum(1).cpu().unsqueeze(0)
