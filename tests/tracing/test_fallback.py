"""An operation known by its value alone: its actions by two routes of automatic differentiation, and which of them is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, by_differences, draw, mse, reverse_over_reverse
from operator_cases import error
from readings import assert_readings, in_turn
from torch import Tensor
from torch.distributions import MultivariateNormal

import hessiankit as hk
from hessiankit.tracing.derivative_tests import batch_difference, difference
from hessiankit.tracing.fallback import AutomaticDifferentiation

PRODUCT = AutomaticDifferentiation(lambda a, b: a.exp() * b**3, "a^e b^3")
A, B, ADJOINT = (draw(2, 3, seed=k) for k in (3, 4, 5))
TA, TB = draw(7, 2, 3), draw(7, 2, 3, seed=8)


def close(seen: Tensor | None, expected: Tensor) -> bool:
    return seen is not None and seen.shape == expected.shape and bool((seen - expected).abs().max() < 1e-13)


@pytest.mark.parametrize("tangents", [(TA, TB), (TA, None), (None, TB)])
def test_actions(tangents):
    ta, tb = (torch.zeros_like(TA) if t is None else t for t in tangents)
    assert close(PRODUCT.value(A, B), A.exp() * B**3)
    assert close(PRODUCT.jvp((A, B), tangents), ta * A.exp() * B**3 + tb * A.exp() * 3 * B**2)
    to_a, to_b = PRODUCT.vjp((A, B), TA)
    assert close(to_a, TA * A.exp() * B**3)
    assert close(to_b, TA * A.exp() * 3 * B**2)
    to_a, to_b = PRODUCT.curvature((A, B), ADJOINT, tangents)
    assert close(to_a, ADJOINT * A.exp() * (B**3 * ta + 3 * B**2 * tb))
    assert close(to_b, ADJOINT * A.exp() * (3 * B**2 * ta + 6 * B * tb))


def test_differences_that_cannot_be_told_are_not_small():
    one, nan = (torch.tensor([1.0]),), (torch.tensor([float("nan")]),)
    assert math.isnan(difference(one, nan))
    assert math.isnan(difference((*nan, *one), (*nan, *one)))
    assert batch_difference(lambda v: (v,), one)[1] == 0.0
    for wrong in (torch.tensor([[1.0], [1.0]]), torch.tensor([[2.0], [2.0]])):
        assert batch_difference(lambda v, batch=wrong: (v if len(v) == 1 else batch,), one)[1] > 0.4


def cubes(
    first: float = 3.0,
    second: float = 6.0,
    forward_mode: float | None = 3.0,
    coupled: float = 0.0,
    factor: Callable[[Tensor, Tensor], Any] = lambda x, u: 1.0,
) -> AutomaticDifferentiation:
    """A fallback for x^3 with formulas of its own: ``first`` x^2, whose derivative is said to be ``second`` x.

    ``coupled`` adds, beside A, a field that is no gradient; ``factor`` multiplies what the adjoint u is pulled back to.
    """

    def slope(x: Tensor) -> Tensor:
        bent = second / 2 * x.square()
        return bent + (first * x.square() - bent).detach() + coupled * A.abs() * (x - A).flip(-1)

    def setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    actions: dict[str, Callable[..., Any]] = {
        "forward": lambda x: x**3,
        "setup_context": setup,
        "backward": lambda ctx, u: slope(x := ctx.saved_tensors[0]) * factor(x, u) * u,
    }
    if forward_mode is not None:
        actions["jvp"] = lambda ctx, t: forward_mode * ctx.saved_for_forward[0].square() * t
    kind: Any = type("Cube", (torch.autograd.Function,), {name: staticmethod(action) for name, action in actions.items()})
    return AutomaticDifferentiation(lambda x: kind.apply(x), "cube")


def test_a_function_with_right_formulas_is_taken():
    assert close(cubes().curvature((A,), ADJOINT, (TA,))[0], ADJOINT * 6 * A * TA)
    assert cubes().prove((A,)) == "cube"


def test_a_wrong_forward_mode_is_not_used():
    wrong = cubes(forward_mode=4.0)
    assert close(wrong.jvp((A,), (TA,)), 3 * A**2 * TA)
    assert wrong.prove((A,)) == "cube (by reverse mode: forward mode is wrong by 0.25)"


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "the first derivative": (
        lambda: cubes(first=3.5, second=7.0).vjp((A,), TA),
        r"cube .* first derivative .* <u, J t> and <J\^T u, t> differ by",
    ),
    "a second derivative that is not symmetric": (
        lambda: cubes(coupled=0.5).curvature((A,), ADJOINT, (TA,)),
        r"cube .* second derivative .* by jvp\(grad\) it is not symmetric, by",
    ),
    "the second derivative of one route": (
        lambda: cubes(second=5.9, forward_mode=None).curvature((A,), ADJOINT, (TA,)),
        "second derivative of it .* from central differences of its gradient",
    ),
    "the second derivative of one route, by a millionth": (
        lambda: cubes(second=6 + 6e-6, forward_mode=None).curvature((A,), ADJOINT, (TA,)),
        r"second derivative of it .* is 1e-06 from central differences of its gradient",
    ),
    "torch.vmap": (
        lambda: cubes(forward_mode=None, factor=lambda x, u: 2 if torch._C._functorch.is_batchedtensor(u) else 1).vjp((A,), TA),
        r"torch\.vmap of it differs from a loop by 0\.5",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(name):
    call, message = WRONG[name]
    with pytest.raises(hk.TraceError, match=message):
        call()


def test_what_is_right_at_one_point_may_be_refused_at_another():
    cube = cubes(forward_mode=None, factor=lambda x, u: 1 if bool((x < 5).all()) else 2)
    assert cube.vjp((A,), TA)[0] is not None
    with pytest.raises(hk.TraceError, match="cannot be trusted"):
        cube.vjp((10 + A,), TA)


def test_a_loop_takes_the_place_of_a_missing_rule_for_vmap():
    cube = cubes(forward_mode=None, factor=lambda x, u: bool(u.detach().sum().isfinite().item()))  # a number: vmap has none
    assert close(cube.vjp((A,), TA)[0], TA * 3 * A**2)
    assert close(cube.curvature((A,), ADJOINT, (TA,))[0], ADJOINT * 6 * A * TA)


WEIGHT, ROWS, INDEX = draw(3, 3, seed=5), draw(3, 3, seed=6), torch.tensor([[0, 1, 0], [0, 0, 1], [0, 1, 2]])


def positive(s: Formula) -> Tensor:
    return s.W @ s.W.mT + 4 * torch.eye(3).double()


def by_product(s: Formula) -> Tensor:
    return torch.zeros(3, 3).to(s.W).scatter_reduce(0, INDEX, s.W, "prod", include_self=False)


OPERATIONS: dict[str, Callable[[Formula], Tensor]] = {
    "linalg.cholesky": lambda s: torch.linalg.cholesky(positive(s)),
    "linalg.cholesky, upper": lambda s: torch.linalg.cholesky(positive(s), upper=True),
    "cholesky_inverse, upper": lambda s: torch.cholesky_inverse(torch.linalg.cholesky(positive(s), upper=True), upper=True),
    "cholesky_solve, upper": lambda s: torch.cholesky_solve(s.V, torch.linalg.cholesky(positive(s), upper=True), upper=True),
    "linalg.eigvalsh, upper": lambda s: torch.linalg.eigvalsh(positive(s), UPLO="U").sin() * s.V,
    "linalg.eigh": lambda s: torch.linalg.eigh(positive(s))[1].square() * s.V,
    "linalg.pinv, hermitian": lambda s: torch.linalg.pinv(positive(s), hermitian=True),
    "linalg.solve_triangular": lambda s: torch.linalg.solve_triangular(s.W + 3 * torch.eye(3).double(), s.V, upper=False),
    "linalg.svdvals": lambda s: torch.linalg.svdvals(s.W).sin() * s.V,
    "MultivariateNormal": lambda s: MultivariateNormal(s.V[0], positive(s)).log_prob(ROWS) * WEIGHT,
    "scatter_reduce, product": by_product,
    "scatter_reduce, mean": lambda s: torch.zeros(3, 3).double().scatter_reduce(0, INDEX, s.W, "mean").sin(),
    "renorm": lambda s: torch.renorm(s.W, 2, 0, 0.5),
}


def scalar(z: Tensor, _: Any) -> Tensor:
    return (z - WEIGHT[:, : z.shape[-1]]).square().sum() / 2 + (z**3 * WEIGHT[:, : z.shape[-1]]).sum() / 10


@pytest.mark.parametrize(("k", "name"), enumerate(OPERATIONS))
def test_readings_are_those_of_the_module(k, name):
    module = Formula(lambda s, x: OPERATIONS[name](s), W=(3, 3), V=(3, 3))
    x = draw(1)
    expected = by_differences(module.parameters, lambda: scalar(module(x), None))
    found = assert_readings(expected, module, x, draw(1), readings=in_turn(k), loss=scalar, floor=1e-10)
    assert found["hessian"].fallbacks


def test_the_wrong_route_is_named():
    module = Formula(lambda s, x: by_product(s), W=(3, 3))
    for dtype in (torch.float64, torch.float32):
        found = hk.hessian(
            module.to(dtype), draw(1, dtype=dtype), draw(1), loss=lambda z, _: scalar(z.double(), None).to(z.dtype)
        )
        assert found.fallbacks[0].startswith("aten.scatter_reduce.two (by reverse-over-reverse: jvp(grad) is wrong by ")


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda s, x: torch.linalg.cholesky(s.W + 3 * torch.eye(3).double()), "linalg_cholesky.* for symmetric, .* is off by"),
        (lambda s, x: torch.linalg.pinv(s.W, hermitian=True), "linalg_pinv.* for symmetric, .* is off by"),
        (lambda s, x: torch.linalg.eigvalsh(s.W) * s.V, "linalg_eigvalsh.* for symmetric, .* is off by"),
        (
            lambda s, x: torch.cholesky_inverse(s.W + 3 * torch.eye(3).double()),
            "cholesky_inverse.* for lower triangular, .* is off",
        ),
        (lambda s, x: torch.cholesky_solve(s.V, s.W, upper=True), "cholesky_solve.* for upper triangular, .* Pass A.triu()"),
    ],
)
def test_a_matrix_without_the_structure_that_is_assumed(f, message):
    with pytest.raises(hk.TraceError, match=message):
        hk.hessian(Formula(f, W=(3, 3), V=(3, 3)), draw(1), draw(3, 3, seed=9))


GRID = torch.linspace(-0.83, 0.79, 84, dtype=torch.float64).reshape(1, 6, 7, 2)


@pytest.mark.parametrize(
    ("mode", "padding", "dtype"),
    [
        ("bilinear", "zeros", torch.float64),
        ("bilinear", "border", torch.float32),
        ("nearest", "border", torch.float64),
        ("bicubic", "reflection", torch.float32),
    ],
)
def test_an_operation_with_kinks_and_one_route(mode: str, padding: str, dtype: torch.dtype) -> None:
    """Forward mode does not exist; differences with large steps meet the borders of pixels, which small ones do not."""

    def sampled(s: Formula, x: Tensor) -> Tensor:
        return torch.nn.functional.grid_sample(x * s.V, GRID.to(x) + s.W, mode, padding, align_corners=False)

    module, x, target = Formula(sampled, W=(6, 7, 2), V=(5, 4)), draw(1, 2, 5, 4), draw(1, 2, 6, 7, seed=2)
    expected = reverse_over_reverse(module, x, target, mse)
    found = hk.hessian(module.to(dtype), x.to(dtype), target.to(dtype)).matrix
    assert error(found, expected) < (1e-12 if dtype == torch.float64 else 3e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-8, 1e-4])
def test_two_routes_that_are_both_right_but_for_digits(size: float, dtype: torch.dtype) -> None:
    """The determinant near the identity: the two routes differ by more than rounding, each by little from the truth."""

    def determinant(s: Formula, x: Tensor) -> Tensor:
        return torch.linalg.det(torch.eye(3, dtype=s.W.dtype) + size * s.W) + s.W.square().sum() * size**2

    def written_out(s: Formula, x: Tensor) -> Tensor:
        a, b, c = (torch.eye(3, dtype=s.W.dtype) + size * s.W).unbind(0)
        return torch.dot(a, torch.linalg.cross(b, c)) + s.W.square().sum() * size**2

    expected = reverse_over_reverse(Formula(written_out, W=(3, 3)), draw(1), None, None)
    found = hk.hessian(Formula(determinant, W=(3, 3)).to(dtype), draw(1).to(dtype), loss=None).matrix
    assert (found - expected).abs().max() <= (1e-9 if dtype == torch.float64 else 1e-5) * size**2


def test_a_point_that_is_a_vector_drawn_from_a_seed() -> None:
    """A function of the direction alone has no derivative along its argument: generic vectors must not be the argument."""
    for seed in range(4):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        unit = AutomaticDifferentiation(lambda a: a / a.norm(), "unit")
        assert close(unit.jvp((x,), (TA,)), (TA - x * (TA * x).sum((1, 2), keepdim=True) / x.norm() ** 2) / x.norm())
        assert unit.curvature((x,), ADJOINT, (TA,))[0] is not None


@pytest.mark.parametrize("call", [hk.hessian, hk.hessian_diagonal, hk.hessian_operator])
def test_two_routes_that_agree_and_are_both_wrong(call: Callable[..., Any]) -> None:
    """Singular values that are zero: torch takes any vectors of the null space for theirs."""
    module = Formula(lambda s, x: torch.linalg.svdvals(s.W @ x).sum(), W=(5, 3))
    with pytest.raises(hk.TraceError, match=r"linalg_svdvals.*its two routes agree: .* from central differences of its value"):
        call(module, draw(3, 6), loss=None)
