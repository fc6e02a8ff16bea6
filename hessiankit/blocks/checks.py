"""The errors of the blocks: sizes below one, and names that are not known, with the nearest that are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from hessiankit.errors import InputError

LISTED = 10
"""A name that is not known is answered with the whole list where it is no longer than this, else with the nearest names."""


def check_sizes(who: str, **sizes: int) -> None:
    """Raise an InputError that names the first size below one."""
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{who}: {name}={size}, expected at least 1")


def unknown(who: str, option: str, value: object, known: Iterable[str], everything: str = "") -> InputError:
    """Return the error for a name that is not known: the nearest names first, then where the others are.

    Args:
        who: The function or class that was asked.
        option: The argument's name.
        value: What was passed.
        known: The names that would have been accepted.
        everything: Where the names are listed, for a list that is too long for one line.

    >>> print(unknown("TransformerBlock", "norm", "rmsnrm", ["layernorm", "rmsnorm"]))
    TransformerBlock: norm='rmsnrm' is not known; did you mean 'rmsnorm'? Choose one of layernorm, rmsnorm
    """
    names = list(known)
    near = get_close_matches(str(value).lower(), names, n=4, cutoff=0.5)
    listed = f"choose one of {', '.join(names)}"
    if everything and len(names) > LISTED:
        listed = f"all {len(names)} names are in {everything}"
    if near:
        listed = f"did you mean {' or '.join(map(repr, near))}? {listed[0].upper()}{listed[1:]}"
    return InputError(f"{who}: {option}={value!r} is not known; {listed}")
