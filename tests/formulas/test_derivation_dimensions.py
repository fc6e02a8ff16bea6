"""The formula that is printed, of prime sizes, is the one that is computed: same structure, and each name is the real size."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from derivation_reference import generic

from derivations.matrix import BlockDiagonal, Commutation, Dense, Diagonal, DiagonalLift, Identity, Named, Ones, Scaled, Zero
from derivations.stage import leaf
from hessiankit import TransformerBlock, derive
from hessiankit.formulas.block_at import BlockAt, block_stage
from hessiankit.formulas.symbols import SizeName, prime_copy, sizes_for, symbol_of

_FACTOR = re.compile(r"(H_\{KV\}|d_\{ff\}|d_K|d_v|d_g|L|H|d|r|g|\d+)(?:\^(?:\{(\d+)\}|(\d)))?")

BLOCKS = {
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


def width(options):
    return options.get("n_heads", 1) * options.get("d_v", 10)


@cache
def stages(kind):
    """The output of a block and of its copy of prime sizes as stages, the real sizes, and the names of the prime ones."""
    options = BLOCKS[kind]
    block = generic(TransformerBlock(width(options), HIDDEN, **options).double())
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
    return [*own, "X"], pair, real, SizeName(sizes.letters)


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


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_printed_is_what_is_computed(kind):
    names, pair, real, size_names = stages(kind)
    for chosen in [("attention.W_Q", "attention.W_V"), ("X", "feedforward.W_1"), (names[-3], names[1]), ("attention.W_K",)]:
        assert walk(*derivatives(pair, chosen), real, size_names, set()) > 3


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_letter_is_one_array(kind):
    """Every leaf that prints as a value of the block holds that value; no symbol is two arrays."""
    names, (Z, _), _, _ = stages(kind)
    for chosen in [("X", "X"), *((name,) for name in names if name.endswith(".weight"))]:
        (ours,) = derivatives([Z], chosen)
        arrays = {bare(stage.symbol): stage.value for stage in Z.story}
        checked, seen, ahead = set(), set(), [ours]
        while ahead:
            node = ahead.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            ahead.extend(node.children())
            for symbol, array in leaf_of(node):
                known = arrays.setdefault(bare(symbol), array)
                assert torch.equal(known.reshape(-1), array.reshape(-1)), symbol
                checked.add(symbol)
        assert len(checked) > (5 if len(chosen) == 2 else 0)


def leaf_of(node):
    """The symbol and the array of a leaf that holds a value of the block; those of single heads are left out."""
    if isinstance(node, Dense):
        transposed = node.symbol.endswith(r"^\top")
        found = (node.symbol.removesuffix(r"^\top"), node.value.T if transposed else node.value)
    elif isinstance(node, Diagonal):
        inner = re.fullmatch(r"\\operatorname\{vec\}_r\((.*)\)", node.symbol)
        found = (inner[1] if inner else node.symbol, node.values)
    else:
        return []
    return [] if found[0].endswith("_h") else [found]


def bare(symbol):
    return re.sub(r"[{}\s]", "", symbol)


def test_a_wrong_name_is_found():
    """The comparison itself can fail: names of other sizes do not give the shapes."""
    _, pair, real, names = stages("post")
    ours, primes = derivatives(pair, ("attention.W_Q",))
    with pytest.raises(AssertionError):
        walk(ours, primes, {**real, "d_K": 9}, names, set())
    with pytest.raises(AssertionError):
        walk(ours.T, primes, real, names, set())


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
