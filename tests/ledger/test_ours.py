"""The rows that no paper makes."""

from __future__ import annotations

import pytest
from ledger_cases import assert_reproduced, every_row


@pytest.mark.slow
@every_row("ours")
def test_row(row):
    assert_reproduced(row)
