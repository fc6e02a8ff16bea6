"""Error messages for arguments, contexts and points without a finite Hessian, or with another one than intended."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from curvature_reference import Formula, assert_exact, draw, randomised
from torch import Tensor, nn
from torch.utils import _pytree

import hessiankit as hk

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


NAMES: dict[str, Callable[[nn.Module], Any]] = {
    "Hessian.block": lambda m: hk.hessian(m, X, T).block(0, 1),
    "Hessian.spectral_norm": lambda m: hk.hessian(m, X, T).spectral_norm(0),
    "FrobeniusNorms.block": lambda m: hk.frobenius_norms(m, X, T).block(0, 1),
    "CurvatureDiagonal": lambda m: hk.hessian_diagonal(m, X, T)[0],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_is_asked_for_by_name(name: str) -> None:
    with pytest.raises(
        hk.InputError, match=r"is asked for by its name, not by a value 0, of type int; there are '0.weight', '0.bias'"
    ):
        NAMES[name](net())


def test_a_list_of_numbers_is_a_vector() -> None:
    operator = hk.hessian_operator(net(), X, T)
    vector = draw(9, seed=4)
    assert np.array_equal(operator @ vector.tolist(), (operator @ vector).numpy())
    assert np.array_equal(operator @ vector[:, None].tolist(), (operator @ vector[:, None]).numpy())
    assert np.array_equal((2 * operator) @ vector.numpy(), 2 * (operator @ vector.numpy()))


FACTORS: dict[str, tuple[Any, str]] = {
    "a short list": ([1.0, 2.0], r"cannot multiply with shape \(2,\); expected a vector \(9,\)"),
    "rows of several lengths": ([[1.0], [1.0, 2.0]], "cannot multiply with a list: .*inhomogeneous"),
    "words": (["a"] * 9, "the array is <U1, which float64 cannot hold"),
    "text": ("abc", r"cannot multiply with a str; expected a torch tensor or a NumPy array, a vector \(9,\)"),
    "None": (None, "cannot multiply with a NoneType"),
    "a number": (2.0, "cannot multiply with a float"),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_that_are_no_vectors(name: str) -> None:
    factor, message = FACTORS[name]
    with pytest.raises(hk.InputError, match=rf"HessianOperator: {message}"):
        hk.hessian_operator(net(), X, T) @ factor


@pytest.mark.parametrize("name", READINGS)
def test_a_lazy_module_is_called_before(name: str) -> None:
    module = nn.Sequential(nn.LazyLinear(1)).double()
    with pytest.raises(
        hk.InputError, match=rf"{name}: '0.weight' is not initialised: a lazy module .*; call the module on the inputs once"
    ):
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
    assert torch.equal(
        hk.hessian_diagonal(with_nothing(), X, T).flat, hk.hessian_diagonal(with_nothing(), X, T, params=["layer.*"]).flat
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [(["nothing"], r"'nothing' has shape \(0, 2\), no entries"), (["no*"], "'no\\*' matches has no entries")],
)
def test_parameters_without_entries_asked_for(params: list[str], message: str) -> None:
    with pytest.raises(hk.InputError, match=message):
        hk.hessian(with_nothing(), X, T, params=params)


def test_all_parameters_without_entries() -> None:
    module = nn.Module()
    module.nothing = nn.Parameter(torch.zeros(0))
    with pytest.raises(hk.InputError, match="all parameters that require grad have no entries"):
        hk.hessian(module, X, T)


@pytest.mark.parametrize("known", [False, True])
def test_user_dicts_whether_torch_knows_them_or_not(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library may register them, without keys."""
    if known:
        node = _pytree.NodeDef(
            UserDict, lambda d: (list(d.values()), list(d)), lambda v, k: UserDict(zip(k, v, strict=True)), None
        )
        monkeypatch.setitem(_pytree.SUPPORTED_NODES, UserDict, node)
    else:
        monkeypatch.delitem(_pytree.SUPPORTED_NODES, UserDict, raising=False)
    nested = Formula(lambda m, batch: m.layer(batch["x"]).exp(), layer=nn.Linear(2, 1))
    named = Formula(lambda m, x: m.layer(x).exp(), layer=nn.Linear(2, 1))
    named.forward = lambda x: named.layer(x).exp()
    expected = hk.hessian(named, X, T).matrix
    assert torch.equal(hk.hessian(nested, (UserDict(x=X),), T, batch_size=2).matrix, hk.hessian(named, X, T, batch_size=2).matrix)
    assert torch.equal(hk.hessian(named, UserDict(x=X), T).matrix, expected)
    assert torch.equal(hk.hessian_operator(nested, (UserDict(x=X),), T).to_matrix(), hk.hessian_operator(named, X, T).to_matrix())
    with pytest.raises(hk.InputError, match=r"inputs\[0\]\['x'\] is torch.float32"):
        hk.hessian(nested, (UserDict(x=X.float()),), T)


def masked(row: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(3, 3, dtype=torch.float64)
    row(mask)
    return draw(3, 2), mask


def attention() -> nn.Module:
    return Formula(lambda m, x, mask: (m.q(x) @ m.q(x).T + mask).softmax(-1) @ x, q=nn.Linear(2, 2))


@pytest.mark.parametrize("name", READINGS)
def test_a_query_whose_every_key_is_masked(name: str) -> None:
    inputs = masked(lambda mask: mask[1].fill_(-torch.inf))
    message = rf"{name}: 'the module' \(row \(1,\)\) is NaN or infinite \(at .*test_messages.py:\d+ .*a softmax meets a row of -inf only: every key"
    with pytest.raises(hk.InputError, match=message):
        READINGS[name](attention(), inputs, draw(3, 2, seed=2))


SPOILED: dict[str, tuple[Callable[..., Any], str]] = {
    "a division by zero": (
        lambda m, x: m.layer(x) / (x[:, :1] - x[:, :1]),
        r"aten.div.Tensor is the first to return NaN or infinity",
    ),
    "an overflow": (
        lambda m, x: (m.layer(x).square() * 1e6).exp(),
        r"aten.exp.default is the first .* or use a wider dtype if a value overflows",
    ),
    "a root of a negative number": (lambda m, x: (-m.layer(x).square() - 1).sqrt(), "aten.sqrt.default is the first"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_the_operation_that_spoils_a_value_is_named(name: str) -> None:
    f, message = SPOILED[name]
    with pytest.raises(
        hk.InputError,
        match=rf"the module('s output|' \(row \(\d,\)\)) is NaN or infinite \(at .*test_messages.py:\d+ .*{message}",
    ):
        hk.hessian(Formula(f, layer=nn.Linear(2, 1)), X, T)


def test_a_target_of_another_dtype_than_the_output() -> None:
    module = Formula(lambda m, x: m.layer(x).double(), layer=nn.Linear(2, 1)).float()
    with pytest.raises(
        hk.InputError, match=r"target is torch.float32, the module's output is torch.float64; convert one of them"
    ):
        hk.hessian(module, X.float(), T.float())


def own_loss(m: nn.Module, x: Any, t: Tensor | None = None) -> Tensor:
    x, t = (x, t) if t is not None else x
    return (m.layer(x).exp() - t).square().mean()


BATCHES: dict[str, Callable[[], list[Any]]] = {
    "a pair as arguments": lambda: [(X, T)],
    "a pair as one argument": lambda: [((X, T),)],
    "two batches": lambda: [(X[:1], T[:1]), (X[1:], T[1:])],
    "mappings": lambda: [{"x": X[:1], "t": T[:1]}, {"x": X[1:], "t": T[1:]}],
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_list_of_batches_reads_as_any_other_iterable(name: str) -> None:
    module, data = Formula(own_loss, layer=nn.Linear(2, 1)), BATCHES[name]()
    module.forward = lambda x, t=None: own_loss(module, x, t)
    weights = [1, 2] if len(data) == 2 else None
    as_list, as_generator = (hk.hessian(module, d, loss=None, weights=weights) for d in (data, (batch for batch in data)))
    assert torch.equal(as_list.matrix, as_generator.matrix)
    assert as_list.loss == as_generator.loss
    whole = hk.hessian(module, (X, T), loss=None)
    assert float((as_list.matrix - whole.matrix).abs().max()) <= 1e-14 * float(whole.matrix.abs().max())


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
    module, operator, lazy = net(), hk.hessian_operator(net(), X, T), hk.hessian(net(), X, T, lazy=True)
    expected = hk.hessian(module, X, T).matrix
    with around():
        x = X + 0  # what a data loader makes here
        found = hk.hessian(module, x, T)
        assert not found.matrix.is_inference()
        assert torch.equal(found.matrix, expected)
        assert torch.equal(hk.hessian_diagonal(module, x, T).flat, hk.hessian_diagonal(module, X, T).flat)
        assert torch.equal(hk.hessian_operator(module, x, T).to_matrix(), operator.to_matrix())
        assert torch.equal(hk.jacobian_operator(module, x).to_matrix(), hk.jacobian_operator(module, X).to_matrix())
        assert hk.bounds(module, x, T).values == hk.bounds(module, X, T).values
        assert len(hk.loss_slices(module, x, T, along=torch.ones(len(expected)).double(), points=3).slices) == 1
        assert hk.check(module, x, T)
        assert torch.equal(lazy.matrix, expected)
        assert not torch.is_grad_enabled()


def test_autocast_around_what_is_read_later() -> None:
    module = net().float()
    x, t, vector = X.float(), T.float(), draw(9, seed=4).float()
    found, lazy, operator = hk.hessian(module, x, t), hk.hessian(module, x, t, lazy=True), hk.hessian_operator(module, x, t)
    outer, product = found.outer(), operator @ vector
    untouched = hk.hessian_operator(module, x, t)
    approximated = [operator.approximation(name) @ vector for name in ("diagonal", "kfac", "ekfac")]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lazy.matrix, found.matrix)
        assert torch.equal(hk.Hessian.outer(found), outer)
        assert torch.equal(operator @ vector, product)
        assert untouched.symmetry_error < 1e-6
        for name, expected in zip(("diagonal", "kfac", "ekfac"), approximated, strict=True):
            assert torch.equal(untouched.approximation(name) @ vector, expected)
        assert lazy.loss == found.loss


POINTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "norm": (lambda z: z * z.norm(dim=-1, keepdim=True), r"has no finite derivative at its input, where row 1 is all zeros"),
    "sqrt": (lambda z: z.abs().sqrt(), r"'sqrt' .* has no finite derivative at its input, where row 1"),
    "power": (lambda z: z.abs() ** 1.5, r"'pow_1' .* has no finite second derivative at its input, where row 1"),
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


@pytest.mark.parametrize("transposed", [False, True])
def test_a_jacobian_that_is_not_finite(transposed: bool) -> None:
    f, message = POINTS["sqrt"]
    module, x, _ = vanishing(f)
    J = hk.jacobian_operator(module, x)
    with pytest.raises(hk.InputError, match=rf"products with the Jacobian are NaN or infinite: the operation .*{message}"):
        (J.T if transposed else J).to_matrix()


def test_a_mask_of_minus_infinity_is_not_blamed() -> None:
    def f(z: Tensor) -> Tensor:
        scores = (z @ z.mT).masked_fill(torch.eye(2, dtype=torch.bool), float("-inf"))
        return POINTS["norm"][0](z) + torch.softmax(scores, -1).sum()

    with pytest.raises(hk.InputError, match=POINTS["norm"][1]):
        hk.hessian(*vanishing(f))


def test_overflow_is_said_and_only_the_bad_batch_is_blamed() -> None:
    module = Formula(lambda m, x: torch.exp(m.lin(x)), lin=nn.Linear(4, 3))
    good = (draw(2, 4), draw(2, 3, seed=2))
    with pytest.raises(hk.InputError, match=r"block \('lin.weight', 'lin.weight'\) is NaN or infinite.* use a wider dtype"):
        hk.hessian(module, [good, (draw(2, 4) * 300, draw(2, 3))])
