"""Every row of the ledger that a page, a docstring or a comment cites exists, under its full id."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from hessiankit.formulas.theorems import find
from papers import PAPERS, claims

ROOT = Path(__file__).parents[2]
FILES = [
    path for folder in ("derivations", "hessiankit", "docs", "figures", "benchmarks", "notebooks") for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md") and path.parent.name not in PAPERS
] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]  # fmt: skip
NAME = r"[A-Za-z0-9](?:[\w.-]*[\w])?"
ID = re.compile(rf"(?<![\w/.-])({'|'.join(PAPERS)})/({NAME})(?![\w*?\[/]|\.\w)")
ANCHOR = re.compile(rf"claims(?:\.md|\.html)?(?:/(?:{'|'.join(PAPERS)})\.(?:md|html))?#((?:{'|'.join(PAPERS)})-{NAME})")
OLD = re.compile(r"\b[Cc]laims? (?:T-|Thm|Phi_|G_K|Eq\d|Lem\d|L4-|MSE-|[A-H]\d+\b)|\bb:[A-Z]|bounds review")


@cache
def known() -> set[str]:
    return {row.id for row in claims()}


def cited(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(?:docs/|\.\./|\()?(?:errata|papers|claims)/[\w-]+\.(?:md|html)", "", text)
    return {f"{paper}/{name}" for paper, name in ID.findall(text) if name != "Theorem"}  # followed by its number


def test_every_citation_is_of_a_row() -> None:
    wrong = {f"{path.relative_to(ROOT)}: {id}" for path in FILES for id in cited(path) if id not in known() and find(id) is None}
    assert not wrong, "\n".join(sorted(wrong))


def test_every_anchor_is_of_a_row() -> None:
    anchors = {id.replace("/", "-") for id in known()}
    for path in FILES:
        for anchor in ANCHOR.findall(path.read_text(encoding="utf-8")):
            assert anchor in anchors, f"{path.relative_to(ROOT)}: {anchor}"


def test_no_row_is_cited_by_half_its_id() -> None:
    for path in FILES:
        found = OLD.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found and found[0]!r}; cite rows as paper/name"


def test_citations_are_found() -> None:
    assert cited(ROOT / "derivations" / "layernorm_theorems.py") >= {"curvature-gap/thm3-dd", "curvature-gap/thm8-tau"}
    assert ID.search("sharpness-disparity/fig6 and")
    assert not ID.search("hybridnorm/eq2*")
