"""Directions along which a loss is constant, found from its gradient only.

If the loss does not change along theta -> exp(t B) theta, then <B theta, g> = 0 at every theta. Entries of one parameter along
one of its axes are a *leg* X, (rows, k); what a generator G, k x k, does to it contributes <X G, g> = sum_ij G_ij (X^T g)_ij, its
*charge*. A symmetry is thus a sum of charges that vanishes at generic points: of one leg (a norm behind it removes its scale), or
of several of one width (columns that only the rows of another weight read). Sums over an axis of g that vanish are shifts without
effect. No trace and no name enters; an operation that none of this was written for is covered as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.verify.in_place import placed
from hessiankit.verify.probes import normal
from hessiankit.verify.problem import Problem

Params = Mapping[str, Tensor]

VANISHES = 1e-12
"""A charge is zero below this share of the terms that cancel in it."""
MOST_POINTS = 32
"""Gradients at most that legs of one width are told apart by; where there are too many legs, as in deep narrow models, those of
that width are left out."""
DENSE = 512
"""Width up to which generators other than diagonal ones are looked for, since exp(t G) costs k^3."""


class Leg(NamedTuple):
    """Entries start to start + size along an axis of a parameter."""

    parameter: str
    axis: int
    start: int
    size: int

    def of(self, values: Params) -> Tensor:
        """Return the entries as (..., size), a view."""
        return values[self.parameter].narrow(self.axis, self.start, self.size).movedim(self.axis, -1)


class Motion(NamedTuple):
    """One generator: for each leg a matrix (k, k) or a diagonal (k,), or for each parameter a shift of its shape."""

    legs: tuple[tuple[Leg, Tensor], ...] = ()
    shifts: tuple[tuple[str, Tensor], ...] = ()

    def velocity(self, theta: Params) -> dict[str, Tensor]:
        """Return B theta by parameter, or the shift; parameters that do not move are left out."""
        result = {name: torch.zeros_like(theta[name]) for name in dict.fromkeys(leg.parameter for leg, _ in self.legs)}
        for leg, G in self.legs:
            leg.of(result).add_(_times(leg.of(theta), G))
        return result | {name: shift.clone() for name, shift in self.shifts}

    def transposed(self, gradient: Params) -> dict[str, Tensor]:
        """Return B^T g by parameter: nothing for a shift."""
        return Motion(tuple((leg, G if G.ndim == 1 else G.T) for leg, G in self.legs)).velocity(gradient)

    def moved(self, theta: Params, t: float) -> dict[str, Tensor]:
        """Return exp(t B) theta, or theta plus t times the shift.

        >>> motion = Motion(((Leg("w", 0, 0, 2), torch.tensor([[0.0, 1.0], [0.0, 0.0]])),))
        >>> motion.moved({"w": torch.tensor([1.0, 5.0])}, 2.0)["w"].tolist()
        [1.0, 7.0]
        """
        result = {name: value.clone() for name, value in theta.items()}
        for leg, G in self.legs:
            leg.of(result).copy_(_times(leg.of(result), torch.exp(t * G) if G.ndim == 1 else torch.linalg.matrix_exp(t * G)))
        for name, shift in self.shifts:
            result[name] += t * shift
        return result


def _times(X: Tensor, G: Tensor) -> Tensor:
    return X * G if G.ndim == 1 else X @ G


@dataclass(frozen=True)
class Symmetry:
    """A family of generators along which the loss is constant."""

    family: str  # the kind of structure that has it
    statement: str  # the identity; g is the gradient of the parameters in question
    parameters: tuple[str, ...]
    partners: tuple[str, ...]  # the parameters that move against those
    motions: tuple[Motion, ...]  # random generators, and G = I, Euler's identity, where that is one

    @property
    def name(self) -> str:
        """The parameters that move, and after ``|`` those that move inversely."""
        return " | ".join(", ".join(dict.fromkeys(names)) for names in (self.parameters, self.partners) if names)


class GradientSample(NamedTuple):
    """Parameters at a point near those of the problem, and the gradient there."""

    theta: dict[str, Tensor]
    g: dict[str, Tensor]


def _samples(problem: Problem, count: int, rng: torch.Generator) -> list[GradientSample]:
    """Return generic points near the parameters, with their gradients."""
    samples = []
    with problem.at():
        for _ in range(count):
            theta = generic_point(problem.params, rng)
            with placed((problem.own[n], x) for n, x in theta.items()):
                samples.append(GradientSample(theta, dict(zip(theta, problem.gradient(), strict=True))))
    return samples


def generic_point(params: Params, rng: torch.Generator) -> dict[str, Tensor]:
    """Return parameters near given ones, a tenth of their size away."""
    return {n: x + 0.1 * x.square().mean().sqrt().clamp_min(0.1) * normal(x.shape, rng, x) for n, x in params.items()}


def symmetries(problem: Problem, rng: torch.Generator) -> list[Symmetry]:
    """Return the symmetries that the gradient shows at generic points; the problem is in float64."""
    groups: dict[int, list[Leg]] = {}
    for leg in _legs(problem.params):
        groups.setdefault(leg.size, []).append(leg)
    # One equation for each entry of each point, and some to spare.
    count = max((math.ceil(len(legs) / size) + 2 for size, legs in groups.items()), default=0)
    samples = _samples(problem, max(3, min(MOST_POINTS, count)), rng)
    result = [*_without_effect(samples, rng), *_row_means(samples, rng)]
    names = {name for symmetry in result if symmetry.family == NO_EFFECT for name in symmetry.parameters}
    result += _norm_scales(samples, rng, names)
    for size, legs in groups.items():
        if size * len(samples) >= len(legs) + size:
            result += _gauges(legs, samples, rng)
    return result


def _legs(params: Params) -> Iterator[Leg]:
    """Yield the legs of all parameters; of an axis three times as long as another one, as of fused weights, its thirds too."""
    lengths = {n for x in params.values() for n in x.shape[:2]}
    for name, x in params.items():
        for axis, n in enumerate(x.shape[:2]):
            yield Leg(name, axis, 0, n)
            if n % 3 == 0 and n // 3 in lengths and n > 3:
                yield from (Leg(name, axis, start, n // 3) for start in range(0, n, n // 3))


def _zero(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Tell where sums vanish in all samples, for pairs (sums, sums of absolute terms)."""
    return torch.stack([value.abs() <= VANISHES * scale for value, scale in terms]).all(0)


# Shifts and scales without effect ---------------------------------------------------------------------------------------

NO_EFFECT = "no effect"
CURVED = "H Bθ = -Bᵀg"


def _without_effect(samples: Sequence[GradientSample], rng: torch.Generator) -> Iterator[Symmetry]:
    """Biases, or thirds of fused ones, that nothing depends on, such as that of the keys."""
    largest = max(float(g.abs().max()) for g in samples[0].g.values())
    for leg in _legs(samples[0].theta):
        x = samples[0].theta[leg.parameter]
        if x.ndim == 1 and all(float(leg.of(s.g).abs().max()) <= VANISHES * largest for s in samples):
            shift = torch.zeros_like(x)
            leg.of({leg.parameter: shift}).copy_(normal((leg.size,), rng, x))
            motion = Motion(shifts=((leg.parameter, shift),))
            yield Symmetry(NO_EFFECT, "g = 0, H = 0 in the rows of A", (leg.parameter,), (), (motion,))


def _row_means(samples: Sequence[GradientSample], rng: torch.Generator) -> Iterator[Symmetry]:
    """Columns that only LayerNorms and softmaxes read: adding the same to all columns of a row changes nothing."""
    for name, x in samples[0].theta.items():
        for axis, n in enumerate(x.shape[:2]):
            sums = [(s.g[name].sum(axis), s.g[name].abs().sum(axis)) for s in samples]
            if n > 1 and float(sums[0][1].max()) and bool(_zero(sums).all()):
                shift = normal([1 if k == axis else m for k, m in enumerate(x.shape)], rng, x).expand(x.shape)
                statement = "A + u ⊗ 1: <u ⊗ 1, g> = 0, H (u ⊗ 1) = 0"
                yield Symmetry("row mean", statement, (name,), (), (Motion(shifts=((name, shift),)),))


def _norm_scales(samples: Sequence[GradientSample], rng: torch.Generator, without_effect: set[str]) -> Iterator[Symmetry]:
    """Weights, row by row or whole, whose length a norm with eps = 0 removes; a bias may share it."""
    theta, statement = samples[0].theta, "<A, g> = 0, H A = -g on A, 0 elsewhere"
    names = [name for name in theta if name not in without_effect]
    products = [[s.theta[n] * s.g[n] for s in samples] for n in names]
    sums = torch.stack([torch.stack([x.sum() for x in parameter]) for parameter in products])  # (parameters, samples)
    sizes = torch.stack([torch.stack([x.abs().sum() for x in parameter]) for parameter in products])
    zero = (sums.abs() <= VANISHES * sizes).all(1)
    for name, is_free in zip(names, zero.tolist(), strict=True):
        if is_free:
            legs = [Leg(name, axis, 0, n) for axis, n in enumerate(theta[name].shape[:2]) if n > 1 and theta[name].ndim > 1]
            leg = next((leg for leg in legs if bool(_zero([_charge(leg, s) for s in samples]).all())), None)
            if leg is None:
                yield _scaled(statement, theta, name)
            else:
                motion = Motion(((leg, normal((leg.size,), rng, theta[name])),))
                yield Symmetry("norm scale", statement, (name,), (), (motion,))
    is_joint = ((sums[:, None] + sums).abs() <= VANISHES * (sizes[:, None] + sizes)).all(2)
    for a, b in is_joint.nonzero().tolist():
        if not zero[a] and not zero[b] and theta[names[a]].ndim > 1 and theta[names[b]].ndim == 1:
            yield _scaled(statement, theta, names[a], names[b])


def _scaled(statement: str, theta: Params, *names: str) -> Symmetry:
    legs = [Leg(name, 0, 0, theta[name].shape[0]) for name in names]
    motion = Motion(tuple((leg, theta[leg.parameter].new_ones(leg.size)) for leg in legs))
    return Symmetry("norm scale", statement, names, (), (motion,))


def _charge(leg: Leg, sample: GradientSample) -> tuple[Tensor, Tensor]:
    """Return the diagonal of X^T g, (k,), and the sums of its absolute terms."""
    terms = (leg.of(sample.theta) * leg.of(sample.g)).reshape(-1, leg.size)
    return terms.sum(0), terms.abs().sum(0)


# Columns that others read -----------------------------------------------------------------------------------------------


def _gauges(legs: Sequence[Leg], samples: Sequence[GradientSample], rng: torch.Generator) -> Iterator[Symmetry]:
    """Legs of one width whose charges cancel, index by index: what one side does, the other undoes."""
    charges = [torch.cat([_charge(leg, s)[0] for s in samples]) for leg in legs]
    scales = [torch.cat([_charge(leg, s)[1] for s in samples]) for leg in legs]
    largest = max(float(m.max()) for m in scales)
    positions = [
        n for n, m in enumerate(scales) if float(m.max()) > VANISHES * largest and not bool(_zero([(charges[n], m)]).all())
    ]
    if len(positions) < 2:
        return
    lengths = torch.stack([charges[n].norm() for n in positions])
    T = torch.stack([charges[n] for n in positions], 1) / lengths
    _, values, rows = torch.linalg.svd(T, full_matrices=False)
    null = rows[values <= 1e-10 * values[0]] / lengths  # (relations, legs)
    for relation in _sparse(null):
        signs = {legs[n]: int(c) for n, c in zip(positions, relation, strict=True) if c}
        terms = [(c * charges[n], scales[n]) for n, c in zip(positions, relation, strict=True) if c]
        total, scale = (torch.stack(parts).sum(0) for parts in zip(*terms, strict=True))
        if len(signs) > 1 and bool(_zero([(total, scale)]).all()):
            yield _gauge(signs, samples, rng)


def _sparse(null: Tensor) -> Iterator[list[int]]:
    """Yield vectors of a null space that hold only -1, 0 and 1, by elimination."""
    N, row = null.clone(), 0
    for column in range(N.shape[1]):
        if row == len(N):
            break
        at = row + int(N[row:, column].abs().argmax())
        if float(N[at, column].abs()) <= 1e-6 * float(N.abs().max()):
            continue
        N[[row, at]] = N[[at, row]]
        N[row] /= N[row, column].clone()
        other_rows = [k for k in range(len(N)) if k != row]
        N[other_rows] -= N[other_rows, column : column + 1] * N[row]
        row += 1
    for vector in N[:row]:
        integers = vector.round()
        if float((vector - integers).abs().max()) < 1e-4 and float(integers.abs().max()) == 1:
            yield [int(c) for c in integers.tolist()]


def _gauge(signs: Mapping[Leg, int], samples: Sequence[GradientSample], rng: torch.Generator) -> Symmetry:
    """Return a symmetry of legs with signs: G acts on one side, and -G^T on the other."""
    thetas = samples[0].theta
    flat = {leg: thetas[leg.parameter].ndim == 1 for leg in signs}
    first = next((sign for leg, sign in signs.items() if flat[leg]), next(iter(signs.values())))
    members, partners = ([leg for leg, s in signs.items() if (s == first) is side] for side in (True, False))
    like, k = thetas[members[0].parameter], members[0].size
    is_free = torch.eye(k, dtype=torch.bool, device=like.device)
    if k <= DENSE:
        sums = [_matrix_charge(members, partners, s) for s in samples]
        is_alive = torch.stack([scale > 0 for _, scale in sums]).all(0)  # where nothing depends on them, units may be dead
        is_free |= _zero(sums) & is_alive
    G = normal((k, k), rng, like) / k**0.5 * is_free  # so that exp(t G) stays well conditioned at every width
    diagonal = bool((is_free.sum(0) == 1).all())
    axes = [{leg.axis for leg in side if not flat[leg]} for side in (members, partners)]
    family = "logits" if axes[0] == axes[1] else "linear maps"
    generators = [G.diagonal() if diagonal else G, like.new_ones(k)]
    motions = tuple(
        Motion((*((leg, B) for leg in members), *((leg, -B if B.ndim == 1 else -B.T) for leg in partners))) for B in generators
    )
    names, partner_names = (tuple(leg.parameter for leg in side) for side in (members, partners))
    acting = {"linear maps": "(A G, G⁻¹C)", "logits": "(A G, C G⁻ᵀ)"}[family]
    if diagonal:
        acting = acting.replace("G⁻ᵀ", "D⁻¹").replace("G", "D") + ", D diagonal"
    return Symmetry(family, f"{acting}: <A, g> = <C, g>, {CURVED}", names, partner_names, motions)


def _matrix_charge(members: Sequence[Leg], partners: Sequence[Leg], sample: GradientSample) -> tuple[Tensor, Tensor]:
    """Return sum X^T g over one side minus sum (X^T g)^T over the other, (k, k), and the sums of absolute terms."""
    total, scale = torch.zeros((), device="cpu"), torch.zeros((), device="cpu")
    for sign, side in ((1, members), (-1, partners)):
        for leg in side:
            X, g = (leg.of(values).reshape(-1, leg.size) for values in (sample.theta, sample.g))
            M, S = X.T @ g, X.abs().T @ g.abs()
            total, scale = (total + M, scale + S) if sign == 1 else (total - M.T, scale + S.T)
    return total, scale
