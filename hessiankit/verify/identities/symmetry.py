"""One-parameter families of parameters along which a loss is constant, as generators that act on entries of parameters.

A symmetry moves theta by exp(t B): rows of k entries of a parameter become rows times exp(t G), other rows times
exp(-t G^T); or it adds t times a constant vector. Differentiating loss(exp(t B) theta) = loss(theta) once and twice gives

    g^T B theta = 0,        H (B theta) + B^T g = 0,

and for a shift by a constant vector u, g^T u = 0 and H u = 0. No second derivative enters these but H itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["linear", "rotation", "diagonal", "shift"]
Params = Mapping[str, Tensor]


DENSE = 512
"""Widths up to which a generator of any matrices is drawn dense; beyond it diagonal, since exp(t G) costs k^3."""


class Leg(NamedTuple):
    """Entries of one parameter, as positions in its vec_r, (rows, k): each row of k entries is transformed alike."""

    parameter: str
    at: Tensor


@dataclass(frozen=True)
class Part:
    """Legs that one k x k generator G moves together: x -> x exp(t G) on the first, x -> x exp(-t G^T) on the others.

    Attributes:
        kind: What G may be: any matrix, antisymmetric, diagonal, or no matrix but a shift that is the same in each of the k
            columns.
        legs: The entries that follow G.
        against: The entries that undo it.
    """

    kind: Kind
    legs: tuple[Leg, ...]
    against: tuple[Leg, ...] = ()

    @property
    def size(self) -> int:
        """k."""
        return int(self.legs[0].at.shape[1])


class Motion(NamedTuple):
    """One generator of a symmetry: for each leg a matrix G (k, k), a diagonal one (k,), or a shift (rows, 1)."""

    legs: tuple[tuple[Leg, Tensor], ...]
    shifts: bool

    def velocity(self, theta: Params) -> dict[str, Tensor]:
        """Return B theta, flat and by parameter; the shift itself where the motion is one."""
        out = {leg.parameter: torch.zeros_like(theta[leg.parameter]).reshape(-1) for leg, _ in self.legs}
        for leg, G in self.legs:
            x = theta[leg.parameter].reshape(-1)[leg.at]
            moved = G.expand(x.shape) if self.shifts else x * G if G.ndim == 1 else x @ G
            out[leg.parameter].index_add_(0, leg.at.reshape(-1), moved.reshape(-1))
        return out

    def transposed(self, gradient: Params) -> dict[str, Tensor]:
        """Return B^T g, flat and by parameter: zero for a shift."""
        if self.shifts:
            return {}
        return Motion(tuple((leg, _transposed(G)) for leg, G in self.legs), False).velocity(gradient)

    def moved(self, theta: Params, t: float) -> dict[str, Tensor]:
        """Return exp(t B) theta, or theta plus t times the shift.

        >>> motion = Motion(((Leg("w", torch.tensor([[0, 1]])), torch.tensor([[0.0, 1.0], [0.0, 0.0]])),), False)
        >>> motion.moved({"w": torch.tensor([1.0, 5.0])}, 2.0)["w"].tolist()
        [1.0, 7.0]
        """
        out = {name: value.clone() for name, value in theta.items()}
        for leg, G in self.legs:
            flat = out[leg.parameter].reshape(-1)
            x = flat[leg.at]
            flat[leg.at] = (
                x + t * G if self.shifts else x * torch.exp(t * G) if G.ndim == 1 else x @ torch.linalg.matrix_exp(t * G)
            )
            out[leg.parameter] = flat.reshape(theta[leg.parameter].shape)
        return out


@dataclass(frozen=True)
class Symmetry:
    """A family of generators that a structure of the module implies.

    Attributes:
        family: What kind of structure it is.
        statement: The identity in words and symbols.
        parts: What moves; each part draws a generator of its own.
    """

    family: str
    statement: str
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """The parameters that move, and after ``|`` those that move against them."""
        moving = dict.fromkeys(leg.parameter for part in self.parts for leg in part.legs)
        against = dict.fromkeys(leg.parameter for part in self.parts for leg in part.against)
        return " | ".join(", ".join(names) for names in (moving, against) if names)

    @property
    def entangled(self) -> bool:
        """Whether an entry would move twice: tied weights, which do not move by one generator."""
        places: dict[str, list[Tensor]] = {}
        for leg in (leg for part in self.parts for leg in (*part.legs, *part.against)):
            places.setdefault(leg.parameter, []).append(leg.at.reshape(-1))
        return any(len(torch.unique(torch.cat(at))) < sum(map(len, at)) for at in places.values())

    def motions(self, like: Tensor, rng: torch.Generator) -> tuple[Motion, ...]:
        """Return a random generator, and G = I, Euler's identity, where that belongs to the family."""
        draws = [Motion(tuple(m for part in self.parts for m in _draw(part, like, rng)), self._shifts)]
        if all(part.kind in ("linear", "diagonal") for part in self.parts):
            draws.append(Motion(tuple(m for part in self.parts for m in _with(part, like.new_ones(part.size))), False))
        return tuple(draws)

    @property
    def _shifts(self) -> bool:
        return self.parts[0].kind == "shift"


def _draw(part: Part, like: Tensor, rng: torch.Generator) -> list[tuple[Leg, Tensor]]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(like)

    if part.kind == "shift":
        return [(leg, normal(leg.at.shape[0], 1)) for leg in part.legs]
    k = part.size
    if part.kind == "diagonal" or (part.kind == "linear" and k > DENSE):
        return _with(part, normal(k))
    G = normal(k, k) / k**0.5  # so that exp(t G) stays well conditioned at every width
    return _with(part, G - G.T if part.kind == "rotation" else G)


def _with(part: Part, G: Tensor) -> list[tuple[Leg, Tensor]]:
    return [*((leg, G) for leg in part.legs), *((leg, -_transposed(G)) for leg in part.against)]


def _transposed(G: Tensor) -> Tensor:
    return G if G.ndim == 1 else G.T
