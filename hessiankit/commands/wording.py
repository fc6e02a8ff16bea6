"""Errors of the library in the words of the command line: an option stands where the library names an argument."""

from __future__ import annotations

import re
from collections.abc import Sequence


def in_options(message: str, names: Sequence[str]) -> str:
    """Return an error's message with ``--name`` for ``name=...`` of Python.

    A value of which nothing but its place is meant, ``...``, ``[...]`` or ``True``, goes; another one stays.

    Args:
        message: What the library says.
        names: The arguments that are options of the command, by the same name.

    >>> in_options("Pass another out=..., or overwrite=True", ["out", "overwrite"])
    'Pass another --out, or --overwrite'
    >>> in_options("Pass loss=None, or fewer params=[...]", ["params"])
    'Pass loss=None, or fewer --params'
    >>> in_options("out='a/H.npy' is a folder", ["out"])
    "--out 'a/H.npy' is a folder"
    """
    if not names:
        return message
    argument = re.compile(rf"\b({'|'.join(map(re.escape, names))})=(\[\.\.\.\]|\.\.\.|True\b)?")
    return argument.sub(lambda found: f"--{found[1].replace('_', '-')}" + ("" if found[2] else " "), message)
