"""The route table: which of torch's routes to second derivatives are right for which operations.

``route_table.json`` holds its short form, operation by operation the references of ``hessiankit.check`` that fail and how, on the
torch that continuous integration pins; :func:`write` writes it.
"""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.routes.operations import OPERATIONS, Example
from benchmarks.routes.torch_routes import ROUTES, central_differences
from hessiankit.curvature.dense import hessian
from hessiankit.support.errors import HessiankitError, InputError, unknown
from hessiankit.support.files import WithDict
from hessiankit.support.tables import FULL_HINT, Detail, Piece, Printed, as_markdown, as_text, table
from hessiankit.tracing.graph import Node
from hessiankit.tracing.recording import record
from hessiankit.verify.problem import Problem
from hessiankit.verify.reference_base import typed_line

PATH = Path(__file__).with_name("route_table.json")
TOLERANCE = 1e-9
"""Relative to the Hessian's largest entry: far above rounding and differences (1e-12), below any lost term seen (1e-6)."""

RIGHT, WRONG, UNSUPPORTED = "right", "WRONG", "unsupported"
CLOSED_FORM, DIFFERENCES, DISAGREE = "closed form", "differences", "DISAGREE"
JUDGING = "central differences"


@dataclass(frozen=True)
class RouteCell:
    """Result of one route for one operation.

    Attributes:
        operation: Its name in ``OPERATIONS``.
        route: Its name in ``ROUTES``.
        status: "right", "WRONG" or "unsupported".
        error: Largest difference from the judge, relative to the largest entry of the Hessian; None if unsupported.
        asymmetry: Largest |H - H^T|, relative to the same; None if unsupported.
        message: Why it is unsupported: the type and the first line of torch's error; else "".
    """

    operation: str
    route: str
    status: str
    error: float | None
    asymmetry: float | None
    message: str = ""

    @property
    def symmetric(self) -> bool | None:
        """Whether the matrix is symmetric; a wrong one may be. None if unsupported."""
        return None if self.asymmetry is None else self.asymmetry <= TOLERANCE


@dataclass(frozen=True)
class Judgement:
    """The standard of comparison for one operation.

    Attributes:
        operation: Its name in ``OPERATIONS``.
        parameters: P.
        judge: "closed form" (``hessiankit.hessian``, confirmed by central differences), "differences" (central
            differences alone), or "DISAGREE": the two differ, and the cells are measured against the differences.
        disagreement: Largest difference of the two, relative to the largest entry; None where there is no closed form.
        note: Why the closed form does not judge; else "".
    """

    operation: str
    parameters: int
    judge: str
    disagreement: float | None
    note: str = ""


@dataclass(frozen=True, repr=False)
class RouteTable(Printed, WithDict):
    """Result of :func:`routes`; prints as a table.

    Attributes:
        cells: One for each operation and route, row by row.
        judgements: One for each operation.
        torch_version: Version of the installed torch.
        seed: Seed of the values.
        seconds: Time taken.
    """

    cells: tuple[RouteCell, ...]
    judgements: tuple[Judgement, ...]
    torch_version: str
    seed: int
    seconds: float

    @property
    def wrong(self) -> tuple[RouteCell, ...]:
        """The cells in which a route returned a wrong matrix."""
        return tuple(cell for cell in self.cells if cell.status == WRONG)

    @property
    def never_wrong(self) -> tuple[str, ...]:
        """The routes that gave no wrong matrix: each was right, or said that it could not."""
        bad = {cell.route for cell in self.wrong}
        return tuple(name for name in ROUTES if name not in bad)

    def cell(self, operation: str, route: str) -> RouteCell:
        """Return the cell of ``operation`` and ``route``.

        Raises:
            InputError: There is no such cell.
        """
        for cell in self.cells:
            if (cell.operation, cell.route) == (operation, route):
                return cell
        raise InputError(
            f"RouteTable.cell: no cell ({operation!r}, {route!r}); operations: "
            f"{', '.join(j.operation for j in self.judgements)}; routes: {', '.join(ROUTES)}."
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """The errors of the unsupported cells, without repetition; the table refers to them by number, from 1."""
        return tuple(dict.fromkeys(cell.message for cell in self.cells if cell.status == UNSUPPORTED))

    @property
    def headers(self) -> tuple[str, ...]:
        """The table's headers."""
        return ("operation", "P", *ROUTES, "judge")

    def table_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the table's rows, one an operation."""
        for judged in self.judgements:
            cells = [self._cell_text(self.cell(judged.operation, route), judged) for route in ROUTES]
            verdict = f"{DISAGREE} {judged.disagreement:.1g}" if judged.judge == DISAGREE else judged.judge
            yield judged.operation, str(judged.parameters), *cells, verdict

    def _cell_text(self, cell: RouteCell, judged: Judgement) -> str:
        if cell.status == UNSUPPORTED:
            return f"no ({1 + self.reasons.index(cell.message)})"
        if cell.status == WRONG:
            return f"{WRONG} {cell.error:.2g}{'' if cell.symmetric else '*'}"
        return "judge" if cell.route == JUDGING and judged.judge != CLOSED_FORM else f"{cell.error:.0e}"

    def _headline(self) -> str:
        return f"Second derivatives in torch {self.torch_version}, float64, seed {self.seed}"

    def _legend(self) -> Iterator[str]:
        yield (
            "A number means right: it is the largest error, relative to the largest entry of the Hessian. "
            f"WRONG is an error above {TOLERANCE:.0e}, with * where the result is not symmetric. "
            "no (k) means unsupported, with error k below."
        )
        yield (
            "The judge is the closed form, confirmed by central differences. Where the closed form leaves an operation to "
            "automatic differentiation, it is central differences alone."
        )

    def _findings(self) -> Iterator[str]:
        """Yield for every route the operations where it is wrong or unsupported."""
        for route in ROUTES:
            mine = [cell for cell in self.cells if cell.route == route]
            wrong = ", ".join(f"{cell.operation} {cell.error:.2g}" for cell in mine if cell.status == WRONG)
            missing = ", ".join(cell.operation for cell in mine if cell.status == UNSUPPORTED)
            parts = [f"{status}: {names}" for status, names in ((WRONG, wrong), (UNSUPPORTED, missing)) if names]
            yield f"{route}: {'; '.join(parts) or 'right everywhere'}"

    def wrong_rows(self) -> dict[tuple[str, str], list[str]]:
        """Return the routes that are wrong by the same error through an operation; with a star, it is not symmetric.

        >>> list(routes("layer_norm (no gain)").wrong_rows())
        [('layer_norm (no gain)', '4*')]
        """
        wrong: dict[tuple[str, str], list[str]] = {}
        for cell in self.wrong:
            error = f"{cell.error:.2g}{'' if cell.symmetric else '*'}"
            wrong.setdefault((cell.operation, error), []).append(cell.route)
        return wrong

    def wrong_markdown(self) -> str:
        """Return these rows as a Markdown table."""
        rows = [[name, error.replace("*", ""), ", ".join(routes)] for (name, error), routes in self.wrong_rows().items()]
        return as_markdown(("operation", "error", "wrong by"), rows).replace("|--:|--:|", "|--:|---|")

    def _summary(self) -> Iterator[Piece]:
        """Yield what is wrong or unsupported; which routes are right is in the details."""
        wrong = [(*row, ", ".join(names)) for row, names in self.wrong_rows().items()]
        if wrong:
            yield table(("operation", "error", f"{WRONG} by"), wrong, left=3, prose=(f"{WRONG} by",))
            yield f"Error: relative to the largest entry of the Hessian; above {TOLERANCE:.0e} is {WRONG}; * not symmetric."
        yield f"Never wrong: {', '.join(self.never_wrong)}."
        missing = Counter(cell.operation for cell in self.cells if cell.status == UNSUPPORTED)
        if missing:
            yield f"Unsupported, and by how many routes: {', '.join(f'{name} {count}' for name, count in missing.items())}."
        disagree = [judged.operation for judged in self.judgements if judged.judge == DISAGREE]
        if disagree:
            yield f"The judges {DISAGREE}: {', '.join(disagree)}."

    def _parts(self) -> Iterator[Piece]:
        counts = Counter(cell.status for cell in self.cells)
        yield f"{self._headline()}; {self.seconds:.1f} s"
        verdicts = ", ".join(f"{counts[status]} {status}" for status in (RIGHT, WRONG, UNSUPPORTED))
        yield f"{len(self.judgements)} x {len(ROUTES)} cells: {verdicts}"
        yield from self._summary()
        yield Detail(table(self.headers, self.table_rows()))
        yield from map(Detail, self._legend())
        yield from (Detail(f"({k}) {reason}") for k, reason in enumerate(self.reasons, 1))
        yield Detail("")
        yield from map(Detail, self._findings())
        notes = [f"{j.operation}: {j.note}" for j in self.judgements if j.note]
        yield from map(Detail, ["", "Central differences judge alone:", *notes] if notes else [])

    def __str__(self) -> str:  # however many lines: a wrong cell is never left out
        return as_text(*(part for part in self._parts() if not isinstance(part, Detail)), FULL_HINT)

    def markdown(self) -> str:
        """Return the table, its legend, its routes and its operations as Markdown (without the time taken)."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        lines = [f"{self._headline()}.", "", *_spaced(self._legend()), line(self.headers), line("---" for _ in self.headers)]
        lines += [line(_bold(cell) for cell in row) for row in self.table_rows()]
        if self.reasons:
            lines += ["", "### Errors", "", *(f"{k}. `{reason}`" for k, reason in enumerate(self.reasons, 1))]
        lines += ["", "### By route", "", *(f"- {finding}" for finding in self._findings())]
        lines += ["", "### What each route calls", "", *(f"- {route.name}: {route.summary}" for route in ROUTES.values())]
        lines += ["", "### What each operation computes", ""]
        for judged in self.judgements:
            note = f" (judged by central differences: {judged.note})" if judged.note else ""
            lines.append(f"- {judged.operation}: `{OPERATIONS[judged.operation].formula}`{note}")
        return "\n".join(lines) + "\n"


def _spaced(paragraphs: Iterable[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield from (paragraph.replace("*", chr(92) + "*"), "")


def _bold(cell: str) -> str:
    return f"**{cell.replace('*', chr(92) + '*')}**" if cell.startswith((WRONG, DISAGREE)) else cell


def routes(operations: str | Iterable[str] | None = None, *, seed: int = 0) -> RouteTable:
    """Differentiate every operation of a transformer twice by every route of torch, and compare the results.

    Each operation is a tiny float64 problem of 10 to 40 parameters, ``OPERATIONS``; each route of ``ROUTES`` computes its
    whole Hessian. The judge is the closed form of :func:`hessiankit.hessian`, itself held against central differences
    of the gradient. Attention runs on the kernel that torch chooses unless the operation says otherwise, as it would in
    a user's code. The whole table takes about 20 seconds on one core.

    Args:
        operations: Names of ``OPERATIONS``; all of them by default.
        seed: Of the inputs, targets and parameters, all normal.

    Raises:
        InputError: An unknown operation.

    >>> found = routes("layer_norm")
    >>> [found.cell("layer_norm", route).status for route in ("grad twice", "torch.func.hessian", "jacfwd(grad)")]
    ['right', 'WRONG', 'right']
    """
    start = time.perf_counter()
    names = [operations] if isinstance(operations, str) else list(OPERATIONS if operations is None else operations)
    for name in names:
        if name not in OPERATIONS:
            raise unknown("routes", "operation", name, OPERATIONS, "`python -m benchmarks routes`")
    cells: list[RouteCell] = []
    judgements = []
    for name in dict.fromkeys(names):
        example = OPERATIONS[name].example(seed)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of slow batching rules; here only the result counts
            differences = central_differences(example, example.theta)
            judgement, truth = _judge(name, example, differences)
            judgements.append(judgement)
            cells += [_measure(name, route, example, truth, differences) for route in ROUTES]
    return RouteTable(tuple(cells), tuple(judgements), torch.__version__, seed, time.perf_counter() - start)


def _judge(name: str, example: Example, differences: Tensor) -> tuple[Judgement, Tensor]:
    """Return the judgement, and the Hessian that every route is compared with."""
    size = len(differences)
    try:
        closed = hessian(example.module, example.x, example.target, loss=example.loss_name, handshake=False)
    except HessiankitError as reason:
        return Judgement(name, size, DIFFERENCES, None, typed_line(reason)), differences
    error = _relative(closed.matrix - differences, differences)
    if closed.fallbacks:
        note = f"the closed form leaves {', '.join(closed.fallbacks)} to automatic differentiation"
        return Judgement(name, size, DIFFERENCES if error <= TOLERANCE else DISAGREE, error, note), differences
    if error > TOLERANCE:
        return Judgement(name, size, DISAGREE, error, f"the closed form differs by {error:.1g}"), differences
    return Judgement(name, size, CLOSED_FORM, error), closed.matrix


def _measure(name: str, route: str, example: Example, truth: Tensor, differences: Tensor) -> RouteCell:
    try:
        found = differences if route == JUDGING else ROUTES[route].matrix(example, example.theta).detach()
    except torch.OutOfMemoryError:
        raise
    except Exception as reason:  # whatever torch raises is the finding
        return RouteCell(name, route, UNSUPPORTED, None, None, typed_line(reason))
    error, asymmetry = _relative(found - truth, truth), _relative(found - found.T, truth)
    return RouteCell(name, route, RIGHT if error <= TOLERANCE else WRONG, error, asymmetry)


def _relative(difference: Tensor, scale: Tensor) -> float:
    """Return the largest entry relative to the largest of ``scale``; infinite where either is not finite."""
    ratio = float(difference.abs().max() / scale.abs().max())
    return ratio if ratio == ratio else float("inf")


ROUTES_OF: Mapping[str, tuple[str, ...]] = {
    "reverse-over-reverse": ("grad twice (batched)", "grad twice"),
    "jvp(grad)": ("jacfwd(grad)", "jvp(grad)"),
    "torch.func.hessian": ("torch.func.hessian", "jvp(jacrev)"),
    "curvlinops": ("torch.func.hessian", "jvp(jacrev)"),
}
"""Reference of ``hessiankit.check`` -> its routes: for all directions together, and for one at a time where torch cannot batch
them."""

BY_CHOICE_OF_TORCH = frozenset({"sdpa (default)", "nn.MultiheadAttention", "nn.TransformerEncoderLayer"})
"""Attention on a fused kernel: the references switch these off."""
UNLISTED = frozenset({"autograd.Function", "autograd.Function (once)", "weight_norm"})
"""Without known parts, so that a module with one is refused by its name before a reference is chosen; or run by the references
as a plain formula (:data:`hessiankit.verify.problem.PLAIN`)."""


def signatures(function: Callable[..., Tensor], parameters: Mapping[str, Tensor]) -> dict[str, None]:
    """Return the operations that parameters reach, each with its tensors; those that move are starred.

    >>> list(signatures(lambda p: (p["W"] * 2).sum(), {"W": torch.ones(2)}))
    ['aten.mul.Tensor(self*)', 'aten.sum.default(self*)']
    """
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        graph = record(lambda: function(leaves), list(leaves.values()), {}).graph
    moving: set[Node] = set()
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            moving.add(node)
        elif node.op == "call_function" and not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
            if isinstance(node.target, torch._ops.OpOverload):
                found[_signature(node, moving)] = None
        elif node.op == "segment" and not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
            if node.target:
                found[f"autograd: {node.target}(*)"] = None
    return found


def _signature(node: Node, moving: set[Node]) -> str:
    target: Any = node.target
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    shown = []
    for name, value in given.items():
        nodes = [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Node)]
        if nodes:
            shown.append(name + "*" * (not moving.isdisjoint(nodes)))
    return f"{target}({', '.join(shown)})"


def distilled(found: RouteTable) -> dict[str, Any]:
    """Return the short form of a route table: for every operation, the references that fail, and how.

    An operation that some row has right is not what makes another row wrong.
    """
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for name, operation in OPERATIONS.items():
        if name in BY_CHOICE_OF_TORCH | UNLISTED:
            continue
        example = operation.example(found.seed)
        problem = Problem(example.module, example.x, example.target, operation.loss, example.parameters)
        for signature in signatures(problem.swapped_loss, problem.params):
            row = rows.setdefault(signature, {reference: [] for reference in ROUTES_OF})
            for reference, tried in ROUTES_OF.items():
                row[reference].append((_status(found, name, tried), name))
    operations = {signature: dict(_verdicts(row)) for signature, row in sorted(rows.items())}
    return {"torch": found.torch_version.split("+")[0], "operations": operations}


def _status(found: RouteTable, operation: str, tried: tuple[str, ...]) -> str:
    """Return the status of a reference: that of its first route that torch can run."""
    statuses = [found.cell(operation, route).status for route in tried]
    return next((status for status in statuses if status != UNSUPPORTED), UNSUPPORTED)


def _verdicts(row: Mapping[str, list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    for reference, seen in row.items():
        if any(status == RIGHT for status, _ in seen):
            continue
        status = WRONG if any(status == WRONG for status, _ in seen) else UNSUPPORTED
        where = next(name for found, name in seen if found == status)
        yield reference, f"{'wrong' if status == WRONG else 'unsupported'} through {OPERATIONS[where].formula}"


def write(found: RouteTable) -> None:
    """Write the short form of a table of all operations."""
    PATH.write_text(json.dumps(distilled(found), indent=1) + "\n", encoding="utf-8")


@cache
def load() -> dict[str, Any]:
    """Return the short form that was written."""
    return json.loads(PATH.read_text(encoding="utf-8"))
