"""Checks of arguments against their annotations, and the public name in front of every error message."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from hessiankit.support.errors import HessiankitError, InputError, OutOfMemoryError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "None": (lambda x: x is None, "None"),
    "bool": (lambda x: isinstance(x, bool) or _is_a(x, "bool_", "bool"), "True or False"),
    "int": (lambda x: isinstance(x, Integral) and not isinstance(x, bool), "an integer"),
    "float": (lambda x: isinstance(x, Real) and not isinstance(x, bool), "a number"),
    "str": (lambda x: isinstance(x, str), "a string"),
    "Path": (lambda x: isinstance(x, (str, os.PathLike)), "a path"),
    "Callable": (callable, "a function"),
    "Mapping": (lambda x: isinstance(x, Mapping), "a dict"),
    "Iterable": (lambda x: _listed(x), "a list"),
}
"""Kind -> predicate, and words for a message."""
SAME = {"PathLike": "Path", "Tell": "Callable", "Sequence": "Iterable", "tuple": "Iterable", "dict": "Mapping"}
CLASSES = {"Module", "Tensor", "Optimizer", "dtype", "MonitorLog", "Part", "Ratio"}
"""Classes by their own name, so that they need not be imported here."""


def checked(
    who: str, *, leave: tuple[str, ...] = (), rest: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that holds arguments against their annotations, and puts ``who`` before every message.

    A module that torch.compile returned is replaced by its original.

    Checked are annotations made of the names in :data:`KINDS` and :data:`CLASSES`, with ``|``, and the elements of lists and
    tuples; other annotations are left to the function. Too many or unknown arguments raise a TypeError that names the nearest
    known argument, or all.

    Args:
        who: The function or class, as its user knows it.
        leave: Arguments that the function checks itself.
        rest: The function that takes the decorated function's ``**options``.

    Raises:
        InputError: By the decorated function, if an argument is of another kind.
        OutOfMemoryError: By the decorated function, if the host cannot hold a tensor.

    >>> @checked("rise")
    ... def rise(steps: int, names: Iterable[str] = ()) -> int:
    ...     if steps < 0:
    ...         raise InputError("climb: steps is below 0")
    ...     return steps
    >>> rise(3)
    3
    >>> rise(3, nam="up")
    Traceback (most recent call last):
    TypeError: rise: got an unexpected keyword argument 'nam'; did you mean 'names'?
    >>> rise("3")
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: rise: steps is a str; pass an integer
    >>> rise(3, names=["up", 1])
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: rise: names holds an int; pass strings
    >>> rise(-1)
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: rise: steps is below 0
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        plain = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        known = [name for name in (*plain, *(inspect.signature(rest).parameters if rest else ())) if name != "self"]
        any_other = rest is None and any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        kinds = {name: allowed(str(p.annotation)) for name, p in plain.items() if name not in leave}

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            strange = next((name for name in kwargs if name not in known), None)
            if strange is not None and not any_other:
                near = did_you_mean(strange, known) or f"; it takes {', '.join(known)}"
                raise TypeError(f"{who}: got an unexpected keyword argument {strange!r}{near}")
            args, kwargs = tuple(map(original, args)), {name: original(x) for name, x in kwargs.items()}  # type: ignore[assignment]
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{who}: {error}") from None
            for name, value in given.items():
                _check(who, name, value, kinds.get(name))
            try:
                return function(*args, **kwargs)
            except HessiankitError as error:
                error.args = (named(who, str(error)), *error.args[1:])
                raise
            except RuntimeError as error:
                if wanted := re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error)):
                    size = f"{int(wanted[1]) / 2**30:,.1f} GiB"
                    raise OutOfMemoryError(f"{who}: one tensor of {size} does not fit; use smaller sizes") from error
                raise

        return called

    return decorate


def original(x: Any) -> Any:
    """Return the module that torch.compile was called with, for what it returned; anything else as it is."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    while isinstance(x, compiled):
        x = x._orig_mod
    return x


def allowed(annotation: str) -> dict[str, str] | None:
    """Return the kinds of an annotation, with the element kind of lists, or None where one is unknown.

    >>> allowed("str | os.PathLike[str] | None")
    {'str': '', 'Path': '', 'None': ''}
    >>> allowed("Iterable[Part]"), allowed("Iterable[str | nn.Module]"), allowed("Any")
    ({'Iterable': 'Part'}, {'Iterable': ''}, None)
    """
    found = {}
    for part in re.split(r"\s*\|\s*(?![^\[]*\])", annotation):
        name, _, inner = part.partition("[")
        name = name.rpartition(".")[2]
        name = SAME.get(name, name)
        if name not in KINDS and name not in CLASSES:
            return None
        held = "" if "|" in inner else inner.rstrip("]").removesuffix(", ...").rpartition(".")[2]
        found[name] = held if name == "Iterable" and (held in KINDS or held in CLASSES) else ""
    return found


def named(who: str, text: str) -> str:
    """Put a function's name before a message, instead of an inner function's; the name of a class stays.

    >>> named("check", "hessian: no target"), named("Transformer", "FeedForward: no such activation")
    ('check: no target', 'FeedForward: no such activation')
    """
    first, colon, rest = text.partition(": ")
    if who[0].isupper() or first.partition(".")[0] == who:
        return text
    return f"{who}: {rest if colon and re.fullmatch(r'[a-z_]+', first) else text}"


def _check(who: str, name: str, value: Any, kinds: dict[str, str] | None) -> None:
    if kinds is None or any(_fits(value, kind, held) for kind, held in kinds.items()):
        return
    seen = type(value).__name__
    if "Module" in kinds:
        raise InputError(f"{who}: expected a torch.nn.Module, got {seen}; pass the model itself as {name}")
    wanted = [_called(kind, held) for kind, held in kinds.items()]
    an = "an" if seen[0].lower() in "aeio" else "a"
    seen = "None" if value is None else f"{an} {seen}"
    held = kinds.get("Iterable")
    if held and isinstance(value, (list, tuple)):
        strange = next(type(x).__name__ for x in value if not _fits(x, held, ""))
        raise InputError(f"{who}: {name} holds {'an' if strange[0].lower() in 'aeio' else 'a'} {strange}; pass {_plural(held)}")
    raise InputError(f"{who}: {name} is {seen}; pass {' or '.join(dict.fromkeys(wanted))}")


def _fits(value: Any, kind: str, held: str) -> bool:
    if kind in CLASSES:
        return _is_a(value, kind)
    if not KINDS[kind][0](value):
        return False
    return not (held and isinstance(value, (list, tuple))) or all(_fits(x, held, "") for x in value)


def _called(kind: str, held: str) -> str:
    words = KINDS[kind][1] if kind in KINDS else f"a {kind}"
    return f"{words} of {_plural(held)}" if held else words


def _plural(held: str) -> str:
    return {"str": "strings", "int": "integers", "float": "numbers"}.get(held, f"{held}s")


def _is_a(value: Any, *names: str) -> bool:
    return any(c.__name__ in names for c in type(value).__mro__)


def _listed(value: Any) -> bool:
    """Whether a value is an iterable other than text, a mapping, a class, a tensor or a module."""
    other = isinstance(value, (str, bytes, Mapping, type)) or _is_a(value, "Tensor", "Module")
    return isinstance(value, Iterable) and not other
