"""The exact Hessian of a traced scalar as one sum over its primitives.

    H = sum over primitives v of   J_v^T  [ lambda_v . D^2 phi_v ]  J_v

:func:`adjoints` sweeps back for lambda_v. :class:`Sweep` goes forward with J_v, but not in as many columns as there are
parameters: every value that parameters enter, and every value in which many columns have come together, is a source of its
own, and what follows is differentiated by it alone. The result is curvature between sources, which
:mod:`hessiankit.engine.unwinding` takes back, source by source, to the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from derivations.fused_attention import ScaledDotProductAttention
from derivations.indexing import Select, Slice
from derivations.linear import Permute, Reshape
from derivations.primitive import Primitive
from hessiankit.engine.adjoints import adjoints
from hessiankit.engine.association import associate
from hessiankit.engine.columns import (
    EntrywiseTangents,
    Group,
    Selected,
    Source,
    StackedTangents,
    by_row,
    coarsen,
    compose,
    group_of,
    joined,
    starts,
)
from hessiankit.engine.footprint import footprint
from hessiankit.engine.lifts import GainLift, Lift, WeightLift, Whole
from hessiankit.engine.pairs import VertexBlocks
from hessiankit.engine.pushing import Point, contracted, pushed, square
from hessiankit.engine.sites import find_sites, is_product
from hessiankit.tracing.trace import Application, Trace

REARRANGING = (Permute, Reshape, Select, Slice)
FEW = 8  # entries of a sample for each parameter, below which it pays to keep track of the entries
Values: TypeAlias = "tuple[Any, ...]"  # of an application's inputs; None where an optional one is absent


class Sweep:
    """Curvature between the sources of a traced scalar.

    Args:
        trace: A trace whose output is a scalar.
        downstream_of: If given, only primitives fed by this value count: the Gauss-Newton part when it is the
            module's output.
        scale: What the scalar is multiplied by.
        look: Called before tensors are made, with about how many bytes the derivatives take at once by then.

    Attributes:
        sources: In the order in which they arise; a source's parents come before it.
        blocks: Curvature between them.
    """

    def __init__(
        self, trace: Trace, downstream_of: int | None = None, *, scale: float = 1.0, look: Callable[[int], None] | None = None
    ) -> None:
        associate(trace)
        self._look = look
        self.trace = trace
        self.dtype = next((trace.values[at].dtype for at in trace.parameters.values()), None)
        self.lambdas = adjoints(trace, scale)
        self.counted = None if downstream_of is None else self._descendants(downstream_of)
        self.sources: dict[int, Source] = {}
        self.blocks = VertexBlocks()
        self.stacks: dict[int, dict[int, StackedTangents]] = {}  # of every value that is still needed, by level
        self.sites = find_sites(trace)
        self._roots: dict[int, dict[int, Tensor]] = {}
        self._root_of: dict[int, int] = {}
        self._sizes: dict[int, dict[int, int]] = {}
        self._kept = 0
        self._next, self._next_root = 0, -1
        self.needed = self._needed()
        self._copies: dict[int, tuple[int, Tensor]] = {}  # values that select entries of a source: which one, and their positions
        self._take_whole_parameters()

    def run(self) -> None:
        """Sweep forward over all primitives."""
        last_use = {at: i for i, a in enumerate(self.trace.applications) for at in a.inputs if at is not None}
        for i, application in enumerate(self.trace.applications):
            if application.output in self.lambdas:
                self._visit(application)
            for at in {at for at in application.inputs if at is not None and last_use[at] == i}:
                self.stacks.pop(at, None)
        if self._look is not None:
            self._look(self.peak_bytes)

    # Sources

    def _new(self, source: Source, *, root: bool = False) -> int:
        """Number a source; parameters taken whole are numbered down, so that they come before all others."""
        if root:
            key, self._next_root = self._next_root, self._next_root - 1
        else:
            key, self._next = self._next, self._next + 1
        self.sources[key] = source
        return key

    def _needed(self) -> set[int]:
        """Return the values whose tangents something reads."""
        found: set[int] = set()
        for a in reversed(self.trace.applications):
            if a.output in self.lambdas and (a.output in found or a.output == self.trace.output or not a.primitive.is_linear):
                covered = self.sites[a.output].covered if a.output in self.sites else ()
                found |= {at for k, at in enumerate(a.inputs) if at is not None and k not in covered}
        return found

    def _take_whole_parameters(self) -> None:
        """Parameters that some application uses as they are, and not through a site."""
        for name, at in self.trace.parameters.items():
            if at in self.needed:
                value = self.trace.values[at]
                eye = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
                key = self._new(Source(torch.Size(), 0, value.numel(), [Whole(name, None, 0, value.numel())]), root=True)
                self.stacks[at] = {0: StackedTangents(eye, (key,), (value.numel(),))}

    def _source_at(self, at: int, axes: int, lifts: list[Lift], parents: dict[int, StackedTangents]) -> None:
        """Make a value a source; whatever moved it before becomes its parent."""
        value = self.trace.values[at]
        width = value.shape[axes:].numel()
        parents = {level: stack.by_rows(level) for level, stack in parents.items()}
        key = self._new(Source(value.shape, axes, width, lifts, parents))
        ones = torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
        self.stacks[at] = {axes: EntrywiseTangents(ones, key, axes, unit=True)}
        if axes > 0:
            self._copies[at] = (key, torch.arange(value.numel(), device=value.device).reshape(value.shape))

    def _descendants(self, value: int) -> set[int]:
        reached = {value}
        for application in self.trace.applications:
            if any(at in reached for at in application.inputs):
                reached.add(application.output)
        return reached - {value}

    # One primitive

    def _visit(self, a: Application) -> None:
        primitive, inputs = a.primitive, self.trace.gather(a)
        site = self.sites.get(a.output)
        covered = site.covered if site else ()
        moved = [None if at is None or k in covered or at not in self.stacks else at for k, at in enumerate(a.inputs)]
        last = a.output == self.trace.output
        counts = self.counted is None or a.output in self.counted
        if isinstance(primitive, REARRANGING) and self._rearrange(a, inputs, moved[0]):
            return
        self._join(primitive, inputs, moved)
        groups = self._groups(moved)
        if not last:
            groups = [part for g in groups for part in self._settle(primitive, inputs, moved, g)]
        bends, pushes = counts and not primitive.is_linear and bool(groups), not last and a.output in self.needed
        self._foresee(primitive, inputs, groups, self.trace.values[a.output])
        point = Point(primitive, inputs, self.lambdas[a.output] if bends else None, [at is not None for at in moved])
        if bends:
            self._bend(point, groups)
            if site is not None and site.turning is not None:
                self._mix(a, inputs, groups, site.turning)
        if not pushes:
            return
        levels = sorted({g.level for g in groups}, reverse=True)
        out = {level: joined([pushed(point, g) for g in groups if g.level == level]) for level in levels}
        self._note(out)
        if site is not None and site.lifts:
            self._source_at(a.output, self.trace.values[a.output].ndim - 1, site.lifts, out)
        elif out:
            self.stacks[a.output] = out

    def _groups(self, moved: Sequence[int | None]) -> list[Group]:
        found: list[Group] = []
        by_input = [{} if at is None else self.stacks[at] for at in moved]
        for level in sorted({level for stacks in by_input for level in stacks}, reverse=True):
            patterns: dict[tuple[bool, ...], list[int]] = defaultdict(list)
            here = [stacks.get(level) for stacks in by_input]
            for s in sorted({s for stack in here if stack for s in stack.sources}):
                patterns[tuple(stack is not None and s in stack.sources for stack in here)].append(s)
            for pattern, sources in patterns.items():
                stacks = [stack if moves else None for stack, moves in zip(here, pattern, strict=True)]
                widths = tuple(self.sources[s].columns(level) for s in sources)
                found.append(Group(level, tuple(sources), widths, stacks))
        return found

    # Levels

    def _join(self, primitive: Primitive, inputs: Values, moved: Sequence[int | None]) -> None:
        """Make an input a source where it is moved by more columns than it has entries in a row, and rows matter next."""
        for k, at in enumerate(moved):
            if at is None or not self._is_work(primitive):
                continue
            value = self.trace.values[at]
            axes = value.ndim - 1
            alone = [j == k for j in range(len(moved))]
            if axes < 1 or sum(sum(stack.widths) for stack in self.stacks[at].values()) <= value.shape[-1]:
                continue
            if primitive.rowwise(inputs, axes, alone) or primitive.separable(inputs, axes, alone):
                self._source_at(at, axes, [], self.stacks[at])

    def _rearrange(self, a: Application, inputs: Values, at: int | None) -> bool:
        """Make entries of a source in another order a source of their own, where the order does not keep rows apart."""
        primitive = a.primitive
        if at is None or a.output in self.sites or a.output not in self.needed or not primitive.rowwise(inputs, 1, [True]):
            return False
        stacks, value = self.stacks[at], self.trace.values[a.output]
        apart = all(primitive.rowwise(inputs, level, [True]) for level in stacks)
        whole = sum({r: n for stack in stacks.values() for s in stack.sources for r, n in self._root_sizes(s).items()}.values())
        few = self.trace.values[at].shape[1:].numel() < FEW * whole
        if at not in self._copies and not apart and few and 0 not in stacks:
            self._source_at(at, max(stacks), [], stacks)
        if at not in self._copies:
            return False
        s, positions = self._copies[at]
        positions = primitive.value(positions)
        if not apart and few:
            self._source_at(a.output, value.ndim - 1, [], {1: Selected(value, s, self.sources[s].columns(1), positions)})
        self._copies[a.output] = (s, positions)
        return not apart and few

    @staticmethod
    def _is_work(primitive: Primitive) -> bool:
        return is_product(primitive) or not primitive.is_linear

    def _settle(self, primitive: Primitive, inputs: Values, moved: Sequence[int | None], g: Group) -> list[Group]:
        """Return a group at the finest level at which an application keeps its rows apart."""
        if g.level == 0 or primitive.rowwise(inputs, g.level, g.moving):
            return [g]
        lower = next((k for k in range(g.level - 1, 0, -1) if primitive.rowwise(inputs, k, g.moving)), 0)
        sampled = sum(self.sources[s].columns(lower) for s in g.sources)
        inner = [k for k, moves in enumerate(g.moving) if moves]
        own = min((self.trace.values[moved[k]].shape[lower:].numel() for k in inner), default=sampled)  # type: ignore[index]
        whole = sum({r: n for s in g.sources for r, n in self._root_sizes(s).items()}.values())
        if lower and min(sampled, own) < whole:
            if len(inner) == 1 and own < sampled:  # as many columns as the input has entries
                at = moved[inner[0]]
                assert at is not None
                if all(level >= g.level for level in self.stacks[at]):
                    stacks = self.stacks[at]
                    if sum(map(len, (s.sources for s in stacks.values()))) == len(g.sources):
                        self._source_at(at, g.level, [], stacks)
                        g = self._groups([at if k == inner[0] else None for k in range(len(moved))])[0]
            widths = tuple(self.sources[s].columns(lower) for s in g.sources)
            self._expect(sum(widths) * _moved(inputs, g))
            tangents = [
                None if t is None else torch.cat([coarsen(t[cut], g.level, lower) for cut in starts(g.widths)])
                for t in g.tangents
            ]
            return [group_of(lower, g.sources, widths, tangents)]
        return [self._to_roots(inputs, g)]

    def _to_roots(self, inputs: Values, g: Group) -> Group:
        size = _moved(inputs, g)
        self._expect(sum(sum(self._root_sizes(s).values()) * (self.sources[s].entries + size) for s in g.sources))
        tangents: list[dict[int, Tensor]] = []
        for t in g.tangents:
            total: dict[int, Tensor] = {}
            for s, cut in zip(g.sources, starts(g.widths), strict=True):
                if t is None:
                    continue
                for root, moved in self._through(s, t[cut], g.level).items():
                    total[root] = total[root] + moved if root in total else moved
            tangents.append(total)
        roots = tuple(sorted({r for total in tangents for r in total}))
        widths = tuple(self.sources[r].width for r in roots)
        return group_of(0, roots, widths, [torch.cat([total[r] for r in roots]) if total else None for total in tangents])

    def _root_sizes(self, s: int) -> dict[int, int]:
        """Return the sizes of the sets of parameters that reach a source, by a key of each."""
        if s not in self._sizes:
            source = self.sources[s]
            sizes = {s: source.width if source.axes == 0 else sum(lift.size for lift in source.lifts)}
            for stack in source.parents.values():
                for parent in stack.sources:
                    sizes |= self._root_sizes(parent)
            self._sizes[s] = {self._root_of.get(key, key): n for key, n in sizes.items()}
        return self._sizes[s]

    def _by_roots(self, s: int) -> dict[int, Tensor]:
        """Return the derivative of a source's value by parameters taken whole: (P, *shape) by their source."""
        if s in self._roots:
            return self._roots[s]
        source, total = self.sources[s], {}
        if source.lifts:
            rows = source.shape[: source.axes].numel()
            seed = torch.eye(source.width, dtype=self.dtype, device=self._device).unsqueeze(1).expand(-1, rows, -1)
            J = torch.cat([lift.expand(seed) for lift in source.lifts]).reshape(-1, *source.shape)
            cuts = starts([lift.size for lift in source.lifts])
            lifts: list[Lift] = [Whole(u.parameter, u.at, cut.start, u.size) for u, cut in zip(source.lifts, cuts, strict=True)]
            self._root_of[s] = self._new(Source(torch.Size(), 0, J.shape[0], lifts), root=True)
            total[self._root_of[s]] = J
        for level, stack in source.parents.items():
            for parent, cut in zip(stack.sources, starts(stack.widths), strict=True):
                whole = self.sources[parent].axes == 0
                found = {parent: stack.data[cut]} if whole else self._through(parent, stack.data[cut], level)
                for r, J in found.items():
                    total[r] = total[r] + J if r in total else J
        self._roots[s] = total
        return total

    def _through(self, s: int, t: Tensor, level: int) -> dict[int, Tensor]:
        return {r: compose(J, 0, t, level) for r, J in self._by_roots(s).items()}

    @property
    def _device(self) -> torch.device:
        return self.trace.values[self.trace.output].device

    # Curvature

    def _bend(self, point: Point, groups: list[Group]) -> None:
        """Add the curvature of one application between all groups that move it."""
        primitive = point.primitive
        if is_product(primitive) and sum(map(any, zip(*(g.moving for g in groups), strict=True))) <= 1:
            return
        if len(groups) == 1 and (K := square(point, groups[0])) is not None:
            (s,), level = groups[0].sources, groups[0].level
            if K.ndim == 3:
                self.blocks.add(s, s, level, K)
            elif K.numel():
                self.blocks.add_diagonal(s, s, level, K)
            return
        groups = self._separate(primitive, point.inputs, groups)
        for n, coarse in enumerate(groups):
            covectors = point.linearised.pull(None, coarse.tangents)
            for fine in groups[: n + 1]:
                total: Tensor | None = None
                for k, w in enumerate(covectors):
                    if fine.moving[k] and w is not None:
                        part = contracted(fine, k, by_row(w, fine.level))
                        total = part if total is None else total + part
                if total is not None:
                    self._add_groups(fine, coarse, total)

    def _separate(self, primitive: Primitive, inputs: Values, groups: list[Group]) -> list[Group]:
        """Bring to the level of parameters what the second derivative couples across rows; finest first."""
        result: list[Group] = []
        for level in sorted({g.level for g in groups}, reverse=True):
            here = [g for g in groups if g.level == level]
            together = [any(g.moving[k] for g in here) for k in range(len(inputs))]
            apart = level == 0 or primitive.separable(inputs, level, together)
            result += here if apart else [self._to_roots(inputs, g) for g in here]
        return sorted(result, key=lambda g: -g.level)

    def _add_groups(self, fine: Group, coarse: Group, block: Tensor) -> None:
        """Add a block (rows of the finer level, its columns, the columns of the coarser) source by source."""
        level = coarse.level
        rows, _, width = block.shape
        groups = 1 if level == 0 else self._rows(coarse)
        split = block.reshape(groups, rows // groups, -1, width)
        columns = list(zip(coarse.sources, starts(coarse.widths), strict=True))
        for i, (s, mine) in enumerate(zip(fine.sources, starts(fine.widths), strict=True)):
            for j, (r, theirs) in enumerate(columns):
                if fine is coarse and j > i:
                    continue
                part = split[:, :, mine, theirs].reshape(groups, -1, theirs.stop - theirs.start)
                if fine is coarse:
                    self.blocks.add(s, r, level, part)
                else:
                    self.blocks.add_half(s, r, level, part)

    def _rows(self, g: Group) -> int:
        return self.sources[g.sources[0]].rows(g.level)

    def _mix(self, a: Application, inputs: Values, groups: list[Group], turning: Lift) -> None:
        """Add the mixed term between a site's own weight or gain and what moves the rows that it multiplies.

        d<lambda, x W> = <lambda dW^T, dx>: the weight sees dx through a lift whose rows are those of lambda.
        """
        x = inputs[0]
        assert x is not None
        adjoint = self.lambdas[a.output]
        rows = adjoint.reshape(-1, adjoint.shape[-1])
        if isinstance(turning, WeightLift):
            shape = x.shape
            lift: Lift = WeightLift(turning.parameter, turning.at, rows, x.shape[-1], not turning.turned)
        else:
            assert isinstance(turning, GainLift)
            shape = self.trace.values[a.output].shape
            lift = GainLift(turning.parameter, turning.at, rows)
        mirror: int | None = None
        for g in groups:
            if not g.moving[0]:
                continue
            if mirror is None:
                mirror = self._new(Source(shape, len(shape) - 1, shape[-1], [lift], twins=[turning]))
            if isinstance(turning, GainLift):
                absent = [None] * (len(inputs) - 1)
                t: Tensor = a.primitive.jvp((x, *absent), (g.tangents[0], *absent))  # type: ignore[arg-type]
            elif g.entrywise is not None and g.level == len(shape) - 1:
                self.blocks.add_diagonal(mirror, g.sources[0], g.level, g.entrywise.rows.contiguous())
                continue
            else:
                t = g.tangents[0]  # type: ignore[assignment]
            for s, cut in zip(g.sources, starts(g.widths), strict=True):
                self.blocks.add(mirror, s, g.level, by_row(t[cut], g.level).contiguous().mT)

    def _note(self, stacks: dict[int, StackedTangents]) -> None:
        """Count the memory that is kept until the end."""
        self._kept += sum(stack.bytes for stack in stacks.values())

    def _foresee(self, primitive: Primitive, inputs: Values, groups: Sequence[Group], out: Tensor) -> None:
        """Tell ``look`` what one application takes: tangents, covectors, and curvature between all groups."""
        if self._look is None:
            return
        scratch = out.numel()  # and the weights of fused attention, of which a CPU holds a few directions only
        if isinstance(primitive, ScaledDotProductAttention) and out.device.type != "cpu":
            scratch += 4 * inputs[0].shape[:-1].numel() * inputs[1].shape[-2]
        taken = entries = 0
        for g in groups:
            entries += sum(self.sources[s].entries for s in g.sources)
            taken += sum(g.widths) * (_moved(inputs, g) + scratch + entries)
        self._expect(taken)

    def _expect(self, entries: int) -> None:
        if self._look is not None:
            self._look(self._kept + entries * self._itemsize)

    @property
    def _itemsize(self) -> int:
        return 8 if self.dtype is None else self.dtype.itemsize

    @cached_property
    def peak_bytes(self) -> int:
        """Memory that derivatives take at once until the sources are unwound, the matrix not counted; once it has run."""
        return self._kept + self._itemsize * footprint(self.blocks, self.sources)


def _moved(inputs: Values, g: Group) -> int:
    """Return the number of entries of the inputs that a group moves."""
    return sum(x.numel() for x, moves in zip(inputs, g.moving, strict=True) if moves)
