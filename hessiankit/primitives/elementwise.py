r"""Functions of one number applied entry by entry, and the quotient of two tensors.

For an entrywise f, N = f(X) has D N [t] = f'(X) o t and, contracted with an adjoint W, the second derivative
W o f''(X) o t. Activations of neural networks are in ``hessiankit.primitives.activation``; these are the functions around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from derivations.scalar_functions import KINKED, SMOOTH, Derivatives
from hessiankit.primitives.directions import unbroadcast
from hessiankit.primitives.linear import Multiply
from hessiankit.primitives.primitive import Covectors, Entrywise, Inputs, Primitive, Tangents


def _power(x: Tensor, p: float) -> Derivatives:
    first = torch.zeros_like(x) if p == 0 else p * x ** (p - 1)
    return x**p, first, None if p in (0, 1) else p * (p - 1) * x ** (p - 2)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Derivatives:
    straight = beta * x > threshold  # torch's softplus is the identity from here on
    s = torch.sigmoid(beta * x)
    value = torch.nn.functional.softplus(x, beta, threshold)
    return value, s.masked_fill(straight, 1), (beta * s * torch.sigmoid(-beta * x)).masked_fill(straight, 0)


def _clamp(x: Tensor, low: float = -math.inf, high: float = math.inf) -> Derivatives:
    return x.clamp(low, high), ((x >= low) & (x <= high)).to(x.dtype), None


KINDS: dict[str, Callable[..., Derivatives]] = {
    "exp": lambda x: (e := torch.exp(x), e, e),
    "expm1": lambda x: (torch.expm1(x), e := torch.exp(x), e),
    "exponential": lambda x, base: (e := torch.pow(base, x), math.log(base) * e, math.log(base) ** 2 * e),
    "log": lambda x: (torch.log(x), r := 1 / x, -r * r),
    "log1p": lambda x: (torch.log1p(x), r := 1 / (1 + x), -r * r),
    "sqrt": lambda x: (root := torch.sqrt(x), first := 0.5 / root, -0.5 * first / x),
    "rsqrt": lambda x: (r := torch.rsqrt(x), first := -0.5 * r / x, -1.5 * first / x),
    "reciprocal": lambda x: (r := 1 / x, -r * r, 2 * r * r * r),
    "power": _power,
    # 1 - s loses all digits for large x
    "sigmoid": lambda x: (s := torch.sigmoid(x), first := s * torch.sigmoid(-x), first * -torch.tanh(x / 2)),
    "log_sigmoid": lambda x: (torch.nn.functional.logsigmoid(x), first := torch.sigmoid(-x), -first * torch.sigmoid(x)),
    "softplus": _softplus,
    "erf": lambda x: (torch.erf(x), first := 2 / math.sqrt(math.pi) * torch.exp(-x * x), -2 * x * first),
    "sin": lambda x: (s := torch.sin(x), torch.cos(x), -s),
    "cos": lambda x: (c := torch.cos(x), -torch.sin(x), -c),
    "abs": lambda x: (x.abs(), torch.sign(x), None),
    "clamp": _clamp,
    **SMOOTH,
    **KINKED,
}


POLES = (
    "log", "log1p", "log2", "log10", "logit", "special_entr", "sqrt", "rsqrt", "reciprocal", "power", "asin", "acos", "acosh",
    "atanh", "erfinv",
)  # fmt: skip
"""The kinds of which a derivative is not finite somewhere."""


@dataclass(frozen=True)
class Elementwise(Entrywise):
    """N = f(X), entry by entry; inputs (X,).

        exp          e^x            e^x                 e^x
        expm1        e^x - 1        e^x                 e^x
        exponential  c^x            c^x log c           c^x (log c)^2
        log          log x          1/x                 -1/x^2
        log1p        log(1 + x)     1/(1 + x)           -1/(1 + x)^2
        sqrt         x^(1/2)        x^(-1/2)/2          -x^(-3/2)/4
        rsqrt        x^(-1/2)       -x^(-3/2)/2         3 x^(-5/2)/4
        reciprocal   1/x            -1/x^2              2/x^3
        power        x^p            p x^(p-1)           p (p-1) x^(p-2)
        sigmoid      s              s (1 - s)           s (1 - s)(1 - 2s),     s = 1/(1 + e^-x)
        log_sigmoid  log s          1 - s               -s (1 - s)
        softplus     log(1 + e^bx)/b,  s(bx),           b s (1 - s);           x, 1, 0 where bx > threshold
        erf          erf x          2 e^(-x^2)/sqrt(pi)  -2x times it
        sin, cos     sin x          cos x               -sin x;                cos x, -sin x, -cos x
        abs          |x|            sign x              0
        clamp        within [l, h]  1{l <= x <= h}      0

    and those of ``derivations.scalar_functions``. At a kink the derivative is torch's: 0 for abs, 1 for clamp.

    Args:
        kind: one of ``KINDS``.
        constants: c, p, (b, threshold) or (l, h), in the order in which they are written above.

    Raises:
        ValueError: if there is no such kind.

    >>> cube = Elementwise("power", (3,))
    >>> cube.curvature((torch.tensor([2.0]),), torch.tensor([1.0]), (torch.tensor([[1.0]]),))[0].tolist()
    [[12.0]]
    """

    kind: str
    constants: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Elementwise: there is no kind {self.kind!r}; the kinds are {', '.join(KINDS)}")

    def derivatives(self, x: Tensor) -> Derivatives:
        return KINDS[self.kind](x, *self.constants)

    @property
    def regular(self) -> tuple[float, ...]:  # type: ignore[override]
        """A number at which every kind is smooth; arcosh is beyond 1 only."""
        return (2.0 if self.kind == "acosh" else 0.5,)

    def singular(self, inputs: Inputs, output: Tensor) -> Tensor | None:
        if self.kind not in POLES or (self.kind == "power" and self.constants[0] in (0, 1, 2)):
            return None
        _, first, second = self.derivatives(inputs[0])
        finite = torch.isfinite(first)
        return ~finite if second is None else ~(finite & torch.isfinite(second))


@dataclass(frozen=True)
class Divide(Primitive):
    """N = a / b with broadcasting: the product of a and r = 1/b, with dr = -r^2 db and d^2 r = 2 r^3 db^2.

    >>> two, three = torch.tensor([2.0]), torch.tensor([3.0])
    >>> Divide().curvature((three, two), torch.ones(1), (None, torch.ones(1, 1)))[1].tolist()  # 2 a / b^3
    [[0.75]]
    """

    regular = (1.0, 1.0)
    is_entrywise = is_quick = True

    def value(self, *inputs: Tensor) -> Tensor:
        return inputs[0] / inputs[1]

    def singular(self, inputs: Inputs, output: Tensor) -> Tensor | None:
        zero = inputs[1] == 0
        return zero.expand(output.shape) if bool(zero.any()) else None

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        return Multiply().jvp(*self._as_product(inputs, tangents))

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        a, b = inputs
        r = self._inverse(inputs)
        return unbroadcast(adjoint * r, a.shape), -r * r * unbroadcast(adjoint * a, b.shape)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        (a, r), factor_tangents = self._as_product(inputs, tangents)
        to_a, to_r = Multiply().curvature((a, r), adjoint, factor_tangents)
        to_b = None if to_r is None else -r * r * to_r
        if tangents[1] is not None:
            bend = 2 * r * r * r * unbroadcast((adjoint * a).unsqueeze(0), r.shape)[0] * tangents[1]
            to_b = bend if to_b is None else to_b + bend
        return to_a, to_b

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return Multiply().rowwise(inputs, axes, motion)

    def _as_product(self, inputs: Inputs, tangents: Tangents) -> tuple[Inputs, Tangents]:
        r, (t_a, t_b) = self._inverse(inputs), tangents
        return (inputs[0], r), (t_a, None if t_b is None else -r * r * t_b)

    def _inverse(self, inputs: Inputs) -> Tensor:
        a, b = inputs
        return 1 / b.to(torch.result_type(a, b))  # the inverse of an integer, such as a count, is single otherwise
