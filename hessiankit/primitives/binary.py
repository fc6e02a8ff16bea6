r"""Functions of two numbers applied entry by entry, with broadcasting: powers, larger of two, angles.

For N = f(A, B), D N [a, b] = f_a o a + f_b o b and, contracted with an adjoint W, the second derivative sends (a, b) to
W o (f_aa o a + f_ab o b) and W o (f_ab o a + f_bb o b), each summed over the axes along which its input was repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.primitives.directions import align, same_rows, unbroadcast
from hessiankit.primitives.primitive import Covectors, Inputs, Primitive, Tangents, total


class Slopes(NamedTuple):
    """The first derivatives f_a, f_b and the second f_aa, f_ab, f_bb, entry by entry; None for a second that is zero."""

    a: Tensor
    b: Tensor
    aa: Tensor | None = None
    ab: Tensor | None = None
    bb: Tensor | None = None


def _power(a: Tensor, b: Tensor) -> Slopes:
    zero = b == 0
    log = torch.log(torch.where(a == 0, 1, a))  # 0^b is 0 to all orders in b, for b > 0
    value = torch.where((a == 0) & (b > 0), 0, torch.pow(a, b))
    first = torch.where(zero, 0, b * torch.pow(a, b - 1))
    second = torch.where(zero | (b == 1), 0, b * (b - 1) * torch.pow(a, b - 2))
    return Slopes(first, value * log, second, torch.pow(a, b - 1) * (1 + b * log), value * log * log)


def _atan2(a: Tensor, b: Tensor) -> Slopes:
    r = 1 / (a * a + b * b)
    second = 2 * a * b * r * r
    return Slopes(b * r, -a * r, -second, (a * a - b * b) * r * r, second)


def _logaddexp(a: Tensor, b: Tensor) -> Slopes:
    s, rest = torch.sigmoid(a - b), torch.sigmoid(b - a)
    second = s * rest
    return Slopes(s, rest, second, -second, second)


def _maximum(a: Tensor, b: Tensor) -> Slopes:
    share = (a > b).to(a.dtype) + 0.5 * (a == b)
    return Slopes(share, 1 - share)


def _at_least(a: Tensor, b: Tensor) -> Slopes:
    first = (a >= b).to(a.dtype)
    return Slopes(first, 1 - first)


def _xlogy(a: Tensor, b: Tensor) -> Slopes:
    r = 1 / b
    return Slopes(torch.log(b), a * r, None, r, -a * r * r)


def _xlog1py(a: Tensor, b: Tensor) -> Slopes:
    return _xlogy(a, 1 + b)._replace(a=torch.log1p(b))


KINDS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Slopes]]] = {
    "power": (torch.pow, _power),
    "atan2": (torch.atan2, _atan2),
    "logaddexp": (torch.logaddexp, _logaddexp),
    "xlogy": (torch.xlogy, _xlogy),
    "xlog1py": (torch.special.xlog1py, _xlog1py),
    "maximum": (torch.maximum, _maximum),
    "minimum": (torch.minimum, lambda a, b: _maximum(-a, -b)),
    "at_least": (torch.maximum, _at_least),
    "at_most": (torch.minimum, lambda a, b: _at_least(-a, -b)),
    "remainder": (torch.remainder, lambda a, b: Slopes(torch.ones_like(a), -torch.floor(a / b))),
    "fmod": (torch.fmod, lambda a, b: Slopes(torch.ones_like(a), -torch.trunc(a / b))),
    "copysign": (torch.copysign, lambda a, b: Slopes(torch.sign(a) * torch.ones_like(b).copysign(b), torch.zeros_like(b))),
}


POLES = ("power", "atan2", "xlogy", "xlog1py")
"""The kinds of which a derivative is not finite somewhere."""


@dataclass(frozen=True)
class Binary(Primitive):
    """N = f(A, B), entry by entry with broadcasting; inputs (A, B).

        power      a^b                     b a^(b-1), a^b log a        b (b-1) a^(b-2), a^(b-1) (1 + b log a), a^b log^2 a
        atan2      angle of (b, a)         b r, -a r                   -2ab r^2, (a^2 - b^2) r^2, 2ab r^2,  r = 1/(a^2 + b^2)
        logaddexp  log(e^a + e^b)          s, 1 - s                    s (1 - s) times 1, -1, 1,            s = 1/(1 + e^(b-a))
        xlogy      a log b                     log b, a/b                  0, 1/b, -a/b^2;                      xlog1py: of 1 + b
        maximum    the larger (minimum: the smaller), each half of the slope where they are equal
        at_least   the larger (at_most: the smaller), with the slope of a where they are equal, as a clamp has
        remainder  a - b floor(a/b)        1, -floor(a/b)
        fmod       a - b trunc(a/b)        1, -trunc(a/b)
        copysign   |a| with the sign of b  sign(a) sign(b), 0

    Args:
        kind: one of ``KINDS``.

    Raises:
        ValueError: if there is no such kind.

    >>> two, three = torch.tensor([2.0]), torch.tensor([3.0])
    >>> Binary("power").vjp((two, three), torch.ones(1, 1))[0].tolist()  # b a^(b-1)
    [[12.0]]
    """

    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Binary: there is no kind {self.kind!r}; the kinds are {', '.join(KINDS)}")

    regular = (1.0, 1.0)

    def value(self, *inputs: Tensor) -> Tensor:
        return KINDS[self.kind][0](*inputs)

    def singular(self, inputs: Inputs, output: Tensor) -> Tensor | None:
        if self.kind not in POLES:
            return None
        slopes = torch.stack([slope for slope in self._slopes(inputs) if slope is not None])
        return ~torch.isfinite(slopes).all(0)

    def jvp(self, inputs: Inputs, tangents: Tangents) -> Tensor:
        slopes = self._slopes(inputs)
        a, b = self._aligned(inputs, tangents)
        return total(self, None if a is None else slopes.a * a, None if b is None else slopes.b * b)

    def vjp(self, inputs: Inputs, adjoint: Tensor) -> Covectors:
        slopes = self._slopes(inputs)
        return unbroadcast(adjoint * slopes.a, inputs[0].shape), unbroadcast(adjoint * slopes.b, inputs[1].shape)

    def curvature(self, inputs: Inputs, adjoint: Tensor, tangents: Tangents) -> Covectors:
        slopes = self._slopes(inputs)
        a, b = self._aligned(inputs, tangents)
        covectors: list[Tensor | None] = []
        for x, pairs in zip(inputs, (((slopes.aa, a), (slopes.ab, b)), ((slopes.ab, a), (slopes.bb, b))), strict=True):
            terms = [adjoint * second * t for second, t in pairs if second is not None and t is not None]
            covectors.append(unbroadcast(sum(terms[1:], start=terms[0]), x.shape) if terms else None)
        return tuple(covectors)

    def rowwise(self, inputs: Inputs, axes: int, motion: Sequence[bool]) -> bool:
        return same_rows(inputs, axes, motion)

    def _slopes(self, inputs: Inputs) -> Slopes:
        a, b = torch.broadcast_tensors(*inputs)
        return KINDS[self.kind][1](a, b)

    @staticmethod
    def _aligned(inputs: Inputs, tangents: Tangents) -> list[Tensor | None]:
        ndim = max(x.ndim for x in inputs)
        return [None if t is None else align(t, x.shape, ndim) for x, t in zip(inputs, tangents, strict=True)]
