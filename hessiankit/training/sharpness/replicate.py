"""Replicates of h: one forward pass for each micro-batch, one backward pass for each draw of labels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.fisher import sample_labels, sample_residuals
from hessiankit.request.non_finite import spoiled_at
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import wide
from hessiankit.training.partition import Part
from hessiankit.training.partition.part import CHUNK
from hessiankit.training.sharpness.batches import MicroBatch, aligned, check_devices, evaluating, forward, micro_batches
from hessiankit.training.sharpness.options import WHO, MeasuredParts, SharpnessOptions, measured_parts
from hessiankit.training.sharpness.probe import probe, watch_lookups


@dataclass(frozen=True, eq=False)
class Replicates:
    """The sum of h over the entries of each part, for each micro-batch and draw, before any statistics.

    Fields without a comment are those of :class:`SharpnessReport`.
    """

    parts: tuple[Part, ...]  # in the order of the last axis of ``values``
    values: Tensor  # float64 (micro-batches, draws, parts) on the CPU
    terms: Tensor  # how many terms each micro-batch's loss is the mean of, (micro-batches,)
    squared_norms: Tensor  # ||theta||^2 of each part, (parts,)
    rows: dict[str, Tensor]  # of embeddings looked up by rows: the sum of terms x h along each row, (draws, rows)
    seen: dict[str, Tensor]  # which of its rows the data looked up, (rows,)
    entries: Mapping[str, Tensor]  # the sum over draws of terms x h, by parameter in its shape; empty without histograms
    sequences: int
    per: str
    loss: str
    kind: str
    seed: int
    frozen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    seconds: float = 0.0
    unlikely: float = math.inf  # how many labels of one draw of all are expected not to be the likeliest one
    metric: str = ""

    @property
    def draws(self) -> int:
        """Number of draws of the labels."""
        return int(self.values.shape[1])

    @property
    def is_exact(self) -> bool:
        """Whether nothing was drawn."""
        return self.kind != "fisher-mc"

    def mean(self, indices: Sequence[int]) -> Tensor:
        """Return the mean of h over the entries of some parts, by their numbers: (micro-batches, draws)."""
        return self.values[:, :, indices].sum(2) / sum(self.parts[k].size for k in indices)


def joined(runs: Sequence[Replicates]) -> Replicates:
    """Join replicates of one model at one point on different sequences into one."""
    if not runs:
        raise InputError(f"{WHO}: joined() was given nothing; pass at least one Replicates")
    first = runs[0]
    for run in runs[1:]:
        for name in ("parts", "draws", "per", "loss", "kind", "seed", "metric"):
            if getattr(first, name) != getattr(run, name):
                raise InputError(f"{WHO}: joined() was given Replicates whose {name} differ; repeat the measurements alike")
        if not torch.allclose(first.squared_norms, run.squared_norms, rtol=1e-6, atol=0.0):
            raise InputError(f"{WHO}: joined() was given Replicates of different parameters; measure all of them at one point")
    return replace(
        first,
        values=torch.cat([one.values for one in runs]),
        terms=torch.cat([one.terms for one in runs]),
        rows=_summed([one.rows for one in runs]),
        seen={k: v > 0 for k, v in _summed([{k: v.long() for k, v in one.seen.items()} for one in runs]).items()},
        entries=_summed([one.entries for one in runs]),
        sequences=sum(one.sequences for one in runs),
        unused=tuple(name for name in first.unused if all(name in one.unused for one in runs)),
        seconds=max(one.seconds for one in runs),
        unlikely=sum(one.unlikely for one in runs),
    )


def _summed(dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for one in dicts for name in one)
    return {name: torch.stack([one[name] for one in dicts if name in one]).sum(0) for name in names}


def replicates(
    model: nn.Module, data: Any, target: Any = None, settings: SharpnessOptions | None = None, **options: Any
) -> Replicates:
    """Return h on some data by micro-batch, draw and part; the options are those of :class:`SharpnessOptions`."""
    settings = settings or SharpnessOptions(**options)
    return replicates_of(model, read(model, data, target, settings), settings)


def read(model: nn.Module, data: Any, target: Any, options: SharpnessOptions) -> list[MicroBatch]:
    """Return the micro-batches of data by the options of a measurement."""
    step, numbers = options.micro_batch, options.numbers
    return micro_batches(WHO, model, data, target, loss=options.loss, micro_batch=step, numbers=numbers, shift=options.shift)


def replicates_of(model: nn.Module, batches: Sequence[MicroBatch], options: SharpnessOptions) -> Replicates:
    """Return h on some micro-batches; as :func:`replicates`."""
    return measured(Passes(model, batches, options))


class Passes:
    """Forward and backward passes of a measurement.

    Attributes:
        model: The model.
        batches: Micro-batches of this process.
        options: Options of the measurement.
        parts: Parts of the model that are measured.
        steps: Number of forward passes.
    """

    parts: MeasuredParts

    def __init__(self, model: nn.Module, batches: Sequence[MicroBatch], options: SharpnessOptions) -> None:
        self.model, self.batches, self.options, self.steps = model, batches, options, len(batches)
        for batch in batches:
            check_devices(WHO, batch, model)
        self.parts = measured_parts(model, options.parts, options.preconditioner, next(iter(batches), None))

    def whole(self, x: Tensor) -> Tensor:
        """Return the whole of a tensor that may be spread over several processes."""
        return x

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Let the model be one that passes are made of within the context."""
        with evaluating(self.model), torch.inference_mode(False), torch.enable_grad():
            yield

    def probe(self) -> None:
        """Check the model by calls with one sequence."""
        probe(self.model, self.batches, backward=True, copies=1 + self.options.histograms)

    def forward(self, k: int) -> tuple[Tensor, Drawn | None]:
        """Return the output of a step and the labels drawn for it; None where no label counts."""
        output = forward(self.model, self.batches[k])
        return output, drawn_for(output, self.batches[k], self.options)

    def slopes(self, output: Tensor, gradient: Tensor, retain: bool) -> dict[str, Tensor]:
        """Return the gradients of the parameters that an output depends on, and keep its graph if asked."""
        weights = list(self.parts.parameters.values())
        slopes = torch.autograd.grad(output, weights, gradient, retain_graph=retain, allow_unused=True)
        return self.parts.in_metric({n: g for n, g in zip(self.parts.parameters, slopes, strict=True) if g is not None})

    def result(self, sums: SquaredGradients, row_masks: Mapping[str, Tensor], start: float) -> Replicates:
        """Return the sums as replicates."""
        return sums.replicates(row_masks, start)


def measured(passes: Passes) -> Replicates:
    """Return the replicates of h that some passes give."""
    start, options = time.perf_counter(), passes.options
    with passes.prepared(), watch_lookups(passes.model, passes.parts.parts) as row_masks:
        sums = SquaredGradients(passes.parts, options, passes.whole)
        passes.probe()
        for k in range(passes.steps):
            output, drawn = passes.forward(k)
            if drawn is None:
                continue
            sums.begin(drawn.terms, drawn.sequences, drawn.unlikely)
            for d, gradient in enumerate(drawn.gradients):
                slopes = passes.slopes(output, gradient, d + 1 < options.label_draws)
                sums.add(d, slopes, row_masks)
                del slopes, gradient  # the next draw's take their place in memory
                options.tell(k, d, passes.steps)
    if not sums.values:
        raise InputError(f"{WHO}: every label is -100 (not counted); keep at least one")
    return passes.result(sums, row_masks, start)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The labels drawn for one micro-batch, as gradients of its loss.

    The square of the gradient that one of them gives a parameter is h of eq. (3) of The Sharpness Disparity Principle.
    """

    gradients: Iterator[Tensor]  # of sqrt(terms) L in the output, one a draw, each valid until the next one is read
    terms: int  # how many terms the loss is the mean of
    sequences: int  # how many sequences have a position that counts
    unlikely: float  # how many of the labels of a draw are expected not to be the likeliest one; infinite for squared error


@torch.no_grad()
def drawn_for(output: Tensor, batch: MicroBatch, options: SharpnessOptions) -> Drawn | None:
    """Draw labels for a micro-batch with this output; None where none of its positions counts."""
    if output.shape[:1] != (len(batch.numbers),):
        raise InputError(
            f"{WHO}: the model's output has shape {tuple(output.shape)} for {len(batch.numbers)} sequences; expected those"
            " along axis 0"
        )
    target = aligned(WHO, batch, output.shape, options.loss)
    if (at := spoiled_at(output.detach(), mask=options.loss == "cross_entropy")) is not None:  # -inf masks a class
        raise InputError(
            f"{WHO}: the model's output is NaN or infinite, first at {at} (sequence {batch.numbers[at[0]]} of the data);"
            " clean the input or the weights, or use a wider dtype"
        )
    if not output.requires_grad:
        raise InputError(f"{WHO}: the model's output does not depend on its parameters; do not detach it in forward")
    draw = _residuals if options.loss == "mse" else _labels
    return draw(output.detach(), target, batch.numbers, options)


def _residuals(output: Tensor, target: Tensor, numbers: Sequence[int], options: SharpnessOptions) -> Drawn:
    """Draw targets of squared error, whose mean over N entries is minus the logarithm of a Gaussian of variance 1/2.

    With y drawn from it, f - y = sqrt(1/2) xi, and the mean of the squared gradients is the diagonal of (2 / N) J^T J, the
    Gauss-Newton matrix.
    """
    if options.kind == "fisher-empirical":
        residuals = (target - output).unsqueeze(0)
    else:
        residuals = math.sqrt(0.5) * sample_residuals(output, numbers, options.draws, options.seed)
    terms = output.numel() if options.per == "token" else len(output)
    scale = 1.0 / math.sqrt(terms)
    gradients = ((-2.0 * scale * residual).to(output) for residual in residuals)
    return Drawn(gradients, terms, len(output), math.inf)


def _labels(output: Tensor, target: Tensor, numbers: Sequence[int], options: SharpnessOptions) -> Drawn | None:
    """Draw the labels of cross entropy, whose gradient with respect to the logits is the softmax less the label's unit vector."""
    is_counted = (target != IGNORE_INDEX).reshape(len(output), -1)
    sequences = int(is_counted.any(1).sum())
    terms = int(is_counted.sum()) if options.per == "token" else sequences
    if terms == 0:
        return None
    logits = output.reshape(len(output), -1, output.shape[-1])
    if options.kind == "fisher-empirical":
        labels = target.reshape(1, -1)
    else:
        labels = sample_labels(logits, numbers, options.draws, options.seed).reshape(options.draws, -1)
    rows, scale = is_counted.reshape(-1).nonzero()[:, 0], 1.0 / math.sqrt(terms)
    softmax = torch.softmax(logits.float() if logits.dtype.itemsize < 4 else logits, -1)
    softmax.mul_(is_counted.unsqueeze(-1))
    unlikely = float(is_counted.sum() - softmax.amax(-1).double().sum())
    softmax.mul_(scale)  # a product of a number and booleans would be rounded to float32
    softmax = softmax.to(output.dtype).reshape(output.shape).contiguous()
    return Drawn(_less_labels(softmax, rows, labels[:, rows], scale), terms, sequences, unlikely)


def _less_labels(softmax: Tensor, rows: Tensor, labels: Tensor, scale: float) -> Iterator[Tensor]:
    """Yield the softmax less ``scale`` at the labels (draws, rows) of some rows; each draw is written over the one before."""
    flat = softmax.view(-1, softmax.shape[-1])
    for draw_labels in labels:
        probabilities = flat[rows, draw_labels]
        flat[rows, draw_labels] = probabilities - scale
        yield softmax
        flat[rows, draw_labels] = probabilities


class SquaredGradients:
    """Running sums of squared gradients over micro-batches and draws, named like the fields of :class:`Replicates`.

    ``gather`` returns all of a tensor that is spread over several processes, and of others the tensor itself.
    """

    def __init__(
        self, selection: MeasuredParts, options: SharpnessOptions, gather: Callable[[Tensor], Tensor] = lambda x: x
    ) -> None:
        self.selection, self.options, self.gather = selection, options, gather
        self.values: list[Tensor] = []
        self.terms: list[int] = []
        self.sequences, self.unlikely = 0, 0.0
        self.rows: dict[str, Tensor] = {}
        self.entries = {name: _zeros(p.detach()) for name, p in selection.parameters.items()} if options.histograms else {}
        self.unused = set(selection.parameters)
        self.places: dict[str, list[int]] = {name: [] for name in selection.parameters}
        for k, part in enumerate(selection.parts):
            self.places[part.parameter].append(k)

    def begin(self, terms: int, sequences: int, unlikely: float) -> None:
        """Begin a micro-batch whose loss is a mean over that many terms."""
        shape = self.options.label_draws, len(self.selection.parts)
        self.values.append(torch.zeros(shape, dtype=torch.float64, device="cpu"))
        self.terms.append(terms)
        self.sequences += sequences
        self.unlikely += unlikely

    def add(self, draw: int, gradients: Mapping[str, Tensor], embeddings: Container[str]) -> None:
        """Add the gradients of a draw that an output depends on; ``embeddings`` are looked up by rows."""
        self.unused -= gradients.keys()
        squares = [torch.zeros((), device="cpu")] * len(self.selection.parts)
        for name, shard in gradients.items():
            gradient = self.gather(shard)
            for k in self.places[name]:
                squares[k] = self.selection.parts[k].squared_norm(gradient)
            if name in embeddings:
                zeros = torch.zeros(self.options.label_draws, len(gradient), dtype=torch.float64, device="cpu")
                self.rows.setdefault(name, zeros)[draw] += self.terms[-1] * row_sums(gradient)
            if (total := self.entries.get(name)) is not None:
                shard = shard.to(total.dtype)
                total.addcmul_(shard, shard, value=float(self.terms[-1]))
        self.values[-1][draw] = self._finite(squares)

    def _finite(self, squares: list[Tensor]) -> Tensor:
        """Return the parts' sums, float64 (parts,) on the CPU, after a check that they are finite."""
        if len({x.device for x in squares}) > 1:
            squares = [x.cpu() for x in squares]
        sums = torch.stack([x.to(wide(x.device)) for x in squares]).cpu().double()
        bad = ~torch.isfinite(sums)
        if bool(bad.any()):
            part = self.selection.parts[int(bad.nonzero()[0])]
            raise InputError(
                f"{WHO}: the gradient of {part.name!r} is NaN or infinite, though the output is finite; a derivative "
                "overflows there (a norm of a constant row, a square root at 0): use a wider dtype or an eps > 0"
            )
        return sums

    def replicates(self, row_masks: Mapping[str, Tensor], start: float) -> Replicates:
        """Return the sums as replicates of a measurement that began at ``start`` and looked up the rows of ``row_masks``."""
        options = self.options
        return Replicates(
            parts=self.selection.parts,
            values=torch.stack(self.values),
            terms=torch.tensor(self.terms, device="cpu"),
            squared_norms=self.selection.squared_norms(self.gather),
            rows=self.rows,
            seen={name: mask.cpu() for name, mask in row_masks.items() if name in self.rows},
            entries=self.entries,
            sequences=self.sequences,
            per=options.per,
            loss=options.loss,
            kind=options.kind,
            seed=options.seed,
            frozen=self.selection.frozen,
            unused=tuple(name for name in self.selection.parameters if name in self.unused),
            seconds=time.perf_counter() - start,
            unlikely=self.unlikely,
            metric=self.selection.metric,
        )


def row_sums(x: Tensor) -> Tensor:
    """Return the sums of squares along each row of a matrix, float64 (rows,) on the CPU.

    >>> row_sums(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).tolist()
    [25.0, 1.0]
    """
    flat = x.flatten(1)
    sums = [part.to(wide(x.device)).square().sum(1).cpu() for part in flat.split(max(1, CHUNK // flat.shape[1]))]
    return torch.cat(sums).double()


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros_like(p, dtype=torch.float32 if p.dtype.itemsize < 4 else p.dtype)
