"""The Hessian of a loss over data spread over machines, as an operator: of whole models, and of models that are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, reduce
from itertools import islice
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hessiankit.curvature.linearised_batches import check_options, linearise_all
from hessiankit.curvature.operator import HessianOperator, PagedOperator
from hessiankit.engine.linearisation import Constant, Linearisation, LinearisedBatch
from hessiankit.engine.paged_parameters import PagedState
from hessiankit.engine.parts import WORKSPACE
from hessiankit.request.batch_loss import BatchLoss, ModulePoint
from hessiankit.request.cancellation import ROUNDING
from hessiankit.request.checks import check_layers, check_tensors
from hessiankit.request.data import Counts, Weights, read_data
from hessiankit.request.first_call import first_call
from hessiankit.request.fisher import KINDS, Curvature
from hessiankit.request.loss import Loss, LossArgument, read_loss
from hessiankit.request.loss_trace import loss_trace
from hessiankit.request.read import read_request
from hessiankit.request.selection import Params, select
from hessiankit.request.state import ModuleState
from hessiankit.support.arguments import is_sharded
from hessiankit.support.containers import map_tensors, named_tensors
from hessiankit.support.errors import InputError, TraceError, check_name
from hessiankit.support.inner_products import Vectors, held_as, holding
from hessiankit.training.distributed.shards import Pieces, ShardedModel, ShardedParameters
from hessiankit.training.fsdp import gradients_aside, reshard, unwrapped
from hessiankit.training.ranks import (
    Ranks,
    check_same_function,
    check_same_tensors,
    check_versions,
    common,
    described,
)

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

    @contextmanager
    def same_call(self, caller: str, **options: Any) -> Iterator[None]:
        ranks = self.ranks.named(caller)
        ranks.agree(**options)
        with held_as(Copies(ranks)), ranks.in_step():
            yield

    def _product(self, vectors: Tensor) -> Tensor:
        if not isinstance(holding(), Copies):
            remedy = "draw the vectors to multiply with from one seed, or broadcast them from rank 0"
            self.ranks.agree(remedy, **{"the block of vectors": described(vectors)})
        return super()._product(vectors)

    def _rows(self, rows: Tensor) -> Tensor:
        if isinstance(held := holding(), Copies):
            held.ranks.proceed()
            rows = self.ranks.broadcast(rows.cpu()).to(rows.device)
        return super()._rows(rows)


class Copies(Vectors):
    """Vectors of which each rank has a copy; processors may round differently, and all ranks take the sums of rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def sum(self, terms: Tensor) -> Tensor:
        self.ranks.proceed()
        return self.ranks.sum(terms.clone() if self.ranks.rank == 0 else torch.zeros_like(terms))


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
    group: dist.ProcessGroup | None = None,
) -> DistributedOperator | ShardedOperator:
    """Return the Hessian of the loss over the data of all ranks: equal to :func:`hessiankit.hessian_operator` on all of them.

    Every rank calls it, with its own data, and takes part in every product. Each rank linearises its share at copies of the
    parameters; a product is one sweep on each rank and one sum over the ranks, in double precision. Shares may differ in
    size: a batch counts by its terms among all ranks' terms. Memory on each rank: as for one process with its share.

    Args:
        model: Model, the same on every rank: a plain module, DistributedDataParallel, or sharded by ``fully_shard``.
        data: This rank's inputs, with ``target``, or its batches, as in :func:`hessiankit.hessian_operator`; ``[]`` where it
            has none. ``loss``, ``reduction`` and ``weights``, of this rank's batches, are as there too.
        params: Parameters, as there; whole ones.
        kind: ``"hessian"``, ``"ggn"``, ``"fisher"`` or ``"fisher-empirical"``.
        block_size: Vectors of a block treated at once; by default what all ranks have room for.
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
        return sharded_operator(ranks, module, data, target, loss, params, kind, block_size, weights, reduction)
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


class ShardedOperator(PagedOperator):
    """A :class:`hessiankit.HessianOperator` of a model that ``fully_shard`` has spread; made by :func:`hessian_operator`.

    Vectors are this rank's pieces of the parameters, one after the other, (entries here,), or dicts or lists of the pieces, or of
    tensors that are sharded as the parameters are. ``shape``, ``slices`` and ``shapes`` are those of the pieces, ``size`` is the
    number of parameters P. All ranks multiply at the same time. :func:`hessiankit.spectrum`, ``solve`` and
    :func:`hessiankit.scalar_estimates` sum inner products over the ranks, and return pieces; functions of SciPy see one rank's
    piece.
    """

    order, of_pieces = " of this rank's pieces", True

    def __init__(
        self,
        ranks: Ranks,
        model: ShardedModel,
        batches: list[BatchLoss],
        linearised: list[LinearisedBatch],
        kind: str,
        block_size: int | None,
    ) -> None:
        self.ranks, self._model = ranks, model
        self._pieces = Pieces(model, list(batches[0].parameters), ranks)
        largest = max(ranks.gather(max(batch.bytes_per_vector for batch in linearised)))
        super().__init__(batches, linearised, kind, block_size or max(1, WORKSPACE // largest), total=_of_pieces)
        self.loss = math.fsum(ranks.gather(float(self.loss)))
        self.fallbacks = tuple(dict.fromkeys(name for names in ranks.gather(self.fallbacks) for name in names))
        _ = self.gradient, self.symmetry_error

    @property
    def size(self) -> int:
        """Number of parameters P."""
        return sum(self._model.shards[name].numel() for name in self.names)

    @contextmanager
    def same_call(self, caller: str, **options: Any) -> Iterator[None]:
        ranks = self.ranks.named(caller)
        ranks.agree(**options)
        with held_as(Pieces(self._model, self.names, ranks)), ranks.in_step():
            yield

    def _product(self, vectors: Tensor) -> Tensor:
        held = holding()
        held = held if isinstance(held, Pieces) else self._pieces
        with held_as(held), held.ranks.in_step():
            return super()._product(vectors)

    def _rows(self, rows: Tensor) -> Tensor:
        holding().ranks.proceed()  # type: ignore[attr-defined]
        return super()._rows(rows)

    @property
    def symmetry_error(self) -> float:
        """Asymmetry of two products, as in :class:`hessiankit.HessianOperator`."""
        with held_as(self._pieces):
            return super().symmetry_error

    def compare(self, slopes: Mapping[str, Tensor], loss: float) -> None:
        """Compare loss and gradient with those of the model's own call and backward pass; slopes are this rank's pieces."""
        eps = max(torch.finfo(self.torch_dtype).eps, *(b.eps for b in self._linearised))
        traced = {name: self.gradient[at].reshape(self.shapes[name]) for name, at in self.slices.items()}
        sizes = [[_largest(slopes[n]), _largest(x), _largest(slopes[n] - x)] for n, x in traced.items()]
        sizes = torch.tensor(self.ranks.gather(sizes), dtype=torch.float64, device="cpu").amax(0).tolist()
        steepest = max(own for own, _, _ in sizes)
        sizes.append([abs(loss), abs(self.loss), abs(loss - self.loss)])
        for name, (own, seen, apart) in zip((*traced, ""), sizes, strict=True):
            if not apart <= eps**0.5 * max(own, seen) + ROUNDING * eps * steepest:
                what = f"the gradient with respect to {name!r}" if name else "the loss"
                raise TraceError(
                    f"{WHO}: {what}, as traced, is off by {apart / max(own, seen):.1e} of that of the model's own call: a custom "
                    "backward that is not the derivative of its forward, a hook that changes a gradient, or something done only "
                    "where nobody watches; nothing is returned"
                )

    def _check_finite(self, rows: Tensor, products: Tensor) -> None:
        self.ranks.together(lambda: super(ShardedOperator, self)._check_finite(rows, products))

    def _flat(self, tensors: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        named = tensors if isinstance(tensors, Mapping) else dict(zip(self.names, tensors, strict=False))
        for name, x in named.items():
            shard = self._model.shards.get(name)
            if isinstance(x, DTensor) and shard is not None and (x.shape, x.placements) != (shard.shape, shard.placements):
                raise InputError(
                    f"{WHO}: {name!r} of the vector is {tuple(x.shape)} laid out as {x.placements}; expected the parameter's "
                    f"{tuple(shard.shape)}, {shard.placements}"
                )
        return super()._flat({name: x.to_local() if isinstance(x, DTensor) else x for name, x in named.items()})

    def _like(self, tensors: Mapping[str, Tensor] | Sequence[Tensor], vector: Tensor) -> dict[str, Tensor] | list[Tensor]:
        values = tensors.values() if isinstance(tensors, Mapping) else tensors
        named = {name: vector[self.slices[name]].reshape(self.shapes[name]) for name in self.names}
        if any(isinstance(x, DTensor) for x in values):
            named = {name: self._model.like(name, x) for name, x in named.items()}
        return named if isinstance(tensors, Mapping) else list(named.values())

    def __getitem__(self, key: Any) -> NoReturn:
        raise InputError(f"{WHO}: blocks of the matrix of a sharded model are not cut; pass params=[...] to hessian_operator")

    def _refuse(self, *_: Any) -> NoReturn:
        raise InputError(
            f"{WHO}: a sharded model has products, solve(b), spectrum(operator) and scalar_estimates(operator); no sums, no "
            "whole matrix"
        )

    block_diagonal = to_matrix = eigvalsh = inverse = __add__ = __mul__ = __rmul__ = _refuse  # type: ignore[assignment]


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _of_pieces(terms: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the sum of the batches' terms, which have been summed over the ranks with their weights."""
    return reduce(Tensor.add_, terms)


def sharded_operator(
    ranks: Ranks,
    module: nn.Module,
    data: Any,
    target: Any,
    loss: LossArgument,
    params: Params,
    kind: str,
    block_size: int | None,
    weights: Weights,
    reduction: str | None,
) -> ShardedOperator:
    """Return the operator of a sharded model; arguments as of :func:`hessian_operator`.

    All ranks linearise as many batches: one with fewer takes a batch of another rank, with weight 0.
    """
    model = ranks.together(lambda: ShardedModel(ranks, module))
    ranks = model.ranks

    with model.plain():

        def point() -> tuple[ModulePoint, Loss]:
            check_layers(module)
            names = select(WHO, module, params)
            check_tensors(module, names)
            criterion = read_loss(loss)
            pieces = {name: piece for name, piece in model.pieces.items() if name in names}
            return ModulePoint(module, pieces, PagedState(model, criterion.function)), criterion

        at, criterion = ranks.together(point)
        check_same_tensors(ranks, dict(module.named_buffers()), "buffer")
        ranks.agree(**{"the selection of parameters": list(at.parameters)})
        pairs, counts = ranks.together(lambda: _weighted(module, data, target, loss, weights, reduction))
        spare = common(ranks, map_tensors(lambda x: x.detach().cpu(), pairs[:1]))
        total = math.fsum(count for of_rank in ranks.gather(counts) for count in of_rank)
        if spare is None or not total:
            raise InputError(f"{WHO}: no rank holds a batch that counts; pass data on one of them at least")
        total = 1.0 if (reduction or criterion.reduction) == "sum" else total
        idle = max(map(len, ranks.gather(counts))) - len(counts)
        pairs, counts = [*pairs, *[map_tensors(lambda x: x.to(at.device), spare)] * idle], [*counts, *[0.0] * idle]
        curvature = Curvature(kind, 0, 1)
        batches, linearised = list[BatchLoss](), list[LinearisedBatch]()
        for (inputs, labels), count in zip(pairs, counts, strict=True):
            memory = ShardedParameters(model, count / total)

            def one(
                inputs: Any = inputs, labels: Any = labels, count: float = count, memory: ShardedParameters = memory
            ) -> tuple[BatchLoss, LinearisedBatch]:
                batch = curvature.of(first_call(at, criterion, inputs, labels, handshake=False))
                batch = replace(batch, count=count, share=count / total)
                trace = loss_trace(batch, is_deferred=True, as_stored=True)
                with torch.no_grad():
                    options: dict[str, Any] = {"gauss_newton": kind != "hessian", "recompute": "layers"}
                    return batch, Linearisation(batch, traced_loss=trace, parameters=memory, **options)

            batch, linearisation = ranks.together(one)
            memory.agree()
            batches.append(batch)
            linearised.append(linearisation)
        _check_same_function(ranks, batches[0], has_data=True)
    operator = ShardedOperator(ranks, model, batches, linearised, kind, block_size)
    operator.compare(*_own_gradient(ranks, module, batches))
    return operator


def _own_gradient(ranks: Ranks, model: nn.Module, batches: Sequence[BatchLoss]) -> tuple[dict[str, Tensor], float]:
    """Return the gradient of the loss over all ranks' batches by the model's own calls, this rank's pieces, and the loss."""
    loss = 0.0
    with gradients_aside(model), torch.enable_grad(), ranks.exchange():
        for batch in batches:
            value = batch.value() * batch.share
            loss += float(value.detach())
            (value * ranks.size).backward()  # FSDP averages over the ranks
        reshard(model)
        slopes = {name: p.grad for name, p in model.named_parameters() if name in batches[0].parameters}
    pieces = {name: x.to_local() if isinstance(x, DTensor) else batches[0].parameters[name] * 0 for name, x in slopes.items()}
    return pieces, math.fsum(ranks.gather(loss))


def _weighted(
    module: nn.Module, data: Any, target: Any, loss: LossArgument, weights: Weights, reduction: str | None
) -> tuple[list[tuple[Any, Any]], list[float]]:
    """Return this rank's batches that count, and their weights."""
    pairs, factors = _counting(module, data, target, loss, weights)
    counts = Counts(read_loss(loss), factors, reduction, is_many=len(pairs) > 1)
    return pairs, [counts.of(number, *pair) for number, pair in enumerate(pairs)]


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
