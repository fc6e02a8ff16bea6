"""Every row of the ledger: its verdict is found again, from two seeds."""

from __future__ import annotations

import pytest

from hessiankit.ledger import claims
from hessiankit.ledger.ledger_report import run_row


@pytest.mark.slow
@pytest.mark.parametrize("row", claims(), ids=lambda row: row.id)
def test_row(row):
    for seed in (0, 5):
        ran = run_row(row, seed)
        assert ran.reproduced, f"seed {seed}: {ran}"
        assert ran.evidence.seed == seed
