"""Text files that a command was asked to write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hessiankit.errors import InputError


def write_text(who: str, path: Path | None, text: str | Callable[[], str]) -> None:
    """Write a file; a path of None is the file that nobody asked for.

    Args:
        who: The command, for the error.
        path: Where to.
        text: What, or what makes it.

    Raises:
        InputError: If the file cannot be written.
    """
    if path is None:
        return
    try:
        path.write_text(text if isinstance(text, str) else text(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{who}: cannot write {path}: {error.strerror}; name a file in an existing folder.") from error


def write_json(who: str, path: Path | None, data: Any) -> None:
    """Write data as JSON; as :func:`write_text`."""
    write_text(who, path, lambda: json.dumps(data, indent=1) + "\n")
