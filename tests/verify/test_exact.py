"""The exact check passes on every chapter, and it fails on formulas that are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import sympy
import torch

from derivations import vecr
from derivations.activation import KINDS
from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import ColumnScaleAt
from derivations.head_products import HeadProductAt
from derivations.matrix import Commutation, Dense, Identity, Matrix, Ones, Zero, kron
from derivations.normalization import LayerNormAt
from derivations.softmax import SoftmaxAt
from hessiankit.verify.exact import ExactRow, chapters, check_exact, run_case
from hessiankit.verify.exact_builders import by_head, by_token, linear_map
from hessiankit.verify.exact_case import ExactCase, ExactComparison, JetReference, RationalDraw, against
from hessiankit.verify.exact_cases import RATIONAL
from hessiankit.verify.exact_symbolic import is_identically_zero
from hessiankit.verify.jets import KinkError, Variables


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [chapter for chapter in chapters() if chapter != "placements"])
def test_every_closed_form_of_the_chapter_is_exact(chapter: str) -> None:
    rows = check_exact(chapter)
    assert rows
    assert all(row.passed for row in rows), "\n".join(str(row) for row in rows if not row.passed)
    assert all(row.seconds > 0 and row.name.startswith(chapter) and "entries equal" in row.note for row in rows)


def test_another_seed_is_another_point() -> None:
    def point(seed: int) -> list[Any]:
        return RationalDraw(f"{seed}/x").array(2, 3).tolist()

    assert point(0) == point(0) != point(1)
    assert all(row.passed for row in check_exact("feedforward", seed=7))


def test_chapters_are_named() -> None:
    parts = {"affine", "linear_map", "head_products", "gains", "token_embedding", "group_normalization"}
    assert parts | {"vecr", "attention", "transformer", "placements"} <= set(chapters())
    with pytest.raises(ValueError, match=r"no exact check for the chapter 'layernorm'. There are vecr, normalization"):
        check_exact("layernorm")


# What must not pass --------------------------------------------------------------------------------------------------


def failing(chapter: str) -> list[ExactRow]:
    return [row for row in check_exact(chapter) if not row.passed]


def rational(chapter: str, containing: str = "") -> dict[str, ExactRow]:
    cases = [case for case in RATIONAL if case.chapter == chapter and containing in case.name]
    return {case.name: run_case(case, "rational") for case in cases}


def replaced(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]) -> None:
    """Let a method be ``wrong(right method, instance, *arguments)``."""
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: wrong(right, *arguments))


def at_pair(i: str, j: str, change: Callable[[Matrix], Matrix]) -> Callable[..., Matrix]:
    """Return a second derivative that is changed at one pair of arguments."""
    return lambda right, at, *pair: change(right(at, *pair)) if pair == (i, j) else right(at, *pair)


MISSING = at_pair("v", "X", lambda H: Zero(*H.shape))
ONE_BLOCK = {
    "a wrong sign": (LayerNormAt, at_pair("gamma", "X", lambda H: -H), "normalization", "1 of 13 blocks: hessian('gamma', 'X')"),
    "a missing block": (ColumnScaleAt, MISSING, "gains", "1 of 7 blocks: hessian('v', 'X') differs in 6 of 108 entries"),
}


@pytest.mark.parametrize("name", ONE_BLOCK)
def test_one_wrong_second_derivative_fails_in_both_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, wrong, chapter, note = ONE_BLOCK[name]
    replaced(monkeypatch, owner, "hessian", wrong)
    rows = failing(chapter)
    assert {row.method for row in rows} == {"rational", "symbolic"}
    assert all(row.note.startswith(note) for row in rows)
    if owner is ColumnScaleAt:  # which the gains of a group norm are made of
        rows = list(check_exact("group_normalization"))
        assert {row.name for row in rows if not row.passed} == {row.name for row in rows if "gamma" in row.name}


def test_a_commutation_turned_the_wrong_way_fails_in_both_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vecr, "transpose_rule", lambda m, n: Commutation(m, n))
    rows = failing("vecr")
    assert {row.method for row in rows} == {"rational", "symbolic"}
    assert all("1 of 16 blocks: dX^T/dX differs in 8 of 36 entries" in row.note for row in rows)


def test_a_wrong_constant_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, SoftmaxAt, "hessian", lambda right, *at: Fraction(1000001, 1000000) * right(*at))
    assert not any(row.passed for row in check_exact("softmax"))


def test_the_printed_commutation_of_G_K_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """K_{d_V,d_K} in place of K_{d_K,d_V} (curvature-gap/g_k) conforms, and is right only where d_K = d_V: the cases avoid
    that."""

    def printed(right: Any, at: AttentionAt, name: str) -> Matrix:
        d_V, d_K = at.W_K.shape
        return right(at, name) @ Commutation(d_V, d_K) @ Commutation(d_V, d_K) if name == "W_K" else right(at, name)

    replaced(monkeypatch, AttentionAt, "jacobian", printed)
    rows = rational("attention", "Phi")
    assert not any(row.passed for row in rows.values())
    assert rows["sixteen Phi, X blocks, W_O"].note.startswith("1 of 31 blocks: jacobian('W_K')")


def test_exchanging_queries_and_keys_without_turning_the_softmax_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi_KQ as Lemma 2 describes it, by exchanging W_Q and W_K (curvature-gap/phi_kq), is wrong."""

    def printed(right: Any, at: AttentionAt, i: str, j: str) -> Matrix:
        if (i, j) != ("W_K", "W_Q"):
            return right(at, i, j)
        return right(AttentionAt(at.X, at.W_K, at.W_Q, at.W_V, at.W_O, at.mask, at.scale, at.weights), "W_Q", "W_K")

    replaced(monkeypatch, AttentionAt, "hessian", printed)
    rows = rational("attention")
    assert not any(row.passed for row in rows.values())
    assert rows["nine Phi, X blocks"].note.startswith("1 of 21 blocks: hessian('W_K', 'W_Q')")


def test_a_formula_that_is_right_for_relu_only_fails_for_smooth_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sigma'' the feed-forward layer and xi_kl of the block are right for ReLU alone."""
    monkeypatch.setattr(FeedForwardAt, "D_2", property(lambda at: Zero(at.U.size, at.U.size)))
    rows = {**rational("feedforward"), **rational("transformer", "smooth")}
    assert {name for name in rows if not rows[name].passed} == {name for name in rows if "smooth" in name}
    assert len(rows) == 5
    assert "formal" not in KINDS


def test_a_second_derivative_in_place_of_its_slice_transpose_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """d2S/dW_1dW_2 under the name of d2S/dW_2dW_1: same shape, as in the print (claim xi_12)."""
    swap = {("W_1", "W_2"): ("W_2", "W_1"), ("W_2", "W_1"): ("W_1", "W_2")}
    replaced(monkeypatch, FeedForwardAt, "hessian", lambda right, at, *pair: right(at, *swap.get(pair, pair)))
    rows = failing("feedforward")
    assert rows
    assert all("hessian('W_1', 'W_2')" in row.note for row in rows)


def test_second_derivatives_at_the_rows_of_another_head_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right entries in other rows, which one head cannot show."""

    def wrong(right: Any, at: HeadProductAt, i: str, j: str) -> Matrix:
        found = right(at, i, j)
        if at.heads == 1 or isinstance(found, Zero):
            return found
        return Commutation(at.heads, found.shape[0] // at.heads) @ found

    replaced(monkeypatch, HeadProductAt, "hessian", wrong)
    assert {row.name.partition(": ")[2] for row in failing("head_products")} == {
        "scores, two heads",
        "mixtures, two heads",
        "grouped queries, rotations, causal mask, all pairs",
    }


def test_copies_of_all_heads_in_turn_are_not_copies_of_each_head() -> None:
    """Heads 1, 2, 1, 2 where grouped queries need 1, 1, 2, 2: the same norm and the same shape."""
    tiled = kron(Ones(2), Identity(12)) @ kron(Commutation(2, 2), Identity(3))
    row = run(linear_map(tiled, lambda X: by_head(X, 2, 2), (2, 6), (8, 3)))
    assert not row.passed
    assert row.note.startswith("2 of 3 blocks: value differs in")


def test_references_split_and_merge_as_reshapes_do() -> None:
    X = np.arange(24, dtype=object).reshape(3, 8)
    assert by_head(X, 2, 3).tolist() == X.reshape(3, 2, 4).swapaxes(0, 1).repeat(3, 0).reshape(-1, 4).tolist()
    assert by_token(by_head(X, 2), 2).tolist() == X.tolist()


def run(build: Callable[[RationalDraw], Iterator[ExactComparison]], method: str = "rational") -> ExactRow:
    return run_case(ExactCase("test", "case", "", build), method)


def square(closed: Any) -> Callable[[RationalDraw], Iterator[ExactComparison]]:
    variables = Variables({"X": np.array([[Fraction(3)]], dtype=object)})
    reference = JetReference(variables, variables["X"] * variables["X"])
    return lambda draw: iter([ExactComparison("d(x^2)/dx", closed, reference.jacobian("X"))])


def test_only_the_exact_number_passes() -> None:
    assert run(square(np.array([[6]], dtype=object))).passed
    assert run(square(Dense(np.array([[sympy.Integer(6)]], dtype=object)))).passed
    assert "floating point" in run(square(torch.tensor([[6.0]]))).note
    assert "of type float" in run(square(np.array([[6.0]], dtype=object))).note
    assert "of type Float" in run(square(np.array([[sympy.Float(6)]], dtype=object))).note
    assert "has shape (1, 2), expected (1, 1)" in run(square(np.array([[6, 6]], dtype=object))).note
    assert "differs in 1 of 1 entries (first: 7, expected 6)" in run(square(np.array([[7]], dtype=object))).note


def test_a_formula_that_raises_or_compares_nothing_fails_its_row() -> None:
    def broken(draw: RationalDraw) -> Iterator[ExactComparison]:
        raise IndexError("off by one")
        yield

    assert run(broken).note == "1 of 1 blocks: IndexError: off by one"
    row = run(lambda draw: iter(()))
    assert not row.passed
    assert "nothing was compared" in row.note
    assert str(row).startswith("FAILED rational")


def test_arguments_must_be_those_of_the_reference() -> None:
    X = np.array([[Fraction(1), Fraction(3)]], dtype=object)
    variables = Variables({"X": X, "gamma": X[0]})
    at = LayerNormAt(X)
    row = run(lambda draw: against(at, JetReference(variables, variables["X"])))
    assert not row.passed
    assert "LayerNormAt has the arguments ['X'], expected ['X', 'gamma']" in row.note


def test_points_on_a_kink_are_drawn_again() -> None:
    drawn: list[str] = []

    def build(draw: RationalDraw) -> Iterator[ExactComparison]:
        drawn.append(draw.seed)
        if len(drawn) < 3:
            raise KinkError("relu")
        yield from square(np.array([[6]], dtype=object))(draw)

    assert run(build).passed
    assert len(set(drawn)) == 3


def test_zero_test_tells_zero_from_nearly_zero() -> None:
    x, y, s = sympy.symbols("x y s", positive=True)
    q = s**2 - x
    zero = [
        1 / sympy.sqrt(q + x) - 1 / s,
        (q + x) ** sympy.Rational(-3, 2) - s**-3,
        sympy.exp(x) * sympy.exp(2 * y) - sympy.exp(x + 2 * y),
        sympy.exp(-x) / (1 + sympy.exp(-x)) - 1 / (1 + sympy.exp(x)),
        sympy.sqrt(2) / 2 - 1 / sympy.sqrt(2),
    ]
    assert all(is_identically_zero(e) for e in zero)
    assert not any(is_identically_zero(e + sympy.Rational(1, 10**9)) for e in zero)
    assert not any(is_identically_zero(e) for e in (sympy.exp(x) - sympy.exp(y), sympy.sqrt(x) - x, x - s))


@pytest.mark.parametrize(("name", "arguments"), [("with biases, gains, shifts", 12), ("sixteen Phi, X blocks, W_O", 5)])
def test_a_case_has_all_pairs(name: str, arguments: int) -> None:
    (case,) = (case for case in RATIONAL if case.name == name)
    labels = [comparison.label for comparison in case.build(RationalDraw("0"))]
    assert len([label for label in labels if label.startswith("hessian")]) == arguments**2
