"""Frozen weights of eight and four bits under trained parameters: tensor subclasses, one-byte floats, bitsandbytes and torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from hessiankit.training.digest import digest

X, T = draw(2, 4, 3), draw(2, 4, 2, seed=2)
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


class Codes(Tensor):
    """Codes of one byte with a scale, in two other tensors; operations dequantise them, as torchao's do below autograd."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        made = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def dequantize(self) -> Tensor:
        return self.codes.to(self.scale.dtype) * self.scale  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(args[0].codes), function(args[0].scale))
        return function(*(x.dequantize() if isinstance(x, Codes) else x for x in args), **(kwargs or {}))


class OfFunctions(Codes):
    """The same, of which F.linear dequantises above autograd, as torchao's does."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                return F.linear(args[0], args[1].dequantize())
            return function(*args, **(kwargs or {}))


def eighths(dtype: torch.dtype) -> Tensor:
    """Return a 3 x 3 matrix of multiples of an eighth, which every type of a byte has as it is or times eight."""
    values = torch.randint(-8, 9, (3, 3), generator=torch.Generator().manual_seed(5))
    return values.to(dtype) if not dtype.is_floating_point else (values / 8).to(dtype)


def adapted(weight: Tensor, *, is_buffer: bool = False) -> Formula:
    """Return a frozen linear map with an adapter of rank one on either side of a nonlinearity."""

    def formula(s: Formula, x: Tensor) -> Tensor:
        frozen = s.w.to(x.dtype) if type(s.w) in (Tensor, nn.Parameter) else s.w
        return F.linear(torch.tanh(F.linear(x @ s.A, frozen)), s.B)

    module = Formula(formula, A=(3, 3), B=(2, 3))
    module.register_buffer("w", weight) if is_buffer else module.register_parameter(
        "w", nn.Parameter(weight, requires_grad=False)
    )
    return module


SCALE = torch.tensor(0.1, dtype=torch.float64)
WEIGHTS: dict[str, Callable[[], Tensor]] = {
    **{str(dtype): lambda dtype=dtype: eighths(dtype) for dtype in EIGHT_BITS},
    **{
        f"{kind.__name__} of {dtype}": lambda kind=kind, dtype=dtype: kind(eighths(dtype), SCALE.clone())
        for kind in (Codes, OfFunctions)
        for dtype in (torch.int8, *EIGHT_BITS)
    },
}


def dense(weight: Tensor) -> Tensor:
    """Return the entries of a quantised weight in float64."""
    return weight.dequantize() if isinstance(weight, Codes) else weight.double()


def first_byte(weight: Tensor) -> Tensor:
    """Return the first entry of a weight, as a byte that can be written."""
    return (weight.codes if isinstance(weight, Codes) else weight).data.view(torch.uint8)[:1, :1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_quantised_weights_are_constants(name: str, is_buffer: bool) -> None:
    module = adapted(WEIGHTS[name](), is_buffer=is_buffer)
    expected = reverse_over_reverse(adapted(dense(module.w)), X, T, mse, ["A", "B"])
    before, tolerance = digest(dict(module.state_dict())), 1e-12 * expected.abs().max()
    assert (hk.hessian(module, X, T).matrix - expected).abs().max() <= tolerance
    for options in ({}, {"snapshot": False}, {"recompute": "layers"}, {"micro_batch": 1}, {"handshake": "second order"}):
        operator = hk.hessian_operator(module, X, T, **options)
        assert (operator.to_matrix() - expected).abs().max() <= tolerance, options
    assert digest(dict(module.state_dict())) == before


@pytest.mark.parametrize("name", WEIGHTS)
def test_changes_of_quantised_weights_are_seen(name: str) -> None:
    """A bit of a code, and of a scale: shared parameters are an error, copies keep the matrix, and a new call reads the change."""
    module = adapted(WEIGHTS[name]())
    shared, copied = (hk.hessian_operator(module, X, T, snapshot=snapshot) for snapshot in (False, True))
    function = hk.hessian_function(module, X, T)
    before = copied.to_matrix()
    first_byte(module.w).bitwise_xor_(16)
    after = reverse_over_reverse(adapted(dense(module.w)), X, T, mse, ["A", "B"])
    assert (after - before).abs().max() > 1e-3 * before.abs().max()
    with pytest.raises(hk.InputError, match="the parameter 'w' has been given other values since"):
        shared.to_matrix()
    assert torch.equal(copied.to_matrix(), before)
    assert (copied.approximation("diagonal").to_matrix().diagonal() - before.diagonal()).abs().max() <= 1e-12 * before.abs().max()
    assert (function().matrix - after).abs().max() <= 1e-12 * after.abs().max()
    if isinstance(module.w, Codes):
        shared = hk.hessian_operator(module, X, T, snapshot=False)
        module.w.scale.mul_(2)
        with pytest.raises(hk.InputError, match="the parameter 'w' has been given other values since"):
            shared.to_matrix()


def changing(module: Formula) -> Formula:
    """Let every call of a module write into its quantised weight."""
    module.register_forward_pre_hook(lambda m, _: first_byte(m.w).bitwise_xor_(16) and None)
    return module


def spoiled(dtype: torch.dtype = torch.int8) -> Codes:
    return Codes(eighths(dtype), SCALE * torch.nan)


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "a wrapper that is trained": (
        lambda: hk.hessian(adapted(Codes(eighths(torch.int8), SCALE)).requires_grad_(), X, T),
        "w is a Codes, a tensor that keeps its numbers in others .quantised weights.: only constants of a module may be that: call "
        r"requires_grad_\(False\) on it",
    ),
    "a wrapper as inputs": (
        lambda: hk.hessian(Formula(lambda s, x: F.linear(x, s.W), W=(2, 3)), Codes(eighths(torch.int8), SCALE), T[0, :3]),
        "inputs is a Codes, a tensor that keeps its numbers in others .* pass plain data",
    ),
    "one-byte floats that are trained": (
        lambda: hk.hessian(Formula(lambda s, x: x @ s.W.to(x.dtype), W=(3, 2)).to(torch.float8_e4m3fn), X, T),
        "the parameters are torch.float8_e4m3fn; expected a type that derivatives are computed in: float16 or wider",
    ),
    "a scale that is NaN": (lambda: hk.hessian(adapted(spoiled()), X, T), "'w' contains NaN or infinity"),
    "codes that are NaN": (
        lambda: hk.hessian_operator(adapted(Codes(torch.full((3, 3), torch.nan).to(torch.float8_e4m3fn), SCALE)), X, T),
        "'w' contains NaN or infinity",
    ),
    "a call that changes a weight": (
        lambda: hk.hessian(changing(adapted(eighths(torch.float8_e4m3fn))), X, T),
        "a call of the module changes its parameter 'w'",
    ),
    "a call that changes codes": (
        lambda: hk.hessian(changing(adapted(Codes(eighths(torch.int8), SCALE))), X, T),
        "a call of the module changes its parameter 'w'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(hk.InputError, match=message):
        call()


# Libraries, where they are installed --------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen layer with an adapter of rank two."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.A, self.B = (nn.Parameter(draw(*shape, seed=3).float() / 4) for shape in ((width, 2), (2, width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.A @ self.B


def bitsandbytes_layers(kind: str, **options: Any) -> Callable[[int], nn.Module]:
    library = pytest.importorskip("bitsandbytes")
    return lambda width: getattr(library.nn, kind)(width, width, **options).to("cpu")


def torchao_layers(config: str) -> Callable[[int], nn.Module]:
    library = pytest.importorskip("torchao.quantization")

    def layer(width: int) -> nn.Module:
        plain = nn.Linear(width, width)
        library.quantize_(plain, getattr(library, config)())
        return plain

    return layer


LIBRARIES: dict[str, Callable[[], Callable[[int], nn.Module]]] = {
    "4 bits of bitsandbytes": lambda: bitsandbytes_layers("Linear4bit", compute_dtype=torch.float32, quant_type="nf4"),
    "8 bits of bitsandbytes": lambda: bitsandbytes_layers("Linear8bitLt", has_fp16_weights=False),
    "int8 of torchao": lambda: torchao_layers("Int8WeightOnlyConfig"),
    "float8 of torchao": lambda: torchao_layers("Float8WeightOnlyConfig"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", LIBRARIES)
def test_adapters_on_layers_of_libraries(library: str) -> None:
    """Against torch's double backward, in the float32 of the libraries."""
    layer, width = LIBRARIES[library](), 32
    torch.manual_seed(0)
    module = nn.Sequential(Adapter(layer(width), width), nn.Tanh(), Adapter(layer(width), width))
    x, target = draw(3, width).float(), draw(3, width, seed=2).float()
    module(x)  # bitsandbytes sets itself up in the first call
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    parameters = [module.get_parameter(name) for name in names]
    vectors = [draw(*p.shape, seed=7).float() for p in parameters]
    slopes = torch.autograd.grad(F.mse_loss(module(x), target), parameters, create_graph=True)
    expected = torch.autograd.grad(sum((g * v).sum() for g, v in zip(slopes, vectors, strict=True)), parameters)
    operator = hk.hessian_operator(module, x, target)
    assert list(operator.names) == names
    found = operator @ dict(zip(names, vectors, strict=True))
    largest = max(float(h.abs().max()) for h in expected)
    assert max(float((found[n] - h).abs().max()) for n, h in zip(names, expected, strict=True)) <= 1e-5 * largest
