"""Finished cells on disk, one JSON object a line, so that an interrupted run loses at most one cell."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.plan import Cell
from hessiankit.support.jsonl import append_records, read_records


def finished(path: Path) -> list[dict[str, Any]]:
    """Return the records in a file, measured with whatever settings, in the order in which they were added."""
    return list(read_records(path, lambda record: {"key": record["key"], **record}))


class Store:
    """The finished cells of one benchmark.

    Args:
        path: The JSON lines file; it is made when the first cell is finished.
        settings: What a result depends on beside the cell: repeats, limits, versions, the processor, the code measured.
            A cell that was measured with other settings is kept in the file and measured again.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.records = {record["key"]: record for record in finished(path)}

    def key(self, cell: Cell) -> str:
        """Return what identifies a cell measured with these settings."""
        text = json.dumps({"cell": cell, "settings": self.settings}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def find(self, cell: Cell, budget: float = math.inf) -> dict[str, Any] | None:
        """Return the finished record of a cell, if there is one: not one that was stopped within less than ``budget`` seconds."""
        record = self.records.get(self.key(cell))
        return None if record is not None and record["result"].get("stopped_seconds", math.inf) < budget else record

    def add(self, cell: Cell, result: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
        """Append a finished cell and return its record."""
        key = self.key(cell)
        record: dict[str, Any] = {"key": key, "cell": cell, "settings": self.settings}
        record |= {"environment": environment, "result": result}
        json.dumps(record, allow_nan=False)  # raises for a NaN before the file is touched
        append_records(self.path, record)
        self.records[key] = record
        return record
