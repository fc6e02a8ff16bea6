"""The module's own call: one forward and one backward of torch, with which every result is compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.request.calling import (
    ELEMENTWISE,
    IGNORE_INDEX,
    SAMPLED,
    as_one_argument,
    call,
    check_arguments,
    check_labels,
    check_module,
    check_same_shape,
    check_tensor,
    loss_module,
    member,
    named_tensors,
    one_kind,
    ordinary,
    read_outputs,
    same_as,
)
from hessiankit.request.non_finite import MASKED, are_finite, first_spoiled, first_spoiled_module
from hessiankit.request.selection import select
from hessiankit.request.state import Held, ModuleState
from hessiankit.request.task import Loss, OwnGradient, Params, Task
from hessiankit.support.containers import arguments, map_tensors
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.tables import two_numbers
from hessiankit.support.torch_state import TORCH_LOCK, RandomStates
from hessiankit.tracing.graph import edges_behind
from hessiankit.tracing.source_line import at_line, first_line


def make_task(
    who: str,
    module: nn.Module,
    inputs: Any,
    target: Any,
    loss: Loss,
    params: Params = None,
    *,
    handshake: bool = True,
    share: bool = False,
    before: Task | None = None,
) -> Task:
    """Check everything that can be checked before computing, and return the request for what is selected.

    The module is called once, as it is, and differentiated once if ``handshake``; it is left as it was.

    Args:
        who: What an error message starts with. Arguments that are not explained here are those of a public function.
        handshake: Whether results are compared with the module's own loss and gradient.
        share: Whether the module's own parameters are read later, and no copies.
        before: An earlier request for the same module, whose state counts.

    Raises:
        InputError: If an argument cannot be used: the message says which, what was seen and what to pass; or if the module is
            not a function of its parameters.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"{who}: expected a torch.nn.Module, got {type(module).__name__}")
    check_module(who, module)
    inputs, target = as_one_argument(module, ordinary(inputs)), ordinary(target)
    parameters = select(who, module, params)
    dtype, device = one_kind(who, module, parameters, dtypes=True)
    check_arguments(who, module, inputs, target, loss, dtype, device)
    if loss == "cross_entropy" and not target.is_floating_point():
        target = target if target.dtype == torch.bool else target.long()  # labels of any integer type, as torch's loss takes one
    positional, keywords = arguments(inputs)
    state = ModuleState(module, loss, share=share) if before is None else before.state
    values = {name: state.values[name] for name in parameters}
    data = (keywords or positional, target)

    def copied(x: Tensor) -> Tensor:
        return x if state.holds(x) else x.detach().clone().requires_grad_(x.requires_grad)

    copies, labels = map_tensors(copied, data)
    task = Task(module, copies, labels, loss, values, state)
    _check_constant_rows(who, task, inputs)
    named = chain(module.named_parameters(), module.named_buffers())
    if before is not None and next(state.changed(named), None) is not None:
        with task.at():  # training may have moved the module since the earlier batch
            return _called(who, task, inputs, handshake=handshake)[0]
    return _own_call(who, task, data, inputs, handshake=handshake)


def _own_call(who: str, task: Task, data: tuple[Any, Any], inputs: Any, *, handshake: bool) -> Task:
    """Call the module as its user does, on the user's own ``data``, and check what the call returns and leaves behind.

    Raises:
        InputError: If the call fails, a value is not finite, output and target do not fit the loss, or the module is not a
            function: a call changes its parameters, buffers or inputs, or another call gives another loss.
    """
    pairs = zip(named_tensors(data, ""), named_tensors((task.inputs, task.target), ""), strict=True)
    own = Held(data, copies=[(name, x, copy) for (name, x), (_, copy) in pairs if x is not copy])
    random = RandomStates(task.module)
    user = replace(task, inputs=data[0], target=data[1])
    with TORCH_LOCK, torch.inference_mode(False), torch.enable_grad():
        try:
            checked, value = _called(who, user, inputs, handshake=handshake)
            if (changed := own.changed()) is not None:
                kind = "inputs" if changed.startswith("[0]") else "target"
                raise InputError(
                    f"{who}: a call of the module or the loss changes its {kind}, so that the next call would see other data; "
                    "let it work on a clone() or a copy"
                )
            _check_function(who, checked, value, random)
        finally:
            random.restore()
            task.state.restore()
            own.restore()
    return replace(checked, inputs=task.inputs, target=task.target)


def own_gradient(
    task: Task, parameters: Mapping[str, Tensor] | None = None, stopped: AbstractContextManager[Any] | None = None
) -> OwnGradient:
    """Return the loss and its gradient at some parameters, by the module's own call and one backward of torch.

    ``stopped``: A context for the call: values that are held constant as torch holds them (:class:`StoppedValues`).
    """
    with task.at(parameters):
        with stopped or nullcontext():
            value = own_loss(task, task.run())
        return OwnGradient(float(value.detach()), _gradient(task, value))


def own_value(task: Task, parameters: Mapping[str, Tensor] | None = None) -> float:
    """Return the loss at some parameters, by the module's own call."""
    with task.at(parameters):
        return float(own_loss(task, task.run()).detach())


def own_target(task: Task) -> tuple[Loss, Any]:
    """Return the user's loss and target, leaving out drawn targets."""
    if isinstance(task.loss, str) and task.loss.startswith(SAMPLED):
        return task.loss.removeprefix(SAMPLED), task.target[:, 0]
    return task.loss, task.target


def own_loss(task: Task, outputs: Any) -> Tensor:
    """Return the loss of the module's result, in operations of torch; a user's own loss is called as it is."""
    read = read_outputs("hessian", task.loss, outputs)
    if callable(task.loss):
        return task.loss(read, task.target).reshape(())
    name, target = own_target(task)
    if name == "mse":
        return (read - target.reshape(read.shape)).square().mean()
    if name == "cross_entropy":
        return F.cross_entropy(read.reshape(-1, read.shape[-1]), target.reshape(-1), ignore_index=IGNORE_INDEX)
    return read.reshape(())


def reached(task: Task) -> set[str]:
    """Return the parameters that the loss depends on, whatever the values are; all of them where autograd cannot tell."""
    try:
        own = task.reference or own_gradient(task)
    except Exception:  # whatever a module may raise when it is differentiated
        return set(task.parameters)
    return {name for name in task.parameters if own.gradient[name] is not None}


def _gradient(task: Task, value: Tensor) -> dict[str, Tensor | None]:
    leaves = task.leaves
    if not value.requires_grad:
        return dict.fromkeys(leaves)
    reachable = [p for p in leaves.values() if p.requires_grad]  # a forward may have turned one off
    slopes = dict(zip(map(id, reachable), torch.autograd.grad(value, reachable, allow_unused=True), strict=True))
    gradient = {name: slopes.get(id(p)) for name, p in leaves.items()}
    return {
        n: x if x is None else x.detach().to_dense() if x.layout != torch.strided else x.detach() for n, x in gradient.items()
    }


def _called(who: str, task: Task, inputs: Any, *, handshake: bool) -> tuple[Task, float]:
    """Call the module and the loss as they are now; check the inputs, what the two return, and the target.

    Returns:
        The request with the name of the loss, if it has one, and the gradient of this call, if ``handshake``; the loss.
    """
    outputs = _run(who, task, inputs)
    out = read_outputs(who, task.loss, outputs)
    if isinstance(out, Tensor) and not are_finite([out])[0]:
        raise _not_finite(who, task, inputs)
    if task.loss is None and out.numel() != 1:
        raise InputError(
            f"{who}: loss=None means that the module returns the loss, but it returns shape {tuple(out.shape)}; pass loss=..."
        )
    if isinstance(task.loss, str):
        _check_target(who, task, out)
    value = _value_of_callable(who, task, out) if callable(task.loss) else own_loss(task, outputs)
    functions = [] if value.grad_fn is None else [value.grad_fn, *(function for function, _ in edges_behind(value.grad_fn))]
    if any(function.name() == "CheckpointFunctionBackward" for function in functions):
        raise InputError(
            f"{who}: a reentrant checkpoint hides what it computes from torch.autograd.grad; pass use_reentrant=False to "
            "torch.utils.checkpoint, or turn checkpointing off"
        )
    loss = float(value.detach())
    reference = OwnGradient(loss, _own_slopes(who, task, value)) if handshake else None
    if reference is not None and not all(are_finite([g for g in reference.gradient.values() if g is not None])):
        _check_inputs(who, inputs)  # an infinite entry may be the reason; else the matrix says which operation is
    named = same_as(task.loss, out, task.target) if callable(task.loss) else None  # whose samples can be treated apart
    whole = callable(task.loss) and not isinstance(out, Tensor)
    by_logits = (whole or task.loss is None) and _depends_by_alone(member(outputs, "logits"), value)
    return replace(task, loss=named or task.loss, whole=whole, by_logits=by_logits, reference=reference), loss


def _depends_by_alone(output: Tensor | None, value: Tensor) -> bool:
    """Tell whether autograd knows a value to depend on leaves, and every way to them to pass an output."""
    if output is None or value is output or value.grad_fn is None:
        return False
    return not any(
        hasattr(function, "variable") for function, _ in edges_behind(value.grad_fn, (output.grad_fn, output.output_nr))
    )


def _check_inputs(who: str, inputs: Any) -> None:
    """Refuse infinite entries, which only a mask may have."""
    for name, x in named_tensors(inputs):
        if x.is_floating_point():
            check_tensor(who, name, x, x.dtype, x.device)


def _own_slopes(who: str, task: Task, value: Tensor) -> dict[str, Tensor | None]:
    try:
        return _gradient(task, value)
    except Exception as error:
        raise InputError(
            f"{who}: torch.autograd.grad of the loss, with the module called as it is, raised "
            f"{type(error).__name__}: {first_line(error)}. "
            "Mend it, or pass handshake=False to go without that comparison"
        ) from error


def _check_function(who: str, task: Task, first: float, random: RandomStates) -> None:
    """Refuse a call that changed its parameters, or after which another call gives another loss.

    A call may change buffers that have no effect on the loss, such as running statistics.
    """
    parameter = next(task.state.changed(task.module.named_parameters()), None)
    if parameter is not None:
        raise InputError(
            f"{who}: a call of the module changes its parameter {parameter!r}, so the loss is not a function of the parameters; "
            "call the module once before if it sets itself up, or keep the values as they are in forward"
        )
    task.state.written.update(task.state.changed(task.module.named_buffers()))
    buffer = next(iter(sorted(task.state.written)), None)
    attribute, drawn = buffer or task.state.changed_attribute(), random.drawn_from()
    if attribute is None and not drawn:
        return
    again = float(own_loss(task, _run(who, task, task.inputs)).detach())
    if not abs(first - again) <= 64 * torch.finfo(next(iter(task.parameters.values())).dtype).eps * max(abs(first), abs(again)):
        why = "it draws random numbers" if drawn else f"it changes its {'' if buffer is None else 'buffer '}{attribute!r}"
        raise InputError(
            f"{who}: two calls of the module on the same inputs give different losses ({two_numbers(first, again)}): {why}; "
            "call module.eval(), turn dropout off, pass random numbers as an input, or keep counters out of the loss"
        )


def _not_finite(who: str, task: Task, inputs: Any) -> InputError:
    """Return the error for an output that is not finite: it names the first submodule that returned such a value."""
    reason = first_spoiled(lambda: _run(who, task, inputs))
    if MASKED not in reason:
        _check_inputs(who, inputs)
    place = first_spoiled_module(task.module, task.run) or "the module's output"
    return InputError(f"{who}: {place} is NaN or infinite{f' ({reason})' if reason else ''}")


def _check_constant_rows(who: str, task: Task, inputs: Any) -> None:
    """Refuse a norm with eps = 0 that meets a row without variance, even where torch returns a finite value."""
    constant: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any) -> None:
        x = inputs[0]
        scale = x.var(-1, unbiased=False) if isinstance(module, nn.LayerNorm) else x.square().mean(-1)
        floor = (torch.finfo(x.dtype).eps * x.abs().amax(-1)).square()
        if not constant and bool((scale <= floor).any()):
            row = tuple(int(i) for i in (scale <= floor).nonzero()[0])
            constant.append(f"{name!r} meets row {row}, whose variance is 0, with eps = 0")

    norms = [(n, m) for n, m in task.module.named_modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm)) and m.eps == 0]
    if not norms:
        return
    with task.at():  # which takes the hooks away again
        for name, norm in norms:
            norm.register_forward_pre_hook(partial(look, name))
        _run(who, task, inputs)
    if constant:
        raise InputError(
            f"{who}: {constant[0]}; the norm is not differentiable there. Use eps > 0, or rows that are not constant."
        )


def _run(who: str, task: Task, inputs: Any) -> Any:
    return call(who, task.module, inputs, task.run)


def _check_target(who: str, task: Task, out: Tensor) -> None:
    target = task.target
    if task.loss == "mse":
        check_same_shape(who, target, out.shape)
        check_tensor(who, "target", target, out.dtype, task.device, other="the module's output is")
        if not target.is_floating_point():
            raise InputError(f"{who}: target is {target.dtype}; squared error needs {out.dtype} (one-hot encode class labels)")
    elif task.loss == "cross_entropy":
        check_labels(who, target, out.shape)
        if not bool((target != IGNORE_INDEX).any()):
            raise InputError(f"{who}: every label is {IGNORE_INDEX} (ignored), so the loss is not defined; keep at least one")


def _value_of_callable(who: str, task: Task, outputs: Any) -> Tensor:
    """Call a loss of the user's own: it has to return one finite number."""
    assert callable(task.loss)
    known = loss_module(task.loss)
    if isinstance(known, ELEMENTWISE) and isinstance(outputs, Tensor) and isinstance(task.target, Tensor):
        check_same_shape(who, task.target, outputs.shape, type(known).__name__)
    try:
        value = task.loss(outputs, task.target)
    except HessiankitError:
        raise
    except Exception as error:
        seen = f"outputs of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        where = f"{first_line(error)}{at_line(error)}"
        raise InputError(f"{who}: the loss, called as loss(outputs, target) with {seen}, raised: {where}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        seen = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{who}: the loss returned {seen}, expected a scalar tensor; reduce it, e.g. with .mean() or .sum()")
    if not bool(torch.isfinite(value)):
        raise InputError(
            f"{who}: the loss is {float(value.detach())}, not a finite number; check the labels and the module's outputs"
        )
    return value.reshape(())
