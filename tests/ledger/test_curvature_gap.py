"""The rows of Closing the Curvature Gap."""

from __future__ import annotations

from ledger_cases import assert_reproduced, every_row


@every_row("curvature-gap")
def test_row(row):
    assert_reproduced(row)
