"""Every row of the ledger: its verdict is found again, from one seed, and with ``-m exhaustive`` from another, and its printed side is the one once read from the paper.

``python tests/papers/test_rows.py`` keeps the printed sides, after a formula has been read against the paper anew.
"""

from __future__ import annotations

import json

import pytest

from papers import claims
from papers.digests import FILE, digest, digests, unchanged
from papers.ledger_report import run_row


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(5, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("row", claims(), ids=lambda row: row.id)
def test_row(row, seed):
    ran = run_row(row, seed)
    assert ran.reproduced, str(ran)
    assert ran.evidence.seed == seed


def test_a_changed_print_is_seen():
    row = claims(id="hybridnorm/lemma-a2-proof-sqrt-q")[0]
    arrays = row.compute(0).arrays
    assert unchanged(row.id, arrays)
    assert not unchanged(row.id, {**arrays, "printed": 1.000001 * arrays["printed"]})
    assert not unchanged(row.id, {})
    wrong = {row.id for row in claims(verdict="WRONG AS PRINTED")}
    assert wrong <= set(digests()) <= {row.id for row in claims()}


if __name__ == "__main__":
    found = {row.id: digest(row.compute(0).arrays) for row in claims()}
    lines = [f"{json.dumps(id)}: {json.dumps(values)}" for id, values in found.items() if values]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
