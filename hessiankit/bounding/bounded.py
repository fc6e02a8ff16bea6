r"""Values of which only bounds are known: a value's norms, its slopes in the parameters, and how much it can bend.

For Y of L rows, with a Frobenius ball of parameters around a point,

    |Y|_2 <= spectral,   |Y|_F <= frobenius,   |Y_i| <= row for every row,   |dY/dtheta_i|_2 <= slope[i],

and for every matrix Lambda of Y's shape, with largest row norm r and Frobenius norm f,

    |<Lambda, D^2 Y [t_i, t_j]>| <= (r bend_row[i, j] + f bend_all[i, j]) |t_i|_F |t_j|_F .

Each operation has one rule, from its sharp constants (``derivations.bounds``): the chain rule of second order with every
factor in place of what it stands for. So a placement's equation, run on these, is a bound of its block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

Pair: TypeAlias = "tuple[str, str]"
Key = TypeVar("Key")


@dataclass(frozen=True)
class Bounded:
    """A value, at the centre of the ball, with bounds over the whole ball; see the module's formulas.

    Attributes:
        centre: The value at the centre, L x d.
        spectral: Bound on its spectral norm over the ball, and so on.
        drift: Bound on |Y - centre|_F over the ball.
        diameter: Bound on the distance of two rows over the ball, infinite if only the norms are to say it.
        slope_row: Bounds on a row of dY/dtheta_i, where they are better than ``slope``.
        sphere: What stood before, if this is the output of a norm without gain and shift.
    """

    centre: Tensor
    spectral: float
    frobenius: float
    row: float
    slope: Mapping[str, float]
    bend_row: Mapping[Pair, float]
    bend_all: Mapping[Pair, float]
    drift: float = 0.0
    diameter: float = math.inf
    slope_row: Mapping[str, float] = field(default_factory=dict)
    sphere: Sphere | None = None

    @property
    def length(self) -> int:
        """L, the number of rows."""
        return int(self.centre.shape[0])

    @property
    def width(self) -> int:
        """d, the entries of a row."""
        return int(self.centre.shape[1])

    @property
    def range(self) -> float:
        """Bound on the distance of two rows; a variance of rows is at most its square over 4, in any direction."""
        return min(self.diameter, 2 * self.row, math.sqrt(2) * self.spectral)

    def row_slopes(self) -> dict[str, float]:
        """Return bounds on a row of dY/dtheta_i for every i."""
        return {i: min(g, self.slope_row.get(i, math.inf)) for i, g in self.slope.items()}

    def __add__(self, other: Bounded) -> Bounded:
        """Return the sum: everything adds up."""
        return Bounded(
            self.centre + other.centre,
            self.spectral + other.spectral,
            self.frobenius + other.frobenius,
            self.row + other.row,
            added(self.slope, other.slope),
            added(self.bend_row, other.bend_row),
            added(self.bend_all, other.bend_all),
            self.drift + other.drift,
            self.range + other.range,
            added(self.row_slopes(), other.row_slopes()),
        )

    def __rmul__(self, c: float) -> Bounded:
        """Return c Y."""
        return self._times(abs(c), c * self.centre)

    def __mul__(self, factor: Scale) -> Bounded:
        """Return Y times a scale, a number or one for each feature, that is itself a parameter of the ball."""
        norm = factor.largest
        one = {(factor.name, i): g for i, g in self.slope.items()}  # <Lambda, dY diag(dv)>: |dv|_inf |Lambda|_F |dY|_F
        grown = self._times(norm, self.centre * factor.centre)
        # dY/dv = diag(vec Y) (1 (x) I) for a vector: its norm is the largest column norm, at most |Y|_2; |Y|_F for a number
        own = self.spectral if factor.centre.numel() > 1 else self.frobenius
        return replace(
            grown,
            slope=added(grown.slope, {factor.name: own}),
            slope_row=added(grown.slope_row, {factor.name: self.row}),
            bend_all=added(grown.bend_all, symmetric(one)),
            drift=self.drift * norm + factor.radius * self.frobenius,
        )

    def _times(self, c: float, centre: Tensor) -> Bounded:
        return Bounded(
            centre,
            c * self.spectral,
            c * self.frobenius,
            c * self.row,
            scaled(c, self.slope),
            scaled(c, self.bend_row),
            scaled(c, self.bend_all),
            c * self.drift,
            c * self.diameter if c else 0.0,
            scaled(c, self.row_slopes()),
        )


@dataclass(frozen=True)
class Sphere:
    """What a norm without gain and shift was given: its rows lie on a sphere, but for eps.

    Attributes:
        before: The norm's input.
        scale: A lower bound of every row scale sqrt(var + eps) over the ball.
        eps: What the norm adds to the variance.
        centred: Whether the norm takes the mean away.
    """

    before: Bounded
    scale: float
    eps: float
    centred: bool


@dataclass(frozen=True)
class Scale:
    """A learnable number, or one for each feature, in a ball."""

    name: str
    centre: Tensor
    radius: float

    @property
    def largest(self) -> float:
        """Bound on its largest entry over the ball."""
        return float(self.centre.abs().max()) + self.radius


def constant(X: Tensor) -> Bounded:
    """Return an input: it does not move."""
    norms = spectral_norm(X), float(X.norm()), float(X.norm(dim=1).max())
    return Bounded(X, *norms, {}, {}, {}, diameter=float(torch.cdist(X, X).max()) * (1 + 1e-12))


def spectral_norm(A: Tensor) -> float:
    """Return ||A||_2, rounded up."""
    return float(torch.linalg.matrix_norm(A.double(), 2)) * (1 + 1e-12)


def added(*tables: Mapping[Key, float]) -> dict[Key, float]:
    """Return the sum of tables entry by entry."""
    total: dict[Key, float] = {}
    for table in tables:
        for key, value in table.items():
            total[key] = total.get(key, 0.0) + value
    return total


def scaled(c: float, table: Mapping[Key, float]) -> dict[Key, float]:
    """Return a table times a number."""
    return {key: c * value for key, value in table.items()}


def symmetric(table: Mapping[Pair, float]) -> dict[Pair, float]:
    """Return the table with (j, i) for every (i, j); what is listed both ways adds up.

    >>> symmetric({("a", "b"): 1.0, ("a", "a"): 2.0})
    {('a', 'b'): 1.0, ('a', 'a'): 4.0, ('b', 'a'): 1.0}
    """
    turned = {(j, i): value for (i, j), value in table.items()}
    return added(table, turned)


def products(left: Mapping[str, float], right: Mapping[str, float], c: float = 1.0) -> dict[Pair, float]:
    """Return c left_i right_j for all pairs.

    >>> products({"a": 2.0}, {"b": 3.0})
    {('a', 'b'): 6.0}
    """
    return {(i, j): c * g * h for i, g in left.items() for j, h in right.items()}


def pushed(X: Bounded, slope: float) -> tuple[dict[str, float], dict[Pair, float], dict[Pair, float]]:
    """Return slopes and bends of a map of the rows with Jacobian of norm ``slope``, without its own bend."""
    return scaled(slope, X.slope), scaled(slope, X.bend_row), scaled(slope, X.bend_all)
