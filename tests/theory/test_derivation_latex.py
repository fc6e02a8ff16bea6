"""What a derivation prints: LaTeX that compiles, in lines that fit, of explained symbols and the sizes that are computed."""

from __future__ import annotations

import itertools
import json
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch
from derivation_reference import generic

from derivations.matrix import BlockDiagonal, Commutation, Dense, Diagonal, DiagonalLift, Identity, Named, Ones, Scaled, Zero
from derivations.stage import leaf
from hessiankit import TransformerBlock, derive
from hessiankit.blocks import PLACEMENTS
from hessiankit.theory.formulas.block_at import BlockAt, block_stage
from hessiankit.theory.formulas.latex import WIDTH, broken, plain, read, width
from hessiankit.theory.formulas.symbols import SizeName, prime_copy, sizes_for, symbol_of
from hessiankit.theory.formulas.typesetting import legend

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
        shown = derivation._repr_latex_()
        check_latex(derivation.latex(document=True))
        check_latex(shown)
        for line in re.findall(r"&=(.*?)(?:\\\\\n|\n\\end)", shown, flags=re.S):
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
    assert "first derivative of $Z$ with respect to $S$ times second derivative of $S$" in shown
    assert derivation._repr_latex_().startswith("$$\n\\begin{aligned}")
    found = json.loads(derivation.json())
    assert found == derivation.to_dict()
    assert (found["shape"], found["norm_bound"]) == ([3 * 4 * 16, 16], derivation.norm_bound())
    assert [line["symbol"] for line in found["lines"]] == [line.symbol for line in derivation.story.lines]


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


_FACTOR = re.compile(r"(H_\{KV\}|d_\{ff\}|d_K|d_v|d_g|L|H|d|r|g|\d+)(?:\^(?:\{(\d+)\}|(\d)))?")

SIZED = {
    "post": {"placement": "post", "d_k": 8, "activation": "gelu", "bias": True},
    "pre": {"placement": "pre", "d_k": 8, "activation": "gelu"},
    "rotary": {"placement": "pre", "d_k": 8, "rotary": True},
    "hybridnorm": {"placement": "hybridnorm", "n_heads": 6, "n_kv_heads": 3, "d_k": 4, "d_v": 5, "rotary": True, "causal": True,
                   "norm": "rmsnorm", "activation": "swiglu", "attention_bias": True},
    "full": {"placement": "pre-qkvc-post", "n_heads": 6, "n_kv_heads": 3, "d_k": 4, "d_v": 5, "norm_scope": "full"},
    "multi-query": {"placement": "deepnorm", "n_heads": 6, "n_kv_heads": 1, "d_k": 4, "d_v": 5, "activation": "silu"},
    "group-ln": {"placement": "group-ln", "groups": 2, "d_k": 8, "activation": "tanh"},
    "grouped heads": {"placement": "group-ln", "groups": 6, "n_heads": 6, "d_k": 4, "d_v": 5, "norm": "rmsnorm"},
    "layerscale": {"placement": "layerscale", "n_heads": 6, "d_k": 4, "d_v": 5},
}  # fmt: skip
LENGTH, HIDDEN = 7, 11


def width_of(options):
    return options.get("n_heads", 1) * options.get("d_v", 10)


@cache
def stages(kind):
    """The output of a block and of its copy of prime sizes as stages, the real sizes, and the names of the prime ones."""
    options = SIZED[kind]
    block = generic(TransformerBlock(width_of(options), HIDDEN, **options).double())
    part, sizes, groups = block.attention, sizes_for(block), options.get("groups", 1)
    other, tokens = prime_copy(block, sizes, 0)
    own = {name: p.detach() for name, p in block.named_parameters()}
    pair = (
        block_stage(BlockAt(block, own), leaf("X", torch.randn(LENGTH, block.d_model, dtype=torch.float64))),
        block_stage(BlockAt(block, other, sizes=sizes, spelt=True), leaf("X", tokens)),
    )
    real = {
        "L": LENGTH, "d": block.d_model, "d_K": part.d_k, "d_v": part.d_v, r"d_{ff}": HIDDEN, "H": part.n_heads,
        "H_{KV}": part.n_kv_heads, "r": part.n_heads // part.n_kv_heads, "g": groups, "d_g": block.d_model // groups,
    }  # fmt: skip
    return [*own, "X"], pair, real, SizeName(sizes)


def derivatives(pair, names):
    """The Jacobian or second derivative of both stages."""
    symbols = ["X" if name == "X" else symbol_of(name) for name in names]
    return [stage.jacobian(*symbols) if len(symbols) == 1 else stage.hessian(*symbols) for stage in pair]


def value_of(name, real):
    """The number of a printed size."""
    product, end = 1, 0
    for found in _FACTOR.finditer(name):
        assert found.start() == end, name
        letter, power, digit = found.groups()
        product *= (int(letter) if letter.isdigit() else real[letter]) ** int(power or digit or 1)
        end = found.end()
    assert end == len(name), name
    return product


def own_sizes(node):
    """The sizes that a node prints."""
    if isinstance(node, Commutation):
        return node.m, node.n
    if isinstance(node, DiagonalLift):
        return (node.n,)
    return node.shape if isinstance(node, Identity | Ones | Zero) else ()


def walk(real_node, prime_node, real, names, seen):
    assert type(real_node) is type(prime_node)
    for n, prime in zip(real_node.shape, prime_node.shape, strict=True):
        assert value_of(names(prime), real) == n, (names(prime), real_node)
    for n, prime in zip(own_sizes(real_node), own_sizes(prime_node), strict=True):
        assert value_of(names(prime), real) == n
    if isinstance(real_node, Named):
        assert real_node.symbol == prime_node.symbol
        if real_node.symbol in seen:
            return 0
        seen.add(real_node.symbol)
    if isinstance(real_node, Dense | Diagonal):
        assert real_node.symbol == prime_node.symbol
    if isinstance(real_node, Scaled) and (name := names.scalar(prime_node.c)) is not None and "alpha" not in name:
        assert scalar_of(name, real) == pytest.approx(float(real_node.c), rel=1e-12)
    ours, primes = real_node.children(), prime_node.children()
    if isinstance(real_node, BlockDiagonal):
        ours, primes = ours[:1], primes[:1]
    assert len(ours) == len(primes)
    return 1 + sum(walk(a, b, real, names, seen) for a, b in zip(ours, primes, strict=True))


def scalar_of(name, real):
    sign = -1 if name.startswith("-") else 1
    above, root, below = re.fullmatch(r"-?\\frac\{(\d+)\}\{(?:\\sqrt\{(.*)\}|(.*))\}", name).groups()
    return sign * int(above) / (value_of(root, real) ** 0.5 if root else value_of(below, real))


@pytest.mark.parametrize("kind", SIZED)
def test_what_is_printed_is_what_is_computed(kind):
    names, pair, real, size_names = stages(kind)
    for chosen in [("attention.W_Q", "attention.W_V"), ("X", "feedforward.W_1"), (names[-3], names[1]), ("attention.W_K",)]:
        assert walk(*derivatives(pair, chosen), real, size_names, set()) > 3


def test_numbers_of_placements_are_letters():
    for placement, letter, shown in (
        ("deepnorm", r"\alpha", "(2N)^{1/4} = 1.68179"),
        ("lns", r"\ell", "2"),
        ("lns-after-residual", r"\ell", "2"),
    ):
        derivation = derive(TransformerBlock(4, 5, placement=placement, layer=2, n_layers=4), wrt=("X", "value"))
        assert (letter, shown) in derivation.story.values
        text = " ".join(line.formula for line in derivation.story.lines)
        assert letter in text
        assert not re.search(r"\d\.\d", text)
    chosen = derive(TransformerBlock(4, 5, placement="lns", factor=0.3), wrt="value").story
    assert ("c", "0.3") in chosen.values
    assert any(line.formula.startswith("c") or r"+c\," in line.formula for line in chosen.lines)
