"""docs/derivations.md is what derive prints, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path

from hessiankit import TransformerBlock, derive
from hessiankit.formulas.page import page

PAGE = Path(__file__).parents[1] / "docs" / "derivations.md"


def test_the_page_is_true():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m hessiankit.formulas.page docs"


def test_the_page_holds_the_theorem():
    text = PAGE.read_text(encoding="utf-8")
    for line in derive(TransformerBlock(4, 5)).story.lines[:2]:
        assert re.sub(r"\\operatorname\{(\w+)\}", r"\\mathrm{\1}", line.formula) in text
    assert text.count("```math") == 6
    assert r"\operatorname" not in text
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (PAGE.parent / picture).read_bytes().startswith(b"\x89PNG")


def test_the_code_of_the_page_runs(capsys):
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S):
        exec(compile(block, str(PAGE), "exec"), {})
    assert "torch.Size([96, 16])" in capsys.readouterr().out
