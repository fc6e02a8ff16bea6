"""What a Hessian is asked of: a module, its inputs, a target, a loss and the parameters; checked before any work."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hessiankit.errors import InputError, OutOfMemoryError
from hessiankit.trace import ordinary_path

Loss: TypeAlias = "str | Callable[..., Tensor] | None"
LOSSES = ("mse", "cross_entropy")
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Task:
    """A validated request: ``function(parameters)`` is the module's output for these inputs."""

    module: nn.Module
    inputs: tuple[Any, ...]
    target: Tensor | None
    loss: Loss
    parameters: dict[str, Tensor]

    @property
    def slices(self) -> dict[str, slice]:
        """Columns of each parameter in the Hessian, in the order of ``named_parameters()``."""
        found, start = {}, 0
        for name, value in self.parameters.items():
            found[name] = slice(start, start + value.numel())
            start += value.numel()
        return found

    @property
    def size(self) -> int:
        """Number of parameters P."""
        return sum(p.numel() for p in self.parameters.values())

    def call(self, parameters: Mapping[str, Tensor], *inputs: Any) -> Tensor:
        """Return the module's output at some parameters."""
        with ordinary_path():
            return torch.func.functional_call(self.module, dict(parameters), inputs)

    def part(self, rows: slice) -> Task:
        """Return the same request for some samples."""
        batch = self.batch
        inputs = tuple(x[rows] if isinstance(x, Tensor) and x.ndim and x.shape[0] == batch else x for x in self.inputs)
        return Task(self.module, inputs, None if self.target is None else self.target[rows], self.loss, self.parameters)

    @property
    def batch(self) -> int:
        """Length of the first axis of the first tensor input."""
        return next((int(x.shape[0]) for x in self.inputs if isinstance(x, Tensor) and x.ndim), 1)


def make_task(
    who: str, module: nn.Module, inputs: Any, target: Tensor | None, loss: Loss, params: Iterable[str] | None = None
) -> Task:
    """Check everything that can be checked before computing, and return the request.

    Raises:
        InputError: If an argument cannot be used: the message says which, what was seen and what to pass.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"{who}: expected a torch.nn.Module, got {type(module).__name__}")
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    parameters = _parameters(who, module, params)
    dtype, device = _one_kind(who, parameters)
    _check_mode(who, module)
    for i, x in enumerate(args):
        if isinstance(x, Tensor):
            _check_tensor(who, f"inputs[{i}]" if len(args) > 1 else "inputs", x, dtype, device)
    for name, value in [*parameters.items(), *module.named_buffers()]:
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(
                f"{who}: {name!r} contains NaN or infinity; a Hessian at such a point is not defined. Re-initialise it."
            )
    if isinstance(loss, str) and loss not in LOSSES:
        raise InputError(
            f"{who}: loss={loss!r} is not known; pass one of {', '.join(map(repr, LOSSES))}, a callable "
            "(outputs, target) -> scalar, or None if the module returns the loss itself"
        )
    if loss is not None and target is None:
        raise InputError(
            f"{who}: loss={loss if isinstance(loss, str) else 'a callable'!r} needs a target; pass target=..., or loss=None"
        )
    task = Task(module, args, target, loss, parameters)
    _check_output(who, task, dtype, device)
    return task


def _parameters(who: str, module: nn.Module, params: Iterable[str] | None) -> dict[str, Tensor]:
    every = {n: p for n, p in module.named_parameters() if p.requires_grad}
    if not every:
        raise InputError(f"{who}: the module has no parameters that require grad; call requires_grad_(True) on those of interest")
    if params is None:
        chosen = every
    else:
        wanted = [params] if isinstance(params, str) else list(params)
        unknown = [n for n in wanted if n not in every]
        if unknown:
            raise InputError(
                f"{who}: params names {unknown}, which are not parameters that require grad; there are: {', '.join(every)}"
            )
        chosen = {n: every[n] for n in every if n in wanted}
    return {n: p.detach() for n, p in chosen.items()}


def _one_kind(who: str, parameters: Mapping[str, Tensor]) -> tuple[torch.dtype, torch.device]:
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
    if first.is_meta:
        raise InputError(f"{who}: the parameters are on the meta device, which holds no values; load the weights first")
    if not first.dtype.is_floating_point:
        raise InputError(f"{who}: the parameters are {first.dtype}; expected a real floating-point dtype, e.g. module.double()")
    return first.dtype, first.device


def _check_mode(who: str, module: nn.Module) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.training and child.p > 0:
            raise InputError(
                f"{who}: {name or 'the module'!r} is a dropout layer (p={child.p}) in training mode, so the loss is random; "
                "call module.eval() first"
            )
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.training:
            raise InputError(
                f"{who}: {name or 'the module'!r} is a batch norm in training mode, which couples the samples and changes its "
                "buffers; call module.eval() first"
            )


def _check_tensor(who: str, name: str, x: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if x.numel() == 0:
        raise InputError(f"{who}: {name} has shape {tuple(x.shape)}, with no entries; pass at least one sample and one token")
    if x.device != device:
        raise InputError(f"{who}: {name} is on {x.device}, the parameters are on {device}; move one of them")
    if x.is_complex():
        raise InputError(f"{who}: {name} is {x.dtype}; the Hessian is of a real function, pass {dtype}")
    if x.is_floating_point():
        if x.dtype != dtype:
            raise InputError(
                f"{who}: {name} is {x.dtype}, the parameters are {dtype}; convert one of them, e.g. inputs.to({dtype})"
            )
        if not bool(torch.isfinite(x).all()):
            where = tuple(int(i) for i in (~torch.isfinite(x)).nonzero()[0])
            raise InputError(f"{who}: {name} contains NaN or infinity, first at index {where}; clean the data first")


def _check_output(who: str, task: Task, dtype: torch.dtype, device: torch.device) -> None:
    tensors = [x for x in task.inputs if isinstance(x, Tensor)]
    embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in task.module.modules())
    if tensors and not embeds and not any(x.is_floating_point() for x in tensors):
        seen = tensors[0].dtype
        raise InputError(f"{who}: inputs are {seen} but the module has no embedding to look them up in; pass {dtype}")
    _check_constant_rows(who, task)
    bad: list[str] = []
    handles = [m.register_forward_hook(_watch(n, bad)) for n, m in task.module.named_modules()]
    try:
        with torch.no_grad():
            out = _run(who, task)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(out, Tensor):
        raise InputError(
            f"{who}: the module returned {type(out).__name__}, expected one tensor; wrap it to return what the loss needs"
        )
    if bad or not bool(torch.isfinite(out).all()):
        place = bad[0] if bad else "the module's output"
        raise InputError(
            f"{who}: {place} is NaN or infinite. If it is a norm, a row is constant and eps is 0: use eps > 0, "
            "or rows that are not constant"
        )
    if task.loss is None:
        if out.numel() != 1:
            raise InputError(
                f"{who}: loss=None means that the module returns the loss, but it returns shape {tuple(out.shape)}; pass loss=..."
            )
        return
    _check_target(who, task, out, device)


def _watch(name: str, bad: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if not bad and isinstance(output, Tensor) and output.is_floating_point() and not bool(torch.isfinite(output).all()):
            row = tuple(int(i) for i in (~torch.isfinite(output)).nonzero()[0][:-1])
            bad.append(f"{name or 'the module'!r} (row {row})")

    return hook


def _check_constant_rows(who: str, task: Task) -> None:
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
            _run(who, task)
    finally:
        for handle in handles:
            handle.remove()
    if found:
        raise InputError(f"{who}: {found[0]}; the norm is not differentiable there. Use eps > 0, or rows that are not constant.")


def _run(who: str, task: Task) -> Any:
    try:
        return task.call(task.parameters, *task.inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in task.inputs if isinstance(x, Tensor))
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{who}: the module does not accept inputs of shape {shapes}: {first}") from error


def _check_target(who: str, task: Task, out: Tensor, device: torch.device) -> None:
    target = task.target
    assert target is not None
    if target.device != device:
        raise InputError(f"{who}: target is on {target.device}, the parameters are on {device}; move one of them")
    if task.loss == "mse":
        if target.shape != out.shape:
            raise InputError(
                f"{who}: target has shape {tuple(target.shape)}, the module's output has {tuple(out.shape)}; "
                "squared error needs equal shapes (nothing is broadcast)"
            )
        _check_tensor(who, "target", target, out.dtype, device)
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


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device, as far as it tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(who: str, size: int, dtype: torch.dtype, device: torch.device, *, copies: int = 2, workspace: int = 0) -> None:
    """Raise OutOfMemoryError if ``copies`` P x P matrices and the work space do not fit, before anything is allocated."""
    one = size * size * dtype.itemsize
    need, free = copies * one + workspace, available_memory(device)
    if need > free:
        raise OutOfMemoryError(
            f"{who}: {size:,} parameters make a {size:,} x {size:,} {dtype} matrix of {_gib(one)}, {_gib(need)} with work space, "
            f"but only {_gib(free)} are free on {device}. Select parameters with params=[...], or use a smaller model."
        )


def _gib(n: int) -> str:
    return f"{n / 2**30:,.1f} GiB"
