"""Which references can be right for a module: the route table of one torch, looked up by the operations that the module runs.

``route_table.json`` is what ``hessiankit.verify.routes()`` finds on the torch that continuous integration pins, operation by
operation; :func:`write` makes it anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessiankit.errors import HessiankitError
from hessiankit.tracing.graph import Node
from hessiankit.tracing.recording import record
from hessiankit.verify.operations import OPERATIONS
from hessiankit.verify.problem import Problem
from hessiankit.verify.routes import RIGHT, UNSUPPORTED, WRONG, RouteTable, routes

PATH = Path(__file__).with_suffix(".json")
ROUTES_OF: Mapping[str, tuple[str, ...]] = {
    "reverse-over-reverse": ("grad twice (batched)", "grad twice"),
    "jvp(grad)": ("jacfwd(grad)", "jvp(grad)"),
    "torch.func.hessian": ("torch.func.hessian", "jvp(jacrev)"),
    "curvlinops": ("torch.func.hessian", "jvp(jacrev)"),
}
"""What a reference runs: all directions together, and one at a time where torch cannot take them together."""

CHOICES = (("reverse-over-reverse",), ("jvp(grad)", "torch.func.hessian"))
"""One of each group is taken, the first that is right everywhere; those of one group share a path."""

DIFFERENCES = "central-differences"
BY_CHOICE_OF_TORCH = frozenset({"sdpa (default)", "nn.MultiheadAttention", "nn.TransformerEncoderLayer"})
"""Attention on a fused kernel: the references switch these off."""
UNLISTED = frozenset({"autograd.Function", "autograd.Function (once)"})
"""Nothing says what these are made of: a module with one is refused by its name before a reference is chosen."""


@dataclass(frozen=True)
class Choice:
    """The references to run, and what was found about the others.

    Attributes:
        names: Keys of ``REFERENCES``.
        left_out: Name -> why it is not run.
        note: Why the table does not decide; "" where it does.
    """

    names: tuple[str, ...]
    left_out: Mapping[str, str]
    note: str = ""


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


def choose(problem: Problem, default: tuple[str, ...]) -> Choice:
    """Return the references that are right for every operation of a problem; ``default`` where the table cannot tell."""
    table = load()
    version = torch.__version__.split("+")[0]
    if version != table["torch"]:
        return Choice(default, {}, f"the route table is of torch {table['torch']}, this is {version}")
    try:
        found = signatures(problem.swapped_loss, problem.params)
    except (HessiankitError, RuntimeError, TypeError, ValueError) as reason:
        return Choice(default, {}, f"the operations cannot be listed: {str(reason).splitlines()[0]}")
    known = {signature: _known(signature, table["operations"]) for signature in found}
    if missing := sorted({signature.partition("(")[0] for signature, row in known.items() if row is None}):
        return Choice(default, {}, f"not in the route table: {', '.join(missing)}")
    faults = {name: _faults(name, known) for name in ROUTES_OF}  # type: ignore[arg-type]
    chosen = [next((name for name in group if not faults[name]), None) for group in CHOICES]
    names = (*(name for name in chosen if name is not None), DIFFERENCES)
    if len(names) < 2:
        why = "; ".join(f"{name}: {faults[name]}" for name in ROUTES_OF if faults[name])
        return Choice(default, {}, f"no route is right for all operations ({why})")
    left_out = {name: faults.get(name) or f"shares its path with {names[-2]}" for name in default if name not in names}
    source = f" (route table, torch {table['torch']})"
    return Choice(names, {name: why + source for name, why in left_out.items()})


def _known(signature: str, operations: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the row of an operation, or of the same with more of its tensors moving if no fault is known of that."""
    if signature in operations:
        return operations[signature]
    for other, row in operations.items():
        same = other.replace("*", "") == signature.replace("*", "")
        wider = all(a == b or a + "*" == b for a, b in zip(_tensors(signature), _tensors(other), strict=False))
        if same and wider and not row:
            return row
    return None


def _tensors(signature: str) -> list[str]:
    return signature.partition("(")[2].rstrip(")").split(", ")


def _faults(name: str, known: Mapping[str, Mapping[str, str]]) -> str:
    """Return the operations that a reference fails at, in words; "" if there is none."""
    return ", ".join(dict.fromkeys(row[name] for row in known.values() if name in row))


@cache
def load() -> dict[str, Any]:
    """Return the shipped table."""
    return json.loads(PATH.read_text(encoding="utf-8"))


def distilled(found: RouteTable) -> dict[str, Any]:
    """Return the shipped form of a route table: for every operation, the references that fail, and how.

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
    """Return what a reference gives: the first route that torch can run."""
    statuses = [found.cell(operation, route).status for route in tried]
    return next((status for status in statuses if status != UNSUPPORTED), UNSUPPORTED)


def _verdicts(row: Mapping[str, list[tuple[str, str]]]) -> Iterator[tuple[str, str]]:
    for reference, seen in row.items():
        if any(status == RIGHT for status, _ in seen):
            continue
        status = WRONG if any(status == WRONG for status, _ in seen) else UNSUPPORTED
        where = next(name for found, name in seen if found == status)
        yield reference, f"{'wrong' if status == WRONG else 'unsupported'} through {OPERATIONS[where].formula}"


def write() -> None:
    """Make the table of the installed torch, and ship it."""
    PATH.write_text(json.dumps(distilled(routes()), indent=1) + "\n", encoding="utf-8")
