"""The rows of The Curse of Depth."""

from __future__ import annotations

import pytest
from ledger_cases import assert_reproduced, every_row


@pytest.mark.slow
@every_row("curse-of-depth")
def test_row(row):
    assert_reproduced(row)
