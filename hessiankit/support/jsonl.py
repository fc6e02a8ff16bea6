"""JSON Lines: one line for each finished piece of work, in a file that a later run can append to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hessiankit.support.errors import InputError

T = TypeVar("T")


def read_records(path: Path, decode: Callable[[Any], T]) -> Iterator[T]:
    """Yield ``decode(record)`` for every line of a JSON Lines file; nothing where there is no file.

    A line that is not JSON (an interrupt cut it off), or that ``decode`` refuses, is skipped.

    Raises:
        OSError, UnicodeDecodeError: The file cannot be read; see :func:`usable`.
    """
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = decode(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        yield record


def append_records(path: Path, *records: Mapping[str, Any]) -> None:
    """Append records, one line each: all of them, or none where the disk has no room.

    A line that an interrupt cut off before is ended first. Without records, the file is made where it is missing.

    Raises:
        OSError: The file cannot be opened or written; see :func:`usable`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "runs.jsonl"
    >>> _ = path.write_text('{"seed": 1}\\n{"see')
    >>> append_records(path, {"seed": 2})
    >>> list(read_records(path, lambda record: record["seed"]))
    [1, 2]
    """
    append_lines(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def append_lines(path: Path, content: bytes) -> None:
    """Append encoded lines, as :func:`append_records`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size and content:
            file.seek(size - 1)
            content = (b"" if file.read(1) == b"\n" else b"\n") + content
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            if content:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


@contextmanager
def usable(caller: str, path: Path) -> Iterator[None]:
    """Turn the errors of reading or writing a file into an InputError that says what to do."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{caller}: {path} cannot be used: {why}; pass another folder with --out") from error
