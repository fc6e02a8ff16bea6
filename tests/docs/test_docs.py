"""The Python blocks of the README and of every page of docs/ run as they stand, from top to bottom, and links lead somewhere.

Blocks named ``py`` need what only their reader has, such as a trainer: they are compiled.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from figure_files import WITHOUT_PICTURES

from hessiankit.blocks import PLACEMENTS
from hessiankit.tracing.rules.registry import RULES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL) for page in PAGES}
WITH_CODE = [
    page for page, blocks in BLOCKS.items() if blocks and page.name != "depth.md"
]  # which tests/training/test_depth.py runs


def name(page: Path) -> str:
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else DOCS.parent).with_suffix("").as_posix()


@pytest.mark.usefixtures("few_pixels")
@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, rules = dict(PLACEMENTS), dict(RULES)
    names: dict[str, object] = {"__name__": page.stem}
    torch.manual_seed(0)
    try:
        _run(page, names)
    finally:
        for own in set(PLACEMENTS) - set(before):  # a page that registers a placement of its own
            del PLACEMENTS[own]
        RULES.clear()
        RULES.update(rules)


def _run(page: Path, names: dict[str, object]) -> None:
    for source in BLOCKS[page]:
        for package in ("transformers", "timm"):
            if f"import {package}" in source or f"from {package}" in source:
                pytest.importorskip(package)
        exec(compile(source, page.name, "exec"), names)


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_code_is_shown_whole(page: Path) -> None:
    assert not [line for block in BLOCKS[page] for line in block.splitlines() if len(line) > 88]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            there = page.parent / target if target else page
            if there.suffix == ".png" and WITHOUT_PICTURES:
                continue
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in _anchors(there), f"{page.name}: {target}#{anchor}"


@cache
def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page as GitHub makes them of headings, and those written as HTML."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        re.findall(r'id="([^"]+)"', text)
    )


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_formulas_keep_their_backslashes_on_github(page: Path) -> None:
    """Between bare dollars Markdown's escapes come first there, so that ``\\,`` is a comma."""
    text = re.sub(r"```.*?```|\$?`[^`]*`\$?", "", page.read_text(), flags=re.DOTALL)
    for formula in re.findall(r"\$[^$]+\$", text):
        assert not re.search(r"\\[^\w\s]", formula), f"{page.name}: {formula}; write it as $`...`$, or as a fence named math"


def test_blocks_of_the_reader_compile() -> None:
    for page in PAGES:
        for source in re.findall(r"```py\n(.*?)```", page.read_text(), flags=re.DOTALL):
            compile(source, page.name, "exec")
