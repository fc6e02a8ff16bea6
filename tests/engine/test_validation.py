"""Modules that cannot be treated: compiled, scripted, quantised, random, without values; one clear error each."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, draw
from torch import nn

import hessiankit as hk

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
    with pytest.raises(hk.InputError, match=message) as caught:
        call(make(), X, T)
    assert "\n" not in str(caught.value)


def test_what_the_messages_advise_works() -> None:
    attention = Formula(lambda m, x: m.a(x, x, x)[0][:, :3], a=nn.MultiheadAttention(4, 2, dropout=0.1)).eval()
    assert hk.hessian(attention, X, T).matrix.isfinite().all()


def test_error_in_forward_names_the_line() -> None:
    module = Formula(lambda m, x: m.lin(x) + x, lin=nn.Linear(4, 3))
    with pytest.raises(
        hk.InputError,
        match=r"called on inputs of shape \(2, 4\), raised RuntimeError: .* \(at .*test_validation.py:\d+ in <lambda>: .*m.lin\(x\) \+ x",
    ):
        hk.hessian(module, X, T)
