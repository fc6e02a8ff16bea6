r"""The loss along directions or to other checkpoints, and on planes of two, beside the quadratic model of the exact Hessian.

    L(theta + t d)   and   q(t) = L(theta) + t <g, d> + t^2 / 2 <d, H d> .

Lines between checkpoints: Goodfellow, Vinyals and Saxe, "Qualitatively characterizing neural network optimization problems",
2015. Directions of which every filter has the length of the module's: Li, Xu, Taylor, Studer and Goldstein, "Visualizing the
loss landscape of neural nets", 2018, Sec. 4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hessiankit.curvature.operator import HessianOperator
from hessiankit.landscape.spectrum_result import Spectrum
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.read import read_request
from hessiankit.request.signature import RequestArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_name, not_known
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.support.torch_state import one_at_a_time

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "loss_slices"
NORMALISATIONS = ("none", "unit", "filter")
HALVINGS = 14  # of the interval in which the quadratic model ceases to hold
LOSS_ROUNDING = 64  # times eps |L|: differences of losses that are rounding


@dataclass(frozen=True, repr=False, eq=False)
class LossSlice(Printed, WithDict):
    """The loss along one direction d.

    Attributes:
        name: Name of the direction.
        t: Steps, (n,), ascending, 0 among them.
        losses: L(theta + t d), by the module's own call, (n,).
        slope: <g, d>.
        curvature: <d, H d>.
        length: |d|, so that t |d| is the distance in parameters.
        tolerance: Tolerance of the quadratic model, see ``radius``.
        radius: The largest r such that for all steps |t| <= r the quadratic model is off by no more than ``tolerance`` times its
            largest change for |s| <= |t|, which is |<g, d> t| + |<d, H d>| t^2 / 2.
        bounded: Whether the model failed at a step beyond the radius; if not, the radius is the end of the slice.
    """

    name: str
    t: Tensor
    losses: Tensor
    slope: float
    curvature: float
    length: float
    tolerance: float
    radius: float
    bounded: bool

    _derived = ("quadratic",)

    @property
    def loss(self) -> float:
        """L(theta)."""
        return float(self.losses[int((self.t == 0).nonzero()[0])])

    @property
    def quadratic(self) -> Tensor:
        """The quadratic model q at the steps, (n,)."""
        return self.loss + self.slope * self.t + 0.5 * self.curvature * self.t**2

    @property
    def range(self) -> str:
        """The steps in which the quadratic model holds, in words."""
        return f"|t| <= {self.radius:.3g}" + ("" if self.bounded else ", the end")

    def _headline(self) -> str:
        return f"loss along {self.name}: {len(self.t)} steps, slope {self.slope:.4g}, curvature {self.curvature:.4g}"

    def _parts(self) -> Iterator[Piece]:
        yield f"{self._headline()}; the quadratic model holds for {self.range}"
        columns = zip(*(x.tolist() for x in (self.t, self.losses, self.quadratic)), strict=True)
        yield table(("t", "loss", "quadratic model"), ([f"{x:.4g}" for x in row] for row in columns), left=0, spread=True)


@dataclass(frozen=True, repr=False, eq=False)
class LossPlane(Printed, WithDict):
    """The loss on the plane of two directions d_1 and d_2.

    Attributes:
        t: Steps along either direction, (n,), as in the slices.
        losses: L(theta + t_i d_1 + t_j d_2), by the module's own call, (n, n).
        quadratic: The quadratic model there, (n, n).
        slopes: <g, d_1> and <g, d_2>, (2,).
        curvatures: <d_a, H d_b>, (2, 2).
    """

    t: Tensor
    losses: Tensor
    quadratic: Tensor
    slopes: Tensor
    curvatures: Tensor

    def _headline(self) -> str:
        error, c = (self.quadratic - self.losses).abs().max(), self.curvatures
        return (
            f"on the plane the loss is {float(self.losses.min()):.4g} to {float(self.losses.max()):.4g}, the model off by up to "
            f"{float(error):.3g}; <d_1, H d_2> {float(c[0, 1]):.4g}"
        )

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        steps = [f"{float(t):.4g}" for t in self.t]
        rows = ((step, *(f"{x:.4g}" for x in row)) for step, row in zip(steps, self.losses.tolist(), strict=True))
        yield table(("t_1 \\ t_2", *steps), rows, spread=True)


@dataclass(frozen=True, repr=False, eq=False)
class LossSlices(Printed, WithDict):
    """Slices of the loss through one point; made by :func:`hessiankit.loss_slices`.

    Attributes:
        slices: Slices, one for each direction.
        plane: The loss on the plane of the two directions; None unless asked for.
        notes: Differences between two checkpoints outside the parameters that move.
        seconds: Time taken.
    """

    slices: tuple[LossSlice, ...]
    plane: LossPlane | None
    notes: tuple[str, ...]
    seconds: float

    def __getitem__(self, k: int) -> LossSlice:
        return self.slices[k]

    def __len__(self) -> int:
        return len(self.slices)

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw every slice with its quadratic model and the radius in which that holds, and contours of both on the plane.

        The picture is written to ``path``, as ``.png``, ``.svg`` or ``.pdf``; an InputError says why it cannot be.
        """
        from hessiankit.landscape.plots import plot_slices  # only here: Matplotlib

        return plot_slices(self, path)

    def _headline(self) -> str:
        first = self.slices[0]
        count = "1 slice" if len(self) == 1 else f"{len(self)} slices"
        plane = "" if self.plane is None else ", with their plane,"
        return f"{count} of {len(first.t)} steps{plane} through a loss of {first.loss:.6g}, {self.seconds:.2f} s"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        rows = []
        for item in self.slices:
            numbers = (item.slope, item.curvature, float(item.losses.min()), float(item.losses.max()))
            rows.append((item.name, f"{item.length:.4g}", *(f"{x:.4g}" for x in numbers), item.range))
        yield table(("direction", "length", "slope", "curvature", "smallest loss", "largest loss", "model holds for"), rows)
        yield f"the model holds where it is off by at most {self.slices[0].tolerance:.0%} of its largest change up to |t|"
        if self.plane is not None:
            yield self.plane._headline()
        yield from self.notes


@checked(WHO, leave=("along",))
@one_at_a_time
@asks(RequestArguments)
def loss_slices(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    along: int | Tensor | Spectrum | Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] = 2,
    normalise: str | None = None,
    span: tuple[float, float] | None = None,
    points: int = 41,
    tolerance: float = 0.1,
    plane: bool = False,
    seed: int = 0,
    **asked: Unpack[RequestArguments],
) -> LossSlices:
    """Return the loss along directions through the module's parameters, and how far the exact quadratic model holds.

    Only the parameters ``params`` are moved.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two.
        inputs: Inputs of the call.
        target: Target of the loss.
        **asked: Arguments of :class:`~hessiankit.request.signature.RequestArguments`.
        along: Number of directions to draw; or directions as columns (P, k) or one vector (P,), in the order of the rows of
            :attr:`hessiankit.Hessian.matrix`; a result of :func:`hessiankit.spectrum`, whose directions are taken; or the state
            dict of another checkpoint, which is at t = 1, or a list of them.
        normalise: ``"none"``; ``"unit"``: directions of length 1; ``"filter"``: each row of a matrix, each filter of a
            convolution as long as the module's, biases and gains unmoved (Li et al. 2018). By default ``"filter"`` for drawn
            directions, ``"none"`` for others.
        span: First and last t, on both sides of 0; by default -1 to 1, to another checkpoint -0.5 to 1.5.
        points: Steps between and with these; 0 is added if absent.
        tolerance: Tolerance of the quadratic model, see :attr:`LossSlice.radius`.
        plane: Whether to evaluate the loss on the plane of the two directions too, at all pairs of steps.
        seed: Seed of directions that are drawn.

    Raises:
        InputError: An argument cannot be used, or a loss is not finite.
        TraceError: If torch cannot trace the module.

    Along the first weight of a linear layer under squared error, mean((t x_1)^2) = 2 t^2 at x_1 = 1, 3/2, ... is its own model:

    >>> layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> _ = layer.weight.data.zero_()
    >>> x = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> along = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> found = loss_slices(layer, x, torch.zeros(2, 1, dtype=torch.float64), along=along, points=3)
    >>> found[0].losses.tolist(), found[0].curvature, found[0].radius, found[0].bounded
    ([2.0, 0.0, 2.0], 4.0, 1.0, False)
    """
    start = time.perf_counter()
    states = along if isinstance(along, list | tuple) else [along]
    is_to_checkpoint = all(isinstance(state, Mapping) for state in states)
    low, high = _span(span if span is not None else (-0.5, 1.5) if is_to_checkpoint else (-1.0, 1.0))
    normalise = ("filter" if isinstance(along, int) else "none") if normalise is None else normalise
    check_name(WHO, "normalise", normalise, NORMALISATIONS)
    if points < 2:
        raise InputError(f"{WHO}: points={points}; expected 2 or more")
    if not 0 < tolerance < 1:
        raise InputError(f"{WHO}: tolerance={tolerance}; expected a share between 0 and 1, such as 0.1")
    batches = read_request(module, inputs, target, **asked).together()
    names, D, notes = _directions(along, batches[0], seed)
    D = _normalised(D, batches[0], normalise)
    if not bool(torch.isfinite(D).all()) or not bool(D.norm(dim=0).all()):
        raise InputError(f"{WHO}: a direction is zero, NaN or infinite; pass finite ones that move something")
    if plane and len(names) != 2:
        raise InputError(f"{WHO}: plane=True needs two directions, and along has {len(names)}; pass two, or a spectrum with k=2")
    operator = HessianOperator.of(batches, "hessian")
    HD = operator @ D
    steps = torch.linspace(low, high, points, dtype=torch.float64, device="cpu")
    rounding = 1e-9 * (high - low)  # 0 itself may come out as rounding
    steps = torch.cat([steps[steps < -rounding], torch.zeros(1, dtype=torch.float64, device="cpu"), steps[steps > rounding]])
    eps = torch.finfo(operator.torch_dtype).eps
    slopes, curvatures = operator.gradient.double() @ D.double(), D.double().T @ HD.double()
    slices, loss_of = [], loss_around(batches)
    for k, (name, d) in enumerate(zip(names, D.T, strict=True)):
        losses = _along(loss_of, d.unsqueeze(1))
        values = torch.tensor([losses(float(t)) for t in steps], dtype=torch.float64, device="cpu")
        slope, curvature = float(slopes[k]), float(curvatures[k, k])
        holds = _model(losses, slope, curvature, tolerance, LOSS_ROUNDING * eps)
        sides = [_extent(holds, side.tolist()) for side in (steps[steps > 0], steps[steps < 0].flip(0)) if len(side)]
        radius = min(extent for extent, _ in sides)
        is_bounded = any(is_limit and extent == radius for extent, is_limit in sides)
        slices.append(LossSlice(name, steps, values, slope, curvature, float(d.norm()), tolerance, radius, is_bounded))
    loss_plane = _plane(_along(loss_of, D), steps, slopes.cpu(), curvatures.cpu()) if plane else None
    return LossSlices(tuple(slices), loss_plane, notes, time.perf_counter() - start)


def _plane(losses: Callable[..., float], t: Tensor, slopes: Tensor, curvatures: Tensor) -> LossPlane:
    values = torch.tensor([[losses(float(a), float(b)) for b in t] for a in t], dtype=torch.float64, device="cpu")
    at = torch.stack(torch.meshgrid(t, t, indexing="ij"), dim=-1)
    quadratic = losses(0.0, 0.0) + at @ slopes + 0.5 * torch.einsum("ija,ab,ijb->ij", at, curvatures, at)
    return LossPlane(t, values, quadratic, slopes, curvatures)


def _span(span: Any) -> tuple[float, float]:
    real = isinstance(span, tuple | list) and len(span) == 2 and all(isinstance(t, Real) for t in span)
    if not real or not (math.isfinite(span[0]) and math.isfinite(span[1]) and span[0] <= 0 <= span[1] and span[0] < span[1]):
        raise InputError(f"{WHO}: span={span}; expected two numbers, one on each side of 0".replace("\n", " "))
    return float(span[0]), float(span[1])


def loss_around(batches: Sequence[BatchLoss]) -> Callable[[Tensor], float]:
    """Return the function d (P,), float64 -> the loss at theta + d, by the module's own call."""
    first = batches[0]

    def loss(d: Tensor) -> float:
        displacement = {name: d[rows].reshape(first.parameters[name].shape) for name, rows in first.slices.items()}
        at = {name: (p.double() + displacement[name]).to(p.dtype) for name, p in first.parameters.items()}
        return math.fsum(batch.share * batch.own_value(at) for batch in batches)

    return loss


def _along(loss: Callable[[Tensor], float], D: Tensor) -> Callable[..., float]:
    """Return the function t_1, t_2, ... -> the loss at theta + sum_k t_k d_k, computed once for each t."""
    D = D.double()

    @cache
    def losses(*t: float) -> float:
        value = loss(D @ D.new_tensor(t))
        if not math.isfinite(value):
            raise InputError(f"{WHO}: the loss at t={', '.join(f'{x:.4g}' for x in t)} is {value}; pass a smaller span")
        return value

    return losses


def _model(
    losses: Callable[[float], float], slope: float, curvature: float, tolerance: float, rounding: float
) -> Callable[[float], bool]:
    """Return a function that says whether the quadratic model of a line holds at a step."""
    loss = losses(0.0)

    def holds(t: float) -> bool:
        value, linear, quadratic = losses(t), slope * t, 0.5 * curvature * t * t
        largest = abs(linear) + abs(quadratic)  # of |q(s) - L(theta)| for |s| <= |t|
        return abs(value - loss - (linear + quadratic)) <= tolerance * largest + rounding * max(abs(loss), abs(value))

    return holds


def _extent(holds: Callable[[float], bool], steps: list[float]) -> tuple[float, bool]:
    """Return the largest |t| up to which a model holds along steps of one sign, and whether it was seen not to hold beyond."""
    inside = 0.0
    for t in steps:
        if not holds(t):
            outside = t
            for _ in range(HALVINGS):
                middle = (inside + outside) / 2
                inside, outside = (middle, outside) if holds(middle) else (inside, middle)
            return abs(inside), True
        inside = t
    return abs(inside), False


def _directions(lines: Any, batch: BatchLoss, seed: int) -> tuple[list[str], Tensor, tuple[str, ...]]:
    """Return names, columns (P, k), and notes."""
    like = {"device": batch.device, "dtype": batch.dtype}
    if isinstance(lines, int) and not isinstance(lines, bool) and lines > 0:
        generator = torch.Generator().manual_seed(seed)
        D = torch.randn(lines, batch.size, generator=generator, dtype=torch.float64, device="cpu").T
        return [f"random direction {k + 1}" for k in range(lines)], D.to(**like), ()  # type: ignore[call-overload]
    if isinstance(lines, Spectrum):
        D = lines.directions
        if D.shape[0] != batch.size:
            raise InputError(
                f"{WHO}: the eigenvectors have {D.shape[0]} entries, the parameters {batch.size}; pass the same params"
            )
        return [f"eigenvalue {value:.4g}" for value in lines.eigenvalues.tolist()], D.to(**like), ()  # type: ignore[call-overload]
    checkpoints = [lines] if isinstance(lines, Mapping) else lines
    if isinstance(checkpoints, list | tuple) and checkpoints and all(isinstance(x, Mapping) for x in checkpoints):
        directions = [_to_checkpoint(checkpoint, batch) for checkpoint in checkpoints]
        names = [f"to checkpoint {k + 1}" for k in range(len(checkpoints))] if checkpoints is lines else ["to the checkpoint"]
        notes = tuple(dict.fromkeys(note for _, remarks in directions for note in remarks))
        return names, torch.stack([d for d, _ in directions], dim=1), notes
    is_plain = isinstance(lines, Tensor) and lines.layout == torch.strided and not lines.is_meta and lines.is_floating_point()
    if not is_plain or lines.ndim not in (1, 2) or lines.shape[0] != batch.size or not lines.numel():
        kind = f"{lines.dtype} of shape {tuple(lines.shape)}" if isinstance(lines, Tensor) else type(lines).__name__
        raise InputError(
            f"{WHO}: along is {kind}; expected a number of random directions, a vector ({batch.size},), columns ({batch.size}, "
            "k), a spectrum, or state dicts"
        )
    D = lines.detach().to(**like)  # type: ignore[call-overload]
    D = D.unsqueeze(1) if D.ndim == 1 else D
    return [f"direction {k + 1}" for k in range(D.shape[1])], D, ()


def _to_checkpoint(checkpoint: Mapping[str, Any], batch: BatchLoss) -> tuple[Tensor, tuple[str, ...]]:
    """Return theta_checkpoint - theta, (P,), and the names of other differences."""
    state, parts = dict(batch.module.state_dict()), []
    for name, x in checkpoint.items():
        if name not in state:
            raise InputError(f"{WHO}: the checkpoint's {name!r} {not_known(str(name), state)}")
        if not isinstance(x, Tensor) or x.shape != state[name].shape:
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"{WHO}: {name!r} of the checkpoint is {shape}, of the module {tuple(state[name].shape)}")
    for name, p in batch.parameters.items():
        if name not in checkpoint:
            raise InputError(f"{WHO}: the checkpoint has no {name!r}; pass a state_dict() of this module")
        parts.append((checkpoint[name].to(p.device, torch.float64) - p.double()).reshape(-1))
    differences = [n for n, x in checkpoint.items() if n not in batch.parameters and not torch.equal(x.to(state[n]), state[n])]
    notes = (f"not moved, though the checkpoint has other values: {', '.join(map(repr, differences))}",) if differences else ()
    return torch.cat(parts).to(batch.dtype), notes


def _normalised(D: Tensor, batch: BatchLoss, how: str) -> Tensor:
    if how == "none":
        return D
    if how == "unit":
        return D / D.norm(dim=0)
    D = D.clone()
    for name, p in batch.parameters.items():
        rows = batch.slices[name]
        if p.ndim < 2:
            D[rows] = 0.0
            continue
        filters = D[rows].reshape(p.shape[0], -1, D.shape[1])
        lengths = filters.norm(dim=1, keepdim=True)
        target_lengths = p.detach().reshape(p.shape[0], -1, 1).norm(dim=1, keepdim=True).to(D)
        factors = torch.where(lengths > 0, target_lengths / lengths, torch.zeros_like(lengths))
        D[rows] = (filters * factors).reshape(-1, D.shape[1])
    return D
