"""Functions applied entry by entry."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from derivations.scalar_functions import SMOOTH
from hessiankit.primitives.activation import Activation
from hessiankit.primitives.binary import Binary
from hessiankit.primitives.elementwise import Elementwise
from hessiankit.primitives.linear import Multiple, Reshape
from hessiankit.tracing.rules.registry import RULES, Match, Rule, are_real, aten, rule


def _activation(kind: str) -> Rule:
    return lambda x, *_, **__: (Activation(kind), (x,))


def _elementwise(kind: str) -> Rule:
    return lambda x: (Elementwise(kind), (x,))


def _binary(kind: str) -> Rule:
    def match(a: Any, b: Any) -> Match:
        tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
        return (Binary(kind), (a, b)) if are_real(a, b) or (kind == "power" and tensors) else None

    return match


def _times_logarithm(kind: str) -> Rule:
    def match(a: Any, b: Any) -> Match:
        a, b = (x if isinstance(x, Tensor) else y.new_full((), x) for x, y in ((a, b), (b, a)))
        return _binary(kind)(a, b)

    return match


def _step(x: Any, *rest: Any, result: Tensor, **options: Any) -> Match:
    """A function whose derivative is zero off its jumps: its result is a constant."""
    return Reshape(tuple(result.shape)), (result,)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _divided_and_rounded(a: Tensor, b: Any, *, rounding_mode: str | None, result: Tensor) -> Match:
    return None if rounding_mode is None else _step(a, result=result)


@rule(aten.elu.default)
def _elu(x: Tensor, alpha: float = 1, scale: float = 1, rate: float = 1) -> Match:
    return Elementwise("elu", (alpha, scale, rate)), (x,)


@rule(aten.rrelu.default)
def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Match:
    return None if training else (Activation("leaky_relu", (lower + upper) / 2), (x,))


@rule(aten.logit.default)
def _logit(x: Tensor, eps: float | None = None) -> Match:
    return (Elementwise("logit") if eps is None else Elementwise("logit_within", (eps,))), (x,)


@rule(aten.nan_to_num.default)
def _finite(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Match:
    largest = torch.finfo(x.dtype).max
    constants = (nan or 0.0, largest if posinf is None else posinf, -largest if neginf is None else neginf)
    return Elementwise("finite", constants), (x,)


def _clamp(x: Tensor, low: float | None = None, high: float | None = None) -> Match:
    return Elementwise("clamp", (-math.inf if low is None else low, math.inf if high is None else high)), (x,)


def _power_of(base: float, x: Tensor) -> Match:
    return (Elementwise("exponential", (base,)), (x,)) if base > 0 else None


RULES |= {
    aten.clamp.default: _clamp,
    aten.clamp_max.default: lambda x, high: _clamp(x, None, high),
    aten.clamp_min.default: _clamp,
    aten.exp2.default: lambda x: _power_of(2.0, x),
    aten.hardtanh.default: lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    aten.pow.Scalar: _power_of,
    aten.pow.Tensor_Scalar: lambda x, p: (Elementwise("power", (p,)), (x,)),
    aten.relu6.default: lambda x: _clamp(x, 0.0, 6.0),
    aten.softplus.default: lambda x, beta=1.0, threshold=20.0: (Elementwise("softplus", (beta, threshold)), (x,)),
}
RULES |= {
    aten.gelu.default: lambda x, approximate="none": (Activation("gelu" if approximate == "none" else "gelu_tanh"), (x,)),
    aten.leaky_relu.default: lambda x, slope=0.01: (Activation("leaky_relu", slope), (x,)),
}
_BY_NAME = "abs cos erf exp expm1 frac hardsigmoid hardswish log log1p log_sigmoid reciprocal rsqrt sigmoid sin sqrt"
RULES |= {getattr(aten, kind).default: _elementwise(kind) for kind in (*SMOOTH, *_BY_NAME.split()) if kind != "logit"}
RULES |= {getattr(aten, kind).default: _activation(kind) for kind in ("relu", "silu", "tanh")}
RULES |= {getattr(aten, kind).default: _binary(kind) for kind in ("atan2", "logaddexp", "maximum", "minimum")}
RULES |= {
    aten.clamp_max.Tensor: _binary("at_most"),
    aten.clamp_min.Tensor: _binary("at_least"),
    aten.clip.default: _clamp,
    aten.copysign.Tensor: _binary("copysign"),
    aten.fmax.default: _binary("maximum"),
    aten.fmin.default: _binary("minimum"),
    aten.fmod.Tensor: _binary("fmod"),
    aten.pow.Tensor_Tensor: _binary("power"),
    aten.remainder.Tensor: _binary("remainder"),
    aten.celu.default: lambda x, alpha=1.0: _elu(x, alpha, 1, 1 / alpha),
    aten.selu.default: lambda x: _elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946),
    aten.fmod.Scalar: lambda x, divisor: (Elementwise("fmod", (divisor,)), (x,)),
    aten.remainder.Scalar: lambda x, divisor: (Elementwise("remainder", (divisor,)), (x,)),
    aten.hardshrink.default: lambda x, width=0.5: (Elementwise("hardshrink", (width,)), (x,)),
    aten.softshrink.default: lambda x, width=0.5: (Elementwise("softshrink", (width,)), (x,)),
    aten.threshold.default: lambda x, level, fill: (Elementwise("threshold", (level, fill)), (x,)),
    aten.deg2rad.default: lambda x: (Multiple(math.pi / 180), (x,)),
    aten.rad2deg.default: lambda x: (Multiple(180 / math.pi), (x,)),
}
RULES |= {
    getattr(aten, kind).default: _step for kind in ["ceil", "floor", "floor_divide", "heaviside", "round", "sgn", "sign", "trunc"]
}
RULES[aten.round.decimals] = _step
_XLOGY = (
    aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other,
    aten.special_xlogy.default, aten.special_xlogy.self_scalar, aten.special_xlogy.other_scalar,
)  # fmt: skip
_XLOG1PY = (aten.special_xlog1py.default, aten.special_xlog1py.self_scalar, aten.special_xlog1py.other_scalar)
RULES |= dict.fromkeys(_XLOGY, _times_logarithm("xlogy")) | dict.fromkeys(_XLOG1PY, _times_logarithm("xlog1py"))
