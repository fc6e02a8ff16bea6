"""The exact cases of whole blocks: every norm placement, all first and second derivatives, entry by entry with ``==``.

One function, the equation of a placement, is run twice: on the stages of ``hessiankit.formulas``, which gives the closed
form of every Jacobian and second derivative, and on jets (``JetBlock``), which know nothing of the chapters. Both are read at
one point: parameters, tokens, the root of each row that is normalised, the weight exp(t) of each logit, and the value and first
two derivatives of a smooth activation at each pre-activation are free numbers.

- *rational*: small fractions. Equality of two rational functions at one such point is a check, not a proof.
- *modular*: residues modulo p = 2^61 - 1, each drawn from at least (p - 1)/2 values. The arithmetic bounds the degree D of the
  numerators of all differences, so a formula that is wrong modulo p passes with a probability of at most 2 D / (p - 1), times
  the number of sign patterns where the activation is piecewise linear. That is no proof in the strict sense; what it leaves
  open is that chance, other sizes, and a difference whose coefficients are all multiples of p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from derivations.arrays import Array
from derivations.matrix import Dense, Matrix, Named
from hessiankit.blocks import PLACEMENTS, TransformerBlock
from hessiankit.formulas.block_at import BlockAt, Exact, block_stage, input_stage
from hessiankit.verify.block_structure import BlockStructure
from hessiankit.verify.exact_builders import formal_activation
from hessiankit.verify.exact_case import EXACT, ExactCase, ExactComparison, JetReference, RationalDraw, against
from hessiankit.verify.jet_block import PIECEWISE, JetBlock
from hessiankit.verify.jets import SCALE, Variables, rational_turns

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
"""What else a block can have, dealt out to the placements in turn."""


def structures() -> Iterator[BlockStructure]:
    """Yield a structure for every placement, and for the last layer too where layers differ."""
    for n, (name, placement) in enumerate(PLACEMENTS.items()):
        dealt = replace(VARIANTS[n % len(VARIANTS)], placement=name)
        if placement.rule is None:
            yield dealt
        else:
            yield replace(dealt, layer=1, n_layers=4)
            yield replace(VARIANTS[(n + 3) % len(VARIANTS)], placement=name, layer=4, n_layers=4)


def placement_case(structure: BlockStructure) -> ExactCase:
    """Return the exact case of a block; the block is built when the case is run."""
    sizes = " ".join(f"{name}={n}" for name, n in {"L": LENGTH, **structure.sizes}.items())
    kinks = LENGTH * structure.sizes["d_ff"] if structure.activation in ("relu", "leaky_relu") else 0
    build = lambda draw: block_comparisons(structure.small(), draw)  # noqa: E731
    return ExactCase("placements", str(structure), sizes, build, branches=2**kinks)


def block_comparisons(block: TransformerBlock, draw: RationalDraw) -> Iterator[ExactComparison]:
    """Build a block's value, all its Jacobians and all its second derivatives, X among the arguments.

    The block's ``factor``, if it has one, must be rational.
    """
    point = {name: draw.array(*p.shape) for name, p in block.named_parameters()}
    X = draw.array(LENGTH, block.d_model)
    symbols = BlockAt(block, point).symbols
    variables = Variables({"X": X, **{symbols[name]: value for name, value in point.items()}})
    with formal_activation(draw.seed, draw.function()) as smooth:
        jets = JetBlock(block, {n: variables[symbols[n]] for n in point}, draw.exponential(), smooth, draw.eps)
        output = jets(variables["X"])
        Z = block_stage(BlockAt(block, point, exact=_exact(block, jets)), input_stage(X))
        written = _Written()
        for comparison in against(Z, JetReference(variables, output)):
            yield replace(comparison, closed=written(comparison.closed))


def _exact(block: TransformerBlock, jets: JetBlock) -> Exact:
    """Return what the closed forms take from the jets' point in place of roots and exponentials."""
    part, network = block.attention, block.feedforward
    smooth = network.W_G is not None or network.activation not in PIECEWISE
    return Exact(
        eps=lambda _, X, norm: jets.eps_at(norm, X),
        weights=jets.stacked,
        scale=SCALE,
        turns=rational_turns(LENGTH, part.d_k // 2) if part.rotary else None,
        activation="formal" if smooth else None,
    )


class _Written:
    """Writes out what the names in expressions stand for, once for all expressions that share them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Matrix, Matrix]] = {}

    def __call__(self, closed: Matrix | Array) -> Matrix | Array:
        return closed if isinstance(closed, np.ndarray) else self._written(closed)

    def _written(self, matrix: Matrix) -> Matrix:
        for child in (matrix.matrix,) if isinstance(matrix, Named) else matrix.children():
            self._written(child)
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
"""Every placement, for residues."""


def _one_for_each_equation() -> Iterator[ExactCase]:
    seen = set()
    for structure in structures():
        equation = structure.placed.equation
        if equation not in seen:
            seen.add(equation)
            yield placement_case(replace(structure, norm="rmsnorm"))


EQUATION_CASES: tuple[ExactCase, ...] = tuple(_one_for_each_equation())
"""One placement for each equation, for fractions, which are slower; with RMSNorm, which takes two features."""
