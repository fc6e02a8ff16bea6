"""Intermediate results in a file, from which an interrupted computation resumes."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import torch

from hessiankit.support.errors import InputError
from hessiankit.support.files import check_writable, write_bytes

WHO = "influence"
PAUSE = 5.0
"""Seconds between two writes: a file of 100 MB takes a tenth of one."""


class Work:
    """Results so far, by name, and their file.

    Args:
        path: The file; None: nothing is kept.
        ask: Digest of the request, which tells the file from those of other requests.
    """

    def __init__(self, path: Path | None, ask: str) -> None:
        check_writable(WHO, path)
        self.path, self.ask, self.state, self._time = path, ask, dict[str, Any](), time.perf_counter()
        if path is not None and path.exists():
            kept = torch.load(path, weights_only=True)
            if kept.pop("ask") != ask:
                raise InputError(f"{WHO}: {path} belongs to another model, data or method; name another file, or remove it")
            self.state = kept

    def keep(self, **entries: Any) -> None:
        """Update the results, and write the file unless it was written a moment ago."""
        self.state.update(entries)
        if time.perf_counter() - self._time > PAUSE:
            self.write()

    def write(self) -> None:
        """Write the file."""
        if self.path is not None:
            buffer = io.BytesIO()
            torch.save({**self.state, "ask": self.ask}, buffer)
            write_bytes(WHO, self.path, buffer.getbuffer())
        self._time = time.perf_counter()
