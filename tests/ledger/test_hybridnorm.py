"""The rows of HybridNorm."""

from __future__ import annotations

import pytest
from ledger_cases import assert_reproduced, every_row


@pytest.mark.slow
@every_row("hybridnorm")
def test_row(row):
    assert_reproduced(row)
