"""``derive``: a block's Jacobian or Hessian block as an expression in vec_r that can be read, computed and bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
from torch import Tensor

from derivations.arrays import Array
from derivations.composition import gauss_newton
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix, add
from derivations.operation import Lettered, Operation, shape_of
from derivations.stage import Stage, Term
from hessiankit.arguments import checked
from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.norms import GroupNorm
from hessiankit.derivation.asked import asked_block, asked_names, sequence, target_of
from hessiankit.derivation.dimensions import SizeNames, prime_copy, sizes_for
from hessiankit.derivation.factor import spelling
from hessiankit.derivation.parts import Parts, block_stage, input_stage
from hessiankit.derivation.result import Derivation
from hessiankit.derivation.story import Story, tell
from hessiankit.derivation.symbols import symbol_of

_PROBABILITIES = {"P": r"\Pi", "Y": r"\text{Labels}", "p_i": r"\pi_i"}


@checked("derive", leave=("wrt", "inputs", "target"))
def derive(
    block: TransformerBlock,
    *,
    wrt: str | Sequence[str] = ("query", "value"),
    inputs: Tensor | None = None,
    target: Tensor | None = None,
    loss: str | None = None,
    length: int = 3,
    seed: int = 0,
) -> Derivation:
    r"""Derive a block's Jacobian or second derivative in closed form.

    Args:
        block: A ``hessiankit.TransformerBlock`` of any placement, in float64 or float32.
        wrt: One or two parameters: dotted names, the letters of the papers ("W_Q", "Q", "1", "b_2"), or "query", "key",
            "value", "output", "up", "down", "gate", "input". A name alone, or one name: the Jacobian.
        inputs: One sequence, ``(L, d_model)`` or ``(1, L, d_model)``. By default one is drawn.
        target: For a loss: what the output is compared with. By default one is drawn.
        loss: ``"mse"`` (the mean of the squared differences), ``"cross_entropy"`` (of each token's output with a label)
            or ``None`` for the derivative of the output itself.
        length: Tokens to draw where no inputs are given.
        seed: Of what is drawn.

    Returns:
        A :class:`Derivation`; printing it shows the formula and the objects it refers to.

    Raises:
        InputError: If a name is not known, or the input or target does not fit.

    >>> import hessiankit as hk
    >>> print(hk.derive(hk.TransformerBlock(4, 5, affine=False), wrt="down"))
    ∂Z/∂W_2 = J_Z (σ(U) ⊗ I_d)      (12 x 20)
        J_Z = (diag(ρ_Z⁻¹) ⊗ I_d) (I_L ⊗ C_d - 1/d V_Z V_Zᵀ)
        V_Z = blockdiag_i(s̊_i)
    """
    block = asked_block(block)
    names = asked_names(block, wrt)
    symbols = [name if name == "X" else symbol_of(name) for name in names]
    point = {name: p.detach() for name, p in block.named_parameters()}
    X = sequence(block, inputs, length, seed)
    goal = target_of(loss, target, X, seed)

    def told() -> Story:
        part, grouped = block.attention, any(isinstance(m, GroupNorm) for m in block.modules())
        sizes = sizes_for(part.n_heads, part.n_kv_heads, rotary=part.rotary, groups=grouped)
        parameters, tokens = prime_copy(block, sizes, seed)
        Z = block_stage(Parts(block, parameters, sizes=sizes, spelt=True), input_stage(tokens))
        terms = _terms(Z, symbols, loss, target_of(loss, None, tokens, seed))
        written = spelling(block)
        left = _left(loss, symbols)
        return tell(left, _sum(terms), terms, _rule(Z, symbols, loss), Z, [written.known] if written else [], SizeNames(sizes))

    def symbolic() -> Matrix:
        parameters = {name: _symbols_for(symbol_of(name), shape_of(p)) for name, p in point.items()}
        answer = _symbols_for("T", shape_of(X)) if loss == "mse" else goal
        Z = block_stage(Parts(block, parameters, spelt=True), input_stage(_symbols_for("X", shape_of(X))))
        return _sum(_terms(Z, symbols, loss, answer))

    Z = block_stage(Parts(block, point), input_stage(X))
    return Derivation(names, loss, _sum(_terms(Z, symbols, loss, goal)), told, symbolic)


def _sum(terms: Sequence[Term]) -> Matrix:
    return add(*(term.matrix for term in terms))


def _terms(Z: Stage, names: Sequence[str], loss: str | None, answer: Any) -> list[Term]:
    """Return the summands of the derivative, each with its meaning; one that is zero if there is no other."""
    if loss is None:
        zero = Term(Z.jacobian(*names) if len(names) == 1 else Z.hessian(*names), "zero at every point")
        return Z.terms(*names) or [zero]
    outer: Operation = MeanSquaredErrorAt(Z.value, answer) if loss == "mse" else CrossEntropyAt(Z.value, answer)
    if loss == "cross_entropy":
        outer = Lettered(outer, _PROBABILITIES)
    if len(names) == 1:
        slope = outer.jacobian(next(iter(outer.arguments))) @ Z.jacobian(*names)
        return [Term(slope, f"slope of the loss times slope of ${Z.symbol}$")]
    parts = gauss_newton(outer, Z, *names)
    return [
        Term(parts.outer, f"outer (Gauss-Newton) part: curvature of the loss between the two slopes of ${Z.symbol}$"),
        Term(parts.functional, f"functional part: slope of the loss times curvature of ${Z.symbol}$"),
    ]


def _rule(Z: Stage, names: Sequence[str], loss: str | None) -> str:
    if loss is not None:
        rule = "chain rule" if len(names) == 1 else "Gauss-Newton split"
        return f"{rule} for the loss ({'squared error' if loss == 'mse' else 'cross entropy'}, a mean) of ${Z.symbol}$"
    return Z.rule_of(*names)


def _left(loss: str | None, symbols: Sequence[str]) -> str:
    what = "Z" if loss is None else r"\mathcal{L}"
    below = r"\,".join(rf"\partial {symbol}" for symbol in symbols)
    power = "^2" if len(symbols) == 2 else ""
    return rf"\frac{{\partial{power} {what}}}{{{below}}}"


def _symbols_for(letter: str, shape: tuple[int, ...]) -> Array:
    """Return an array of real symbols with indices from 1."""
    entries = np.empty(math.prod(shape), dtype=object)
    for k in range(entries.size):
        index = ",".join(str(i + 1) for i in np.unravel_index(k, shape)) if shape else ""
        entries[k] = sympy.Symbol(f"{letter}_{{{index}}}" if "_" not in letter else f"{letter}^{{{index}}}", real=True)
    return entries.reshape(shape)
