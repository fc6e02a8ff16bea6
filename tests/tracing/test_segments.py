"""Values that come from no operation that can be seen: right by autograd's own graph of them, or refused with the cause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from curvature_reference import Formula, draw, in_thread, mse, reverse_over_reverse
from differences_reference import by_differences
from operation_cases import cubed
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hessiankit as hk

X, WEIGHT = draw(3, 4), draw(3, 4, seed=5)


def formula(f: Callable[[Formula, Tensor], Tensor]) -> Formula:
    return Formula(f, W=(4, 4), v=(4,))


def coupled(x: Tensor, g: Tensor) -> Tensor:
    """Of x^3, whose second derivative, as torch takes it, couples entries that x^3 does not, and not symmetrically."""
    other = x.flip(-1) * torch.arange(1.0, 1 + x.shape[-1], dtype=x.dtype)
    return g * (3 * x.square() + other - other.detach())


Cubed = cubed("Cubed")
IntoABuffer = cubed("IntoABuffer", forward=lambda x: torch.empty_like(x).copy_(x).mul_(x).mul_(x))
Once = cubed("Once", wrap=once_differentiable)
InNumPy = cubed("InNumPy", lambda x, g: torch.from_numpy((3 * x.square() * g).detach().numpy()))
KeepsAProduct = cubed("KeepsAProduct", lambda square, g: 3 * square * g, saved=torch.square)  # a constant to autograd
Coupled = cubed("Coupled", coupled)
Halved = cubed("Halved", lambda x, g: 1.5 * x.square() * g)  # half its derivative, and that consistently


class Pair(torch.autograd.Function):
    """x W and the sum of squares of the columns of x: two inputs, two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w, x.square().sum(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.mT + 2 * x * h, x.mT @ g


def one_after_the_other(s: Formula, x: Tensor) -> Tensor:
    return Cubed.apply(Cubed.apply(x @ s.W) * s.v) * 0.1 + Cubed.apply(s.v)  # type: ignore[no-any-return]


def of_two_that_depend(s: Formula, x: Tensor) -> Tensor:
    h = torch.tanh(x @ s.W)
    first, second = Pair.apply(h * s.v, s.W)
    return first * second  # type: ignore[no-any-return]


def written_into_afterwards(s: Formula, x: Tensor) -> Tensor:
    y = Cubed.apply(x @ s.W)
    z = y + 0
    y = y * 1
    y.mul_(2)
    y[0] = z[1]
    return y * s.v * z  # type: ignore[no-any-return]


def rotated(s: Formula, x: Tensor) -> Tensor:
    """Rotary position embeddings as complex numbers."""
    turns = torch.polar(torch.ones(3, 2).double(), torch.arange(6.0).double().reshape(3, 2))
    pairs = torch.view_as_complex((x @ s.W).reshape(3, 2, 2))
    return torch.view_as_real(pairs * turns).flatten(1).tanh() * s.v


def complex_in_place(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    z = y * 1
    torch.view_as_complex(z.reshape(3, 2, 2)).mul_(1j)
    return z * s.v * y


def filtered(s: Formula, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x @ s.W) * torch.complex(s.v[:3], s.v[1:]), n=4)


def of_the_field(s: Formula, x: Tensor) -> Tensor:
    """First and second derivatives of a network by its input, as in a physics-informed one."""
    x = x.clone().requires_grad_()
    y = torch.tanh(x @ s.W) @ s.W * s.v
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)
    return h + g * y


def with_dual_numbers(s: Formula, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        moved = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(torch.tanh(moved @ s.W)).tangent * s.v


def hooked(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    y.retain_grad()
    y.register_hook(lambda g: None)
    return Cubed.apply(y) * s.v  # type: ignore[no-any-return]


class WithHooks(nn.Module):
    """Backward hooks of modules, which put a function of autograd before and after each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)
        self.second.register_full_backward_hook(lambda *_: None)
        self.second.register_full_backward_pre_hook(lambda *_: None)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]


def transform(of: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Callable[[Formula, Tensor], Tensor]:
    """What a transform of torch.func makes of a layer."""
    return lambda s, x: of(lambda a: torch.tanh(a @ s.W) * s.v, x)


FUNC = torch.func
CASES: dict[str, tuple[nn.Module | Callable[[Formula, Tensor], Tensor], str]] = {
    "a function of one's own": (lambda s, x: Cubed.apply(x @ s.W) * s.v, "autograd: CubedBackward"),
    "a function that writes into a buffer": (lambda s, x: IntoABuffer.apply(x @ s.W) * s.v, "autograd: IntoABufferBackward"),
    "functions one after the other": (one_after_the_other, "autograd: CubedBackward"),
    "a function of two inputs, one of which depends on the other": (of_two_that_depend, "autograd: PairBackward"),
    "a function whose result is written into": (written_into_afterwards, "autograd: CubedBackward"),
    "a function with hooks on its input": (hooked, "autograd: CubedBackward"),
    "a function within a checkpoint": (
        lambda s, x: checkpoint(lambda w: Cubed.apply(x @ w) * s.v, s.W, use_reentrant=False),
        "autograd: CubedBackward",
    ),
    "another thread": (lambda s, x: in_thread(lambda: torch.tanh(x @ s.W)) * s.v, "autograd: TanhBackward0"),
    "vmap": (transform(lambda f, x: torch.vmap(f)(x)), "autograd: MulBackward0"),
    "vmap over a parameter": (lambda s, x: torch.vmap(lambda w: x * w, 0)(s.W).sum(0) * s.v, "autograd: MulBackward0"),
    "vmap of a norm": (lambda s, x: torch.vmap(lambda a: F.layer_norm(a @ s.W, (4,), s.v))(x) * s.v, "NativeLayerNorm"),
    "func.grad": (transform(lambda f, x: FUNC.grad(lambda a: f(a).sum())(x)), "autograd: MmBackward0"),
    "func.jvp": (transform(lambda f, x: FUNC.jvp(f, (x,), (x,))[1]), "autograd: AddBackward0"),
    "func.jacrev": (transform(lambda f, x: FUNC.jacrev(f)(x).sum((2, 3))), "autograd:"),
    "func.jacfwd": (transform(lambda f, x: FUNC.jacfwd(f)(x).sum((2, 3))), "autograd:"),
    "func.hessian": (transform(lambda f, x: FUNC.hessian(lambda a: f(a).sum())(x[0])[:3] + x), "autograd:"),
    "autograd.functional.jacobian": (
        transform(lambda f, x: torch.autograd.functional.jacobian(f, x[0], create_graph=True)[:3] + x),
        "autograd:",
    ),
    "dual numbers": (with_dual_numbers, "autograd: TanhBackwardBackward0"),
    "gradients within the module": (of_the_field, "autograd: MmBackward0"),
    "rotary": (rotated, "autograd: ViewAsRealBackward0, MulBackward0, ViewAsComplexBackward0"),
    "complex, in place": (complex_in_place, "autograd: torch::autograd::CopySlices"),
    "fft of both axes": (lambda s, x: torch.fft.fft(torch.fft.fft(x @ s.W, dim=-1), dim=0).real.tanh() * s.v, "FftC2CBackward0"),
    "a filter": (filtered, "autograd: FftC2RBackward0, MulBackward0, FftR2CBackward0"),
    "absolute values": (lambda s, x: torch.fft.fft(x @ s.W).abs().sin() * s.v, "autograd: AbsBackward0, FftR2CBackward0"),
    "times a complex number": (lambda s, x: ((x @ s.W) * (2 + 1j)).imag * s.v.tanh(), "ViewAsRealBackward0"),
    "exponential": (lambda s, x: torch.exp(1j * (x @ s.W)).real * s.v, "autograd: SelectBackward0"),
    "hooks of modules": (WithHooks(), ""),
}


def scalar(z: Tensor, _: Any = None) -> Tensor:
    return (z - WEIGHT).square().sum() / 2 + (z**3 * WEIGHT).sum() / 10


@pytest.mark.parametrize(("k", "name"), enumerate(CASES))
def test_readings_are_those_of_the_module(k, name):
    f, fallback = CASES[name]
    module = f if isinstance(f, nn.Module) else formula(f)
    expected = by_differences(module, lambda: scalar(module(X)))
    found = assert_readings(expected, module, X, draw(1), readings=in_turn(k), loss=scalar, floor=1e-10)["hessian"]
    assert any(fallback in each for each in found.fallbacks) if fallback else not found.fallbacks


def clamped_without_gradient(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    before = y * 2
    with torch.no_grad():
        y.clamp_(-0.5, 0.5)
    return torch.tanh(y) * s.v + before * y[:, :1]


def written_through_a_detached_view(s: Formula, x: Tensor) -> Tensor:
    y = x @ s.W
    y.detach()[0].fill_(1.0)
    return torch.tanh(y) * s.v


def gaussian(s: Formula, x: Tensor) -> Tensor:
    loss = nn.GaussianNLLLoss(reduction="none", eps=0.3)
    return loss(x @ s.W, x, s.v.square().expand(3, 4))  # type: ignore[no-any-return]


STRAIGHT_THROUGH: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "clamped without gradient": clamped_without_gradient,
    "written through a detached view": written_through_a_detached_view,
    "GaussianNLLLoss, whose variances are clamped": gaussian,
    "vmap of what is cut off": lambda s, x: torch.vmap(lambda a: (a @ s.W).detach())(x) * s.v,
    "a gradient without a graph": lambda s, x: torch.tanh(x @ s.W) * torch.autograd.grad((s.v**3).sum(), s.v)[0] * s.v,
    "a function of data alone": lambda s, x: Cubed.apply(x) * s.v**2,
}


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_where_gradients_pass_what_was_written_they_pass_here_too(name):
    module, target = formula(STRAIGHT_THROUGH[name]), draw(3, 4, seed=7)
    expected = reverse_over_reverse(module, X, target, mse)
    found = hk.hessian(module, X, target)
    assert found.fallbacks == ()
    assert (found.matrix - expected).abs().max() <= 1e-12 * expected.abs().max()


CONSTANT = "marked once_differentiable or leaves torch"
REFUSED: dict[str, tuple[Callable[[Formula, Tensor], Tensor], str]] = {
    "once differentiable": (lambda s, x: Once.apply(x @ s.W) * s.v, f"autograd: OnceBackward .* {CONSTANT}"),
    "NumPy": (lambda s, x: InNumPy.apply(x @ s.W) * s.v, f"autograd: InNumPyBackward .* {CONSTANT}"),
    "kept by forward": (
        lambda s, x: KeepsAProduct.apply(x @ s.W) * s.v,
        "second derivative of the loss is off by .* from central differences of its gradient .* autograd: KeepsAProductBackward",
    ),
    "not symmetric": (lambda s, x: Coupled.apply(x @ s.W) * s.v, "autograd: CoupledBackward .* is not symmetric, by"),
    "no derivative of its forward": (
        lambda s, x: Halved.apply(x @ s.W) * s.v,
        "first derivative of the loss is off by .* from central differences of the loss .* autograd: HalvedBackward",
    ),
    "a norm within func.grad": (
        lambda s, x: FUNC.grad(lambda a: (F.layer_norm(a @ s.W, (4,), s.v) ** 3).sum())(x) * s.v,
        "NativeLayerNormBackwardBackward0, .* is not symmetric, by",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("ask", [hk.hessian, hk.hessian_operator, hk.hessian_diagonal])
def test_what_torch_cannot_differentiate_twice_is_refused_with_the_cause(name, ask):
    f, message = REFUSED[name]
    with pytest.raises(hk.TraceError, match=message):
        ask(formula(f), X, draw(3, 4, seed=7))


def test_gauss_newton_needs_no_second_derivative_of_a_function():
    module, target = formula(lambda s, x: Coupled.apply(x @ s.W) * s.v), draw(3, 4, seed=7)
    slopes = FUNC.jacrev(lambda p: (x := X @ p["W"]) * x * x * p["v"])(dict(module.named_parameters()))
    jacobian = torch.cat([slopes[name].detach().reshape(12, -1) for name in ("W", "v")], 1)
    found = hk.hessian_operator(module, X, target, kind="ggn", handshake=False) @ torch.eye(20).double()
    expected = jacobian.mT @ jacobian * (2 / 12)
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_products_stay_those_of_the_point_when_training_goes_on():
    module, target = formula(of_the_field), draw(3, 4, seed=7)
    expected = hk.hessian(module, X, target).matrix
    operator = hk.hessian_operator(module, X, target)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1)
            p.data.mul_(2)
    moved = {name: p.detach().clone() for name, p in module.named_parameters()}
    assert (operator @ torch.eye(20).double() - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert all(torch.equal(p, moved[name]) for name, p in module.named_parameters())
    scalar(module(X)).backward()  # the graphs of the user's own calls are none of the tracer's business


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("fft of both axes", torch.float32, 1e-5),  # torch has none in bfloat16
        ("a function of one's own", torch.float32, 1e-5),
        ("vmap", torch.bfloat16, 0.05),
        ("gradients within the module", torch.bfloat16, 0.05),
    ],
)
def test_other_types(name, dtype, tolerance):
    module, target = formula(CASES[name][0]), draw(3, 4, seed=7)  # type: ignore[arg-type]
    expected = hk.hessian(module, X, target).matrix
    found = hk.hessian(module.to(dtype), X.to(dtype), target.to(dtype)).matrix
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_rotary_in_float32_within_a_model_in_float64():
    def lowered(s: Formula, x: Tensor) -> Tensor:
        turns = torch.polar(torch.ones(3, 2), torch.arange(6.0).reshape(3, 2))
        pairs = torch.view_as_complex((x @ s.W).float().reshape(3, 2, 2))
        return torch.view_as_real(pairs * turns).flatten(1).to(x.dtype).tanh() * s.v

    module, target = formula(lowered), draw(3, 4, seed=7)
    expected = hk.hessian(formula(rotated), X, target).matrix
    for found in (hk.hessian(module, X, target).matrix, hk.hessian_operator(module, X, target) @ torch.eye(20).double()):
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_row_left_out_of_the_gradient_is_left_out_of_the_comparison():
    """An embedding whose padding token is read, before something that only autograd knows."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 4)).double()
    tokens, target = torch.tensor([[0, 1, 2], [4, 1, 3]]), draw(2, 3, 4, seed=7)

    def spectral(z: Tensor, t: Tensor) -> Tensor:
        return (torch.fft.fft(z, dim=1).real - t).square().mean()

    found = hk.hessian(module, tokens, target, loss=spectral)
    assert any("autograd" in name for name in found.fallbacks)
    assert not found.block("0.weight", "1.weight")[4:8].any()


class Rounded(torch.autograd.Function):
    """A straight-through function: rounded on the way forward, the identity on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, digits: float) -> Tensor:
        return (x * digits).round() / digits

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> tuple[Tensor, None]:
        return adjoint, None


@pytest.mark.parametrize(
    ("digits", "call", "dtype"),
    [(1, hk.hessian, torch.float64), (8, hk.hessian_operator, torch.float32), (64, hk.hessian_diagonal, torch.float64)],
)
def test_a_straight_through_function_is_refused_in_every_precision(
    digits: float, call: Callable[..., Any], dtype: torch.dtype
) -> None:
    module = Formula(lambda s, x: Rounded.apply(x @ s.W, digits).tanh() @ s.V, W=(3, 4), V=(4, 2)).to(dtype)
    with pytest.raises(hk.TraceError, match=r"derivative of the loss is off|do not settle"):
        call(module, draw(6, 3).to(dtype), draw(6, 2, seed=2).to(dtype))


@pytest.mark.parametrize("like", [torch.empty_like, torch.rand_like, torch.zeros_like, lambda y: y.new_empty(3, 4)])
def test_a_function_whose_shape_is_read_first(like: Callable[[Tensor], Tensor]) -> None:
    """Torch makes a tensor of the shape of another one beneath autograd."""

    def f(s: Formula, x: Tensor) -> Tensor:
        y = Cubed.apply(x @ s.W)
        return y * like(y).fill_(2.0)

    module, x, target = Formula(f, W=(3, 4)), draw(3, 3), draw(3, 4, seed=2)
    expected = reverse_over_reverse(module, x, target, mse)
    assert hk.hessian(module, x, target).matrix.allclose(expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
