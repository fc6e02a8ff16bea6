"""Every row of the ledger, and every experiment, that a page, a docstring or a comment cites exists, under its full id."""

from __future__ import annotations

import re
from pathlib import Path

from hessiankit.theory.formulas.theorems import find
from papers import PAPERS, claims
from papers.experiments.catalogue import EXPERIMENTS, NO_RUN

ROOT = Path(__file__).parents[2]
FILES = [
    path for folder in ("derivations", "hessiankit", "docs", "figures", "benchmarks", "notebooks") for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md") and path.parent.name not in PAPERS
] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]  # fmt: skip
NAME = r"[A-Za-z0-9](?:[\w.-]*[\w])?"
ID = re.compile(rf"(?<![\w/.-])({'|'.join(PAPERS)})/({NAME})(?![\w*?\[/]|\.\w)")
ANCHOR = re.compile(rf"claims(?:\.md|\.html)?(?:/(?:{'|'.join(PAPERS)})\.(?:md|html))?#((?:{'|'.join(PAPERS)})-{NAME})")
OLD = re.compile(r"\b[Cc]laims? (?:T-|Thm|Phi_|G_K|Eq\d|Lem\d|L4-|MSE-|[A-H]\d+\b)|\bb:[A-Z]|bounds review")


def cited(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"(?:docs/|\.\./|\()?(?:errata|papers|claims)/[\w-]+\.(?:md|html)", "", text)
    return {f"{paper}/{name}" for paper, name in ID.findall(text) if name != "Theorem"}  # followed by its number


def test_every_citation_is_of_a_row_by_its_whole_id() -> None:
    ids = {row.id for row in claims()}
    experiments = {*EXPERIMENTS, *NO_RUN}  # as python -m papers train names them
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not {id for id in cited(path) if id not in ids | experiments and find(id) is None}, path
        assert set(ANCHOR.findall(text)) <= {id.replace("/", "-") for id in ids}, path
        assert not OLD.search(text), f"{path}: cite rows as paper/name"


def test_citations_are_found() -> None:
    assert cited(ROOT / "derivations" / "layernorm_theorems.py") >= {"curvature-gap/thm3-dd", "curvature-gap/thm8-tau"}
    assert ID.search("sharpness-disparity/fig6 and")
    assert not ID.search("hybridnorm/eq2*")
