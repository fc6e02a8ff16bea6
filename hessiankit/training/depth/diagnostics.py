"""``depth_diagnostics``: stream, angles, pruning, gradients, Jacobians and curvature of every block, in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock
from hessiankit.request.checks import IGNORE_INDEX, check_layers
from hessiankit.request.data import FORMS
from hessiankit.support.arguments import checked
from hessiankit.support.containers import arguments, named_tensors
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.files import WithDict
from hessiankit.support.memory import check_room
from hessiankit.support.progress import Tell, silent
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.support.torch_state import one_at_a_time, ordinary_path, preserved_state
from hessiankit.tracing.source_line import returned
from hessiankit.training.depth.blocks import WHO, Blocks, are_pre_norm, check_finite, find_blocks, recording, recording_middles
from hessiankit.training.depth.curvature import KINDS, METHODS, Jacobians, LayerCurvature, jacobians, layer_curvature
from hessiankit.training.depth.laws import GrowthLaws, growth_laws, theory_of
from hessiankit.training.depth.products import Estimator, double_backward
from hessiankit.training.depth.stream import (
    AngleSums,
    AngularDistances,
    PruningDrop,
    StreamStatistics,
    StreamSums,
    gradient_norms,
    pruning_drop,
)
from hessiankit.training.sharpness.batches import BatchedLoss, MicroBatch, check_devices, micro_batches
from hessiankit.training.sharpness.options import LOSSES
from hessiankit.training.sharpness.probe import CountedGraph, check_cut

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture


@dataclass(frozen=True, repr=False, eq=False)
class DepthReport(Printed, WithDict):
    """Diagnostics of the blocks of a model by depth; made by :func:`depth_diagnostics`. Quantities that were not chosen are None.

    Attributes:
        model: Name of the model's class.
        blocks: Names of the blocks, first to last.
        tokens: Tokens that the stream's numbers are means over: ``"all"`` or ``"last"``.
        stream: Variance, second moment, rho, update ratio.
        laws: Growth laws through the variance; None in a stack of one block.
        angles: Angular distances.
        drop: Loss and accuracy with one block removed.
        gradient: Norm of the loss's gradient in each block's parameters.
        jacobians: Distance of each block from the identity; the stack's gain.
        hessian: lambda_max and trace of the Hessian in each block's parameters.
        ggn: lambda_max and trace of its Gauss-Newton part.
        memory: Bytes that each quantity was expected to hold, beside the model.
        seconds: Time taken.
    """

    model: str
    blocks: tuple[str, ...]
    tokens: str
    stream: StreamStatistics | None
    laws: GrowthLaws | None
    angles: AngularDistances | None
    drop: PruningDrop | None
    gradient: tuple[float, ...] | None
    jacobians: Jacobians | None
    hessian: LayerCurvature | None
    ggn: LayerCurvature | None
    memory: dict[str, int]
    seconds: float

    def _by_layer(self) -> Iterator[tuple[str, str, str, Sequence[Any], Callable[[Any], str]]]:
        """Yield each quantity: its column, panel, line in the panel, entries by layer, and format of a cell.

        The name of a column or panel is empty where there is none.
        """
        short, signed, cosine = "{:.4g}".format, "{:+.4f}".format, "{:.3f}".format
        if self.stream is not None:
            yield "sigma^2(x_l)", "variance of the residual stream", "", self.stream.variance, short
            yield "sigma^2(y_l)", "", "", self.stream.variance[1:], short
            for kind, values in self.stream.rho.items():
                yield "cos(x,f)" * (kind == "block"), "cosine of stream and branch", kind, values, cosine
            for kind, values in self.stream.update_ratio.items():
                yield "||f||/||x||" * (kind == "block"), "length of branch / stream", kind, values, short
        if self.angles is not None:
            yield "d(x_l,y_l)", "angular distance to the next layer", "", self.angles.all.diagonal(1).tolist(), short
        if self.drop is not None:
            yield "dloss", "loss without the block, less the loss", "", self.drop.loss_change, signed
            if self.drop.accuracy_change is not None:
                yield "dacc", "", "", self.drop.accuracy_change, signed
            if self.drop.metric_change is not None:
                yield "dmetric", "metric without the block, less the metric", "", self.drop.metric_change, signed
        if self.gradient is not None:
            yield "||grad||", "norm of the gradient", "", self.gradient, short
        if self.jacobians is not None:
            yield "||J-I||_2", "distance of the Jacobian from I", "spectral", self.jacobians.spectral, str
            yield "rms(J-I)", "distance of the Jacobian from I", "rms", self.jacobians.rms, str
        for name, part in (("Hessian", self.hessian), ("Gauss-Newton", self.ggn)):
            if part is not None:
                yield f"lambda_max {name[0]}", r"$\lambda_{\max}$ by layer", name, part.top, str
                yield f"tr {name[0]}", "trace by layer", name, part.trace, str

    def columns(self) -> dict[str, tuple[str, ...]]:
        """Return the table's columns: heading -> one text a layer."""
        L = len(self.blocks)
        return {column: tuple(map(write, entries[:L])) for column, _, _, entries, write in self._by_layer() if column}

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw each quantity over the layers, in a panel of its own; ``path`` ends in ``.png``, ``.svg`` or ``.pdf``."""
        from hessiankit.curvature.plot_frame import over_layers, panels  # only here: Matplotlib

        quantities: dict[str, dict[str, list[float]]] = {}
        for _, panel, line, entries, _ in self._by_layer():
            if panel:
                quantities.setdefault(panel, {})[line] = [getattr(entry, "value", entry) for entry in entries]
        heading = f"{self.model}, {len(self.blocks)} blocks" + (f", {self.stream.tokens:,} tokens" if self.stream else "")
        with panels("DepthReport.plot", len(quantities), heading, path) as (figure, all_axes):
            for axes, (title, lines) in zip(all_axes, quantities.items(), strict=True):
                over_layers(axes, title, lines)
        return figure

    def _headline(self) -> str:
        loss = f", loss {self.drop.loss:.4g}" if self.drop is not None else ""
        accuracy = f", accuracy {self.drop.accuracy:.4g}" if self.drop is not None and self.drop.accuracy is not None else ""
        token_text = f", {self.stream.tokens:,} tokens ({self.tokens})" if self.stream is not None else ""
        return f"depth of {self.model}: {len(self.blocks)} blocks{token_text}{loss}{accuracy}, {self.seconds:.2f} s"

    def _remarks(self) -> list[str]:
        remarks = [str(part) for part in (self.laws, self.jacobians, self.hessian, self.ggn) if part is not None]
        if any("?" in text for column in self.columns().values() for text in column):
            remarks.append("? Lanczos ran out of products: a lower bound of that number; pass products=")
        return remarks

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        columns, drop = self.columns(), ("block", "sigma^2(y_l)", "rms(J-I)", "||f||/||x||")
        layers = map(str, range(1, len(self.blocks) + 1))
        rows = zip(layers, self.blocks, *columns.values(), strict=True)
        yield table(("l", "block", *columns), rows, left=2, names=self.blocks, drop=drop)
        yield from self._remarks()


QUANTITIES = ("variance", "angles", "drop", "gradient", "jacobian", "hessian", "ggn")
CHEAP = QUANTITIES[:4]
UNLABELLED = ("variance", "angles", "jacobian")


@checked("depth_diagnostics")
@one_at_a_time
def depth_diagnostics(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    blocks: str | Iterable[str | nn.Module] | None = None,
    what: str | Iterable[str] = CHEAP,
    tokens: str = "all",
    loss: str = "cross_entropy",
    curvature: str = "auto",
    draws: int = 8,
    exact_below: int = 256,
    tol: float = 1e-3,
    products: int = 60,
    seed: int = 0,
    micro_batch: int | None = None,
    drop_metric: Callable[[nn.Module], float] | None = None,
    progress: Tell | None = None,
) -> DepthReport:
    """Return the depth diagnostics of The Curse of Depth (Sun et al. 2025), corrected: one row a block.

    ``"variance"`` (with rho, update ratio and growth laws), ``"angles"``, ``"drop"`` (one forward pass a block) and
    ``"gradient"`` cost about L + 4 forward passes and a backward pass; ``"jacobian"``, ``"hessian"`` and ``"ggn"`` cost up to
    ``products + draws`` passes of second derivatives a block. docs/depth.md has every formula and its limits.

    The model runs in evaluation mode. Its parameters, buffers, gradients, modes and hooks, and the random states, are afterwards
    what they were, also after an error or Ctrl-C.

    Args:
        model: hessiankit's ``Transformer`` or ``VisionTransformer``, a Hugging Face decoder or encoder, or any module whose
            blocks, in one list, map a hidden state (..., tokens, d) to one: a tensor, or the first entry of a tuple.
        data: A tensor of inputs with ``target``; a pair (inputs, target); a mapping of keyword arguments with ``labels`` (a
            Hugging Face batch: logits[:, :-1] against labels[:, 1:], unless the model's own loss has them in place); or an
            iterable of pairs or mappings. Where no quantity needs a loss, labels may be left out, and the model may return
            anything. -100 does not count. Tokens where ``attention_mask`` is 0 are left out.
        target: Labels, one for each row of logits, or for squared error a tensor of the output's shape.
        blocks: The name of the list of blocks, or the blocks or their names; by default found in a forward pass.
        what: Some of ``"variance", "angles", "drop", "gradient", "jacobian", "hessian", "ggn"``, or ``"all"``.
        tokens: Whether the stream's numbers are means over ``"all"`` counted tokens or the ``"last"`` one of each sequence.
            Angles are given for both.
        loss: ``"cross_entropy"`` or ``"mse"``, a mean over all labels, or entries, that count.
        curvature: Products with Hessians: ``"exact"``, ``"autograd"`` or ``"auto"``; the report says which was used.
        draws: Random probes of Frobenius norms and traces.
        exact_below: States, or parameters of a block, up to which all unit vectors are taken in place of probes.
        tol: Relative tolerance of Lanczos's residuals.
        products: Products of one Lanczos run at most.
        seed: Seed of probes and first vectors.
        micro_batch: Sequences treated at once; each batch as it is by default.
        drop_metric: A function of the model that returns a number, such as the accuracy on a task; with ``"drop"`` it is taken
            with each block removed, too.
        progress: Called with (the quantity and its memory, steps done, steps in all).

    Raises:
        InputError: If an argument cannot be used, the blocks are not found, or a hidden state is not finite.
        OutOfMemoryError: If the states and graphs do not fit; said before they are made.

    Blocks that add a half of the stream: variance 9/4 per block, cosine 1, and the Jacobian is 3/2 of the identity.

    >>> half = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    >>> half.weight.data = 0.5 * torch.eye(2, dtype=torch.float64)
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.f = half
    ...     def forward(self, x):
    ...         return x + self.f(x)
    >>> model = nn.Sequential(Block(), Block(), Block())
    >>> x = torch.tensor([[[1.0, -1.0]]], dtype=torch.float64)
    >>> report = depth_diagnostics(model, x, what=("variance", "jacobian"))
    >>> report.stream.variance, report.stream.update_ratio["block"]
    ((1.0, 2.25, 5.0625, 11.390625), (0.5, 0.5, 0.5))
    >>> report.laws.best, [round(s.value, 12) for s in report.jacobians.spectral], report.jacobians.gain.value
    ('exponential', [0.5, 0.5, 0.5], 3.375)
    """
    quantities = _quantities(what)
    check_name(WHO, "tokens", tokens, ("all", "last"))
    check_name(WHO, "curvature", curvature, METHODS)
    estimator = Estimator(draws, exact_below, tol, products, seed)
    start = time.perf_counter()
    with quiet(model):
        needs_labels = any(q not in UNLABELLED for q in quantities)
        mean_loss = read_data(model, data, target, loss, micro_batch=micro_batch, needs_labels=needs_labels)
        with torch.no_grad():
            stack = find_blocks(model, lambda: mean_loss.run(mean_loss.batches[0]), blocks)
            is_pre = are_pre_norm(stack, lambda: mean_loss.run(mean_loss.batches[0]))
        _require_gradients(model, requires_grad=True)
        memory = expected_memory(mean_loss, stack, quantities)

        def tell(name: str) -> Callable[[int, int], None]:
            return partial(progress or silent, f"{name} ({memory.get(name, 0) / 2**20:,.0f} MiB)")

        stream, angles = _stream(mean_loss, stack, quantities, tokens, tell)
        metric = None if drop_metric is None else partial(_metric, drop_metric, model)
        drop = pruning_drop(mean_loss, stack, metric=metric, tell=tell("drop")) if "drop" in quantities else None
        parameters = stack.parameters(model)
        _require_gradients(model, requires_grad=False)  # Jacobians are with respect to states
        jacobian = jacobians(mean_loss, stack, estimator, tell=tell("jacobian")) if "jacobian" in quantities else None
        _require_gradients(model, requires_grad=True)
        gradient = gradient_norms(mean_loss, parameters) if "gradient" in quantities else None
        curvatures = {
            kind: layer_curvature(mean_loss, parameters, kind, method=curvature, estimator=estimator, tell=tell(kind))
            for kind in KINDS
            if kind in quantities
        }
    placements = {
        b.own_placement.name if isinstance(b, TransformerBlock) else "pre" if is_pre else type(b).__name__ for b in stack.modules
    }
    laws = growth_laws(stream.variance, theory_of(placements)) if stream is not None and len(stack) > 1 else None
    return DepthReport(
        model=type(model).__name__,
        blocks=stack.names,
        tokens=tokens,
        stream=stream,
        laws=laws,
        angles=angles,
        drop=drop,
        gradient=gradient,
        jacobians=jacobian,
        hessian=curvatures.get("hessian"),
        ggn=curvatures.get("ggn"),
        memory=memory,
        seconds=time.perf_counter() - start,
    )


def _metric(drop_metric: Callable[[nn.Module], float], model: nn.Module) -> float:
    """Return a user's metric of the model as a number."""
    with torch.no_grad():
        value = returned(f"{WHO}: drop_metric(model)", drop_metric, model)
    number = float(value) if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise InputError(f"{WHO}: drop_metric returned {value!r}; expected a finite number")
    return number


def _quantities(request: str | Iterable[str]) -> tuple[str, ...]:
    quantities = QUANTITIES if request == "all" else (request,) if isinstance(request, str) else tuple(request)
    for quantity in quantities:
        check_name(WHO, "what", quantity, QUANTITIES)
    if not quantities:
        raise InputError(f"{WHO}: what= asks for nothing; pass some of {', '.join(map(repr, QUANTITIES))}, or 'all'")
    return tuple(q for q in QUANTITIES if q in quantities)


def _stream(
    data: BatchedLoss, blocks: Blocks, quantities: tuple[str, ...], tokens: str, tell: Callable[[str], Callable[[int, int], None]]
) -> tuple[StreamStatistics | None, AngularDistances | None]:
    """Return statistics and angles of the hidden states, from one forward pass a batch; NaN is refused."""
    sums, angles = StreamSums(), AngleSums(len(blocks))
    report = tell("variance")
    with torch.no_grad():
        for number, batch in enumerate(data.batches):
            report(number, len(data.batches))
            with recording(blocks) as stream, recording_middles(blocks) as middles:
                data.run(batch)
            check_finite(stream, blocks)
            mask = counted_tokens(batch, stream.inputs[0])
            if not bool(mask.any()):
                raise InputError(f"{WHO}: no token of batch {number} counts, its mask leaves all of them out; keep at least one")
            last = last_tokens(mask)
            if "variance" in quantities:
                sums.add(stream.states, middles, mask if tokens == "all" else last)
            if "angles" in quantities:
                angles.add(stream.states, mask, last)
    return sums.result() if "variance" in quantities else None, angles.result() if "angles" in quantities else None


def _require_gradients(model: nn.Module, *, requires_grad: bool) -> None:
    for p in model.parameters():
        p.requires_grad_(requires_grad and p.is_floating_point())


def read_data(model: nn.Module, data: Any, target: Any, loss: str, *, micro_batch: int | None, needs_labels: bool) -> BatchedLoss:
    """Return the loss on data in the forms of :func:`hessiankit.sharpness`; labels may be missing unless ``needs_labels``."""
    check_name(WHO, "loss", loss, LOSSES)
    if target is None and not needs_labels:
        first = data if isinstance(data, Tensor) else None
        if isinstance(data, Mapping) and data.get("labels") is None:
            first = next((x for x in data.values() if isinstance(x, Tensor) and x.ndim), None)
            if first is None:
                raise InputError(f"{WHO}: the mapping holds no tensor; pass {FORMS}")
        if first is not None:
            target = torch.full((first.shape[0],), IGNORE_INDEX, device=first.device)
    batches = tuple(micro_batches(WHO, model, data, target, loss=loss, micro_batch=micro_batch))
    for batch in batches:
        check_devices(WHO, batch, model)
    check_cut(WHO, model, batches)
    return BatchedLoss(WHO, model, batches, loss)


def counted_tokens(batch: MicroBatch, state: Tensor) -> Tensor:
    """Return booleans by token of a hidden state: False at padding, by an ``attention_mask`` or ``key_padding_mask``."""
    shape = state.shape[:-1]
    kwargs = arguments(batch.inputs)[1]
    for name, flip in (("attention_mask", False), ("key_padding_mask", True)):
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and mask.shape == shape:
            return ~mask.bool() if flip else mask.bool()
    return torch.ones(shape, dtype=torch.bool, device=state.device)


def last_tokens(mask: Tensor) -> Tensor:
    """Return booleans: True at the last counted token of each sequence; tokens are the last axis.

    >>> last_tokens(torch.tensor([[True, True, False], [True, True, True]]))
    tensor([[False,  True, False],
            [False, False,  True]])
    """
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Use evaluation mode and attention that has second derivatives; restore the model's state afterwards."""
    with preserved_state(model), ordinary_path(), double_backward():
        check_layers(model)
        yield


BASIS = 20
"""Vectors that Lanczos keeps."""
SECOND = 3
"""A graph with second derivatives, in graphs of a training step: the forward pass, its derivative, and work space."""


def expected_memory(data: BatchedLoss, blocks: Blocks, quantities: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes that each quantity holds beside the model, from a run of the largest micro-batch, if they are free."""
    batch = max(data.batches, key=lambda b: len(b.numbers))
    counter = CountedGraph(data.model, keep=False)
    with torch.enable_grad(), recording(blocks) as stream, counter:
        out = data.run(batch) if set(quantities) <= {*UNLABELLED} else data.output(batch)
    x, parameters = stream.inputs[0], [list(block.parameters()) for block in blocks.modules]
    states = (len(blocks) + 1) * x.numel() * (x.element_size() + 8)
    graph = counter.bytes + (logits := sum(y.numel() * y.element_size() for _, y in named_tensors(out)))
    largest = max((sum(p.numel() for p in block) for block in parameters), default=0)
    weights = sum(p.numel() * p.element_size() for block in parameters for p in block)
    curvature = SECOND * graph + weights + BASIS * largest * x.element_size()
    byte_counts = {
        "variance": states,
        "angles": states,
        "drop": 24 * sum(y.numel() for _, y in named_tensors(out)),
        "gradient": graph + 2 * logits + 2 * weights,
        "jacobian": 2 * SECOND * graph + BASIS * x.numel() * x.element_size(),
        "hessian": curvature,
        "ggn": curvature,
    }
    for name in quantities:
        description = f"the states and graphs of {name!r}, {len(batch.numbers)} sequences at once,"
        check_room(WHO, byte_counts[name], description, x.device, "pass a smaller micro_batch=, or leave it out of what=")
    return {name: byte_counts[name] for name in quantities}
