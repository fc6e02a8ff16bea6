"""``bounds``: the norms of a Hessian's blocks beside what each bound says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.bounding.a_priori import NormTable, a_priori
from hessiankit.bounding.certified import certify
from hessiankit.bounding.curvature_gap import printed, sharpened
from hessiankit.bounding.structured import structured
from hessiankit.curvature.dense import hessian, spectral_norm
from hessiankit.engine.problem.own_call import make_task
from hessiankit.engine.problem.validation import check_dense
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.tables import Piece, Printed, table

WHO = "bounds"
WHOLE = "whole"
NOISE = 1e-13


@dataclass(frozen=True, repr=False)
class BoundsReport(Printed):
    """The spectral norms of a Hessian and of its blocks, and the bounds on them.

    Attributes:
        values: "whole" or "i x j" -> kind -> value. The kinds: "true" (of the float64 matrix), "lower" (certified from below),
            "certified" (from above, rounding included), "structured", "a_priori", and those that begin with "printed", which
            are the papers' bounds as printed and are no bounds where ``violated`` says so.
        names: The parameters.
        notes: Which assumption of a printed bound fails, or why a bound is not defined here.
        noise: What the rounding of float64 can leave of a block that vanishes, from the size of the Gauss-Newton part.
    """

    values: Mapping[str, Mapping[str, float]]
    names: tuple[str, ...]
    notes: tuple[str, ...]
    noise: float = 0.0

    @property
    def violated(self) -> tuple[tuple[str, str, float], ...]:
        """(block, kind, true / bound) of every bound that the true norm exceeds."""
        found = []
        for name, row in self.values.items():
            for kind, bound in row.items():
                if kind not in ("true", "lower") and self._exceeds(row["true"], bound):
                    found.append((name, kind, row["true"] / bound if bound else float("inf")))
        return tuple(found)

    def _exceeds(self, true: float, bound: float) -> bool:
        return true > bound * (1 + 1e-9) + self.noise

    def ratio(self, kind: str, name: str = WHOLE) -> float:
        """Return bound / true norm, the slack of a bound."""
        row = self.values[name]
        return row[kind] / row["true"] if row["true"] else float("inf")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data: "whole", and "pairs" by "i x j"."""
        pairs = {name: dict(row) for name, row in self.values.items() if name != WHOLE}
        return {
            "whole": dict(self.values[WHOLE]),
            "pairs": pairs,
            "names": list(self.names),
            "violated": [list(row) for row in self.violated],
            "notes": list(self.notes),
        }

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of bounds that this report has."""
        return tuple(kind for kind in self.values[WHOLE] if kind not in ("true", "lower"))

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, row in self.values.items():
            cells = []
            for kind in self.kinds:
                bound = row.get(kind)
                if bound is None:
                    cells.append("")
                elif self._exceeds(row["true"], bound):
                    cells.append(f"{bound:.3g} VIOLATED")
                else:
                    cells.append(f"{bound:.3g} ({bound / row['true']:.3g} x)" if row["true"] else f"{bound:.3g}")
            yield (name, f"{row['true']:.4g}", *cells)

    @property
    def _headers(self) -> tuple[str, ...]:
        return ("block", "norm", *(kind.replace("_", " ") for kind in self.kinds))

    def _headline(self) -> str:
        whole = self.values[WHOLE]
        limits = ", ".join(f"{kind.replace('_', ' ')} {whole[kind]:.4g}" for kind in self.kinds)
        return f"Spectral norms and their bounds (and bound / norm); whole: norm {whole['true']:.4g}, {limits}"

    def _parts(self) -> Iterator[Piece]:
        exceeded, kinds = {name for name, _, _ in self.violated}, {kind for _, kind, _ in self.violated}
        rank = [math.inf if name == WHOLE or name in exceeded else row["true"] for name, row in self.values.items()]
        drop = [kind.replace("_", " ") for kind in reversed(self.kinds) if kind not in kinds]
        ranked = "the whole, violated and largest norms"
        yield self._headline()
        yield table(self._headers, self._rows(), names=self.names, drop=drop, rank=rank, ranked=ranked)
        yield from self.notes


@checked("bounds")
def bounds(block: nn.Module, inputs: Tensor, target: Tensor, *, loss: str = "mse") -> BoundsReport:
    r"""Return the spectral norms of a block's loss Hessian with every bound that is known for it.

    *certified*: from the matrix, with an outward error for rounding. *structured*: from the intermediate values, each site of
    curvature kept with its sign. *a_priori*: from norms of the input, the weights and the target, the smallest row scales
    and the sizes. *printed*: the bounds of Closing the Curvature Gap as they stand in print, where they are defined.

    Args:
        block: A ``TransformerBlock`` of any placement or an ``Attention``; for other modules the a-priori bound is left out.
        inputs: ``(L, d_model)`` or ``(B, L, d_model)``, floating point.
        target: Of the output's shape, or labels.
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
    x, t = _batched(inputs, target, loss)
    found = hessian(block, x, t, loss=loss)
    H = found.matrix.double()
    certificate = certify(H, found.slices)
    task = make_task(WHO, block, x, t, loss)
    own = structured(task)
    notes: list[str] = []
    tables: dict[str, NormTable] = {}
    if isinstance(block, TransformerBlock | Attention):
        prior, own = sharpened(block, x, t, loss, _over_samples(block, x, t, loss), own)
        tables["a_priori"] = prior
    else:
        notes.append(f"a_priori: not defined for {type(block).__name__}, whose parts have no rules; pass a TransformerBlock")
    values: dict[str, dict[str, float]] = {WHOLE: {"true": certificate.norm, "lower": certificate.whole.lower}}
    values[WHOLE] |= {"certified": certificate.whole.upper, "structured": own.whole}
    values[WHOLE] |= {kind: table.whole for kind, table in tables.items()}
    for i, j in found.pairs():
        row = {"true": certificate.norms[i, j]}
        row |= {"lower": certificate.pairs[i, j].lower, "certified": certificate.pairs[i, j].upper}
        row |= {"structured": own.pairs[i, j], **{kind: table[i, j] for kind, table in tables.items()}}
        values[f"{i} x {j}"] = row
    for name, row in printed(block, x, t, loss, notes).items():
        if name in values:
            values[name] |= row
    noise = NOISE * spectral_norm(found.outer(), symmetric=True)
    return BoundsReport(values, found.names, tuple(notes), noise)


def _over_samples(block: TransformerBlock | Attention, x: Tensor, t: Tensor, loss: str) -> NormTable:
    """Return the mean of the samples' tables: the Hessian of a mean is the mean of the Hessians."""
    each = [a_priori(block, x[b], t[b], loss=loss) for b in range(x.shape[0])]
    norms = torch.stack([one.norms for one in each]).mean(0)
    return NormTable(each[0].names, norms, sum(one.lipschitz for one in each) / len(each))


def _batched(inputs: Tensor, target: Tensor, loss: str) -> tuple[Tensor, Tensor]:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim not in (2, 3):
        got = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(f"bounds: inputs are {got}; expected floating point (L, d_model) or (B, L, d_model)")
    if loss not in ("mse", "cross_entropy"):
        raise InputError(f"bounds: loss={loss!r} has no bounds; pass 'mse' or 'cross_entropy'")
    for name, x in (("inputs", inputs), ("target", target)):
        check_dense(WHO, name, x)
        if x.is_meta:
            raise InputError(f"{WHO}: {name} is on the meta device, which holds no values; load the data first")
    if not bool(torch.isfinite(inputs).all()) or (target.is_floating_point() and not bool(torch.isfinite(target).all())):
        raise InputError("bounds: inputs or target hold NaN or infinite entries")
    return (inputs.unsqueeze(0), target.unsqueeze(0)) if inputs.ndim == 2 else (inputs, target)
