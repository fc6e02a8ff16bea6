"""Files as commands write them: whole or not at all, to standard output where the path is ``-``."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO

from hessiankit.support.errors import InputError

STDOUT = Path("-")
_outputs: list[TextIO] = []
"""Standard outputs reserved for a file named ``-``, the innermost last."""


def check_writable(caller: str, path: Path | None) -> None:
    """Raise an InputError, before any computation, if a file cannot be written."""
    if path is None or path == STDOUT:
        return
    folder = path.parent
    where = "name a file in an existing folder"
    if not folder.is_dir():
        raise InputError(f"{caller}: cannot write {path}: there is no folder {folder}; {where}")
    if path.is_dir():
        raise InputError(f"{caller}: cannot write {path}: it is a folder; name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{caller}: cannot write {path}: permission denied; {where} that can be written to")


def write_text(caller: str, path: Path | None, text: str | Callable[[], str]) -> None:
    """Write a file as a whole: on failure the old content is kept. ``-`` is standard output, None writes nothing."""
    if path is None:
        return
    content = text if isinstance(text, str) else text()
    if path == STDOUT:
        print(content, end="", flush=True, file=_outputs[-1] if _outputs else sys.stdout)
        return
    write_bytes(caller, path, content.encode())


def write_bytes(
    caller: str, path: Path, content: bytes | memoryview, *, remedy: str = "name a file in an existing folder."
) -> None:
    """Write a file as a whole, so that readers see the old or the new content; ``-`` is a file of that name, too."""
    target = path.resolve()
    partial = target.with_name(f"{target.name}.new")
    try:
        if target.exists() and not target.is_file():  # a device
            target.write_bytes(content)
            return
        try:
            partial.write_bytes(content)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"{caller}: cannot write {path}: {error.strerror or error}; {remedy}") from error


def fill(page: str, sections: Mapping[str, str]) -> str:
    """Return a page with each text between the comments of its name; texts without comments are appended.

    >>> print(fill("a\\n<!-- b -->old<!-- /b -->", {"b": "new"}))
    a
    <!-- b -->
    new
    <!-- /b -->
    """
    for name, text in sections.items():
        section = f"<!-- {name} -->\n{text}\n<!-- /{name} -->"
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- /{name} -->", re.DOTALL)
        present = pattern.search(page) is not None
        page = pattern.sub(lambda _, new=section: new, page) if present else f"{page.rstrip()}\n\n{section}\n".lstrip()  # type: ignore[misc]
    return page


def make_folder(caller: str, folder: Path) -> None:
    """Make a folder and its parents where they are missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{caller}: cannot make the folder {folder}: {error.strerror}; name another one") from error


def write_json(caller: str, path: Path | None, data: Any) -> None:
    """Write data as standard JSON, see :func:`plain`; as :func:`write_text`."""
    write_text(caller, path, lambda: json.dumps(plain(data), indent=1, allow_nan=False) + "\n")


def plain(data: Any, infinite: Callable[[float], Any] = str) -> Any:
    """Return data in JSON's types: arrays become lists, dataclasses dicts, numbers that are not finite what ``infinite`` makes.

    By default these become strings, which ``float`` reads.

    >>> plain({3: (1.0, float("inf")), "at": Path("a")})
    {'3': [1.0, 'inf'], 'at': 'a'}
    """
    if isinstance(data, Mapping):
        return {str(key): plain(value, infinite) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [plain(value, infinite) for value in data]
    if hasattr(data, "to_dict"):
        return plain(data.to_dict(), infinite)
    if is_dataclass(data):
        return {field.name: plain(getattr(data, field.name), infinite) for field in fields(data)}
    if hasattr(data, "tolist"):  # a tensor, an array or their scalars
        return plain(data.tolist(), infinite)
    if isinstance(data, Path):
        return str(data)
    return infinite(data) if isinstance(data, float) and not math.isfinite(data) else data


class WithDict:
    """A dataclass that is plain data by :meth:`to_dict`: its fields without the ``_hidden``, and the properties ``_derived``."""

    _derived: ClassVar[tuple[str, ...]] = ()
    _hidden: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data, for JSON; undefined numbers are NaN."""
        names = [field.name for field in fields(self) if field.name not in self._hidden]  # type: ignore[arg-type]
        return {name: plain(getattr(self, name), float) for name in (*self._derived, *names)}


@contextmanager
def output_for(paths: Iterable[object]) -> Iterator[None]:
    """Reserve standard output for a path that is ``-``: other prints go to standard error."""
    if STDOUT not in paths:
        yield
        return
    _outputs.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _outputs.pop()
