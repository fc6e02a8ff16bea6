"""Files as commands write them: whole or not at all, to standard output where the path is ``-``."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

from hessiankit.support.errors import InputError

STDOUT = Path("-")
_outputs: list[TextIO] = []
"""The standard output of a command that keeps it for a file."""


def check_writable(who: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Raises:
        InputError: If its folder is missing or read-only, or it is a folder itself.
    """
    if path is None or path == STDOUT:
        return
    folder = path.parent
    if not folder.is_dir():
        raise InputError(f"{who}: cannot write {path}: there is no folder {folder}; name a file in an existing folder")
    if path.is_dir():
        raise InputError(f"{who}: cannot write {path}: it is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{who}: cannot write {path}: permission denied; name a file in a folder that can be written to")


def write_text(who: str, path: Path | None, text: str | Callable[[], str]) -> None:
    """Write a file as a whole: where that fails, what was there before still is.

    Args:
        who: The command, for the error.
        path: Where to; ``-`` is standard output, None is the file that nobody asked for.
        text: What, or what makes it.

    Raises:
        InputError: If the file cannot be written.
    """
    if path is None:
        return
    content = text if isinstance(text, str) else text()
    if path == STDOUT:
        print(content, end="", flush=True, file=_outputs[-1] if _outputs else sys.stdout)
        return
    write_bytes(who, path, content.encode())


def write_bytes(who: str, path: Path, content: bytes | memoryview, *, remedy: str = "name a file in an existing folder.") -> None:
    """Write a file as a whole; as :func:`write_text`, except that ``-`` is a file of that name."""
    try:
        _replace(path.resolve(), content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{who}: cannot write {path}: {reason}; {remedy}") from error


def make_folder(who: str, folder: Path) -> None:
    """Make a folder, and those above it, where they are missing.

    Raises:
        InputError: If that cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{who}: cannot make the folder {folder}: {error.strerror}; name another one") from error


def write_json(who: str, path: Path | None, data: Any) -> None:
    """Write data as JSON that every reader takes; as :func:`write_text`."""
    write_text(who, path, lambda: json.dumps(plain(data), indent=1, allow_nan=False) + "\n")


def plain(data: Any) -> Any:
    """Return data as JSON knows it: numbers that are not finite become strings, which ``float`` reads; arrays become lists.

    >>> plain({3: (1.0, float("inf")), "at": Path("a")})
    {'3': [1.0, 'inf'], 'at': 'a'}
    """
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [plain(value) for value in data]
    if hasattr(data, "tolist"):  # a tensor, an array or a number of theirs
        return plain(data.tolist())
    if isinstance(data, Path):
        return str(data)
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


@contextmanager
def output_for(paths: Iterable[object]) -> Iterator[None]:
    """Where one of the paths is ``-``, keep standard output for it: what else is printed goes to standard error."""
    if STDOUT not in paths:
        yield
        return
    _outputs.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _outputs.pop()


def _replace(path: Path, content: bytes | memoryview) -> None:
    """Put a file in its place as a whole; a device is written to."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    partial = path.with_name(f"{path.name}.new")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
