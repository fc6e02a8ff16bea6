"""Checks of a request before any work; every message says what was asked, what was seen, what was expected, what to do."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hessiankit.errors import HessiankitError, InputError
from hessiankit.request.calling import Loss, named_tensors, read_outputs
from hessiankit.request.losses import ELEMENTWISE, IGNORE_INDEX, LOSSES, loss_module
from hessiankit.request.spoiled import MASKED, first_spoiled
from hessiankit.tracing.source_line import source_line

if TYPE_CHECKING:
    from hessiankit.request.task import Task


def check_module(who: str, module: nn.Module) -> None:
    """Refuse modules that cannot be traced as they are, or whose loss is random.

    Raises:
        InputError: A compiled, scripted or quantised module; dropout or batch norm in training mode.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = getattr(dynamo, "OptimizedModule", ())
    for name, child in module.named_modules():
        what = f"{name!r}" if name else "the module"
        if isinstance(child, compiled):
            remedy = f"replace {what} by its ._orig_mod" if name else "pass module._orig_mod"
            raise InputError(
                f"{who}: {what} is compiled (torch.compile), which hides its operations; {remedy}, which has the same parameters"
            )
        if getattr(child, "_compiled_call_impl", None) is not None:
            raise InputError(
                f"{who}: {what} was compiled in place by .compile(), which hides its operations; call hessiankit before, "
                "or on a copy.deepcopy of the module from before"
            )
        if isinstance(child, torch.jit.ScriptModule):
            raise InputError(f"{who}: {what} is a TorchScript module, which cannot be traced; pass the Python module behind it")
        if type(child).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise InputError(
                f"{who}: {what} is a {type(child).__name__} with quantised weights, of which the loss is not a smooth "
                "function; pass the module from before quantisation"
            )
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.training and child.p > 0:
            raise InputError(
                f"{who}: {what} is a dropout layer (p={child.p}) in training mode, so the loss is random; "
                "call module.eval() first"
            )
        if isinstance(child, nn.MultiheadAttention) and child.training and child.dropout > 0:
            raise InputError(
                f"{who}: {what} has a dropout layer for its attention weights (dropout={child.dropout}) and is in training mode, "
                "so the loss is random; call module.eval() first"
            )
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
            raise InputError(
                f"{who}: {what} is a batch norm in training mode, which couples the samples and changes its buffers; "
                "call module.eval() first"
            )
    for name, p in module.named_parameters():
        if not p.is_floating_point() and not p.is_complex():
            raise InputError(
                f"{who}: the parameter {name!r} is {p.dtype}: quantised or integer weights, of which the loss is not a smooth "
                "function; load the module in a floating-point dtype, or keep such a tensor as a buffer"
            )


def one_kind(who: str, module: nn.Module, parameters: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
    """Return the dtype and device of the chosen parameters.

    Raises:
        InputError: They have several, or something of the module holds no values, or not finite ones.
    """
    for what in ("dtype", "device"):
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
    if not first.dtype.is_floating_point:
        raise InputError(f"{who}: the parameters are {first.dtype}; expected a real floating-point dtype, e.g. module.double()")
    for name, x in everything:
        check_dense(who, name, x)
    for name, x in everything:
        if x.is_floating_point() and _spoiled(x, mask=name in buffers) is not None:
            raise InputError(
                f"{who}: {name!r} contains NaN or infinity; a Hessian at such a point is not defined. Re-initialise it."
            )
    return first.dtype, first.device


def check_arguments(
    who: str, module: nn.Module, inputs: Any, target: Any, loss: Loss, dtype: torch.dtype, device: torch.device
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
        if x.device != device:
            raise InputError(f"{who}: {name} is on {x.device}, the parameters are on {device}; move one of them")
        check_dense(who, name, x)


def check_tensor(
    who: str,
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    *,
    mask: bool = False,
    other: str = "the parameters are",
) -> None:
    """Check one tensor that enters the computation; ``other`` is what has the dtype that is expected of it.

    Raises:
        InputError: It is empty, elsewhere, of another dtype, or not finite.
    """
    if x.numel() == 0:
        raise InputError(f"{who}: {name} has shape {tuple(x.shape)}, with no entries; pass at least one sample and one token")
    if x.device != device:
        raise InputError(f"{who}: {name} is on {x.device}, the parameters are on {device}; move one of them")
    check_dense(who, name, x)
    if x.is_complex():
        raise InputError(f"{who}: {name} is {x.dtype}; the Hessian is of a real function, pass {dtype}")
    if x.is_floating_point():
        if x.dtype != dtype:
            raise InputError(f"{who}: {name} is {x.dtype}, {other} {dtype}; convert one of them, e.g. {name}.to({dtype})")
        where = _spoiled(x, mask=mask)
        if where is not None:
            raise InputError(f"{who}: {name} contains NaN or infinity, first at index {where}; clean the data first")


def check_dense(who: str, name: str, x: Tensor) -> None:
    """Raise InputError for a sparse, nested or other tensor whose entries are not laid out in memory one by one."""
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise InputError(f"{who}: {name} has the layout {kind}; pass a dense tensor, e.g. {name}.to_dense()")


def _spoiled(x: Tensor, *, mask: bool) -> tuple[int, ...] | None:
    """Return where the first entry is that is NaN or infinite; -inf is fine in what may be an additive mask."""
    if _is_finite(x):
        return None
    good = torch.isfinite(x) | (x == -float("inf")) if mask else torch.isfinite(x)
    return None if bool(good.all()) else tuple(int(i) for i in (~good).nonzero()[0])


def _is_finite(x: Tensor) -> bool:
    """Tell whether no entry is NaN or infinite: none is where the sum is finite, which is the quickest to see."""
    summable = x.is_floating_point() and x.itemsize > 1
    return (summable and math.isfinite(x.sum().item())) or bool(torch.isfinite(x).all())


def check_outputs(who: str, task: Task, inputs: Any, device: torch.device) -> Any:
    """Call the module once, check what it returns, and return it.

    Raises:
        InputError: If the call fails, a value is not finite, or output and target do not fit the loss.
    """
    _check_constant_rows(who, task, inputs)
    bad: list[str] = []
    handles = [m.register_forward_hook(_watch(n, bad)) for n, m in task.module.named_modules()]
    try:
        with torch.no_grad():
            outputs = _run(who, task, inputs)
    finally:
        for handle in handles:
            handle.remove()
    out = read_outputs(who, task.loss, outputs)
    if bad or (isinstance(out, Tensor) and not _is_finite(out)):
        reason = first_spoiled(lambda: _run(who, task, inputs))
        for name, x in named_tensors(inputs):
            if x.is_floating_point() and MASKED not in reason:
                check_tensor(who, name, x, x.dtype, x.device)
        place = bad[0] if bad else "the module's output"
        raise InputError(f"{who}: {place} is NaN or infinite{f' ({reason})' if reason else ''}")
    if task.loss is None and out.numel() != 1:
        raise InputError(
            f"{who}: loss=None means that the module returns the loss, but it returns shape {tuple(out.shape)}; pass loss=..."
        )
    if isinstance(task.loss, str):
        _check_target(who, task, out, device)
    elif task.loss is not None:
        _check_callable(who, task, out)
    return outputs


def _watch(name: str, bad: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if not bad and isinstance(output, Tensor) and output.is_floating_point():
            where = _spoiled(output, mask=True)
            if where is not None:
                bad.append(f"{name or 'the module'!r} (row {where[:-1]})")

    return hook


def _check_constant_rows(who: str, task: Task, inputs: Any) -> None:
    """Refuse a norm with eps = 0 that meets a row without variance, even where torch returns a finite value."""
    found: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any], None]:
        def look(module: nn.Module, inputs: Any) -> None:
            x = inputs[0]
            scale = x.var(-1, unbiased=False) if isinstance(module, nn.LayerNorm) else x.square().mean(-1)
            floor = (torch.finfo(x.dtype).eps * x.abs().amax(-1)).square()
            if not found and bool((scale <= floor).any()):
                row = tuple(int(i) for i in (scale <= floor).nonzero()[0])
                found.append(f"{name!r} meets row {row}, whose variance is 0, with eps = 0")

        return look

    norms = [(n, m) for n, m in task.module.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm)) and m.eps == 0]
    if not norms:
        return
    handles = [m.register_forward_pre_hook(hook(n)) for n, m in norms]
    try:
        with torch.no_grad():
            _run(who, task, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        raise InputError(f"{who}: {found[0]}; the norm is not differentiable there. Use eps > 0, or rows that are not constant.")


def _run(who: str, task: Task, inputs: Any) -> Any:
    try:
        return task.outputs(task.parameters, *task.inputs)
    except HessiankitError:
        raise
    except Exception as error:
        tensors = [x for _, x in named_tensors(inputs)]
        embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in task.module.modules())
        if tensors and not embeds and not any(x.is_floating_point() for x in tensors):
            dtype = next(iter(task.parameters.values())).dtype
            raise InputError(
                f"{who}: inputs are {tensors[0].dtype} but the module has no embedding to look them up in; pass {dtype}"
            ) from error
        shown = [f"{name} {tuple(x.shape)}" if task.keywords else str(tuple(x.shape)) for name, x in named_tensors(inputs)]
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        line = source_line(error)
        at = f" (at {line})" if line else ""
        given = f"inputs of shape {', '.join(shown)}" if shown else "these inputs"
        raise InputError(f"{who}: the module does not accept {given}: {first}{at}") from error


def _check_target(who: str, task: Task, out: Tensor, device: torch.device) -> None:
    target = task.target
    if task.loss == "mse":
        _check_same_shape(who, target, out, "squared error")
        check_tensor(who, "target", target, out.dtype, device, other="the module's output is")
        if not target.is_floating_point():
            raise InputError(f"{who}: target is {target.dtype}; squared error needs {out.dtype} (one-hot encode class labels)")
    elif task.loss == "cross_entropy":
        if target.is_floating_point() or target.dtype == torch.bool or target.is_complex():
            raise InputError(f"{who}: target is {target.dtype}; cross entropy needs integer class labels")
        if target.shape != out.shape[:-1]:
            raise InputError(
                f"{who}: target has shape {tuple(target.shape)}, expected {tuple(out.shape[:-1])}: one label for each row of the "
                f"logits {tuple(out.shape)}, whose last axis holds the classes"
            )
        kept = target[target != IGNORE_INDEX]
        if kept.numel() == 0:
            raise InputError(f"{who}: every label is {IGNORE_INDEX} (ignored), so the loss is not defined; keep at least one")
        if int(kept.min()) < 0 or int(kept.max()) >= out.shape[-1]:
            raise InputError(
                f"{who}: labels lie in [{int(kept.min())}, {int(kept.max())}], expected 0 to {out.shape[-1] - 1} "
                f"for {out.shape[-1]} classes (or {IGNORE_INDEX} to ignore)"
            )


def _check_same_shape(who: str, target: Tensor, out: Tensor, what: str) -> None:
    if target.shape != out.shape:
        raise InputError(
            f"{who}: target has shape {tuple(target.shape)}, the module's output has {tuple(out.shape)}; "
            f"{what} needs equal shapes (nothing is broadcast)"
        )


def _check_callable(who: str, task: Task, outputs: Any) -> None:
    """Call a loss of the user's own once: it has to return one finite number."""
    assert callable(task.loss)
    known = loss_module(task.loss)
    if isinstance(known, ELEMENTWISE) and isinstance(outputs, Tensor) and isinstance(task.target, Tensor):
        _check_same_shape(who, task.target, outputs, type(known).__name__)
    try:
        with torch.no_grad():
            value = task.loss(outputs, task.target)
    except HessiankitError:
        raise
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        given = f"outputs of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        line = source_line(error)
        at = f" (at {line})" if line else ""
        raise InputError(f"{who}: the loss, called as loss(outputs, target) with {given}, raised: {first}{at}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{who}: the loss returned {seen}, expected a scalar tensor; reduce it, e.g. with .mean() or .sum()")
    if not bool(torch.isfinite(value)):
        raise InputError(f"{who}: the loss is {float(value)}, not a finite number; check the labels and the module's outputs")
