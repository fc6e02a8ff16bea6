"""Exceptions of hessiankit, and messages for unknown names and invalid sizes.

A message names the request, the value seen, the value expected, and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

LIST_LENGTH = 10  # names that an error lists; of more it gives the nearest ones alone
LIKENESS, BEGINS, SHARE_OF_BEST = (
    0.5,
    0.4,
    0.8,
)  # least likeness; what counts that one begins with the other; share of the best to be named


class HessiankitError(Exception):
    """Base class of every error that hessiankit raises on purpose."""


class InputError(HessiankitError, ValueError):
    """An argument cannot be used as it is: wrong shape, dtype, device, value or name."""


class TraceError(HessiankitError, RuntimeError):
    """The module could not be turned into a list of primitive operations."""


class OutOfMemoryError(HessiankitError, MemoryError):
    """The result, or its workspace, does not fit; raised before anything is computed where that is known beforehand."""


class ConvergenceError(HessiankitError, ArithmeticError):
    """An iteration ran out of steps; ``found`` is its last result, with an estimate of the error."""

    def __init__(self, message: str, found: object = None) -> None:
        super().__init__(message)
        self.found = found


def check_sizes(caller: str, **sizes: int) -> None:
    """Raise an InputError that names the first size below one."""
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{caller}: {name}={size}, expected at least 1")


def check_heads(
    caller: str, d_model: int, n_heads: int, n_kv_heads: int | None, rotary: bool, d_k: int | None = None, d_v: int | None = None
) -> None:
    """Raise an InputError for heads that do not fit the width; ``d_k`` and ``d_v`` are widths of a head, where they are given."""
    if d_model % n_heads and (d_k is None or d_v is None):
        raise InputError(f"{caller}: d_model={d_model} does not split into n_heads={n_heads} equal heads")
    if n_kv_heads is not None and n_heads % n_kv_heads:
        why = "every key head serves equally many query heads"
        raise InputError(f"{caller}: n_kv_heads={n_kv_heads} does not divide n_heads={n_heads}; {why}")
    width = d_model // n_heads if d_k is None else d_k
    if rotary and width % 2:
        raise InputError(f"{caller}: rotary positions turn pairs of features, and d_k={width} is odd; pass an even d_k")


def nearest(name: str, choices: Iterable[str]) -> list[str]:
    """Return up to three known names that are like this one, the nearest first.

    Case, hyphens and underscores do not count, nor what is before a slash in a known name, where it is left out here.

    >>> nearest("prenorm", ["post", "deepnorm", "pre"]), nearest("Hybrid_Norm", ["hybridnorm*", "hybridnorm"])
    (['pre'], ['hybridnorm', 'hybridnorm*'])
    >>> nearest("thm3", ["linear", "curvature-gap/thm3"])
    ['curvature-gap/thm3']
    """

    likeness = {}
    for choice in choices:
        a, b = (re.sub(r"[-_]", "", text.lower()) for text in (name, choice if "/" in name else choice.rpartition("/")[2]))
        begins = bool(a and b) and (a.startswith(b) or b.startswith(a))
        likeness[choice] = SequenceMatcher(None, a, b).ratio() + BEGINS * begins
    threshold = max(LIKENESS, SHARE_OF_BEST * max(likeness.values(), default=0.0))
    return sorted((choice for choice in likeness if likeness[choice] >= threshold), key=lambda choice: -likeness[choice])[:3]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x' or 'y'?"``, or nothing where no known name is like this one."""
    names = nearest(name, choices)
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def not_known(name: str, choices: Iterable[str], everything: str = "") -> str:
    """Return the words for a name that is not known: the nearest names, then all, or ``everything``, where they are listed.

    >>> not_known("rmsnrm", ["layernorm", "rmsnorm"])
    "is not known; did you mean 'rmsnorm'? Choose one of layernorm, rmsnorm"
    """
    names = list(choices)
    advice = f"choose one of {', '.join(names)}"
    if everything and len(names) > LIST_LENGTH:
        advice = f"all {len(names)} names: {everything}"
    hint = did_you_mean(name, names)
    return f"is not known{hint} {advice[0].upper()}{advice[1:]}" if hint else f"is not known; {advice}"


def unknown(caller: str, option: str, value: object, choices: Iterable[str], everything: str = "") -> InputError:
    """Return the error for a name that is not known, as :func:`not_known` words it."""
    return InputError(f"{caller}: {option}={value!r} {not_known(str(value), choices, everything)}")


def check_name(caller: str, option: str, value: object, choices: Iterable[str]) -> None:
    """Raise the error of :func:`unknown` unless the value is one of the known names."""
    names = tuple(choices)
    if value not in names:
        raise unknown(caller, option, value, names)


def named(caller: str, text: str) -> str:
    """Put a function's name before a message, in place of an inner function's; a class's name is kept.

    >>> named("check", "hessian: no target"), named("Transformer", "FeedForward: no such activation")
    ('check: no target', 'FeedForward: no such activation')
    """
    first, colon, rest = text.partition(": ")
    if (caller[0].isupper() and first != "request") or first.partition(".")[0] == caller:
        return text
    return f"{caller}: {rest if colon and re.fullmatch(r'[a-z_]+', first) else text}"


def check_count(name: str, size: int | None, what: str) -> None:
    """Raise InputError for a number of things to treat at once that is less than 1; None leaves it to the function.

    >>> check_count("batch_size", 0, "sample")
    Traceback (most recent call last):
    hessiankit.support.errors.InputError: request: batch_size=0 leaves no sample to treat; pass 1 or more, or None
    """
    if size is not None and size < 1:
        raise InputError(f"request: {name}={size} leaves no {what} to treat; pass 1 or more, or None")
