"""Products added in place: any layout of the factors gives the same numbers, and what is turned has contiguous columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from derivations.product_layouts import ALONE, add_product, by_columns


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (2, 4, 5))])
def test_product_is_added_in_place(shapes: tuple[tuple[int, ...], tuple[int, ...]], turned: bool) -> None:
    a, b = (draw(*shape, seed=k) for k, shape in enumerate(shapes))
    b = by_columns(b) if turned else b
    expected = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    found = add_product(None, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    more = draw(*expected.shape, seed=2)
    total = more + expected
    assert add_product(more, a, b).data_ptr() == more.data_ptr()
    torch.testing.assert_close(more, total, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (3, 64, ALONE // 64), (2, 2, 3, 4)])
def test_columns_are_contiguous(shape: tuple[int, ...]) -> None:
    b = draw(*shape, seed=3)
    turned = by_columns(b)
    assert torch.equal(turned, b)
    assert turned.mT.is_contiguous()
    assert by_columns(turned) is turned
