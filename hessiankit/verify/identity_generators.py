"""One-parameter families of parameters along which a loss is constant: generators, families, gauge of an attention head.

A symmetry moves theta by exp(t B): rows of k entries of a parameter become rows times exp(t G), other rows times
exp(-t G^T); or it adds t times a constant vector. Differentiating loss(exp(t B) theta) = loss(theta) once and twice gives

    g^T B theta = 0,        H (B theta) + B^T g = 0,

and for a shift by a constant vector u, g^T u = 0 and H u = 0. No second derivative enters these but H itself.

The gauge dimension counts the linear maps of W_Q, W_K, W_V (columns) and W_O (rows), gl(d_k)^4, that do not change the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hessiankit.support.errors import InputError

Kind = Literal["linear", "rotation", "diagonal", "shift"]
Params = Mapping[str, Tensor]


DENSE = 512
"""Widths up to which a generator of any matrices is drawn dense; beyond it diagonal, since exp(t G) costs k^3."""


class Leg(NamedTuple):
    """Entries of one parameter, as positions in its vec_r, (rows, k): each row of k entries is transformed alike."""

    parameter: str
    at: Tensor


@dataclass(frozen=True)
class GeneratorPart:
    """Legs that one k x k generator G moves together: x -> x exp(t G) on the first, x -> x exp(-t G^T) on the others.

    Attributes:
        kind: The kind of G: any matrix, antisymmetric, diagonal, or in place of a matrix a shift that is the same in each of the
            k columns.
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
        family: The kind of structure.
        statement: The identity in words and symbols.
        parts: The parts that move, each with a generator of its own.
    """

    family: str
    statement: str
    parts: tuple[GeneratorPart, ...]

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
        draws = [Motion(tuple(m for part in self.parts for m in _draw(part, like, rng)), self.parts[0].kind == "shift")]
        if all(part.kind in ("linear", "diagonal") for part in self.parts):
            draws.append(Motion(tuple(m for part in self.parts for m in _with(part, like.new_ones(part.size))), False))
        return tuple(draws)


def _draw(part: GeneratorPart, like: Tensor, rng: torch.Generator) -> list[tuple[Leg, Tensor]]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(like)

    if part.kind == "shift":
        return [(leg, normal(leg.at.shape[0], 1)) for leg in part.legs]
    k = part.size
    if part.kind == "diagonal" or (part.kind == "linear" and k > DENSE):
        return _with(part, normal(k))
    G = normal(k, k) / k**0.5  # so that exp(t G) stays well conditioned at every width
    return _with(part, G - G.T if part.kind == "rotation" else G)


def _with(part: GeneratorPart, G: Tensor) -> list[tuple[Leg, Tensor]]:
    return [*((leg, G) for leg in part.legs), *((leg, -_transposed(G)) for leg in part.against)]


def _transposed(G: Tensor) -> Tensor:
    return G if G.ndim == 1 else G.T


def gauge_dimension(head_dim: int, *, normed: str = "", rotary: bool = False) -> int:
    """Return the dimension of the gauge group of one attention head.

    With d = head_dim, the logits (W_Q, W_K) and the values (W_V, W_O) add up:

        logits   d^2 (W_Q G, W_K G^-T); with an RMS norm on q or k d (d - 1) / 2 rotations, plus one scale for each norm;
                 rotary: d (a rotation and a scale for each frequency), with norms d / 2 rotations plus the scales
        values   d^2 (W_V G, G^-1 W_O); with a norm on v or on the head's output c d (d - 1) / 2 + 1

    Source: HybridNorm (arXiv 2503.04598) defines the placements; the dimensions are not in the paper.

    Args:
        head_dim: Width of a query, a key and a value.
        normed: Which of "q", "k", "v", "c" (the head's output before W_O) pass an RMS norm without gain and with eps = 0:
            "qk" for QK-Norm, "qkv" for QKV-Norm.
        rotary: Whether q and k are rotated by position, after their norms; head_dim is even then.

    Raises:
        InputError: Another letter, a width below 1, or an odd one with rotary.

    >>> gauge_dimension(4), gauge_dimension(4, normed="qkv"), gauge_dimension(4, normed="qk", rotary=True)
    (32, 15, 20)
    """
    d, letters = head_dim, set(normed)
    if not letters <= set("qkvc"):
        raise InputError(f"gauge_dimension: normed={normed!r}; expected letters out of 'q', 'k', 'v', 'c'")
    if d < 1 or (rotary and d % 2):
        raise InputError(f"gauge_dimension: head_dim={d}, rotary={rotary}; expected at least 1, and an even number with rotary")
    rotations, scales = d * (d - 1) // 2, len(letters & set("qk"))
    if rotary:
        logits = d // 2 + scales if scales else d
    else:
        logits = rotations + scales if scales else d * d
    return logits + (rotations + 1 if letters & set("vc") else d * d)


def rescaled(matrix: Tensor, slices: Mapping[str, slice], factors: Mapping[str, float]) -> Tensor:
    """Return the Hessian of theta -> loss(D theta) from the Hessian of the loss at D theta: D H D, D = diag(factors).

    LayerNorm Scaling (The Curse of Depth in Large Language Models, arXiv 2502.05795, Eq. 12) divides what norm l gives by
    sqrt(l). It is Pre-LN at gamma_l / sqrt(l), beta_l / sqrt(l), so its Hessian is ``rescaled`` Pre-LN's with the factor
    1 / sqrt(l) for both: the blocks of all other weights are equal.

    Args:
        matrix: The Hessian (P, P) at D theta.
        slices: Rows of each parameter, as in :class:`hessiankit.Hessian`.
        factors: By parameter; 1 for those left out.

    Raises:
        InputError: A factor for an unknown parameter.

    >>> H = torch.tensor([[2.0, 3.0], [3.0, 5.0]])
    >>> rescaled(H, {"gamma": slice(0, 1), "W": slice(1, 2)}, {"gamma": 0.5}).tolist()
    [[0.5, 1.5], [1.5, 5.0]]
    """
    D = torch.ones(matrix.shape[0]).to(matrix)
    for name, factor in factors.items():
        if name not in slices:
            raise InputError(f"rescaled: no parameter named '{name}'; the matrix has {', '.join(slices)}")
        D[slices[name]] = factor
    return D[:, None] * matrix * D
