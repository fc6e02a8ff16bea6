"""Jets against sympy.diff, and the matrix formulas against floating-point automatic differentiation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import sympy
import torch

from hessiankit.verify import jets
from hessiankit.verify.jets import FormalExponential, FormalFunction, Jet, Variables


def draw(seed: int, *shape: int) -> np.ndarray:
    rng = random.Random(seed)
    entries = [Fraction(rng.choice([-5, -4, -3, -1, 1, 2, 3]), rng.choice([1, 2, 3])) for _ in range(int(np.prod(shape)))]
    return np.array(entries, dtype=object).reshape(shape)


def to_tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x.astype(float))


x, y, z = sympy.symbols("x y z")
FUNCTIONS: list[tuple[str, Callable[..., object], tuple[int, int, int]]] = [
    ("polynomial", lambda x, y, z: x * x * y - 3 * y * z + x - z * z * z, (2, -1, 3)),
    ("scalars on either side", lambda x, y, z: 2 - (1 + x) * 3 + (y - 4) / 2 + 5 / z - (-x) * y, (2, -1, 3)),
    ("quotient", lambda x, y, z: (x * y - z) / (x * x + y * y + 1), (1, 2, 5)),
    ("square of a shared node", lambda x, y, z: (lambda u: u * u / (u + 1))(x * y + z), (1, 2, 4)),
]


@pytest.mark.parametrize(("f", "point"), [(f, point) for _, f, point in FUNCTIONS], ids=[name for name, _, _ in FUNCTIONS])
def test_derivatives_equal_sympy(f: Callable[..., object], point: tuple[int, int, int]) -> None:
    jet = f(*(Jet(Fraction(v), {k: 1}) for k, v in enumerate(point)))
    at = dict(zip((x, y, z), point, strict=True))
    expression = f(x, y, z)
    assert jet.value == expression.subs(at)
    for i, a in enumerate((x, y, z)):
        assert jet.grad.get(i, 0) == expression.diff(a).subs(at)
        for j, b in enumerate((x, y, z)):
            assert jet.hess.get((min(i, j), max(i, j)), 0) == expression.diff(a, b).subs(at)


def test_square_root_and_logarithm_equal_sympy() -> None:
    a, b = Jet(Fraction(1, 4), {0: 1}), Jet(Fraction(2), {1: 1})
    at = {x: sympy.Rational(1, 4), y: 2}
    for jet, expression in (((a * b + a * 7).sqrt(), sympy.sqrt(x * y + 7 * x)), ((a * b * b).log(), sympy.log(x * y**2))):
        assert [jet.grad[0], jet.grad[1]] == [expression.diff(v).subs(at) for v in (x, y)]
        assert [jet.hess.get(k, 0) for k in ((0, 0), (0, 1), (1, 1))] == [
            expression.diff(*pair).subs(at) for pair in ((x, x), (x, y), (y, y))
        ]


def test_square_root_refuses_irrational_and_nonpositive_values() -> None:
    for value in (2, 0, -4):
        with pytest.raises(ValueError, match="not the square of a positive rational"):
            Jet(Fraction(value), {0: 1}).sqrt()


def test_relu_slopes_and_kink() -> None:
    assert Jet(Fraction(3), {0: 1}).relu().grad == {0: 1}
    assert Jet(Fraction(-3), {0: 2}).relu(Fraction(1, 4)).grad == {0: Fraction(1, 2)}
    assert not any(Jet(Fraction(-3), {0: 2}, {(0, 0): 1}).relu().hess.values())
    with pytest.raises(jets.KinkError, match="derivative is not defined"):
        Jet(Fraction(0), {0: 1}).relu()


def test_logarithm_has_no_rational_value_so_a_use_of_it_cannot_pass_for_equal() -> None:
    loss = Jet(Fraction(3), {0: 1}).log()
    assert loss.value != loss.value
    assert (loss * Jet(Fraction(2), {1: 1})).grad[1] != 0


def test_formal_exponential_is_a_function_and_positive() -> None:
    exp = FormalExponential(3)
    points = [Fraction(k, 3) for k in range(-9, 9)]
    first = [exp.weight(t) for t in points]
    assert first == [exp.weight(t) for t in points]
    assert min(first) > 0
    assert len(set(first)) > 5
    assert exp(Jet(points[0], {0: 1})).value == first[0] == exp(points[0])


def test_softmax_of_formal_weights_is_the_softmax_of_their_logarithms() -> None:
    """At t = log u the formal weights are the true ones, so that automatic differentiation can be the reference."""
    T, exp = draw(0, 2, 3), FormalExponential(1)
    v = Variables({"T": T})
    A = jets.softmax(v["T"], exp)
    logits = torch.log(to_tensor(exp.weights(T)))
    expected = torch.stack([_hessian(lambda t, k=k: torch.softmax(t, 1).reshape(-1)[k], logits) for k in range(6)])
    torch.testing.assert_close(to_tensor(v.hessian(A, "T", "T")), expected.reshape(36, 6), rtol=1e-13, atol=1e-14)


def test_masked_softmax_has_zero_weight_and_zero_derivatives_there() -> None:
    v = Variables({"T": draw(1, 2, 2)})
    A = jets.softmax(v["T"], FormalExponential(1), np.array([[True, False], [True, True]]))
    assert jets.values(A)[0].tolist() == [1, 0]
    assert not v.jacobian(A, "T")[:2].any()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_against_automatic_differentiation(norm: str) -> None:
    point = {"X": draw(2, 2, 3), "gamma": draw(3, 3)}
    v = Variables(point)
    out, eps = getattr(jets, {"layernorm": "layer_norm", "rmsnorm": "rms_norm"}[norm])(v["X"], v["gamma"])
    assert min(eps) > 0
    shift = 1.0 if norm == "layernorm" else 0.0

    def reference(X: torch.Tensor) -> torch.Tensor:
        M = X - shift * X.mean(1, keepdim=True)
        s = torch.sqrt((M * M).mean(1, keepdim=True) + to_tensor(eps).reshape(-1, 1))
        return (to_tensor(point["gamma"]) * M / s).reshape(-1)

    X = to_tensor(point["X"])
    torch.testing.assert_close(to_tensor(jets.values(out)).reshape(-1), reference(X), rtol=1e-13, atol=1e-14)
    expected = torch.cat([_hessian(lambda x, k=k: reference(x)[k], X) for k in range(6)])
    torch.testing.assert_close(to_tensor(v.hessian(out, "X", "X")), expected, rtol=1e-12, atol=1e-13)


def test_cross_entropy_against_automatic_differentiation() -> None:
    logits, exp = draw(4, 2, 3), FormalExponential(2)
    v = Variables({"logits": logits})
    loss = jets.cross_entropy(v["logits"], [2, 0], exp)
    T = torch.log(to_tensor(exp.weights(logits)))
    expected = _hessian(lambda t: torch.nn.functional.cross_entropy(t, torch.tensor([2, 0])), T)
    torch.testing.assert_close(to_tensor(v.hessian(loss, "logits", "logits")), expected, rtol=1e-13, atol=1e-14)


class RoundedExponential(FormalExponential):
    """The exponential itself, rounded to a double: what floating-point arithmetic sees."""

    def weight(self, t: int | Fraction) -> Fraction:
        return Fraction(math.exp(t))


def test_post_norm_block_against_automatic_differentiation() -> None:
    shapes = {
        "X": (2, 3),
        "W_Q": (3, 2),
        "W_K": (3, 2),
        "W_V": (3, 3),
        "W_1": (3, 4),
        "W_2": (4, 3),
        "b_1": (4,),
        "gamma_2": (3,),
    }
    point = {name: draw(20 + k, *shape) for k, (name, shape) in enumerate(shapes.items())}
    v = Variables({name: point[name] for name in ("X", "W_Q")})
    Z, eps = jets.post_norm_block({**point, **v.arrays}, scale=Fraction(1, 2), exp=RoundedExponential())
    w = {name: to_tensor(array) for name, array in point.items()}

    def norm(x: torch.Tensor, eps: np.ndarray) -> torch.Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / torch.sqrt((centred**2).mean(1, keepdim=True) + to_tensor(eps).reshape(-1, 1))

    def block(flat: torch.Tensor) -> torch.Tensor:
        X, W_Q = flat[:6].reshape(2, 3), flat[6:].reshape(3, 2)
        A = torch.softmax(X @ W_Q @ (X @ w["W_K"]).T / 2, 1)
        Y = norm(X + A @ X @ w["W_V"], eps[0])
        return (norm(Y + torch.relu(Y @ w["W_1"] + w["b_1"]) @ w["W_2"], eps[1]) * w["gamma_2"]).reshape(-1)

    flat = torch.cat([w["X"].reshape(-1), w["W_Q"].reshape(-1)])
    torch.testing.assert_close(to_tensor(jets.values(Z)).reshape(-1), block(flat), rtol=1e-12, atol=1e-13)
    expected = torch.stack([torch.autograd.functional.hessian(lambda x, k=k: block(x)[k], flat) for k in range(6)])
    for i, rows in (("X", slice(0, 6)), ("W_Q", slice(6, 12))):
        for j, columns in (("X", slice(0, 6)), ("W_Q", slice(6, 12))):
            got = to_tensor(v.hessian(Z, i, j)).reshape(6, 6, 6)
            torch.testing.assert_close(got, expected[:, rows, columns], rtol=1e-10, atol=1e-11)


def test_formal_function_is_drawn_once_for_each_argument() -> None:
    f = FormalFunction(1)
    jet = f(Jet(Fraction(2), {0: Fraction(3)}, {(0, 0): Fraction(5)}))
    value, first, second = f.taylor(2)
    assert (jet.value, jet.grad, jet.hess) == (value, {0: 3 * first}, {(0, 0): 5 * first + 9 * second})
    assert len({f.taylor(Fraction(k, 2)) for k in range(8)}) > 5


def test_second_derivatives_of_a_bilinear_map_by_hand() -> None:
    point = {"Z": draw(5, 2, 3), "W": draw(6, 3, 2)}
    v = Variables(point)
    out = jets.mean_pool_head(v["Z"], v["W"])
    assert (v.jacobian(out, "Z") == np.kron(np.full((1, 2), Fraction(1, 2)), point["W"].T)).all()
    assert not v.hessian(out, "W", "W").any()
    assert v.hessian(out, "Z", "W").sum() == Fraction(1, 2) * 2 * 3 * 2


def _hessian(f: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.hessian(lambda flat: f(flat.reshape(at.shape)), at.reshape(-1))
