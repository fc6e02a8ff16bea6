"""Every row of the ledger: its verdict is found again, from two seeds, and its printed side is the one once read from the paper.

A wrong formula stays wrong under almost any slip of transcription, so that its verdict does not protect it: printed.json keeps a
digest of the printed side at seed 0. After a formula has been read against the paper anew, ``python tests/ledger/test_rows.py``
writes the file again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hessiankit.ledger import claims
from hessiankit.ledger.ledger_report import run_row

DIGESTS = Path(__file__).with_name("printed.json")


def digest(evidence) -> list[float]:
    """Return a weighted sum of all finite printed numbers, and the sum of their absolute values."""
    values = next(value for name, value in evidence.arrays.items() if name.startswith("printed"))
    parts = values if isinstance(values, list | tuple) else [values]
    flat = torch.cat([torch.as_tensor(part, dtype=torch.float64).detach().reshape(-1) for part in parts])
    flat = torch.where(flat.isfinite(), flat, torch.zeros_like(flat))
    weights = torch.arange(1, flat.numel() + 1, dtype=torch.float64).sqrt().cos() + 1.5
    return [float(flat @ weights), float(flat.abs().sum())]


@pytest.mark.slow
@pytest.mark.parametrize("row", claims(), ids=lambda row: row.id)
def test_row(row):
    for seed in (0, 5):
        ran = run_row(row, seed)
        assert ran.reproduced, f"seed {seed}: {ran}"
        assert ran.evidence.seed == seed
        if row.verdict == "WRONG AS PRINTED" and seed == 0:
            expected, scale = json.loads(DIGESTS.read_text())[row.id]
            assert abs(digest(ran.evidence)[0] - expected) <= 1e-7 * scale, (
                "the printed side has changed: read it against the paper"
            )


if __name__ == "__main__":
    found = {row.id: digest(run_row(row, 0).evidence) for row in claims(verdict="WRONG AS PRINTED")}
    lines = [f"{json.dumps(id)}: {json.dumps(values)}" for id, values in found.items()]
    DIGESTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
