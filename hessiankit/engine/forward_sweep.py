"""Forward sweep: tangents between vertices, and the curvature that each primitive contributes between them.

For primitive v, with the Jacobian J_vt of its inputs by vertex t at rest from the vertices before t,

    K_tr += J_vt^T [lambda_v . D^2 phi_v] J_vr          (R, columns of t, columns of r).

A tangent has as many columns as a vertex has entries in a row, and not as many as there are parameters: values that parameters
enter become vertices, and so does a value that is moved by more columns than it has entries in a row (preaccumulation). Then
:mod:`hessiankit.engine.reverse_accumulation` takes K from the last vertex back to the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from derivations.fused_attention import ScaledDotProductAttention
from derivations.indexing import Select, Slice
from derivations.linear import Permute, Reshape
from derivations.primitive import Primitive
from hessiankit.engine.jacobians import GainJacobian, IdentityJacobian, ParameterJacobian, WeightJacobian, find_sites, is_product
from hessiankit.engine.reassociation import reassociate
from hessiankit.engine.tangents import (
    EntrywiseTangents,
    LazyLinearisation,
    SelectedTangents,
    StackedTangents,
    TangentGroup,
    Vertex,
    by_row,
    coarsen,
    compose,
    contract,
    joined,
    push_forward,
    starts,
    structured_curvature,
    tangent_group,
)
from hessiankit.engine.vertex_blocks import VertexBlocks, peak_entries
from hessiankit.tracing.trace import Application, Trace

REARRANGING = (Permute, Reshape, Select, Slice)
FEW = 8  # entries of a sample for each parameter entry, below which rearranged entries are tracked
Values: TypeAlias = "tuple[Any, ...]"  # of an application's inputs; None where an optional one is absent


class ForwardSweep:
    """Tangents between the vertices of a traced scalar, and curvature between them.

    Args:
        trace: A trace whose output is a scalar.
        downstream_of: If given, only primitives after this value contribute: the Gauss-Newton part, if it is the module's output.
        scale: What the scalar is multiplied by.
        on_memory: Called before tensors are made, with about how many bytes the derivatives take at once by then.

    Attributes:
        vertices: By number; a vertex's parents have smaller numbers.
        blocks: Curvature between them.
        adjoints: lambda_v of every value on the way to the output, by id.
    """

    def __init__(
        self,
        trace: Trace,
        downstream_of: int | None = None,
        *,
        scale: float = 1.0,
        on_memory: Callable[[int], None] | None = None,
    ) -> None:
        reassociate(trace)
        self._on_memory = on_memory
        self.trace = trace
        self.dtype = next((trace.values[at].dtype for at in trace.parameters.values()), None)
        self.adjoints = trace.adjoints(scale)
        self.included = None if downstream_of is None else trace.descendants(downstream_of) - {downstream_of}
        self.vertices: dict[int, Vertex] = {}
        self.blocks = VertexBlocks()
        self.tangents: dict[int, dict[int, StackedTangents]] = {}  # of the values that are read later, by level
        self.sites = find_sites(trace)
        self._jacobians: dict[int, dict[int, Tensor]] = {}
        self._dense_vertex: dict[int, int] = {}
        self._sizes: dict[int, dict[int, int]] = {}
        self._kept = 0
        self._next, self._next_root = 0, -1
        self.needed = self._needed()
        self._copies: dict[int, tuple[int, Tensor]] = {}  # values made of entries of a vertex: its number, and their positions
        self._add_parameter_vertices()

    def run(self) -> None:
        """Sweep forward over all primitives."""
        last_use = {at: i for i, a in enumerate(self.trace.applications) for at in a.inputs if at is not None}
        for i, application in enumerate(self.trace.applications):
            if application.output in self.adjoints:
                self._visit(application)
            for at in {at for at in application.inputs if at is not None and last_use[at] == i}:
                self.tangents.pop(at, None)
        if self._on_memory is not None:
            self._on_memory(self.peak_bytes)

    # Vertices

    def _new(self, vertex: Vertex, *, root: bool = False) -> int:
        """Number a vertex; parameters taken whole are numbered downwards, so that they come before all others."""
        if root:
            key, self._next_root = self._next_root, self._next_root - 1
        else:
            key, self._next = self._next, self._next + 1
        self.vertices[key] = vertex
        return key

    def _needed(self) -> set[int]:
        """Return the values whose tangents are read."""
        found: set[int] = set()
        for a in reversed(self.trace.applications):
            if a.output in self.adjoints and (a.output in found or a.output == self.trace.output or not a.primitive.is_linear):
                covered = self.sites[a.output].covered if a.output in self.sites else ()
                found |= {at for k, at in enumerate(a.inputs) if at is not None and k not in covered}
        return found

    def _add_parameter_vertices(self) -> None:
        """Make vertices of the parameters that some application reads as they are, other than through a site."""
        for name, at in self.trace.parameters.items():
            if at in self.needed:
                value = self.trace.values[at]
                eye = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
                key = self._new(
                    Vertex(torch.Size(), 0, value.numel(), [IdentityJacobian(name, None, 0, value.numel())]), root=True
                )
                self.tangents[at] = {0: StackedTangents(eye, (key,), (value.numel(),))}

    def _make_vertex(self, at: int, axes: int, jacobians: list[ParameterJacobian], parents: dict[int, StackedTangents]) -> None:
        """Make a value a vertex; its tangents become those by its parents."""
        value = self.trace.values[at]
        width = value.shape[axes:].numel()
        key = self._new(Vertex(value.shape, axes, width, jacobians, parents))
        ones = torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape)
        self.tangents[at] = {axes: EntrywiseTangents(ones, key, axes, identity=True)}
        if axes > 0:
            self._copies[at] = (key, torch.arange(value.numel(), device=value.device).reshape(value.shape))

    # One primitive

    def _visit(self, a: Application) -> None:
        primitive, inputs = a.primitive, self.trace.gather(a)
        site = self.sites.get(a.output)
        covered = site.covered if site else ()
        moved = [None if at is None or k in covered or at not in self.tangents else at for k, at in enumerate(a.inputs)]
        last = a.output == self.trace.output
        counts = self.included is None or a.output in self.included
        if isinstance(primitive, REARRANGING) and self._track_entries(a, inputs, moved[0]):
            return
        self._preaccumulate(primitive, inputs, moved)
        groups = self._groups(moved)
        if not last:
            groups = [part for g in groups for part in self._at_rowwise_level(primitive, inputs, moved, g)]
        nonlinear, pushes = counts and not primitive.is_linear and bool(groups), not last and a.output in self.needed
        self._announce(primitive, inputs, groups, self.trace.values[a.output])
        adjoint = self.adjoints[a.output] if nonlinear else None
        point = LazyLinearisation(primitive, inputs, adjoint, [at is not None for at in moved])
        if nonlinear:
            self._add_curvature(point, groups)
            if site is not None and site.weight_jacobian is not None:
                self._add_mixed_block(a, inputs, groups, site.weight_jacobian)
        if not pushes:
            return
        levels = sorted({g.level for g in groups}, reverse=True)
        out = {level: joined([push_forward(point, g) for g in groups if g.level == level]) for level in levels}
        self._count_kept(out)
        if site is not None and site.jacobians:
            self._make_vertex(a.output, self.trace.values[a.output].ndim - 1, site.jacobians, out)
        elif out:
            self.tangents[a.output] = out

    def _groups(self, moved: Sequence[int | None]) -> list[TangentGroup]:
        found: list[TangentGroup] = []
        by_input = [{} if at is None else self.tangents[at] for at in moved]
        for level in sorted({level for stacks in by_input for level in stacks}, reverse=True):
            patterns: dict[tuple[bool, ...], list[int]] = defaultdict(list)
            here = [stacks.get(level) for stacks in by_input]
            for s in sorted({s for stack in here if stack for s in stack.vertices}):
                patterns[tuple(stack is not None and s in stack.vertices for stack in here)].append(s)
            for pattern, vertices in patterns.items():
                stacks = [stack if moves else None for stack, moves in zip(here, pattern, strict=True)]
                widths = tuple(self.vertices[s].columns(level) for s in vertices)
                found.append(TangentGroup(level, tuple(vertices), widths, stacks))
        return found

    # Levels

    def _preaccumulate(self, primitive: Primitive, inputs: Values, moved: Sequence[int | None]) -> None:
        """Make an input with more columns of tangents than entries in a row a vertex, before a primitive that works by rows."""
        for k, at in enumerate(moved):
            if at is None or not self._is_work(primitive):
                continue
            value = self.trace.values[at]
            axes = value.ndim - 1
            alone = [j == k for j in range(len(moved))]
            if axes < 1 or sum(sum(stack.widths) for stack in self.tangents[at].values()) <= value.shape[-1]:
                continue
            if primitive.rowwise(inputs, axes, alone) or primitive.separable(inputs, axes, alone):
                self._make_vertex(at, axes, [], self.tangents[at])

    def _track_entries(self, a: Application, inputs: Values, at: int | None) -> bool:
        """Make a rearrangement of a vertex's entries a vertex of its own, where it mixes rows; tell whether it was."""
        primitive = a.primitive
        if at is None or a.output in self.sites or a.output not in self.needed or not primitive.rowwise(inputs, 1, [True]):
            return False
        stacks, value = self.tangents[at], self.trace.values[a.output]
        apart = all(primitive.rowwise(inputs, level, [True]) for level in stacks)
        whole = self._parameters_of(s for stack in stacks.values() for s in stack.vertices)
        few = self.trace.values[at].shape[1:].numel() < FEW * whole
        if at not in self._copies and not apart and few and 0 not in stacks:
            self._make_vertex(at, max(stacks), [], stacks)
        if at not in self._copies:
            return False
        s, positions = self._copies[at]
        positions = primitive.value(positions)
        if not apart and few:
            self._make_vertex(
                a.output, value.ndim - 1, [], {1: SelectedTangents(value, s, self.vertices[s].columns(1), positions)}
            )
        self._copies[a.output] = (s, positions)
        return not apart and few

    @staticmethod
    def _is_work(primitive: Primitive) -> bool:
        return is_product(primitive) or not primitive.is_linear

    def _at_rowwise_level(
        self, primitive: Primitive, inputs: Values, moved: Sequence[int | None], g: TangentGroup
    ) -> list[TangentGroup]:
        """Return a group at the finest level at which an application keeps its rows apart."""
        if g.level == 0 or primitive.rowwise(inputs, g.level, g.moving):
            return [g]
        lower = next((k for k in range(g.level - 1, 0, -1) if primitive.rowwise(inputs, k, g.moving)), 0)
        sampled = sum(self.vertices[s].columns(lower) for s in g.vertices)
        inner = [k for k, moves in enumerate(g.moving) if moves]
        own = min((self.trace.values[moved[k]].shape[lower:].numel() for k in inner), default=sampled)  # type: ignore[index]
        whole = self._parameters_of(g.vertices)
        if lower and min(sampled, own) < whole:
            if len(inner) == 1 and own < sampled:  # as many columns as the input has entries
                at = moved[inner[0]]
                assert at is not None
                if all(level >= g.level for level in self.tangents[at]):
                    stacks = self.tangents[at]
                    if sum(map(len, (s.vertices for s in stacks.values()))) == len(g.vertices):
                        self._make_vertex(at, g.level, [], stacks)
                        g = self._groups([at if k == inner[0] else None for k in range(len(moved))])[0]
            widths = tuple(self.vertices[s].columns(lower) for s in g.vertices)
            self._expect(sum(widths) * _moved(inputs, g))
            tangents = [
                None if t is None else torch.cat([coarsen(t[cut], g.level, lower) for cut in starts(g.widths)])
                for t in g.tangents
            ]
            return [tangent_group(lower, g.vertices, widths, tangents)]
        return [self._by_parameters(inputs, g)]

    def _by_parameters(self, inputs: Values, g: TangentGroup) -> TangentGroup:
        size = _moved(inputs, g)
        self._expect(sum(sum(self._parameter_sizes(s).values()) * (self.vertices[s].entries + size) for s in g.vertices))
        tangents: list[dict[int, Tensor]] = []
        for t in g.tangents:
            total: dict[int, Tensor] = {}
            for s, cut in zip(g.vertices, starts(g.widths), strict=True):
                if t is None:
                    continue
                for root, moved in self._through(s, t[cut], g.level).items():
                    total[root] = total[root] + moved if root in total else moved
            tangents.append(total)
        roots = tuple(sorted({r for total in tangents for r in total}))
        widths = tuple(self.vertices[r].width for r in roots)
        return tangent_group(0, roots, widths, [torch.cat([total[r] for r in roots]) if total else None for total in tangents])

    def _parameter_sizes(self, s: int) -> dict[int, int]:
        """Return the sizes of the parameter Jacobians' columns that reach a vertex, by the vertex that they enter."""
        if s not in self._sizes:
            vertex = self.vertices[s]
            sizes = {s: vertex.width if vertex.axes == 0 else sum(jacobian.size for jacobian in vertex.jacobians)}
            for stack in vertex.parents.values():
                for parent in stack.vertices:
                    sizes |= self._parameter_sizes(parent)
            self._sizes[s] = {self._dense_vertex.get(key, key): n for key, n in sizes.items()}
        return self._sizes[s]

    def _parameters_of(self, vertices: Iterable[int]) -> int:
        """Return the number of parameter entries that reach some vertices."""
        return sum({key: n for s in vertices for key, n in self._parameter_sizes(s).items()}.values())

    def _parameter_jacobians(self, s: int) -> dict[int, Tensor]:
        """Return the Jacobian of a vertex in the parameters taken whole, (P, *shape) by the vertex of the parameters."""
        if s in self._jacobians:
            return self._jacobians[s]
        vertex, total = self.vertices[s], {}
        if vertex.jacobians:
            rows = vertex.shape[: vertex.axes].numel()
            seed = torch.eye(vertex.width, dtype=self.dtype, device=self._device).unsqueeze(1).expand(-1, rows, -1)
            J = torch.cat([jacobian.by_entry(seed) for jacobian in vertex.jacobians]).reshape(-1, *vertex.shape)
            cuts = starts([jacobian.size for jacobian in vertex.jacobians])
            jacobians: list[ParameterJacobian] = [
                IdentityJacobian(u.parameter, u.at, cut.start, u.size) for u, cut in zip(vertex.jacobians, cuts, strict=True)
            ]
            self._dense_vertex[s] = self._new(Vertex(torch.Size(), 0, J.shape[0], jacobians), root=True)
            total[self._dense_vertex[s]] = J
        for level, stack in vertex.parents.items():
            for parent, cut in zip(stack.vertices, starts(stack.widths), strict=True):
                whole = self.vertices[parent].axes == 0
                found = {parent: stack.data[cut]} if whole else self._through(parent, stack.data[cut], level)
                for r, J in found.items():
                    total[r] = total[r] + J if r in total else J
        self._jacobians[s] = total
        return total

    def _through(self, s: int, t: Tensor, level: int) -> dict[int, Tensor]:
        return {r: compose(J, 0, t, level) for r, J in self._parameter_jacobians(s).items()}

    @property
    def _device(self) -> torch.device:
        return self.trace.values[self.trace.output].device

    # Curvature

    def _add_curvature(self, point: LazyLinearisation, groups: list[TangentGroup]) -> None:
        """Add K = T^T [lambda . D^2 phi] T' of one application for all pairs of groups that move it."""
        primitive = point.primitive
        if is_product(primitive) and sum(map(any, zip(*(g.moving for g in groups), strict=True))) <= 1:
            return
        if len(groups) == 1 and (K := structured_curvature(point, groups[0])) is not None:
            (s,), level = groups[0].vertices, groups[0].level
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
                        part = contract(fine, k, by_row(w, fine.level))
                        total = part if total is None else total + part
                if total is not None:
                    self._add_groups(fine, coarse, total)

    def _separate(self, primitive: Primitive, inputs: Values, groups: list[TangentGroup]) -> list[TangentGroup]:
        """Bring groups whose rows the second derivative couples to the level of parameters; finest level first."""
        result: list[TangentGroup] = []
        for level in sorted({g.level for g in groups}, reverse=True):
            here = [g for g in groups if g.level == level]
            together = [any(g.moving[k] for g in here) for k in range(len(inputs))]
            apart = level == 0 or primitive.separable(inputs, level, together)
            result += here if apart else [self._by_parameters(inputs, g) for g in here]
        return sorted(result, key=lambda g: -g.level)

    def _add_groups(self, fine: TangentGroup, coarse: TangentGroup, block: Tensor) -> None:
        """Add a block (rows of the finer level, its columns, columns of the coarser level), vertex by vertex."""
        level = coarse.level
        rows, _, width = block.shape
        groups = 1 if level == 0 else self._rows(coarse)
        split = block.reshape(groups, rows // groups, -1, width)
        columns = list(zip(coarse.vertices, starts(coarse.widths), strict=True))
        for i, (s, own) in enumerate(zip(fine.vertices, starts(fine.widths), strict=True)):
            for j, (r, other) in enumerate(columns):
                if fine is coarse and j > i:
                    continue
                part = split[:, :, own, other].reshape(groups, -1, other.stop - other.start)
                if fine is coarse:
                    self.blocks.add(s, r, level, part)
                else:
                    self.blocks.add_half(s, r, level, part)

    def _rows(self, g: TangentGroup) -> int:
        return self.vertices[g.vertices[0]].rows(g.level)

    def _add_mixed_block(
        self, a: Application, inputs: Values, groups: list[TangentGroup], weight_jacobian: ParameterJacobian
    ) -> None:
        """Add the curvature between a site's own weight or gain and the vertices that move the rows it multiplies.

        d<lambda, x W> = <lambda dW^T, dx>: the block of W and dx is that of a vertex whose parameter Jacobian is lambda (x) I.
        """
        x = inputs[0]
        assert x is not None
        adjoint = self.adjoints[a.output]
        rows = adjoint.reshape(-1, adjoint.shape[-1])
        if isinstance(weight_jacobian, WeightJacobian):
            shape = x.shape
            jacobian: ParameterJacobian = WeightJacobian(
                weight_jacobian.parameter, weight_jacobian.at, rows, x.shape[-1], not weight_jacobian.transposed
            )
        else:
            assert isinstance(weight_jacobian, GainJacobian)
            shape = self.trace.values[a.output].shape
            jacobian = GainJacobian(weight_jacobian.parameter, weight_jacobian.at, rows)
        mirror: int | None = None
        for g in groups:
            if not g.moving[0]:
                continue
            if mirror is None:
                mirror = self._new(Vertex(shape, len(shape) - 1, shape[-1], [jacobian], tied=[weight_jacobian]))
            if isinstance(weight_jacobian, GainJacobian):
                absent = [None] * (len(inputs) - 1)
                t: Tensor = a.primitive.jvp((x, *absent), (g.tangents[0], *absent))  # type: ignore[arg-type]
            elif g.entrywise is not None and g.level == len(shape) - 1:
                self.blocks.add_diagonal(mirror, g.vertices[0], g.level, g.entrywise.rows.contiguous())
                continue
            else:
                t = g.tangents[0]  # type: ignore[assignment]
            for s, cut in zip(g.vertices, starts(g.widths), strict=True):
                self.blocks.add(mirror, s, g.level, by_row(t[cut], g.level).contiguous().mT)

    def _count_kept(self, stacks: dict[int, StackedTangents]) -> None:
        """Count the bytes of tangents that are kept until the end."""
        self._kept += sum(stack.bytes for stack in stacks.values())

    def _announce(self, primitive: Primitive, inputs: Values, groups: Sequence[TangentGroup], out: Tensor) -> None:
        """Call ``on_memory`` with the bytes of one application's tangents, covectors, and curvature between all groups."""
        if self._on_memory is None:
            return
        scratch = out.numel()  # of fused attention on a GPU its weights too
        if isinstance(primitive, ScaledDotProductAttention) and out.device.type != "cpu":
            scratch += 4 * inputs[0].shape[:-1].numel() * inputs[1].shape[-2]
        taken = entries = 0
        for g in groups:
            entries += sum(self.vertices[s].entries for s in g.vertices)
            taken += sum(g.widths) * (_moved(inputs, g) + scratch + entries)
        self._expect(taken)

    def _expect(self, entries: int) -> None:
        if self._on_memory is not None:
            self._on_memory(self._kept + entries * self._itemsize)

    @property
    def _itemsize(self) -> int:
        return 8 if self.dtype is None else self.dtype.itemsize

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes that derivatives take at once until the end of the reverse accumulation, the matrix apart; after :meth:`run`."""
        return self._kept + self._itemsize * peak_entries(self.blocks, self.vertices)


def _moved(inputs: Values, g: TangentGroup) -> int:
    """Return the number of entries of the inputs that a group moves."""
    return sum(x.numel() for x, moves in zip(inputs, g.moving, strict=True) if moves)
