"""The token embedding against torch.nn.functional.embedding."""

import pytest
import torch
from second_order_reference import check_all_blocks, random_point
from structured_reference import check_exact_equals_floats, check_structure_of_all_blocks, integers

from derivations.arrays import to_float
from derivations.matrix import letters
from derivations.token_embedding import TokenEmbeddingAt

TOKENS = torch.tensor([4, 1, 4])
POINT = random_point(0, E=(5, 2))


def test_all_blocks_equal_autograd():
    operation = TokenEmbeddingAt(TOKENS, **POINT)
    check_all_blocks(operation, lambda E: torch.nn.functional.embedding(TOKENS, E), POINT)
    check_structure_of_all_blocks(operation, POINT["E"], sharp=("E",))


def test_exact_numbers_stay_exact():
    E = integers(0, 5, 2)
    check_exact_equals_floats(TokenEmbeddingAt(TOKENS.tolist(), E), TokenEmbeddingAt(TOKENS, to_float(E)))


def test_latex():
    assert TokenEmbeddingAt(TOKENS, POINT["E"]).jacobian("E").latex() == r"P\otimes I_{2}"
    with letters({"P": "S"}):
        assert TokenEmbeddingAt(TOKENS, POINT["E"]).jacobian("E").T.latex() == r"S^\top\otimes I_{2}"


def test_errors():
    E = POINT["E"]
    with pytest.raises(ValueError, match=r"expected integer tokens \(L,\) and E \(V, d\), got int64 tokens of shape \(1, 3\)"):
        TokenEmbeddingAt(TOKENS.reshape(1, 3), E)
    with pytest.raises(ValueError, match="got float32 tokens"):
        TokenEmbeddingAt(torch.tensor([0.5]), E)
    with pytest.raises(ValueError, match="there is no row 5 of 5"):
        TokenEmbeddingAt([5], E)
    with pytest.raises(ValueError, match="no argument is called 'tokens'"):
        TokenEmbeddingAt(TOKENS, E).jacobian("tokens")
