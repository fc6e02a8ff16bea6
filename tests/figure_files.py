"""What tests of pictures share: rows of a written file."""

from __future__ import annotations

import csv
from pathlib import Path


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
