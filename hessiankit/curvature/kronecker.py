"""Kronecker factors of weights, from their inputs and from gradients of their outputs for every column of L''."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from derivations.loss import SampledLoss
from hessiankit.curvature.jacobian import JacobianOperator
from hessiankit.curvature.structures import DenseBlock, KroneckerBlock, Structure, dense_block, kronecker_block
from hessiankit.engine.jacobians import GainJacobian, ParameterJacobian, WeightJacobian, find_sites
from hessiankit.engine.problem.calling import IGNORE_INDEX, LOSSES, known_count
from hessiankit.engine.problem.fisher import as_gauss_newton, counted_samples
from hessiankit.engine.problem.loss_trace import loss_primitive, normalizer_of, samples_are_independent
from hessiankit.engine.problem.task import Task
from hessiankit.support.errors import InputError
from hessiankit.tracing.trace import Trace

ENTRIES = 2**23  # numbers of one chunk of gradients
PULLED, DRAWS = 4096, 16
"""Columns of L'' that are pulled back one by one at most; the labels drawn for each term in their place where there are more."""


def columns(task: Task, Z: Tensor, share: float) -> Tensor:
    """Return vectors s, (K, B, T, C), whose outer products sum to the second derivative of ``share`` times the loss in each row.

    Squared error: sqrt(2/N) e_c. Cross entropy: sqrt(p_c / N) (e_c - p). A sampled Fisher: its gradients. Z is the output.
    """
    sampled = loss_primitive(task, normalizer_of(task))
    if isinstance(sampled, SampledLoss):
        G = torch.stack(list(sampled.terms(Z, task.target)))
        return share**0.5 * G.reshape(*G.shape[:2], -1, G.shape[-1])
    count = known_count(task.loss, task.target)
    assert count is not None
    if task.loss == "mse":
        rows = Z.reshape(-1, 1, 1) if Z.ndim < 2 else Z.reshape(len(Z), -1, Z.shape[-1])
        eye = torch.eye(rows.shape[-1], dtype=Z.dtype, device=Z.device)
        return (2 * share / count) ** 0.5 * eye[:, None, None, :].expand(-1, *rows.shape)
    rows = Z.reshape(1 if Z.ndim == 1 else len(Z), -1, Z.shape[-1])
    p = torch.softmax(rows, -1)
    s = p.movedim(-1, 0).unsqueeze(-1).sqrt() * (torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)[:, None, None, :] - p)
    counted = (task.target != IGNORE_INDEX).reshape(1, *rows.shape[:2], 1)
    return (share / count) ** 0.5 * s * counted


@dataclass
class LayerFactors:
    """A parameter's use at one site, with its Kronecker factors as they are summed."""

    parameter: str
    at: Tensor | None  # positions in the parameter's vec_r; None: all
    transposed: bool  # whether it is stored as (outputs, inputs)
    inputs: Tensor | None  # sum of x x^T; None for a bias
    gradients: Tensor  # sum of g g^T
    rows: int = 0  # that were summed


class FactoredBatch(JacobianOperator):
    """The Jacobian of the output of one batch, with the sites of weights and biases on the way, and the columns of L''.

    Where the rows of all sites are those of the samples, one after the other, that do not depend on each other, samples are
    treated ``together``: one covector holds a column of every sample. A column that holds the ``drawn`` labels of all terms is
    pulled back at once. ``held`` are the weights and biases whose whole gradient comes from one site, by the id of its value.
    """

    def __init__(self, task: Task, share: float, seed: int) -> None:
        super().__init__(task)
        Z = self.output
        together = Z.ndim > 0 and len(Z) == task.batch > 1 and samples_are_independent(task)
        self.together = together and all(n == task.batch for n in self.leading.values())
        sweeps, classes = Z.numel() // (task.batch if self.together else 1), Z.shape[-1] if Z.ndim else 1
        self.counted = counted_samples(task) if self.together else slice(None)
        self.drawn = sweeps > PULLED and classes > 1 and task.loss in LOSSES
        self.columns = columns(as_gauss_newton(task, "fisher-mc", seed=seed, draws=DRAWS) if self.drawn else task, Z, share)
        self.held = self._used_once()

    def _prepare(self, task: Task, trace: Trace) -> None:
        super()._prepare(task, trace)
        reached = {step.output for step in self._steps}
        self.sites = {at: site for at, site in find_sites(trace).items() if at in reached}
        self.leading = {at: trace.values[at].shape[0] for at in self.sites}
        self.output = trace.values[self._output]

    def _at_sites(self, rows: Tensor) -> dict[int, Tensor]:
        """Return covectors (S, outputs) pulled back to the value of each site: (S, rows, p)."""
        covectors_of: dict[int, Tensor] = {}
        with self._at_the_point():
            self._pulled(rows, self.sites, covectors_of.__setitem__)
        return {at: bar.reshape(len(bar), -1, bar.shape[-1]) for at, bar in covectors_of.items()}

    def _used_once(self) -> list[tuple[int, ParameterJacobian]]:
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(1, self.shape[0], generator=generator, dtype=torch.float64, device="cpu")
        u = u.to(self.device, self.torch_dtype)
        bars, whole = self._at_sites(u), self.pull(u)[0]
        used = []
        for at, site in self.sites.items():
            for one in site.jacobians:
                bias = isinstance(one, GainJacobian) and one.is_ones
                if at not in bars or not (isinstance(one, WeightJacobian) or bias):
                    continue
                own = one.vjp(bars[at][0].unsqueeze(-1))[:, 0]
                of_whole = whole[self.slices[one.parameter]]
                of_whole = of_whole if one.at is None else of_whole[one.at.to(self.device)]
                if float((own - of_whole).abs().max()) <= torch.finfo(self.torch_dtype).eps ** 0.5 * float(own.abs().max()):
                    used.append((at, one))
        return used

    def bars(self) -> Iterator[dict[int, Tensor]]:
        """Yield gradients at the sites for some columns of L'' at a time."""
        K, B, T, C = self.columns.shape
        most = max(1, min(self.block_size, ENTRIES // self.output.numel()))
        samples: list[Any] = [slice(None)] if self.together else list(range(B))
        terms: list[Any] = [slice(None)] if self.drawn else list(range(T))
        places = [(k, t, b) for k in range(K) for t in terms for b in samples]
        for start in range(0, len(places), most):
            chunk = places[start : start + most]
            rows = self.columns.new_zeros(len(chunk), B, T, C)
            for n, (k, t, b) in enumerate(chunk):
                rows[n, b, t] = self.columns[k, b, t]
            yield self._at_sites(rows.reshape(len(chunk), -1))


class KroneckerFactors:
    """Kronecker factors of the Gauss-Newton blocks of the weights and biases of some batches.

    For z = X W, A = sum_n x_n x_n^T / rows and G = sum g_n g_n^T over rows n and over the columns of L'', each pulled back by
    itself: the expectation of KFAC-expand over the model's labels (Martens and Grosse 2015; Eschenhagen et al. 2023). Where that
    takes more than :data:`PULLED` sweeps of a batch, :data:`DRAWS` labels are drawn for each term, and one draw for all terms is
    pulled back at once: its mean is the same. Weights and biases are separate. Parameters that occur at several sites, or in
    other ways, have no factors. The batches have named losses, or those of a sampled Fisher.
    """

    def __init__(self, tasks: Sequence[Task], shares: Sequence[float], *, seed: int = 0) -> None:
        if not all(isinstance(task.loss, str) for task in tasks):
            raise InputError("KFAC needs a loss with known second derivative, 'mse' or 'cross_entropy'")
        self.slices = tasks[0].slices
        self.weights: list[LayerFactors] = []
        self._batches = [FactoredBatch(task, share, seed) for task, share in zip(tasks, shares, strict=True)]
        self.is_drawn = any(batch.drawn for batch in self._batches)
        names = set.intersection(*({one.parameter for _, one in batch.held} for batch in self._batches))
        for batch in self._batches:
            batch.held = [(at, one) for at, one in batch.held if one.parameter in names]
        zeros = self._batches[0].output.new_zeros
        for _, one in self._batches[0].held:
            if isinstance(one, WeightJacobian):
                n, width, transposed = one.X.shape[1], one.width, one.transposed
                factors = LayerFactors(one.parameter, one.at, transposed, zeros(n, n), zeros(width, width))
            else:
                factors = LayerFactors(one.parameter, one.at, False, None, zeros(one.size, one.size))
            self.weights.append(factors)
        for batch in self._batches:
            self._add(batch)

    def _add(self, batch: FactoredBatch) -> None:
        for weight, (_, one) in zip(self.weights, batch.held, strict=True):
            if isinstance(one, WeightJacobian):
                assert weight.inputs is not None
                rows = len(batch.output) if batch.together else 1
                X = one.X.reshape(rows, -1, one.X.shape[1])[batch.counted].flatten(0, 1)
                weight.inputs += X.T @ X
                weight.rows += len(X)
        for bars in batch.bars():
            for weight, (at, _) in zip(self.weights, batch.held, strict=True):
                if at in bars:
                    g = bars[at].reshape(-1, bars[at].shape[-1])
                    weight.gradients += g.T @ g

    def positions(self, weight: LayerFactors) -> Tensor:
        """Return the positions of a weight's entries in a vector of all parameters, (i p,) in vec_r of how it is stored."""
        rows = self.slices[weight.parameter]
        every = torch.arange(rows.start, rows.stop, device=weight.gradients.device)
        return every if weight.at is None else every[weight.at.to(every.device)]

    def kfac(self) -> list[Structure]:
        """Return A (x) G for every weight, G for every bias."""
        if not self.weights:
            raise InputError("no weight or bias occurs just once, so that there are no Kronecker factors")
        structures: list[Structure] = []
        for w in self.weights:
            if w.inputs is None:
                structures.append(dense_block(self.positions(w), w.gradients))
            else:
                pair = (w.inputs / w.rows, w.gradients)
                structures.append(kronecker_block(self.positions(w), *(pair[::-1] if w.transposed else pair)))
        return structures

    def ekfac(self) -> list[Structure]:
        """Return (U_A (x) U_G) diag(s) (U_A (x) U_G)^T, s the diagonal of the exact block in that basis (George et al. 2018)."""
        kfac = self.kfac()
        squares = [torch.zeros_like(part.values) for part in kfac]
        for batch in self._batches:
            for bars in batch.bars():
                for part, total, (at, one) in zip(kfac, squares, batch.held, strict=True):
                    if at in bars:
                        groups = batch.leading[at] if batch.together else 1
                        total += _squares(part, one, bars[at].reshape(len(bars[at]), groups, -1, bars[at].shape[-1]))
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
