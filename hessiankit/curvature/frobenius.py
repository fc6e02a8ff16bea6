"""The exact Frobenius norms of the Hessian and of its blocks, by panels of rows where the matrix does not fit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hessiankit.curvature.evaluation import Evaluation, automatic
from hessiankit.curvature.operator import check_fallbacks
from hessiankit.curvature.planning import PANEL, check_workspace, make_plan
from hessiankit.engine.diagnosis import not_finite, without_effect
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.fisher import NAMES
from hessiankit.request.handshake import UNCOMPARED
from hessiankit.request.read import read_request
from hessiankit.request.selection import locate
from hessiankit.request.signature import CurvatureArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, OutOfMemoryError, check_count
from hessiankit.support.memory import available_memory
from hessiankit.support.tables import Piece, Printed, sizes, table
from hessiankit.support.torch_state import one_at_a_time

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "frobenius_norms"
SHARE = 4  # times the matrix that has to be free for all of it to be made at once
SLAB = 2**20  # entries whose squares are added at once, in float64


@dataclass(frozen=True, repr=False)
class FrobeniusNorms(Printed):
    """Frobenius norms of the blocks of a Hessian, or of its Gauss-Newton part; made by :func:`frobenius_norms`.

    ``kind``, ``loss``, ``fallbacks`` and ``handshake`` are as in :class:`hessiankit.HessianOperator`.

    Attributes:
        blocks: By names (i, j), i not after j in the order of ``shapes``: ||H_ij||_F, which is ||H_ji||_F too.
        shapes: Shape of each parameter.
        seconds: Time taken.
    """

    blocks: dict[tuple[str, str], float]
    shapes: dict[str, tuple[int, ...]]
    kind: str
    loss: float
    fallbacks: tuple[str, ...]
    seconds: float
    handshake: bool = True

    @property
    def whole(self) -> float:
        """The norm of the whole matrix: the blocks with i before j count twice."""
        return math.hypot(*(x for (i, j), x in self.blocks.items() for _ in range(1 if i == j else 2)))

    def block(self, name_i: str, name_j: str) -> float:
        """Return the norm of the block of two parameters, in either order.

        Raises:
            InputError: There is no such parameter, or the name has an index.
        """
        names = []
        for name in (name_i, name_j):
            whole, rows = locate("FrobeniusNorms.block", name, self.shapes)
            if rows is not None:
                raise InputError(
                    f"FrobeniusNorms.block: {name!r} is a part of a parameter, but the norms are of whole ones; pass "
                    f"{whole!r}, or take hessian(..., lazy=True).frobenius_norm"
                )
            names.append(whole)
        i, j = names
        return self.blocks[i, j] if (i, j) in self.blocks else self.blocks[j, i]

    def rows(self, name: str) -> float:
        """Return the norm of all rows of a parameter, that is of its blocks with all parameters together."""
        return math.hypot(*(self.block(name, other) for other in self.shapes))

    @property
    def matrix(self) -> Tensor:
        """The norms as a symmetric matrix, one row and column a parameter, in float64."""
        return torch.tensor([[self.block(i, j) for j in self.shapes] for i in self.shapes], dtype=torch.float64, device="cpu")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python numbers."""
        return {
            "parameters": self._size,
            "kind": self.kind,
            "loss": self.loss,
            "frobenius_norm": self.whole,
            "fallbacks": list(self.fallbacks),
            "seconds": self.seconds,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "blocks": [{"row": i, "column": j, "frobenius_norm": x} for (i, j), x in self.blocks.items()],
        }

    @property
    def _size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for i, shape in self.shapes.items():
            others = [j for j in self.shapes if j != i]
            largest = max(others, key=lambda j: self.block(i, j), default=None)
            last = ("", "") if largest is None else (largest, f"{self.block(i, largest):.4g}")
            yield i, sizes(shape), f"{self.block(i, i):.4g}", f"{self.rows(i):.4g}", *last

    def _headline(self) -> str:
        of = f"the {NAMES[self.kind]}"
        title = f"Frobenius norm of {of}, {self._size:,} x {self._size:,}: {self.whole:.6g}; loss {self.loss:.6g}, "
        return f"{title}{self.seconds:.2f} s{automatic(self.fallbacks)}" + ("" if self.handshake else UNCOMPARED)

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield table(_HEADERS, self._rows(), left=2, names=self.shapes, drop=("shape", "all its rows"))


_HEADERS = ("parameter i", "shape", "||H_ii||_F", "all its rows", "largest with", "||H_ij||_F")


@checked("frobenius_norms")
@one_at_a_time
@asks(CurvatureArguments)
def frobenius_norms(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    batch_size: int | None = None,
    panel_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **asked: Unpack[CurvatureArguments],
) -> FrobeniusNorms:
    """Return the exact Frobenius norm of every block of the Hessian of ``loss(module(inputs), target)``, and of all of it.

    The matrix is computed by the closed forms of :func:`hessiankit.hessian`: its upper half at once where four times the matrix
    is free and the derivatives fit beside it, else some rows at a time, all those of a parameter together, dropped before the
    next are computed. The squares of the entries are added up in float64.

    By panels, memory is one panel of rows (see ``panel_bytes``) and the derivatives of one chunk of samples. Panels take up to
    half of the free memory, because each traces every chunk anew. The module is not changed, so Ctrl-C is safe at any time.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two.
        inputs: What it is called with.
        target: What the loss compares with.
        **asked: Arguments of :class:`~hessiankit.request.signature.CurvatureArguments`.
        batch_size: Samples treated at once; chosen by available work space by default.
        panel_bytes: Bytes of a panel of rows; None: the matrix at once, or 256 MiB and more, as above. A block of
            two parameters, m n numbers, is held in one piece, even where it takes more than that.
        progress: Called with (samples done, in all), each sample counted once for each panel.

    Raises:
        InputError: If an argument cannot be used, or if an entry of the Hessian is not finite.
        TraceError: If torch cannot trace the module.
        OutOfMemoryError: If a panel and the derivatives of one chunk of samples do not fit, before they are computed.

    The Hessian of a linear layer under squared error is 2/(L d_out) X^T X (x) I; here [[2, 2], [2, 4]] for the weight,
    [2] for the bias and [2, 2] between them:

    >>> layer = nn.Linear(2, 1, dtype=torch.float64)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 2.0]], dtype=torch.float64)
    >>> found = frobenius_norms(layer, x, torch.zeros(2, 1, dtype=torch.float64))
    >>> [round(x**2, 12) for x in (found.block("weight", "weight"), found.block("bias", "weight"), found.whole)]
    [28.0, 8.0, 48.0]
    """
    start = time.perf_counter()
    if panel_bytes is not None and panel_bytes < 1:
        raise InputError(f"{WHO}: panel_bytes={panel_bytes} holds no entry; pass 1 or more, or None")
    check_count("batch_size", batch_size, "sample")
    request = read_request(module, inputs, target, **asked)
    batches, kind = request.together(), request.curvature.kind
    evaluation, outer = Evaluation(batches, batch_size, progress), kind != "hessian"
    with torch.no_grad():
        found = _at_once(evaluation, outer=outer) if panel_bytes is None else None
        norms, value, fallbacks = found or _by_panels(evaluation, panel_bytes, outer=outer)
    shapes = batches[0].shapes
    if not any(norms.values()) and not any(batch.reached() for batch in batches):
        raise without_effect(WHO, shapes)
    if fallbacks and found is None:
        check_fallbacks(batches, kind)
    blocks = {(i, j): norms[i, j] for i in shapes for j in shapes if (i, j) in norms}
    return FrobeniusNorms(blocks, shapes, kind, value, fallbacks, time.perf_counter() - start, request.handshake)


Found: TypeAlias = tuple[dict[tuple[str, str], float], float, tuple[str, ...]]
"""Norms of the blocks, the loss and the fallbacks."""


def _at_once(evaluation: Evaluation, *, outer: bool) -> Found | None:
    """Return what the whole matrix gives; None where it leaves too little memory."""
    first = evaluation.batches[0]
    if SHARE * first.size**2 * first.dtype.itemsize > available_memory(first.device):
        return None
    every = range(len(first.parameters))
    try:
        matrix, value, fallbacks = evaluation.panel([(every, every)], 0, outer=outer, look=evaluation.look(first))
    except OutOfMemoryError:  # said before the derivatives are made; one panel leaves them more room
        return None
    norms = _norms(matrix, evaluation.batches)
    if fallbacks:
        evaluation.check_symmetric(matrix, matrix.mirror(), value, fallbacks, outer=outer)
    return norms, value, fallbacks


def _by_panels(evaluation: Evaluation, limit: int | None, *, outer: bool) -> Found:
    """Return what panels of ``limit`` bytes give, or of None few and large ones, of which one is kept at a time."""
    batches, first = evaluation.batches, evaluation.batches[0]
    plan = make_plan(batches, evaluation.batch_size, limit or PANEL)
    if limit is None and len(plan.panels) > 1:
        plan = replace(plan, limit=max(PANEL, (available_memory(first.device) - plan.workspace) // 2))
    check_workspace(plan.workspace, plan.largest, first.device)
    norms: dict[tuple[str, str], float] = {}
    for n in range(len(plan.panels)):
        panel, value, fallbacks = evaluation.panel(plan.panels, n, outer=outer)
        norms |= _norms(panel, batches)
        del panel  # before the next one comes
    return norms, value, fallbacks


def _norms(panel: SymmetricStorage, batches: Sequence[BatchLoss]) -> dict[tuple[str, str], float]:
    """Return the norms of the blocks of a panel, all of which have to be finite."""
    names = list(panel.order)
    norms = {(names[i], names[j]): _norm(panel.block(names[i], names[j])) for i in panel.rows for j in panel.columns if i <= j}
    for pair, norm in norms.items():
        if not math.isfinite(norm):
            raise not_finite(WHO, *pair, batches)
    return norms


def _norm(block: Tensor) -> float:
    """Return the Frobenius norm, by some rows at a time: in float64, which would double a float32 block taken at once.

    >>> _norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    5.0
    """
    step = max(1, SLAB // max(block.shape[1], 1))
    return math.hypot(*(float(torch.linalg.vector_norm(rows, dtype=torch.float64)) for rows in block.split(step)))
