"""Operations of a plan as calls: one by one by torch's bindings for Python, or as a tape that is run without Python in between.

The tape needs what ``hessiankit compile`` builds; operations that it cannot hold, and what Python decides, lie between tapes.
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hessiankit.engine.kernel_calls import BoundProduct, BoundSum
from hessiankit.support.kernels import replayer

aten = torch.ops.aten
FAST = frozenset(
    (
        *("add", "sub", "mul", "div", "pow", "addcmul", "mm", "bmm", "addmm", "baddbmm", "sum", "mean", "exp", "log", "neg"),
        *("rsqrt", "sqrt", "tanh", "sigmoid", "sin", "cos", "erf", "square", "reciprocal", "abs", "maximum", "minimum"),
        *("index_select", "gather", "cat", "where"),
    )
)
"""Operations whose binding in torch takes ``out`` and the same arguments, and is called sooner than the overload."""


class GuardError(Exception):
    """A decision comes out otherwise than when the plan was made."""


@dataclass(frozen=True)
class TorchCall:
    """An operation of torch with its tensors.

    Attributes:
        function: The overload.
        args: Its arguments.
        kwargs: Those by name.
        outputs: What its results are copied to; none where it writes them where they belong.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Tensor, ...] = ()

    def bound(self) -> Callable[[], Any]:
        """Return its call, by torch's own binding where there is one, which is called sooner than the overload."""
        name = self.function._schema.name.rpartition("::")[2]
        if self.outputs:
            return partial(_copied, partial(self.function, *self.args, **self.kwargs), self.outputs)
        if "out" in self.kwargs:
            is_fast = name in FAST and (name not in ("sum", "mean") or len(self.args) > 1)
            return partial(getattr(torch, name) if is_fast else self.function, *self.args, **self.kwargs)
        method = getattr(self.args[0], name, None) if self.args and isinstance(self.args[0], Tensor) else None
        if method is not None and not name.startswith("_") and not any(x is None for x in tree_leaves(self.args)):
            return partial(method, *self.args[1:], **self.kwargs)
        return partial(self.function, *self.args, **self.kwargs)


def into(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> TorchCall:
    """Return the operation that writes the result of another where it belongs.

    >>> x, y = torch.ones(2), torch.zeros(2)
    >>> _ = into(aten.exp.default, (x,), {}, y).bound()()
    >>> torch.equal(y, x.exp())
    True
    """
    name = function._schema.name.rpartition("::")[2]
    if isinstance(output, Tensor):
        if name in ("clone", "_to_copy", "alias", "detach", "lift_fresh", "contiguous"):
            return TorchCall(aten.copy_.default, (output, args[0]))
        if name in ("zeros", "new_zeros", "zeros_like"):
            return TorchCall(aten.zero_.default, (output,))
        found = _out_overload(function)
        if found is not None and torch.Tag.dynamic_output_shape not in function.tags:
            return TorchCall(found, args, {**kwargs, "out": output})
    return TorchCall(function, args, kwargs, tuple(x for x in tree_leaves(output) if isinstance(x, Tensor)))


def _out_overload(function: Any) -> Any:
    """Return the overload of an operation that writes into ``out``, if it has one result."""
    names = [a.name for a in function._schema.arguments]
    for overload in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, overload)
        arguments = other._schema.arguments
        if [a.name for a in arguments if not a.is_out] == names and [a.name for a in arguments if a.is_out] == ["out"]:
            same = all(str(a.type) == str(b.type) for a, b in zip(function._schema.arguments, arguments, strict=False))
            if same:
                return other
    return None


def _copied(call: Callable[[], Any], outputs: Sequence[Tensor]) -> None:
    for x, out in zip((x for x in tree_leaves(call()) if isinstance(x, Tensor)), outputs, strict=True):
        if x.shape != out.shape:
            raise GuardError(f"a result of shape {tuple(x.shape)} in place of {tuple(out.shape)}")
        out.copy_(x)


Step: TypeAlias = "TorchCall | BoundProduct | BoundSum | Callable[[], Any]"


class Tape:
    """Steps that are run one after the other by one compiled function.

    Args:
        library: What has the function.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._calls = library, list[Callable[[], Any]]()
        self._tape = ctypes.c_void_p(library.hessiankit_tape())
        weakref.finalize(self, library.hessiankit_tape_end, self._tape)

    def add(self, step: Step) -> bool:
        """Add a step, if a tape can hold it; tell whether it can."""
        if isinstance(step, TorchCall):
            if not self._add_operation(step):
                return False
            self._calls.append(step.bound())
            return True
        if not isinstance(step, (BoundProduct, BoundSum)):
            return False
        step.add_to(self._library, self._tape)
        self._calls.append(step)
        return True

    def _add_operation(self, step: TorchCall) -> bool:
        schema, codes = step.function._schema, list[int]()
        for n, argument in enumerate(schema.arguments):
            if n < len(step.args):
                value = step.args[n]
            elif argument.name in step.kwargs or argument.has_default_value():
                value = step.kwargs.get(argument.name, argument.default_value)
            else:
                return False
            code = _encoded(value)
            if code is None:
                return False
            codes += code
        arguments, outputs = ((ctypes.c_int64 * len(x))(*x) for x in (codes, [out._cdata for out in step.outputs]))
        name, overload = schema.name.encode(), schema.overload_name.encode()
        return not self._library.hessiankit_tape_operation(self._tape, name, overload, arguments, outputs, len(outputs))

    def __call__(self) -> None:
        """Run all steps; one that fails is called by itself, and raises what it raises so."""
        threads = torch.get_num_threads()
        failed = self._library.hessiankit_tape_run(self._tape, 0, threads)
        while failed >= 0:
            self._calls[failed]()
            failed = self._library.hessiankit_tape_run(self._tape, failed + 1, threads)


def calls(steps: Sequence[Step]) -> list[Callable[[], Any]]:
    """Return what runs some steps: tapes, where they are compiled, and single calls."""
    library, found = replayer(), list[Callable[[], Any]]()
    for step in steps:
        if library is not None:
            if found and isinstance(found[-1], Tape) and found[-1].add(step):
                continue
            tape = Tape(library)
            if tape.add(step):
                found.append(tape)
                continue
        found.append(step.bound() if isinstance(step, TorchCall) else step)
    return found


_KINDS = {"none": 0, "int": 1, "float": 2, "bool": 3, "tensor": 4, "ints": 5, "tensors": 6, "text": 7}
"""Kinds of values, as the compiled function reads them."""


def _encoded(x: Any) -> list[int] | None:
    """Return a value as numbers, its kind first; None if it is of no kind that a tape knows.

    >>> _encoded(None), _encoded(True), _encoded([2, 3]), _encoded(torch.float64)
    ([0], [3, 1], [5, 2, 2, 3], None)
    """
    if x is None:
        return [_KINDS["none"]]
    if isinstance(x, bool):
        return [_KINDS["bool"], int(x)]
    if isinstance(x, int):
        return [_KINDS["int"], x]
    if isinstance(x, float):
        return [_KINDS["float"], *struct.unpack("q", struct.pack("d", x))]
    if isinstance(x, str):
        return [_KINDS["text"], len(x), *x.encode("ascii")]
    if isinstance(x, Tensor):
        return [_KINDS["tensor"], x._cdata]
    if isinstance(x, (list, tuple)) and all(type(y) is int for y in x):
        return [_KINDS["ints"], len(x), *x]
    if isinstance(x, (list, tuple)) and all(isinstance(y, Tensor) for y in x):
        return [_KINDS["tensors"], len(x), *(y._cdata for y in x)]
    return None
