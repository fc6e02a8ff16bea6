"""Norms, Jacobians and second derivatives bounded over a ball of parameters, and the rule of each part of a block for them.

Written for the chain rule of second order with a bounded Jacobian j and a bounded own second derivative h,

    <Lambda, D^2(phi o X)[t_i, t_j]> = <Lambda, D^2 phi[X_i t_i, X_j t_j]> + <D phi^T Lambda, D^2 X [t_i, t_j]> .

For Y of L rows, with a Frobenius ball of parameters around a point,

    |Y|_2 <= spectral,   |Y|_F <= frobenius,   |Y_i| <= row for every row,   |dY/dtheta_i|_2 <= jacobian[i],

and for every matrix Lambda of Y's shape, with largest row norm r and Frobenius norm f,

    |<Lambda, D^2 Y [t_i, t_j]>| <= (r hessian_row[i, j] + f hessian_all[i, j]) |t_i|_F |t_j|_F .

Each operation has one rule: the chain rule of second order with the sharp constants of ``derivations.bounds`` for its
derivatives. A placement's equation, evaluated on bounded values, therefore gives a bound for its block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from derivations.bounds import STEEPNESS, softmax_hessian_map_bound

Pair: TypeAlias = "tuple[str, str]"
Key = TypeVar("Key")


class Magnitudes(dict[Key, float]):
    """Numbers by parameter or by pair of parameters, with sums and multiples; missing entries are 0.

    >>> 2.0 * Magnitudes(a=1.0) + Magnitudes(a=1.0, b=3.0)
    {'a': 3.0, 'b': 3.0}
    """

    def __add__(self, other: Mapping[Key, float]) -> Magnitudes[Key]:
        return Magnitudes({key: self.get(key, 0.0) + other.get(key, 0.0) for key in {**self, **other}})

    def __rmul__(self, c: float) -> Magnitudes[Key]:
        return Magnitudes({key: c * value for key, value in self.items()})


def symmetric(table: Magnitudes[Pair]) -> Magnitudes[Pair]:
    """Return the table plus its transpose.

    >>> symmetric(Magnitudes({("a", "b"): 1.0, ("a", "a"): 2.0}))
    {('a', 'b'): 1.0, ('a', 'a'): 4.0, ('b', 'a'): 1.0}
    """
    return table + {(j, i): value for (i, j), value in table.items()}


def products(left: Mapping[str, float], right: Mapping[str, float], c: float = 1.0) -> Magnitudes[Pair]:
    """Return c left_i right_j for all pairs."""
    return Magnitudes({(i, j): c * g * h for i, g in left.items() for j, h in right.items()})


LINEAR = ("centre", "spectral", "frobenius", "row", "jacobian", "hessian_row", "hessian_all", "drift")
"""Fields that add up in a sum of values, and grow with a multiple."""


@dataclass(frozen=True)
class Bounded:
    """A value, at the centre of the ball, with bounds over the whole ball; see the module's formulas."""

    centre: Tensor  # L x d
    spectral: float
    frobenius: float
    row: float
    jacobian: Magnitudes[str]
    hessian_row: Magnitudes[Pair]
    hessian_all: Magnitudes[Pair]
    drift: float = 0.0  # bound on |Y - centre|_F
    diameter: float = math.inf  # bound on the distance of two rows, where another than that from the norms is known
    jacobian_row: Mapping[str, float] = field(default_factory=dict)  # of a row of dY/dtheta_i, where better than ``jacobian``
    sphere: Sphere | None = None  # the norm's input, if this is the output of a norm without gain and shift

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

    def row_jacobians(self) -> Magnitudes[str]:
        """Return bounds on a row of dY/dtheta_i for every i."""
        return Magnitudes({i: min(g, self.jacobian_row.get(i, math.inf)) for i, g in self.jacobian.items()})

    def __add__(self, other: Bounded) -> Bounded:
        """Return the sum, bound by bound."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in LINEAR}
        rows = self.row_jacobians() + other.row_jacobians()
        return Bounded(**sums, diameter=self.range + other.range, jacobian_row=rows)

    def __rmul__(self, c: float) -> Bounded:
        """Return c Y."""
        return self.times(abs(c), c * self.centre)

    def hessian(self, i: str, j: str, row: float, frobenius: float) -> float:
        """Return the bound on <Lambda, D^2 Y [t_i, t_j]> for unit t_i and t_j, a longest row and a norm of Lambda."""
        return row * self.hessian_row.get((i, j), 0.0) + frobenius * self.hessian_all.get((i, j), 0.0)

    def __mul__(self, factor: BoundedParameter) -> Bounded:
        """Return Y times a scale, a number or one for each feature, that is itself a parameter of the ball."""
        norm = factor.largest
        one = products({factor.name: 1.0}, self.jacobian)  # <Lambda, dY diag(dv)>: |dv|_inf |Lambda|_F |dY|_F
        product = self.times(norm, self.centre * factor.centre)
        # dY/dv = diag(vec Y) (1 (x) I) for a vector: its norm is the largest column norm, at most |Y|_2; |Y|_F for a number
        factor_norm = self.spectral if factor.centre.numel() > 1 else self.frobenius
        return replace(
            product,
            jacobian=product.jacobian + {factor.name: factor_norm},
            jacobian_row={**product.jacobian_row, factor.name: self.row},
            hessian_all=product.hessian_all + symmetric(one),
            drift=self.drift * norm + factor.radius * self.frobenius,
        )

    def times(self, c: float, centre: Tensor) -> Bounded:
        """Return the value of a linear map of norm c, which keeps rows apart; its value at the centre is given."""
        multiples = {name: c * getattr(self, name) for name in LINEAR} | {"centre": centre}
        return Bounded(**multiples, diameter=c * self.diameter if c else 0.0, jacobian_row=c * self.row_jacobians())


@dataclass(frozen=True)
class Sphere:
    """The input of a norm without gain and shift, whose output has rows on a sphere, up to eps."""

    before: Bounded
    scale: float  # a lower bound of every row scale sqrt(var + eps) over the ball
    eps: float
    centred: bool  # whether the norm takes the mean away


@dataclass(frozen=True)
class BoundedParameter:
    """A weight matrix, a bias, a gain or a number, in a Frobenius ball."""

    name: str
    centre: Tensor
    radius: float

    @property
    def norm(self) -> float:
        """Bound on its spectral norm over the ball; for a vector on its length."""
        size = spectral_norm(self.centre) if self.centre.ndim == 2 else float(self.centre.norm())
        return size + self.radius

    @property
    def largest(self) -> float:
        """Bound on its largest entry over the ball."""
        return float(self.centre.abs().max()) + self.radius


def constant(X: Tensor) -> Bounded:
    """Return an input, which does not depend on the parameters."""
    norms = spectral_norm(X), float(X.norm()), float(X.norm(dim=1).max())
    return Bounded(X, *norms, Magnitudes(), Magnitudes(), Magnitudes(), diameter=float(torch.cdist(X, X).max()) * (1 + 1e-12))


def spectral_norm(A: Tensor) -> float:
    """Return ||A||_2, rounded up."""
    return float(torch.linalg.matrix_norm(A.double(), 2)) * (1 + 1e-12)


def affine(X: Bounded, W: BoundedParameter, b: BoundedParameter | None = None) -> Bounded:
    """Return X W + 1 b^T: Jacobian norms |X|_2 for W and sqrt(L) for b, and a mixed second derivative of W and X."""
    w = W.norm
    cross = symmetric(products({W.name: 1.0}, X.jacobian))  # <Lambda, dX dW> <= |Lambda|_F |dX|_F |dW|_2
    out = replace(
        X.times(w, X.centre @ W.centre),
        jacobian=w * X.jacobian + {W.name: X.spectral},
        hessian_all=w * X.hessian_all + cross,
        drift=X.drift * w + W.radius * spectral_norm(X.centre),
        jacobian_row=w * X.row_jacobians() + {W.name: X.row},
    )
    return out if b is None else shifted(out, b)


def shifted(X: Bounded, b: BoundedParameter) -> Bounded:
    """Return X + 1 b^T: jacobian sqrt(L) in b, and 1 for a row."""
    beta, root = b.norm, math.sqrt(X.length)
    return replace(
        X,
        centre=X.centre + b.centre,
        spectral=X.spectral + root * beta,
        frobenius=X.frobenius + root * beta,
        row=X.row + beta,
        jacobian=X.jacobian + {b.name: root},
        jacobian_row={**X.jacobian_row, b.name: 1.0},
        drift=X.drift + root * b.radius,
        sphere=None,
    )


def activation(X: Bounded, kind: str, value: Tensor) -> Bounded:
    """Return sigma(X), entry by entry."""
    sigma = STEEPNESS[kind]
    # |sigma(x)| <= chord |x|, so |sigma(X)|_F <= chord |X|_F; the spectral norm has no such bound
    frobenius = sigma.chord * X.frobenius
    curvature = products(X.jacobian, X.jacobian, sigma.second)  # max |Lambda_ij| <= the largest row norm
    return replace(
        X.times(sigma.slope, value),
        spectral=frobenius,
        frobenius=frobenius,
        row=sigma.chord * X.row,
        hessian_row=sigma.slope * X.hessian_row + curvature,
        diameter=sigma.slope * X.range,
        jacobian_row={},
    )


def hadamard(X: Bounded, Y: Bounded) -> Bounded:
    """Return X o Y, entry by entry: |X o Y|_F <= max |X_ij| |Y|_F."""
    cross = symmetric(products(X.jacobian, Y.jacobian))
    frobenius = min(X.row * Y.frobenius, Y.row * X.frobenius)
    return Bounded(
        X.centre * Y.centre,
        frobenius,
        frobenius,
        X.row * Y.row,
        Y.row * X.jacobian + X.row * Y.jacobian,
        Y.row * X.hessian_row + X.row * Y.hessian_row + cross,
        Y.row * X.hessian_all + X.row * Y.hessian_all,
        X.drift * Y.row + Y.drift * X.row,
    )


def norm(X: Bounded, *, layernorm: bool, eps: float) -> Bounded:
    r"""Return LayerNorm or RMSNorm without gain and shift; the caller sets its value at the centre.

    With s a lower bound of every row scale sqrt(var + eps) over the ball: the Jacobian is at most 1/s, and the second derivative
    2 / (sqrt(3 d) s^2) in the rows (it holds with eps, and for RMSNorm). A :class:`ZeroScaleError` says that eps = 0 meets rows
    whose scale may be 0.
    """
    d, length = X.width, X.length
    rows = X.centre - X.centre.mean(1, keepdim=True) if layernorm else X.centre
    at_centre = (rows**2).mean(1).sqrt()
    lowest = torch.clamp(at_centre - X.drift / math.sqrt(d), min=0.0)
    s = float((lowest**2 + eps).sqrt().min())
    if s == 0:
        raise ZeroScaleError(
            f"row {int(lowest.argmin())} has scale {float(at_centre.min()):.3g} and may drift by {X.drift / math.sqrt(d):.3g}, "
            "so its norm has no bound with eps = 0; use eps > 0 or a smaller radius"
        )
    curvature = products(X.jacobian, X.jacobian, 2 / (math.sqrt(3 * d) * s * s))
    return replace(
        X.times(1 / s, X.centre),
        spectral=math.sqrt(length * d),
        frobenius=math.sqrt(length * d),
        row=math.sqrt(d),
        hessian_row=1 / s * X.hessian_row + curvature,
        diameter=2 * math.sqrt(d),
        jacobian_row={},
        sphere=Sphere(X, s, eps, layernorm),
    )


def gain_and_shift(X: Bounded, gain: BoundedParameter | None, shift: BoundedParameter | None) -> Bounded:
    """Return X diag(gain) + 1 shift^T, either of which may be missing."""
    X = X if gain is None else X * gain
    return X if shift is None else replace(shifted(X, shift), jacobian_row=X.jacobian_row)


class ZeroScaleError(ValueError):
    """A norm has eps = 0 and a row whose scale may be 0."""


def split(X: Bounded, heads: int) -> Bounded:
    """Return the heads of every row as rows of their own: L x (H w) to (L H) x w."""
    if heads == 1:
        return X
    root = math.sqrt(heads)
    centre = X.centre.reshape(X.length * heads, -1)
    # a row of Lambda is at most sqrt(H) times the longest of its heads
    return replace(X, centre=centre, spectral=X.frobenius, hessian_row=root * X.hessian_row, diameter=math.inf, sphere=None)


def merge(X: Bounded, heads: int) -> Bounded:
    """Return the heads side by side again."""
    if heads == 1:
        return X
    row = min(math.sqrt(heads) * X.row, X.frobenius)
    centre = X.centre.reshape(X.length // heads, -1)
    return replace(X, centre=centre, spectral=X.frobenius, row=row, diameter=math.inf, jacobian_row={}, sphere=None)


def mixed(Q: Bounded, K: Bounded, V: Bounded, c: float, value: Tensor, *, heads: int, groups: int) -> Bounded:
    r"""Return the context of softmax attention, C_i = sum_j softmax_j(c q_i.k_j) v_j, heads side by side.

    With p a row of weights, cov and cum the covariance and third cumulant under it, r(Y) the range of Y's rows, so that a
    variance of rows is at most r^2 / 4, and one of a vector u at most |u|^2 / 2,

        along V:     sum_j p_ij dv_j             sqrt(L), as |A|_2 <= sqrt(L); or sqrt(L) times the largest row of dV
        along Q:     c cov(v, k) dq_i            c r(V) r(K) / 4
        along K:     c cov(v, dK q_i)            c r(V) |Q| / sqrt(8)
        Q with Q:    c^2 cum(v, K dq_i, K dq_i)  c^2 min(sqrt(6)/9 |V||K|^2, r(V) r(K)^2 / 4)            times row Lambda
        K with K:    c^2 cum(v, dK q_i, dK q_i)  c^2 min(sqrt(6)/9 |V|, r(V) / 2) |Q|^2                  times row Lambda
        Q with K:    c^2 cum(v, K dq_i, dK q_i)  c^2 min(sqrt(6)/9 |V||K|, r(V) r(K) / sqrt(8)) |Q|      times row Lambda
                     + c cov(v, dK dq_i)         c r(V) / sqrt(8)                                        times |Lambda|_F
        V with Q:    c cov(dV, K dq_i)           c r(K) / sqrt(8)                                        times |Lambda|_F
        V with K:    c cov(dV, dK q_i)           c |Q| / 2                                               times |Lambda|_F

    Masks change none of these; the caller passes norms and ranges that hold after a rotation. The heads'
    parts of Lambda, Q, K, V are orthogonal, so norms of the whole serve. Where g query heads share keys and values, dK q_i
    or a single dV counts sqrt(g) times: |dK|_F |Q| bounds it in each of the heads. Beside dq_i, whose heads are entries of
    one unit vector, dK and dV count once.
    """
    g, root = math.sqrt(groups), math.sqrt(8)
    q, k, v, sharp = Q.spectral, K.spectral, V.spectral, softmax_hessian_map_bound()
    around_v, around_k = V.range, K.range
    to_v, by_rows = math.sqrt(Q.length) * g, math.sqrt(Q.length * heads)
    to_q, to_k = c * around_v * around_k / 4, c * around_v * q / root * g
    along_v = Magnitudes({i: min(to_v * jacobian, by_rows * V.row_jacobians()[i]) for i, jacobian in V.jacobian.items()})
    by_row = (
        products(Q.jacobian, Q.jacobian, c * c * min(sharp * v * k * k, around_v * around_k**2 / 4))
        + products(K.jacobian, K.jacobian, c * c * min(sharp * v, around_v / 2) * q * q * g * g)
        + symmetric(products(Q.jacobian, K.jacobian, c * c * min(sharp * v * k, around_v * around_k / root) * q * g))
    )
    summand_all = (
        symmetric(products(Q.jacobian, K.jacobian, c * around_v / root))
        + symmetric(products(V.jacobian, Q.jacobian, c * around_k / root))
        + symmetric(products(V.jacobian, K.jacobian, c * q / 2 * g))
    )
    row = min(math.sqrt(heads) * V.row, g * V.frobenius)
    frobenius = math.sqrt(Q.length) * row
    return Bounded(
        value,
        frobenius,
        frobenius,
        row,
        along_v + to_q * Q.jacobian + to_k * K.jacobian,
        by_row + to_q * Q.hessian_row,
        summand_all + to_q * Q.hessian_all + to_k * (K.hessian_row + K.hessian_all) + to_v * (V.hessian_row + V.hessian_all),
        to_v * V.drift + to_q * Q.drift + to_k * K.drift,
        math.sqrt(heads) * V.range,  # within a head, contexts lie in the convex hull of the values
    )
