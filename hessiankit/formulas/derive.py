"""``derive``: a block's Jacobian or Hessian block as an expression in vec_r that can be read, computed and bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn

from derivations.arrays import Array
from derivations.composition import gauss_newton
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix, add
from derivations.operation import Lettered, Operation, shape_of
from derivations.stage import Stage, Term
from hessiankit.blocks import TransformerBlock
from hessiankit.engine.problem.validation import one_kind
from hessiankit.formulas.block_at import BlockAt, block_stage, input_stage
from hessiankit.formulas.result import Derivation
from hessiankit.formulas.symbols import SizeName, index_of, prime_copy, sizes_for, spelling, symbol_of
from hessiankit.formulas.typesetting import Story, story_of
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, unknown

ALIASES = {
    "query": "attention.W_Q",
    "key": "attention.W_K",
    "value": "attention.W_V",
    "output": "attention.W_O",
    "up": "feedforward.W_1",
    "down": "feedforward.W_2",
    "gate": "feedforward.W_G",
    "input": "X",
}
"""Words for the parameters; their dotted names and the papers' letters (Q, W_Q, 1, ...) work too."""
LOSSES = ("mse", "cross_entropy")


def asked_block(block: object) -> TransformerBlock:
    """Return the block.

    Raises:
        InputError: If its parameters are of several dtypes or not finite, or if it is something else; for a model that is made
            of blocks, how to reach them.
    """
    if isinstance(block, TransformerBlock):
        one_kind("derive", block, dict(block.named_parameters()))
        return block
    got = type(block).__name__
    if isinstance(block, nn.Module) and any(isinstance(part, TransformerBlock) for part in block.modules()):
        where = next(name for name, part in block.named_modules() if isinstance(part, TransformerBlock))
        dotted, _, number = where.rpartition(".")
        path = f"{dotted}[{number}]" if number.isdigit() else where
        raise InputError(f"derive: a {got} is a stack, and a formula is of one block; pass one of them, such as model.{path}")
    raise InputError(f"derive: expected a hessiankit.TransformerBlock, got {got}; build one and pass it")


def asked_names(block: TransformerBlock, wrt: str | Sequence[str]) -> tuple[str, ...]:
    """Return the dotted names of the parameters that were asked for, "X" for the input.

    Raises:
        InputError: If there are not one or two, or one is not known (with the nearest names).
    """
    if not isinstance(wrt, (str, list, tuple)):
        raise InputError(f"derive: wrt is a {type(wrt).__name__}; expected a name, or a list of one or two names")
    chosen = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    if not 1 <= len(chosen) <= 2 or not all(isinstance(name, str) for name in chosen):
        raise InputError(f"derive: wrt={wrt!r} is not one or two names; pass one for a Jacobian, two for a Hessian block")
    known = {"X": "X"}
    for dotted, _ in block.named_parameters():
        symbol = symbol_of(dotted)
        for name in (dotted, symbol, symbol.lstrip("\\"), index_of(symbol)):
            known.setdefault(name, dotted)
    words = {word: target for word, target in ALIASES.items() if target in known}
    for name in chosen:
        if name not in known and name not in words:
            raise unknown(
                "derive", "wrt", name, [*(word for word in words if word != "input"), *dict(block.named_parameters()), "X"]
            )
    return tuple((known | words)[name] for name in chosen)


def sequence(block: TransformerBlock, inputs: Tensor | None, length: int, seed: int) -> Tensor:
    """Return one sequence (L, d_model), drawn where none is given, in the arithmetic of the block.

    Raises:
        InputError: If it is not a finite floating-point tensor of this shape, or the length is not positive.
    """
    like = next(iter(block.parameters()))
    if inputs is None:
        if length < 1:
            raise InputError(f"derive: length={length}, expected at least 1")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(length, block.d_model, generator=generator, dtype=torch.float64).to(like)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = getattr(inputs, "dtype", type(inputs).__name__)
        raise InputError(f"derive: inputs are {got}; pass a tensor of floating point, (L, {block.d_model})")
    X = inputs[0] if inputs.ndim == 3 and inputs.shape[0] == 1 else inputs
    if X.ndim != 2 or X.shape[1] != block.d_model or not X.shape[0]:
        raise InputError(
            f"derive: inputs have shape {tuple(inputs.shape)}; a formula is of one sequence, so pass (L, {block.d_model})"
        )
    if not bool(torch.isfinite(X).all()):
        raise InputError("derive: inputs hold NaN or infinite entries; pass finite numbers")
    return X.detach().to(like)


def target_of(loss: str | None, target: Tensor | None, X: Tensor, seed: int) -> Any:
    """Return the target of a loss, drawn where none is given: an array like X, labels, or None without a loss.

    Raises:
        InputError: If the loss is not known, there is a target without a loss, or the target does not fit.
    """
    length, d = X.shape
    if loss is None:
        if target is not None:
            raise InputError("derive: there is a target and no loss; pass loss='mse' or 'cross_entropy', or drop target=")
        return None
    if loss not in LOSSES:
        raise unknown("derive", "loss", loss, LOSSES)
    if target is not None and not isinstance(target, Tensor):
        raise InputError(f"derive: the target is a {type(target).__name__}; pass a tensor")
    generator = torch.Generator().manual_seed(seed + 1)
    if loss == "mse":
        if target is None:
            return torch.randn(length, d, generator=generator, dtype=torch.float64).to(X)
        goal = target[0] if target.ndim == 3 and target.shape[0] == 1 else target
        if goal.shape != X.shape or not goal.is_floating_point() or not bool(torch.isfinite(goal).all()):
            got = f"{target.dtype} {tuple(target.shape)}"
            raise InputError(f"derive: the target is {got}; mse needs finite numbers of shape {tuple(X.shape)}")
        return goal.detach().to(X)
    labels = torch.randint(d, (length,), generator=generator) if target is None else target.reshape(-1)
    if labels.numel() != length or labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        raise InputError(
            f"derive: the target is {labels.dtype} {tuple(labels.shape)}; cross_entropy needs {length} integers, one a token"
        )
    if not bool(((labels >= 0) & (labels < d)).all()):
        raise InputError(
            f"derive: labels run from {int(labels.min())} to {int(labels.max())}; cross_entropy compares {d} logits a token, "
            f"so pass labels from 0 to {d - 1}"
        )
    return labels.tolist()


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
        target: For a loss: the values or labels that the output is compared with. By default drawn.
        loss: ``"mse"`` (the mean of the squared differences), ``"cross_entropy"`` (of each token's output with a label)
            or ``None`` for the derivative of the output itself.
        length: Tokens to draw where no inputs are given.
        seed: Of the drawn inputs and targets.

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

    def story() -> Story:
        sizes = sizes_for(block)
        parameters, tokens = prime_copy(block, sizes, seed)
        Z = block_stage(BlockAt(block, parameters, sizes=sizes, spelt=True), input_stage(tokens))
        terms = _terms(Z, symbols, loss, target_of(loss, None, tokens, seed))
        written = spelling(block)
        known = [written.known] if written else []
        return story_of(_left(loss, symbols), _sum(terms), terms, _rule(Z, symbols, loss), Z, known, SizeName(sizes))

    def symbolic() -> Matrix:
        parameters = {name: _symbols_for(symbol_of(name), shape_of(p)) for name, p in point.items()}
        answer = _symbols_for("T", shape_of(X)) if loss == "mse" else goal
        Z = block_stage(BlockAt(block, parameters, spelt=True), input_stage(_symbols_for("X", shape_of(X))))
        return _sum(_terms(Z, symbols, loss, answer))

    Z = block_stage(BlockAt(block, point), input_stage(X))
    return Derivation(names, loss, _sum(_terms(Z, symbols, loss, goal)), story, symbolic)


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
