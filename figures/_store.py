"""Files that figures reuse: written atomically, checked by digest when read, and set aside with a message where damaged."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

from hessiankit.support.errors import InputError
from hessiankit.support.files import write_bytes

NOTHING: Final = object()
"""What :func:`recall` returns where nothing is kept."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file, and turn what goes wrong with the file into an InputError of one line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"figures: cannot write {path}: {error.strerror or error}; pass another folder with --out") from error


def put(path: Path, content: bytes | memoryview) -> Path:
    """Write a file in one piece and return its path: where that fails, what was there before still is.

    Raises:
        InputError: The file cannot be written.
    """
    with writing(path):
        write_bytes("figures", path, content, remedy="pass another folder with --out")
    return path


def read(path: Path) -> bytes | None:
    """Return a file's content, None where there is no file.

    Raises:
        InputError: It is there and cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(
            f"figures: cannot read {path}: {error.strerror or error}; remove it, or pass another folder with --out"
        ) from error


def set_aside(path: Path, why: str) -> Path:
    """Rename a damaged file or folder, so that nothing is lost, say so on standard error, and return its new path.

    Raises:
        InputError: It cannot be renamed.
    """
    names = chain([f"{path.name}.damaged"], (f"{path.name}.damaged-{k}" for k in count(2)))
    target = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    with writing(path):
        os.replace(path, target)
    print(f"figures: {path} is damaged: {why}; it is now {target.name}, and is made anew", file=sys.stderr, flush=True)
    return target


def keep(path: Path, identity: Any, answer: Any) -> None:
    """Write an answer with what it is the answer to and a checksum; both as JSON holds them.

    Raises:
        InputError: The file cannot be written.
    """
    content = {"identity": identity, "answer": answer, "sha256": checksum(_canonical(answer))}
    put(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def recall(path: Path, identity: Any, *, exclusive: bool = True) -> Any:
    """Return what :func:`keep` wrote, or :data:`NOTHING`; a file that is damaged is set aside.

    Args:
        path: The file.
        identity: What the answer has to be the answer to.
        exclusive: Whether the path is of this identity alone, so that another one in it is damage too.

    Raises:
        InputError: The file cannot be read, or not be set aside.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.json"
    >>> keep(path, {"n": 3}, [1, 2])
    >>> recall(path, {"n": 3}), recall(path, {"n": 4}, exclusive=False) is NOTHING
    ([1, 2], True)
    """
    content = read(path)
    if content is None:
        return NOTHING
    try:
        found = json.loads(content)
        seen, answer, expected = found["identity"], found["answer"], found["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        set_aside(path, f"it cannot be read ({type(error).__name__}: {error})")
        return NOTHING
    if checksum(_canonical(answer)) != expected:
        set_aside(path, "its content does not fit its checksum")
    elif seen == identity:
        return answer
    elif exclusive:
        set_aside(path, "it is of something else")
    return NOTHING


def checksum(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def _canonical(answer: Any) -> bytes:
    return json.dumps(answer, sort_keys=True).encode()
