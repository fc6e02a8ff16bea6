"""One measurement, section by section: each takes the model as it is and returns plain values for a line of the file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.depth import depth_diagnostics
from hessiankit.estimation import Estimate
from hessiankit.estimation import sharpness as estimated
from hessiankit.monitoring.eigenvalue import top_eigenvalue
from hessiankit.monitoring.objective import Batch
from hessiankit.parts.part import Part


@torch.no_grad()
def norms(model: nn.Module, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the Euclidean norm of every part, of every block type and of all (The Sharpness Disparity Principle, Figure 8).

    Args:
        model: The model.
        parts: Its parts.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.constant_(layer.weight, 3.0)
    >>> norms(layer, [Part("weight", "FFN", "up", 0, "", 2)])["types"]
    {'FFN': 4.242640687119285}
    """
    values = dict(model.named_parameters())
    squares = {part: part.squared_norm(values[part.parameter]) for part in parts}
    types: dict[str, Tensor] = {}
    for part, square in squares.items():
        types[part.type] = types.get(part.type, torch.zeros_like(square)) + square
    return {
        "total": math.sqrt(sum(float(x) for x in types.values())),
        "types": {name: math.sqrt(float(x)) for name, x in types.items()},
        "tensors": {part.name: math.sqrt(float(x)) for part, x in squares.items()},
    }


def eigenvalue(model: nn.Module, batches: Sequence[Batch], **options: Any) -> dict[str, Any]:
    """Return the top eigenvalue of the loss's Hessian, its residual, and by which route it was found and why."""
    found, route, why = top_eigenvalue(model, batches, **options)
    record = {"value": found.value, "residual": found.residual, "products": found.products, "converged": found.converged}
    return {**record, "route": route, **({"why": why} if why else {})}


def sharpness(model: nn.Module, batches: Sequence[Batch], parts: Sequence[Part], **options: Any) -> dict[str, Any]:
    """Return the average sharpness with its intervals: by type, by layer, by type and layer, by tensor.

    Args:
        model: The model, in evaluation mode.
        batches: Pairs (inputs, labels); which labels count is read from them, their values are not.
        parts: The model's parts.
        **options: Of :func:`hessiankit.estimation.sharpness`.
    """
    report = estimated(model, list(batches), parts=parts, **options)
    by_type_and_layer: dict[str, dict[str, Any]] = {}
    for (name, layer), one in report.type_layers.items():
        by_type_and_layer.setdefault(name, {})[_layer(layer)] = _short(one)
    return {
        "types": {name: _whole(one) for name, one in report.types.items()},
        "layers": {_layer(layer): _whole(one) for layer, one in report.layers.items()},
        "type_layers": by_type_and_layer,
        "tensors": {name: _short(one) for name, one in report.tensors.items()},
        "scale_free": {name: _whole(one) for name, one in report.scale_free.items()},
        **({"seen_rows": _whole(report.seen_rows)} if report.seen_rows is not None else {}),
        "ordering": report.ordering,
        "terms": report.terms,
    }


def depth(model: nn.Module, batches: Sequence[Batch], what: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the depth diagnostics that were asked for, as :class:`hessiankit.depth.DepthReport` writes them.

    Args:
        model: The model, in evaluation mode.
        batches: Pairs (inputs, labels).
        what: Some of :data:`hessiankit.depth.QUANTITIES`.
        **options: Of :func:`hessiankit.depth.depth_diagnostics`.
    """
    found = depth_diagnostics(model, list(batches), what=tuple(what), **options).to_dict()
    return {name: part for name, part in found.items() if part is not None and name not in ("model", "memory", "seconds")}


def _layer(layer: int | None) -> str:
    return "outside" if layer is None else str(layer)


def _whole(one: Estimate) -> dict[str, float]:
    return {key: getattr(one, key) for key in ("value", "standard_error", "low", "high")}


def _short(one: Estimate) -> list[float]:
    return [one.value, one.standard_error]
