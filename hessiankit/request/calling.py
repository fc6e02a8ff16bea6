"""The call of a module: its arguments read and checked before any work, its result read.

Every message of a check says what was asked, what was seen, what was expected, what to do.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

from hessiankit.request.non_finite import are_finite, spoiled_at
from hessiankit.support.containers import arguments, check_values, map_tensors
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.torch_state import strided_parts
from hessiankit.tracing.source_line import at_line, first_line

Loss: TypeAlias = "str | Callable[..., Tensor] | None"


def as_one_argument(module: nn.Module, inputs: Any) -> Any:
    """Return inputs, wrapped in a tuple if they are a list or tuple that forward takes as one argument.

    >>> [type(as_one_argument(layer, [1, 2])) for layer in (nn.Linear(1, 1), nn.Bilinear(1, 1, 1))]
    [<class 'tuple'>, <class 'list'>]
    """
    whole = isinstance(inputs, (list, tuple)) and not _accepts(module, inputs) and _accepts(module, [inputs])
    return (inputs,) if whole else inputs


def _accepts(module: nn.Module, positional: Sequence[Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(*positional)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # a function in C, which has no signature
    return True


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
    else:  # torch may have been taught to take an object apart
        for number, leaf in enumerate(_pytree.tree_leaves(inputs)):
            if leaf is not inputs:
                yield from named_tensors(leaf, f"{name}.{number}")


def samples(tree: Any, rows: slice | Tensor, count: int) -> Any:
    """Return nested containers with these rows of every tensor that has ``count`` rows; other tensors are kept whole.

    >>> samples((torch.arange(3), torch.zeros(2)), slice(0, 1), 3)
    (tensor([0]), tensor([0., 0.]))
    """
    return map_tensors(lambda x: x[rows] if x.ndim and x.shape[0] == count else x, tree)


def ordinary(tree: Any) -> Any:
    """Return containers unchanged, or with copies of the tensors made in inference mode, which autograd does not take."""
    if any(x.is_inference() for _, x in named_tensors(tree)):
        return map_tensors(lambda x: x.clone() if x.is_inference() else x, tree)
    return tree


def call(who: str, module: nn.Module, inputs: Any, run: Callable[[], Any] | None = None) -> Any:
    """Call a module on inputs, or ``run`` in its place, and explain an error of the module's own code.

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
        shown = f"inputs of shape {', '.join(shapes)}" if shapes else "these inputs"
        raise InputError(
            f"{who}: the module, called on {shown}, raised {type(error).__name__}: {first_line(error)}{at_line(error)}"
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


def read_outputs(who: str, loss: Loss, outputs: Any) -> Any:
    """Return what the loss is computed from.

    Args:
        who: What an error message starts with.
        loss: None: the module returns its loss, as a tensor, an attribute ``.loss``, an entry ``"loss"`` or the only number of a
            tuple. A name, or a loss of torch's: the same with ``logits``; without such an entry the only floating-point tensor
            that is no number. Another callable is given exactly what the module returns.
        outputs: What the module returned.

    Raises:
        InputError: If there is no such thing.

    >>> read_outputs("example", "mse", {"logits": Tensor([1.0]), "other": 2})
    tensor([1.])
    >>> read_outputs("example", None, (torch.zeros(2), torch.ones(())))
    tensor(1.)
    """
    if isinstance(outputs, Tensor) or (callable(loss) and not _takes_tensors(loss)):
        return outputs
    key = "loss" if loss is None else "logits"
    output = member(outputs, key)
    if output is not None:
        return output
    what = f"one tensor, an object or dict with {key!r}, or a tuple with one number"
    if loss is not None:
        what = f"one tensor, an object or dict with {key!r}, or an object, dict or tuple with one floating-point tensor"
    if loss is None:
        remedy = "pass the labels that it computes its loss from among the inputs, or loss=... and target=..."
    else:
        remedy = "pass a callable loss=f(outputs, target), which is given the whole of it, or wrap the module"
    raise InputError(f"{who}: the module returned {_describe(outputs, key)}, expected {what}; {remedy}")


def member(outputs: Any, key: str) -> Tensor | None:
    """Return the tensor ``loss`` or ``logits`` of a module's result, by name, or by whether it is a scalar.

    A result without that name, such as an output object of diffusers, has logits if one floating-point tensor in it is no scalar.
    A tuple has a loss if one tensor in it is a scalar.

    >>> member((torch.ones(2), None), "logits"), member((torch.ones(2), torch.ones(2)), "logits") is None
    (tensor([1., 1.]), True)
    >>> member({"sample": torch.ones(2), "step": 3}, "logits")
    tensor([1., 1.])
    """
    is_tuple = isinstance(outputs, (tuple, list))
    entries = outputs if isinstance(outputs, Mapping) else None
    if entries is None:
        entries = dict(enumerate(outputs)) if is_tuple else getattr(outputs, "__dict__", {})
    if key in entries or hasattr(outputs, key):
        value = entries[key] if key in entries else getattr(outputs, key)
        return value if isinstance(value, Tensor) else None
    if key == "loss" and not is_tuple:
        return None
    tensors = [x for x in entries.values() if isinstance(x, Tensor) and x.is_floating_point()]
    candidates = [x for x in tensors if (x.ndim == 0) == (key == "loss")]
    return candidates[0] if len(candidates) == 1 else None


def _takes_tensors(loss: Loss) -> bool:
    """Tell whether a loss is one of torch's modules or functions, which read no objects."""
    function = loss.func if isinstance(loss, partial) else loss
    return getattr(function, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional")


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
SAMPLED = "sampled "
"""Before the loss of a task whose Gauss-Newton matrix is sampled (:class:`hessiankit.primitives.loss.SampledLoss`)."""
IGNORE_INDEX = -100
ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
"""Losses of torch that average over the entries of outputs and target alike."""
_LABELS = (nn.CrossEntropyLoss, nn.NLLLoss)
_KINDS: dict[Any, type[nn.Module]] = {
    "mse": nn.MSELoss,
    "cross_entropy": nn.CrossEntropyLoss,
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
    """Return the torch loss that a loss is: itself, or the module with its defaults for one of torch's functions or a name."""
    if type(loss) in (*ELEMENTWISE, *_LABELS):
        return loss  # type: ignore[return-value]
    named = loss.removeprefix(SAMPLED) if isinstance(loss, str) else loss
    kind = _KINDS.get(named) if getattr(named, "__hash__", None) else None
    return None if kind is None else kind()


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


def trained_parameters(loss: Loss, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a loss refers to, by name, if they require a gradient and are none of the module's.

    Those of a loss that is a module, of the module that it is a method of, and of modules that a function refers to by name.

    >>> proxies = nn.Bilinear(2, 2, 1, bias=False)
    >>> [list(trained_parameters(loss, nn.Linear(2, 2))) for loss in (proxies, lambda y, t: proxies(y, t).sum())]
    [['weight'], ['proxies.weight']]
    """
    while isinstance(loss, partial):
        loss = loss.func
    referred: dict[str, Any] = {"": loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)}
    if inspect.isfunction(loss):
        referred = {name: loss.__globals__.get(name) for name in loss.__code__.co_names}
        for name, cell in zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True):
            with suppress(ValueError):  # not bound yet
                referred[name] = cell.cell_contents
    named: dict[str, Any] = {}
    for name, x in referred.items():
        named.update(x.named_parameters(name) if isinstance(x, nn.Module) else {name: x})
    own = {id(p) for p in module.parameters()}
    return {n: p for n, p in named.items() if isinstance(p, nn.Parameter) and p.requires_grad and id(p) not in own}


def known_reduction(loss: Loss) -> str | None:
    """Return "mean" or "sum", or None where it is not known.

    >>> known_reduction("mse"), known_reduction(nn.NLLLoss(reduction="sum")), known_reduction(len)
    ('mean', 'sum', None)
    """
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
    if isinstance(loss, str) and loss.startswith(SAMPLED):
        target = target[:, 0]
    known = loss_module(loss)
    if isinstance(known, ELEMENTWISE):
        return float(target.numel())
    if not isinstance(known, _LABELS):
        return None
    if target.is_floating_point():
        classes = target.shape[1] if target.ndim > 1 else max(1, target.numel())
        return target.numel() / classes
    kept = target[target != known.ignore_index]
    weight = known.weight
    if weight is None:
        return float(kept.numel())
    if kept.numel() and not (int(kept.min()) >= 0 and int(kept.max()) < weight.numel()):
        return math.nan  # the loss itself says what is wrong with the labels
    return float(weight.to(torch.float64)[kept.long()].sum())


def check_module(who: str, module: nn.Module) -> None:
    """Refuse modules that cannot be traced as they are, or whose loss is random.

    Raises:
        InputError: A scripted or quantised module; dropout in training mode.
    """
    for name, child in module.named_modules():
        what = f"{name!r}" if name else "the module"
        if isinstance(child, torch.jit.ScriptModule):
            raise InputError(f"{who}: {what} is a TorchScript module, which cannot be traced; pass the Python module behind it")
        if type(child).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise InputError(
                f"{who}: {what} is a {type(child).__name__} with quantised weights, of which the loss is not a smooth "
                "function; pass the module from before quantisation"
            )
        drops = ""
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            drops = f"is a dropout layer (p={child.p})"
        elif isinstance(child, nn.MultiheadAttention) and child.dropout > 0:
            drops = f"has a dropout layer for its attention weights (dropout={child.dropout}) and is"
        if drops and child.training:
            raise InputError(f"{who}: {what} {drops} in training mode, so the loss is random; call module.eval() first")


def one_kind(
    who: str, module: nn.Module, parameters: Mapping[str, Tensor], *, dtypes: bool = False
) -> tuple[torch.dtype | None, torch.device]:
    """Return the dtype and device of the chosen parameters; None for the dtype where they have several.

    Raises:
        InputError: They have several, of dtypes unless ``dtypes`` allows it, or something of the module holds no values, or not
            finite ones.
    """
    several = len({p.dtype for p in parameters.values()}) > 1
    for what in ("device",) if dtypes else ("dtype", "device"):
        seen: dict[Any, str] = {}
        for name, p in parameters.items():
            seen.setdefault(getattr(p, what), name)
        if len(seen) > 1:
            listing = ", ".join(
                f"{name!r} on {kind}" if what == "device" else f"{name!r} is {kind}" for kind, name in seen.items()
            )
            raise InputError(f"{who}: the parameters have several {what}s: {listing}. Bring them to one, e.g. module.to(...)")
    first = next(iter(parameters.values()))
    buffers = dict(module.named_buffers())  # which may hold the -inf of a mask
    everything = [*module.named_parameters(), *buffers.items()]
    meta = next((name for name, x in everything if x.is_meta), None)
    if meta is not None:
        raise InputError(f"{who}: {meta!r} is on the meta device, which holds no values; load the weights first")
    odd = next((p.dtype for p in parameters.values() if not p.dtype.is_floating_point), None)
    if odd is not None:
        raise InputError(
            f"{who}: the parameters are {odd}; expected real ones, such as the real and imaginary parts, which forward puts "
            "together by torch.complex"
        )
    for name, x in everything:
        check_values(who, name, x, constant=name in buffers)
    reals = [(name, strided_parts(x)[-1]) for name, x in everything if x.is_floating_point()]
    for (name, x), finite in zip(reals, are_finite([x for _, x in reals]), strict=True):
        if not finite and spoiled_at(x, mask=name in buffers) is not None:
            raise InputError(
                f"{who}: {name!r} contains NaN or infinity; a Hessian at such a point is not defined. Re-initialise it."
            )
    return None if several else first.dtype, first.device


def check_arguments(
    who: str, module: nn.Module, inputs: Any, target: Any, loss: Loss, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Check inputs, target and loss as far as one can without calling the module.

    Raises:
        InputError: If one of them cannot be used.
    """
    if isinstance(inputs, Mapping):
        strange = next((key for key in inputs if not isinstance(key, str)), None)
        if strange is not None:
            raise InputError(f"{who}: inputs has the key {strange!r}; a mapping holds keyword arguments, whose keys are strings")
    for name, x in named_tensors(inputs):
        check_tensor(who, name, x, dtype, device, mask=True)
    if isinstance(loss, str) and loss not in LOSSES:
        raise InputError(
            f"{who}: loss={loss!r} is not known; pass one of {', '.join(map(repr, LOSSES))}, a callable "
            "(outputs, target) -> scalar, or None if the module returns the loss itself"
        )
    if isinstance(loss, type):
        raise InputError(f"{who}: loss is the class {loss.__name__}; pass an instance, such as {loss.__name__}()")
    if loss is not None and not isinstance(loss, str) and not callable(loss):
        raise InputError(f"{who}: loss is a {type(loss).__name__}; pass a name, a callable (outputs, target) -> scalar, or None")
    if loss is not None and target is None:
        asked = repr(loss) if isinstance(loss, str) else "a callable"
        raise InputError(f"{who}: loss={asked} needs a target; pass target=..., or loss=None if the module returns its loss")
    if loss is None and target is not None:
        raise InputError(
            f"{who}: loss=None means that the module returns its loss, so the target would not be used; pass loss=..., or put "
            "the labels among the inputs"
        )
    if isinstance(loss, str) and not isinstance(target, Tensor):
        raise InputError(f"{who}: target is a {type(target).__name__}; loss={loss!r} compares with one tensor")
    for name, x in named_tensors(target, "target"):
        check_place(who, name, x, device)


def check_place(who: str, name: str, x: Tensor, device: torch.device, *, constant: bool = False) -> None:
    """Raise InputError for a tensor on another device than the parameters, or of a layout that :func:`check_values` refuses."""
    if x.device != device:
        raise InputError(f"{who}: {name} is on {x.device}, the parameters are on {device}; move one of them")
    check_values(who, name, x, constant=constant)


def check_labels(who: str, target: Tensor, shape: Sequence[int]) -> None:
    """Raise InputError unless a target holds one integer label for each row of logits of this shape."""
    if target.is_floating_point() or target.dtype == torch.bool or target.is_complex():
        raise InputError(f"{who}: target is {target.dtype}; cross entropy needs integer class labels")
    if target.shape != shape[:-1]:
        raise InputError(
            f"{who}: target has shape {tuple(target.shape)}, expected {tuple(shape[:-1])}: one label for each row of the "
            f"logits {tuple(shape)}, whose last axis holds the classes"
        )
    counted = target[target != IGNORE_INDEX]
    if counted.numel() and not (int(counted.min()) >= 0 and int(counted.max()) < shape[-1]):
        raise InputError(
            f"{who}: labels lie in [{int(counted.min())}, {int(counted.max())}], expected 0 to {shape[-1] - 1} for {shape[-1]} "
            f"classes (or {IGNORE_INDEX} to ignore a position)"
        )


def check_same_shape(who: str, target: Tensor, shape: Sequence[int], what: str = "squared error") -> None:
    """Raise InputError unless a target has the shape of the output that it is compared with."""
    if target.shape != tuple(shape):
        raise InputError(
            f"{who}: target has shape {tuple(target.shape)}, the module's output has {tuple(shape)}; "
            f"{what} needs equal shapes (nothing is broadcast)"
        )


def check_tensor(
    who: str,
    name: str,
    x: Tensor,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    mask: bool = False,
    other: str = "the parameters are",
) -> None:
    """Check a tensor that enters the computation; a ``dtype`` of None allows any, and ``other`` says in errors what has it.

    Raises:
        InputError: It is empty, elsewhere, of another dtype, or not finite.
    """
    if x.numel() == 0:
        raise InputError(f"{who}: {name} has shape {tuple(x.shape)}, with no entries; pass at least one sample and one token")
    check_place(who, name, x, device, constant=True)
    if x.is_complex():
        raise InputError(f"{who}: {name} is {x.dtype}; the Hessian is of a real function, pass {dtype or 'a real one'}")
    if x.is_floating_point():
        if dtype is not None and x.dtype != dtype:
            raise InputError(f"{who}: {name} is {x.dtype}, {other} {dtype}; convert one of them, e.g. {name}.to({dtype})")
        where = spoiled_at(strided_parts(x)[-1], mask=mask)
        if where is not None:
            raise InputError(f"{who}: {name} contains NaN or infinity, first at index {where}; clean the data first")
