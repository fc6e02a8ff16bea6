"""The exact check of the parts of layers refuses what is nearly right."""

from __future__ import annotations

import numpy as np
import pytest

from derivations.gains import ColumnScaleAt
from derivations.head_products import HeadProductAt
from derivations.matrix import Commutation, Identity, Matrix, Ones, Zero, kron
from hessiankit.verify.exact import ExactRow, chapters, check_exact, run_case
from hessiankit.verify.exact_builders import by_head, by_token, linear_map
from hessiankit.verify.exact_case import ExactCase
from hessiankit.verify.exact_cases import RATIONAL


def test_every_part_is_a_chapter_of_the_check() -> None:
    names = {"affine", "linear_map", "head_products", "gains", "token_embedding", "group_normalization"}
    assert names <= {case.chapter for case in RATIONAL} & set(chapters())


def test_copies_of_all_heads_in_turn_are_not_copies_of_each_head() -> None:
    """Heads 1, 2, 1, 2 where grouped queries need 1, 1, 2, 2: the same norm and the same shape."""
    tiled = kron(Ones(2), Identity(12)) @ kron(Commutation(2, 2), Identity(3))
    row = run_case(ExactCase("test", "tiled", "", linear_map(tiled, lambda X: by_head(X, 2, 2), (2, 6), (8, 3))), "rational")
    assert not row.passed
    assert row.note.startswith("2 of 3 blocks: value differs in")


def test_references_split_and_merge_as_reshapes_do() -> None:
    X = np.arange(24, dtype=object).reshape(3, 8)
    assert by_head(X, 2, 3).tolist() == X.reshape(3, 2, 4).swapaxes(0, 1).repeat(3, 0).reshape(-1, 4).tolist()
    assert by_token(by_head(X, 2), 2).tolist() == X.tolist()


def failing(chapter: str) -> list[ExactRow]:
    return [row for row in check_exact(chapter) if not row.passed]


def test_second_derivatives_at_the_rows_of_another_head_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right entries in other rows, which one head cannot show."""
    right = HeadProductAt.hessian

    def wrong(at: HeadProductAt, i: str, j: str) -> Matrix:
        found = right(at, i, j)
        if at.heads == 1 or isinstance(found, Zero):
            return found
        return Commutation(at.heads, found.shape[0] // at.heads) @ found

    monkeypatch.setattr(HeadProductAt, "hessian", wrong)
    assert {row.name for row in failing("head_products")} == {
        "head_products: scores, two heads",
        "head_products: mixtures, two heads",
        "head_products: grouped queries, rotations, causal mask, all pairs",
    }


def test_a_missing_mixed_block_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ColumnScaleAt.hessian

    def without(at: ColumnScaleAt, i: str, j: str) -> Matrix:
        found = right(at, i, j)
        return Zero(*found.shape) if (i, j) == ("v", "X") else found

    monkeypatch.setattr(ColumnScaleAt, "hessian", without)
    rows = failing("gains")
    assert [row.method for row in rows] == ["rational", "symbolic"]
    assert all("1 of 7 blocks: hessian('v', 'X') differs in 6 of 108 entries" in row.note for row in rows)
    of_groups = check_exact("group_normalization")
    assert {row.name for row in of_groups if not row.passed} == {row.name for row in of_groups if "gamma" in row.name}
