"""Finished cells on disk, one JSON object a line, so that an interrupted run loses at most one cell."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.plan import Cell


class Store:
    """The finished cells of one benchmark.

    Args:
        path: The JSON lines file; it is made when the first cell is finished.
        settings: What a result depends on beside the cell: repeats, limits, versions, the processor, the code measured.
            A cell that was measured with other settings is kept in the file and measured again.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.records: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                    self.records[record["key"]] = record
                except (ValueError, KeyError, TypeError):
                    continue  # the line that was being written when the machine stopped

    def key(self, cell: Cell) -> str:
        """Return what identifies a cell measured with these settings."""
        text = json.dumps({"cell": cell, "settings": self.settings}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """Return the finished record of a cell, if there is one."""
        return self.records.get(self.key(cell))

    def add(self, cell: Cell, result: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
        """Append a finished cell and return its record."""
        key = self.key(cell)
        record: dict[str, Any] = {"key": key, "cell": cell, "settings": self.settings}
        record |= {"environment": environment, "result": result}
        line = json.dumps(record, allow_nan=False)
        torn = self.path.exists() and self.path.stat().st_size > 0 and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if torn else "") + line + "\n")
        self.records[key] = record
        return record
