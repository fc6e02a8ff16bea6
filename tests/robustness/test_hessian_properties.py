"""What holds for the Hessian at every point, also at hard ones."""

from __future__ import annotations

import torch
from hessian_points import assert_exact, blocks, chains, exact
from hypothesis import given
from hypothesis import strategies as st

ROUNDING = 2.0**-52
"""Of the whole matrix's largest entry: attention makes blocks of terms that cancel between operations, and no float64 keeps them."""


@given(blocks(), st.integers(0, 2**16))
def test_a_block_is_exact_and_symmetric(point, also):
    found = exact(point)
    assert torch.equal(found.matrix, found.matrix.T)
    assert_exact(found, point, also=also, floor=ROUNDING)


@given(chains(), st.integers(0, 2**16))
def test_a_chain_is_exact_and_symmetric(point, also):
    found = exact(point)
    assert torch.equal(found.matrix, found.matrix.T)
    assert_exact(found, point, also=also)
