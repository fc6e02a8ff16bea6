"""Linear maps of vec_r against torch's reshape, transpose, repeat_interleave, mean and indexing."""

import math

import pytest
import torch
from second_order_reference import check_all_blocks, random_point
from structured_reference import check_structure, integers

from derivations.linear_map import LinearMapAt, mean_rows, merge_heads, split_heads, take_row

L, H, W = 3, 2, 4
X = random_point(0, X=(L, H * W))["X"]


def split(x, repeat=1):
    """(L, H W) -> (H r, L, W) -> (H r L, W), as Hugging Face's repeat_kv does it."""
    return x.view(L, H, W).transpose(0, 1).repeat_interleave(repeat, 0).reshape(-1, W)


@pytest.mark.parametrize("repeat", [1, 3])
def test_splitting_heads(repeat):
    matrix = split_heads(L, H, W, repeat)
    point = LinearMapAt(X, matrix, (H * repeat * L, W))
    check_all_blocks(point, lambda X: split(X, repeat), {"X": X})
    assert torch.equal(point.value, split(X, repeat))
    check_structure(matrix, X, sharp=True)
    assert matrix.norm_bound() == math.sqrt(repeat)


def test_merging_heads_undoes_splitting():
    heads = split(X)
    merge = merge_heads(L, H, W)
    assert torch.equal((merge @ heads.reshape(-1)).reshape(L, H * W), X)
    assert (merge @ split_heads(L, H, W)).latex() == "I_{24}"
    check_structure(merge, X, sharp=True)
    assert merge.norm_bound() == 1.0


def test_rows():
    for index in (0, 1, -1):
        matrix = take_row(L, H * W, index)
        check_all_blocks(LinearMapAt(X, matrix, (1, H * W)), lambda X, i=index: X[i].reshape(1, -1), {"X": X})
        check_structure(matrix, X, sharp=True)
    mean = mean_rows(L, H * W)
    check_all_blocks(LinearMapAt(X, mean, (1, H * W)), lambda X: X.mean(0, keepdim=True), {"X": X})
    check_structure(mean, X, sharp=True)


def test_exact_numbers_are_only_moved():
    exact = integers(0, L, H * W)
    moved = LinearMapAt(exact, split_heads(L, H, W, 2), (2 * H * L, W)).value
    assert moved.tolist() == exact.reshape(L, H, W).swapaxes(0, 1).repeat(2, 0).reshape(-1, W).tolist()


def test_latex():
    assert split_heads(L, H, W).latex() == r"K_{2,3}\otimes I_{4}"
    assert split_heads(L, H, W, 5).latex() == (
        r"\left(I_{2}\otimes \mathbf{1}_{5}\otimes I_{12}\right)\,\left(K_{2,3}\otimes I_{4}\right)"
    )
    assert merge_heads(L, H, W).latex() == r"K_{3,2}\otimes I_{4}"
    assert take_row(L, W, -1).T.latex() == r"e_{2}\otimes I_{4}"


def test_errors():
    with pytest.raises(ValueError, match=r"LinearMapAt: X of shape \(3, 8\) to \(2, 8\) needs a matrix of shape \(16, 24\)"):
        LinearMapAt(X, split_heads(L, H, W), (2, 8))
    with pytest.raises(ValueError, match="take_row: there is no row 3 of 3"):
        take_row(L, W, 3)
    with pytest.raises(ValueError, match="no argument is called 'Y'"):
        LinearMapAt(X, mean_rows(L, H * W), (1, H * W)).hessian("X", "Y")
