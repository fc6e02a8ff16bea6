"""Measurements of a monitor: each function takes a run and options, and returns a section, (batches, step) -> plain values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hessiankit.curvature.operator import hessian_operator
from hessiankit.landscape.critical import PASSES, along_step
from hessiankit.landscape.optimizer_states import waits
from hessiankit.landscape.preconditioner import optimizer_preconditioner
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.data import on_device_of
from hessiankit.support.arguments import checked
from hessiankit.support.containers import check_dense, named_tensors
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.lanczos import Product, lanczos
from hessiankit.support.torch_state import full_precision
from hessiankit.training.depth import QUANTITIES, depth_diagnostics
from hessiankit.training.depth.products import HessianProducts, by_route, double_backward
from hessiankit.training.partition.part import Part
from hessiankit.training.sharpness import SharpnessEstimate
from hessiankit.training.sharpness import sharpness as estimated
from hessiankit.training.sharpness.batches import BatchedLoss, micro_batches
from hessiankit.training.sharpness.options import SharpnessOptions

if TYPE_CHECKING:
    from hessiankit.training.monitoring.over_ranks import MonitorRanks

WHO = "monitor"
Batch: TypeAlias = "tuple[Any, Tensor]"
"""Arguments of the model, and a label for each row of its logits (-100: does not count)."""
Section: TypeAlias = "Callable[[Sequence[Batch], int], Any]"
"""A measurement on batches at a step."""


@dataclass(frozen=True)
class MonitoredRun:
    """Data that several measurements of a run read.

    Attributes:
        model: Model that is trained.
        parts: Parts of the model, for norms and sharpness.
        seed: Seed of label draws and start vectors.
        optimizers: Optimizers that train the model.
        ranks: Processes over which the model is spread, if it is.
    """

    model: nn.Module
    parts: Sequence[Part] = ()
    seed: int = 0
    optimizers: Sequence[Optimizer] = ()
    ranks: MonitorRanks | None = None


def batches_of(model: nn.Module, data: Any, target: Tensor | None = None) -> list[Batch]:
    """Return batches, in the forms of :func:`hessiankit.sharpness`, as a list of pairs (inputs, labels)."""
    batches = micro_batches(WHO, model, data, target)
    for batch in batches:
        for name, x in (*named_tensors(batch.inputs), ("target", batch.target)):
            check_dense(WHO, name, x)
            if x.is_meta:
                raise InputError(f"{WHO}: {name} is on the meta device, which holds no values; load the data first")
    if all(bool((batch.target == IGNORE_INDEX).all()) for batch in batches):
        raise InputError(f"{WHO}: the data hold no label that counts; pass labels other than {IGNORE_INDEX}")
    return [(batch.inputs, batch.target) for batch in batches]


def loss_of(model: nn.Module, batches: Iterable[Batch]) -> BatchedLoss:
    """Return the mean cross entropy, in nats, over all labels that count, however they are cut into batches."""
    return BatchedLoss(WHO, model, tuple(micro_batches(WHO, model, [on_device_of(model, batch) for batch in batches])))


def loss(run: MonitoredRun) -> Section:
    """Measure the mean cross entropy."""
    if run.ranks is not None:
        return lambda batches, step: run.ranks.loss(batches)  # type: ignore[union-attr]
    return lambda batches, step: loss_of(run.model, batches).evaluate()[0]


ROUTES = ("auto", "closed form", "autograd")
CLOSED_FORM_ENTRIES = 200_000
"""Parameters up to which "auto" tries closed forms, whose work space holds every value of the network at once."""


START = 0.1
"""Length of the random vector that is added to the last eigenvector, so that a search that starts there sees another one rise."""


@checked(WHO)
def eigenvalue(
    run: MonitoredRun, *, route: str = "auto", tol: float = 1e-3, products: int = 60, warm_start: bool = True
) -> TopEigenvalue:
    """Measure the largest eigenvalue of the Hessian of the mean cross entropy over all labels that count.

    Args:
        run: Model, parts, seed and optimizers.
        route: Route of the products: ``"closed form"``, by :func:`hessiankit.hessian_operator`; ``"autograd"``, by two reverse
            passes, with attention that has a second derivative; ``"auto"``, closed forms for up to 200,000 parameters of a model
            that can be traced, autograd for others.
        tol: Residual of the eigenvalue, relative to it.
        products: Products with the Hessian at most.
        warm_start: Whether a search starts from the last eigenvector, with a tenth of a random one added, rather than from the
            vector drawn by the seed. The eigenvector is not in the file: a run that resumes searches from a random one at first.
    """
    check_name(WHO, "route", route, ROUTES)
    return TopEigenvalue(run, route, tol, products, warm_start)


@checked(WHO)
def preconditioned(
    run: MonitoredRun, *, route: str = "auto", tol: float = 1e-3, products: int = 60, warm_start: bool = True
) -> Section:
    """Measure the largest eigenvalue in the optimizers' metric beside its stability threshold, as :func:`hessiankit.spectrum`
    reads both; options as of :func:`eigenvalue`.
    """
    search = eigenvalue(run, route=route, tol=tol, products=products, warm_start=warm_start)

    @full_precision()
    def section(batches: Sequence[Batch], step: int) -> dict[str, Any]:
        if why := waits(run.optimizers):
            return {"waiting": why}
        parameters = trainable(run.model)
        first = next(iter(parameters.values()))
        P = optimizer_preconditioner(WHO, run.optimizers, parameters, dtype=first.dtype, device=first.device)
        result = search(batches, step, lambda product: lambda v: P.root @ product(P.root @ v))
        return {**result, "lr": P.lr, "threshold": P.threshold, "ratio": P.ratio(result["value"])}

    return section


class TopEigenvalue:
    """The largest eigenvalue, its residual, and the route of the products with its reason."""

    def __init__(self, run: MonitoredRun, route: str, tol: float, products: int, warm_start: bool) -> None:
        self.run, self.route, self.tol, self.products, self.warm_start = run, route, tol, products, warm_start
        self.vector: Tensor | None = None  # of the last search

    @full_precision()
    def __call__(
        self, batches: Sequence[Batch], step: int, metric: Callable[[Product], Product] = lambda product: product
    ) -> dict[str, Any]:
        """Search, for the Hessian in a metric."""
        model, parameters = self.run.model, trainable(self.run.model)
        size, first = sum(p.numel() for p in parameters.values()), next(iter(parameters.values()))
        draw = torch.Generator().manual_seed(self.run.seed)  # the same vector on every device
        start = torch.randn(size, generator=draw, device="cpu").to(first.device, first.dtype)
        vector = self.vector if self.warm_start else None
        if vector is not None and (vector.shape, vector.dtype, vector.device) == (start.shape, start.dtype, start.device):
            start = vector + START * start / start.norm()

        def exact() -> Product:
            return hessian_operator(model, list(batches), loss="cross_entropy", params=list(parameters)).__matmul__

        def autograd() -> Product:
            return HessianProducts(loss_of(model, batches), [list(parameters.values())], "hessian").of(0)

        with double_backward():
            product, route, why = by_route(self.route, size, CLOSED_FORM_ENTRIES, ("closed form", exact), autograd)
            top = lanczos(metric(product), start, tol=self.tol, most=self.products)
        self.vector = self.vector if top.vector is None else top.vector
        return {**top.to_dict(), "route": route, **({"why": why} if why else {})}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, one at least."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError(f"{WHO}: no parameter requires a gradient; there is no Hessian")
    return parameters


def critical(run: MonitoredRun) -> Section:
    """Measure the curvature along the optimizers' next step and the multiple of it that does not raise the mean cross entropy,
    as :func:`hessiankit.critical_sharpness` does, by automatic differentiation: a gradient, a product and the forward passes.
    """

    @full_precision()
    def section(batches: Sequence[Batch], step: int) -> dict[str, Any]:
        if why := waits(run.optimizers, for_state=False):
            return {"waiting": why}
        parameters_by_name, loss = trainable(run.model), loss_of(run.model, batches)
        parameters = list(parameters_by_name.values())
        sizes, values = [p.numel() for p in parameters], [p.data for p in parameters]

        def loss_at(displacement: Tensor) -> float:
            try:
                for p, value, change in zip(parameters, values, displacement.split(sizes), strict=True):
                    p.data = (value + change.view_as(value)).to(value.dtype)
                return loss.evaluate()[0]
            finally:
                for p, value in zip(parameters, values, strict=True):
                    p.data = value

        with double_backward():
            product = HessianProducts(loss, [parameters], "hessian").of(0)
            gradient = torch.cat([slope.reshape(-1) for slope in loss.gradient(parameters)])
            search = along_step(WHO, run.optimizers, parameters_by_name, gradient, product, loss_at, {}, PASSES)
        return {name: value for name, value in search.to_dict().items() if name not in ("groups", "seconds", "optimizer")}

    return section


def norms(run: MonitoredRun) -> Section:
    """Measure the Euclidean norm of every part, of every block type and of all (The Sharpness Disparity Principle, Figure 8).

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = nn.init.constant_(layer.weight, 3.0)
    >>> norms(MonitoredRun(layer, [Part("weight", "FFN", "up", 0, "", 2)]))([], 0)["types"]
    {'FFN': 4.242640687119285}
    """

    @torch.no_grad()
    def section(batches: Sequence[Batch], step: int) -> dict[str, Any]:
        values = dict(run.model.named_parameters())
        whole = run.ranks.whole if run.ranks is not None else lambda x: x
        squares = {part: part.squared_norm(whole(values[part.parameter])) for part in run.parts}
        types: dict[str, Tensor] = {}
        for part, square in squares.items():
            types[part.type] = types.get(part.type, torch.zeros_like(square)) + square
        return {
            "total": math.sqrt(sum(float(x) for x in types.values())),
            "types": {name: math.sqrt(float(x)) for name, x in types.items()},
            "tensors": {part.name: math.sqrt(float(x)) for part, x in squares.items()},
        }

    return section


SEED_STRIDE = 1_000_003
"""Distance between the seeds of two steps, so that the errors of two measurements are independent, as their intervals assume."""


@checked(WHO)
def sharpness(run: MonitoredRun, *, draws: int = 4, per: str = "token", micro_batch: int | None = None) -> Section:
    """Measure the average sharpness with its intervals by type, layer, both and tensor; of labels, which count is read.

    Args:
        run: Model, parts, seed and optimizers.
        draws: Label draws.
        per: Term of the loss: ``"token"`` or ``"sequence"``.
        micro_batch: Sequences of one backward pass; None: as they come.
    """
    options: dict[str, Any] = {"parts": run.parts, "draws": draws, "per": per, "micro_batch": micro_batch}
    SharpnessOptions(**options, seed=run.seed)  # an option that cannot be used is refused here, before training

    def section(batches: Sequence[Batch], step: int) -> dict[str, Any]:
        report = estimated(run.model, list(batches), seed=run.seed + SEED_STRIDE * step, **options)
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

    return section


@checked(WHO)
def depth(run: MonitoredRun, *, what: Iterable[str] = ("variance", "angles", "drop"), micro_batch: int | None = None) -> Section:
    """Measure depth diagnostics, as :class:`hessiankit.training.depth.DepthReport` writes them.

    Args:
        run: Model, parts, seed and optimizers.
        what: Names of :data:`hessiankit.training.depth.QUANTITIES`.
        micro_batch: Sequences of one pass; None: as they come.
    """
    quantities = tuple(what)
    for quantity in quantities:
        check_name(WHO, "what", quantity, QUANTITIES)

    def section(batches: Sequence[Batch], step: int) -> dict[str, Any]:
        options: dict[str, Any] = {"what": quantities, "micro_batch": micro_batch, "seed": run.seed}
        report = depth_diagnostics(run.model, list(batches), **options).to_dict()
        return {name: part for name, part in report.items() if part is not None and name not in ("model", "memory", "seconds")}

    return section


MEASUREMENTS: dict[str, Callable[..., Section]] = {
    "loss": loss,
    "norms": norms,
    "sharpness": sharpness,
    "eigenvalue": eigenvalue,
    "preconditioned": preconditioned,
    "critical": critical,
    "depth": depth,
}
"""Name of a section, and the function that makes it; its keyword arguments are the options of the section."""
OVER_RANKS = ("loss", "norms", "sharpness")
"""Sections that models may have that ``fully_shard`` has spread."""
OF_OPTIMIZERS = ("preconditioned", "critical")
"""Sections that read the optimizers."""
SINGLE = {
    "top_eigenvalue": ("eigenvalue", "value"),
    "preconditioned/eigenvalue": ("preconditioned", "value"),
    "preconditioned/over_threshold": ("preconditioned", "ratio"),
    "critical/sharpness": ("critical", "sharpness"),
    "critical/multiple": ("critical", "multiple"),
}
"""Name for a logger, section of a measurement, and number of it; a section that waits for the optimizer has none."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a measurement that a logger can hold, by a name with slashes.

    >>> record = {"step": 3, "loss": 2.0, "sharpness": {"types": {"Norm": {"value": 0.5, "low": 0.4}}}}
    >>> scalars(record)
    {'monitor/loss': 2.0, 'sharpness/Norm': 0.5}
    """
    numbers = {"monitor/loss": record["loss"]} if "loss" in record else {}
    numbers |= {f"sharpness/{name}": one["value"] for name, one in record.get("sharpness", {}).get("types", {}).items()}
    numbers |= {f"norm/{name}": value for name, value in record.get("norms", {}).get("types", {}).items()}
    numbers |= {name: record[part][key] for name, (part, key) in SINGLE.items() if key in record.get(part, {})}
    return {name: float(value) for name, value in numbers.items()}


def _layer(layer: int | None) -> str:
    return "outside" if layer is None else str(layer)


def _whole(one: SharpnessEstimate) -> dict[str, float]:
    return {key: getattr(one, key) for key in ("value", "standard_error", "low", "high")}


def _short(one: SharpnessEstimate) -> list[float]:
    return [one.value, one.standard_error]
