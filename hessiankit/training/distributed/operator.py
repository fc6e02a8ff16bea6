"""The Hessian of a loss over data spread over machines, as an operator, and its largest eigenvalues by Lanczos.

Rank 0 runs the iteration and broadcasts every vector: ranks that iterate by themselves could round differently on different
processors, stop after different numbers of products, and deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hessiankit.curvature.operator import HessianOperator, check_options, linearise_all
from hessiankit.engine.linearisation import Constant, LinearisedBatch
from hessiankit.engine.parts import WORKSPACE
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.data import Weights, read_data
from hessiankit.request.fisher import KINDS
from hessiankit.request.loss import LossArgument, read_loss
from hessiankit.request.read import read_request
from hessiankit.request.selection import Params, select
from hessiankit.request.state import ModuleState
from hessiankit.support.containers import map_tensors, named_tensors
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.lanczos import RitzPairs, extreme_eigenpairs
from hessiankit.training.distributed.ranks import (
    Ranks,
    check_same_function,
    check_same_tensors,
    check_versions,
    common,
    described,
)
from hessiankit.training.distributed.sharded import filled, is_sharded, unwrapped

WHO = "hessian_operator"


class DistributedOperator(HessianOperator):
    """A :class:`hessiankit.HessianOperator` whose products are summed over the ``ranks``; made by :func:`hessian_operator`.

    Every rank multiplies by the same vectors at the same time, which is checked, and has the same product, bit for bit.
    ``loss`` and ``gradient`` are those of all the data.
    """

    def __init__(
        self, ranks: Ranks, batches_of_rank: list[BatchLoss], linearised: list[LinearisedBatch], kind: str, block_size: int | None
    ) -> None:
        self.ranks = ranks
        batches = linearised or [_Nothing(batches_of_rank[0])]
        largest = max(ranks.gather(max(batch.bytes_per_vector for batch in batches)))
        super().__init__(batches_of_rank, batches, kind, block_size or max(1, WORKSPACE // largest), total=partial(_sum, ranks))
        self.loss = math.fsum(ranks.gather(float(self.loss)))
        _ = self.gradient, self.symmetry_error  # all ranks take part; later one may read them alone
        self.fallbacks = tuple(dict.fromkeys(name for names in ranks.gather(self.fallbacks) for name in names))

    def approximation(self, name: str) -> NoReturn:
        """Refuse: an approximation of all ranks' matrix is not built here."""
        raise InputError(f"{WHO}: {name!r} is built by one process; pass a diagonal, an operator or a function as preconditioner")

    def _product(self, vectors: Tensor) -> Tensor:
        remedy = "draw the vectors to multiply with from one seed, or broadcast them from rank 0"
        self.ranks.agree(remedy, **{"the block of vectors": described(vectors)})
        return super()._product(vectors)


def _sum(ranks: Ranks, terms: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum over this rank's batches and over the ranks, in double precision until the end."""
    vectors = list(terms)
    local = [term.to(torch.float64).mul(weight) for weight, term in zip(weights, vectors, strict=True)]
    return ranks.sum(torch.stack(local).sum(0) if len(local) > 1 else local[0]).to(vectors[0].dtype)


class _Nothing(Constant):
    """The batch of a rank without data: loss, gradient and products are zero."""

    def __init__(self, batch: BatchLoss) -> None:
        self.loss = 0.0
        self._zeros = next(iter(batch.parameters.values())).new_zeros(()).expand(batch.size)
        self.bytes_per_vector = 1


def hessian_operator(
    model: nn.Module,
    data: Any,
    target: Any = None,
    *,
    loss: LossArgument = "mse",
    params: Params = None,
    kind: str = "hessian",
    block_size: int | None = None,
    weights: Weights = None,
    reduction: str | None = None,
    replica: nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
) -> DistributedOperator:
    """Return the Hessian of the loss over the data of all ranks: equal to :func:`hessiankit.hessian_operator` on all of them.

    Every rank calls it, with its own data, and takes part in every product. Each linearises its share at copies of the
    parameters; a product is one sweep on each rank and one sum over the ranks, in double precision. Shares may differ in
    size: a batch counts by its terms among all ranks' terms. Memory on each rank: as for one process with its share.

    Args:
        model: Model, the same on every rank: a plain module, DistributedDataParallel, or sharded by ``fully_shard``.
        data: This rank's inputs, with ``target``, or its batches, as in :func:`hessiankit.hessian_operator`; ``[]`` where it
            has none. ``loss``, ``reduction`` and ``weights``, of this rank's batches, are as there too.
        params: Parameters, as there; whole ones.
        kind: ``"hessian"``, ``"ggn"``, ``"fisher"`` or ``"fisher-empirical"``.
        block_size: Vectors of a block treated at once; by default what all ranks have room for.
        replica: Second model of a sharded model's architecture, not sharded. The parameters are gathered
            into it, so each rank needs room for the whole model.
        group: The process group; by default all processes. Without torch.distributed, the only process.

    Raises:
        InputError: On every rank, the same line, if an argument of any rank cannot be used, or if the ranks hold different
            models or pass different options.
        TraceError: If torch cannot trace the module.
        RankError: If another rank stopped, or did not answer before the process group's time-out.

    One process, and a Hessian known by hand (see :func:`hessiankit.hessian_operator`):

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> operator = hessian_operator(layer, [(row, torch.zeros_like(row[:, :1])) for row in x.split(1)])
    >>> (operator @ torch.tensor([1.0, 1.0], dtype=torch.float64)).tolist()
    [4.0, 6.0]
    """
    ranks = Ranks(WHO, group)
    params = list(params) if isinstance(params, Iterable) and not isinstance(params, (str, Tensor)) else params

    def check() -> None:
        check_options(block_size)
        check_name(WHO, "kind", kind, KINDS)
        if kind == "fisher-mc":
            raise InputError(f"{WHO}: kind='fisher-mc' draws labels for the data of one process; pass kind='fisher', its mean")
        has_weights = weights is not None or reduction == "sum" or read_loss(loss).reduction is not None
        if ranks.size > 1 and not has_weights:
            raise InputError(
                f"{WHO}: the weights of the ranks' batches are unknown with {_named(loss)}. Pass weights=[...], how many terms "
                "the loss of each of this rank's batches is the mean of (or a function of inputs and target), or reduction='sum'"
            )

    ranks.together(check)
    check_versions(ranks)
    loss_name = loss if isinstance(loss, str) else _named(loss)
    ranks.agree(loss=loss_name, kind=kind, block_size=block_size, reduction=reduction, weighted=weights is not None)
    module = ranks.together(lambda: unwrapped(WHO, model))
    if is_sharded(module):
        module = filled(ranks, module, replica)
    parameters = ranks.together(lambda: select(WHO, module, params))
    check_same_tensors(ranks, parameters, "parameter")
    check_same_tensors(ranks, {n: x for n, x in module.named_parameters() if n not in parameters}, "constant parameter")
    check_same_tensors(ranks, dict(module.named_buffers()), "buffer")

    def own() -> tuple[list[BatchLoss], list[LinearisedBatch]]:
        read = read_loss(loss)
        pairs, counts = _counting(module, data, target, loss, weights)
        if not pairs:
            state = ModuleState(module, read.function)
            return [BatchLoss(module, dict(parameters), state, read, (), {}, count=0.0)], []
        batches = iter(pairs) if loss is not None else (inputs for inputs, _ in pairs)
        return linearise_all(
            read_request(module, batches, loss=loss, params=params, kind=kind, weights=counts, reduction=reduction)
        )

    batches_of_rank, linearisations = ranks.together(own)
    _check_same_function(ranks, batches_of_rank[0], bool(linearisations))
    shares = ranks.gather(
        ([batch.count for batch in batches_of_rank], any(not isinstance(batch, Constant) for batch in linearisations))
    )
    terms = math.fsum(count for counts, _ in shares for count in counts)
    if not terms:
        raise InputError(f"{WHO}: no rank holds a batch that counts; pass data on one of them at least")
    if not any(moves for _, moves in shares):
        raise InputError(f"{WHO}: none of the parameters has an effect on the loss; the module does not use them")
    total = 1.0 if (reduction or read_loss(loss).reduction) == "sum" else terms
    batches_of_rank = [replace(batch, share=batch.count / total) for batch in batches_of_rank]
    return ranks.together(lambda: DistributedOperator(ranks, batches_of_rank, linearisations, kind, block_size))


def _check_same_function(ranks: Ranks, batch: BatchLoss, has_data: bool) -> None:
    """Compare modules, and losses of the user's own, by what they do with the first batch of the first rank that holds data."""
    if ranks.size == 1:
        return
    data = map_tensors(lambda x: x.detach().cpu(), (batch.args, batch.kwargs, batch.target, batch.loss.reads))
    shared_data = common(ranks, [data] if has_data else [])
    if shared_data is None:
        return
    *data, reads = map_tensors(lambda x: x.to(batch.device), shared_data)
    sample = replace(batch, args=data[0], kwargs=data[1], target=data[2], loss=replace(batch.loss, reads=reads), reference=None)

    def run(recorder: AbstractContextManager[Any]) -> None:
        with sample.at(), recorder:
            result = sample.result()
            if not batch.loss.name:
                sample.loss.value(result, sample.target)

    tensors = [(name, x) for name, *values in batch.state.tensors() for x in values]
    check_same_function(ranks, run, [*tensors, *named_tensors(data)])


def _counting(
    module: nn.Module, data: Any, target: Any, loss: LossArgument, weights: Weights
) -> tuple[list[tuple[Any, Any]], list[float] | None]:
    """Return this rank's batches that count, and their weights where there are any."""
    if data is None or (isinstance(data, (list, tuple)) and not data):
        return [], None
    pairs = list(read_data(data, target, loss, module).pairs)
    read = read_loss(loss)
    if weights is None:
        return [(inputs, labels) for inputs, labels in pairs if read.count(labels) != 0.0], None
    factors = [weights(*pair) for pair in pairs] if callable(weights) else list(islice(weights, len(pairs) + 1))
    if len(factors) != len(pairs):
        raise InputError(f"{WHO}: weights has {len(factors)} numbers for {len(pairs)} batches; pass one for each")
    weighted_pairs = [(pair, float(weight)) for pair, weight in zip(pairs, factors, strict=True) if weight != 0]
    return [pair for pair, _ in weighted_pairs], [weight for _, weight in weighted_pairs]


def _named(loss: LossArgument) -> str:
    return repr(loss) if loss is None or isinstance(loss, str) else str(getattr(loss, "__name__", type(loss).__name__))


LANCZOS = "top_eigenvalues"
ENDS = ("LA", "SA", "LM")
EXACT, ROUGH = 1e-12, 1e-4
"""Relative residuals that are asked for by default, in float64 and in other types."""


def top_eigenvalues(
    operator: HessianOperator, k: int = 1, *, which: str = "LA", tol: float | None = None, max_products: int = 1000, seed: int = 0
) -> RitzPairs:
    """Return the ``k`` largest eigenvalues of an operator with their vectors, to every rank the same bits.

    By the Lanczos iteration of :func:`hessiankit.spectrum`, on rank 0. Memory there: about 2 k + 20 vectors.

    Args:
        operator: Operator of :func:`hessiankit.training.distributed.hessian_operator`, on every rank of it; or of
            :func:`hessiankit.hessian_operator`.
        k: Number of eigenvalues; fewer than there are parameters.
        which: ``"LA"``, the largest, in descending order; ``"SA"``, the smallest, in ascending order; ``"LM"``, those of largest
            absolute value, by that.
        tol: Bound of the residuals, relative to the largest absolute value; by default 1e-12 in float64, 1e-4 in other types.
        max_products: Products with the operator at most.
        seed: Seed of the first vector.

    Raises:
        InputError: If an argument cannot be used, or the iteration does not converge.
        RankError: If another rank stopped, or did not answer before the process group's time-out.

    The Hessian of mean((x w)^2) over the rows x = (1, 0), (0, 2) is diag(1, 4):

    >>> import hessiankit as hk
    >>> layer = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> round(float(top_eigenvalues(hk.hessian_operator(layer, x, torch.zeros_like(x[:, :1]))).values), 9)
    4.0
    """
    ranks = Ranks(LANCZOS, operator.ranks.group) if isinstance(operator, DistributedOperator) else Ranks(LANCZOS, is_single=True)
    size, dtype = operator.shape[0], operator.torch_dtype

    def check() -> None:
        check_name(LANCZOS, "which", which, ENDS)
        if not 1 <= k < size:
            raise InputError(f"{LANCZOS}: k={k}, and the operator is {size} x {size}; expected 1 to {size - 1}")

    ranks.together(check)
    ranks.agree(k=k, which=which, tol=tol, max_products=max_products, seed=seed)
    if ranks.rank:
        return _follow(ranks, operator)

    def multiply(vectors: Tensor) -> Tensor:
        ranks.broadcast(vectors.cpu())
        return operator @ vectors

    start = torch.randn(size, generator=torch.Generator().manual_seed(seed), device="cpu").to(operator.device, dtype)
    bottom = 0 if which == "LA" else k
    top = 0 if which == "SA" else min(k, size - bottom)
    tol = tol or (EXACT if dtype == torch.float64 else ROUGH)
    try:
        pairs = extreme_eigenpairs(
            multiply, start, top=top, bottom=bottom, tol=tol, most=max_products, basis=2 * (top + bottom) + 20
        )
        if not pairs.converged:
            worst = f"{float(pairs.residuals.max()):.1e} after {pairs.products} products"
            raise InputError(f"{LANCZOS}: a residual is {worst}; raise max_products or tol")
    except InputError as error:
        ranks.broadcast(str(error))
        raise
    keys = {"LA": -pairs.values, "SA": pairs.values, "LM": -pairs.values.abs()}
    order = keys[which].argsort(stable=True)[:k]
    largest = replace(pairs, values=pairs.values[order], vectors=pairs.vectors.cpu()[order], residuals=pairs.residuals[order])
    result: RitzPairs = ranks.broadcast(largest)
    return result


def _follow(ranks: Ranks, operator: HessianOperator) -> RitzPairs:
    """Multiply by what rank 0 sends, until it sends the result or an error."""
    while isinstance(message := ranks.broadcast(None), Tensor):
        operator @ message.to(operator.device)
    if isinstance(message, str):
        raise InputError(message)
    result: RitzPairs = message
    return result
