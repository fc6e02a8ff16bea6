"""assert_hessian_matches and the pytest plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hessiankit.verify.testing import COMPARED, assert_hessian_matches

SUITE = """
from torch import nn
from hessiankit.verify.testing import assert_hessian_matches


def test_mine():
    assert_hessian_matches(nn.Sequential(nn.Linear(2, 3), nn.GELU()).double(), *DATA)


def test_strict():
    assert_hessian_matches(nn.Sequential(nn.Linear(2, 3), nn.GELU()).double(), *DATA, rtol=1e-30)
"""


def test_it_returns_the_report_and_records_it():
    torch.manual_seed(0)
    before = len(COMPARED)
    report = assert_hessian_matches(nn.Linear(2, 3).double(), torch.randn(4, 2).double(), torch.randn(4, 3).double())
    assert report.passed
    assert COMPARED[before].report is report
    assert COMPARED[before].test.endswith("test_testing.py::test_it_returns_the_report_and_records_it")


def test_it_fails_with_the_table():
    layer = nn.Sequential(nn.Linear(2, 3), nn.GELU()).double()
    x, target = torch.randn(4, 2).double(), torch.randn(4, 3).double()
    with pytest.raises(AssertionError, match=r"FAILED: \d+ of 16 rows disagree") as caught:
        assert_hessian_matches(layer, x, target, rtol=1e-30)
    assert "0.weight x 0.bias" in str(caught.value)


@pytest.mark.slow
def test_the_plugin_prints_a_summary_of_all_processes(tmp_path: Path):
    data = "import torch\nDATA = (torch.randn(4, 2).double(), torch.randn(4, 3).double())\n"
    (tmp_path / "test_suite.py").write_text(data + SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hessian", "test_suite.py", "-n2"]
    listed = "hessiankit.cli.pytest_plugin" in {e.value for e in _entry_points()}
    command += [] if listed else ["-p", "hessiankit.cli.pytest_plugin"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of the run around this one
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 1 passed" in ran.stdout
    lines = [line for line in ran.stdout.splitlines() if line.startswith("test_suite.py::")]
    assert [line.partition(":")[0] for line in lines] == ["test_suite.py"] * 2
    assert {line.split("::")[1].split(":")[0].split()[0] for line in lines} == {"test_mine", "test_strict"}


def _entry_points():
    from importlib.metadata import entry_points

    return entry_points(group="pytest11")
