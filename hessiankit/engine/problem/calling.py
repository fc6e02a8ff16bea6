"""The call of a module and the reading of its result: tensors, positional and keyword arguments, output objects."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from hessiankit.support.errors import InputError

Loss: TypeAlias = "str | Callable[..., Tensor] | None"


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that ``inputs`` stand for.

    A mapping (a dict, the encoding that a tokenizer returns) holds keyword arguments, a tuple or list positional ones;
    anything else is the only argument.

    >>> arguments({"x": 1, "y": 2}), arguments((1, 2)), arguments(1)
    (((), {'x': 1, 'y': 2}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def named_tensors(inputs: Any, name: str = "inputs") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in ``inputs``, nested ones too, with the expression that reaches it.

    >>> [name for name, _ in named_tensors({"x": Tensor(1), "pair": (Tensor(1), None)})]
    ["inputs['x']", "inputs['pair'][0]"]
    """
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
        for key, part in items:
            yield from named_tensors(part, f"{name}[{key!r}]")
    else:  # an object that torch has been taught to take apart
        for number, leaf in enumerate(_pytree.tree_leaves(inputs)):
            if leaf is not inputs:
                yield from named_tensors(leaf, f"{name}.{number}")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested containers with ``function`` applied to their tensors; a tensor that is there twice stays one.

    A ``UserDict`` is a container whether torch has been taught so or not, which depends on what else has been imported.
    """
    made: dict[int, Tensor] = {}

    def each(x: Any) -> Any:
        if isinstance(x, UserDict):
            changed = copy.copy(x)
            changed.data = {key: mapped(value) for key, value in x.data.items()}
            return changed
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = function(x)
        return made[id(x)]

    def mapped(tree: Any) -> Any:
        return _pytree.tree_map(each, tree, is_leaf=lambda x: isinstance(x, UserDict))

    return mapped(tree)


def ordinary(tree: Any) -> Any:
    """Return containers as they are, or with copies of the tensors made in inference mode, of which autograd takes none."""
    if any(x.is_inference() for _, x in named_tensors(tree)):
        return map_tensors(lambda x: x.clone() if x.is_inference() else x, tree)
    return tree


def read_outputs(who: str, loss: Loss, outputs: Any) -> Any:
    """Return what the loss is computed from.

    Args:
        who: What an error message starts with.
        loss: None: the module returns its loss, as a tensor, an attribute ``.loss`` or an entry ``"loss"``. A name: the
            same with ``logits``. A callable is given exactly what the module returns.
        outputs: What the module returned.

    Raises:
        InputError: If there is no such thing.

    >>> read_outputs("example", "mse", {"logits": Tensor([1.0]), "other": 2})
    tensor([1.])
    """
    if callable(loss) or isinstance(outputs, Tensor):
        return outputs
    key = "loss" if loss is None else "logits"
    found = outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
    if isinstance(found, Tensor):
        return found
    what = f"one tensor, or an object or dict with {key!r}"
    if loss is None:
        remedy = "pass the labels that it computes its loss from among the inputs, or loss=... and target=..."
    else:
        remedy = "pass a callable loss=f(outputs, target), which is given the whole of it, or wrap the module"
    raise InputError(f"{who}: the module returned {_describe(outputs, key)}, expected {what}; {remedy}")


def _describe(outputs: Any, key: str) -> str:
    kind = type(outputs).__name__
    if isinstance(outputs, Mapping):
        names = [str(k) for k in outputs]
    elif isinstance(outputs, (tuple, list)):
        return f"{kind} (of {', '.join(type(x).__name__ for x in outputs) or 'nothing'})"
    else:
        names = [n for n in getattr(outputs, "__dict__", {}) if not n.startswith("_")]
    if key in names:
        return f"{kind} whose {key!r} is None"
    return f"{kind} (with {', '.join(map(repr, names[:8]))})" if names else kind


LOSSES = ("mse", "cross_entropy")
QUADRATIC_MODEL = "quadratic_model"
"""The loss of a task whose Gauss-Newton matrix is a sampled Fisher matrix (:class:`derivations.loss.QuadraticModel`)."""
IGNORE_INDEX = -100
ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
"""Losses of torch that average over the entries of outputs and target alike."""
_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss)
_FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
}


def loss_module(loss: Loss) -> nn.Module | None:
    """Return the torch loss that a callable is: itself, or for one of torch's functions the module with its defaults."""
    if type(loss) in (*ELEMENTWISE, *_LABELS):
        return loss  # type: ignore[return-value]
    made = _FUNCTIONS.get(loss) if callable(loss) and getattr(loss, "__hash__", None) else None
    return None if made is None else made()


def same_as(loss: Loss, outputs: Any, target: Any) -> str | None:
    """Return the named loss that a loss of torch's equals on these outputs and target, or None.

    >>> same_as(nn.CrossEntropyLoss(), torch.zeros(2, 3), torch.tensor([0, -100]))
    'cross_entropy'
    """
    known = loss_module(loss)
    if known is None or known.reduction != "mean" or not isinstance(outputs, Tensor) or not isinstance(target, Tensor):
        return None
    if isinstance(known, nn.MSELoss) and (target.shape, target.dtype) == (outputs.shape, outputs.dtype):
        return "mse"
    if isinstance(known, nn.CrossEntropyLoss) and outputs.ndim == 2 and target.dtype == torch.int64:  # else classes on axis 1
        plain = known.weight is None and known.ignore_index == IGNORE_INDEX and known.label_smoothing == 0
        return "cross_entropy" if plain and target.shape == outputs.shape[:1] else None
    return None


def known_reduction(loss: Loss) -> str | None:
    """Return "mean" or "sum", or None where it is not known.

    >>> known_reduction("mse"), known_reduction(nn.NLLLoss(reduction="sum")), known_reduction(len)
    ('mean', 'sum', None)
    """
    if isinstance(loss, str):
        return "mean"
    known = loss_module(loss)
    return None if known is None else str(known.reduction)


def known_count(loss: Loss, target: Any) -> float | None:
    """Return what a loss divides its sum by for this target; None where it is not known.

    The entries ("mse" and torch's entrywise losses); the labels that are not ignored, or the sum of their class weights
    (cross entropy and negative log-likelihood); the samples, for a target of class probabilities.

    >>> labels = torch.tensor([[0, 1, -100]])
    >>> known_count("cross_entropy", labels), known_count(nn.CrossEntropyLoss(ignore_index=0), labels), known_count(None, labels)
    (2.0, 2.0, None)
    """
    if not isinstance(target, Tensor):
        return None
    if loss == "mse":
        return float(target.numel())
    if loss == "cross_entropy":
        return float((target != IGNORE_INDEX).sum())
    known = loss_module(loss)
    if isinstance(known, ELEMENTWISE):
        return float(target.numel())
    if not isinstance(known, _LABELS):
        return None
    if target.is_floating_point():
        classes = target.shape[1] if target.ndim > 1 else target.shape[0]
        return target.numel() / classes
    kept = target[target != known.ignore_index]
    weight = known.weight
    if weight is None:
        return float(kept.numel())
    if kept.numel() and not (int(kept.min()) >= 0 and int(kept.max()) < weight.numel()):
        return math.nan  # the loss itself says what is wrong with the labels
    return float(weight.to(torch.float64)[kept].sum())
