"""The letters of a derivation: parameters, values, rows, sizes, and the factors of a placement.

A formula is printed for a block of the same structure whose sizes are different primes. Every size that occurs in it is a
product of these, and its factorisation gives its letters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import sympy
import torch
from sympy.core.alphabets import greeks
from torch import Tensor

from derivations.arrays import Array, is_exact, scale
from derivations.matrix import Identity, Matrix, scaled
from derivations.operation import OperationAt, shape_of, size
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm

LENGTH, WIDTH, QUERY, HIDDEN, HEADS, SHARED, GROUPS = 17, 5, 7, 19, 11, 13, 23
"""Primes above 3: numerators such as the 2 and 3 of 2/(Ld) and 3/d^2 do not cancel against them."""
EPSILON, SCALE, SLOPE = sympy.symbols(r"\varepsilon c \alpha", positive=True)
"""Numbers that stay letters: eps of a norm, the factor of attention's logits (1/sqrt(d_K) over the temperature), and the slope of
leaky ReLU."""


def sizes_for(block: TransformerBlock) -> dict[str, int]:
    """Return primes for the sizes of a block's structure by their letters: one head or several, shared keys, rotation, groups.

    Composite sizes come first: d = H d_v, H = H_KV r, and d_K = 2 * 7 where pairs of features rotate; 1 has no letter.
    """
    part = block.attention
    groups = GROUPS if any(isinstance(m, GroupNorm) for m in block.modules()) else 1
    query, value = 2 * QUERY if part.rotary else QUERY, WIDTH * groups
    kv_heads = HEADS if part.n_kv_heads > 1 else 1
    repeat = SHARED if part.n_kv_heads < part.n_heads else 1
    heads = kv_heads * repeat
    sizes = {"d": heads * value, "d_g": heads * WIDTH if groups > 1 else 1, "H": heads, "d_K": query, "d_v": value}
    return sizes | {r"H_{KV}": kv_heads, "r": repeat, r"d_{ff}": HIDDEN, "g": groups, "L": LENGTH}


class SizeName:
    r"""The name of a size.

    >>> name = SizeName(sizes_for(TransformerBlock(4, 5)))
    >>> name(85), name(25), name(17 * 5 * 5 * 7), name(1), name.scalar(Fraction(2, 85)), name.scalar(1 / sympy.sqrt(7))
    ('Ld', 'd^2', 'Ld^2d_K', '1', '\\frac{2}{Ld}', '\\frac{1}{\\sqrt{d_K}}')
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """Name sizes that are products of these, by their letters; ``used`` collects the letters that occur."""
        self.sizes = {letter: n for letter, n in sizes.items() if n > 1}
        self.used: set[str] = set()

    def __call__(self, n: int) -> str:
        """Return the name of a size in LaTeX."""
        size = self.size(n)
        self.used.update(letter.name for letter in size.free_symbols)
        return printed(size)

    def size(self, n: int) -> sympy.Expr:
        """Return a size as a SymPy expression in its letters."""
        size: sympy.Expr = sympy.Integer(1)
        for letter, number in self.sizes.items():
            while n % number == 0:
                size, n = size * sympy.Symbol(letter, integer=True, positive=True), n // number
        return n * size

    def number(self, c: Any) -> sympy.Expr:
        """Return a factor whose denominator is a size, or the root of one, as a SymPy expression in its letters."""
        c = sympy.sympify(c)
        number, rest = c.as_independent(*c.free_symbols, as_Add=False)
        if number.is_Rational:
            return rest * number.p / self.size(int(number.q))
        square = number**2
        return rest * sympy.sign(number) * sympy.sqrt(square.p / self.size(int(square.q))) if square.is_Rational else c

    def scalar(self, c: Any) -> str | None:
        """Return the name of a number with a size in it; None for others."""
        number = self.number(c)
        self.used.update(letter.name for letter in number.free_symbols if letter.name in self.sizes)
        return printed(number) if number.free_symbols else None


def printed(expression: sympy.Expr) -> str:
    r"""Return a product of sizes in LaTeX, without needless spaces and braces.

    >>> L, alpha = sympy.symbols(r"L \alpha")
    >>> printed(2 * L), printed(alpha * L**2)
    ('2L', 'L^2\\alpha')
    """
    tight = re.sub(r"(\\[A-Za-z]+ (?=[A-Za-z]))| ", r"\1", sympy.latex(expression))
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", tight)


def prime_copy(block: TransformerBlock, sizes: Mapping[str, int], seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return parameters and tokens of a block of the same structure that has these sizes."""
    d, hidden, query, value = sizes["d"], sizes[r"d_{ff}"], sizes["d_K"], sizes["d_v"]
    q, k, v, c = sizes["H"] * query, sizes[r"H_{KV}"] * query, sizes[r"H_{KV}"] * value, sizes["H"] * value
    widths = {"Q": (d, q), "K": (d, k), "V": (d, v), "O": (c, d), "1": (d, hidden), "G": (d, hidden), "2": (hidden, d)}
    scope = (q, k, v, c) if block.attention.norm_scope == "full" else (query, query, value, value)
    normed = dict(zip(("norm_q", "norm_k", "norm_v", "norm_c"), scope, strict=True))
    generator = torch.Generator().manual_seed(seed)
    copies = {}
    for name, p in block.named_parameters():
        *path, last = name.split(".")
        kind, _, index = last.partition("_")
        shape = tuple(normed.get(path[-1] if path else "", d) for _ in p.shape)
        if kind in ("W", "b"):
            shape = widths[index] if kind == "W" else widths[index][1:]
        copies[name] = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return copies, torch.randn(sizes["L"], d, generator=generator, dtype=torch.float64, device="cpu")


def symbol_of(dotted: str) -> str:
    r"""Return the letter of a parameter.

    >>> symbol_of("attention.W_Q"), symbol_of("norm_1.weight"), symbol_of("attention.norm_q.weight"), symbol_of("lambda_1")
    ('W_Q', '\\gamma_1', '\\gamma_q', '\\lambda_1')
    """
    *path, last = dotted.split(".")
    if last in ("weight", "bias") and path and path[-1].startswith("norm"):
        return (r"\gamma" if last == "weight" else r"\beta") + path[-1].removeprefix("norm")
    return rf"\{last}" if last.split("_")[0] in greeks else last


def index_of(symbol: str) -> str:
    """Return the index that stands for a parameter: Q for W_Q."""
    return symbol.removeprefix("W_")


_ACCENTS = re.compile(r"\\(check|hat|tilde|bar)\{([^{}]*)\}")


def marked(accent: str, symbol: str) -> str:
    """Return a symbol with an accent: a hat on a normed value, a tilde on a rotated one, a check on one split into heads.

    A bar is on a value times a number or a vector, a ring on rows that a norm has centred and divided, before gain and shift.
    """
    return rf"\{accent}{{{symbol}}}"


def base_of(symbol: str) -> str:
    r"""Return a symbol without its accent.

    >>> base_of(r"\hat{X}"), row_of(r"\check{Q}"), plus("b_1")
    ('X', 'q_i', ' + \\mathbf{1}\\,b_1^\\top')
    """
    return _ACCENTS.sub(r"\2", symbol)


def row_of(symbol: str) -> str:
    """Return the letter of a row of a value."""
    return next((c.lower() for c in re.sub(r"\\(check|hat|tilde|bar)", "", symbol) if c.isalpha()), "x") + "_i"


def plus(bias: str | None) -> str:
    """Return the summand of a bias, or nothing."""
    return "" if bias is None else rf" + \mathbf{{1}}\,{bias}^\top"


class Factor(float):
    """A number that formulas print as a letter."""

    letter: Any

    def __new__(cls, value: float, letter: Any) -> Factor:
        """Return the number ``value``, printed as the SymPy expression ``letter``."""
        factor = super().__new__(cls, value)
        factor.letter = letter
        return factor


def spelling(block: TransformerBlock) -> tuple[sympy.Expr, tuple[str, str]] | None:
    r"""Return the spelling of a block's factor, or None if its equation has none.

    Returns:
        The SymPy expression, such as alpha or 1/sqrt(ell), and LaTeX of its letter and of the letter's value.

    >>> spelling(TransformerBlock(4, 5, placement="lns", layer=4))[1]
    ('\\ell', '4')
    >>> spelling(TransformerBlock(4, 5, placement="deepnorm", n_layers=8))[1]
    ('\\alpha', '(2N)^{1/4} = 2')
    """
    value, placement = block.factor, block.own_placement
    if value is None:
        return None
    usual = placement.factor is not None and math.isclose(value, placement.factor(block.layer, block.n_layers), rel_tol=1e-12)
    letter_text, _, rule = placement.factor_letter.partition(" = ")
    if "ell" in letter_text and not usual:
        letter_text = "c"
    letters = {name: sympy.Symbol(rf"\{name}", positive=True) for name in (*greeks, "ell")}
    letter = sympy.sympify(letter_text, letters | {"c": sympy.Symbol("c", real=True)})
    (symbol,) = letter.free_symbols
    value_text = str(block.layer) if symbol == letters["ell"] else (f"{rule} = " if rule and usual else "") + f"{value:.6g}"
    return letter, (str(symbol), value_text)


@dataclass(frozen=True, eq=False)
class FactorAt(OperationAt):
    """N = c X + s for constants c and s at a point; a ``Factor`` prints as its letter, and equals that letter where X is exact.

    >>> import torch
    >>> FactorAt(torch.ones(1, 2), Factor(0.5, sympy.Symbol("c"))).jacobian("X")
    Scaled(2x2: c\\,I_{2})
    """

    argument_names = ("X",)
    X: Array
    c: float
    shift: Any = 0

    @cached_property
    def value(self) -> Array:
        """N."""
        return scale(self._printed if is_exact(self.X) else float(self.c), self.X) + self.shift

    @property
    def _printed(self) -> Any:
        """The letter of c, or c itself in the arithmetic of X."""
        return getattr(self.c, "letter", Fraction(self.c) if is_exact(self.X) else float(self.c))

    def _jacobian(self, name: str) -> Matrix:
        """Return c I."""
        return scaled(self._printed, Identity(size(shape_of(self.X))))
