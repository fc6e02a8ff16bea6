"""Other people's architectures against automatic differentiation: ``python -m benchmarks.models --markdown docs/models.md``.

For every architecture of :mod:`benchmarks.architectures`, with both implementations of attention, on a padded batch with the
label -100 where there is padding: products of the Hessian in generic directions, in float64 beside reverse over reverse and
central differences of the gradient, and in bfloat16 beside the float64 product at the same parameters.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from benchmarks.architectures import ATTENTIONS, InDouble, Instance, build, names, quiet
from benchmarks.vision import vision, vision_names
from hessiankit.errors import HessiankitError
from benchmarks.tables import markdown

EXACT, DIFFERENCES, HALF = 1e-10, 1e-5, 0.3
"""What is allowed of the largest entry of a parameter's part of the product: to reverse over reverse; to central differences,
whose own error this is; in bfloat16."""
FLOORS = {torch.float64: 1e-5, torch.bfloat16: torch.finfo(torch.bfloat16).eps}
"""Of the whole product's largest entry: a parameter's part below it, such as that of a key's bias, is compared with this."""


@dataclass(frozen=True)
class Row:
    """What was found of one architecture.

    Attributes:
        name: "causal/llama" and the like.
        attention: "eager" or "sdpa".
        parameters: How many there are.
        float64: Largest error beside reverse over reverse.
        differences: Largest error beside central differences of the gradient.
        bfloat16: Largest error of the product in bfloat16 beside that in float64.
        autograd: The same of reverse over reverse in bfloat16.
        fallbacks: Operations without a closed form.
        reason: Why there is no number, where there is none.
        seconds: What it took.
    """

    name: str
    attention: str
    parameters: int = 0
    float64: float = math.nan
    differences: float = math.nan
    bfloat16: float = math.nan
    autograd: float = math.nan
    fallbacks: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether everything that was computed is within what is allowed."""
        pairs = ((self.float64, EXACT), (self.differences, DIFFERENCES), (self.bfloat16, HALF))
        return not self.reason and all(error <= allowed or math.isnan(error) for error, allowed in pairs)


def measure(name: str, attention: str, *, half: bool = True) -> Row:
    """Compare one architecture; a refusal is told by its message."""
    start = time.perf_counter()
    with quiet():
        instance = vision(name, attention) if name.startswith("timm/") else build(name, attention)
        found: dict[str, Any] = {"parameters": sum(p.numel() for p in leaves(instance.model))}
        try:
            found |= _compared(instance, half=half)
        except HessiankitError as error:
            found["reason"] = str(error)
        except Exception as error:  # the model itself, in this type
            found["reason"] = f"the model's own call: {type(error).__name__}: {str(error).splitlines()[0]}"
    return Row(name, attention, **found, seconds=time.perf_counter() - start)


def _compared(instance: Instance, *, half: bool) -> dict[str, Any]:
    module, batch = InDouble(instance.model), instance.batch
    vector = direction(module)
    gradient(module, batch)  # what the model itself raises comes before anything else
    operator = hk.hessian_operator(module, batch, loss=None)
    product = operator @ vector
    expected = twice(module, batch, vector)
    found: dict[str, Any] = {
        "float64": error(product, expected, module),
        "differences": error(differences(module, batch, vector), expected, module),
        "fallbacks": operator.fallbacks,
    }
    if half:
        low = copy.deepcopy(instance.model).to(torch.bfloat16)
        cast = {k: x.to(torch.bfloat16) if x.is_floating_point() else x for k, x in batch.items()}
        gradient(low, cast)
        mine = hk.hessian_operator(low, cast, loss=None) @ vector.float()
        found["bfloat16"] = error(mine.double(), product, module, torch.bfloat16)
        found["autograd"] = error(twice(low, cast, vector.bfloat16()).double(), product, module, torch.bfloat16)
    return found


def leaves(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters, in the order of the operator's entries."""
    return [p for p in module.parameters() if p.requires_grad]


def direction(module: nn.Module) -> Tensor:
    """Return a generic direction that bfloat16 holds exactly."""
    size = sum(p.numel() for p in leaves(module))
    return torch.randn(size, generator=torch.Generator().manual_seed(5)).bfloat16().double()


def gradient(module: nn.Module, batch: dict[str, Tensor], *, graph: bool = False) -> Tensor:
    """Return the gradient of the model's own loss, as one vector."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
        loss = module(**batch).loss
    grads = torch.autograd.grad(loss, leaves(module), create_graph=graph, materialize_grads=True, allow_unused=True)
    return torch.cat([g.reshape(-1) for g in grads])


def twice(module: nn.Module, batch: dict[str, Tensor], vector: Tensor) -> Tensor:
    """Return the product by reverse over reverse."""
    slope = gradient(module, batch, graph=True) @ vector
    grads = torch.autograd.grad(slope, leaves(module), materialize_grads=True, allow_unused=True)
    return torch.cat([g.reshape(-1) for g in grads])


def differences(module: nn.Module, batch: dict[str, Tensor], vector: Tensor, step: float = 1e-6) -> Tensor:
    """Return the product by central differences of the gradient, of fourth order."""
    before = [p.detach().clone() for p in leaves(module)]

    def at(t: float) -> Tensor:
        with torch.no_grad():
            for p, x, v in zip(leaves(module), before, vector.split([p.numel() for p in before]), strict=True):
                p.copy_(x + t * v.reshape(x.shape))
        return gradient(module, batch)

    try:
        return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
    finally:
        at(0.0)


def error(found: Tensor, expected: Tensor, module: nn.Module, dtype: torch.dtype = torch.float64) -> float:
    """Return the largest difference over all parameters, relative to the largest entry of the parameter's part."""
    sizes, whole = [p.numel() for p in leaves(module)], float(expected.abs().max())
    parts = zip(found.split(sizes), expected.split(sizes), strict=True)
    worst = 0.0
    for mine, theirs in parts:
        if theirs.numel() and whole:
            scale = max(float(theirs.abs().max()), FLOORS[dtype] * whole)
            worst = max(worst, float((mine - theirs).abs().max()) / scale)
    return worst if bool(torch.isfinite(found).all()) else math.inf


def table(rows: Sequence[Row]) -> str:
    """Return the page's tables: what was compared, what was refused."""
    number: Callable[[float], str] = lambda x: "" if math.isnan(x) else f"{x:.0e}"
    good = [row for row in rows if not row.reason]
    lines = [
        (
            *row.name.split("/"),
            row.attention,
            str(row.parameters),
            number(row.float64),
            number(row.differences),
            number(row.bfloat16),
            number(row.autograd),
            ", ".join(row.fallbacks),
        )
        for row in good
    ]
    headers = ("task", "architecture", "attention", "P", "float64", "differences", "bfloat16", "autograd, bfloat16", "fallbacks")
    page = markdown(headers, lines)
    refused = [(*row.name.split("/"), row.attention, row.reason.replace("|", "\\|")) for row in rows if row.reason]
    if refused:
        page += "\n\n## Refused\n\n" + markdown(("task", "architecture", "attention", "reason"), refused)
    return page


def all_cases() -> Iterator[tuple[str, str]]:
    """Yield every name with every implementation of attention."""
    for name in (*names(), *vision_names()):
        for attention in ATTENTIONS:
            yield name, attention
