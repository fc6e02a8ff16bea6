"""Modules that compute in several floating-point types: float64, float32, bfloat16, float16, and what promotes one to another."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, draw, largest_error, mse, reverse_over_reverse, sample
from readings import READINGS, assert_readings
from torch import Tensor
from torch.nn import functional as F

import hessiankit as hk

X, T = draw(2, 4, 3), draw(2, 4, 3, seed=2)
MASK, GAIN = draw(4, 4, seed=3), draw(3, seed=4).float()
INDEX = torch.tensor([2, 0, 1])
PROMISE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Of the largest entry of a block pair; the table of docs/concepts/checks.md."""


def attention(s: Formula, x: Tensor) -> Tensor:
    """Scores in float32, a float64 mask, probabilities in the values' own type."""
    scores = (x @ s.W).float() @ (x @ s.V).float().mT + MASK
    return scores.softmax(-1).to(x.dtype) @ (x @ s.W)


def norm(s: Formula, x: Tensor) -> Tensor:
    z = (x @ s.W).float()
    return (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) @ s.V


def small_norm(s: Formula, x: Tensor) -> Tensor:
    """Without an eps of its own: torch takes that of the type, and of float32 in half precision."""
    return F.rms_norm(1e-3 * (x @ s.W), (3,)) @ s.V


def joined(s: Formula, x: Tensor) -> Tensor:
    z = torch.tanh(x @ s.W)
    whole = torch.cat([z.float(), x @ s.V], -1) * torch.stack([z[..., 0].double(), z[..., 1]], -1).prod(-1, keepdim=True)
    return torch.where(whole > 0, whole, z.float().repeat(1, 1, 2))[..., 1:4]


def chosen(s: Formula, x: Tensor) -> Tensor:
    z, wide = torch.tanh(x @ s.W), (x @ s.V).double()
    return torch.maximum(z, wide) * torch.atan2(z, wide + 3) + wide.index_add(-1, INDEX, z.double())


def written(s: Formula, x: Tensor) -> Tensor:
    z = x @ s.W
    z += (x @ s.V).double().tanh()
    z[:, 0] = (x @ s.V)[:, 1].float().sin()
    return z * z


def fallback(s: Formula, x: Tensor) -> Tensor:
    """An operation without a chapter, of a float32 value and a constant."""
    return torch.special.i0e((x @ s.W).float() * GAIN).to(x.dtype) @ s.V


CASES: dict[str, Callable[[Formula, Tensor], Tensor]] = {
    f.__name__: f for f in (attention, norm, small_norm, joined, chosen, written, fallback)
}
SHAPES = {"W": (3, 3), "V": (3, 3)}


def own(z: Tensor, target: Tensor) -> Tensor:
    """The mean squared error in the type that output and target promote to."""
    return (z - target).square().mean()


def readings(module: Formula, x: Tensor, target: Tensor) -> tuple[hk.Hessian, dict[str, float]]:
    """The dense Hessian, and how far the other calls are from it, relative to its largest entry."""
    found = hk.hessian(module, x, target, loss=own)
    matrix, scale = found.matrix.double(), float(found.matrix.abs().max())
    far = {}
    for name, reading in READINGS.items():
        _, seen = reading.call(module, x, target, loss=own)
        expected = reading.of(matrix, [p.numel() for p in module.parameters()])
        far[name] = float((seen.double() - expected).abs().max()) / scale
        assert name == "frobenius_norms" or seen.dtype == found.matrix.dtype
    return found, far


@pytest.mark.parametrize(
    ("name", "dtype"), sample([(name, dtype) for k, name in enumerate(CASES) for dtype in [*PROMISE][:: -1 if k % 2 else 1]], 2)
)
def test_every_type(name: str, dtype: torch.dtype) -> None:
    """Against autograd through the module itself."""
    module = Formula(CASES[name], **SHAPES).to(dtype)
    x, target = X.to(dtype), T.to(dtype)
    found, far = readings(module, x, target)
    floor = torch.finfo(torch.float64 if name in ("small_norm", "chosen") and dtype == torch.float64 else torch.float32).eps
    assert found.matrix.dtype == torch.promote_types(dtype, torch.float32)
    assert max(far.values()) <= max(100 * floor, 4 * torch.finfo(dtype).eps), far  # products may be bracketed otherwise
    assert found.fallbacks == (("aten.special_i0e.default",) if name == "fallback" else ())
    promise = PROMISE[dtype] if floor < 1e-10 else max(PROMISE[dtype], 1e-5)
    assert largest_error(found, reverse_over_reverse(module, x, target, own).double()) <= promise


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to another type and back, as a value in float64 whose derivative is the identity."""
    return x + (x.to(dtype).double() - x).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_derivatives_are_exact_at_rounded_values(dtype: torch.dtype) -> None:
    """A cast moves the point and nothing else: in float64 all digits of the derivatives there are right."""
    cast = Formula(lambda s, x: torch.tanh((x @ s.W).to(dtype).double() @ s.V) * (x @ s.W), **SHAPES)
    moved = Formula(lambda s, x: torch.tanh(rounded(x @ s.W, dtype) @ s.V) * (x @ s.W), **SHAPES)
    found, far = readings(cast, X, T)
    assert max(far.values()) <= 1e-14
    assert largest_error(found, reverse_over_reverse(moved, X, T, mse)) <= 1e-10


def test_parameters_of_several_types() -> None:
    """A norm in float32 within a bfloat16 model, as large models keep it."""

    def formula(s: Formula, x: Tensor) -> Tensor:
        z = (x @ s.W).to(s.gain.dtype)
        return (F.layer_norm(z, (3,)) * s.gain).to(s.V.dtype) @ s.V

    module = Formula(formula, **SHAPES, gain=(3,)).bfloat16()
    module.gain.data = module.gain.data.float()
    x, target = X.bfloat16(), T.bfloat16()
    found, far = readings(module, x, target)
    assert found.matrix.dtype == torch.float32
    assert max(far.values()) <= 1e-5
    double = copy.deepcopy(module).double()
    assert largest_error(found, reverse_over_reverse(double, x.double(), target.double(), own)) <= 0.1
    mixed = copy.deepcopy(module).float()
    mixed.V.data = mixed.V.data.double()
    assert hk.hessian(mixed, x.float(), target.double(), loss=own).matrix.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_named_losses_of_half_precision(dtype: torch.dtype, loss: str) -> None:
    torch.manual_seed(0)
    block = hk.TransformerBlock(d_model=4, d_ff=5).to(dtype)
    x = draw(2, 3, 4).to(dtype)
    target = draw(2, 3, 4, seed=2).to(dtype) if loss == "mse" else torch.tensor([[0, 3, -100], [1, 2, 2]])
    found = hk.hessian(block, x, target, loss=loss)
    double = hk.hessian(copy.deepcopy(block).double(), x.double(), target.double() if loss == "mse" else target, loss=loss)
    assert found.matrix.dtype == torch.float32
    assert found.eigvalsh().isfinite().all()
    assert largest_error(found, double.matrix) <= PROMISE[dtype]
    assert abs(found.loss - double.loss) <= 4 * torch.finfo(dtype).eps * double.loss


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.bool])
def test_frozen_codes_of_quantised_weights_are_constants(kind: torch.dtype) -> None:
    """As under adapters: the codes are parameters that cannot require a gradient."""

    def adapted(s: Formula, x: Tensor) -> Tensor:
        return torch.tanh(x @ (s.codes.double() * 0.1 - 0.8)) @ (s.A @ s.B)

    module = Formula(adapted, A=(3, 1), B=(1, 2))
    codes = torch.randint(16, (3, 3), generator=torch.Generator().manual_seed(0)).to(kind)
    module.codes = torch.nn.Parameter(codes, requires_grad=False)
    target = draw(2, 4, 2)
    expected = reverse_over_reverse(module, X, target, mse, ["A", "B"])
    assert_readings(expected, module, X, target)
    assert hk.check(module, X, target)
    operator = hk.hessian_operator(module, X, target, snapshot=False)
    assert (operator.to_matrix() - expected).abs().max() <= 1e-12 * expected.abs().max()
    module.codes.data[0, 0] = module.codes[0, 0] == 0
    with pytest.raises(hk.InputError, match="the parameter 'codes' has been given other values since"):
        operator.to_matrix()
    with pytest.raises(hk.InputError, match="'codes' does not require grad"):
        hk.hessian(module, X, target, params=["codes"])


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]
ROUNDED: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "a cast": lambda z, cast: cast(z),
    "a scaled cast": lambda z, cast: cast(z / z.detach().abs().amax()) * z.detach().abs().amax(),
    "views": lambda z, cast: cast(z).mT.flatten(1).unflatten(1, (3, 4)).clone().mT,
}


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("name", ROUNDED)
def test_casts_to_eight_bits(name: str, dtype: torch.dtype) -> None:
    """Derivatives of a cast are those of the identity, at the rounded value; torch rounds its gradients too."""

    def module(cast: Callable[[Tensor], Tensor]) -> Formula:
        return Formula(lambda s, x: torch.tanh(ROUNDED[name](x @ s.W, cast)) @ s.V, W=(3, 3), V=(3, 3))

    expected = reverse_over_reverse(module(lambda z: z + (z.to(dtype).to(z.dtype) - z).detach()), X, T, mse)
    found = hk.hessian(module(lambda z: z.to(dtype).to(z.dtype)), X, T).matrix
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("dtype", [*EIGHT_BITS, torch.float8_e8m0fnu], ids=str)
def test_constants_of_eight_bits(dtype: torch.dtype) -> None:
    module = Formula(lambda s, x: torch.tanh(x @ s.w.clone().mT.to(x.dtype)) @ s.W, W=(3, 3))
    module.register_buffer("w", draw(3, 3, seed=5).abs().to(dtype))
    found, expected = hk.hessian(module, X, T).matrix, reverse_over_reverse(module, X, T, mse)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    module.w = draw(3, 3, seed=5).fill_(torch.nan).to(dtype)
    with pytest.raises(hk.InputError, match="'w' contains NaN or infinity"):
        hk.hessian(module, X, T)


def test_a_cast_to_exponents_is_refused() -> None:
    module = Formula(lambda s, x: (x @ s.W).square().to(torch.float8_e8m0fnu).to(x.dtype), W=(3, 3))
    with pytest.raises(hk.TraceError, match=r"are cast to torch\.float8_e8m0fnu, which has no digits beside an exponent"):
        hk.hessian(module, X, T)
