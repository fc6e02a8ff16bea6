"""The exact check passes on every chapter, and it fails on formulas that are wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from derivations import vecr
from derivations.attention import AttentionAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import HadamardAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.head_products import HeadProductAt
from derivations.matrix import Commutation, Dense, Identity, Matrix, Ones, Zero, kron
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.rotary import Rotations
from hessiankit.blocks import placements as eq
from hessiankit.theory.exact.block_structure import BlockStructure
from hessiankit.theory.exact.blocks import placement_case
from hessiankit.theory.exact.case import Comparison, Draw, ExactCase
from hessiankit.theory.exact.cases import CASES, by_head, linear_map
from hessiankit.theory.exact.check import ExactRow, chapters, check_exact, run_case
from hessiankit.theory.exact.jets import Variables
from hessiankit.theory.formulas import block_at


@pytest.mark.slow
@pytest.mark.parametrize("chapter", [chapter for chapter in chapters() if chapter != "placements"])
def test_every_closed_form_of_the_chapter_is_exact(chapter: str) -> None:
    rows = check_exact(chapter)
    assert rows
    assert all(row.passed for row in rows), "\n".join(str(row) for row in rows if not row.passed)
    assert all(row.seconds > 0 and row.name.startswith(chapter) and "entries equal" in row.note for row in rows)


def test_chapters_are_named() -> None:
    parts = {"affine", "linear_map", "head_products", "gains", "token_embedding", "group_normalization"}
    assert parts | {"vecr", "attention", "transformer", "placements"} <= set(chapters())
    with pytest.raises(ValueError, match=r"no exact check for the chapter 'layernorm'. There are vecr, normalization"):
        check_exact("layernorm")


# What must not pass --------------------------------------------------------------------------------------------------


def named(chapter: str, *names: str) -> list[ExactCase]:
    """Return the cases of a chapter of these names, all if there are none."""
    return [case for case in CASES if case.chapter == chapter and (not names or case.name in names)]


def at_pairs(change: Callable[[Matrix], Matrix], *pairs: tuple[str, str]) -> Callable[..., Matrix]:
    """Return a second derivative that is changed at some pairs of arguments."""
    return lambda right, at, *pair: change(right(at, *pair)) if pair in pairs else right(at, *pair)


def printed_G_K(right: Any, at: AttentionAt, name: str) -> Matrix:
    """K_{d_V,d_K} in place of K_{d_K,d_V} (curvature-gap/g_k) conforms, and is right only where d_K = d_V."""
    d_V, d_K = at.W_K.shape
    return right(at, name) @ Commutation(d_V, d_K) @ Commutation(d_V, d_K) if name == "W_K" else right(at, name)


def at_the_rows_of_another_head(right: Any, at: HeadProductAt, i: str, j: str) -> Matrix:
    """The right entries in other rows, which one head cannot show."""
    found = right(at, i, j)
    alone = at.heads == 1 or isinstance(found, Zero)
    return found if alone else Commutation(at.heads, found.shape[0] // at.heads) @ found


def branches(first: float, second: float) -> Callable[[Any, Any], Any]:
    """The equation of a pre-norm block with factors on its branches."""

    def equation(b: Any, X: Any) -> Any:
        Y = X + first * b.attention(b.norm_1(X))
        return Y + second * b.feedforward(b.norm_2(Y))

    return equation


def of_block(placement: str, *options: Any, **more: Any) -> list[ExactCase]:
    return [placement_case(BlockStructure(placement, "rmsnorm", *options, affine=False, **more))]


def at_another_equation(equation: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The jets run the block's equation; the derivation of another one, a sign or a factor away, must not pass."""
    return lambda right, _, *rest: right(equation, *rest)


SWAP = {("W_1", "W_2"): ("W_2", "W_1"), ("W_2", "W_1"): ("W_1", "W_2")}
MINUS, DIFFERS = (lambda H: -H), r"hessian\(.* differs in"
ROWS, VALUE = "ValueError: the closed form normalises rows that the block does not", "value differs in 4 of 4 entries"
WRONG: dict[str, tuple[Any, str, Callable[..., Any], list[ExactCase], str]] = {
    # the formula, what is made of it, the cases that see it, and what each of them says
    "a sign": (
        LayerNormAt, "hessian", at_pairs(MINUS, ("gamma", "X")), named("normalization", "layer norm, gamma, beta"),
        r"^1 of 13 blocks: hessian\('gamma', 'X'\)",
    ),
    "the printed G_K": (
        AttentionAt, "jacobian", printed_G_K, named("attention", "nine Phi, X blocks"), r"^1 of 21 blocks: jacobian\('W_K'\)",
    ),
    "a second derivative for its slice transpose (claim xi_12)": (
        FeedForwardAt, "hessian", lambda right, at, *pair: right(at, *SWAP.get(pair, pair)), named("feedforward", "relu"),
        r"^2 of 13 blocks: hessian\('W_1', 'W_2'\)",
    ),
    "other rows": (
        HeadProductAt, "hessian", at_the_rows_of_another_head,
        named("head_products", "scores, two heads", "mixtures, two heads"), "",
    ),
    "a commutation turned the wrong way": (
        vecr, "transpose_rule", lambda right, m, n: Commutation(m, n), named("vecr"),
        r"1 of 16 blocks: dX\^T/dX differs in 8 of 36 entries",
    ),
    "a sign in a norm of a block": (RMSNormAt, "hessian", at_pairs(MINUS, ("X", "X")), of_block("pre"), DIFFERS),
    "a sign in a group norm": (GroupNormRowsAt, "hessian", at_pairs(MINUS, ("X", "X")), of_block("group-ln"), DIFFERS),
    "a sign in a gate": (HadamardAt, "hessian", at_pairs(MINUS, ("X", "Y")), of_block("pre", "swiglu"), DIFFERS),
    "a sign in the scores": (HeadProductAt, "hessian", at_pairs(MINUS, ("P", "R")), of_block("qk-pre"), DIFFERS),
    "a rotation the wrong way round, which the value does not show": (
        Rotations, "transpose", lambda right, self: Rotations(self.cos, self.sin, self.transposed), of_block("pre", rotary=True),
        "^(?!.*value)",
    ),
    **{
        f"another equation: {name}": (block_at, "run", at_another_equation(equation), of_block(placement, "gelu"), note)
        for name, placement, equation, note in (
            ("minus attention", "pre", branches(-1, 1), ROWS),
            ("minus network", "pre", branches(1, -1), VALUE),
            ("post for pre", "pre", eq.post, ROWS),
            ("lns without its factor", "lns", branches(1, 1), ROWS),
            ("another place of the factor", "lns", eq.lns_attention_ln, VALUE),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_formula_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, wrong, cases, note = WRONG[name]
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *arguments: wrong(right, *arguments))
    rows = [run_case(case) for case in cases]
    assert rows
    assert all(not row.passed and re.search(note, row.note) for row in rows), [row.note for row in rows]


def test_a_formula_that_is_right_for_relu_only_fails_for_smooth_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sigma'' the feed-forward layer is right for ReLU alone."""
    monkeypatch.setattr(FeedForwardAt, "D_2", property(lambda at: Zero(at.U.size, at.U.size)))
    failed = [case.name for case in named("feedforward") if not run_case(case).passed]
    assert failed == ["any smooth activation, biases"]


def test_copies_of_all_heads_in_turn_are_not_copies_of_each_head() -> None:
    """Heads 1, 2, 1, 2 where grouped queries need 1, 1, 2, 2: the same norm and the same shape."""
    tiled = kron(Ones(2), Identity(12)) @ kron(Commutation(2, 2), Identity(3))
    row = run(linear_map(tiled, lambda X: by_head(X, 2, 2), (2, 6), (8, 3)))
    assert not row.passed
    assert row.note.startswith("2 of 3 blocks: value differs in")


def run(build: Callable[[Draw], Iterator[Comparison]]) -> ExactRow:
    return run_case(ExactCase("test", "case", "", build))


def square(closed: Any) -> Callable[[Draw], Iterator[Comparison]]:
    point = Variables({"X": np.array([[Fraction(3)]], dtype=object)})
    expected = point.jacobian(point.jets["X"] * point.jets["X"], "X")
    return lambda draw: iter([Comparison("d(x^2)/dx", closed, expected)])


def test_only_the_exact_number_passes() -> None:
    assert run(square(np.array([[6]], dtype=object))).passed
    assert run(square(Dense(np.array([[Fraction(6)]], dtype=object)))).passed
    assert "floating point" in run(square(torch.tensor([[6.0]]))).note
    assert "of type float" in run(square(np.array([[6.0]], dtype=object))).note
    assert "has shape (1, 2), expected (1, 1)" in run(square(np.array([[6, 6]], dtype=object))).note
    assert "differs in 1 of 1 entries (first: 7, expected 6)" in run(square(np.array([[7]], dtype=object))).note


def test_a_formula_that_raises_or_compares_nothing_fails_its_row() -> None:
    def broken(draw: Draw) -> Iterator[Comparison]:
        raise IndexError("off by one")
        yield

    assert run(broken).note == "1 of 1 blocks: IndexError: off by one"
    row = run(lambda draw: iter(()))
    assert not row.passed
    assert "nothing was compared" in row.note
    assert str(row).startswith("FAILED modular")


@pytest.mark.parametrize(("name", "arguments"), [("with biases, gains, shifts", 12), ("sixteen Phi, X blocks, W_O", 5)])
def test_a_case_has_all_pairs(name: str, arguments: int) -> None:
    (case,) = (case for case in CASES if case.name == name)
    labels = [comparison.label for comparison in case.build(Draw("0"))]
    assert len([label for label in labels if label.startswith("hessian")]) == arguments**2
