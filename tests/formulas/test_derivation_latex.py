"""What a derivation prints: LaTeX that compiles, lines that fit, symbols that are all explained; docs/derivations.md is that."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from hessiankit import TransformerBlock, derive
from hessiankit.blocks import PLACEMENTS
from hessiankit.formulas.chapters import CHAPTERS
from hessiankit.formulas.latex import WIDTH, broken, plain, read, width
from hessiankit.formulas.symbols import symbol_of
from hessiankit.formulas.typesetting import legend

COMMANDS = """
    left right bigl bigr frac sqrt partial top otimes odot cdot quad hat tilde bar check mathring operatorname mathrm
    mathbf mathcal text alpha beta gamma lambda omega sigma rho xi ell pi varepsilon Phi Gamma Pi times mapsto begin end
    documentclass usepackage allowdisplaybreaks setlength parindent pagestyle section subsection
"""
BLOCKS = {
    "post": TransformerBlock(4, 5),
    "pre": TransformerBlock(4, 5, placement="pre", activation="gelu", bias=True, attention_bias=True),
    "hybridnorm": TransformerBlock(
        8, 5, 4, "hybridnorm", "rmsnorm", "swiglu", n_kv_heads=2, rotary=True, causal=True, attention_bias=True
    ),
    "layerscale": TransformerBlock(4, 5, 2, "layerscale"),
    "deepnorm": TransformerBlock(4, 5, placement="deepnorm", n_layers=4),
    "lns": TransformerBlock(4, 5, placement="lns", layer=2),
    "group-ln": TransformerBlock(4, 5, placement="group-ln", norm="rmsnorm"),
    "sandwich": TransformerBlock(4, 5, 2, "sandwich", norm_scope="full"),
    "lns-before-ln": TransformerBlock(4, 5, placement="lns-before-ln", layer=2),
}


def check_latex(text):
    """Braces, brackets of \\left and \\right line by line, environments, superscripts and commands."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(token, 0)
        assert depth >= 0
    assert depth == 0
    assert set(re.findall(r"\\([A-Za-z]+)", text)) <= set(COMMANDS.split())
    for line in text.split(r"\\"):
        assert len(re.findall(r"\\left\b", line)) == len(re.findall(r"\\right\b", line)), line
    assert len(re.findall(r"\\bigl\b", text)) == len(re.findall(r"\\bigr\b", text))
    for name in ("align*", "aligned", "tabular", "document"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}")
    index = r"(\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|[A-Za-z0-9])"
    assert not re.search(rf"\^{index}\^|_{index}_|'_{index}\^|\^{index}_{index}\^|_{index}\^{index}_", text), "two indices"


FIRST = {placement.equation: name for name, placement in reversed(PLACEMENTS.items())}.values()  # one of each equation


@pytest.mark.parametrize("placement", [pytest.param(p, marks=() if p in FIRST else pytest.mark.slow) for p in PLACEMENTS])
def test_every_placement_is_latex(placement):
    block = TransformerBlock(4, 5, 2, placement, layer=2, n_layers=4, n_kv_heads=1, bias=True, activation="gelu")
    check_latex(derive(block, wrt=("X", "key")).latex(document=True))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_parameter_is_latex_in_lines_that_fit(block):
    names = [*(name for name, _ in block.named_parameters()), "X"]
    for loss, name in zip(itertools.cycle([None, "mse", "cross_entropy"]), names[::4], strict=False):
        derivation = derive(block, wrt=(name, "attention.W_K"), loss=loss)
        check_latex(derivation.latex(document=True))
        check_latex(derivation._repr_latex_())
        for line in re.findall(r"&=(.*?)(?:\\\\\n|\n\\end)", derivation.latex(), flags=re.S):
            for piece in line.split("\\\\\n&\\quad"):
                assert width(read(piece)) <= WIDTH + 1, piece


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_every_symbol_is_explained(block):
    """Each letter of a formula is a value, a parameter, a line of its own, or in the legend."""
    story = derive(block, wrt=("attention.W_Q", "feedforward.W_1")).story
    parameters = [symbol_of(name) for name, _ in block.named_parameters()]
    explained = [line.symbol for line in story.lines] + [symbol for symbol, _ in story.values] + parameters
    explained += [symbol for symbol, _ in story.legend] + [rule for _, rule in story.values if r"\quad" in rule]
    known = {letter for text in explained for letter in letters(text)} | {"X"}
    for line in story.lines:
        assert set(letters(line.formula)) <= known, (line, set(letters(line.formula)) - known)


def letters(formula):
    """The letters of a formula without indices, words and layout; those under an accent with it."""
    text = re.sub(r"\\mathring\{\w\}", " mathring ", formula)
    text = re.sub(r"\\(hat|tilde|check|bar)\{(\w)\}", r" \1\2 ", text)
    text = re.sub(r"\\text\{[^{}]*\}|\\operatorname\{\w+\}|\\math\w+\{\w+\}", " ", text)
    text = re.sub(r"[_^](\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}|\\[A-Za-z]+|\w)", " ", text)
    text = re.sub(r"\\frac\{\d\}\{(\\sqrt\{)?[LHdgr ]*\}?\}", " ", text)
    text = re.sub(r"\\(left|right|frac|sqrt|partial|top|cdot|otimes|odot|quad|times)\b", " ", text)
    words = re.findall(r"\\?[A-Za-z]+", text)
    return [word for word in words if word.startswith("\\") or len(word) == 1 or "mathring" in word or word[-1].isupper()]


def test_formulas_are_measured_and_broken_at_sums_first():
    assert [width(read(formula)) for formula in (r"A\otimes B", r"\frac{1}{d}\,V", r"\left(A+B\right)")] == [3, 2, 5]
    formula = r"\left(A+B\right)\,C+D\,E"
    assert broken(formula, 7) == [r"\left(A+B\right)\,C", r"{}+D\,E"]
    assert broken(formula, 100) == [formula]
    formula = r"A\,B-CCC\left(-DDDD\,EEEE\right)"  # its second minus belongs to what follows
    assert broken(formula, 10) == [r"A\,B", r"{}-CCC\bigl(-DDDD", r"{}\cdot EEEE\bigr)"]
    assert broken(r"\left(AAAA+BBBB\right)", 8) == [r"\bigl(AAAA", r"{}+BBBB\bigr)"]
    assert "".join(broken(r"A\,B\,C", 2)).replace(r"{}\cdot ", r"\,") == r"A\,B\,C"


def test_plain_text_of_every_part():
    for block in BLOCKS.values():
        text = derive(block, wrt=("attention.W_Q", "X")).explain()
        assert not re.search(r"\\|\$|\{\}|\{\w\}", text), re.findall(r".*(?:\\|\$|\{\}|\{\w\}).*", text)[:3]
    assert plain(r"\frac{\partial A}{\partial T}\,\mathring{x}_i^\top") == "∂A/∂T x\u030a_iᵀ"
    assert plain(r"J_{\hat{\bar{X}}}") == "J_X\u0304\u0302"
    assert plain(r"\hat{XY}") == "X\u0302Y"


def test_no_command_of_latex_is_in_the_text_of_a_chapter():
    for name in CHAPTERS:
        derivation = derive(name)
        assert "\\" not in str(derivation) + derivation.explain(), name


def test_the_legend_names_only_what_occurs():
    assert legend("J_{Z}", set()) == [("J_{N M}", legend("J_{Z}", set())[0][1])]
    assert legend(r"\operatorname{diag}(v)", {"L"})[1:] == [("L", "tokens")]
    shown = dict(derive(BLOCKS["post"], wrt="down").story.legend)
    assert "R_l" not in shown
    assert "K_{m,n}" not in shown
    assert "d_K" not in shown
    assert "R_l" in dict(derive(BLOCKS["hybridnorm"]).story.legend)


def test_notebook_and_json():
    derivation = derive(BLOCKS["post"])
    shown = derivation._repr_html_()
    assert shown.count("<div>") == shown.count("</div>") == 1
    assert shown.count("$$") % 2 == 0
    assert "first derivative of $Z$ in $S$ times second derivative of $S$" in shown
    assert derivation._repr_latex_().startswith("$$\n\\begin{aligned}")
    found = json.loads(derivation.json())
    assert found == derivation.to_dict()
    assert found["shape"] == [3 * 4 * 16, 16]
    assert found["norm_bound"] == derivation.norm_bound()
    assert [line["symbol"] for line in found["lines"]] == [line.symbol for line in derivation.story.lines]
    assert all(set(entry) == {"symbol", "meaning"} for entry in found["legend"])


def test_what_vanishes_is_said_to():
    derivation = derive(TransformerBlock(4, 5, placement="pre"), wrt=("down", "down"))
    assert torch.count_nonzero(derivation.dense()) == 0
    assert "zero at every point" in derivation.explain()
    check_latex(derivation.latex(document=True))
    assert "with</p>" not in derivation._repr_html_()


PAGE = Path(__file__).parents[2] / "docs" / "derivations.md"


def test_the_page_is_true():
    text, page = PAGE.read_text(encoding="utf-8"), runpy.run_path(str(PAGE.parent / "_site" / "formula_page.py"))["page"]
    assert text == page(text), "run: python docs/_site/formula_page.py"
    assert text.count("<!-- end -->") == 10


def test_the_page_holds_the_theorem():
    text = PAGE.read_text(encoding="utf-8")
    for line in derive(TransformerBlock(4, 5)).story.lines[:2]:
        assert re.sub(r"\\operatorname\{(\w+)\}", r"\\mathrm{\1}", line.formula) in text
    assert text.count("```math") == 6 + len(CHAPTERS)
    assert r"\operatorname" not in text
    for picture in re.findall(r"\]\((\w+\.png)\)", text):
        assert (PAGE.parent / picture).read_bytes().startswith(b"\x89PNG")
