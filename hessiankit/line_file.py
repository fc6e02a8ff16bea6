"""A file of finished work, one line a piece, to which an interrupted run goes on adding."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class LineFile:
    """A text file that grows by whole lines; a context, whose end closes it.

    A line that was cut off by an interrupt is ended, so that the next one stands alone; one that the disk has no room for goes
    again as a whole. Nothing waits in a buffer.

    Args:
        path: The file, made where it is missing, with its folder.

    Raises:
        OSError: If the file cannot be opened or written.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines"
    >>> _ = path.write_text("torn")
    >>> with LineFile(path) as file:
    ...     file.write("whole")
    >>> path.read_text().split()
    ['torn', 'whole']
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        size = self._file.seek(0, os.SEEK_END)
        self._torn = False
        if size:
            self._file.seek(size - 1)
            self._torn = self._file.read(1) != b"\n"

    def write(self, line: str) -> None:
        """Append a line, all of it or nothing."""
        content = memoryview(("\n" if self._torn else "").encode() + line.encode() + b"\n")
        size = self._file.seek(0, os.SEEK_END)
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError:
            self._file.truncate(size)
            raise
        self._torn = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
