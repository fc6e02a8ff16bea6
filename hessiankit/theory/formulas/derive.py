"""``derive``: a Jacobian or a second derivative as an expression in vec_r that can be read, computed and bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, nn

from derivations.arrays import Array
from derivations.composition import gauss_newton
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.matrix import Matrix, Named, add
from derivations.operation import Lettered, Operation, shape_of
from derivations.stage import Stage, Term, recorded
from hessiankit.blocks import TransformerBlock
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.theory.formulas.assignments import Assignments, Recorder, indexed
from hessiankit.theory.formulas.chapters import CHAPTERS, of_chapter, of_module
from hessiankit.theory.formulas.matrix_expressions import matrix_assignments
from hessiankit.theory.formulas.result import Derivation
from hessiankit.theory.formulas.subject import LOSS, Subject, of_block, target_of
from hessiankit.theory.formulas.symbols import SizeName
from hessiankit.theory.formulas.theorems import BLOCKS, PAPERS, statement
from hessiankit.theory.formulas.typesetting import Story, story_of


def subject_of(
    what: object, wrt: str | Sequence[str] | None, inputs: Any, target: Tensor | None, length: int, seed: int
) -> Subject:
    """Return the subject of a derivation: a module, a chapter by name, or a paper's statement by number."""
    if isinstance(what, nn.Module):
        if any(isinstance(part, TransformerBlock) for part in what.modules()):
            return of_block(what, inputs, length, seed)
        return of_module(what, inputs, target, length, seed)
    if not isinstance(what, str):
        got = type(what).__name__
        raise InputError(f"derive: got {got}; pass a module, the name of a chapter or a statement such as 'curvature-gap/thm3'")
    if what.lower() in CHAPTERS:
        return of_chapter(what.lower(), wrt, inputs, target, length, seed)
    paper, theorem = statement(what)
    if theorem.chapter in BLOCKS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            block = TransformerBlock(4, 5, d_k=2, affine=False, eps=0.0, **BLOCKS[theorem.chapter]).double()
        subject = of_block(block, inputs, length, seed, branch=theorem.branch)
    else:
        arguments = [wrt] if isinstance(wrt, str) else list(wrt or ())
        subject = of_chapter(theorem.chapter, [*theorem.given, *arguments], inputs, None, length, seed)
    title = f"of {theorem.place} of {PAPERS[paper]}"
    return replace(subject, wrt=subject.names(theorem.wrt), title=title, claims=theorem.ids(paper), loss=theorem.loss)


_PROBABILITIES = {"P": r"\Pi", "Y": r"\text{Labels}", "p_i": r"\pi_i"}


@checked("derive", leave=("what", "wrt", "inputs", "target"))
def derive(
    what: nn.Module | str,
    *,
    wrt: str | Sequence[str] | None = None,
    inputs: Any = None,
    target: Tensor | None = None,
    loss: str | None = None,
    length: int = 3,
    seed: int = 0,
) -> Derivation:
    r"""Derive a Jacobian or a second derivative in closed form: of a block, of a layer, or as a paper's theorem states it.

    Args:
        what: A ``hessiankit.TransformerBlock`` of any placement, in float64 or float32; a module of ``torch.nn`` (``Linear``,
            ``LayerNorm``, ``RMSNorm``, ``Softmax``, ``Embedding``, an activation, ``MSELoss``, ``CrossEntropyLoss``); a module of
            your own made of operations that have chapters, which is traced; the name of a chapter ("layernorm", "attention",
            "feedforward", ...); or a statement of a paper by number or by its id in the ledger ("curvature-gap/thm3"), corrected
            where it is wrong in print.
        wrt: One or two arguments: dotted names, the letters of the papers ("W_Q", "Q", "1", "b_2"), or "query", "key",
            "value", "output", "up", "down", "gate", "input". A name alone, or one name: the Jacobian. By default what the
            theorem differentiates; of a block ("query", "value").
        inputs: One sequence, ``(L, d)`` or ``(1, L, d)``. By default one is drawn. For ``Embedding``: integer tokens. For a
            module of your own: its argument, a tuple of arguments or a dict of keyword arguments; X is their first tensor of
            floating point.
        target: Values or labels that a loss compares the output with. By default drawn; for a chapter that is a loss, zeros,
            or label i in row i.
        loss: ``"mse"`` (the mean of the squared differences), ``"cross_entropy"`` (of each token's output with a label)
            or ``None`` for the derivative of the output itself.
        length: Tokens to draw where no inputs are given.
        seed: Seed of the drawn inputs, targets and, for a name, parameters.

    Returns:
        A :class:`Derivation`; printing it shows the formula and the objects it refers to. A ``Linear`` is Y = X W + 1 b^T with
        W the transpose of ``weight``, in whose order the rows and columns of W are.

    Raises:
        InputError: If a name is not known, or the input or target does not fit.

    >>> import hessiankit as hk
    >>> print(hk.derive(hk.TransformerBlock(4, 5, affine=False), wrt="down"))
    ∂Z/∂W_2 = J_Z (σ(U) ⊗ I_d)      (12 x 20)
        J_Z = (diag(ρ_Z⁻¹) ⊗ I_d) (I_L ⊗ C_d - 1/d V_Z V_Zᵀ)
        V_Z = blockdiag_i(s̊_i)
    >>> print(hk.derive("linear", wrt=("X", "W")))
    ∂²Y/(∂X ∂W) = (I_L ⊗ K_{d_o,L} ⊗ I_d) (vec_r(I_L) ⊗ I_{dd_o}) K_{d_o,d}      (216 x 24)
    """
    subject = subject_of(what, wrt, inputs, target, length, seed)
    loss = subject.loss if loss is None else loss
    names = subject.names(subject.wrt if wrt is None else wrt)
    symbols = [subject.symbols[name] for name in names]
    try:
        Z = subject.stage(subject.point)
        output = Z.value
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"derive: {error}") from error
    if Z.symbol == LOSS and loss is not None:
        raise InputError(f"derive: loss={loss!r} of {what!r}, which is a loss itself; drop loss=")
    goal = target_of(loss, None if Z.symbol == LOSS else target, output, seed)

    story = partial(_story, subject, symbols, loss, seed)
    listed, formula = partial(_assignments, subject, names, loss, goal), partial(_matrix_expr, subject, symbols, loss, seed)
    matrix = _sum(_terms(Z, symbols, loss, goal))
    return Derivation(names, loss, matrix, story, listed, formula, subject.sizes, subject.title, subject.claims)


def _printed(subject: Subject, symbols: Sequence[str], loss: str | None, seed: int) -> tuple[Stage, SizeName, list[Term]]:
    """Return the value at sizes that print as letters, their names, and the summands of the derivative there."""
    Z, sizes = subject.printed()
    return Z, sizes, _terms(Z, symbols, loss, target_of(loss, None, Z.value, seed))


def _story(subject: Subject, symbols: Sequence[str], loss: str | None, seed: int) -> Story:
    Z, sizes, terms = _printed(subject, symbols, loss, seed)
    values, rule = [*subject.known, *subject.values], _rule(Z, symbols, loss)
    return story_of(_left(Z, loss, symbols), _sum(terms), terms, rule, Z, values, sizes)


def _matrix_expr(subject: Subject, symbols: Sequence[str], loss: str | None, seed: int, named: bool) -> Any:
    """Return the derivative as a SymPy matrix expression, or with ``named`` its named parts and the result in their names."""
    _, sizes, terms = _printed(subject, symbols, loss, seed)
    matrix = _sum(terms)
    rows, result = matrix_assignments(matrix.matrix if isinstance(matrix, Named) else matrix, sizes)
    if named:
        return rows, result
    return reduce(lambda whole, row: whole.xreplace(dict([row])), reversed(rows), result)


def _assignments(subject: Subject, names: Sequence[str], loss: str | None, goal: Any) -> Assignments:
    """Return the derivative as a list of assignments in the letters of the subject."""
    inputs = {name: _symbols_for(subject.symbols[name], shape_of(array)) for name, array in subject.point.items()}
    letters = {subject.symbols[name]: array for name, array in inputs.items()}
    recorder = Recorder(reserved={symbol for array in letters.values() for symbol in array.reshape(-1)} | {*subject.numbers})
    with recorded(recorder.values):
        Z = subject.stage(inputs)
        value = Z.value
        if loss == "mse":
            letters["Target"] = goal = _symbols_for("Target", shape_of(value))
        if loss is not None:
            value = recorder.values(LOSS, _loss_at(loss, Z, goal).value)
    if subject.frozen is not None:  # its letters are those of no variable
        inputs = {name: array.copy() for name, array in inputs.items()}
        inputs[names[0]][subject.frozen] = sympy.Dummy()
    results, columns = value.reshape(-1).tolist(), [inputs[name].reshape(-1).tolist() for name in names]
    if len(names) == 2:
        matrix = recorder.hessian(results, columns[0], columns[0] if names[0] == names[1] else columns[1])
    else:
        matrix = recorder.jacobian(results, *columns)
    matrices = {letter: sympy.ImmutableDenseMatrix(array.reshape(len(array), -1)) for letter, array in letters.items()}
    return recorder.assignments(matrix, matrices, subject.numbers)


def _sum(terms: Sequence[Term]) -> Matrix:
    return add(*(term.matrix for term in terms))


def _terms(Z: Stage, names: Sequence[str], loss: str | None, answer: Any) -> list[Term]:
    """Return the summands of the derivative, each with its meaning; one that is zero if there is no other."""
    if loss is None:
        zero = Term(Z.jacobian(*names) if len(names) == 1 else Z.hessian(*names), "zero at every point")
        return Z.terms(*names) or [zero]
    outer = _loss_at(loss, Z, answer)
    if loss == "cross_entropy":
        outer = Lettered(outer, _PROBABILITIES)
    if len(names) == 1:
        gradient = outer.jacobian(next(iter(outer.arguments))) @ Z.jacobian(*names)
        return [Term(gradient, f"gradient of the loss with respect to ${Z.symbol}$ times the first derivative of ${Z.symbol}$")]
    parts = gauss_newton(outer, Z, *names)
    first = f"second derivative of the loss between first derivatives of ${Z.symbol}$"
    second = f"gradient of the loss times the second derivative of ${Z.symbol}$"
    return [
        Term(parts.outer, f"Gauss-Newton (outer-product) term: {first}"),
        Term(parts.functional, f"residual (functional) term: {second}"),
    ]


def _loss_at(loss: str, Z: Stage, answer: Any) -> Operation:
    return MeanSquaredErrorAt(Z.value, answer) if loss == "mse" else CrossEntropyAt(Z.value, answer)


def _rule(Z: Stage, names: Sequence[str], loss: str | None) -> str:
    if loss is not None:
        rule = "chain rule" if len(names) == 1 else "Gauss-Newton split"
        return f"{rule} for the loss ({'squared error' if loss == 'mse' else 'cross entropy'}, a mean) of ${Z.symbol}$"
    return Z.rule_of(*names)


def _left(Z: Stage, loss: str | None, symbols: Sequence[str]) -> str:
    denominator = r"\,".join(rf"\partial {symbol}" for symbol in symbols)
    return rf"\frac{{\partial{'^2' if len(symbols) == 2 else ''} {Z.symbol if loss is None else LOSS}}}{{{denominator}}}"


def _symbols_for(letter: str, shape: tuple[int, ...]) -> Array:
    """Return an array of real symbols with indices from 1."""
    entries = np.empty(shape, dtype=object)
    for index in np.ndindex(shape):
        entries[index] = sympy.Symbol(indexed(letter, index), real=True)
    return entries
