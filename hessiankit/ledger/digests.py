"""What was once read from the papers: a digest of the printed side of each row at seed 0.

A wrong formula stays wrong under almost any slip of transcription, and a bound that holds stays true with a larger constant: the
verdict does not protect them. After a formula has been read against the paper anew, ``python tests/ledger/test_rows.py`` writes
them again.

>>> digest({"printed": [1.0, 2.0], "reference": 3.0})[1]
3.0
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
    """Return a weighted sum of all finite numbers of the printed side, and the sum of their absolute values; [] without any."""
    values = [part for name, value in arrays.items() if name.startswith(KEPT) for part in _parts(value)]
    if not values:
        return []
    flat = torch.cat([torch.as_tensor(part, dtype=torch.float64).detach().reshape(-1) for part in values])
    flat = torch.where(flat.isfinite(), flat, torch.zeros_like(flat))
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).sqrt().cos() + 1.5
    return [float(flat @ weights), float(flat.abs().sum())]


def unchanged(id: str, arrays: Mapping[str, Any]) -> bool:
    """Whether the printed side of a row at seed 0 is what it was."""
    kept, found = digests().get(id, []), digest(arrays)
    return len(kept) == len(found) and all(abs(a - b) <= 1e-7 * kept[1] for a, b in zip(kept, found, strict=True))


def _parts(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
