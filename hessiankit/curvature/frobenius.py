"""The exact Frobenius norms of the Hessian and of its blocks by any partition, by panels of rows if it does not fit."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hessiankit.curvature.evaluation import Evaluation, automatic
from hessiankit.curvature.operator import HessianOperator, check_fallbacks
from hessiankit.curvature.planning import PANEL, check_workspace, make_plan
from hessiankit.curvature.suboperators import Partition, groups_of, labels
from hessiankit.engine.diagnosis import not_finite, without_effect
from hessiankit.engine.storage import SymmetricStorage
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.fisher import NAMES
from hessiankit.request.handshake import UNCOMPARED
from hessiankit.request.read import read_request
from hessiankit.request.selection import locate
from hessiankit.request.signature import CurvatureArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, OutOfMemoryError, check_count, check_name
from hessiankit.support.files import check_writable, write_bytes
from hessiankit.support.memory import available_memory
from hessiankit.support.tables import Piece, Printed, sizes, table
from hessiankit.support.torch_state import one_at_a_time, wide

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "frobenius_norms"
SHARE = 4  # times the matrix that has to be free for all of it to be made at once
SLAB = 2**17  # entries whose squares are added at once: in float64 1 MiB, which stays in a core's cache
LISTED = 100  # groups that a table lists: more than fit on a few screens help nobody


@dataclass(frozen=True, repr=False, eq=False)
class FrobeniusNorms(Printed):
    """Frobenius norms of the blocks of a Hessian, or of its Gauss-Newton part; made by :func:`frobenius_norms`.

    ``kind``, ``loss``, ``fallbacks`` and ``handshake`` are as in :class:`hessiankit.HessianOperator`.

    Attributes:
        matrix: Norms ||H_gh||_F of the blocks of all pairs of groups, symmetric, in float64.
        groups: Number of entries of each group, by name, in the order of ``matrix``; by default a group is a parameter.
        whole: Norm of the whole matrix, entries in no group included.
        shapes: Shape of each parameter.
        seconds: Time taken.
        scaled: Norms of the blocks of S H S, where ``scale`` was passed.
    """

    matrix: Tensor
    groups: dict[str, int]
    whole: float
    shapes: dict[str, tuple[int, ...]]
    kind: str
    loss: float
    fallbacks: tuple[str, ...]
    seconds: float
    handshake: bool = True
    scaled: FrobeniusNorms | None = None

    @property
    def blocks(self) -> dict[tuple[str, str], float]:
        """Norms by names (i, j), i not after j in the order of ``groups``: ||H_ij||_F, which is ||H_ji||_F too."""
        names, values = list(self.groups), self.matrix.tolist()
        return {(names[i], names[j]): values[i][j] for i in range(len(names)) for j in range(i, len(names))}

    @property
    def diagonal_share(self) -> float:
        """Share of the sum of the squares of all entries that lies in the diagonal blocks; 1 for a block-diagonal matrix."""
        return float(self.matrix.diagonal().square().sum()) / (self.whole**2 or math.nan)

    def block(self, name_i: str, name_j: str) -> float:
        """Return the norm of the block of two groups, in either order.

        Raises:
            InputError: There is no such group, or the name is of a part of a parameter where the groups are parameters.
        """
        names, numbers = list(self.groups), []
        for name in (name_i, name_j):
            if name not in self.groups and self.groups.keys() == self.shapes.keys():
                parameter, rows = locate("FrobeniusNorms.block", name, self.shapes)
                if rows is not None:
                    raise InputError(
                        f"FrobeniusNorms.block: {name!r} is a part of a parameter, but the norms are of whole ones; pass "
                        f"{parameter!r}, or take by={{group: parts}}"
                    )
                name = parameter
            check_name("FrobeniusNorms.block", "name", name, names)
            numbers.append(names.index(name))
        return float(self.matrix[numbers[0], numbers[1]])

    def rows(self, name: str) -> float:
        """Return the norm of all rows of a group in the columns of all groups."""
        return math.hypot(*(self.block(name, other) for other in self.groups))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python numbers."""
        return {
            "parameters": self._size,
            "kind": self.kind,
            "loss": self.loss,
            "frobenius_norm": self.whole,
            "diagonal_share": self.diagonal_share,
            "fallbacks": list(self.fallbacks),
            "seconds": self.seconds,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "groups": self.groups,
            "blocks": [{"row": i, "column": j, "frobenius_norm": x} for (i, j), x in self.blocks.items()],
            "scaled": None if self.scaled is None else self.scaled.to_dict(),
        }

    @property
    def _size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def _listed(self) -> list[int]:
        """Numbers of the groups in the table: all, or those with the largest norms of rows."""
        if len(self.groups) <= LISTED:
            return list(range(len(self.groups)))
        return sorted(self.matrix.square().sum(1).topk(LISTED).indices.tolist())

    def _rows(self) -> Iterator[tuple[str, ...]]:
        names, squares = list(self.groups), self.matrix.square()
        for i in self._listed:
            name = names[i]
            off_diagonal = self.matrix[i].clone()
            off_diagonal[i] = -1.0
            j = int(off_diagonal.argmax())
            largest = ("", "") if len(names) == 1 else (names[j], f"{float(off_diagonal[j]):.4g}")
            size = sizes(self.shapes[name]) if name in self.shapes else f"{self.groups[name]:,}"
            yield name, size, f"{float(self.matrix[i, i]):.4g}", f"{float(squares[i].sum().sqrt()):.4g}", *largest

    def _headline(self) -> str:
        of = f"the {NAMES[self.kind]}"
        title = f"Frobenius norm of {of}, {self._size:,} x {self._size:,}: {self.whole:.6g}; loss {self.loss:.6g}, "
        return f"{title}{self.seconds:.2f} s{automatic(self.fallbacks)}" + ("" if self.handshake else UNCOMPARED)

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        most = f"; the {LISTED} with the largest rows" if len(self.groups) > LISTED else ""
        yield f"diagonal blocks: {100 * self.diagonal_share:.3g} % of the squares, {len(self.groups):,} groups{most}"
        if self.scaled is not None:
            yield f"in the metric of scale: {100 * self.scaled.diagonal_share:.3g} % of the squares"
        names = list(self.groups)
        yield table(_HEADERS, self._rows(), left=2, names=[names[i] for i in self._listed], drop=("shape", "all its rows"))


_HEADERS = ("group i", "shape", "||H_ii||_F", "all its rows", "largest with", "||H_ij||_F")


@checked("frobenius_norms")
@one_at_a_time
@asks(CurvatureArguments)
def frobenius_norms(
    module: nn.Module,
    inputs: Any,
    target: Any = None,
    *,
    by: str | Mapping[str, Any] | Partition | None = None,
    batch_size: int | None = None,
    panel_bytes: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    scale: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
    **asked: Unpack[CurvatureArguments],
) -> FrobeniusNorms:
    """Return the exact Frobenius norm of every block of the Hessian of ``loss(module(inputs), target)``, and of all of it.

    The matrix is computed by the closed forms of :func:`hessiankit.hessian`: its upper half at once where four times the matrix
    is free and the derivatives fit beside it, else the rows of some parameters at a time, freed before the next are computed.
    Where a block of two parameters exceeds a panel, the first one's rows are products with unit vectors, as many as a panel
    holds. The squares of the entries are added up in float64, by pairs of groups.

    By panels, memory is one panel of rows (see ``panel_bytes``), the derivatives of one chunk of samples (for products: of a
    batch) and two numbers for each pair of groups. Panels take up to half of the free memory, because each traces every chunk
    anew. The module is not changed, so Ctrl-C is safe at any time.

    Args:
        module: The function under study, as in :func:`hessiankit.hessian`, like the next two.
        inputs: What it is called with.
        target: What the loss compares with.
        **asked: Arguments of :class:`~hessiankit.request.signature.CurvatureArguments`.
        by: Groups of parameters between which blocks lie: ``"parameter"`` (the default); ``"neuron"``, the weights and the bias
            of an output, a row of a table, an entry of a norm; ``"head"``, queries, keys and values of a head, any other
            parameter by itself; ``"module"``; ``"layer"``; ``"type"``; or group -> names, patterns or slices; or name -> group;
            or a function of the module and the names that returns one of these. No entry may be in two groups.
        batch_size: Samples treated at once; chosen by available work space by default.
        panel_bytes: Bytes of a panel of rows; None: the matrix at once, or 256 MiB and more, as above.
        resume: File ``.npz`` for the sums of the panels; the same call continues from it after an interruption.
        scale: Diagonal of a matrix S, (P,), positive. The norms of S H S come from the same pass, as ``scaled`` of the result:
            H in the metric of an optimizer that divides the gradient by p, for scale = p^(-1/2).
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
    path = None if resume is None else Path(resume)
    if path is not None and path.suffix != ".npz":
        raise InputError(f"{WHO}: resume={os.fspath(path)!r} is written in NumPy's format; pass a path that ends in '.npz'")
    check_writable(WHO, path)
    request = read_request(module, inputs, target, **asked)
    batches, kind = request.together(), request.curvature.kind
    evaluation, first = Evaluation(batches, batch_size, progress), batches[0]
    groups = groups_of(WHO, "parameter" if by is None else by, first, module)
    with torch.no_grad():
        sums = SquareSums(groups, batches, None if scale is None else _checked_scale(scale, first))
        if path is not None or panel_bytes is not None or not _at_once(sums, evaluation, kind):
            _by_panels(sums, evaluation, kind, panel_bytes, path)
    (norms, total), *scaled = sums.norms()
    if total == 0 and not any(batch.reached() for batch in batches):
        raise without_effect(WHO, first.shapes)
    counts = {name: len(at) for name, at in groups.items()}
    seconds = time.perf_counter() - start
    plain = FrobeniusNorms(norms, counts, total, first.shapes, kind, sums.loss, sums.fallbacks, seconds, request.handshake)
    return replace(plain, scaled=replace(plain, matrix=scaled[0][0], whole=scaled[0][1])) if scaled else plain


def _checked_scale(scale: Tensor, first: BatchLoss) -> Tensor:
    """Return the squares of a diagonal.

    Raises:
        InputError: It does not have an entry for each parameter, or one that is not positive and finite.
    """
    if not isinstance(scale, Tensor) or tuple(scale.shape) != (first.size,):
        shape = tuple(scale.shape) if isinstance(scale, Tensor) else type(scale).__name__
        raise InputError(f"{WHO}: scale has shape {shape}; expected the diagonal of S, ({first.size},)")
    squares = scale.detach().to(first.device, wide(first.device)).square()
    if not bool((scale > 0).all()) or not bool(torch.isfinite(squares).all()):
        raise InputError(
            f"{WHO}: scale has an entry that is not a positive number; for a metric p pass p ** -0.5 of a positive p"
        )
    return squares


class SquareSums:
    """Sums of the squares of the entries of a symmetric matrix A, and of S A S, by pairs of groups, from the rows of A.

    Attributes:
        labels: Number of each entry's group, (P,); entries in no group count as one more group.
        weights: Squares of the diagonal of S, (P,); None without S.
        within: Sums over the blocks of a parameter with itself, (1 or 2, groups + 1, groups + 1).
        above: Sums over the blocks of a parameter with later ones, which occur in the matrix twice.
    """

    def __init__(self, groups: Mapping[str, Tensor], batches: Sequence[BatchLoss], weights: Tensor | None = None) -> None:
        first, device = batches[0], batches[0].device
        self.batches, self.spans = batches, list(first.slices.values())
        self.labels = labels(WHO, groups, first.size).to(device)
        self.weights = weights
        shape = (1 if weights is None else 2, len(groups) + 1, len(groups) + 1)
        self.within, self.above = (torch.zeros(shape, dtype=wide(device), device=device) for _ in range(2))
        self.loss, self.fallbacks = math.nan, tuple[str, ...]()

    def add(self, parameter: int, first: int, rows: Tensor, start: int) -> None:
        """Add some rows (S, n) of a parameter, from number ``first`` on, in columns from ``start``, its own first or later."""
        end = start + rows.shape[1]
        stop = min(max(self.spans[parameter].stop, start), end)
        step = max(1, SLAB // rows.shape[1])
        for total, left, right in ((self.within, start, stop), (self.above, stop, end)):
            columns = self.labels[left:right]
            for n, part in enumerate(rows[:, left - start : right - start].split(step)):
                squares = part.to(total.dtype).square_()
                numbers = slice(first + n * step, first + n * step + len(part))
                for matrix in total:
                    by_column = squares.new_zeros(len(part), len(matrix)).index_add_(1, columns, squares)
                    if not math.isfinite(float(by_column.sum())):
                        raise self._not_finite(parameter, left, squares)
                    matrix.index_add_(0, self.labels[numbers], by_column)
                    if self.weights is not None:  # read by the second matrix; of no use after it
                        squares.mul_(self.weights[left:right]).mul_(self.weights[numbers, None])

    def add_panel(self, panel: SymmetricStorage) -> None:
        """Add all rows of a panel."""
        for n in panel.rows:
            rows, start = self.spans[n], max(self.spans[n].start, panel.left.start)
            data = panel.data[rows.start - panel.top.start : rows.stop - panel.top.start, start - panel.left.start :]
            self.add(n, rows.start, data, start)

    def _not_finite(self, parameter: int, left: int, squares: Tensor) -> InputError:
        """Return the error for the first block of a parameter's rows with a square that is not finite."""
        column = left + int((~torch.isfinite(squares)).any(0).nonzero()[0])
        names = list(self.batches[0].slices)
        other = next(n for n, rows in enumerate(self.spans) if column < rows.stop)
        return not_finite(WHO, names[parameter], names[other], self.batches)

    def norms(self) -> list[tuple[Tensor, float]]:
        """Return the norms of the blocks by pairs of groups, and that of the whole matrix, of A and of S A S."""
        sums = (self.within + self.above + self.above.mT).cpu().double()
        return [(squares[:-1, :-1].sqrt(), math.sqrt(float(squares.sum()))) for squares in sums]


def _at_once(sums: SquareSums, evaluation: Evaluation, kind: str) -> bool:
    """Add the whole matrix; return False where it does not fit in memory."""
    first, outer = evaluation.batches[0], kind != "hessian"
    if SHARE * first.size**2 * first.dtype.itemsize > available_memory(first.device):
        return False
    indices = range(len(first.parameters))
    try:
        matrix, loss, fallbacks = evaluation.panel([(indices, indices)], 0, outer=outer, look=evaluation.look(first))
    except OutOfMemoryError:  # said before the derivatives are made; one panel leaves them more room
        return False
    sums.add_panel(matrix)
    sums.loss, sums.fallbacks = loss, fallbacks
    if fallbacks:
        evaluation.check_symmetric(matrix, matrix.mirror(), loss, fallbacks, outer=outer)
    return True


def _by_panels(sums: SquareSums, evaluation: Evaluation, kind: str, limit: int | None, path: Path | None) -> None:
    """Add panels of ``limit`` bytes, or of None few and large ones, of which one is kept at a time."""
    batches, first = evaluation.batches, evaluation.batches[0]
    plan = make_plan(batches, evaluation.batch_size, limit or PANEL)
    if limit is None and len(plan.panels) > 1:
        plan = replace(plan, limit=max(PANEL, (available_memory(first.device) - plan.workspace) // 2))
    parts, spans = plan.panels, list(first.slices.values())
    bytes_of = [math.prod(spans[x[-1]].stop - spans[x[0]].start for x in part) * first.dtype.itemsize for part in parts]
    check_workspace(plan.workspace, min(plan.largest, int(plan.limit)), first.device)
    store = None if path is None else SumStore(path, sums, evaluation, kind)
    operator: HessianOperator | None = None
    for rows, group in groupby(range(len(parts)), lambda n: parts[n][0]):
        numbers = list(group)
        if store is not None and rows.start < store.parameters:
            continue
        if max(bytes_of[n] for n in numbers) > plan.limit:  # a block of two parameters: rows of the first by products
            operator = operator or HessianOperator.of(batches, kind)
            _add_products(sums, operator, rows[0], int(plan.limit))
            sums.loss, names = operator.loss, operator.fallbacks
            evaluation.tell(numbers[-1], parts)
            numbers = []
        for n in numbers:
            panel, sums.loss, names = evaluation.panel(parts, n, outer=kind != "hessian")
            sums.add_panel(panel)
            del panel  # before the next one comes
        sums.fallbacks = tuple(dict.fromkeys(sums.fallbacks + names))
        if store is not None:
            store.write(rows.stop)
    if sums.fallbacks:
        check_fallbacks(batches, kind)


def _add_products(sums: SquareSums, operator: HessianOperator, parameter: int, limit: int) -> None:
    """Add the rows of a parameter: products with unit vectors, as many at a time as ``limit`` bytes hold with these."""
    span, size = sums.spans[parameter], operator.shape[0]
    step = max(1, limit // (2 * size * operator.torch_dtype.itemsize))
    for first in range(span.start, span.stop, step):
        count = min(step, span.stop - first)
        units = torch.zeros(count, size, dtype=operator.torch_dtype, device=operator.device)
        units[:, first : first + count].fill_diagonal_(1.0)
        sums.add(parameter, first, operator._rows(units)[:, span.start :], span.start)


class SumStore:
    """The file of the sums of finished panels, which a later call with the same model, data and options reads.

    Attributes:
        parameters: Number of the parameters whose rows are in the sums.
    """

    def __init__(self, path: Path, sums: SquareSums, evaluation: Evaluation, kind: str) -> None:
        self.path, self.sums, self.parameters = path, sums, 0
        first = evaluation.batches[0]
        digest = hashlib.sha256(sums.labels.cpu().numpy().tobytes())
        if sums.weights is not None:
            digest.update(sums.weights.cpu().numpy().tobytes())
        for x in first.parameters.values():
            digest.update(x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        about = {"loss": f"{evaluation.loss:.6g}", "kind": kind, "shapes": {n: list(x) for n, x in first.shapes.items()}}
        self.key = json.dumps({**about, "digest": digest.hexdigest()})
        if not path.exists():
            return
        try:
            with np.load(path, allow_pickle=False) as stored:
                key, within, above = str(stored["key"]), stored["within"], stored["above"]
                self.parameters, sums.loss = int(stored["parameters"]), float(stored["loss"])
                sums.fallbacks = tuple(map(str, stored["fallbacks"]))
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"{WHO}: {path} holds no sums of panels ({error}); remove it, or pass another resume=...") from error
        if key != self.key:
            others = "of another matrix, of other groups or of another scale"
            raise InputError(f"{WHO}: {path} holds the sums {others}; remove it, or pass another resume=...")
        for total, values in ((sums.within, within), (sums.above, above)):
            total.copy_(torch.from_numpy(values))

    def write(self, parameters: int) -> None:
        """Write the sums, which have the rows of the first ``parameters`` parameters."""
        sums, buffer = self.sums, io.BytesIO()
        np.savez(
            buffer, key=self.key, parameters=parameters, loss=sums.loss, fallbacks=np.array(sums.fallbacks, dtype=str),
            within=sums.within.cpu().numpy(), above=sums.above.cpu().numpy(),
        )  # fmt: skip
        write_bytes(WHO, self.path, buffer.getbuffer())
