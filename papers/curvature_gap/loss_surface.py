r"""How much one more sample changes the loss surface: Theorem 7 of Closing the Curvature Gap, repaired.

With L_k the mean of the losses l_1 ... l_k, D = w - w*, and every Hessian on the segment from w* to w at most M,

    (k + 1) |L_{k+1}(w) - L_k(w)|  =  |l_{k+1}(w) - L_k(w)|
        <=  |l_{k+1}(w*) - L_k(w*)|  +  ||grad l_{k+1}(w*) - grad L_k(w*)|| ||D||  +  M ||D||^2 .

The print (Eq. 10) takes M at w* alone, which a Taylor series cut short does not allow (claims 38-40: it is violated at a global
minimum, without limit), drops the gradient term, which is zero only under its Assumption 1, and has 2 L for the first
term. Here M comes from the a-priori bounds with the weights' norms inflated by ||D||, so the inequality holds; the rate
1/(k + 1) is an identity, whatever the curvature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.request.read import read_request
from hessiankit.support.errors import InputError
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.theory.bounding.a_priori import a_priori, in_float64
from papers.curvature_gap.attention_printed import theorem_7_corrected

WHO = "loss_surface_bound"


@dataclass(frozen=True)
class SurfaceStep(WithDict):
    """One more sample: k -> k + 1. Every number but ``change`` is before the division by k + 1.

    Attributes:
        k: samples before.
        change: |L_{k+1}(w) - L_k(w)|, measured.
        loss_term: |l_{k+1}(w*) - L_k(w*)|.
        gradient_term: ||grad l_{k+1}(w*) - grad L_k(w*)|| ||D||; zero under the paper's Assumption 1.
        curvature_term: M ||D||^2.
    """

    k: int
    change: float
    loss_term: float
    gradient_term: float
    curvature_term: float

    _derived = ("bound", "ratio")

    @property
    def bound(self) -> float:
        """The right-hand side."""
        return theorem_7_corrected(self.k, self.loss_term, self.curvature_term, 1.0, gradient_difference=self.gradient_term)

    @property
    def ratio(self) -> float:
        """change / bound, at most 1."""
        return self.change / self.bound if self.bound else 0.0


@dataclass(frozen=True, repr=False)
class SurfaceReport(Printed, WithDict):
    """The steps of a growing data set between two points.

    Attributes:
        steps: one for each added sample.
        distance: ||w - w*||.
        curvature: M, the largest a-priori bound of a sample's Hessian on the segment.
        gradient_norm: the largest norm of a sample's gradient at w*: the paper's Assumption 1 has it at 0.
    """

    steps: tuple[SurfaceStep, ...]
    distance: float
    curvature: float
    gradient_norm: float

    def __bool__(self) -> bool:
        return all(step.ratio <= 1 + 1e-9 for step in self.steps)

    def _headline(self) -> str:
        holds = "holds" if self else "VIOLATED"
        where = f"||w - w*|| = {self.distance:.3g}, gradients at w* up to {self.gradient_norm:.2g}"
        return f"|L_(k+1)(w) - L_k(w)| at {where}: {holds}"

    def _parts(self) -> Iterator[Piece]:
        headers = ("k", "change", "loss term", "gradient term", "curvature term", "bound", "ratio")
        rows = []
        for s in self.steps:
            terms = (term / (s.k + 1) for term in (s.loss_term, s.gradient_term, s.curvature_term))
            rows.append((str(s.k), *(f"{value:.3g}" for value in (s.change, *terms, s.bound)), f"{s.ratio:.2g}"))
        yield self._headline()
        yield table(
            headers, rows, drop=("gradient term", "loss term"), rank=[s.ratio for s in self.steps], ranked="largest ratio"
        )


def loss_surface_bound(
    block: TransformerBlock | Attention, inputs: Tensor, targets: Tensor, point: Mapping[str, Tensor], *, loss: str = "mse"
) -> SurfaceReport:
    """Return the repaired Theorem 7 for a data set that grows sample by sample.

    Args:
        block: At w*, the point where the losses are compared; smooth activations (across a kink of relu no bound on second
            derivatives bounds the change of a first one). All is computed in float64, whatever its dtype.
        inputs: The samples, ``(n, L, d_model)``.
        targets: ``(n, L, d_model)``, or labels ``(n, L)``.
        point: w: every parameter by its name; those left out stay at w*.
        loss: ``"mse"`` or ``"cross_entropy"``.

    Raises:
        InputError: If an activation has a kink, fewer than two samples are given, or a name is unknown.
    """
    activation = "" if isinstance(block, Attention) else block.feedforward.activation
    if activation in ("relu", "leaky_relu"):
        raise InputError(f"{WHO}: {activation} has kinks, across which gradients jump; use a smooth activation")
    if inputs.ndim != 3 or inputs.shape[0] < 2 or len(inputs) != len(targets):
        seen = f"inputs {tuple(inputs.shape)} and {len(targets)} targets"
        raise InputError(f"{WHO}: {seen}; expected (n, L, d_model) with n at least 2, and as many targets")
    block, inputs = in_float64(block), inputs.double()
    targets = targets.double() if targets.is_floating_point() else targets
    star = {name: p.detach() for name, p in block.named_parameters()}
    unknown = set(point) - set(star)
    if unknown:
        raise InputError(f"{WHO}: the block has no parameter {sorted(unknown)[0]!r}; it has {', '.join(star)}")
    other = {name: point.get(name, p).detach().double() for name, p in star.items()}
    radius = {name: float((other[name] - star[name]).norm()) for name in star}
    distance = math.hypot(*radius.values())
    here, there, gradients, curvature = [], [], [], 0.0
    for x, t in zip(inputs, targets, strict=True):
        batch = read_request(block, x.unsqueeze(0), t.unsqueeze(0), loss=loss).only()
        own = batch.own_gradient(star)
        slopes = {name: torch.zeros_like(p) if (g := own.gradient[name]) is None else g for name, p in star.items()}
        gradients.append(torch.cat([g.reshape(-1) for g in slopes.values()]))
        here.append(own.loss)
        there.append(batch.own_value(other))
        curvature = max(curvature, a_priori(block, x, t, loss=loss, radius=radius).whole)
    steps = []
    for k in range(1, len(here)):
        mean = torch.stack(gradients[:k]).mean(0)
        steps.append(
            SurfaceStep(
                k,
                abs(fmean(there[: k + 1]) - fmean(there[:k])),
                abs(here[k] - fmean(here[:k])),
                float((gradients[k] - mean).norm()) * distance,
                curvature * distance**2,
            )
        )
    return SurfaceReport(tuple(steps), distance, curvature, max(float(g.norm()) for g in gradients))
