"""The first call of a batch: the module as its user calls it, and the checks that need such a call.

Every message of a check says what was asked, what was seen, what was expected, what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hessiankit.request.batch_loss import BatchLoss, ModulePoint, OwnGradient
from hessiankit.request.checks import IGNORE_INDEX, check_labels, check_place, check_same_shape, check_tensor
from hessiankit.request.data import as_one_argument, call, ordinary
from hessiankit.request.loss import ENTRYWISE, Loss
from hessiankit.request.non_finite import MASK_HINT, are_finite, first_spoiled, first_spoiled_module
from hessiankit.request.state import Held
from hessiankit.support.containers import arguments, map_tensors, named_tensors
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.tables import two_numbers
from hessiankit.support.torch_state import TORCH_LOCK, RandomStates
from hessiankit.tracing.graph import edges_behind
from hessiankit.tracing.source_line import at_line, first_line


def first_call(point: ModulePoint, loss: Loss, inputs: Any, target: Any, *, handshake: bool) -> BatchLoss:
    """Call the module and the loss once on a user's data, and return the loss of the batch, on copies of the data.

    Differentiated once too if ``handshake``. The module is left as it was.

    Raises:
        InputError: The data do not fit; the call fails, or is not finite; or the module is not a function: a call changes its
            parameters or the data, or another one gives another loss.
    """
    inputs, target = as_one_argument(point.module, ordinary(inputs)), ordinary(target)
    _check_data(point, loss, inputs, target)
    data = (*arguments(inputs), loss.prepared(target))

    def copied(x: Tensor) -> Tensor:
        return x if point.state.holds(x) else x.detach().clone().requires_grad_(x.requires_grad)

    copies = map_tensors(copied, data)
    batch_of_user = BatchLoss(point.module, point.parameters, point.state, loss, *data)
    batch_of_copies = replace(batch_of_user, args=copies[0], kwargs=copies[1], target=copies[2])
    _check_constant_rows(batch_of_copies, inputs)
    pairs = zip(named_tensors(data, ""), named_tensors(copies, ""), strict=True)
    record = Held(data, copies=[(name, x, copy) for (name, x), (_, copy) in pairs if x is not copy])
    random = point.state.random_states()
    with TORCH_LOCK, torch.inference_mode(False), torch.enable_grad():
        try:
            batch, value = _called(batch_of_user, inputs, handshake=handshake)
            if (path := record.changed()) is not None:
                kind = "target" if path.startswith("[2]") else "inputs"
                raise InputError(
                    f"request: a call of the module or the loss changes its {kind}, so that the next call would see other data; "
                    "let it work on a clone() or a copy"
                )
            _check_function(batch, inputs, value, random)
        finally:
            random.restore()
            point.state.restore()
            record.restore()
    normalizer = (batch.loss.count(batch_of_copies.target) if batch.loss.name else None) or 1.0
    return replace(batch_of_copies, loss=batch.loss, reference=batch.reference, normalizer=normalizer, output=batch.output)


def _check_data(point: ModulePoint, loss: Loss, inputs: Any, target: Any) -> None:
    """Check the data as far as that needs no call."""
    if isinstance(inputs, Mapping):
        strange = next((key for key in inputs if not isinstance(key, str)), None)
        if strange is not None:
            raise InputError(
                f"request: inputs has the key {strange!r}; a mapping holds keyword arguments, whose keys are strings"
            )
    dtypes = {p.dtype for p in point.parameters.values()}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
    for name, x in named_tensors(inputs):
        check_tensor(name, x, dtype, point.device_of_calls, mask=True)
    if loss.reads == "loss":
        if target is not None:
            raise InputError(
                "request: loss=None means that the module returns its loss, so the target would not be used; pass loss=..., or "
                "put the labels among the inputs"
            )
        return
    if target is None:
        label = repr(loss.name) if loss.name else "a callable"
        takes_labels = "labels" in inspect.signature(point.module.forward).parameters
        remedy = "labels=... in the batch, a mapping" if takes_labels else "target=..."
        raise InputError(f"request: loss={label} needs a target; pass {remedy}, or loss=None if the module returns its loss")
    if loss.name and not isinstance(target, Tensor):
        kind = type(target).__name__
        remedy = "pass torch.from_numpy(target)" if isinstance(target, np.ndarray) else "pass it, or a loss of your own"
        raise InputError(f"request: target is a {kind}; loss={loss.name!r} compares with one tensor: {remedy}")
    for name, x in named_tensors(target, "target"):
        check_place(name, x, point.device_of_calls)


def _called(batch: BatchLoss, inputs: Any, *, handshake: bool) -> tuple[BatchLoss, float]:
    """Call the module and the loss as they are now; check what they return, and the target.

    Returns:
        The batch, its loss with what the call shows, the output and the gradient, if ``handshake``; the value of the loss.
    """
    result = _result(batch, inputs)
    part = batch.loss.read(result)
    if isinstance(part, Tensor) and not are_finite([part])[0]:
        raise _not_finite(batch, inputs)
    check_fit(batch.loss, part, batch.target, batch.device_of_calls)
    value = _value(batch, part)
    functions = [] if value.grad_fn is None else [value.grad_fn, *(function for function, _ in edges_behind(value.grad_fn))]
    if any(function.name() == "CheckpointFunctionBackward" for function in functions):
        raise InputError(
            "request: a reentrant checkpoint hides what it computes from torch.autograd.grad; pass use_reentrant=False to "
            "torch.utils.checkpoint, or turn checkpointing off"
        )
    number, slopes = float(value.detach()), _slopes(batch, value) if handshake else None
    if slopes is not None and not all(are_finite([g for g in slopes.values() if g is not None])):
        _refuse_infinite(inputs)  # which may be the reason; else the matrix says which operation is
    reference = None if slopes is None else OwnGradient(number, slopes)
    loss = batch.loss.settled(result, value, batch.target)
    return replace(batch, loss=loss, reference=reference, output=loss.read(result).detach() if loss.name else None), number


def _result(batch: BatchLoss, inputs: Any) -> Any:
    return call(batch.module, inputs, batch.result)


def _slopes(batch: BatchLoss, value: Tensor) -> dict[str, Tensor | None]:
    try:
        return batch.slopes(value)
    except Exception as error:
        raise InputError(
            f"request: torch.autograd.grad of the loss, with the module called as it is, raised {type(error).__name__}: "
            f"{first_line(error)}. Mend it, or pass handshake=False to go without that comparison"
        ) from error


def check_fit(loss: Loss, part: Any, target: Any, device: torch.device) -> None:
    """Check that the output that a loss reads and the target have matching shapes; torch would broadcast some that do not.

    Raises:
        InputError: They do not.
    """
    if loss.reads == "loss" and part.numel() != 1:
        raise InputError(
            f"request: loss=None means that the module returns the loss, but it returns shape {tuple(part.shape)}; pass loss=..."
        )
    if loss.name == "mse" and not target.is_floating_point():
        raise InputError(
            f"request: target is {target.dtype}, and the loss is 'mse', which needs {part.dtype}; pass loss='cross_entropy' for "
            "labels of classes"
        )
    if isinstance(loss.equals, ENTRYWISE) and isinstance(part, Tensor) and isinstance(target, Tensor):
        check_same_shape(target, part.shape, "squared error" if loss.name else type(loss.equals).__name__)
    if loss.name == "mse":
        check_tensor("target", target, part.dtype, device, reference="the module's output is")
    elif loss.name == "cross_entropy":
        check_labels(target, part.shape)
        if not bool((target != IGNORE_INDEX).any()):
            raise InputError(f"request: every label is {IGNORE_INDEX} (ignored), so the loss is not defined; keep at least one")


def _value(batch: BatchLoss, part: Any) -> Tensor:
    """Call the loss; explain its error, and refuse a result that is not one finite number."""
    try:
        value = batch.loss.value(part, batch.target)
    except HessiankitError:
        raise
    except Exception as error:
        description = f"outputs of shape {tuple(part.shape)}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
        where = f"{first_line(error)}{at_line(error)}"
        raise InputError(f"request: the loss, called as loss(outputs, target) with {description}, raised: {where}") from error
    if not batch.loss.name and batch.loss.reads != "loss" and not bool(torch.isfinite(value)):
        number = float(value.detach())
        raise InputError(f"request: the loss is {number}, not a finite number; check the labels and the module's outputs")
    return value


def _check_function(batch: BatchLoss, inputs: Any, first: float, random: RandomStates) -> None:
    """Refuse a call that changed its parameters, or after which another call gives another loss.

    A call may change buffers that have no effect on the loss, such as running statistics.
    """
    state = batch.state
    parameter = next(state.changed(batch.module.named_parameters()), None)
    if parameter is not None:
        raise InputError(
            f"request: a call of the module changes its parameter {parameter!r}, so the loss is not a function of the "
            "parameters; call the module once before if it sets itself up, or keep the values as they are in forward"
        )
    state.written.update(state.changed(batch.module.named_buffers()))
    buffer = next(iter(sorted(state.written)), None)
    attribute, is_random = buffer or state.changed_attribute(), random.drawn_from()
    if attribute is None and not is_random:
        return
    repeat = float(batch.loss.value(_result(batch, inputs), batch.target).detach())
    tolerance = 64 * torch.finfo(next(iter(batch.parameters.values())).dtype).eps * max(abs(first), abs(repeat))
    if not abs(first - repeat) <= tolerance:
        why = "it draws random numbers" if is_random else f"it changes its {'' if buffer is None else 'buffer '}{attribute!r}"
        raise InputError(
            f"request: two calls of the module on the same inputs give different losses ({two_numbers(first, repeat)}): {why}; "
            "call module.eval(), turn dropout off, pass random numbers as an input, or keep counters out of the loss"
        )


def _refuse_infinite(inputs: Any) -> None:
    """Refuse infinite entries, which only a mask may have."""
    for name, x in named_tensors(inputs):
        if x.is_floating_point():
            check_tensor(name, x, x.dtype, x.device)


def _not_finite(batch: BatchLoss, inputs: Any) -> InputError:
    """Return the error for an output that is not finite: it names the first submodule that returned such a value."""
    reason = first_spoiled(lambda: _result(batch, inputs))
    if MASK_HINT not in reason:
        _refuse_infinite(inputs)
    layer = first_spoiled_module(batch.module, batch.result) or "the module's output"
    return InputError(f"request: {layer} is NaN or infinite{f' ({reason})' if reason else ''}")


def _check_constant_rows(batch: BatchLoss, inputs: Any) -> None:
    """Refuse a norm with eps = 0 that meets a row without variance, even where torch returns a finite value."""
    norms = [(n, m) for n, m in batch.module.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm)) and m.eps == 0]
    if not norms:
        return
    constant: list[str] = []

    def look(name: str, module: nn.Module, arriving: Any) -> None:
        x = arriving[0]
        scale = x.var(-1, unbiased=False) if isinstance(module, nn.LayerNorm) else x.square().mean(-1)
        floor = (torch.finfo(x.dtype).eps * x.abs().amax(-1)).square()
        if not constant and bool((scale <= floor).any()):
            row = tuple(int(i) for i in (scale <= floor).nonzero()[0])
            constant.append(f"{name!r} meets row {row}, whose variance is 0, with eps = 0")

    with batch.at():  # which takes the hooks away again
        for name, norm in norms:
            norm.register_forward_pre_hook(partial(look, name))
        _result(batch, inputs)
    if constant:
        raise InputError(
            f"request: {constant[0]}; the norm is not differentiable there. Use eps > 0, or rows that are not constant."
        )
