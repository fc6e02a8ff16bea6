"""``bounds``: the norms of a Hessian's blocks beside every valid bound. A bound is one function under ``@bound``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from derivations.bounds.block_norms import BlockNorms
from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.curvature.dense import Hessian, hessian, spectral_norm
from hessiankit.request.loss import read_loss
from hessiankit.request.read import read_request
from hessiankit.support.arguments import checked
from hessiankit.support.containers import check_dense, map_tensors, named_tensors
from hessiankit.support.errors import InputError
from hessiankit.support.tables import Piece, Printed, table
from hessiankit.support.torch_state import one_at_a_time
from hessiankit.theory.bounding.a_priori import a_priori, in_float64
from hessiankit.theory.bounding.certified import Certificate, certify
from hessiankit.theory.bounding.closed_forms import sharpened_a_priori, sharpened_structured
from hessiankit.theory.bounding.structured import structured

if TYPE_CHECKING:
    from hessiankit.curvature.plot_frame import Picture

CALLER = "bounds"
TOTAL = "whole"
PICTURE_ROWS = 30  # rows of a picture


@dataclass(frozen=True)
class LossAt:
    """The loss of a module at a point, in float64, for which bounds are computed."""

    module: nn.Module
    x: Any  # B x L x d, or a mapping of arguments
    t: Tensor  # of the output's shape, or labels
    loss: str  # "mse" or "cross_entropy"

    @cached_property
    def hessian(self) -> Hessian:
        """The exact Hessian."""
        return hessian(self.module, self.x, self.t, loss=self.loss)

    @cached_property
    def certificate(self) -> Certificate:
        """The norms of the Hessian and of its blocks, with intervals that hold despite rounding."""
        return certify(self.hessian.matrix, self.hessian.slices)

    @cached_property
    def noise(self) -> float:
        """The largest norm that rounding can give a zero block of the Hessian: P eps times the summed norms of its two parts."""
        H, outer = self.hessian.matrix, self.hessian.outer()
        parts = spectral_norm(outer, symmetric=True) + spectral_norm(H - outer, symmetric=True)
        return len(H) * torch.finfo(H.dtype).eps * parts


Norms: TypeAlias = "tuple[float, Mapping[tuple[str, str], float]]"
"""Bound on the whole Hessian, and bounds on blocks by their two parameters, in either order."""


class UndefinedBound(Exception):
    """A bound is not defined for a problem; the report shows the message, if any, as a note."""


@dataclass(frozen=True)
class Bound:
    """A bound that ``bounds`` reports; its description is the first line of its function.

    Attributes:
        name: The key in reports and JSON; with spaces for underscores the column's head.
        norms: (problem) -> the bounds.
        of_matrix: Whether it is a statement on the float64 matrix alone.
        caveat: Note for a reader of its numbers.
    """

    name: str
    norms: Callable[[LossAt], Norms]
    of_matrix: bool = False
    caveat: str = ""

    @property
    def title(self) -> str:
        """The name in words."""
        return self.name.replace("_", " ")

    def __str__(self) -> str:
        description, _, _ = (self.norms.__doc__ or "").partition("\n")
        return f"{self.title}: {description}"


BOUNDS: dict[str, Bound] = {}
"""Every bound by its name, in the order of a report's columns; ``bounds`` and ``hessiankit bounds`` read it."""


def bound(name: str, **options: Any) -> Callable[[Callable[[LossAt], Norms]], Callable[[LossAt], Norms]]:
    """Register a function as the bound of this name; the options are the attributes of ``Bound``."""

    def register(norms: Callable[[LossAt], Norms]) -> Callable[[LossAt], Norms]:
        BOUNDS[name] = Bound(name, norms, **options)
        return norms

    return register


@bound("certified", of_matrix=True)
def from_matrix(at: LossAt) -> Norms:
    """From the float64 matrix, with an outward error for rounding."""
    certificate = at.certificate
    return certificate.whole.upper, {pair: interval.upper for pair, interval in certificate.pairs.items()}


@bound("structured")
def from_values(at: LossAt) -> Norms:
    """From the intermediate values, each site of curvature kept with its sign."""
    sharp = structured(read_request(at.module, at.x, at.t, loss=at.loss).only())
    sharp = sharpened_structured(at.module, at.x, at.t, sharp) if at.loss == "mse" else sharp
    return sharp.whole, sharp.pairs


@bound("a_priori")
def from_norms(at: LossAt) -> Norms:
    """From norms of the input, the weights and the target, the smallest row scales and the sizes."""
    if not isinstance(at.module, TransformerBlock | Attention):
        name = type(at.module).__name__
        raise UndefinedBound(f"a_priori: not defined for {name}, whose parts have no rules; pass a TransformerBlock")
    priors = [a_priori(at.module, x, t, loss=at.loss) for x, t in zip(at.x, at.t, strict=True)]
    counts = [read_loss(at.loss).count(t) or 0.0 for t in at.t]
    shares = [count / sum(counts) for count in counts]  # the Hessian of a mean is the mean of the Hessians
    norms = torch.stack([share * one.matrix for share, one in zip(shares, priors, strict=True)]).sum(0)
    prior = BlockNorms(priors[0].names, norms)
    prior = sharpened_a_priori(at.module, at.x, at.t, prior) if at.loss == "mse" else prior
    return prior.whole, {(i, j): prior.block(i, j) for i in prior.names for j in prior.names}


@dataclass(frozen=True, repr=False)
class BoundsReport(Printed):
    """The spectral norms of a Hessian and of its blocks, and the bounds on them.

    Attributes:
        values: "whole" or "i x j" -> kind -> value. The kinds: "true" (of the float64 matrix), "lower" (certified from below),
            and the names of the bounds.
        names: The parameters.
        notes: Caveats of the bounds, and why a bound is not defined here.
        noise: Norm that rounding in float64 can give a zero block; norms up to it print as 0 to rounding.
    """

    values: Mapping[str, Mapping[str, float]]
    names: tuple[str, ...]
    notes: tuple[str, ...]
    noise: float = 0.0

    @property
    def violated(self) -> tuple[tuple[str, str, float], ...]:
        """(block, kind, true / bound) of every bound that the true norm exceeds."""
        return tuple(
            (name, kind, row["true"] / limit if limit else math.inf)
            for name, row in self.values.items()
            for kind, limit in row.items()
            if kind not in ("true", "lower") and self._exceeds(row["true"], limit)
        )

    def _exceeds(self, true: float, bound: float) -> bool:
        return true > bound * (1 + 1e-9) + self.noise

    def ratio(self, kind: str, name: str = TOTAL) -> float:
        """Return bound / true norm, the slack of a bound."""
        row = self.values[name]
        return row[kind] / row["true"] if row["true"] else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data: "whole", and "pairs" by "i x j"."""
        pairs = {name: dict(row) for name, row in self.values.items() if name != TOTAL}
        return {
            "whole": dict(self.values[TOTAL]),
            "pairs": pairs,
            "names": list(self.names),
            "violated": [list(row) for row in self.violated],
            "notes": list(self.notes),
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of bounds that this report has."""
        return tuple(kind for kind in self.values[TOTAL] if kind not in ("true", "lower"))

    def plot(self, path: Path | str | None = None) -> Picture:
        """Draw bound / norm, the slack, of every kind of bound: of the whole, of violated blocks and of those of largest norm.

        A line marks 1, which no valid bound lies below. Blocks that are 0 to rounding have no slack. The picture is written to
        ``path``, as ``.png``, ``.svg`` or ``.pdf``, or the numbers, as ``.csv``; an InputError says why it cannot be.
        """
        from hessiankit.curvature.plots import pair_labels, row_chart  # only here: Matplotlib

        ranks = self._ranks()
        blocks = sorted((name for name in ranks if self.values[name]["true"] > self.noise), key=ranks.__getitem__, reverse=True)
        rows = blocks[:PICTURE_ROWS]
        slack = {kind.replace("_", " "): [self._slack(kind, name) for name in rows] for kind in self.kinds}
        title = "Bounds on spectral norms" + ("" if rows == blocks else f"; {len(rows) - 1} of {len(blocks) - 1} blocks")
        labels = pair_labels(rows, self.names)
        return row_chart("BoundsReport.plot", labels, slack, axis="bound / norm", title=title, path=path, line=(1.0, "the norm"))

    def _slack(self, kind: str, name: str) -> float:
        return self.ratio(kind, name) if kind in self.values[name] else math.nan

    def _ranks(self) -> dict[str, float]:
        """The norm of each block, with the whole and those that exceed a bound first."""
        exceeded = {name for name, _, _ in self.violated}
        return {n: math.inf if n == TOTAL or n in exceeded else row["true"] for n, row in self.values.items()}

    def _cell(self, row: Mapping[str, float], kind: str) -> str:
        true, limit = row["true"], row.get(kind)
        if limit is None:
            return ""
        if self._exceeds(true, limit):
            return f"{limit:.3g} VIOLATED"
        return f"{limit:.3g} ({limit / true:.3g} x)" if true > self.noise else f"{limit:.3g}"

    def _headline(self) -> str:
        totals = self.values[TOTAL]
        limits = ", ".join(f"{kind.replace('_', ' ')} {totals[kind]:.4g}" for kind in self.kinds)
        return f"Spectral norms and their bounds (and bound / norm); whole: norm {totals['true']:.4g}, {limits}"

    def _parts(self) -> Iterator[Piece]:
        kinds = {kind for _, kind, _ in self.violated}
        titles = {kind: kind.replace("_", " ") for kind in self.kinds}
        cells = {name: [self._cell(row, kind) for kind in titles] for name, row in self.values.items()}
        norms = {n: f"{row['true']:.4g}" if row["true"] > self.noise else "0 to rounding" for n, row in self.values.items()}
        rows = [(name, norms[name], *cells[name]) for name in self.values]
        drop = [title for kind, title in reversed(titles.items()) if kind not in kinds]
        rank, ranked = [*self._ranks().values()], "the whole, violated and largest norms"
        yield self._headline()
        yield table(("block", "norm", *titles.values()), rows, names=self.names, drop=drop, rank=rank, ranked=ranked)
        yield from self.notes


@checked("bounds")
@one_at_a_time
def bounds(block: nn.Module, inputs: Any, target: Tensor | None = None, *, loss: str = "mse") -> BoundsReport:
    r"""Return the spectral norms of a block's loss Hessian beside every bound that is registered in ``BOUNDS``.

    *certified*: from the matrix, with an outward error for rounding. *structured*: from the intermediate values, each site of
    curvature kept with its sign. *a_priori*: from norms of the input, the weights and the target, the smallest row scales
    and the sizes.

    Norms and bounds are computed in float64 in every dtype. The numbers of a module in float32, float16 or bfloat16, of its
    inputs and of its target are numbers of float64, so the report is on the exact function of these numbers, and its promise
    is the same: a norm that exceeds a valid bound by more than 1e-9 of it plus the report's ``noise`` is an error. What
    :func:`hessiankit.hessian` returns in float32 differs from that Hessian by its own rounding, about 1e-6 of its norm.

    Args:
        block: A ``TransformerBlock`` of any placement or an ``Attention``; for other modules the a-priori bound is left out.
        inputs: ``(L, d_model)`` or ``(B, L, d_model)``, floating point; or, of a block of a library, a mapping of its keyword
            arguments that begins with them.
        target: Target of the output's shape, or labels.
        loss: ``"mse"`` or ``"cross_entropy"``.

    Raises:
        InputError: If inputs and target do not fit, or are not finite.

    >>> import hessiankit as hk
    >>> block = hk.TransformerBlock(4, 5, placement="pre").double()
    >>> x = torch.randn(3, 4, dtype=torch.float64)
    >>> report = hk.bounds(block, x, torch.zeros_like(x))
    >>> report.ratio("certified") < 1 + 1e-6 < report.ratio("structured") < report.ratio("a_priori")
    True
    """
    return report(loss_at(block, inputs, target, loss), BOUNDS)


def report(at: LossAt, limits: Mapping[str, Bound]) -> BoundsReport:
    """Return the norms of a loss's Hessian and of its blocks beside these bounds, by name in the order of the columns."""
    norms, lower = at.certificate.norms, {pair: interval.lower for pair, interval in at.certificate.pairs.items()}
    values = {TOTAL: {"true": at.certificate.norm, "lower": at.certificate.whole.lower}}
    values |= {f"{i} x {j}": {"true": norms[i, j], "lower": lower[i, j]} for i, j in at.hessian.pairs()}
    notes: list[str] = []
    for name, one in limits.items():
        try:
            total, pairs = one.norms(at)
        except UndefinedBound as reason:
            notes.append(str(reason))
            continue
        values[TOTAL][name] = total
        for i, j in at.hessian.pairs():
            limit = pairs.get((i, j), pairs.get((j, i)))
            values[f"{i} x {j}"] |= {} if limit is None else {name: limit}
        notes.append(f"{one.title}: {one.caveat}" if one.caveat else "")
    return BoundsReport(values, at.hessian.names, tuple(dict.fromkeys(filter(None, notes))), at.noise)


def loss_at(module: nn.Module, inputs: Any, target: Tensor | None, loss: str) -> LossAt:
    """Return a loss in float64; arguments and errors are those of ``bounds``.

    The module is first called as it is, so that what its own call refuses is refused.
    """
    has_keywords = isinstance(inputs, Mapping) and not isinstance(module, TransformerBlock | Attention)
    states = next(iter(inputs.values()), None) if isinstance(inputs, Mapping) else inputs
    if not (isinstance(inputs, Tensor) or has_keywords) or not _are_states(states):
        got = f"{states.dtype} {tuple(states.shape)}" if isinstance(states, Tensor) else type(inputs).__name__
        raise InputError(
            f"bounds: inputs are {got}; expected the hidden states of one block, floating point (L, d_model) or (B, L, d_model): "
            "of a language model pass a block, such as model.model.layers[3], with what it is called with"
        )
    if target is None:
        raise InputError("bounds: target is None; pass a target of the output's shape, or labels")
    if loss not in ("mse", "cross_entropy"):
        raise InputError(f"bounds: loss={loss!r} has no bounds; pass 'mse' or 'cross_entropy'")
    for name, tensor in (*named_tensors(inputs), ("target", target)):
        check_dense(CALLER, name, tensor)
    x, t = (inputs.unsqueeze(0), target.unsqueeze(0)) if isinstance(inputs, Tensor) and inputs.ndim == 2 else (inputs, target)
    read_request(module, x, t, loss=loss, handshake=False).only()
    x, t = (map_tensors(lambda y: y.double() if y.is_floating_point() else y, part) for part in (x, t))
    return LossAt(in_float64(module), x, t, loss)


def _are_states(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim in (2, 3)
