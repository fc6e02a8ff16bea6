"""The README says what is: its counterexample, its commands and its table. Its blocks and links are those of tests/docs/test_docs.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_the_counterexample_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    exec(BLOCKS[0].split("\n\n")[0], names)
    exec(BLOCKS[1], names)
    asymmetry, difference = map(float, re.findall(r"tensor\(([0-9.e+-]+)", capsys.readouterr().out))
    assert asymmetry > 0.1  # relative to the largest entry: torch's matrix is not symmetric, ours is right
    assert difference > 0.1
    mirrored = eval('hk.hessian(net, x, target).block("0.weight", "1.weight").T', names)
    assert (names["ours"] - mirrored).abs().max() < 1e-14  # type: ignore[operator]


def test_installation_is_the_one_of_continuous_integration() -> None:
    assert '-c constraints.txt -e ".[study]" && .venv/bin/hessiankit study' in README
    assert '-c constraints.txt -e ".[test]" && .venv/bin/python -m pytest -n auto' in README
    assert '--constraint constraints.txt --editable ".[dev]"' in (ROOT / ".ci" / "run").read_text()


def test_the_table_of_speed_is_the_one_of_the_benchmarks() -> None:
    """Every problem, size, batch and time of the README's table stands in the measured page, too."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    table = README.split("<!-- benchmark summary -->")[1].split("<!-- /benchmark summary -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) == 3
    for problem, size, batch, time, *_ in rows:
        value, unit = time.split()
        seconds = re.search(rf"^\| {problem} \| {size} \| {batch} \| float64 \| ([0-9.]+) \(", page, flags=re.MULTILINE)
        assert seconds is not None, (problem, batch)
        assert float(value) == pytest.approx(float(seconds[1]) * {"ms": 1e3, "s": 1.0}[unit], rel=2e-3)
