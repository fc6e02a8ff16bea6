"""Global state of torch and of a model: saved, restored, and changed by one thread at a time."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial, wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hessiankit.support.errors import InputError


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode with autograd on and ``.grad`` None; afterwards training continues bit for bit.

    Restored, also after an error: the random states of Python, NumPy, the CPU and the model's devices; the mode of every
    module; ``.grad`` (the same tensors) and ``requires_grad`` of every parameter; the values of every buffer.
    """
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    states, buffers = preserved_random_states(model), preserved_buffers(model)
    with states, buffers, evaluation_mode(model), torch.inference_mode(False), torch.enable_grad():
        try:
            for p, _, _ in parameters:
                p.grad = None
            yield
        finally:
            for p, gradient, requires_grad in parameters:
                p.grad = gradient
                p.requires_grad_(requires_grad)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and restore the mode of each of its modules afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not _has_one_mode(model):
            _to_evaluation(model)
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _to_evaluation(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError as error:
        raise InputError(
            f"eval() of the {type(model).__name__} raises {type(error).__name__} ({error}), and its dropout or batch norm is in "
            "training mode; pass the model itself, or what torch.export makes of model.eval()"
        ) from error


def _has_one_mode(model: nn.Module) -> bool:
    """Whether a model is a program of torch.export without a dropout or batch norm in training mode.

    The graph of such a program has one mode, and ``eval()`` raises NotImplementedError.
    """
    if not isinstance(model, torch.fx.GraphModule):
        return False
    calls = [node for node in model.graph.nodes if node.op == "call_function"]
    modal = [node for node in calls if any(name in str(node.target) for name in ("dropout", "batch_norm"))]
    return not any(True in node.args for node in modal)


def is_wrapper(x: Tensor) -> bool:
    """Tell whether a tensor is of a class that keeps its numbers in other tensors, as quantised weights do."""
    return hasattr(x, "__tensor_flatten__")


def has_memory(x: Tensor) -> bool:
    """Tell whether the entries of a tensor lie in memory of its own one by one: it is neither sparse nor a wrapper."""
    return x.layout is torch.strided and not is_wrapper(x)


def is_narrow(x: Tensor) -> bool:
    """Tell whether a tensor has floating-point entries of one byte, which torch has few operations for."""
    return x.is_floating_point() and x.itemsize == 1


def strided_parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that a sparse tensor or a wrapper consists of, values last; of an ordinary tensor itself alone.

    >>> [part.tolist() for part in strided_parts(torch.eye(2).to_sparse())]
    [[[0, 1], [0, 1]], [1.0, 1.0]]
    """
    if is_wrapper(x):
        names, _ = x.__tensor_flatten__()  # type: ignore[attr-defined]
        return tuple(part for name in names for part in strided_parts(getattr(x, name)))
    if x.layout is torch.strided:
        return (x,)
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


def read_numbers(tensors: Iterable[Tensor]) -> list[Any]:
    """Return tensors of one entry as numbers, with one synchronisation for each accelerator and dtype.

    >>> read_numbers([torch.tensor(1.5), torch.tensor(True), torch.tensor([2.5])])
    [1.5, True, 2.5]
    """
    of_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    numbers: list[Any] = list(tensors)
    for k, x in enumerate(numbers):
        if x.device.type == "cpu":
            numbers[k] = x.item()
        else:
            of_kind.setdefault((x.device, x.dtype), []).append(k)
    for places in of_kind.values():
        values = torch.stack([numbers[k].detach().reshape(()) for k in places]).tolist()
        for k, value in zip(places, values, strict=True):
            numbers[k] = value
    return numbers


def different(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[bool]:
    """Tell for each pair whether its tensors differ in kind or in an entry; NaN equals NaN.

    >>> x = torch.tensor([1.0, torch.nan])
    >>> different([(x, x.clone()), (x, x + 1), (x, x.double())])
    [False, True, True]
    """
    differences: list[bool] = []
    comparisons: list[tuple[int, Tensor, Tensor]] = []
    for k, (x, copy) in enumerate(pairs):
        kinds = [(t.shape, t.dtype, t.device, t.layout) for t in (x, copy)]
        parts = list(zip(strided_parts(x), strided_parts(copy), strict=True)) if kinds[0] == kinds[1] else []
        differences.append(kinds[0] != kinds[1] or any(a.shape != b.shape for a, b in parts))
        if not differences[k]:
            bits = [(a.view(torch.uint8), b.view(torch.uint8)) if is_narrow(a) else (a, b) for a, b in parts]
            comparisons += [(k, a, b) for a, b in bits if not _is_same(a, b)]
    if not comparisons:
        return differences
    unequal = read_numbers(((a != b) & ((a == a) | (b == b))).any() for _, a, b in comparisons)
    for (k, _, _), value in zip(comparisons, unequal, strict=True):
        differences[k] = differences[k] or value
    return differences


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are certainly the same, as far as that takes no wait for a device."""
    is_one_memory = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return is_one_memory or (a.device.type == "cpu" and torch.equal(a, b))


def write_values(x: Tensor, values: Tensor) -> None:
    """Write the entries of one tensor into another of its kind; a sparse one keeps its pattern."""
    for part, source in zip(strided_parts(x), strided_parts(values), strict=True):
        part.data.copy_(source)


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the values of every buffer afterwards; one that did not change is not written: graphs with it stay valid."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta and not is_lazy(buffer)]
    try:
        yield
    finally:
        with torch.no_grad():
            for (buffer, value), is_different in zip(buffers, different(buffers), strict=True):
                if is_different:
                    write_values(buffer, value)


@contextmanager
def preserved_random_states(model: nn.Module) -> Iterator[RandomStates]:
    """Restore the random states of Python, NumPy, the CPU and the model's devices afterwards."""
    states = RandomStates(x.device for x in (*model.parameters(), *model.buffers()))
    try:
        yield states
    finally:
        states.restore()


class RandomStates:
    """A snapshot of the random states of Python, NumPy, the CPU and some other devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        numpy = np.random
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (random.getstate, random.setstate),
            (numpy.get_state, numpy.set_state),
            (torch.get_rng_state, torch.set_rng_state),
        ]
        for device in {device for device in devices if device.type not in ("cpu", "meta")}:
            module, where = torch.get_device_module(device.type), {} if device.type == "mps" else {"device": device}
            self._generators.append((partial(module.get_rng_state, **where), partial(module.set_rng_state, **where)))
        self._states = [read() for read, _ in self._generators]

    def drawn_from(self) -> bool:
        """Whether a number has been drawn from one of the generators since the snapshot."""
        return not all(_same(read(), state) for (read, _), state in zip(self._generators, self._states, strict=True))

    def restore(self) -> None:
        """Restore the snapshot."""
        for (_, write), state in zip(self._generators, self._states, strict=True):
            write(state)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and not any(isinstance(x, np.ndarray) for x in a):
        return bool(a == b)  # Python's state, 625 integers
    if isinstance(a, tuple):
        return all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


P = ParamSpec("P")
R = TypeVar("R")
TORCH_LOCK = threading.RLock()
"""Held while torch's tracing modes, which are the process's, or a module's state are changed."""


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function under :data:`TORCH_LOCK`, in IEEE arithmetic, outside inference mode, which autograd cannot use."""

    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> R:
        with TORCH_LOCK, ieee_arithmetic():
            if not torch.is_inference_mode_enabled():
                return function(*args, **kwargs)
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)

    return locked


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread; afterwards, also after an error, in as many as before."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def load_forward_mode() -> None:
    """Load the modules of torch's forward mode, once: some versions warn there that they call ``torch.jit.script``."""
    x = torch.zeros((), device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
        torch.func.jvp(torch.neg, (x,), (x,))


def wide(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


LARGE = 2**22  # parameters from which nothing of their size is kept, and freed memory returns to the system


def hand_back_memory(parameters: int) -> None:
    """Return freed memory to the system after work with that many parameters; glibc keeps much of it."""
    if parameters > LARGE and sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def computed_later(function: Callable[P, R]) -> Callable[P, R]:
    """Run a deferred computation under :data:`TORCH_LOCK` and without the autocast of the code that reads its result."""

    locked = one_at_a_time(function)

    @wraps(function)
    def later(*args: P.args, **kwargs: P.kwargs) -> R:
        with full_precision():
            return locked(*args, **kwargs)

    return later


StandsFor: TypeAlias = Callable[[Tensor, Tensor], None]
RECORDING: ContextVar[StandsFor | None] = ContextVar("RECORDING", default=None)


def recording() -> StandsFor | None:
    """Return the function of the active recorder that registers a tensor as a copy of a recorded one; None without a recorder.

    Under a recorder, the package's own versions of some operations call torch's.
    """
    return None if torch.compiler.is_compiling() else RECORDING.get()


OF_LOGITS: ContextVar[bool] = ContextVar("OF_LOGITS", default=False)
"""Whether a loss is computed from its logits also where their head is known, from which it takes less memory."""


@contextmanager
def losses_of_logits() -> Iterator[None]:
    """Let losses read the logits themselves, where their gradients or a model's own loss are looked up by them."""
    token = OF_LOGITS.set(True)
    try:
        yield
    finally:
        OF_LOGITS.reset(token)


@contextmanager
def full_precision() -> Iterator[None]:
    """Disable autocast on every device and TensorFloat-32, so that operations keep the dtypes of their tensors."""
    with ExitStack() as stack:
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(ieee_arithmetic())
        yield


AUTOCAST = [kind for kind in ("cpu", "cuda", "mps", "xpu", "privateuseone") if torch.amp.is_autocast_available(kind)]


@contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Compute float32 products and convolutions in IEEE arithmetic, without TensorFloat-32 or sums of bfloat16 parts.

    >>> torch.set_float32_matmul_precision("high")
    >>> with ieee_arithmetic():
    ...     within = torch.get_float32_matmul_precision()
    >>> within, torch.get_float32_matmul_precision()
    ('highest', 'high')
    >>> torch.set_float32_matmul_precision("highest")
    """
    settings = _float32_settings()
    try:
        if [value for *_, value in settings] != ["highest", False]:
            torch.set_float32_matmul_precision("highest")
            _set_flag(torch.backends.cudnn, "allow_tf32", False)
        yield
    finally:
        if _float32_settings() != settings:
            for part, name, value in settings:
                torch.set_float32_matmul_precision(value) if part is torch else _set_flag(part, name, value)


def _set_flag(part: Any, name: str, value: Any) -> None:
    """Set a flag of a backend, also after ``torch.backends.disable_global_flags()``, as in torch's own tests."""
    with torch.backends.__allow_nonbracketed_mutation():  # type: ignore[attr-defined]
        setattr(part, name, value)


def _float32_settings() -> list[tuple[Any, str, Any]]:
    """(module of torch, attribute, value) of the settings of float32 arithmetic."""
    cudnn: Any = torch.backends.cudnn
    try:
        return [
            (torch, "float32_matmul_precision", torch.get_float32_matmul_precision()),
            (cudnn, "allow_tf32", cudnn.allow_tf32),
        ]
    except RuntimeError:  # set by the names of torch 2.9, which differ for products and convolutions, devices and the CPU
        host: Any = torch.backends.mkldnn
        parts = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, host.matmul, host.conv, host.rnn)
        return [(part, "fp32_precision", part.fp32_precision) for part in parts]


@contextmanager
def ordinary_path(*callables: Any) -> Iterator[None]:
    """Disable operations without a derivative: the inference path of torch's transformer layers, and recurrent layers by cuDNN.

    The first also shortens padded batches. Arithmetic is of full precision (:func:`full_precision`). Modules among
    ``callables`` of which a part is compiled run as they were before: compiled code hides its operations.
    """
    with TORCH_LOCK, torch.compiler.set_stance("force_eager") if any(map(_is_compiled, callables)) else nullcontext():
        fast_path, cudnn = torch.backends.mha.get_fastpath_enabled(), torch.backends.cudnn.enabled
        torch.backends.mha.set_fastpath_enabled(False)
        if cudnn and any(map(_is_recurrent, callables)):
            _set_flag(torch.backends.cudnn, "enabled", False)
        try:
            with full_precision():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            if torch.backends.cudnn.enabled != cudnn:
                _set_flag(torch.backends.cudnn, "enabled", cudnn)


def _is_recurrent(x: Any) -> bool:
    """Tell whether a module has recurrent layers, which cuDNN computes in one operation without a second derivative."""
    return isinstance(x, nn.Module) and any(isinstance(m, nn.RNNBase) for m in x.modules())


def _is_compiled(x: Any) -> bool:
    """Tell whether torch.compile has compiled a module or a part of it."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if compiled is None or not isinstance(x, nn.Module):
        return False
    return any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in x.modules())
