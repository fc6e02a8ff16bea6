"""A Hessian that is not finite is an error that names the block and the operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, draw
from torch import Tensor, nn

import hessiankit as hk

CASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "norm": (lambda z: z * z.norm(dim=-1, keepdim=True), r"has no finite derivative at its input, where row 1 is all zeros"),
    "sqrt": (lambda z: z.abs().sqrt(), r"'sqrt' .* has no finite derivative at its input, where row 1"),
    "power": (lambda z: z.abs() ** 1.5, r"'pow_1' .* has no finite second derivative at its input, where row 1"),
}


def linear(f: Callable[[Tensor], Tensor]) -> tuple[nn.Module, Tensor, Tensor]:
    module = Formula(lambda m, x: f(m.lin(x)), lin=nn.Linear(4, 3))
    x = draw(2, 4)
    x[1] = 0
    nn.init.zeros_(module.lin.bias)  # it moves the row of zeros
    return module, x, draw(2, 3, seed=2)


def multiplied(module: nn.Module, x: Tensor, t: Tensor) -> None:
    operator = hk.hessian_operator(module, x, t)
    operator @ torch.ones(operator.shape[0], dtype=operator.torch_dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("call", [hk.hessian, multiplied])
def test_point_without_derivative(call: Callable[..., object], name: str) -> None:
    f, message = CASES[name]
    start = r"the block \('lin.weight', 'lin.weight'\) is" if call is hk.hessian else "products with the Hessian are"
    with pytest.raises(hk.InputError, match=f"{start} NaN or infinite: the operation .*{message}") as caught:
        call(*linear(f))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_jacobian_that_is_not_finite(transposed: bool) -> None:
    f, message = CASES["sqrt"]
    module, x, _ = linear(f)
    J = hk.jacobian_operator(module, x)
    with pytest.raises(hk.InputError, match=rf"products with the Jacobian are NaN or infinite: the operation .*{message}"):
        (J.T if transposed else J).to_matrix()


def test_a_mask_of_minus_infinity_is_not_blamed() -> None:
    def f(z: Tensor) -> Tensor:
        scores = (z @ z.mT).masked_fill(torch.eye(2, dtype=torch.bool), float("-inf"))
        return CASES["norm"][0](z) + torch.softmax(scores, -1).sum()

    with pytest.raises(hk.InputError, match=CASES["norm"][1]):
        hk.hessian(*linear(f))


def test_overflow_is_said_and_only_the_bad_batch_is_blamed() -> None:
    module = Formula(lambda m, x: torch.exp(m.lin(x)), lin=nn.Linear(4, 3))
    good = (draw(2, 4), draw(2, 3, seed=2))
    with pytest.raises(hk.InputError, match=r"block \('lin.weight', 'lin.weight'\) is NaN or infinite.* use a wider dtype"):
        hk.hessian(module, [good, (draw(2, 4) * 300, draw(2, 3))])
