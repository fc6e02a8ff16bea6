"""The pages of the papers, docs/papers/, are those that the rows and ``derive`` give."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="Python 3.11 reads papers.toml")
ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "docs" / "_site" / "paper_pages.py"))
PAPERS = ROOT / "docs" / "papers"


def test_pages_are_up_to_date() -> None:
    made = MADE["pages"]()
    assert {path.name for path in PAPERS.glob("*.md")} == set(made)
    for name, text in made.items():
        assert (PAPERS / name).read_text(encoding="utf-8") == text, f"{name}: run: python docs/_site/paper_pages.py"


def test_a_numbered_statement_has_its_rows_and_its_formula() -> None:
    text = (PAPERS / "curvature-gap.md").read_text(encoding="utf-8")
    section = text.split("## Theorem 3:")[1].split("\n## ")[0]
    assert "../claims.md#curvature-gap-thm3-full" in section
    assert r"\frac{\partial^2 \mathrm{LN}}{\partial X\,\partial X}" in section
    assert 'hk.derive("curvature-gap/thm3")' in section
    numbers = [statement.number for statement in MADE["PAGES"]["curvature-gap"].statements]
    assert {f"Theorem {k}" for k in range(1, 11)} | {f"Proposition {k}" for k in range(1, 11)} <= set(numbers)
    assert {f"Property {k}" for k in range(1, 13)} | {f"Lemma {k}" for k in range(1, 5)} <= set(numbers)


@pytest.mark.parametrize("name", ["thm3-full", "thm3-da3", "xi_21"])
def test_a_counterexample_whose_print_does_not_conform(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from papers.__main__ import main

    assert main(["show", f"curvature-gap/{name}"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^printed( 1)?: does not conform$", text, flags=re.M)
    assert "\nconfirmed   " in text
