"""Values that come from no operation that can be seen: right by autograd's own graph of them, or refused with the cause."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, assert_exact, by_differences, draw, gauss_newton, in_thread, mse, reverse_over_reverse
from operation_cases import cubed
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

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


def of_the_field(s: Formula, x: Tensor) -> Tensor:
    """First and second derivatives of a network by its input, as in a physics-informed one."""
    x = x.clone().requires_grad_()
    y = torch.tanh(x @ s.W) @ s.W * s.v
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)
    return h + g * y


def forces(s: Formula, x: Tensor) -> Tensor:
    """Of distances: the distance of a row from itself, which is masked, is zero, and so is torch's derivative of it."""
    x = x.clone().requires_grad_()
    apart = (x.unsqueeze(0) - x.unsqueeze(1)).norm(dim=-1, keepdim=True)
    energy = torch.tanh(apart * s.v) * (1 - torch.eye(3, dtype=x.dtype)).unsqueeze(-1)
    return torch.autograd.grad(energy.sum(), x, create_graph=True)[0] @ s.W


def transform(of: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Callable[[Formula, Tensor], Tensor]:
    """What a transform of torch.func makes of a layer."""
    return lambda s, x: of(lambda a: torch.tanh(a @ s.W) * s.v, x)


FUNC = torch.func
CASES: dict[str, tuple[Callable[[Formula, Tensor], Tensor], str]] = {
    "a function of one's own": (lambda s, x: Cubed.apply(x @ s.W) * s.v, "autograd: CubedBackward"),
    "a function that writes into a buffer": (lambda s, x: IntoABuffer.apply(x @ s.W) * s.v, "autograd: IntoABufferBackward"),
    "a function of two inputs, one of which depends on the other": (of_two_that_depend, "autograd: PairBackward"),
    "a function whose result is written into": (written_into_afterwards, "autograd: CubedBackward"),
    "another thread": (lambda s, x: in_thread(lambda: torch.tanh(x @ s.W)) * s.v, "autograd: TanhBackward0"),
    "vmap": (transform(lambda f, x: torch.vmap(f)(x)), "autograd: MulBackward0"),
    "vmap over a parameter": (lambda s, x: torch.vmap(lambda w: x * w, 0)(s.W).sum(0) * s.v, "autograd: MulBackward0"),
    "vmap of a norm": (lambda s, x: torch.vmap(lambda a: F.layer_norm(a @ s.W, (4,), s.v))(x) * s.v, "NativeLayerNorm"),
    "func.grad": (transform(lambda f, x: FUNC.grad(lambda a: f(a).sum())(x)), "autograd: MmBackward0"),
    "func.hessian": (transform(lambda f, x: FUNC.hessian(lambda a: f(a).sum())(x[0])[:3] + x), "autograd:"),
    "gradients within the module": (of_the_field, "autograd: MmBackward0"),
    "forces of distances": (forces, "autograd: AddBackward0"),
    "rotary": (rotated, "autograd: ViewAsRealBackward0, MulBackward0, ViewAsComplexBackward0"),
    "complex, in place": (complex_in_place, "autograd: torch::autograd::CopySlices"),
    "fft of both axes": (lambda s, x: torch.fft.fft(torch.fft.fft(x @ s.W, dim=-1), dim=0).real.tanh() * s.v, "FftC2CBackward0"),
    "absolute values": (lambda s, x: torch.fft.fft(x @ s.W).abs().sin() * s.v, "autograd: AbsBackward0, FftR2CBackward0"),
    "times a complex number": (lambda s, x: ((x @ s.W) * (2 + 1j)).imag * s.v.tanh(), "ViewAsRealBackward0"),
}


def scalar(z: Tensor, _: Any = None) -> Tensor:
    return (z - WEIGHT).square().sum() / 2 + (z**3 * WEIGHT).sum() / 10


@pytest.mark.parametrize(("k", "name"), enumerate(CASES))
def test_readings_are_those_of_the_module(k, name):
    f, fallback = CASES[name]
    module = formula(f)
    expected = by_differences(module.parameters, lambda: scalar(module(X)))
    found = assert_readings(expected, module, X, draw(1), readings=in_turn(k), loss=scalar, floor=1e-10)["hessian"]
    assert any(fallback in each for each in found.fallbacks)


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


@pytest.mark.first_order
@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_where_gradients_pass_what_was_written_they_pass_here_too(name):
    assert assert_exact(formula(STRAIGHT_THROUGH[name]), X).fallbacks == ()


def network(s: Formula, x: Tensor) -> Tensor:
    return torch.tanh(x @ s.W) * s.v


def pulled_back(s: Formula, x: Tensor) -> Tensor:
    y, pull = torch.func.vjp(lambda x: network(s, x), x)
    return y + pull(torch.ones_like(y))[0].detach()


def pushed_under_no_grad(s: Formula, x: Tensor) -> Tensor:
    y, tangent = torch.func.jvp(lambda x: network(s, x), (x,), (torch.ones_like(x),))
    with torch.no_grad():
        slope = tangent.square()
    return y * tangent + slope


def consistency(s: Formula, x: Tensor) -> Tensor:
    """The target of a mean flow: a velocity less its derivative along the flow, as a constant (2505.13447, Eq. 9)."""
    u, du = torch.func.jvp(lambda x: network(s, x), (x,), (x.sin(),))
    return u - (x - 0.3 * du).detach() * tangent_size(du)


def tangent_size(du: Tensor) -> float:
    return float(du.detach().square().mean())


STOPPED: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    "a pull-back": pulled_back,
    "a push forward under no_grad": pushed_under_no_grad,
    "a target that is a push forward": consistency,
    "data of a vmap": lambda s, x: torch.vmap(lambda a: network(s, a))(x) * torch.vmap(lambda a: a @ s.W)(x).data.exp(),
    "a function of one's own": lambda s, x: Cubed.apply(x @ s.W) * Cubed.apply(x @ s.W).detach() * s.v,
}


@pytest.mark.parametrize("name", STOPPED)
def test_values_that_torch_holds_constant_are_held_in_central_differences(name):
    assert_exact(formula(STOPPED[name]), X)


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
    "linearize": (
        lambda s, x: FUNC.linearize(lambda a: torch.tanh(a @ s.W), x)[1](x) * s.v,
        "calls torch.func.linearize, whose map takes the parameters for constants",
    ),
    "a norm within func.grad": (
        lambda s, x: FUNC.grad(lambda a: (F.layer_norm(a @ s.W, (4,), s.v) ** 3).sum())(x) * s.v,
        "NativeLayerNormBackwardBackward0, .* is not symmetric, by",
    ),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # by linearize
@pytest.mark.parametrize(("name", "ask"), zip(REFUSED, itertools.cycle((hk.hessian, hk.hessian_operator, hk.hessian_diagonal))))
def test_what_torch_cannot_differentiate_twice_is_refused_with_the_cause(name, ask):
    f, message = REFUSED[name]
    with pytest.raises(hk.TraceError, match=message):
        ask(formula(f), X, draw(3, 4, seed=7))


def test_gauss_newton_needs_no_second_derivative_of_a_function():
    module, target = formula(lambda s, x: Coupled.apply(x @ s.W) * s.v), draw(3, 4, seed=7)
    expected = gauss_newton(formula(lambda s, x: (x @ s.W) ** 3 * s.v), X, target, mse)
    found = hk.hessian_operator(module, X, target, kind="ggn", handshake=False).to_matrix()
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_products_stay_those_of_the_point_when_training_goes_on():
    module, target = formula(of_the_field), draw(3, 4, seed=7)
    expected = hk.hessian(module, X, target).matrix
    operator = hk.hessian_operator(module, X, target)
    with torch.no_grad():
        for p in module.parameters():
            p.data.mul_(2)
    assert (operator.to_matrix() - expected).abs().max() <= 1e-12 * expected.abs().max()
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


@pytest.mark.parametrize(
    ("digits", "call", "dtype"),
    [(1, hk.hessian, torch.float64), (8, hk.hessian_operator, torch.float32), (64, hk.hessian_diagonal, torch.float64)],
)
def test_a_straight_through_function_is_refused_in_every_precision(digits, call, dtype):
    rounded = cubed("Rounded", lambda x, g: g, forward=lambda x: (x * digits).round() / digits)
    module = Formula(lambda s, x: rounded.apply(x @ s.W).tanh() @ s.V, W=(3, 4), V=(4, 2)).to(dtype)
    x, target = draw(6, 3).to(dtype), draw(6, 2, seed=2).to(dtype)
    with pytest.raises(
        hk.TraceError, match=r"(derivative of the loss is off|do not settle).* pass handshake=False to go without"
    ):
        call(module, x, target)
    expected = reverse_over_reverse(module, x, target, mse)
    found = hk.hessian(module, x, target, handshake=False).matrix  # by the backward of the function
    assert (found - expected).abs().max() <= {torch.float64: 1e-10, torch.float32: 1e-5}[dtype] * expected.abs().max()


def test_a_rounding_of_torch_is_refused_with_the_way_to_write_it():
    def rounded(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -20, 20)

    module = Formula(lambda s, x: rounded(torch.tanh(x @ s.W)).sin() @ s.V, W=(3, 4), V=(4, 2))
    x, target = draw(5, 3), draw(5, 2)
    with pytest.raises(hk.TraceError, match=r"fake_quantize.* It rounds.*; write x \+ \(f\(x\) - x\).detach\(\)"):
        hk.hessian(module, x, target)
    module.f = lambda s, x: (h := torch.tanh(x @ s.W)).add((rounded(h) - h).detach()).sin() @ s.V
    assert_exact(module, x, target)


@pytest.mark.parametrize("like", [torch.empty_like, torch.rand_like, lambda y: y.new_empty(3, 4)])
def test_a_function_whose_shape_is_read_first(like):
    """Torch makes a tensor of the shape of another one beneath autograd."""
    assert_exact(Formula(lambda s, x: (y := Cubed.apply(x @ s.W)) * like(y).fill_(2.0), W=(3, 4)), draw(3, 3))


def test_a_snapshot_holds_when_training_writes_into_what_a_graph_keeps():
    module = formula(of_two_that_depend)
    operator = hk.hessian_operator(module, X, draw(3, 4, seed=7), snapshot=True)
    expected = operator @ torch.ones(20, dtype=torch.float64)
    with torch.no_grad():
        module.W.add_(1.0)
    assert torch.equal(operator @ torch.ones(20, dtype=torch.float64), expected)


def test_the_row_of_a_padding_token_stays_still():
    """The module's gradient leaves the row out, and so must its central differences."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 4, padding_idx=1, dtype=torch.float64)
            nn.init.normal_(self.table.weight, generator=torch.Generator().manual_seed(0))

        def forward(self, tokens: Tensor) -> Tensor:
            return Cubed.apply(self.table(tokens))  # type: ignore[no-any-return]

    assert_exact(Padded(), torch.tensor([0, 1, 2]))
