"""Models larger than a device, and the benchmark of large ones, in small: every row is measured, with the errors of bfloat16."""

from __future__ import annotations

import pytest
import torch
from device_cases import DEVICE

import hessiankit as hk
from benchmarks import large

if DEVICE == "pretended":
    import pretended
PRETENDED = pytest.mark.skipif(DEVICE != "pretended", reason="only the pretended device has a limit that is set")

OURS = ("`hessian_operator`", "`scaled_dot_product_attention`", "`hessian`")


def test_the_benchmark_of_large_models_runs_in_small(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    large.main(["--device", DEVICE, "--small", "--errors", "--eigenvalue", "0.2M"])
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line]
    measured = [row for row in rows if len(row) == 5 and row[0].rpartition(": ")[2] in OURS]
    assert len(measured) == len(OURS)
    for row in measured:
        assert all(float(entry) >= 0 for entry in row[1:])
        assert float(row[2]) > 0
    errors = {row[0]: float(row[1]) for row in rows if len(row) == 2 and "e-" in row[1]}
    assert len(errors) == 3
    assert 1e-4 < errors["`hessian_operator`"] < 2e-2  # one rounding of bfloat16 is 4e-3
    assert errors["`hessian_operator`"] < min(error for name, error in errors.items() if name != "`hessian_operator`")


def test_rows_begin_while_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    large.main(["--device", DEVICE, "--small", "--seconds", "0"])
    assert "no time left" in capsys.readouterr().out


@PRETENDED
@pytest.mark.parametrize("offload", [True, DEVICE])
def test_a_model_larger_than_the_device_has_products(offload: bool | str) -> None:
    """Eight layers, of which the device has room for less than three; the module's own gradient is compared on the host."""
    model = hk.Transformer(13, 128, 512, 8, 2, placement="pre", max_len=3, causal=True).eval()
    layer = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    tokens = torch.tensor([[1, 2, 3]])
    expected = hk.hessian_operator(model, tokens, tokens, loss="cross_entropy")
    v = torch.randn(expected.shape[0], generator=torch.Generator().manual_seed(0))
    with pretended.memory_limit(int(2.75 * layer)):
        A = hk.hessian_operator(model, tokens, tokens, loss="cross_entropy", offload=offload)
        product, gradient = A @ v, A.gradient
    assert A.device.type == product.device.type == "cpu"
    for found, exact in ((product, expected @ v), (gradient, expected.gradient)):
        assert float((found - exact).norm()) <= 1e-5 * float(exact.norm())
    with pretended.memory_limit(layer // 2), pytest.raises(hk.OutOfMemoryError, match=r"hessian_operator: .*out of memory"):
        hk.hessian_operator(model, tokens, tokens, loss="cross_entropy", offload=offload)
