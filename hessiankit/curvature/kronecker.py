"""Kronecker factors of weights, from their inputs and from gradients of their outputs for every column of L''."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hessiankit.curvature.jacobian import NOTHING, JacobianOperator
from hessiankit.curvature.structures import DenseBlock, KroneckerBlock, Structure, dense_block, kronecker_block
from hessiankit.engine.diagonal_sum import TooCostly
from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import GainJacobian, ParameterJacobian, WeightJacobian, find_sites
from hessiankit.engine.linearisation import LinearisedBatch
from hessiankit.primitives.binary import Binary
from hessiankit.primitives.directions import unbroadcast
from hessiankit.primitives.elementwise import Divide
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.primitives.linear import Multiply
from hessiankit.primitives.loss import SampledLoss
from hessiankit.primitives.primitive import Entrywise
from hessiankit.primitives.softmax import LinearisedSoftmax
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.fisher import Curvature
from hessiankit.request.loss import NAMES
from hessiankit.request.loss_trace import LossTrace
from hessiankit.support.errors import InputError
from hessiankit.tracing.trace import Trace

ENTRIES = 2**23  # numbers of one chunk of gradients
PULLED, DRAWS = 4096, 16
"""Columns of L'' with a label that are pulled back one by one at most; the labels drawn for each term in their place where there
are more."""


def columns(batch: BatchLoss, Z: Tensor) -> Tensor:
    """Return vectors s, (K, B, T, C), whose outer products sum to the second derivative in each row of the loss, times its share.

    Squared error: sqrt(2/N) e_c. Cross entropy: sqrt(p_c / N) (e_c - p). A sampled Fisher: its gradients. Z is the output.
    """
    sampled, share, count = batch.loss.primitive(batch.normalizer), batch.share, batch.normalizer
    if isinstance(sampled, SampledLoss):
        G = torch.stack(list(sampled.terms(Z, batch.target)))
        return share**0.5 * G.reshape(*G.shape[:2], -1, G.shape[-1])
    if batch.loss.name == "mse":
        rows = Z.reshape(-1, 1, 1) if Z.ndim < 2 else Z.reshape(len(Z), -1, Z.shape[-1])
        eye = torch.eye(rows.shape[-1], dtype=Z.dtype, device=Z.device)
        return (2 * share / count) ** 0.5 * eye[:, None, None, :].expand(-1, *rows.shape)
    rows = Z.reshape(1 if Z.ndim == 1 else len(Z), -1, Z.shape[-1])
    p = torch.softmax(rows, -1)
    s = p.movedim(-1, 0).unsqueeze(-1).sqrt() * (torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)[:, None, None, :] - p)
    return (share / count) ** 0.5 * s * has_label(batch, Z).reshape(1, *rows.shape)


def has_label(batch: BatchLoss, Z: Tensor) -> Tensor:
    """Return the entries of the output that a term of the loss reads: those of rows whose label is not ignored."""
    if batch.loss.plain == "mse":
        return torch.ones_like(Z, dtype=torch.bool)
    return (batch.own_target != IGNORE_INDEX).reshape(Z.shape[:-1]).unsqueeze(-1).expand(Z.shape)


def reached_inputs(step: Step, bar: Tensor) -> list[Tensor | None]:
    """Return masks of the entries of a step's inputs on which some entries of its output depend.

    A generic covector is pulled back: entries hidden by a mask or an index have no derivative. Derivatives that are zero only
    at this point count as nonzero: those of a ReLU, of a product with moving factors, of a maximum. Behind a softmax, the
    logits of all nonzero weights count, although a weight of 1 has no derivative.

    Args:
        step: A linearised application.
        bar: Generic numbers at these entries of the output, zero elsewhere.
    """
    point, primitive = step.primitive, step.primitive.primitive
    marks = (bar != 0).to(bar).unsqueeze(0)
    if isinstance(primitive, (Entrywise, Binary, Divide)) or (isinstance(primitive, Multiply) and None not in step.inputs):
        return [unbroadcast(marks, x.shape)[0] > 0 for x in point.inputs]
    if axes := primitive.choice_axes(point.inputs):
        shape = point.inputs[0].shape
        groups = bar if bar.ndim == len(shape) else bar.reshape([1 if axis in axes else n for axis, n in enumerate(shape)])
        return [(groups != 0).any(axes, keepdim=True).expand(shape)]
    if isinstance(point, LinearisedSoftmax):
        return [(bar != 0).any(point.axis, keepdim=True) & (point.a != 0)]
    masks = [None if c is None else c[0] != 0 for c in point.pull(bar.unsqueeze(0))]
    if isinstance(primitive, ScaledDotProductAttention):  # each query of a row, and the keys that it attends to, as their values
        Q, K = (x.shape for x in point.inputs[:2])
        masks[0] = (unbroadcast(marks.amax(-1, keepdim=True), torch.Size((*Q[:-1], 1)))[0] > 0).expand(Q)
        masks[1] = masks[1] if masks[2] is None else masks[2].any(-1, keepdim=True).expand(K)
    return masks


def generic(count: int) -> Tensor:
    """Return generic numbers, float64 (count,) on the CPU, the same always."""
    return torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")


@dataclass
class LayerFactors:
    """A parameter's use at one site, with its Kronecker factors as they are summed."""

    parameter: str
    at: Tensor | None  # positions in the parameter's vec_r; None: all
    entries: Tensor  # the same in a vector of all parameters
    transposed: bool  # whether it is stored as (outputs, inputs)
    inputs: Tensor | None  # sum of x x^T; None for a bias
    gradients: Tensor  # sum of g g^T
    rows: int = 0  # terms of the sum of x x^T
    is_even: bool = True  # whether these are equally many of each sample

    @property
    def moment(self) -> Tensor:
        """Mean of x x^T; zero without rows, where g is zero too."""
        assert self.inputs is not None
        return self.inputs / max(self.rows, 1)


class FactoredBatch(JacobianOperator):
    """The Jacobian of the output of one batch, with the sites of parameters on the way, and the columns of L''.

    Where the rows of all sites are those of the samples, one after the other, that do not depend on each other, samples are
    treated ``together``: one covector holds a column of every sample. A column that holds the ``drawn`` labels of all terms is
    pulled back at once, ``pooled`` labels of a sampled Fisher too. ``held`` are the weights and biases whose whole gradient comes
    from one site, by the id of its value; ``uses`` all sites of the parameters whose whole gradient comes from sites. Covectors
    are pulled back to the sites, not to these parameters.
    """

    def __init__(self, batch: BatchLoss, seed: int, *, pooled: bool, point: LinearisedBatch | None = None) -> None:
        self._point, self.samples = point, batch.n_samples
        super().__init__(batch)
        Z = self.output
        self._find_uses()
        self._one_draw = pooled
        self._labelled, classes = has_label(batch, Z), Z.shape[-1] if Z.ndim else 1
        self.drawn = False
        if not pooled and classes > 1 and batch.loss.name in NAMES:
            sweeps = (self._labelled.reshape(len(Z), -1).any(0) if self.together else self._labelled).sum()
            self.drawn = int(sweeps) > PULLED
        self.columns = columns(Curvature("fisher-mc", seed, DRAWS).of(batch) if self.drawn else batch, Z)
        self.pooled = pooled or self.drawn

    def _compare(self, batch: BatchLoss, traced: LossTrace) -> None:
        """Compare with the point at which a linearisation was made; its own trace has been compared if it is this one."""
        if self._point is None or not self._point.is_of(traced):
            super()._compare(batch if self._point is None else self._point.reference(batch), traced)

    def _prepare(self, batch: BatchLoss, trace: Trace, covered: Mapping[int, Collection[int]] = NOTHING) -> None:
        sites, uses = find_sites(trace), Counter(at for a in trace.applications for at in a.inputs)
        of_output = {a.output: a for a in trace.applications}
        for site in list(sites.values()):
            # rows of a table enter once: where they are added, or where they are read if they are not only added
            for place, one in list(zip(site.covered, site.jacobians, strict=False)):
                at = of_output[site.value].inputs[place]
                if uses[at] == 1:
                    sites.pop(at, None)  # type: ignore[arg-type]
                elif at in sites:
                    site.jacobians.remove(one)
                    site.covered = tuple(k for k in site.covered if k != place)
        super()._prepare(batch, trace, {at: site.covered for at, site in sites.items() if site.covered})
        self.sites = {at: site for at, site in sites.items() if at in self._needed}
        self.leading = {at: trace.values[at].shape[0] for at in self.sites}
        self.output, self._widest = trace.values[self._output], max(trace.values[at].numel() for at in self._needed)
        self._mixed: set[int] = set()  # values of which an entry may reach several rows of the output
        for step in reversed(self._steps):
            a = of_output[step.output]
            for place, at in enumerate(step.inputs):
                moves = [k == place for k in range(len(a.inputs))]
                if at is not None and (a.output in self._mixed or not a.primitive.rowwise(trace.gather(a), 1, moves)):  # type: ignore[arg-type]
                    self._mixed.add(at)

    def _at_sites(self, rows: Tensor) -> dict[int, Tensor]:
        """Return covectors (S, outputs) pulled back to the value of each site, (S, rows, p)."""
        covectors_of: dict[int, Tensor] = {}
        with self._at_the_point():
            self._pulled(rows, self.sites, covectors_of.__setitem__)
        return {at: bar.reshape(len(bar), -1, bar.shape[-1]) for at, bar in covectors_of.items()}

    def reached(self) -> dict[int, Tensor]:
        """Return the rows of each site on which the entries of the output with a label depend, as masks."""
        numbers = generic(self._widest).to(self.output)
        masks = {self._output: self._labelled}
        with self._at_the_point():
            for step in reversed(self._steps):
                if step.output not in masks:
                    continue
                u = numbers[: masks[step.output].numel()].reshape(masks[step.output].shape)
                for at, mask in zip(step.inputs, reached_inputs(step, u * masks[step.output]), strict=True):
                    if at is not None and mask is not None:
                        masks[at] = masks[at] | mask if at in masks else mask
        return {at: masks[at].any(-1).reshape(-1) for at in self.sites if at in masks}

    def _find_uses(self) -> None:
        """Set ``held`` and ``uses``."""
        self.held: list[tuple[int, ParameterJacobian]] = []
        self.uses: dict[str, list[tuple[int, ParameterJacobian]]] = {
            name: [] for name, at in self._ids.items() if at not in self._needed
        }
        for at, site in self.sites.items():
            for one in site.jacobians:
                if one.parameter in self.uses:
                    self.uses[one.parameter].append((at, one))
        for uses in self.uses.values():
            counts = torch.zeros(self.shape[1] if len(uses) > 1 else 0, dtype=torch.int64, device=self.device)
            for _, one in uses if len(uses) > 1 else ():
                counts[self.entries(one)] += 1
            for at, one in uses:
                has_factors = isinstance(one, WeightJacobian) or (isinstance(one, GainJacobian) and one.is_ones)
                if has_factors and (len(uses) == 1 or int(counts[self.entries(one)].max()) == 1):
                    self.held.append((at, one))

    @cached_property
    def groups(self) -> dict[int, int]:
        """Groups of the rows of each site: by the shapes of the steps and, where these mix samples, by gradients of halves.

        Samples are apart where the gradient of each half is zero at the rows of the other: of all halves by a digit of their
        numbers, or of pooled labels, whose mean is the same for any groups, of one.
        """
        n = self.samples
        has_samples = self.output.ndim > 0 and len(self.output) == n > 1
        by_sample = [at for at in self.sites if has_samples and self.leading[at] == n]
        groups = {at: n if at in by_sample and at not in self._mixed else 1 for at in self.sites}
        if open_sites := [at for at in by_sample if at in self._mixed]:
            digits = 2 ** torch.arange(1 if self._one_draw else max(n - 1, 1).bit_length(), device=self.device).unsqueeze(1)
            odd = torch.arange(n, device=self.device) // digits % 2 == 1  # any two samples are apart in one of these rows
            halves = odd if self._one_draw else torch.cat([odd, ~odd])
            u = generic(self.shape[0]).to(self.output).reshape(1, n, -1)
            bars = [self._at_sites(rows) for rows in (u * halves.unsqueeze(2)).flatten(1).split(self.block_size)]
            for at in open_sites:
                bar = torch.cat([part[at] for part in bars if at in part])
                groups[at] = 1 if bool(bar.reshape(len(bar), n, -1)[~halves].any()) else n
        return groups

    @property
    def together(self) -> bool:
        """Whether one covector holds a column of every sample."""
        return min(self.groups.values(), default=1) > 1

    def entries(self, one: ParameterJacobian) -> Tensor:
        """Return the positions of the entries of a Jacobian in a vector of all parameters."""
        rows = self.slices[one.parameter]
        positions = torch.arange(rows.start, rows.stop, device=self.device)
        return positions if one.at is None else positions[one.at.reshape(-1).to(self.device)]

    def uses_weight(self, names: Sequence[str]) -> bool:
        """Tell whether one of some parameters is a weight at some site."""
        return any(isinstance(one, WeightJacobian) for name in names for _, one in self.uses.get(name, ()))

    def add_squares(self, name: str, bars: dict[int, Tensor], total: Tensor) -> None:
        """Add the squares of a parameter's gradients, by covector and sample, to the diagonal ``total`` (P,)."""
        uses = [(at, one, self.entries(one)) for at, one in self.uses[name] if at in bars]
        if not uses:
            return
        groups, count = min(self.groups[at] for at, _, _ in uses), len(bars[uses[0][0]])
        entries = torch.cat([at for _, _, at in uses]).unique()
        for chunk in torch.arange(count, device=self.device).split(max(1, ENTRIES // (groups * len(entries)))):
            gradients = total.new_zeros(groups, len(entries), len(chunk))
            for at, one, places in uses:
                g = bars[at][chunk]
                x = g.reshape(len(chunk), groups, -1, g.shape[-1]).permute(1, 2, 3, 0)
                gradients[:, torch.searchsorted(entries, places)] += one.vjp_by_group(x)
            total[entries] += gradients.square().sum((0, 2))

    def bars(self) -> Iterator[dict[int, Tensor]]:
        """Yield gradients at the sites for some columns of L'' at a time."""
        K, B, T, C = self.columns.shape
        most = max(1, min(self.block_size, ENTRIES // self.output.numel()))
        if self.pooled:
            yield from map(self._at_sites, self.columns.reshape(K, -1).split(most))
            return
        samples: list[Any] = [slice(None)] if self.together else list(range(B))
        counts = (self.columns != 0).any(0).any(-1).cpu()  # (B, T); rows without a label give nothing
        rows_of = [(t, b) for t in range(T) for b in samples if bool(counts[b, t].any())]
        places = [(k, t, b) for k in range(K) for t, b in rows_of]
        for start in range(0, len(places), most):
            chunk = places[start : start + most]
            rows = self.columns.new_zeros(len(chunk), B, T, C)
            for n, (k, t, b) in enumerate(chunk):
                rows[n, b, t] = self.columns[k, b, t]
            yield self._at_sites(rows.reshape(len(chunk), -1))


class KroneckerFactors:
    """Kronecker factors of the Gauss-Newton blocks of the weights and biases of some batches.

    For z = X W, A = sum_n x_n x_n^T / R and G = sum g_n g_n^T over rows n and over the columns of L'', each pulled back by
    itself: the expectation of KFAC-expand over the model's labels (Martens and Grosse 2015; Eschenhagen et al. 2023). A sums
    over the R rows of all batches on which a term of the loss depends, as :func:`reached_inputs` tells. The others have
    g_n = 0 whatever the parameters: where rows stay apart, those whose label is ignored; before attention, those that no row
    with a label attends to; and rows that a mask or an index leaves out. So they change neither A nor R. Where that expectation
    takes more than :data:`PULLED` sweeps of a batch, :data:`DRAWS` labels are drawn for each term, and one draw for all terms is
    pulled back at once: its mean is the same. Weights and biases are separate. Parameters that occur at several sites, or in
    other ways, have no factors. ``diagonal`` makes their exact diagonal. Where labels are drawn, or where it is too costly,
    embeddings, gains and weights at several sites have the sum of the squares of their gradients instead. The batches have named
    losses, or those of a sampled Fisher, whose drawn labels may be ``pooled``: all terms are pulled back at once, for the same
    mean over labels.
    """

    def __init__(
        self,
        batches: Sequence[BatchLoss],
        *,
        seed: int = 0,
        pooled: bool = False,
        diagonal: Callable[[], Tensor] | None = None,
        points: Sequence[LinearisedBatch] | None = None,
    ) -> None:
        if not all(batch.loss.name for batch in batches):
            raise InputError("KFAC needs a loss with known second derivative, 'mse' or 'cross_entropy'")
        self.slices = batches[0].slices
        self.weights: list[LayerFactors] = []
        at_points = zip(batches, points or itertools.repeat(None), strict=False)
        self._batches = [FactoredBatch(batch, seed, pooled=pooled, point=point) for batch, point in at_points]
        self.is_drawn = any(batch.drawn for batch in self._batches)
        names = set.intersection(*({one.parameter for _, one in batch.held} for batch in self._batches))
        for batch in self._batches:
            batch.held = [(at, one) for at, one in batch.held if one.parameter in names]
        zeros, entries = self._batches[0].output.new_zeros, self._batches[0].entries
        for _, one in self._batches[0].held:
            if isinstance(one, WeightJacobian):
                n, width, transposed = one.X.shape[1], one.width, one.transposed
                factors = LayerFactors(one.parameter, one.at, entries(one), transposed, zeros(n, n), zeros(width, width))
            else:
                factors = LayerFactors(one.parameter, one.at, entries(one), False, None, zeros(one.size, one.size))
            self.weights.append(factors)
        covered = Counter[str]()
        for _, one in self._batches[0].held:
            covered[one.parameter] += one.size
        sizes = {name: rows.stop - rows.start for name, rows in self.slices.items()}
        rest = [name for name, size in sizes.items() if diagonal is not None and covered[name] < size]
        has_all = all(name in batch.uses for batch in self._batches for name in rest)
        self.diagonal, self._squared = zeros(batches[0].size), rest
        # gradients of a weight take as long as all of its block's diagonal, for every column
        dear = [batch for batch in self._batches if not batch.pooled and batch.uses_weight(rest)]
        if diagonal is not None and (dear or not has_all):
            try:  # before the sums
                self.diagonal, self._squared = diagonal(), []
            except TooCostly:
                if not has_all:
                    raise
        for batch in self._batches:
            self._add(batch)

    def _add(self, batch: FactoredBatch) -> None:
        live: dict[int, Tensor] = {}  # rows with a gradient
        for bars in batch.bars():
            grams: dict[int, Tensor] = {}  # of a weight and of the bias beside it
            for weight, (at, one) in zip(self.weights, batch.held, strict=True):
                if at not in bars:
                    continue
                if at not in grams:
                    g = bars[at].reshape(-1, bars[at].shape[-1])
                    grams[at] = g.T @ g
                weight.gradients += grams[at]
                if isinstance(one, WeightJacobian) and not (batch.pooled and at in live):
                    rows = (bars[at][:1] if batch.pooled else bars[at]).any(-1).any(0)
                    live[at] = live[at] | rows if at in live else rows
            for name in self._squared:
                batch.add_squares(name, bars, self.diagonal)
        if not all(bool(rows.all()) for rows in live.values()):
            live = batch.reached()
        for weight, (at, one) in zip(self.weights, batch.held, strict=True):
            if isinstance(one, WeightJacobian) and at in live:
                assert weight.inputs is not None
                rows = live[at]
                X = one.X if bool(rows.all()) else one.X[rows]
                weight.inputs.addmm_(X.T, X)
                weight.rows += len(X)
                counts = rows.reshape(batch.samples, -1).sum(1) if len(rows) % batch.samples == 0 else rows.sum(0, True)
                weight.is_even &= bool((counts == counts[0]).all())

    def check(self) -> None:
        """Raise InputError where there are no factors."""
        if not self.weights:
            raise InputError("no weight or bias occurs just once, so that there are no Kronecker factors")

    def kfac(self) -> list[Structure]:
        """Return A (x) G for every weight, G for every bias."""
        self.check()
        structures: list[Structure] = []
        for w in self.weights:
            if w.inputs is None:
                structures.append(dense_block(w.entries, w.gradients))
            else:
                pair = (w.moment, w.gradients)
                structures.append(kronecker_block(w.entries, *(pair[::-1] if w.transposed else pair)))
        return structures

    def ekfac(self) -> list[Structure]:
        """Return (U_A (x) U_G) diag(s) (U_A (x) U_G)^T, s the diagonal of the exact block in that basis (George et al. 2018)."""
        kfac = self.kfac()
        squares = [torch.zeros_like(part.values) for part in kfac]
        for batch in self._batches:
            for bars in batch.bars():
                for part, total, (at, one) in zip(kfac, squares, batch.held, strict=True):
                    if at in bars:
                        total += _squares(part, one, bars[at].reshape(len(bars[at]), batch.groups[at], -1, bars[at].shape[-1]))
        return [replace(part, values=total) for part, total in zip(kfac, squares, strict=True)]


def _squares(part: Structure, one: ParameterJacobian, g: Tensor) -> Tensor:
    """Return the sums of squares of gradients in the basis of a structure: g (S, samples, rows, p) to (n,)."""
    if isinstance(part, DenseBlock):
        return (g.sum(2) @ part.basis).square().sum((0, 1))
    assert isinstance(part, KroneckerBlock)
    assert isinstance(one, WeightJacobian)
    U, V = (part.right, part.left) if one.transposed else (part.left, part.right)
    x = one.X.reshape(g.shape[1], -1, one.X.shape[1]) @ U
    total = x.new_zeros(U.shape[1], V.shape[1])
    for chunk in (g @ V).split(max(1, ENTRIES // (g.shape[1] * total.numel()))):
        total += torch.einsum("bti,sbtp->sbip", x, chunk).square().sum((0, 1))
    return (total.T if one.transposed else total).reshape(-1)
