"""A diagonal and pairs: what norms, entrywise functions and losses make of the curvature of a row."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import cross_entropy, draw, mse
from torch import Tensor

from derivations.loss import CrossEntropy, MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
from derivations.row_curvature import DenseRows, RowCurvature, of_loss, through_entries, through_norm

ROWS, WIDTH = 3, 5


def dense(K: RowCurvature) -> Tensor:
    pairs = torch.einsum("nri,nrj->rij", K.a, K.b)
    return torch.diag_embed(K.D) + pairs + pairs.mT


def some(width: int = WIDTH) -> RowCurvature:
    return RowCurvature(draw(ROWS, width), draw(2, ROWS, width, seed=2), draw(2, ROWS, width, seed=3))


def hessian_of_rows(f: object, x: Tensor) -> Tensor:
    """(R, w, w) by automatic differentiation, reverse over reverse, of a sum over rows."""
    whole = torch.autograd.functional.hessian(f, x)
    return torch.stack([whole[n, :, n] for n in range(len(x))])


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("width", [WIDTH, 2, 1])
@pytest.mark.parametrize("primitive", [LayerNorm(1, 0.3), RMSNorm(1, 0.3), RMSNorm()])
def test_norms(primitive: LayerNorm | RMSNorm, width: int, gain: bool) -> None:
    """The norm by hand, followed by a quadratic form and a linear one: its Hessian is what K becomes."""
    x, K, w = draw(ROWS, width, seed=4), some(width), draw(ROWS, width, seed=5)
    gamma = draw(width, seed=6) if gain else None
    eps = torch.finfo(x.dtype).eps if primitive.eps is None else primitive.eps
    inputs = [x] if gamma is None else [x, gamma]
    y0 = primitive.value(*inputs)

    def loss(z: Tensor) -> Tensor:
        m = z - z.mean(-1, keepdim=True) if isinstance(primitive, LayerNorm) else z
        y = m / (m.square().mean(-1, keepdim=True) + eps).sqrt()
        step = (y if gamma is None else y * gamma) - y0
        return torch.einsum("ri,rij,rj->", step, dense(K), step) / 2 + (w * step).sum()

    expected = hessian_of_rows(loss, x)
    torch.testing.assert_close(dense(through_norm(primitive, inputs, w, K)), expected, rtol=0, atol=1e-12)
    without = through_norm(primitive, inputs, None, K)
    bent = dense(through_norm(primitive, inputs, w, RowCurvature(0 * K.D, 0 * K.a, 0 * K.b)))
    torch.testing.assert_close(dense(without) + bent, expected, rtol=0, atol=1e-12)


def test_entrywise_functions() -> None:
    x, K, w = draw(ROWS, WIDTH, seed=4), some(), draw(ROWS, WIDTH, seed=5)

    def loss(z: Tensor) -> Tensor:
        step = torch.sin(z) - torch.sin(x)
        return torch.einsum("ri,rij,rj->", step, dense(K), step) / 2 + (w * step).sum()

    found = through_entries(torch.cos(x), -w * torch.sin(x), K)
    torch.testing.assert_close(dense(found), hessian_of_rows(loss, x), rtol=0, atol=1e-12)


def test_losses() -> None:
    z, target, labels, one = draw(ROWS, WIDTH), draw(ROWS, WIDTH, seed=2), torch.tensor([2, -100, 4]), torch.tensor(1.0).double()
    found = of_loss(MeanSquaredError(15.0), [z, target], one)
    assert found is not None
    torch.testing.assert_close(dense(found), hessian_of_rows(lambda x: mse(x, target), z), rtol=0, atol=1e-14)
    found = of_loss(CrossEntropy(), [z, labels], one)
    assert found is not None
    torch.testing.assert_close(dense(found), hessian_of_rows(lambda x: cross_entropy(x, labels), z), rtol=0, atol=1e-14)
    assert of_loss(LayerNorm(), [z], one) is None


def test_forms_of_both_kinds() -> None:
    K, M, T = some(), draw(7, WIDTH, seed=8), draw(ROWS, 4, WIDTH, seed=9)
    for form in (K, DenseRows(dense(K))):
        torch.testing.assert_close(form.diagonal(), dense(K).diagonal(dim1=1, dim2=2), rtol=0, atol=1e-13)
        torch.testing.assert_close(form.forms(M), torch.einsum("si,rij,sj->rs", M, dense(K), M), rtol=0, atol=1e-13)
        pulled = T @ dense(K) @ T.mT
        torch.testing.assert_close(form.pulled(T, full=True), pulled, rtol=0, atol=1e-12)
        torch.testing.assert_close(form.pulled(T, full=False), pulled.diagonal(dim1=1, dim2=2), rtol=0, atol=1e-12)


def test_rows_of_rows() -> None:
    K, T = draw(6, 2, 2), draw(3, 5, 4, seed=2)
    K = K + K.mT
    pair = torch.stack([torch.block_diag(*K[2 * n : 2 * n + 2]) for n in range(3)])
    torch.testing.assert_close(DenseRows(K).pulled(T, full=True), T @ pair @ T.mT, rtol=0, atol=1e-13)
