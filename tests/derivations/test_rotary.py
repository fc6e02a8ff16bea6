"""Rotary embeddings against rotate_half written with torch.cat, and the properties that make them what they are."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from second_order_reference import random_point, relative_error
from structured_reference import check_structure

from derivations.rotary import Rotations, rotary

L, W, H = 5, 6, 2


def rotate_half(x):
    return torch.cat((-x[..., W // 2 :], x[..., : W // 2]), -1)


def turned(x, theta):
    """q cos + rotate_half(q) sin for x of shape (H, L, W), as in Hugging Face's modeling_llama."""
    inverse_frequencies = 1.0 / (theta ** (torch.arange(0, W, 2, dtype=torch.float64) / W))
    frequencies = torch.outer(torch.arange(L, dtype=torch.float64), inverse_frequencies)
    angles = torch.cat((frequencies, frequencies), -1)
    return x * angles.cos() + rotate_half(x) * angles.sin()


@pytest.mark.parametrize("theta", [10000.0, 7.0])
def test_it_is_rotate_half(theta):
    x = random_point(0, x=(H, L, W))["x"]
    matrix = rotary(L, W, H, theta)
    assert relative_error((matrix @ x.reshape(-1)).reshape(H, L, W), turned(x, theta)) <= 1e-15
    check_structure(matrix, x, sharp=True)


def test_exact_and_scaled_angles():
    cos, sin = (np.array([[Fraction(n, 5)], [Fraction(2 * n, 5)]], dtype=object) for n in (3, 4))
    matrix = rotary(2, 2, cos=cos, sin=sin)
    assert (matrix @ np.array([5, 0, 0, 5], dtype=object)).tolist() == [3, 4, -8, 6]
    assert (matrix.T @ matrix).dense().tolist() == np.diag([1, 1, 4, 4]).tolist()
    assert matrix.norm_bound() == pytest.approx(2, abs=1e-15)  # the second pair is also stretched
    assert rotary(2, 2, cos=cos[:1].repeat(2, 0), sin=sin[:1].repeat(2, 0)).norm_bound() == pytest.approx(1, abs=1e-15)


def test_errors():
    ones = torch.ones(L, W // 2)
    with pytest.raises(ValueError, match="expected an even width"):
        rotary(L, 3)
    with pytest.raises(ValueError, match="both or none of cos and sin"):
        rotary(L, W, cos=ones)
    with pytest.raises(ValueError, match=r"cos and sin need shape \(4, 3\), got \(5, 3\)"):
        rotary(4, W, cos=ones, sin=ones)
    with pytest.raises(ValueError, match=r"Rotations: cos and sin need one shape \(L, w/2\)"):
        Rotations(ones, ones[:1])
