"""The pictures of the pages on vec_r: their formulas against automatic differentiation, and what is written beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from curvature_reference import mse, reverse_over_reverse
from figure_files import read

from figures.vec_r_pictures import Layers, block, data, draw, sites


def twice(model: Layers) -> torch.Tensor:
    """Return the Hessian in W_1 and W_2 by reverse over reverse, which shares nothing with the figure."""
    X, T = data()
    return reverse_over_reverse(model, X, T, mse)


def test_the_formula_is_the_block() -> None:
    found, expected = block(), twice(Layers(bent=False))
    assert (found.formula - expected[:6, 6:]).abs().max() < 1e-12 * expected[:6, 6:].abs().max()
    assert found.functional.abs().max() > found.gauss_newton.abs().max()  # as docs/concepts/second_derivatives.md says


def test_the_sites_add_up() -> None:
    expected = twice(Layers(bent=True))
    assert (sum(sites().values()) - expected).abs().max() < 1e-12 * expected.abs().max()
    assert torch.linalg.eigvalsh(sites()["loss"])[0] > -1e-12
    assert all(term.abs().max() > 1e-2 for term in sites().values())


@pytest.mark.slow
def test_what_is_written(tmp_path: Path) -> None:
    *pictures, numbers = draw(tmp_path, quick=True)
    assert len(pictures) == 6
    assert all(path.stat().st_size > 5000 for path in pictures)
    expected = twice(Layers(bent=False))[:6, 6:]
    rows = read(numbers)
    assert len(rows) == 36
    for row in rows:
        assert float(row["hessian"]) == pytest.approx(float(expected[int(row["row"]), int(row["column"])]), rel=1e-10, abs=1e-12)
        assert float(row["gauss_newton"]) + float(row["functional"]) == pytest.approx(float(row["hessian"]), abs=1e-12)
