"""The README's Python blocks run as they stand, and its commands are those of continuous integration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("source", BLOCKS, ids=[f"block {k}" for k in range(1, len(BLOCKS) + 1)])
def test_block_runs(source: str) -> None:
    if "transformers" in source:
        pytest.importorskip("transformers")
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 3


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_installation_is_the_one_of_continuous_integration() -> None:
    assert '-c constraints.txt -e ".[test]"' in README
    assert '--constraint constraints.txt --editable ".[dev]"' in (ROOT / ".ci" / "run").read_text()


def test_the_table_of_speed_is_the_one_of_the_benchmarks() -> None:
    """Every problem, size, batch and time of the README's table stands in the measured page, too."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = README.split("<!-- benchmark summary -->")[1].split("<!-- /benchmark summary -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) >= 4
    for problem, size, batch, time, *_ in rows:
        value, unit = time.split()
        seconds = re.search(rf"^\| {problem} \| {size} \| {batch} \| float64 \| 1 \| ([0-9.]+) \(", page, flags=re.MULTILINE)
        assert seconds is not None, (problem, batch)
        assert float(value) == pytest.approx(float(seconds[1]) * {"ms": 1e3, "s": 1.0}[unit], rel=2e-3)
