"""Modules that torch.compile returned, or contain such, and ``torch.cond``: what is traced is the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw
from torch import Tensor, nn

import hessiankit as hk

X, T = draw(5, 4), draw(5, 2, seed=2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def whole() -> nn.Module:
    return torch.compile(network(), backend="eager")  # type: ignore[return-value]


def part() -> nn.Module:
    module = network()
    module[0] = torch.compile(module[0], backend="eager")  # type: ignore[assignment]
    return module


def in_place() -> nn.Module:
    module = network()
    module.compile(backend="eager")
    return module


def a_part_in_place() -> nn.Module:
    module = network()
    module[2].compile(backend="eager")
    return module


MAKERS = (whole, part, in_place, a_part_in_place)
CALLS: dict[str, Callable[[nn.Module], Tensor]] = {
    "hessian": lambda m: hk.hessian(m, X, T).matrix,
    "hessian_operator": lambda m: hk.hessian_operator(m, X, T).to_matrix(),
    "hessian_function": lambda m: hk.hessian_function(m, X, T)().matrix,
    "jacobian_operator": lambda m: hk.jacobian_operator(m, X).to_matrix(),
}


@pytest.mark.parametrize(("name", "make"), zip(CALLS, MAKERS, strict=True))
def test_the_original_is_what_is_traced(make: Callable[[], nn.Module], name: str) -> None:
    module = make()
    before = module(X)
    assert CALLS[name](module).allclose(CALLS[name](network()), rtol=0, atol=1e-13)
    assert module(X).equal(before)


def test_check_with_a_compiled_loss() -> None:
    assert hk.check(part(), X, T, loss=torch.compile(nn.MSELoss(), backend="eager"))


def test_names_are_those_of_the_original() -> None:
    assert hk.hessian(whole(), X, T).names == hk.hessian(network(), X, T).names
    assert hk.hessian(part(), X, T).names == tuple(name for name, _ in part().named_parameters())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch.cond, which compiles
@pytest.mark.parametrize(("moving", "sign"), [(False, -1.0), (True, 1.0)])
def test_torch_cond_takes_its_branch(moving: bool, sign: float) -> None:
    def formula(cond: Callable[..., Any]) -> Formula:
        def f(s: Formula, x: Tensor) -> Tensor:
            z = x @ s.W
            return cond(sign * (z if moving else x).sum() > 0, torch.sin, torch.exp, (z,))  # type: ignore[no-any-return]

        return Formula(f, W=(4, 2))

    plain = formula(lambda condition, true, false, operands: (true if condition else false)(*operands))
    assert hk.hessian(formula(torch.cond), X, T).matrix.allclose(hk.hessian(plain, X, T).matrix, rtol=0, atol=1e-14)


@pytest.mark.parametrize("call", [hk.hessian, hk.hessian_operator, hk.hessian_diagonal])
def test_nested_tensors_are_refused_in_words_of_the_user(call: Callable[..., Any]) -> None:
    offsets = torch.tensor([0, 2, 5])

    def inside(s: Formula, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor_from_jagged(x @ s.W, offsets)
        return (rows * rows).values()

    with pytest.raises(hk.TraceError, match=r"makes a nested tensor .* pad the rows to one length and mask the padding"):
        call(Formula(inside, W=(4, 2)), X, T)
    rows = torch.nested.nested_tensor_from_jagged(X, offsets)
    with pytest.raises(hk.InputError, match=r"inputs is a nested tensor .* pass a dense one with a mask for the padding"):
        call(Formula(lambda s, x: (x @ s.W).values(), W=(4, 2)), rows, T)
