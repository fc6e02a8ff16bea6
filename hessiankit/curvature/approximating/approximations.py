"""Approximations of a curvature matrix, built at one point and measured against the exact matrix there."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from hessiankit.curvature.approximating.measure import DenseTruth, Model, ProductTruth
from hessiankit.curvature.approximating.optimizers import MiniBatchMoments, sample_gradients
from hessiankit.curvature.approximating.report import Approximation, ApproximationsReport
from hessiankit.curvature.diagonal import diagonal_of
from hessiankit.curvature.evaluation import Evaluation
from hessiankit.curvature.kronecker import DRAWS, KroneckerFactors
from hessiankit.curvature.operator import HessianOperator
from hessiankit.curvature.structures import LowRankPlusDiagonal, Structure, StructuredOperator, dense_block, diagonal
from hessiankit.curvature.suboperators import Partition, groups_by, positions
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.fisher import KINDS
from hessiankit.request.read import read_request
from hessiankit.request.signature import RequestArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_count, check_name
from hessiankit.support.torch_state import one_at_a_time

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "approximations"
APPROXIMATIONS = {
    "identity": "no preconditioner",
    "diagonal": "the exact diagonal",
    "tensor": "exact blocks of parameters",
    "kfac": "A (x) G of each weight (expand)",
    "ekfac": "KFAC's basis, exact second moments in it",
    "adam": "diag(v), divides by its root",
    "shampoo": "L^(1/2) (x) R^(1/2), divides by its root",
    "muon": "G G^T (x) I, divides by its root",
    "low-rank": "top eigenpairs and the diagonal of the rest",
}
"""Approximations, in the order of the table; those by partitions follow ``"tensor"``."""
DENSE = 2000  # parameters up to which the exact matrix is formed unless asked otherwise
METHODS = ("auto", "dense", "products")


def parameters(_: nn.Module | None, names: Collection[str]) -> dict[str, str]:
    """Return the partition with a block for each parameter."""
    return {name: name for name in names}


@checked(WHO)
@one_at_a_time
@asks(RequestArguments)
def approximations(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    against: str = "hessian",
    of: Iterable[str] | None = None,
    damping: float | None = None,
    rank: int = 10,
    minibatch: int = 1,
    method: str = "auto",
    products: int = 60,
    batch_size: int | None = None,
    seed: int = 0,
    draws: int = 1,
    partitions: Mapping[str, Partition] | None = None,
    **asked: Unpack[RequestArguments],
) -> ApproximationsReport:
    """Return structured approximations C of a curvature matrix A, each with its distance from the exact A.

    Errors in the Frobenius and the spectral norm, whole and by pair of parameters; the cosine of the damped step
    (C + damping I)^-1 g with the exact damped Newton (for ``against="ggn"`` natural) step (A + damping I)^-1 g; and the
    condition number of the preconditioned (A + damping I). Adam, Shampoo and Muon divide by (C + d I)^(1/2), d in proportion
    to the size of their C, which is not that of A: judge them by alignment, cosine and condition number, not by their errors.

    KFAC is the expectation of KFAC-expand over the model's labels, with the factors of weights and of biases apart (Martens and
    Grosse 2015; Eschenhagen et al. 2023), EKFAC its correction (George et al. 2018). Both have factors for weights and biases
    that occur once, wherever the module multiplies by them; other parameters have their exact diagonal. The factor of the inputs
    is a mean over the rows on which a term of the loss depends, so that padding without labels has no weight.

    ``against`` is the kind of :func:`hessiankit.hessian_operator`. For a loss without a name there is no KFAC.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two.
        inputs: What it is called with.
        target: What the loss compares with.
        **asked: Arguments of :class:`~hessiankit.request.signature.RequestArguments`.
        against: The matrix A.
        of: Which approximations, of ``"diagonal"``, ``"tensor"``, ``"layer"``, ``"type"``, ``"kfac"``, ``"ekfac"``, ``"adam"``,
            ``"shampoo"``, ``"muon"``, ``"low-rank"``; by default all that can be made. The identity is always there.
        damping: Added to the diagonal of A; by default 1 % of its spectral norm, and on top of that minus its least eigenvalue
            where that is negative.
        rank: Eigenpairs of ``"low-rank"``, those of largest magnitude.
        minibatch: Samples of the mini-batches whose gradients' moments Adam and Shampoo have.
        method: ``"dense"``: with A in memory. ``"products"``: by products with A, with 95 % intervals of the Frobenius errors;
            no errors by pair and no block-diagonal parts. ``"auto"``: dense up to 2000 parameters.
        products: Products with A for each estimate.
        seed: Seed of drawn labels and random vectors.
        partitions: Name of an approximation by exact blocks -> a function of the module and of the names of its parameters, which
            returns a dict of block to names, patterns or slices; by default ``"layer"`` and ``"type"``, the blocks and the block
            types of :func:`hessiankit.block_types`.

    Raises:
        InputError: If an argument cannot be used, or what was asked for in ``of`` cannot be made.
        TraceError: If torch cannot trace the module.
        OutOfMemoryError: If A does not fit where ``method="dense"``.

    The Hessian 2/(L d_out) X^T X (x) I of one linear layer is a Kronecker product, so that KFAC is exact:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> found = approximations(layer, x, torch.zeros(2, 1, dtype=torch.float64), of=["diagonal", "kfac"])
    >>> round(found["diagonal"].measures.frobenius.value, 4), found["kfac"].measures.frobenius.value < 1e-12
    (0.5345, True)
    """
    start = time.perf_counter()
    check_name(WHO, "against", against, KINDS)
    check_name(WHO, "method", method, METHODS)
    selected = None if of is None else list(of)
    groupings = {"tensor": parameters, **(partitions or {})}
    all_names = tuple(dict.fromkeys(("identity", "diagonal", *groupings, *APPROXIMATIONS)))
    for name in selected or ():
        check_name(WHO, "of", name, all_names)
    for name, value, least in (("rank", rank, 1), ("minibatch", minibatch, 1), ("products", products, 6)):
        if value < least:
            raise InputError(f"{WHO}: {name}={value}; pass {least} or more")
    if damping is not None and not (math.isfinite(damping) and damping >= 0):
        raise InputError(f"{WHO}: damping={damping}; pass a finite number, 0 or more, or None")
    check_count("batch_size", batch_size, "sample")
    batches = read_request(module, inputs, target, kind=against, seed=seed, draws=draws, **asked).together()
    point = Point(module, batches, against, batch_size, method, damping, products, minibatch, rank, seed, groupings)
    notes: list[str] = []
    results: dict[str, Approximation] = {}
    selection = [name for name in all_names if name == "identity" or selected is None or name in selected]
    for name in selection:
        try:
            model, about = point.model(name)
        except InputError as error:
            if selected is not None:
                raise
            notes.append(f"{name} left out: {error}")
            continue
        power = 0.5 if name in ("adam", "shampoo", "muon") else 1.0
        results[name] = Approximation(name, about, model.numbers, power, point.truth.measure(model, power), model)
    truth = point.truth
    pairs, spectral_pairs = truth.pairs if isinstance(truth, DenseTruth) else (None, None)
    notes += truth.notes if isinstance(truth, ProductTruth) else []
    return ApproximationsReport(
        against, point.size, tuple(point.slices), point.operator.loss, truth.damping, truth.least, truth.spectral,
        truth.frobenius, results, pairs, spectral_pairs, tuple(dict.fromkeys(notes)), time.perf_counter() - start,
    )  # fmt: skip


@dataclass
class Point:
    """The exact matrix at one point and the factors and moments of its approximations, each computed at its first use."""

    module: nn.Module
    batches: Sequence[BatchLoss]
    kind: str
    batch_size: int | None
    method: str
    damping: float | None
    products: int
    minibatch: int
    rank: int
    seed: int
    partitions: Mapping[str, Partition]

    def __post_init__(self) -> None:
        """Choose between the matrix and its products."""
        first = self.batches[0]
        self.slices, self.shapes, self.size = first.slices, first.shapes, first.size
        self.device, self.dtype = first.device, first.dtype
        self.is_dense = self.method == "dense" or (self.method == "auto" and self.size <= DENSE)
        if self.is_dense and self.size < 2:
            raise InputError(f"{WHO}: there is one parameter, whose curvature is a number; take hessiankit.hessian")

    @cached_property
    def matrix(self) -> Tensor:
        """The exact matrix A, (P, P)."""
        evaluation = Evaluation(self.batches, self.batch_size, None)
        return evaluation.whole() if self.kind == "hessian" else evaluation.outer()

    @cached_property
    def operator(self) -> HessianOperator:
        """A by its products."""
        return HessianOperator.of(self.batches, self.kind)

    @cached_property
    def truth(self) -> DenseTruth | ProductTruth:
        """The exact matrix that approximations are compared with, dense or by its products."""
        if self.is_dense:
            return DenseTruth(self.matrix, self.operator.gradient, self.slices, self.damping)
        positive = self.kind != "hessian" and all(batch.loss.name for batch in self.batches)  # the named losses are convex
        return ProductTruth(self.operator, self.damping, self.products, self.seed, positive=positive)

    @cached_property
    def exact_diagonal(self) -> Tensor:
        """The diagonal of A, (P,)."""
        return self.matrix.diagonal() if self.is_dense else self._diagonal_of(self.kind)

    def _diagonal_of(self, kind: str) -> Tensor:
        return diagonal_of(self.batches, kind, batch_size=self.batch_size).flat

    @cached_property
    def factors(self) -> KroneckerFactors:
        """Kronecker factors of weights and biases."""
        return KroneckerFactors(self.batches, seed=self.seed)

    @cached_property
    def moments(self) -> MiniBatchMoments:
        """Second moments of the gradients of mini-batches."""
        if any(batch.loss.reads != "logits" for batch in self.batches):
            raise InputError("gradients of single samples need the module's output as one tensor; pass loss=... and target=...")
        return MiniBatchMoments(sample_gradients(self.batches), self.minibatch, self.shapes, self.slices)

    def model(self, name: str) -> tuple[Model, str]:
        """Return an approximation by name, and its structure in words; an InputError says why one cannot be built here."""
        if name in self.partitions and not self.is_dense:
            raise InputError("exact blocks are cut from the exact matrix; pass method='dense', or fewer params")
        if name == "low-rank":
            return self._low_rank(), f"top {min(self.rank, self.size - 1)} eigenpairs, diagonal of the rest"
        entries = torch.arange(self.size, device=self.device)
        makers: dict[str, Callable[[], list[Structure]]] = {
            "identity": lambda: [],
            "diagonal": lambda: [diagonal(entries, self.exact_diagonal)],
            "kfac": lambda: self.factors.kfac(),
            "ekfac": lambda: self.factors.ekfac(),
            "adam": lambda: self.moments.adam(),
            "shampoo": lambda: self.moments.shampoo(),
            "muon": lambda: self.moments.muon(),
        }
        structures = self._blocks(self.partitions[name]) if name in self.partitions else makers[name]()
        model = StructuredOperator(self.size, structures, self.dtype, self.device)
        about = APPROXIMATIONS.get(name, f"exact blocks by {name}")
        if name in ("kfac", "ekfac"):
            covered, model = self.size - len(model.rest), model.completed(lambda: self._outer_diagonal)
            about += f"; {covered:,} of {self.size:,} entries" if covered < self.size else ""
            about += f"; from {DRAWS} drawn labels a term" if self.factors.is_drawn else ""
        return model, about

    def _blocks(self, partition: Partition) -> list[Structure]:
        blocks: list[Structure] = []
        for group in groups_by(WHO, partition, self.module, self.slices).values():
            at = positions(WHO, group, self.shapes, self.slices).to(self.device)
            blocks.append(dense_block(at, self.matrix[at.unsqueeze(1), at]))
        return blocks

    @cached_property
    def _outer_diagonal(self) -> Tensor:
        return self._diagonal_of("ggn") if self.kind == "hessian" else self.exact_diagonal

    def _low_rank(self) -> LowRankPlusDiagonal:
        k = min(self.rank, self.size - 1)
        if self.is_dense:
            values, basis = torch.linalg.eigh(self.matrix)
            top = values.abs().argsort(descending=True)[:k]
            values, basis = values[top], basis[:, top]
        else:
            start = np.random.default_rng(self.seed).standard_normal(self.size).astype(self.operator.dtype)
            pairs = eigsh(self.operator, k=k, which="LM", v0=start, tol=1e-3)
            values, basis = (torch.from_numpy(x).to(self.device, self.dtype) for x in pairs)
        rest = self.exact_diagonal - (basis.square() * values).sum(1)
        return LowRankPlusDiagonal(basis, values, rest)
