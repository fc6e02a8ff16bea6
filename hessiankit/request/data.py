"""The data: whatever a user passes as one batch or many, as an iterator of (inputs, target) and the weight of each."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from hessiankit.request.checks import IGNORE_INDEX
from hessiankit.request.loss import Loss, LossArgument, is_behind, member
from hessiankit.support.containers import arguments, map_tensors, named_tensors, samples
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.memory import available_memory, byte_size
from hessiankit.support.torch_state import losses_of_logits, ordinary_path, preserved_state
from hessiankit.tracing.source_line import at_line, first_line

Weights: TypeAlias = "Iterable[float] | Callable[[Any, Any], float] | None"
MAX_BATCHES = 1000
"""Batches that are read of an iterable without a length: one with more is taken for one that does not end."""
LOSS_TOLERANCE = 1e-4
"""Relative difference up to which a model's own loss counts as the one that we compute from its logits."""
TOGETHER = 2**20
"""Logits of which a comparison has copies at a time: 8 megabytes in double precision, and a few of these."""
AUTO = "auto"
"""Loss where none is given: the module's own, where it has one, else ``"mse"``."""
RETURNS_LOSS = "returns_loss"
"""Attribute of a module that returns its loss and takes all data as inputs."""
FORMS = (
    "inputs and target=..., a pair (inputs, target), a mapping of keyword arguments with 'labels' (a Hugging Face batch), "
    "or an iterable of such pairs or mappings"
)


class ReadData(NamedTuple):
    """Result of :func:`read_data`.

    Attributes:
        is_many: Whether the data are several batches.
        pairs: (inputs, target) of each batch.
        loss: The loss, that of the module in place of :data:`AUTO`.
    """

    is_many: bool
    pairs: Iterator[tuple[Any, Any]]
    loss: LossArgument


def read_data(
    data: Any,
    target: Any,
    loss: LossArgument,
    model: nn.Module | None = None,
    *,
    is_shifted: bool | None = None,
    trial: int | None = None,
) -> ReadData:
    """Tell whether ``data`` are several batches, and return an iterator of pairs (inputs, target).

    One batch: ``target`` is given; or ``data`` is a tensor, a mapping, or a pair whose second part is a tensor; or, for
    loss=None, a tuple, or a list that holds tensors or other arguments. Otherwise an iterable of pairs and mappings, or of
    inputs (loss=None): a list of tuples, lists or mappings is read as any other iterable of them.

    With a ``model`` and a named loss, the ``"labels"`` of a mapping become its target (:class:`Labels`, which explains
    ``is_shifted`` and ``trial``). With :data:`AUTO` the loss is the model's own, where it has one.

    Raises:
        InputError: If it is none of these.

    >>> read_data([({"x": 1}, Tensor(1)), ({"x": 2}, Tensor(1))], None, "mse").is_many
    True
    """
    if loss == AUTO and getattr(model, RETURNS_LOSS, False):
        data, target, loss = (data if target is None else (*arguments(data)[0], target)), None, None
    is_many = _is_many(data, target, loss)
    if not is_many:
        is_pair = target is None and loss is not None and isinstance(data, (tuple, list))
        pairs: Iterator[tuple[Any, Any]] = iter([(data[0], data[1]) if is_pair else (data, target)])
    else:
        pairs = ((batch, None) for batch in once(data)) if loss is None else map(_pair, enumerate(once(data)))
    if loss == AUTO:
        loss, pairs, is_shifted = _own_loss(model, pairs)
    if model is None or not isinstance(loss, str):
        return ReadData(is_many, pairs, loss)
    return ReadData(is_many, Labels(model, loss, is_shifted, trial).laid(pairs), loss)


def _own_loss(
    model: nn.Module | None, pairs: Iterator[tuple[Any, Any]]
) -> tuple[LossArgument, Iterator[tuple[Any, Any]], bool | None]:
    """Return the loss of a model of Hugging Face's kind, which takes labels, with its batches; ``"mse"`` of any other.

    A loss that is the cross entropy of the logits, which one call shows, is named: so batches are weighted by their labels.
    """
    first = next(pairs, None)
    if model is None or first is None:
        return "mse", pairs if first is None else chain([first], pairs), None
    names = list(inspect.signature(model.forward).parameters)
    if "labels" not in names:
        return "mse", chain([first], pairs), None
    name = getattr(model, "main_input_name", names[0])

    def mapping(pair: tuple[Any, Any]) -> Any:
        inputs, target = pair
        return {**(inputs if isinstance(inputs, Mapping) else {name: inputs}), "labels": target} if _is_labels(pair) else inputs

    batch = mapping(first)
    pairs = chain([first], pairs)
    if not (isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor)):
        return "mse", pairs, None
    with preserved_state(model), ordinary_path(), losses_of_logits():
        of_device = dict(on_device_of(model, batch))
        comparison = compared_labels(model, of_device, of_device.pop("labels"))
    mappings = ((mapping(pair), None) for pair in pairs)
    return (None if comparison == "other" else "cross_entropy" if comparison else "mse"), mappings, comparison == "later"


def _is_labels(pair: tuple[Any, Any]) -> bool:
    """Tell whether a target holds labels beside a tensor or a mapping without."""
    inputs, target = pair
    is_labels = isinstance(target, Tensor) and not target.is_floating_point()
    return is_labels and (isinstance(inputs, Tensor) or (isinstance(inputs, Mapping) and "labels" not in inputs))


def _is_many(data: Any, target: Any, loss: LossArgument) -> bool:
    if target is not None and isinstance(data, DataLoader):
        raise InputError("request: inputs is a DataLoader, whose batches have their targets; leave target=... out")
    if target is not None or isinstance(data, (Tensor, Mapping)):
        return False
    if loss is None:
        is_list = isinstance(data, list) and bool(data) and all(isinstance(batch, (tuple, list, Mapping)) for batch in data)
        return isinstance(data, Iterable) and (not isinstance(data, (tuple, list)) or is_list)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor):
        return False
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise InputError(f"request: data is {type(data).__name__}; expected {FORMS}")
    return True


def _pair(numbered: tuple[int, Any]) -> tuple[Any, Any]:
    number, batch = numbered
    if isinstance(batch, Mapping):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    kind = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise InputError(
        f"request: batch {number} is a {kind}; expected a pair (inputs, target), or a mapping with 'labels'; for several "
        "inputs of one call pass target=..."
    )


def once(data: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch as they come; refuse data with repeated samples or without an end.

    Raises:
        InputError: A ``DataLoader`` draws samples with replacement, or more than once; an iterable goes on after its length; or
            one without a length holds more than :data:`MAX_BATCHES` batches, or more than half of the free memory.

    >>> [float(x) for x in once(iter([Tensor([1.0]), Tensor([2.0])]))]
    [1.0, 2.0]
    """
    kind, length, size = type(data).__name__, _length(data), 0
    if isinstance(data, DataLoader) and (sampler := _repeating_sampler(data)):
        raise InputError(
            f"request: the {sampler} of the {kind} draws samples more than once, and the data are every sample once; pass a "
            f"{kind} with shuffle=False, or list(data) where this draw is what you mean"
        )
    remedy = "pass a list, or a DataLoader of one epoch; list(itertools.islice(data, n)) are n batches"
    free: int | None = None
    for number, batch in enumerate(data):
        if number == length:
            raise InputError(
                f"request: data is a {kind} of {length} batches by its len(), which goes on after them, as several epochs do; "
                f"{remedy}"
            )
        tensors = [x for _, x in named_tensors(batch)]
        if isinstance(batch, Mapping) and batch and not tensors:
            raise InputError(
                f"request: batch {number} is a mapping without a tensor (keys: {', '.join(map(repr, batch))}), as a row of a "
                "dataset is; pass DataLoader(dataset, batch_size=..., collate_fn=...), whose collator pads rows to tensors"
            )
        if length is None:
            size += sum(x.numel() * x.element_size() for x in tensors)
            free = available_memory(tensors[0].device) if tensors and free is None else free
            if number == MAX_BATCHES or (free is not None and size > free / 2):
                volume = f"has {byte_size(size)} in its first {number + 1} batches"
                extent = f"holds more than {MAX_BATCHES:,} batches" if number == MAX_BATCHES else volume
                raise InputError(
                    f"request: data is a {kind} without a length, which {extent}: it may not end, and data are read once and "
                    f"whole; {remedy}"
                )
        yield batch


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _repeating_sampler(loader: DataLoader[Any]) -> str:
    """Return the name of a sampler that may draw a sample twice, or ""."""
    for sampler in (loader.sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, (RandomSampler, WeightedRandomSampler)):
            has_repeats = isinstance(sampler, RandomSampler) and sampler.num_samples > len(sampler.data_source)
            if sampler.replacement or has_repeats:
                return type(sampler).__name__
    return ""


class Labels:
    """Reads the labels from Hugging Face's mappings and aligns them with the logits that the model's loss compares them with.

    Args:
        model: The model.
        loss: The named loss.
        later: Whether logits t are compared with label t + 1, as in a causal language model; targets of pairs are then shifted
            too. None: as in the model's own loss, determined by one call; with label t + 1 if it has none.
        trial: Samples of that call: the first ones with a label; None: the whole batch.
    """

    def __init__(self, model: nn.Module, loss: str, is_shifted: bool | None = None, trial: int | None = None) -> None:
        self.model, self.loss, self.shifts_targets, self.is_shifted, self.trial = model, loss, is_shifted, is_shifted, trial

    def laid(self, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield the pairs, with the labels of mappings as their targets."""
        for inputs, target in pairs:
            if target is None and isinstance(inputs, Mapping) and isinstance(inputs.get("labels"), Tensor):
                yield self._split(inputs)
            elif self.shifts_targets and isinstance(target, Tensor) and target.ndim > 1:
                yield inputs, one_later(target)
            else:
                self._warn_of_copies(inputs, target)
                yield inputs, target

    def _warn_of_copies(self, inputs: Any, target: Any) -> None:
        """Warn once of labels that are the inputs themselves, which a causal language model shifts and a plain pair does not."""
        causal = self.loss == "cross_entropy" and "labels" in inspect.signature(self.model.forward).parameters
        if causal and isinstance(inputs, Tensor) and isinstance(target, Tensor) and torch.equal(inputs, target):
            warnings.warn(
                "hessiankit: the target is a copy of the inputs, and no label of a pair is shifted: logits t are compared with "
                "token t. Leave loss=... out for the model's own loss, or shift the target",
                stacklevel=2,
            )

    def _split(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
        labels: Tensor = batch["labels"]
        inputs = with_decoder_inputs(self.model, {key: x for key, x in batch.items() if key != "labels"}, labels)
        if self.loss != "cross_entropy" or labels.ndim < 2:
            return inputs, labels
        sample_numbers = with_a_label(labels)
        if self.is_shifted is None and len(sample_numbers):
            rows = slice(None) if self.trial is None else sample_numbers[: self.trial]
            trial = on_device_of(self.model, samples((inputs, labels), rows, len(labels)))
            with preserved_state(self.model), ordinary_path(), torch.no_grad():
                self.is_shifted = compared_labels(self.model, *trial) != "here"
        return inputs, labels if self.is_shifted is False else one_later(labels)


def with_decoder_inputs(model: nn.Module, inputs: Any, labels: Tensor) -> Any:
    """Return the inputs, with those of the decoder where a Hugging Face model derives them from the labels."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None or labels.ndim < 2 or not isinstance(inputs, Mapping):
        return inputs
    if {"decoder_input_ids", "decoder_inputs_embeds"} & set(inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels=labels)}


def with_a_label(labels: Tensor) -> Tensor:
    """Return the numbers of the samples, rows of axis 0, that have a label, on the CPU.

    >>> with_a_label(torch.tensor([[-100, -100], [3, -100]])).tolist()
    [1]
    """
    return (labels != IGNORE_INDEX).flatten(1).any(1).nonzero()[:, 0].cpu()


def one_later(labels: Tensor) -> Tensor:
    """Return the labels for logits t that are those of place t + 1, and -100 for the last one.

    >>> one_later(torch.tensor([[5, 6, 7]])).tolist()
    [[6, 7, -100]]
    """
    return torch.cat([labels[..., 1:], labels.new_full((*labels.shape[:-1], 1), IGNORE_INDEX)], -1)


def compared_labels(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> str:
    """Return how the model's own loss compares logits with labels, from one call of it.

    ``"here"``: logits t with label t. ``"later"``: with label t + 1, as a causal language model. ``"other"``: the loss is not the
    cross entropy of the logits or, where gradients are enabled, depends on the parameters by another way too. ``""``: the model
    has no loss of these labels.
    """
    parameters = inspect.signature(model.forward).parameters
    takes = "labels" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    result = call(model, {**with_decoder_inputs(model, inputs, labels), "labels": labels} if takes else inputs)
    logits, loss = (None, None) if isinstance(result, Tensor) else (member(result, "logits"), member(result, "loss"))
    if loss is None or loss.numel() != 1:
        return ""
    if logits is None or labels.is_floating_point() or labels.shape != logits.shape[:-1] or not bool(loss.isfinite()):
        return "other"
    if loss.requires_grad and not is_behind(loss, logits):
        return "other"  # such as a penalty, whose value may be 0 where its second derivatives are not
    ways, value = {"here": labels}, float(loss.detach())
    if labels.ndim > 1 and labels.shape[-1] > 1:
        ways["later"] = one_later(labels)
    values = {way: float(_cross_entropy(logits.detach(), x)) for way, x in ways.items()}
    differences = {way: abs(x - value) / max(abs(value), 1e-30) for way, x in values.items()}
    nearest = min(differences, key=lambda way: differences[way])
    return nearest if differences[nearest] < LOSS_TOLERANCE else "other"


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy in double precision, copying the logits of some tokens at a time."""
    rows, targets = logits.flatten(0, -2), labels.flatten()
    step = max(1, TOGETHER // rows.shape[1])
    sums = [
        F.cross_entropy(z.double(), t, ignore_index=IGNORE_INDEX, reduction="sum")
        for z, t in zip(rows.split(step), targets.split(step), strict=True)
    ]
    return torch.stack(sums).sum() / (targets != IGNORE_INDEX).sum()


def on_device_of(module: nn.Module, tree: Any) -> Any:
    """Return nested containers with their tensors on the device of a module's first parameter; as they are without one."""
    first = next(module.parameters(), None)
    return tree if first is None else map_tensors(lambda x: x.to(first.device), tree)


def ordinary(tree: Any) -> Any:
    """Return containers unchanged, or with copies of the tensors made in inference mode, which autograd does not take."""
    if any(x.is_inference() for _, x in named_tensors(tree)):
        return map_tensors(lambda x: x.clone() if x.is_inference() else x, tree)
    return tree


def as_one_argument(module: nn.Module, inputs: Any) -> Any:
    """Return inputs, wrapped in a tuple if they are a list or tuple that forward takes as one argument.

    >>> [type(as_one_argument(layer, [1, 2])) for layer in (nn.Linear(1, 1), nn.Bilinear(1, 1, 1))]
    [<class 'tuple'>, <class 'list'>]
    """
    is_whole = isinstance(inputs, (list, tuple)) and not _accepts(module, inputs) and _accepts(module, [inputs])
    return (inputs,) if is_whole else inputs


def _accepts(module: nn.Module, positional: Any) -> bool:
    try:
        inspect.signature(module.forward).bind(*positional)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a function in C, which has no signature
    return True


def call(module: nn.Module, inputs: Any, run: Callable[[], Any] | None = None) -> Any:
    """Call a module on inputs, or call ``run``, and explain an error of the module's own code.

    Raises:
        InputError: The call raised an error: the message names the shapes, the error and the line.
    """
    try:
        if run is not None:
            return run()
        positional, keywords = arguments(ordinary(inputs))
        return module(*positional, **keywords)
    except (HessiankitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        keyed = isinstance(inputs, Mapping)
        shapes = [f"{name} {tuple(x.shape)}" if keyed else str(tuple(x.shape)) for name, x in named_tensors(inputs)]
        description = f"inputs of shape {', '.join(shapes)}" if shapes else "these inputs"
        raise InputError(
            f"request: the module, called on {description}, raised {type(error).__name__}: {first_line(error)}{at_line(error)}"
            f"{_other_type(module, inputs, error)}"
        ) from error


def _other_type(module: nn.Module, inputs: Any, error: Exception) -> str:
    """Return a hint for integer inputs of a module that looks nothing up."""
    tensors = [x for _, x in named_tensors(inputs)]
    of_types = isinstance(error, RuntimeError) and any(word in str(error) for word in ("dtype", "scalar type", "type_as"))
    embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules())
    if not tensors or not of_types or embeds or any(x.is_floating_point() for x in tensors):
        return ""
    dtype = next(module.parameters()).dtype
    return f"; inputs are {tensors[0].dtype} but the module has no embedding to look them up in, pass {dtype}"


class Counts:
    """The weight of each batch: as given, or the terms of its loss; and the rule by which batches are put together."""

    def __init__(self, loss: Loss, weights: Weights, reduction: str | None, *, is_many: bool) -> None:
        default = loss.reduction
        if reduction not in (None, "mean", "sum"):
            raise InputError(f"request: reduction={reduction!r} is not known; pass 'mean' or 'sum', or None for the loss's own")
        if not loss.name and reduction is not None and default not in (None, reduction):
            raise InputError(
                f"request: reduction={reduction!r}, but the loss has reduction={default!r}; change the loss, or pass None"
            )
        if weights is not None and (reduction or default) == "sum":
            raise InputError("request: weights are for losses that are means; a sum over all batches needs none")
        is_list = isinstance(weights, Iterable) and not isinstance(weights, str) and getattr(weights, "ndim", 1) > 0
        if weights is not None and not callable(weights) and not is_list:
            kind = type(weights).__name__
            raise InputError(f"request: weights is a {kind}; pass one number for each batch in a list, or a function")
        self.loss, self.is_many = loss, is_many
        self.weights = weights if weights is None or callable(weights) else iter(weights)
        rule = reduction or default if loss.name or reduction == "sum" else default
        self.rule = rule if rule in ("mean", "sum") else None
        self.is_sum = (reduction or default) == "sum"

    def of(self, number: int, inputs: Any, target: Any) -> float:
        """Return the weight of a batch; 0 where no label of it counts."""
        if self.weights is not None:
            return self._given(number, inputs, target)
        if self.is_many and number == 1 and self.rule is None:
            raise InputError(
                f"request: with {self.loss.label} the weights of several batches are unknown. Pass weights=[...], how many terms "
                "each batch's loss is the mean of (or a callable (inputs, target) -> number), or reduction='sum' if it is a sum"
            )
        count = self.loss.count(target)
        if self.is_many and count == 0.0 and target.numel():
            return 0.0  # every label is ignored
        if self.loss.name:
            return count or 1.0
        return count if self.is_many and self.rule == "mean" and count is not None else 1.0

    def _given(self, number: int, inputs: Any, target: Any) -> float:
        weight = self.weights(inputs, target) if callable(self.weights) else next(self.weights, None)  # type: ignore[arg-type]
        if weight is None:
            raise InputError(f"request: weights ends before batch {number}; pass one number for each batch")
        try:
            weight = float(weight)
        except (TypeError, ValueError, RuntimeError):
            kind = type(weight).__name__
            raise InputError(f"request: the weight of batch {number} is a {kind}; expected a number") from None
        if not (math.isfinite(weight) and weight >= 0):
            raise InputError(f"request: the weight of batch {number} is {weight}; expected a finite number, 0 or more")
        return weight

    def check_used(self) -> None:
        """Raise InputError if a list of weights has more numbers than there were batches."""
        rest = [] if self.weights is None or callable(self.weights) else list(islice(self.weights, MAX_BATCHES))
        if rest:
            raise InputError(f"request: weights has {len(rest)} numbers more than there are batches; pass one for each")
