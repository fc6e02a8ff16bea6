"""One clear error for arguments, modules, contexts and points that cannot be treated; and what reads as any other call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import readings
import torch
from curvature_reference import Formula, assert_exact, assert_one_clear_error, draw, randomised
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.support import memory

X, T = draw(3, 2), draw(3, 1, seed=2)
READINGS: dict[str, Callable[..., Any]] = {
    "hessian": hk.hessian,
    "hessian_operator": hk.hessian_operator,
    "hessian_diagonal": hk.hessian_diagonal,
    "frobenius_norms": hk.frobenius_norms,
    "check": hk.check,
}


def net() -> nn.Module:
    return randomised(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))


def test_a_list_of_numbers_is_a_vector() -> None:
    operator = hk.hessian_operator(net(), X, T)
    vector = draw(9, seed=4)
    assert np.array_equal(operator @ vector.tolist(), (operator @ vector).numpy())
    assert np.array_equal(operator @ vector[:, None].tolist(), (operator @ vector[:, None]).numpy())
    assert np.array_equal((2 * operator) @ vector.numpy(), 2 * (operator @ vector.numpy()))


@pytest.mark.parametrize("name", READINGS)
def test_a_lazy_module_is_called_before(name: str) -> None:
    module = nn.Sequential(nn.LazyLinear(1)).double()
    with pytest.raises(hk.InputError, match=rf"{name}: '0.weight' is not initialised: .*; call the module on the inputs once"):
        READINGS[name](module, X, T)
    module(X)
    assert READINGS[name](module, X, T)


def with_nothing() -> nn.Module:
    module = Formula(lambda m, x: m.layer(x).exp() + m.nothing.sum(), layer=nn.Linear(2, 1))
    module.nothing = nn.Parameter(torch.zeros(0, 2, dtype=torch.float64))
    return module


def test_parameters_without_entries_have_no_rows() -> None:
    found = assert_exact(with_nothing(), X, T, params=["layer.*"])
    assert found.names == ("layer.weight", "layer.bias")
    assert torch.equal(hk.hessian(with_nothing(), X, T).matrix, found.matrix)
    assert torch.allclose(hk.hessian_diagonal(with_nothing(), X, T).flat, found.matrix.diagonal(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("params", "message"),
    [(["nothing"], r"'nothing' has shape \(0, 2\), no entries"), (["no*"], "'no\\*' matches has no entries")],
)
def test_parameters_without_entries_asked_for(params: list[str], message: str) -> None:
    with pytest.raises(hk.InputError, match=message):
        hk.hessian(with_nothing(), X, T, params=params)


def attention() -> nn.Module:
    return Formula(lambda m, x, mask: (m.q(x) @ m.q(x).T + mask).softmax(-1) @ x, q=nn.Linear(2, 2))


@pytest.mark.parametrize("name", READINGS)
def test_a_query_whose_every_key_is_masked(name: str) -> None:
    mask = torch.tensor([[0.0], [-torch.inf], [0.0]], dtype=torch.float64).expand(3, 3)
    message = rf"{name}: 'the module' \(row \(1,\)\) is NaN or infinite \(at .*test_messages.py:\d+ .*a softmax meets a row of -inf only: every key"
    with pytest.raises(hk.InputError, match=message):
        READINGS[name](attention(), (X, mask), draw(3, 2, seed=2))


SPOILED: dict[str, tuple[Callable[..., Any], str]] = {
    "a division by zero": (lambda m, x: m.layer(x) / (x[:, :1] - x[:, :1]), "aten.div.Tensor is the first to return NaN"),
    "an overflow": (lambda m, x: (m.layer(x).square() * 1e6).exp(), "aten.exp.default is the first .* or use a wider dtype"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_the_operation_that_spoils_a_value_is_named(name: str) -> None:
    f, message = SPOILED[name]
    start = r"the module('s output|' \(row \(\d,\)\)) is NaN or infinite \(at .*test_messages.py:\d+ .*"
    with pytest.raises(hk.InputError, match=start + message):
        hk.hessian(Formula(f, layer=nn.Linear(2, 1)), X, T)


def test_a_target_of_another_dtype_than_the_output() -> None:
    module = Formula(lambda m, x: m.layer(x).double(), layer=nn.Linear(2, 1)).float()
    with pytest.raises(hk.InputError, match=r"target is torch.float32, the module's output is torch.float64; convert one"):
        hk.hessian(module, X.float(), T.float())


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), r"called within torch.autocast\('cpu', torch.bfloat16\), .*; call it outside"),
    "device": (lambda: torch.device("meta"), r"default device is meta .* the parameters are on cpu, .*; call it within torch.device\('cpu'\)"),
}  # fmt: skip


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", READINGS)
def test_contexts_that_change_what_torch_computes(name: str, context: str) -> None:
    module, (around, message) = net(), CONTEXTS[context]
    with pytest.raises(hk.InputError, match=rf"{name}: .*{message}"), around():
        READINGS[name](module, X, T)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Any]], Any]] = {
    "vmap": lambda f: torch.func.vmap(lambda x: (f(x[None].expand(3, 2)), x)[1])(X),
    "grad": lambda f: torch.func.grad(lambda x: (f(x), x.sum())[1])(X),
    "jvp": lambda f: torch.func.jvp(lambda x: (f(x), x)[1], (X,), (X,)),
    "jacrev, on other data": lambda f: torch.func.jacrev(lambda x: (f(T.expand(3, 2)), x)[1])(X),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", READINGS)
def test_transforms_of_torch_func(name: str, transform: str) -> None:
    module = net()
    with pytest.raises(hk.InputError, match=rf"{name}: called within a transform of torch.func \(vmap, grad, jvp ...\)"):
        TRANSFORMS[transform](lambda x: READINGS[name](module, x, T))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outside(around: Callable[[], AbstractContextManager[Any]]) -> None:
    module, lazy = net(), hk.hessian(net(), X, T, lazy=True)
    expected = {name: reading.call(module, X, T)[1] for name, reading in readings.READINGS.items()}
    jacobian, limits = hk.jacobian_operator(module, X).to_matrix(), hk.bounds(module, X, T).values
    with around():
        x = X + 0  # what a data loader makes here
        assert not hk.hessian(module, x, T).matrix.is_inference()
        for name, reading in readings.READINGS.items():
            assert torch.equal(reading.call(module, x, T)[1], expected[name])
        assert torch.equal(hk.jacobian_operator(module, x).to_matrix(), jacobian)
        assert hk.bounds(module, x, T).values == limits
        assert len(hk.loss_slices(module, x, T, along=torch.ones(9).double(), points=3).slices) == 1
        assert hk.check(module, x, T)
        assert torch.equal(lazy.matrix, expected["hessian"])
        assert not torch.is_grad_enabled()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("options", [{}, {"recompute": "layers"}, {"micro_batch": 2}])
@pytest.mark.parametrize("f", [torch.special.i0, Sine.apply])
def test_products_in_inference_mode(f: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    """Of operations whose derivatives are autograd's; the results may be differentiated afterwards."""
    module = Formula(lambda s, x: f(x @ s.W) @ s.V, W=(3, 3), V=(3, 2))
    outside, inside = (hk.hessian_operator(module, draw(5, 3), draw(5, 2, seed=2), **options) for _ in range(2))
    expected = outside @ draw(15, 2, seed=3)
    with torch.inference_mode():
        products, gradient = inside @ draw(15, 2, seed=3), inside.gradient
    assert torch.equal(products, expected)
    assert torch.equal(gradient, outside.gradient)
    assert not products.is_inference()


def test_autocast_around_what_is_read_later() -> None:
    module, x, t, vector = net().float(), X.float(), T.float(), draw(9, seed=4).float()
    names = ("diagonal", "kfac", "ekfac")
    found, lazy, operator = hk.hessian(module, x, t), hk.hessian(module, x, t, lazy=True), hk.hessian_operator(module, x, t)
    untouched, outer, product = hk.hessian_operator(module, x, t), found.outer(), operator @ vector
    approximated = [operator.approximation(name) @ vector for name in names]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lazy.matrix, found.matrix)
        assert torch.equal(lazy.outer(), outer)
        assert torch.equal(operator @ vector, product)
        assert untouched.symmetry_error < 1e-6
        for name, expected in zip(names, approximated, strict=True):
            assert torch.equal(untouched.approximation(name) @ vector, expected)


POINTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "norm": (lambda z: z * z.norm(dim=-1, keepdim=True), r"has no finite derivative at its input, where row 1 is all zeros"),
    "sqrt": (lambda z: z.abs().sqrt(), r"'sqrt' .* has no finite derivative at its input, where row 1"),
}


def vanishing(f: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    module = Formula(lambda m, x: f(m.lin(x)), lin=nn.Linear(4, 3))
    x = draw(2, 4)
    x[1] = 0
    nn.init.zeros_(module.lin.bias)  # it moves the row of zeros
    return module, x, draw(2, 3, seed=2)


def multiplied(module: nn.Module, x: Tensor, t: Tensor) -> None:
    operator = hk.hessian_operator(module, x, t)
    operator @ torch.ones(operator.shape[0], dtype=operator.torch_dtype)


@pytest.mark.parametrize("name", POINTS)
@pytest.mark.parametrize("call", [hk.hessian, multiplied])
def test_point_without_derivative(call: Callable[..., object], name: str) -> None:
    f, message = POINTS[name]
    start = r"the block \('lin.weight', 'lin.weight'\) is" if call is hk.hessian else "products with the Hessian are"
    with pytest.raises(hk.InputError, match=f"{start} NaN or infinite: the operation .*{message}") as caught:
        call(*vanishing(f))
    assert "\n" not in str(caught.value)


def test_overflow_is_said_and_only_the_bad_batch_is_blamed() -> None:
    module = Formula(lambda m, x: torch.exp(m.lin(x)), lin=nn.Linear(4, 3))
    good = (draw(2, 4), draw(2, 3, seed=2))
    with pytest.raises(hk.InputError, match=r"block \('lin.weight', 'lin.weight'\) is NaN or infinite.* use a wider dtype"):
        hk.hessian(module, [good, (draw(2, 4) * 300, draw(2, 3))])


def block(**options: object) -> hk.TransformerBlock:
    torch.manual_seed(0)
    return hk.TransformerBlock(d_model=4, d_ff=5, **options).double()  # type: ignore[arg-type]


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 4)), dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def with_norm(**options: object) -> hk.TransformerBlock:
    module = block()
    module.norm_2 = nn.LayerNorm(4, **options)  # type: ignore[arg-type]
    return module


NAN = data().index_fill(0, torch.tensor(1), torch.nan)


def spoiled(name: str) -> hk.TransformerBlock:
    module = block()
    module.get_parameter(name).data[0] = torch.nan
    return module


REFUSED_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "wrong feature size": (lambda: hk.hessian(block(), data(2, 3, 5), data()), r"called on inputs of shape \(2, 3, 5\), raised RuntimeError"),
    "NaN in the input": (lambda: hk.hessian(block(), NAN, data()), r"NaN or infinity, first at index \(1, 0, 0\)"),
    "NaN in the target": (lambda: hk.hessian(block(), data(), NAN), "target contains NaN"),
    "NaN in a weight": (lambda: hk.hessian(spoiled("attention.W_Q"), data(), data()), r"'attention.W_Q' contains NaN"),
    "complex dtype": (lambda: hk.hessian(block(), data().cdouble(), data()), "complex128"),
    "constant row, eps 0": (lambda: hk.hessian(block(eps=0.0), torch.zeros(2, 3, 4).double(), data()), r"'norm_1' meets row \(0, 0\)"),
    "empty batch": (lambda: hk.hessian(block(), data(2, 3, 4)[:0], data()[:0]), r"shape \(0, 3, 4\), with no entries"),
    "target of another shape": (lambda: hk.hessian(block(), data(), data(2, 4, 3)), r"target has shape \(2, 4, 3\), the module's output"),
    "target that would broadcast": (lambda: hk.hessian(block(), data(), data(4)), "nothing is broadcast"),
    "two devices": (lambda: hk.hessian(with_norm(device="meta", dtype=torch.float64), data(), data()), "several devices: .* on cpu, 'norm_2.weight' on meta"),
    "two dtypes": (lambda: hk.derive(with_norm(dtype=torch.float32), wrt="W_Q"), "several dtypes"),
    "unknown loss": (lambda: hk.hessian(block(), data(), data(), loss="hinge"), "loss='hinge' is not known"),
    "float labels": (lambda: hk.hessian(block(), data(), data(2, 3), loss="cross_entropy"), "needs integer class labels"),
    "label out of range": (lambda: hk.hessian(block(), data(), torch.full((2, 3), 4), loss="cross_entropy"), "labels lie in .4, 4., expected 0 to 3"),
    "labels of another shape": (lambda: hk.hessian(block(), data(), torch.zeros(2).long(), loss="cross_entropy"), r"expected \(2, 3\)"),
    "every label ignored": (lambda: hk.hessian(block(), data(), torch.full((2, 3), -100), loss="cross_entropy"), "every label is -100"),
    "loss=None without a scalar": (lambda: hk.hessian(block(), data(), loss=None), "the module returns the loss"),
    "check without inputs": (lambda: hk.check(nn.Linear(2, 2)), "inputs of a Linear are not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_one_clear_error(case: str) -> None:
    assert_one_clear_error(*REFUSED_CALLS[case])


def test_matrix_that_does_not_fit_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 2**20)
    assert hk.hessian(block(), data(), data()).matrix.shape == (104, 104)
    called: list[int] = []
    wide = hk.TransformerBlock(d_model=32, d_ff=64).double()
    wide.register_forward_hook(lambda *a: called.append(1))
    with pytest.raises(
        hk.OutOfMemoryError,
        match=r"hessian: a 7,296 x 7,296 torch.float64 matrix and its work space take 4..\.. MiB, but only 1.0 MiB are free",
    ):
        hk.hessian(wide, data(2, 3, 32), data(2, 3, 32))
    assert not called


ROWS, TARGETS = draw(2, 4), draw(2, 3, seed=2)


def linear() -> nn.Linear:
    return nn.Linear(4, 3).double()


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), {"0"}, dtype=torch.qint8)


def with_buffer(mask: Tensor) -> nn.Module:
    module = linear()
    module.register_buffer("mask", mask)
    return module


REFUSED_MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scripted": (lambda: torch.jit.script(linear()), "the module is a TorchScript module"),
    "quantised": (quantised, "'0' is a Linear with quantised weights"),
    "meta buffer": (lambda: with_buffer(torch.ones(3, device="meta")), "'mask' is on the meta device, which holds no values"),
    "NaN in a buffer": (lambda: with_buffer(torch.full((3,), torch.nan)), "'mask' contains NaN"),
    "attention with dropout": (
        lambda: Formula(lambda m, x: m.a(x, x, x)[0][:, :3], a=nn.MultiheadAttention(4, 2, dropout=0.1)),
        r"'a' has a dropout layer for its attention weights \(dropout=0.1\) and is in training mode",
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of quantisation and scripts
@pytest.mark.parametrize("name", REFUSED_MODULES)
@pytest.mark.parametrize("call", [hk.hessian, hk.hessian_operator])
def test_refused_module(call: Callable[..., object], name: str) -> None:
    make, message = REFUSED_MODULES[name]
    assert_one_clear_error(lambda: call(make(), ROWS, TARGETS), message)
