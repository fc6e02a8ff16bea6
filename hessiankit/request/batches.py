"""One batch or many: pairs of inputs and target, the weight of each pair, and the tasks built from them."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from hessiankit.request.calling import (
    Loss,
    known_count,
    known_reduction,
    named_tensors,
    samples,
    trained_parameters,
)
from hessiankit.request.fisher import as_gauss_newton, check_kind
from hessiankit.request.labels import are_later, labels_of, one_later, with_a_label, with_decoder_inputs
from hessiankit.request.own_call import make_task, own_loss
from hessiankit.request.selection import Params, repeatable
from hessiankit.request.task import Task
from hessiankit.support.containers import map_tensors
from hessiankit.support.errors import InputError
from hessiankit.support.memory import available_memory, byte_size
from hessiankit.support.torch_state import hand_back_memory, ordinary_path, preserved_state
from hessiankit.tracing.graph import edges_behind

Weights: TypeAlias = "Iterable[float] | Callable[[Any, Any], float] | None"
REDUCTIONS = ("mean", "sum")
MOST = 1000
"""Batches that are read of an iterable without a length: one with more is taken for one that does not end."""

FORMS = (
    "inputs and target=..., a pair (inputs, target), a mapping of keyword arguments with 'labels' (a Hugging Face batch), "
    "or an iterable of such pairs or mappings"
)


def batches(
    who: str,
    data: Any,
    target: Any,
    loss: Loss,
    model: nn.Module | None = None,
    *,
    later: bool | None = None,
    trial: int | None = None,
) -> tuple[bool, Iterator[tuple[Any, Any]]]:
    """Tell whether ``data`` are several batches, and return an iterator of pairs (inputs, target).

    One batch: ``target`` is given; or ``data`` is a tensor, a mapping, or a pair whose second part is a tensor; or, for
    loss=None, a tuple, or a list that holds tensors or other arguments. Otherwise an iterable of pairs and mappings, or of
    inputs (loss=None): a list of tuples, lists or mappings is read as any other iterable of them.

    A mapping has no target of its own. With a ``model`` and a named loss, its ``"labels"`` become the target; for cross entropy
    they are moved to the logits that the model's own loss compares them with, one place earlier where it has none. One call
    shows which, with the first ``trial`` samples that have a label (None: with the whole batch). None is made where ``later``
    says it, which then holds for targets too.

    Raises:
        InputError: If it is none of these.

    >>> batches("example", [({"x": 1}, Tensor(1)), ({"x": 2}, Tensor(1))], None, "mse")[0]
    True
    """
    several = _are_several(who, data, target, loss)
    if not several:
        is_pair = target is None and loss is not None and isinstance(data, (tuple, list))
        pairs = iter([(data[0], data[1]) if is_pair else (data, target)])
    elif loss is None:
        pairs = ((batch, None) for batch in once(who, data))
    else:
        pairs = _pairs(who, data)
    if model is None or not isinstance(loss, str):
        return several, pairs
    return several, _labelled(who, model, loss, pairs, later, trial)


def _are_several(who: str, data: Any, target: Any, loss: Loss) -> bool:
    if target is not None or isinstance(data, (Tensor, Mapping)):
        return False
    if loss is None:
        listed = isinstance(data, list) and data and all(isinstance(batch, (tuple, list, Mapping)) for batch in data)
        return isinstance(data, Iterable) and (not isinstance(data, (tuple, list)) or bool(listed))
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor):
        return False
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InputError(f"{who}: data is {type(data).__name__}; expected {FORMS}")
    return True


def _pairs(who: str, data: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for number, batch in enumerate(once(who, data)):
        if isinstance(batch, Mapping):
            yield batch, None
        elif isinstance(batch, (tuple, list)) and len(batch) == 2:
            yield batch[0], batch[1]
        else:
            seen = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
            raise InputError(
                f"{who}: batch {number} is a {seen}; expected a pair (inputs, target), or a mapping with 'labels'; for several "
                "inputs of one call pass target=..."
            )


def _labelled(
    who: str, model: nn.Module, loss: str, pairs: Iterable[tuple[Any, Any]], later: bool | None, trial: int | None
) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs, with the labels of mappings as their targets."""
    asked = later
    for number, (inputs, target) in enumerate(pairs):
        if target is None and isinstance(inputs, Mapping) and isinstance(inputs.get("labels"), Tensor):
            inputs, target = labels_of(who, f"batch {number}", inputs)
            inputs = with_decoder_inputs(model, inputs, target)
            if loss == "cross_entropy" and target.ndim > 1:
                counted = with_a_label(target)
                if later is None and len(counted):
                    tried = samples((inputs, target), slice(None) if trial is None else counted[:trial], len(target))
                    with preserved_state(model), ordinary_path():
                        later = are_later(who, model, *on_device_of(model, tried)) is not False
                target = target if later is False else one_later(target)
        elif asked and isinstance(target, Tensor) and target.ndim > 1:
            target = one_later(target)
        yield inputs, target


def on_device_of(module: nn.Module, tree: Any) -> Any:
    """Return nested containers with their tensors on the device of a module's first parameter; as they are without one."""
    first = next(module.parameters(), None)
    return tree if first is None else map_tensors(lambda x: x.to(first.device), tree)


def once(who: str, data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of an iterable that is read once and whole, and refuse one of several epochs or without an end.

    Of an iterable without a length copies of all batches are made before any of them is worked on.

    Raises:
        InputError: A ``DataLoader`` draws samples with replacement, or more than once; an iterable goes on after its length; or
            one without a length holds more than :data:`MOST` batches, or more than half of the free memory.

    >>> [float(x) for x in once("example", iter([Tensor([1.0]), Tensor([2.0])]))]
    [1.0, 2.0]
    """
    kind = type(data).__name__
    if isinstance(data, DataLoader) and (drawn := _drawn_again(data)):
        raise InputError(
            f"{who}: the {drawn} of the {kind} draws samples more than once, and the data are every sample once; pass a "
            f"{kind} with shuffle=False, or list(data) where this draw is what you mean"
        )
    for number, batch in enumerate(_of_one_epoch(who, data, kind)):
        if isinstance(batch, Mapping) and batch and next(named_tensors(batch), None) is None:
            raise InputError(
                f"{who}: batch {number} is a mapping without a tensor (keys: {', '.join(map(repr, batch))}), as a row of a "
                "dataset is; pass DataLoader(dataset, batch_size=..., collate_fn=...), whose collator pads rows to tensors"
            )
        yield batch


def _drawn_again(loader: DataLoader[Any]) -> str | None:
    """Return the name of a sampler that may draw a sample twice."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, (RandomSampler, WeightedRandomSampler)):
            several = isinstance(sampler, RandomSampler) and sampler.num_samples > len(sampler.data_source)
            if sampler.replacement or several:
                return type(sampler).__name__
    return None


def _of_one_epoch(who: str, data: Iterable[Any], kind: str) -> Iterator[Any]:
    """Yield the batches of an iterable up to its length; without one, read it to its end and yield copies of its batches."""
    instead = "a list, or a DataLoader of one epoch; list(itertools.islice(data, n)) are n batches"
    held: deque[Any] = deque()
    size, free = 0, None
    try:
        length = len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        length = None
    for number, batch in enumerate(data):
        if number == length:
            raise InputError(
                f"{who}: data is a {kind} of {length} batches by its len(), which goes on after them, as several epochs do; "
                f"pass {instead}"
            )
        if length is not None:
            yield batch
            continue
        tensors = [x for _, x in named_tensors(batch)]
        free = available_memory(tensors[0].device) if tensors and free is None else free
        size += sum(x.numel() * x.element_size() for x in tensors)
        if number == MOST or (free is not None and size > free / 2):
            much = f"has {byte_size(size)} in its first {number + 1} batches"
            seen = f"holds more than {MOST:,} batches" if number == MOST else much
            raise InputError(
                f"{who}: data is a {kind} without a length, which {seen}: it may not end, and data are read once and whole; "
                f"pass {instead}"
            )
        held.append(map_tensors(lambda x: x.detach().clone().requires_grad_(x.requires_grad), batch))
    while held:
        yield held.popleft()


def requests(
    who: str,
    module: nn.Module,
    data: Any,
    target: Any,
    loss: Loss,
    params: Params,
    *,
    weights: Weights = None,
    reduction: str | None = None,
    handshake: bool = True,
    share: bool = False,
) -> Iterator[tuple[Task, float]]:
    """Yield a request for each batch that counts, and its count.

    The loss of all batches is sum_b count_b loss_b, divided by the sum of the counts where the reduction is "mean".

    Args:
        who: What an error message starts with, as in :func:`make_task`, like all arguments that are not explained here.
        data: One batch or several, see :func:`batches`; with ``target``, inputs only.
        weights: The counts of the batches, or a callable (inputs, target) -> count.
        reduction: "mean" or "sum" over all terms of all batches; by default what the loss itself does.

    Raises:
        InputError: If a batch cannot be used, or several batches of unknown counts are given.
    """
    params = repeatable(params)
    several, pairs = batches(who, data, target, loss, module)
    count_of = _Counts(who, loss, weights, reduction, several=several)
    task: Task | None = None
    first = 0
    for number, (inputs, labels) in enumerate(pairs):
        if count := count_of(number, inputs, labels):
            is_first = task is None
            task = make_task(who, module, inputs, labels, loss, params, handshake=handshake, share=share, before=task)
            if is_first:
                _warn_of_constants(task)
            hand_back_memory(task.size)
            yield replace(task, first=first), count
        first += len(labels) if isinstance(labels, Tensor) and labels.ndim else 1
    count_of.check_used()
    if task is None:
        raise InputError(f"{who}: the data hold no batch that counts; pass at least one pair (inputs, target)")


def _warn_of_constants(task: Task) -> None:
    """Warn of parameters that the loss depends on, are trained, and are none of the module's."""
    trained = trained_parameters(task.loss, task.module)
    if not trained:
        return
    with task.at():
        value = own_loss(task, task.run())
        functions = [] if value.grad_fn is None else [function for function, _ in edges_behind(value.grad_fn)]
        leaves = {id(getattr(function, "variable", None)) for function in functions}
    constants = [name for name, p in trained.items() if id(p) in leaves]
    if constants:
        warnings.warn(
            f"hessiankit: trained parameters of the loss are constants here: {', '.join(constants)}; a module that returns its "
            "loss, with loss=None, includes them; requires_grad_(False) marks them as constants",
            stacklevel=2,
        )


def shares(counts: Sequence[float], loss: Loss, reduction: str | None) -> list[float]:
    """Return what each batch's loss is multiplied by in the loss of all of them.

    >>> shares([1.0, 3.0], "mse", None), shares([1.0, 3.0], "mse", "sum")
    ([0.25, 0.75], [1.0, 3.0])
    """
    if (reduction or known_reduction(loss)) == "sum":
        return list(counts)
    total = math.fsum(counts)
    return [count / total for count in counts]


class _Counts:
    """The count of each batch: its weight, or the terms of its loss; and the rule by which batches are put together."""

    def __init__(self, who: str, loss: Loss, weights: Weights, reduction: str | None, *, several: bool) -> None:
        if reduction is not None and reduction not in REDUCTIONS:
            raise InputError(f"{who}: reduction={reduction!r} is not known; pass 'mean' or 'sum', or None for the loss's own")
        own = known_reduction(loss)
        if not isinstance(loss, str) and reduction is not None and own not in (None, reduction):
            raise InputError(f"{who}: reduction={reduction!r}, but the loss has reduction={own!r}; change the loss, or pass None")
        if weights is not None and (reduction or own) == "sum":
            raise InputError(f"{who}: weights are for losses that are means; a sum over all batches needs none")
        listed = isinstance(weights, Iterable) and not isinstance(weights, str) and getattr(weights, "ndim", 1) > 0
        if weights is not None and not callable(weights) and not listed:
            kind = type(weights).__name__
            raise InputError(f"{who}: weights is a {kind}; pass one number for each batch in a list, or a function")
        self.who, self.loss, self.several = who, loss, several
        self.weights = weights if weights is None or callable(weights) else iter(weights)
        rule = reduction or own if isinstance(loss, str) or reduction == "sum" else own
        self.rule = rule if rule in REDUCTIONS else None

    def __call__(self, number: int, inputs: Any, target: Any) -> float:
        """Return the count of a batch; 0 where no label of it counts."""
        if self.weights is not None:
            return self._weight(number, inputs, target)
        if self.several and number == 1 and self.rule is None:
            loss = self.loss
            of = "loss=None" if loss is None else f"the loss {getattr(loss, '__name__', type(loss).__name__)!r}"
            raise InputError(
                f"{self.who}: with {of} the weights of several batches are unknown. Pass weights=[...], how many terms each "
                "batch's loss is the mean of (or a callable (inputs, target) -> number), or reduction='sum' if it is a sum"
            )
        known = known_count(self.loss, target)
        if self.several and known == 0.0 and isinstance(target, Tensor) and target.numel():
            return 0.0  # every label is ignored
        if isinstance(self.loss, str):
            return known or 1.0
        return known if self.several and self.rule == "mean" and known is not None else 1.0

    def check_used(self) -> None:
        """Raise InputError if a list of weights has more numbers than there were batches."""
        rest = [] if self.weights is None or callable(self.weights) else list(islice(self.weights, MOST))
        if rest:
            raise InputError(f"{self.who}: weights has {len(rest)} numbers more than there are batches; pass one for each")

    def _weight(self, number: int, inputs: Any, target: Any) -> float:
        weight = self.weights(inputs, target) if callable(self.weights) else next(self.weights, None)  # type: ignore[arg-type]
        if weight is None:
            raise InputError(f"{self.who}: weights ends before batch {number}; pass one number for each batch")
        try:
            weight = float(weight)
        except (TypeError, ValueError, RuntimeError):
            kind = type(weight).__name__
            raise InputError(f"{self.who}: the weight of batch {number} is a {kind}; expected a number") from None
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"{self.who}: the weight of batch {number} is {weight}; expected a finite number, 0 or more")
        return weight


def gather(
    module: nn.Module,
    inputs: Any,
    target: Any,
    loss: Loss,
    params: Params,
    *,
    kind: str = "hessian",
    seed: int = 0,
    draws: int = 1,
    batch_size: int | None = None,
    weights: Weights = None,
    reduction: str | None = None,
    handshake: bool = True,
) -> tuple[list[Task], list[float]]:
    """Return one request a batch, for the same parameters, and the factor of each batch's loss, for a public function.

    Args:
        module: As in :func:`hessiankit.hessian`, like all arguments that are not explained here.
        kind: One of :data:`hessiankit.request.fisher.KINDS`; all but ``"hessian"`` are Gauss-Newton matrices, of the
            requests that are returned.
        seed: Of drawn labels.
        draws: Labels drawn for each term.

    Raises:
        InputError: If an argument cannot be used; the public function puts its name before the message.
    """
    check_kind(kind, seed, draws)
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size={batch_size} leaves no sample to treat; pass 1 or more, or None")
    tasks: list[Task] = []
    counts: list[float] = []
    counted = requests("hessian", module, inputs, target, loss, params, weights=weights, reduction=reduction, handshake=handshake)
    for task, count in counted:
        tasks.append(as_gauss_newton(task, kind, seed=seed, draws=draws))
        counts.append(count)
    return tasks, shares(counts, loss, reduction)
