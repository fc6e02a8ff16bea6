"""The reader of the route table: which references are right for every operation of a module.

``route_table.json`` holds, operation by operation, the references that fail and how, on the torch that continuous integration
pins; ``python -m benchmarks routes --write`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.errors import HessiankitError
from hessiankit.tracing.graph import Node
from hessiankit.tracing.recording import record
from hessiankit.verify.problem import Problem

PATH = Path(__file__).with_suffix(".json")
CHOICES = (("reverse-over-reverse",), ("jvp(grad)", "torch.func.hessian"))
"""One of each group is taken, the first that is right everywhere; those of one group share a path."""

CENTRAL_DIFFERENCES = "central-differences"


@dataclass(frozen=True)
class Choice:
    """The references to run, and why others are left out.

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
    faults = {name: ", ".join(dict.fromkeys(row[name] for row in known.values() if row and name in row)) for name in default}
    chosen = [next((name for name in group if not faults[name]), None) for group in CHOICES]
    names = (*(name for name in chosen if name is not None), CENTRAL_DIFFERENCES)
    if len(names) < 2:
        why = "; ".join(f"{name}: {faults[name]}" for name in default if faults[name])
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


@cache
def load() -> dict[str, Any]:
    """Return the shipped table."""
    return json.loads(PATH.read_text(encoding="utf-8"))
