"""The same on a GPU; skipped where there is none."""

from __future__ import annotations

import pytest
import torch

import hessiankit as hk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_hessian_agrees_with_the_processor() -> None:
    torch.manual_seed(0)
    block = hk.TransformerBlock(d_model=6, d_ff=9, d_k=4, bias=True).double()
    x, target = torch.randn(4, 5, 6).double(), torch.randn(4, 5, 6).double()
    here = hk.hessian(block, x, target).matrix
    there = hk.hessian(block.cuda(), x.cuda(), target.cuda()).matrix
    assert there.is_cuda
    assert float((there.cpu() - here).abs().max()) <= 1e-12 * float(here.abs().max())


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_check_passes(loss: str) -> None:
    torch.manual_seed(0)
    report = hk.check(hk.TransformerBlock(d_model=6, d_ff=9, d_k=4, n_heads=1).cuda(), loss=loss)
    assert report, report


def test_mixed_devices_are_one_clear_error() -> None:
    block = hk.TransformerBlock(d_model=6, d_ff=9).double().cuda()
    with pytest.raises(hk.InputError, match="inputs is on cpu, the parameters are on cuda"):
        hk.hessian(block, torch.randn(2, 3, 6).double(), torch.randn(2, 3, 6).double().cuda())
