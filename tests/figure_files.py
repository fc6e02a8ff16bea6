"""What the tests of figures share: rows of a written file, a small language model's run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from figures._runs import ByteRun, ByteSpec

SMALL = ByteSpec(
    "small", layers=1, d_model=8, heads=2, length=8, batch_size=2, steps=12, every=5, windows=4, evaluations=3, lr=0.01, kept=(5,)
)  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def measured(run: ByteRun) -> list[dict[str, Any]]:
    """Return what the monitor of a run measured, without the times."""
    assert run.log is not None
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.log.records]
