"""What a newcomer sees in a real terminal: nothing is wider than it, nothing is cut, and a result takes a screen."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from terminal import COMMANDS, WIDTHS, Printed, in_terminal, sections

from hessiankit.support.tables import LINES

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Printed], dict[str, str]]:
    """All that the child printed, and what the results are where there is no terminal."""
    folder, here = tmp_path_factory.mktemp("terminal"), Path(__file__)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here.parents[2]), str(here.parents[1]), str(here.parents[1] / "papers")]),
        "OMP_NUM_THREADS": "1",
    }
    code, written = in_terminal([sys.executable, str(here.with_name("terminal.py")), str(folder)], env=env)
    assert code == 0, written[-3000:]
    return list(sections(written)), json.loads((folder / "complete.json").read_text())


def numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


def test_nothing_is_wider_than_the_terminal_or_cut(seen) -> None:
    shown = [one for one in seen[0] if not one.name.endswith(".repr")]
    assert {one.width for one in shown} == set(WIDTHS)
    assert {*COMMANDS} < {one.name for one in shown}
    for one in shown:
        for line in one.lines:
            assert cell_len(line) <= one.width, (one.name, one.width, line)
            assert "…" not in line, (one.name, one.width, line)


def test_a_result_takes_a_screen_and_its_repr_a_line(seen) -> None:
    for one in seen[0]:
        lines = one.lines[:-1]  # the last one ends with the line break
        if one.name.endswith(".repr"):
            assert len(lines) == 1, lines
        elif one.name not in COMMANDS and not one.name.endswith(".table") and one.name != "claim":
            assert len(lines) <= LINES, (one.name, one.width, len(lines))


def test_every_number_is_whole(seen) -> None:
    """What stands in a terminal stands in the complete text too: a number that was cut would not."""
    printed, complete = seen
    for one in printed:
        name = one.name.removesuffix(".table")
        if name not in complete:
            continue
        text = "\n".join(line for line in one.lines if not re.search(r"\d+ of \d+ rows|^ +first$", line))
        assert numbers(text) - numbers(complete[name]) <= set(), (one.name, one.width)
        for verdict in re.findall(r"\b(?:PASSED|FAILED|VIOLATED|HOLDS|WRONG AS PRINTED|NOT VERIFIED|0 to rounding)\b", text):
            assert verdict in complete[name], (one.name, verdict)


def test_the_table_has_all_of_it_at_any_width(seen) -> None:
    printed, complete = seen
    tables = [one for one in printed if one.name.endswith(".table")]
    assert len(tables) >= len(WIDTHS) * 20
    for one in tables:
        missing = numbers(complete[one.name.removesuffix(".table")]) - numbers("\n".join(one.lines))
        assert missing == set(), (one.name, one.width, missing)


def test_names_tell_rows_apart(seen) -> None:
    (check,) = [one for one in seen[0] if (one.name, one.width) == ("check", 80)]
    rows = [line.split("  ")[0] for line in check.lines if " x " in line.split("  ")[0] and "inputs" not in line]
    assert len(rows) == len(set(rows)) >= 5
    assert any(row.startswith("W_Q x ") for row in rows)
    assert any("columns left out at this width: method" in line for line in check.lines)


def test_the_main_job_is_a_screen_and_a_half(seen) -> None:
    for one in seen[0]:
        if one.name == "$ study --quick":
            text = "\n".join(one.lines)
            assert "10 of 272 rows, largest error first" in " ".join(text.split())
            assert "Hessian 2 of 4: " in text
            assert " s left" in text
            assert "--table" in text
            assert "report.json" in text
            assert text.count("passed") == 4
            assert sum(" x " in line and "e-" in line for line in one.lines) == 10
