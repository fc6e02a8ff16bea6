"""The Python blocks of every page of docs/ run as they stand, from top to bottom, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from model_zoo import optional

from hessiankit.blocks import PLACEMENTS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCKS = {page: re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL) for page in PAGES}
WITH_CODE = [page for page, blocks in BLOCKS.items() if blocks]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(PLACEMENTS)
    names: dict[str, object] = {"__name__": page.stem}
    torch.manual_seed(0)
    try:
        _run(page, names)
    finally:
        for name in set(PLACEMENTS) - set(before):  # a page that registers a placement of its own
            del PLACEMENTS[name]


def _run(page: Path, names: dict[str, object]) -> None:
    for source in BLOCKS[page]:
        for package in ("transformers", "timm"):
            if f"import {package}" in source or f"from {package}" in source:
                optional(package)
        exec(compile(source, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_there_are_pages_with_code() -> None:
    assert len(WITH_CODE) >= 3
