"""What was once read from the papers: a digest of the printed side of each row at seed 0.

A wrong formula stays wrong under almost any slip of transcription, and a bound that holds stays true with a larger constant: the
verdict does not protect them. After a formula has been read against the paper anew, ``python tests/papers/test_rows.py`` writes
them again.

>>> digest({"printed": [1.0, 2.0], "reference": 3.0})[1::2]
[1.0, 2.0]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).with_name("digests.json")
KEPT = ("printed", "corrected right", "ratios", "without", "reading")
"""How the names of the arrays begin that are kept."""


@cache
def digests() -> dict[str, list[float]]:
    """Return the digests by id."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def digest(arrays: Mapping[str, Any]) -> list[float]:
    """Return for each array of the printed side a weighted sum of its finite entries, and the sum of their absolute values."""
    found: list[float] = []
    for part in (part for name, value in arrays.items() if name.startswith(KEPT) for part in _parts(value)):
        flat = torch.as_tensor(part, dtype=torch.float64).detach().reshape(-1)
        flat = torch.where(flat.isfinite(), flat, torch.zeros_like(flat))
        weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).sqrt().cos() + 1.5
        found += [float(f"{float(x):.10g}") for x in (flat @ weights, flat.abs().sum())]
    return found


def unchanged(id: str, arrays: Mapping[str, Any]) -> bool:
    """Whether the printed side of a row at seed 0 is what it was: each array to 1e-7, but for rounding beside the largest."""
    kept, found = digests().get(id, []), digest(arrays)
    least = 1e-12 * max(kept[1::2], default=0.0)
    return len(kept) == len(found) and all(abs(kept[k] - found[k]) <= 1e-7 * kept[k + 1] + least for k in range(0, len(kept), 2))


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) and len(value) <= 64 else [value]
