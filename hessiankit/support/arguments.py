"""Checks of arguments against their annotations, and the public name in front of every error message."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

import numpy as np

from hessiankit.support.errors import HessiankitError, InputError, OutOfMemoryError, did_you_mean, named

P = ParamSpec("P")
R = TypeVar("R")

ACCEPTED: dict[Any, tuple[tuple[Any, ...], str]] = {
    NoneType: ((NoneType,), "None"),
    bool: ((bool, np.bool_), "True or False"),
    int: ((Integral,), "an integer"),
    float: ((Real,), "a number"),
    str: ((str,), "a string"),
    Path: ((str, os.PathLike), "a path"),
    os.PathLike: ((str, os.PathLike), "a path"),
    abc.Callable: ((abc.Callable,), "a function"),
    abc.Mapping: ((Mapping,), "a dict"),
}
"""Annotation -> classes that it accepts, and words for them."""
LISTS = (abc.Iterable, abc.Sequence, tuple)  # accept any iterable but text, mappings, classes, tensors and modules


SYNONYMS = {"criterion": "loss", "optimizer": "preconditioner", "labels": "target", "model": "module", "data": "inputs"}
"""What other libraries call an argument -> what it is called here."""


def checked(
    caller: str, *, leave: tuple[str, ...] = (), rest: Callable[..., Any] | None = None, sharded: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks arguments against their annotations, and puts ``caller`` before every message.

    Checked are classes, ``|`` between them, and the elements of lists and tuples; an annotation with a name that only type
    checkers import is left to the function. A module that torch.compile returned is replaced by its original.

    Args:
        caller: Public name of the function or class.
        leave: Arguments that the function checks itself.
        rest: The function that takes the decorated function's ``**options``.
        sharded: Whether modules may be sharded, for functions of their structure alone, or of all ranks.

    Raises:
        InputError: By the decorated function, if an argument is of another kind, or a module is sharded.
        OutOfMemoryError: By the decorated function, if the host or the device cannot hold a tensor.
        TypeError: By the decorated function, if arguments are unknown or too many.

    >>> @checked("rise")
    ... def rise(steps: int, names: Iterable[str] = ()) -> int:
    ...     if steps < 0:
    ...         raise InputError("climb: steps is below 0")
    ...     return steps
    >>> rise(3, nam="up")
    Traceback (most recent call last):
    TypeError: rise: got an unexpected keyword argument 'nam'; did you mean 'names'?
    >>> rise("3")
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: rise: steps is a str; pass an integer
    >>> rise(3, names=["up", 1])
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: rise: names holds an int; expected a string in each place
    >>> rise(-1)
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: rise: steps is below 0
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature, names = inspect.signature(function), inspect.unwrap(function).__globals__
        plain = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        choices = [name for name in (*plain, *(inspect.signature(rest).parameters if rest else ())) if name != "self"]
        takes_any = rest is None and any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

        @cache
        def annotation(name: str) -> Any:
            return Any if name in leave or name not in plain else _evaluated(plain[name].annotation, names)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            strange = next((name for name in kwargs if name not in choices), None)
            if strange is not None and not takes_any:
                other = SYNONYMS.get(strange)
                hint = f"; did you mean {other!r}?" if other in choices else did_you_mean(strange, choices)
                hint = hint or f"; it takes {', '.join(choices)}"
                raise TypeError(f"{caller}: got an unexpected keyword argument {strange!r}{hint}")
            args, kwargs = tuple(map(original, args)), {name: original(x) for name, x in kwargs.items()}  # type: ignore[assignment]
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                places = [name for name, p in plain.items() if p.kind is not p.KEYWORD_ONLY]
                hint = f"; in this order it takes {', '.join(places)}, all others by name" if "too many" in str(error) else ""
                raise TypeError(f"{caller}: {error}{hint}") from None
            for name, value in arguments.items():
                if not sharded and name != "self":
                    check_whole(caller, value)
                if not fits(value, annotation(name)):
                    raise InputError(f"{caller}: {_misfit(name, value, annotation(name))}")
            try:
                return function(*args, **kwargs)
            except HessiankitError as error:
                error.args = (named(caller, str(error)), *error.args[1:])
                raise
            except RuntimeError as error:
                reason = _out_of_memory(error)
                if reason is None:
                    raise
                raise OutOfMemoryError(f"{caller}: {reason}") from error

        return called

    return decorate


def _out_of_memory(error: RuntimeError) -> str | None:
    """Cause and remedy of an allocation that failed; None for another error."""
    if type(error).__name__ == "OutOfMemoryError":  # torch's, of a device
        advice = "select parameters with params=[...], pass fewer samples at a time, or free what else the device holds"
        return f"{str(error).splitlines()[0].rstrip('.')}; {advice}"
    request = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
    return f"one tensor of {int(request[1]) / 2**30:,.1f} GiB does not fit; use smaller sizes" if request else None


SHARDED = ("FSDPModule", "FullyShardedDataParallel", "DTensor", "FlatParameter")
"""Names of torch's classes of sharded modules and parameters; to import the classes takes as long as torch itself."""


def is_sharded(value: Any) -> bool:
    """Tell whether the values of a module, or of tensors by name, are spread over processes."""
    return any(_traits(type(part))[0] for _, _, part in _parts(value))  # type: ignore[arg-type]


def check_whole(caller: str, value: Any) -> None:
    """Raise InputError for a module, or tensors by name, whose values are spread over processes or were freed by FSDP."""
    for prefix, key, part in _parts(value):
        kind, is_tensor = _traits(type(part))  # type: ignore[arg-type]
        if kind is not None or (is_tensor and _is_freed(part)):
            name = f"{prefix}.{key}".strip(".")
            state = f"is sharded ({kind}), and only part" if kind else "was gathered by FSDP and freed, and none"
            raise InputError(
                f"{caller}: {repr(name) if name else 'the module'} {state} of its values is here; use "
                "hessiankit.training.distributed.hessian_operator for products, sharpness for block types, or pass a whole copy"
            )


def _parts(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield modules and tensors, by the two parts of their names, of a module or of a mapping; nothing for other values."""
    if isinstance(value, Mapping):
        yield from (("", key, x) for key, x in value.items())
    elif not isinstance(value, type) and callable(getattr(value, "named_modules", None)):
        for prefix, module in value.named_modules():
            yield prefix, "", module
            for tensors in (module._parameters, module._buffers, vars(module)):
                yield from ((prefix, key, x) for key, x in tensors.items())


@lru_cache(1024)  # classes that a program makes one after the other are released
def _traits(kind: type) -> tuple[str | None, bool]:
    """Return the name of the sharded class that a class derives from, if any, and whether it is of tensors with memory."""
    names = [base.__name__ for base in kind.__mro__]
    is_tensor = "Tensor" in names and "UninitializedTensorMixin" not in names and not hasattr(kind, "__tensor_flatten__")
    return next((name for name in names if name in SHARDED), None), is_tensor


def _is_freed(x: Any) -> bool:
    """Tell whether a tensor has entries and no memory for them; a meta one has none anyway."""
    is_held = str(x.layout) == "torch.strided" and not x.is_meta and not x.is_nested
    return is_held and bool(x.numel()) and not x.untyped_storage().nbytes()


def original(x: Any) -> Any:
    """Return the module that torch.compile was called with, for what it returned; anything else as it is."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    while isinstance(x, compiled):
        x = x._orig_mod
    return x


def fits(value: Any, annotation: Any) -> bool:
    """Return whether an annotation accepts a value; elements of lists and tuples are checked, those of iterators are not.

    >>> fits(3, int | None), fits(True, int), fits(["a", 1], abc.Iterable[str]), fits("ab", abc.Iterable[str])
    (True, False, False, False)
    """
    kind, of = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return any(fits(value, one) for one in of)
    if kind in LISTS:
        return _listed(value) and (not isinstance(value, (list, tuple)) or all(fits(x, of[0]) for x in value))
    if kind in ACCEPTED:
        return isinstance(value, ACCEPTED[kind][0]) and (kind is bool or not isinstance(value, bool))
    return kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False) or isinstance(value, kind)


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    """The annotation as an object, ``Any`` where it has a name that only type checkers know."""
    if type(annotation) is not str:
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, {**vars(abc), "os": os, **names})
    except (NameError, AttributeError):  # or of a class that this build of torch lacks
        return Any


def _misfit(name: str, value: Any, annotation: Any) -> str:
    """Message for a value of the wrong type, with what to pass."""
    kinds = _alternatives(annotation)
    elements = next((get_args(kind)[0] for kind in kinds if get_origin(kind) in LISTS), None)
    if any(getattr(kind, "__name__", "") == "Module" for kind in kinds):
        is_class, is_function = isinstance(value, type), callable(value)
        what = "an instance of it" if is_class else "hessiankit.from_function(f, params)" if is_function else "the model itself"
        return f"expected a torch.nn.Module, got {type(value).__name__}; pass {what} as {name}"
    if elements is not None and isinstance(value, (list, tuple)):
        odd = next(x for x in value if not fits(x, elements))
        return f"{name} holds {_kind_of(odd)}; expected {_words(elements)} in each place"
    return f"{name} is {_kind_of(value)}; pass {_words(annotation)}"


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _kind_of(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _words(annotation: Any) -> str:
    """Return the words for what an annotation accepts."""
    kinds = [get_origin(kind) or kind for kind in _alternatives(annotation)]
    words = ["a list" if kind in LISTS else ACCEPTED[kind][1] if kind in ACCEPTED else f"a {kind.__name__}" for kind in kinds]
    return " or ".join(dict.fromkeys(words))


def _listed(value: Any) -> bool:
    """Whether a value is an iterable other than text, a mapping, a class, a tensor or a module."""
    if isinstance(value, (str, bytes, Mapping, type)) or {"Tensor", "Module"} & {kind.__name__ for kind in type(value).__mro__}:
        return False
    return isinstance(value, Iterable)
