"""Arguments that cannot be used, and modules that cannot be treated: one clear error each, before anything is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, assert_one_clear_error, draw
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.engine.problem import task


def block(**options: object) -> hk.TransformerBlock:
    torch.manual_seed(0)
    return hk.TransformerBlock(d_model=4, d_ff=5, **options).double()  # type: ignore[arg-type]


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 4)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[1, 2, 0] = float("nan")
    return x


def spoiled(name: str, value: float) -> hk.TransformerBlock:
    module = block()
    module.get_parameter(name).data[0] = value
    return module


def on_two_devices() -> hk.TransformerBlock:
    module = block()
    module.norm_2 = nn.LayerNorm(4, device="meta", dtype=torch.float64)
    return module


def of_two_dtypes() -> hk.TransformerBlock:
    module = block()
    module.norm_2 = nn.LayerNorm(4, dtype=torch.float32)
    return module


def frozen() -> hk.TransformerBlock:
    return block().requires_grad_(False)


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "wrong feature size": (lambda: hk.hessian(block(), data(2, 3, 5), data()), r"called on inputs of shape \(2, 3, 5\), raised RuntimeError"),
    "NaN in the input": (lambda: hk.hessian(block(), with_nan(data()), data()), r"NaN or infinity, first at index \(1, 2, 0\)"),
    "NaN in the target": (lambda: hk.hessian(block(), data(), with_nan(data())), "target contains NaN"),
    "NaN in a weight": (lambda: hk.hessian(spoiled("attention.W_Q", float("nan")), data(), data()), r"'attention.W_Q' contains NaN"),
    "infinite weight": (lambda: hk.hessian(spoiled("norm_1.weight", float("inf")), data(), data()), r"'norm_1.weight' contains NaN or"),
    "integer dtype": (lambda: hk.hessian(block(), data().long(), data()), r"torch.int64 but the module has no embedding"),
    "complex dtype": (lambda: hk.hessian(block(), data().cdouble(), data()), "complex128"),
    "another float": (lambda: hk.hessian(block(), data().float(), data()), r"inputs is torch.float32, the parameters are torch.float64"),
    "constant row, eps 0": (lambda: hk.hessian(block(eps=0.0), torch.zeros(2, 3, 4).double(), data()), r"'norm_1' meets row \(0, 0\)"),
    "empty batch": (lambda: hk.hessian(block(), data(2, 3, 4)[:0], data()[:0]), r"shape \(0, 3, 4\), with no entries"),
    "no tokens": (lambda: hk.hessian(block(), data(2, 3, 4)[:, :0], data()[:, :0]), "with no entries"),
    "target of another shape": (lambda: hk.hessian(block(), data(), data(2, 4, 3)), r"target has shape \(2, 4, 3\), the module's output"),
    "target that would broadcast": (lambda: hk.hessian(block(), data(), data(4)), "nothing is broadcast"),
    "target missing": (lambda: hk.hessian(block(), data()), "needs a target"),
    "two devices": (lambda: hk.hessian(on_two_devices(), data(), data()), "several devices: .* on cpu, 'norm_2.weight' on meta"),
    "meta parameters": (lambda: hk.hessian(block().to("meta"), data(), data()), "no values"),
    "two dtypes": (lambda: hk.derive(of_two_dtypes(), wrt="W_Q"), "several dtypes"),
    "no parameters": (lambda: hk.hessian(frozen(), data(), data()), "no parameters that require grad"),
    "unknown loss": (lambda: hk.hessian(block(), data(), data(), loss="hinge"), "loss='hinge' is not known"),
    "unknown parameter": (lambda: hk.hessian(block(), data(), data(), params=["W"]), r"params=\['W'\]: this TransformerBlock has no such parameter"),
    "not a module": (lambda: hk.hessian(lambda x: x, data(), data()), "expected a torch.nn.Module, got function"),  # type: ignore[arg-type]
    "dropout": (lambda: hk.hessian(nn.Sequential(block(), nn.Dropout(0.1)), data(), data()), "dropout layer .* call module.eval"),
    "float labels": (lambda: hk.hessian(block(), data(), data(2, 3), loss="cross_entropy"), "needs integer class labels"),
    "label out of range": (lambda: hk.hessian(block(), data(), torch.full((2, 3), 4), loss="cross_entropy"), "labels lie in .4, 4., expected 0 to 3"),
    "labels of another shape": (lambda: hk.hessian(block(), data(), torch.zeros(2).long(), loss="cross_entropy"), r"expected \(2, 3\)"),
    "every label ignored": (lambda: hk.hessian(block(), data(), torch.full((2, 3), -100), loss="cross_entropy"), "every label is -100"),
    "several outputs": (lambda: hk.hessian(nn.GRU(4, 4).double(), data(), data()), "returned tuple .of Tensor, Tensor., expected one tensor"),
    "loss=None without a scalar": (lambda: hk.hessian(block(), data(), loss=None), "the module returns the loss"),
    "unknown placement": (lambda: block(placement="sideways"), "placement='sideways' is not known"),
    "unknown norm": (lambda: block(norm="batch"), "norm='batch' is not known"),
    "unknown activation": (lambda: block(activation="swish2"), "activation='swish2' is not known"),
    "heads that do not divide": (lambda: block(n_heads=3), "d_model=4 does not split into n_heads=3"),
    "unknown block of the result": (lambda: hk.hessian(block(), data(), data()).block("a", "b"), "no parameter 'a'"),
    "check without inputs": (lambda: hk.check(nn.Linear(2, 2)), "inputs of a Linear are not known"),
    "unknown reference": (lambda: hk.check(block(), against=["intuition"]), "no reference named 'intuition'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_error(case: str) -> None:
    assert_one_clear_error(*BAD[case])


def test_matrix_that_does_not_fit_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "available_memory", lambda device: 2**20)
    called = []
    module = block()
    module.register_forward_hook(lambda *a: called.append(1))
    small = hk.hessian(module, data(), data())
    assert small.matrix.shape == (104, 104)
    called.clear()
    wide = hk.TransformerBlock(d_model=32, d_ff=64).double()
    wide.register_forward_hook(lambda *a: called.append(1))
    with pytest.raises(hk.OutOfMemoryError, match=r"7,296 parameters make a 7,296 x 7,296 torch.float64 matrix of 0.4 GiB"):
        hk.hessian(wide, data(2, 3, 32), data(2, 3, 32))
    assert not called


X, T = draw(2, 4), draw(2, 3, seed=2)


def linear() -> nn.Linear:
    return nn.Linear(4, 3).double()


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), {"0"}, dtype=torch.qint8)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(linear())


def with_integer_weights() -> nn.Module:
    module = linear()
    module.packed = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    return module


def with_meta(*, buffer: bool) -> nn.Module:
    module = linear()
    if buffer:
        module.register_buffer("mask", torch.ones(3, device="meta"))
    else:
        module.table = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    return module


def with_nan_buffer() -> nn.Module:
    module = linear()
    module.register_buffer("mask", torch.full((3,), torch.nan))
    return module


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (scripted, "the module is a TorchScript module"),
    "quantised": (quantised, "'0' is a Linear with quantised weights"),
    "integer weights": (with_integer_weights, "the parameter 'packed' is torch.int8: quantised or integer"),
    "meta buffer": (lambda: with_meta(buffer=True), "'mask' is on the meta device, which holds no values"),
    "meta constant": (lambda: with_meta(buffer=False), "'table' is on the meta device, which holds no values"),
    "NaN in a buffer": (with_nan_buffer, "'mask' contains NaN"),
    "attention with dropout": (
        lambda: Formula(lambda m, x: m.a(x, x, x)[0][:, :3], a=nn.MultiheadAttention(4, 2, dropout=0.1)),
        r"'a' has a dropout layer for its attention weights \(dropout=0.1\) and is in training mode",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", [hk.hessian, hk.hessian_operator])
def test_refused_module(call: Callable[..., object], name: str) -> None:
    make, message = REFUSED[name]
    assert_one_clear_error(lambda: call(make(), X, T), message)
