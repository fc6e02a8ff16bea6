"""Files that runs and figures reuse: written atomically, checked by digest, and set aside with a message where damaged."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, Final

import torch

from hessiankit.support.errors import InputError
from hessiankit.support.files import plain as toolkit_plain
from hessiankit.support.files import write_bytes

DIGEST = 32
"""Bytes of the checksum that a kept file begins with."""
NOTHING: Final = object()
"""What :func:`recall` returns where nothing is kept."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file, and turn what goes wrong with the file into an InputError of one line."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(
            f"experiments: cannot write {path}: {error.strerror or error}; pass another folder with --out"
        ) from error


def put(path: Path, content: bytes | memoryview) -> Path:
    """Write a file in one piece and return its path: where that fails, what was there before still is.

    Raises:
        InputError: The file cannot be written.
    """
    with writing(path):
        write_bytes("experiments", path, content, remedy="pass another folder with --out")
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
            f"experiments: cannot read {path}: {error.strerror or error}; remove it, or pass another folder with --out"
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
    print(f"experiments: {path} is damaged: {why}; it is now {target.name}, and is made anew", file=sys.stderr, flush=True)
    return target


def keep(path: Path, identity: Any, answer: Any) -> None:
    """Write an answer, of what ``torch.load`` reads with ``weights_only``, with what it is the answer to and a checksum.

    Raises:
        InputError: The file cannot be written.
    """
    buffer = io.BytesIO()  # torch's own writing of files hides why a disk refused
    torch.save({"identity": identity, "answer": answer}, buffer)
    content = buffer.getvalue()
    put(path, _digest(content) + content)


def recall(path: Path, identity: Any, *, exclusive: bool = True) -> Any:
    """Return what :func:`keep` wrote, or :data:`NOTHING`; a file that is damaged is set aside.

    Args:
        path: The file.
        identity: What the answer has to be the answer to.
        exclusive: Whether the path is of this identity alone, so that another one in it is damage too.

    Raises:
        InputError: The file cannot be read, or not be set aside.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.pt"
    >>> keep(path, {"n": 3}, [1, 2])
    >>> recall(path, {"n": 3}), recall(path, {"n": 4}, exclusive=False) is NOTHING
    ([1, 2], True)
    """
    stored = read(path)
    if stored is None:
        return NOTHING
    found = _content(stored)
    if found is None:
        set_aside(path, "its content does not fit its checksum")
    elif found["identity"] == identity:
        return found["answer"]
    elif exclusive:
        set_aside(path, "it is of something else")
    return NOTHING


def recall_any(path: Path) -> tuple[Any, Any]:
    """Return what :func:`keep` wrote, whatever it is the answer to: its identity and the answer.

    Raises:
        InputError: The file is missing or damaged.
    """
    found = _content(read(path) or b"")
    if found is None:
        raise InputError(f"{path} is missing or damaged; expected the file that a finished run writes")
    return found["identity"], found["answer"]


def _content(stored: bytes) -> Any:
    """Return what a file holds, None where its checksum does not fit."""
    expected, content = stored[:DIGEST], stored[DIGEST:]
    return torch.load(io.BytesIO(content), weights_only=True) if content and _digest(content) == expected else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def plain(x: Any) -> Any:
    """Return data as JSON holds it: dataclasses and mappings as dicts, tensors and tuples as lists, inf and NaN as None.

    >>> plain({"a": (1, float("inf")), 2: torch.tensor([0.5])})
    {'a': [1, None], '2': [0.5]}
    """
    return toolkit_plain(x, lambda number: None)


def short_digest(data: Any) -> str:
    """Return ten hexadecimal digits that tell data from others.

    >>> short_digest({"a": 1}) == short_digest({"a": 1}) != short_digest({"a": 2})
    True
    """
    return hashlib.sha256(json.dumps(plain(data), sort_keys=True).encode()).hexdigest()[:10]


@contextmanager
def differentiable() -> Iterator[None]:
    """Record gradients, whatever context the caller is in: torch.no_grad or torch.inference_mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield
