"""Paths through a trace: its linearised steps on the way to the loss, and its places.

A *place* is a value that parameters enter row by row: z = X W + b with the Jacobian E = X^T (x) I in W, an embedded token, the
output of a norm with its gain, or a parameter taken whole. What a place moves is a path of steps; the *level* of a path is how
many leading axes of its values index rows that it keeps apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hessiankit.engine.entrywise_fusion import Step
from hessiankit.engine.jacobians import (
    GainJacobian,
    IdentityJacobian,
    IndexJacobian,
    ParameterJacobian,
    WeightJacobian,
    find_sites,
)
from hessiankit.primitives.primitive import Linearised
from hessiankit.tracing.reassociation import reassociate
from hessiankit.tracing.trace import Application, Trace


@dataclass(frozen=True, eq=False)
class Place:
    """A value that parameters enter.

    Attributes:
        order: Number of the place, from the first to the last.
        at: Id of the value.
        shape: Shape of the value.
        jacobians: Jacobians with respect to the parameters, by rows (R, w).
        mixed: Jacobian with respect to W of <adjoint, x W> as a function of x, for a product x W: curvature between W and x.
        plain: Linearised norm without its gain, for a gain: the derivative of the rows that the gain multiplies.
    """

    order: int
    at: int
    shape: torch.Size
    jacobians: list[ParameterJacobian] = field(default_factory=list)
    mixed: ParameterJacobian | None = None
    plain: Linearised | None = None

    @cached_property
    def is_whole(self) -> bool:
        """Whether the value is a parameter, or has no rows."""
        return len(self.shape) < 2 or any(isinstance(u, IdentityJacobian) for u in self.jacobians)

    @cached_property
    def axes(self) -> int:
        """Number of axes that index rows."""
        return 0 if self.is_whole else len(self.shape) - 1

    @cached_property
    def width(self) -> int:
        """Entries of a row."""
        return self.shape[self.axes :].numel()

    @cached_property
    def size(self) -> int:
        """Entries of the parameters that enter."""
        return sum(u.size for u in self.jacobians)

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return self.shape[: self.axes].numel()

    def arriving(self, bar: Tensor, groups: int, *, mixed: bool) -> list[tuple[ParameterJacobian, Tensor]]:
        """Return the Jacobians that pull covectors (S, ...) back to parameters, each with its covectors as (S, G, rows, w)."""
        if mixed:
            assert self.mixed is not None
            width = self.mixed.width if isinstance(self.mixed, WeightJacobian) else self.width
            return [(self.mixed, bar.reshape(len(bar), groups, -1, width))]
        if self.is_whole and groups > 1:  # rows of the parameter, each of one group: its other entries do not reach the others
            bar = torch.diag_embed(bar.reshape(len(bar), groups, -1).mT, dim1=1, dim2=2)
        return [(u, bar.reshape(len(bar), groups, -1, self.width)) for u in self.jacobians]


class DirectionCost(NamedTuple):
    """The cost of one direction on a path, or at one step.

    Attributes:
        tangent_numbers: Numbers of its tangents.
        numbers: Numbers of its tangents, or of the covectors pulled where they are more.
        multiplications: Multiply-adds of pushing it, of its curvature and of pulling it.
        diagonal: Multiply-adds of pushing it and of its curvature.
        product: Multiply-adds of one product of each step.
        calls: Calls of torch, besides those that all directions share.
    """

    tangent_numbers: int
    numbers: int
    multiplications: float
    diagonal: float
    product: float
    calls: int


class Paths:
    """The steps of a trace whose output is a scalar, and its places.

    Args:
        trace: Trace, which is rewritten so that rows stay apart.
        loss_side: Values whose primitives bend, for the Gauss-Newton part; None: all.
        scale: Factor of the loss.
        by_column: Whether parameters that enter several places, or an entry of which reaches several columns, are places of their
            own: so that each entry reaches one column.

    Attributes:
        adjoints: lambda_v of every value on the way to the loss, by id.
        steps: Steps in order; of each the inputs that move other than by a place's own parameters.
        places: Places in order.
    """

    def __init__(self, trace: Trace, loss_side: set[int] | None = None, scale: float = 1.0, *, by_column: bool = False) -> None:
        reassociate(trace)
        self.trace, self.output = trace, trace.output
        self._loss_side = loss_side
        self._linearised: dict[int, Linearised] = {}  # what moves, with its second derivative, until the steps are made
        self.adjoints = trace.adjoints(scale, linearise=self._linearise)
        self._sites = find_sites(trace)
        self._applications = {a.output: a for a in trace.applications if a.output in self.adjoints}
        self._live_values = self._values_that_are_read()
        if by_column and (names := self._not_by_column()):
            parameters = {name: at for name, at in trace.parameters.items() if name not in names}
            self._sites = find_sites(replace(trace, parameters=parameters))
            self._live_values = self._values_that_are_read()
        self.steps = [step for a in self._applications.values() if (step := self._step(a)) is not None]
        self._linearised.clear()
        self.places = self._places()
        self.by_value = {place.at: place for place in self.places}
        self._rowwise: dict[tuple[object, ...], bool] = {}
        self._work: dict[tuple[object, ...], DirectionCost] = {}

    @property
    def device(self) -> torch.device:
        """The device of all values."""
        return self.value(self.output).device

    def value(self, at: int) -> Tensor:
        """Return a value by its id."""
        return self.trace.values[at]

    def reach(self, values: Iterable[int], steps: Sequence[Step] | None = None) -> list[Step]:
        """Return the steps that depend on some values, with their inputs that do."""
        reach = Reach(self, self.steps if steps is None else steps)
        for at in values:
            reach.add(at)
        return reach.path

    def level(self, at: int, path: Sequence[Step]) -> int:
        """Return the finest level at which a path from a value keeps rows apart."""
        return self.level_below(self.value(at).ndim - 1, path)

    def level_below(self, level: int, path: Sequence[Step]) -> int:
        """Return the finest level, at most ``level``, at which some steps keep rows apart."""
        return next((k for k in range(level, 0, -1) if all(self.keeps_apart(step, k) for step in path)), 0)

    def work(self, path: Sequence[Step], columns_of: int | None = None) -> DirectionCost:
        """Return the cost of one direction on a path.

        Args:
            path: Steps.
            columns_of: A value at which each direction moves one column, so that its first product only reads rows of a
                matrix.
        """
        works = [self._work.get((step.output, step.inputs)) or self.step_work(step) for step in path]
        saved, columns = 0.0, {columns_of}
        for step, work in zip(path, works, strict=True) if columns_of is not None else ():
            if len(step.inputs) - step.inputs.count(None) == 1 and not columns.isdisjoint(step.inputs):
                saved += work.product
                if step.primitive.factor is not None:
                    columns.add(step.output)
        tangents, numbers, multiplications, diagonal, products, calls = map(sum, zip(*works, strict=True)) if works else (0,) * 6
        return DirectionCost(tangents, numbers, multiplications - saved, diagonal - saved, products, calls)

    def step_work(self, step: Step) -> DirectionCost:
        """Return the cost of one direction at a step."""
        key = (step.output, step.inputs)
        if key not in self._work:
            a, moving_inputs = self._applications[step.output], [at for at in step.inputs if at is not None]
            value, inputs = self.value(step.output), len(moving_inputs)
            tangent_numbers, covector_numbers = value.numel(), sum(self.value(at).numel() for at in moving_inputs)
            if a.primitive.selects and tangent_numbers == covector_numbers:  # the same numbers, read in another shape or order
                tangent_numbers = covector_numbers = 0
            product = a.primitive.multiplications(self.trace.gather(a), value)  # type: ignore[arg-type]
            diagonal = (inputs + 2 * (inputs - 1)) * product
            numbers, calls = max(tangent_numbers, covector_numbers), 2 * (a.primitive.calls - 1)
            self._work[key] = DirectionCost(tangent_numbers, numbers, diagonal + inputs * product, diagonal, product, calls)
        return self._work[key]

    @cached_property
    def tied(self) -> set[str]:
        """The parameters that enter several places, or one place more than once."""
        uses = Counter(u.parameter for place in self.places for u in place.jacobians)
        return {name for name, n in uses.items() if n > 1}

    def keeps_apart(self, step: Step, level: int) -> bool:
        """Tell whether a step keeps rows apart that some leading axes of its values index."""
        moves = [at is not None for at in step.inputs]
        key = (step.output, level, *moves)
        if key not in self._rowwise:
            a = self._applications[step.output]
            test = a.primitive.separable if a.output == self.output else a.primitive.rowwise
            self._rowwise[key] = test(self.trace.gather(a), level, moves)  # type: ignore[arg-type]
        return self._rowwise[key]

    def _covered(self, a: Application) -> tuple[int, ...]:
        return self._sites[a.output].covered if a.output in self._sites else ()

    def _bends(self, a: Application) -> bool:
        return not a.primitive.is_linear and (self._loss_side is None or a.output in self._loss_side)

    def _values_that_are_read(self) -> set[int]:
        """Return the values whose tangents a second derivative reads, at once or by way of others."""
        read: set[int] = set()
        for a in reversed(self._applications.values()):
            if a.output in read or a.output == self.output or self._bends(a):
                covered = self._covered(a)
                read |= {at for k, at in enumerate(a.inputs) if at is not None and k not in covered}
        return read

    def _not_by_column(self) -> set[str]:
        """Return the parameters that enter in several ways, or an entry of which reaches several columns."""
        names = {name for name, at in self.trace.parameters.items() if at in self._live_values}
        jacobians = [u for at, site in self._sites.items() if at in self.adjoints for u in site.jacobians]
        return names | {u.parameter for n, u in enumerate(jacobians) if not u.reaches_one_column() or _meet(u, jacobians[:n])}

    def _step(self, a: Application) -> Step | None:
        covered = self._covered(a)
        inputs = tuple(at if at in self.trace.moving and k not in covered else None for k, at in enumerate(a.inputs))
        moves = [at is not None for at in inputs]
        if not any(moves) or not (a.output in self._live_values or a.output == self.output):
            return None
        if inputs != self.trace.moving_inputs(a):
            self._linearise(a, self.adjoints[a.output], moves)
        return Step(self._linearised[a.output], inputs, a.output)

    def _linearise(self, a: Application, adjoint: Tensor, moves: Sequence[bool]) -> Linearised:
        """Linearise an application with respect to some inputs."""
        self._linearised[a.output] = a.primitive.linearise(
            self.trace.gather(a),  # type: ignore[arg-type]
            adjoint if self._bends(a) else None,
            moves,
        )
        return self._linearised[a.output]

    def _places(self) -> list[Place]:
        trace, places = self.trace, list[Place]()
        for name, at in trace.parameters.items():
            if at in self._live_values:
                size = self.value(at).numel()
                places.append(Place(len(places), at, self.value(at).shape, [IdentityJacobian(name, None, 0, size)]))
        for a in self._applications.values():
            site = self._sites.get(a.output)
            if site is None or not site.jacobians or a.output not in self._live_values:
                continue
            jacobians = [self._as_weight(u, a.output) for u in site.jacobians]
            mixed, plain = self._mixed(a, site.weight_jacobian)
            places.append(Place(len(places), a.output, self.value(a.output).shape, jacobians, mixed, plain))
        return places

    def _mixed(self, a: Application, weight: ParameterJacobian | None) -> tuple[ParameterJacobian | None, Linearised | None]:
        """Return the Jacobian of <adjoint, x W> by weight as a function of x, and for a gain the norm without it."""
        if weight is None or not self._bends(a) or a.inputs[0] not in self.trace.moving:
            return None, None
        x, adjoint = self.value(a.inputs[0]), self.adjoints[a.output].reshape(-1, self.value(a.output).shape[-1])
        if isinstance(weight, WeightJacobian):
            transpose = WeightJacobian(weight.parameter, weight.at, adjoint, x.shape[-1], not weight.transposed)
            return self._as_weight(transpose, a.output), None
        constants = [None] * (len(a.inputs) - 1)
        plain = a.primitive.linearise((x, *constants), None, [True, *[False] * len(constants)])  # type: ignore[arg-type]
        return GainJacobian(weight.parameter, weight.at, adjoint), plain

    def _as_weight(self, u: ParameterJacobian, at: int) -> ParameterJacobian:
        """Return the Jacobian with respect to a whole weight, if there is one: a table's row is a unit vector times it."""
        like, size = self.value(at), self.value(self.trace.parameters[u.parameter]).numel()
        if isinstance(u, WeightJacobian) and u.at is not None and u.size == size:
            shape = (u.X.shape[1], u.width) if u.transposed else (u.width, u.X.shape[1])
            positions = torch.arange(size, device=u.at.device)
            if torch.equal(u.at.reshape(-1), positions.reshape(shape).T.reshape(-1)):  # the whole weight, transposed
                return replace(u, at=None, transposed=not u.transposed)
        if not isinstance(u, IndexJacobian):
            return u
        assert u.at is not None
        entries, width = u.at.reshape(-1)[u.index], u.index.shape[1]
        columns = torch.arange(width, device=entries.device)
        for transposed, token in ((False, entries[:, :1] // width), (True, entries[:, :1])):
            row = columns * (size // width) + token if transposed else token * width + columns
            if size % width or not torch.equal(entries, row):
                continue
            tokens, index = torch.unique(token.reshape(-1), return_inverse=True)
            if size // width <= 4 * len(tokens):  # most of the table
                X = torch.nn.functional.one_hot(token.reshape(-1), size // width).to(like)
                return WeightJacobian(u.parameter, None, X, width, transposed)
            if len(tokens) <= 512:
                return WeightJacobian(
                    u.parameter, u.at, torch.nn.functional.one_hot(index, len(tokens)).to(like), width, transposed
                )
        return u


class Reach:
    """The steps that depend on some values, updated as values are added, and the cost of one direction on them.

    Where more inputs of a step move, it keeps no more rows apart.

    Args:
        paths: All ways through the trace.
        steps: Steps that count, in order.
        is_diagonal: Whether directions are pushed alone.
    """

    def __init__(self, paths: Paths, steps: Sequence[Step], *, is_diagonal: bool = False) -> None:
        self._paths, self._steps, self._is_diagonal = paths, steps, is_diagonal
        self._readers: dict[int, list[int]] = {}
        for n, step in enumerate(steps):
            for at in step.inputs:
                if at is not None:
                    self._readers.setdefault(at, []).append(n)
        self.clear()

    def clear(self) -> None:
        """Remove all values."""
        self._moving_values: set[int | None] = {None}  # None stands for an input that never moves
        self._path_steps: dict[int, Step] = {}
        self._levels = list(range(1, 1 + max((self._paths.value(step.output).ndim for step in self._steps), default=0)))
        self.numbers = 0

    def add(self, value: int) -> None:
        """Add a value and the steps that depend on it."""
        queue = [value]
        while queue:
            at = queue.pop()
            readers = () if at in self._moving_values else self._readers.get(at, ())
            self._moving_values.add(at)
            for n in readers:
                step, old_step = self._steps[n], self._path_steps.get(n)
                if not self._moving_values.issuperset(step.inputs):
                    step = replace(step, inputs=tuple(k if k in self._moving_values else None for k in step.inputs))
                self._path_steps[n] = step
                self.numbers += self._numbers(step) - (0 if old_step is None else self._numbers(old_step))
                self._levels = [k for k in self._levels if self._paths.keeps_apart(step, k)]
                queue.append(step.output)

    @property
    def path(self) -> list[Step]:
        """The steps in order, with the inputs that depend on the values."""
        return [self._path_steps[n] for n in sorted(self._path_steps)]

    def level(self, at: int) -> int:
        """Return the finest level at which the path keeps the rows of a value apart."""
        return max((k for k in self._levels if k < self._paths.value(at).ndim), default=0)

    def _numbers(self, step: Step) -> int:
        work = self._paths.step_work(step)
        return work.tangent_numbers if self._is_diagonal else work.numbers


def _meet(u: ParameterJacobian, jacobians: Sequence[ParameterJacobian]) -> bool:
    """Tell whether an entry of a parameter enters another place too."""
    return any(
        u.at is None or v.at is None or bool(torch.isin(u.at, v.at).any()) for v in jacobians if v.parameter == u.parameter
    )
