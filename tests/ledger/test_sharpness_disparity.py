"""The rows of The Sharpness Disparity Principle."""

from __future__ import annotations

from ledger_cases import assert_reproduced, every_row


@every_row("sharpness-disparity")
def test_row(row):
    assert_reproduced(row)
