"""The benchmark of large models runs in small on a device: every row of ours is measured, and the errors are those of bfloat16."""

from __future__ import annotations

import pytest
from device_cases import DEVICE

from benchmarks import large

OURS = ("`hessian_operator`", "`scaled_dot_product_attention`", "`hessian`")


def test_the_benchmark_of_large_models_runs_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    large.main(["--device", DEVICE, "--small", "--errors", "--eigenvalue", "0.2M"])
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line]
    measured = [row for row in rows if len(row) == 5 and row[0].rpartition(": ")[2] in OURS]
    assert len(measured) == len(OURS)
    for row in measured:
        assert all(float(entry) >= 0 for entry in row[1:])
        assert float(row[2]) > 0
    errors = {row[0]: float(row[1]) for row in rows if len(row) == 2 and "e-" in row[1]}
    assert len(errors) == 3
    assert 1e-4 < errors["`hessian_operator`"] < 2e-2  # one rounding of bfloat16 is 4e-3
    assert errors["`hessian_operator`"] < min(error for name, error in errors.items() if name != "`hessian_operator`")


def test_rows_begin_while_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    large.main(["--device", DEVICE, "--small", "--seconds", "0"])
    assert "no time left" in capsys.readouterr().out
