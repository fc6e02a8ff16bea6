"""The line of the user's own code at which an exception arose: the innermost frame outside torch and this package."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from hessiankit.support.errors import InputError

_OURS = tuple(os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


def source_line(error: BaseException) -> str:
    """Return ``file:line in function: source text``, or "" where no frame is the user's.

    Exceptions that led to this one are searched too, the last one first.
    """
    ids: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in ids:
        ids.add(id(current))
        for frame in reversed(traceback.extract_tb(current.__traceback__)):
            if not _is_internal(frame.filename):
                text = f": {frame.line}" if frame.line else ""
                return f"{frame.filename}:{frame.lineno} in {frame.name}{text}"
        current = current.__cause__ or current.__context__
    return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message without the period at its end, or its type where it has none.

    >>> first_line(ValueError("one.\\ntwo")), first_line(KeyError())
    ('one', 'KeyError')
    """
    return next(iter(str(error).splitlines()), "").removesuffix(".") or type(error).__name__


def at_line(error: BaseException, form: str = " (at {})") -> str:
    """Return :func:`source_line` in a form, or "" where no frame is the user's."""
    line = source_line(error)
    return form.format(line) if line else ""


def returned(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of the user's returns.

    Raises:
        InputError: It raises an error: ``what`` raised which, and where.
    """
    try:
        return function(*arguments)
    except Exception as error:
        raise InputError(f"{what} raised {type(error).__name__}: {first_line(error)}{at_line(error)}") from error


def _is_internal(filename: str) -> bool:
    return filename.startswith(_OURS) or filename.startswith(("<eval_with_key>", "<string>", "<frozen"))
