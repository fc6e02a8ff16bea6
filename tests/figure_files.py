"""Helpers of tests of pictures: rows of a written file, and whether the pages have their pictures."""

from __future__ import annotations

import csv
from pathlib import Path

WITHOUT_PICTURES = (Path(__file__).parents[1] / "PKG-INFO").exists()  # in an unpacked sdist, which leaves them out


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
