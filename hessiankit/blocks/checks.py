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
    asked = f"{who}: {option}={value!r} is not known; "
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if len(names) <= LISTED or not everything:
        listed = f"hoose one of {', '.join(names)}"
        return InputError(asked + meant + ("C" if meant else "c") + listed)
    return InputError(f"{asked}{meant}{'A' if meant else 'a'}ll {len(names)} names are in {everything}")
