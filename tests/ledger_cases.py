"""The test that every paper's rows share: each verdict is found again, from two seeds."""

from __future__ import annotations

import pytest

from hessiankit.ledger import claims
from hessiankit.ledger.ledger_report import run_row

SEEDS = (0, 5)


def every_row(paper: str):
    """Parametrise a test over the rows of a paper, named by their ids."""
    return pytest.mark.parametrize("row", claims(paper=paper), ids=lambda row: row.id)


def assert_reproduced(row) -> None:
    for seed in SEEDS:
        ran = run_row(row, seed)
        assert ran.reproduced, f"seed {seed}: {ran}"
        assert ran.evidence.seed == seed
