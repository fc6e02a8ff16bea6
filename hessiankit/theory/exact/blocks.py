"""The exact cases of whole blocks: every norm placement, all first and second derivatives, entry by entry with ``==``.

One function, the equation of a placement, is run twice: on the stages of ``hessiankit.theory.formulas``, which gives the closed
form of every Jacobian and second derivative, and on jets (``JetBlock``), which know nothing of the chapters. Both are read at
one point: parameters, tokens, the root of each row that is normalised, the weight exp(t) of each logit, and the value and first
two derivatives of a smooth activation at each pre-activation are residues modulo p = 2^61 - 1, each drawn from at least
(p - 1)/2 values. The arithmetic bounds the degree D of the numerators of all differences, so a formula that is wrong modulo p
passes with a probability of at most 2 D / (p - 1), times the number of sign patterns where the activation is piecewise linear.
That is no proof in the strict sense; what it leaves open is that chance, other sizes, and a difference whose coefficients are all
multiples of p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
from torch import nn

from derivations.arrays import Array
from derivations.matrix import Dense, Matrix, Named
from derivations.stage import leaf
from hessiankit.blocks import PLACEMENTS, Attention, TransformerBlock
from hessiankit.blocks.norms import GroupNorm
from hessiankit.blocks.parts import BlockParts
from hessiankit.theory.exact.block_structure import BlockStructure
from hessiankit.theory.exact.case import EXACT, Comparison, Draw, ExactCase, against
from hessiankit.theory.exact.jets import Jet, Variables, values
from hessiankit.theory.formulas.block_at import BlockAt, Exact, block_stage

SCALE = Fraction(2, 3)
"""A rational factor of attention logits, in place of 1/sqrt(d_K)."""
_TURNS = (Fraction(3, 5), Fraction(5, 13), Fraction(-8, 17)), (Fraction(4, 5), Fraction(12, 13), Fraction(15, 17))
"""Cosines and sines of three angles that have rational ones."""
PIECEWISE: dict[str, Callable[[Any], Any]] = {
    "relu": Jet.relu,
    "leaky_relu": lambda x: x.relu(Fraction(1, 100)),
    "identity": lambda x: x,
}


def rational_turns(length: int, pairs: int = 1) -> tuple[Array, Array]:
    """Return the cosines and the sines of rational rotations, L x pairs, neighbours all different.

    >>> cos, sin = rational_turns(2)
    >>> (cos * cos + sin * sin).tolist()
    [[Fraction(1, 1)], [Fraction(1, 1)]]
    """
    cos, sin = [[[turn[(row + 2 * k) % 3] for k in range(pairs)] for row in range(length)] for turn in _TURNS]
    return np.array(cos, dtype=object), np.array(sin, dtype=object)


class JetBlock(BlockParts):
    """A block at arrays of jets, under the names that equations use; its ``factor`` must be rational.

    It records the numbers in place of roots and exponentials (eps of each row that was normalised, ``stacked`` attention
    weights), so that closed forms are evaluated at the same point.
    """

    scale = SCALE
    root = staticmethod(Jet.sqrt)
    turns = staticmethod(rational_turns)

    def __init__(self, block: TransformerBlock | Attention, arrays: Mapping[str, Array], draw: Draw) -> None:
        super().__init__(block, arrays)
        self.exp, self._draw = draw.exp, draw
        self._heads: list[Array] = []
        self._eps: dict[tuple[nn.Module, tuple[Any, ...]], Any] = {}

    def activation(self, X: Array, kind: str) -> Array:
        return np.frompyfunc(PIECEWISE.get(kind, self._draw.smooth), 1, 1)(X)

    def weights(self, logits: Array) -> Array:
        """Return the attention weights of one head, and keep their values."""
        A = super().weights(logits)
        self._heads.append(values(A))
        return A

    @property
    def stacked(self) -> Array:
        """The attention weights of the last run of the equation, stacked over the heads."""
        return np.concatenate(self._heads, 0)

    def eps(self, part: nn.Module, rows: Array, mean_squares: Array) -> Array:
        """Return the eps of rows, the same for equal rows (a key head that serves several queries)."""
        keys = [(part, tuple(row)) for row in values(rows)]
        for key, square in zip(keys, values(mean_squares), strict=True):
            if key not in self._eps:
                self._eps[key] = self._draw.eps(square)
        return np.array([self._eps[key] for key in keys], dtype=object)

    def eps_of(self, norm: nn.Module | None) -> Array:
        """Return the eps of all rows that a norm was given, in their order."""
        return np.array([eps for (part, _), eps in self._eps.items() if part is norm], dtype=object)

    def eps_at(self, norm: nn.Module, X: Array) -> Array:
        """Return the eps that the rows of X, or its groups of features row by row, had in this norm."""
        keys = [(norm, tuple(row)) for row in X.reshape(-1, norm.size if isinstance(norm, GroupNorm) else X.shape[1])]
        if any(key not in self._eps for key in keys):
            raise ValueError(f"the closed form normalises rows that the block does not: {norm} of {tuple(X.shape)}")
        return np.array([self._eps[key] for key in keys], dtype=object)


# The placements -----------------------------------------------------------------------------------------------------------

LENGTH = 2
"""Tokens of the sequence."""
VARIANTS = (
    BlockStructure("", "layernorm", "relu"),
    BlockStructure("", "rmsnorm", "swiglu", n_heads=2, n_kv_heads=2, causal=True, rotary=True),
    BlockStructure("", "layernorm", "gelu", bias=True),
    BlockStructure("", "rmsnorm", "relu", n_heads=2, n_kv_heads=1, rotary=True, bias=True),
    BlockStructure("", "layernorm", "swiglu", n_heads=2, n_kv_heads=1, causal=True, norm_scope="full", affine=False),
    BlockStructure("", "rmsnorm", "gelu", causal=True),
    BlockStructure("", "rmsnorm", "leaky_relu", n_heads=2, n_kv_heads=2, norm_scope="full", attention_bias=True),
    BlockStructure("", "rmsnorm", "gelu", attention_bias=True, output_projection=True, rotary=True),
)
"""Other options of a block, dealt out to the placements in turn."""


def structures() -> Iterator[BlockStructure]:
    """Yield a structure for every placement, and for the last layer too where layers differ."""
    for n, (name, placement) in enumerate(PLACEMENTS.items()):
        first, last = (replace(VARIANTS[(n + k) % len(VARIANTS)], placement=name) for k in (0, 3))
        yield first if placement.rule is None else replace(first, layer=1, n_layers=4)
        if placement.rule is not None:
            yield replace(last, layer=4, n_layers=4)


def placement_case(structure: BlockStructure) -> ExactCase:
    """Return the exact case of a block; the block is built when the case is run."""
    sizes = " ".join(f"{name}={n}" for name, n in {"L": LENGTH, **structure.sizes}.items())
    kinks = LENGTH * structure.sizes["d_ff"] if structure.activation in ("relu", "leaky_relu") else 0
    build = lambda draw: block_comparisons(structure.small(), draw)  # noqa: E731
    return ExactCase("placements", str(structure), sizes, build, branches=2**kinks)


def block_comparisons(block: TransformerBlock, draw: Draw) -> Iterator[Comparison]:
    """Build a block's value, all its Jacobians and all its second derivatives, X among the arguments."""
    at = {name: draw.array(*p.shape) for name, p in block.named_parameters()}
    X = draw.array(LENGTH, block.d_model)
    symbols = BlockAt(block, at).symbols
    point = Variables({"X": X, **{symbols[name]: value for name, value in at.items()}})
    jets = JetBlock(block, {n: point.jets[symbols[n]] for n in at}, draw)
    output, network = jets(point.jets["X"]), block.feedforward
    exact = Exact(  # what the closed forms take from the jets' point in place of roots and exponentials
        eps=lambda _, X, norm: jets.eps_at(norm, X),
        weights=jets.stacked,
        scale=SCALE,
        turns=rational_turns(LENGTH, block.attention.d_k // 2) if block.attention.rotary else None,
        activation=None if network.W_G is None and network.activation in PIECEWISE else draw.smooth.derivatives,
    )
    Z = block_stage(BlockAt(block, at, exact=exact), leaf("X", X))
    numbers_of = _Written()
    for comparison in against(Z, point, output):
        yield replace(comparison, closed=numbers_of(comparison.closed))


class _Written:
    """Replaces the names in expressions by their values, once for all expressions that share them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Matrix, Matrix]] = {}

    def __call__(self, matrix: Matrix | Array) -> Matrix | Array:
        if not isinstance(matrix, Matrix):
            return matrix
        for child in (matrix.matrix,) if isinstance(matrix, Named) else matrix.children():
            self(child)
        if isinstance(matrix, Named):
            original = matrix.matrix
            if id(original) not in self._known:
                numbers = original if isinstance(original, Dense) else Dense(original.dense(EXACT), matrix.symbol)
                self._known[id(original)] = original, numbers
                self._known[id(numbers)] = numbers, numbers
            matrix.matrix = self._known[id(original)][1]
            matrix.__dict__.pop("meaning", None)
        return matrix


PLACEMENT_CASES: tuple[ExactCase, ...] = tuple(placement_case(structure) for structure in structures())
"""Every placement."""
