"""Terms of one block of the Hessian: H_ij = sum over v, k, n of J_vk,i^T [lambda_v . D_k D_n phi_v] J_vn,j.

v runs over the primitives on the way to the loss, k and n over its inputs; J_vk,i is the Jacobian of input k of v in parameter i.
A term exists where parameter i moves input k, parameter j moves input n, and D_k D_n phi_v does not vanish: a product
has D_1 D_2 alone, an affine operation none, a piecewise linear one none almost everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from hessiankit.engine.checkpoints import ancestors_of_output
from hessiankit.engine.problem.task import gib
from hessiankit.engine.recorder import PlannedStep
from hessiankit.support.errors import InputError, not_known
from hessiankit.support.tables import Detail, Piece, Printed, short_names, table
from hessiankit.tracing.trace import Application, Trace

PATH = 4  # operations of a path that a table shows


@dataclass(frozen=True)
class BlockTerm:
    """One term J_k^T [lambda . D_k D_n phi] J_n of a block, for two inputs k, n of one primitive.

    Attributes:
        name: Of the operation, as in the trace.
        primitive: Its class.
        positions: k and n, from 0.
        formula: The term, each Jacobian with its value and its parameter; I where the input is the parameter.
        left: Shape of J_k, (entries of input k, entries of parameter i).
        curvature: Shape of lambda . D_k D_n phi, (entries of input k, entries of input n).
        right: Shape of J_n.
        groups: How many groups of rows of the inputs the curvature keeps apart: it is block diagonal with so many blocks.
        left_path: Operations between parameter i and input k, in order.
        right_path: Operations between parameter j and input n.
        itemsize: Bytes of an entry.
    """

    name: str
    primitive: str
    positions: tuple[int, int]
    formula: str
    left: tuple[int, int]
    curvature: tuple[int, int]
    right: tuple[int, int]
    groups: int
    left_path: tuple[str, ...]
    right_path: tuple[str, ...]
    itemsize: int

    @property
    def operations(self) -> int:
        """Multiply-adds of the term as a product of these matrices, the curvature by its blocks."""
        return self._curvature * self.right[1] + self.left[1] * self.left[0] * self.right[1]

    @property
    def bytes(self) -> int:
        """Of the three factors as matrices, the curvature by its blocks."""
        return self.itemsize * (self.left[0] * self.left[1] + self._curvature + self.right[0] * self.right[1])

    @property
    def _curvature(self) -> int:
        return self.curvature[0] * self.curvature[1] // self.groups


@dataclass(frozen=True, repr=False)
class BlockTerms(Printed):
    """The terms of the block (i, j), and the steps of the plan that write it.

    Attributes:
        i: Parameter of the rows.
        j: Parameter of the columns.
        terms: In the order of the trace.
        steps: Of the plan; those of the block (j, i) where that is the one that is stored.
    """

    i: str
    j: str
    terms: tuple[BlockTerm, ...]
    steps: tuple[PlannedStep, ...]
    _trace: Trace = field(repr=False)
    _scale: float = field(repr=False)

    @torch.no_grad()
    def matrices(self) -> Iterator[tuple[BlockTerm, Tensor]]:
        """Yield each term with its matrix, (size of i, size of j), at the values of the last call; their sum is the block.

        By tangents of all entries of both parameters through the whole trace: for looking into small blocks.
        """
        trace, path = self._trace, {a.output: a for a in ancestors_of_output(self._trace)}
        adjoints = trace.adjoints(self._scale)
        tangents = {name: _pushed(trace, list(path.values()), trace.parameters[name]) for name in {self.i, self.j}}
        for (a, k, n), term in zip(_contributing(trace, self.i, self.j), self.terms, strict=True):
            at = [None] * len(a.inputs)
            at[n] = tangents[self.j][a.inputs[n]]  # type: ignore[index, call-overload]
            bent = a.primitive.curvature(trace.gather(a), adjoints[a.output], at)[k]  # type: ignore[arg-type]
            left = tangents[self.i][a.inputs[k]].flatten(1)  # type: ignore[index]
            right = left.new_zeros(len(at[n]), left.shape[1]) if bent is None else bent.flatten(1)  # type: ignore[arg-type]
            yield term, left @ right.T

    def to_dict(self) -> dict[str, Any]:
        """Return the terms and the steps as plain data."""
        terms = [asdict(t) | {"operations": t.operations, "bytes": t.bytes} for t in self.terms]
        return {"i": self.i, "j": self.j, "terms": terms, "steps": [asdict(s) for s in self.steps]}

    def _headline(self) -> str:
        terms, steps = (f"{len(x)} {name}{'s' * (len(x) != 1)}" for x, name in ((self.terms, "term"), (self.steps, "step")))
        return f"block ({self.i}, {self.j}): {terms}, written by {steps} of the plan"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        if not self.terms:
            yield "no primitive with a second derivative is moved by both: the block is zero"
            return
        rows = [
            (
                t.name,
                t.formula,
                _shape(t.left),
                _shape(t.curvature, t.groups),
                _shape(t.right),
                f"{t.operations:.3g}",
                str(t.bytes),
            )
            for t in self.terms
        ]
        headers = ("primitive", "term", "left", "curvature", "right", "multiplications", "bytes")
        yield table(headers, rows, title="as products of matrices", left=2, prose=("term",), drop=("bytes", "left", "right"))
        written = [(s.name, f"{s.multiplications:.3g}" if s.multiplications else "", gib(s.bytes)) for s in self.steps]
        yield table(("step", "multiplications", "bytes"), written, title="steps of the plan that write the block")
        paths = [(t.name, _path(self.i, t.left_path), _path(self.j, t.right_path)) for t in self.terms]
        yield Detail(table(("primitive", "left Jacobian by way of", "right Jacobian by way of"), paths, left=3))


def block_terms(
    trace: Trace, i: str, j: str, *, scale: float, slices: Mapping[str, slice], steps: Sequence[PlannedStep]
) -> BlockTerms:
    """Return the terms of a block.

    Args:
        trace: Of the loss.
        i: A parameter, or the end of its name if no other parameter's ends so.
        j: The same, for the columns.
        scale: What the loss is multiplied by.
        slices: Rows of each parameter.
        steps: Of a plan.

    Raises:
        InputError: A name is not known.
    """
    i, j = (_full_name(name, trace.parameters) for name in (i, j))
    made = {a.output: a.name for a in trace.applications} | {at: name for name, at in trace.parameters.items()}
    itemsize = trace.values[trace.output].element_size()
    terms = []
    for a, k, n in _contributing(trace, i, j):
        factors = [_jacobian(trace, made, name, a.inputs[at]) for name, at in ((i, k), (j, n))]
        sizes = [trace.values[a.inputs[at]].numel() for at in (k, n)]  # type: ignore[index]
        left, right = ((m, trace.values[trace.parameters[name]].numel()) for m, name in zip(sizes, (i, j), strict=True))
        order = f"D²{a.name}" if len(trace.gather(a)) == 1 else f"D{_index(k)}D{_index(n)} {a.name}"
        formula = f"{factors[0]}ᵀ [λ·{order}] {factors[1]}"
        left_path, right_path = (_between(trace, made, name, a.inputs[at]) for name, at in ((i, k), (j, n)))
        groups = _groups(trace, a, k, n)
        kind = type(a.primitive).__name__
        terms.append(
            BlockTerm(a.name, kind, (k, n), formula, left, (left[0], right[0]), right, groups, left_path, right_path, itemsize)
        )
    first, second = sorted((i, j), key=lambda name: slices[name].start)
    width = max(rows.stop for rows in slices.values())
    some = [s for s in steps if s.start is not None and _is_in(divmod(s.start, width), slices[first], slices[second])]
    return BlockTerms(i, j, tuple(terms), tuple(some), trace, scale)


def _contributing(trace: Trace, i: str, j: str) -> Iterator[tuple[Application, int, int]]:
    """Yield the applications and pairs of inputs that have a term, found by one random direction each."""
    moved_i, moved_j = (trace.descendants(trace.parameters[name]) for name in (i, j))
    random = torch.Generator().manual_seed(0)

    def direction(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=random, dtype=torch.float64).to(x)

    for a in ancestors_of_output(trace):
        if a.primitive.is_linear or not moved_i.intersection(a.inputs) or not moved_j.intersection(a.inputs):
            continue
        inputs, adjoint = trace.gather(a), direction(trace.values[a.output])
        for n, at in enumerate(a.inputs):
            if at not in moved_j:
                continue
            tangents = [direction(x).unsqueeze(0) if m == n else None for m, x in enumerate(inputs)]  # type: ignore[arg-type]
            with torch.no_grad():
                bent = a.primitive.curvature(inputs, adjoint, tangents)  # type: ignore[arg-type]
            for k, covector in enumerate(bent):
                if a.inputs[k] in moved_i and covector is not None and bool((covector != 0).any()):
                    yield a, k, n


def _pushed(trace: Trace, path: Sequence[Application], parameter: int) -> dict[int, Tensor]:
    """Return the tangents (size of the parameter, *shape) of all values that it moves."""
    x = trace.values[parameter]
    found = {parameter: torch.eye(x.numel(), dtype=x.dtype, device=x.device).reshape(-1, *x.shape)}
    for a in path:
        at = [None if v is None else found.get(v) for v in a.inputs]
        if any(t is not None for t in at):
            found[a.output] = a.primitive.jvp(trace.gather(a), at)  # type: ignore[arg-type]
    return found


def _between(trace: Trace, made: Mapping[int, str], parameter: str, value: int | None) -> tuple[str, ...]:
    """Return the names of the operations that lead from a parameter to a value, in order."""
    below, before = trace.descendants(trace.parameters[parameter]), {value}
    found = []
    for a in reversed(trace.applications):
        if a.output in before and a.output in below:
            before.update(a.inputs)
            found.append(made[a.output])
    return tuple(found[::-1])


def _groups(trace: Trace, a: Application, k: int, n: int) -> int:
    """Return how many groups of rows of the inputs the second derivative keeps apart."""
    inputs, moving = trace.gather(a), [at in (k, n) for at in range(len(a.inputs))]
    x = inputs[k]
    assert x is not None
    kept = (axes for axes in range(x.ndim - 1, 0, -1) if a.primitive.separable(inputs, axes, moving))  # type: ignore[arg-type]
    return x.shape[: next(kept, 0)].numel()


def _jacobian(trace: Trace, made: Mapping[int, str], parameter: str, value: int | None) -> str:
    short = short_names(trace.parameters)[parameter]
    return "I" if value == trace.parameters[parameter] else f"J[{made[value]}, {short}]"  # type: ignore[index]


def _full_name(name: str, parameters: Mapping[str, int]) -> str:
    if name in parameters:
        return name
    found = [full for full in parameters if full.endswith(f".{name}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"explain: {name!r} is the end of {len(found)} names: {', '.join(found)}; pass one of them")
    raise InputError(f"explain: the parameter {name!r} {not_known(name, parameters)}")


def _is_in(entry: tuple[int, int], rows: slice, columns: slice) -> bool:
    return rows.start <= entry[0] < rows.stop and columns.start <= entry[1] < columns.stop


def _index(k: int) -> str:
    return "₁₂₃₄₅₆₇₈₉"[k] if k < 9 else f"_{k + 1}"


def _shape(shape: tuple[int, int], groups: int = 1) -> str:
    m, n = shape
    return f"{m} x {n}" if groups == 1 else f"{groups} blocks of {m // groups} x {n // groups}"


def _path(parameter: str, path: tuple[str, ...]) -> str:
    shown = path if len(path) <= PATH else (*path[: PATH - 2], f"{len(path) - PATH + 1} more", path[-1])
    return " > ".join((parameter, *shown))
