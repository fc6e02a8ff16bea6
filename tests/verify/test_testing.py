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
import sys
from types import ModuleType, SimpleNamespace

testing = sys.modules["hessiankit.verify.testing"] = ModuleType("hessiankit.verify.testing")  # in place of one that imports torch
testing.COMPARED = []


class Report(SimpleNamespace):
    def __bool__(self):
        return self.verdict.startswith("PASSED")


def compare(test, verdict):
    testing.COMPARED.append((f"test_suite.py::{test}", Report(verdict=verdict)))
    assert testing.COMPARED[-1][1]


def test_mine():
    compare("test_mine", "PASSED: 16 rows")


def test_strict():
    compare("test_strict", "FAILED: 16 of 16 rows disagree")
"""


def test_it_returns_the_report_and_records_it():
    torch.manual_seed(0)
    before = len(COMPARED)
    report = assert_hessian_matches(nn.Linear(2, 3).double(), torch.randn(4, 2).double(), torch.randn(4, 3).double())
    assert report.passed
    test, compared = COMPARED[before]
    assert compared is report
    assert test.endswith("test_testing.py::test_it_returns_the_report_and_records_it")


def test_it_fails_with_the_table():
    layer = nn.Sequential(nn.Linear(2, 3), nn.GELU()).double()
    x, target = torch.randn(4, 2).double(), torch.randn(4, 3).double()
    with pytest.raises(AssertionError, match=r"FAILED: \d+ of 17 rows disagree") as caught:
        assert_hessian_matches(layer, x, target, rtol=1e-30)
    assert "0.weight x 0.bias" in str(caught.value)


def test_the_plugin_prints_a_summary_of_all_processes(tmp_path: Path):
    pytest.importorskip("xdist")
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hessian", "test_suite.py", "-n2"]
    command += ["-p", "hessiankit.cli.pytest_plugin", "-p", "xdist"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of the run around this one
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other packages' plugins take longer to import than all else
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 1 passed" in ran.stdout
    lines = {line for line in ran.stdout.splitlines() if line.startswith("test_suite.py::")}
    assert lines == {
        "test_suite.py::test_mine: PASSED: 16 rows", "test_suite.py::test_strict: FAILED: 16 of 16 rows disagree",
    }  # fmt: skip
