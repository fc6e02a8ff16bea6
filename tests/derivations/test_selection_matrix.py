"""The selection matrix against torch's indexing and one_hot."""

import numpy as np
import pytest
import torch
from structured_reference import check_structure, integers

from derivations.matrix import letters
from derivations.selection import Selection


def test_it_is_the_one_hot_matrix():
    indices = [3, 0, 3, 1, 3]
    P = Selection(indices, 5)
    assert torch.equal(P.dense(), torch.nn.functional.one_hot(torch.tensor(indices), 5).double())
    check_structure(P, P.dense(), sharp=True)
    check_structure(P.T, P.dense(), sharp=True)
    assert P.norm_bound() ** 2 == pytest.approx(3, abs=1e-14)


def test_exact_rows_are_added():
    E = integers(0, 3, 2)
    P = Selection([1, 1, 0], 2)
    assert (P.T @ E).tolist() == [E[2].tolist(), (E[0] + E[1]).tolist()]
    assert (P @ E[:2]).tolist() == E[[1, 1, 0]].tolist()
    assert P.T.dense(np.zeros(0, dtype=object)).tolist() == [[0, 0, 1], [1, 1, 0]]


def test_latex():
    assert [m.latex() for m in (Selection([0], 2), Selection([0], 2).T, Selection([0], 2, r"e_{0}^\top").T)] == [
        "P",
        r"P^\top",
        "e_{0}",
    ]
    with letters({"P": "Q", "Q": "R"}):
        assert Selection([0], 2).T.T.latex() == "Q"


def test_errors():
    with pytest.raises(ValueError, match="Selection: there is no row 2 of 2; rows are numbered 0 to 1"):
        Selection([0, 2], 2)
    with pytest.raises(ValueError, match="there is no row -1 of 2"):
        Selection([-1], 2)
