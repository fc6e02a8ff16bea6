"""Sites: values that are linear in some parameters, row by row, with their parameter Jacobians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from derivations.embedding import Embedding
from derivations.indexing import Select, Slice, Take
from derivations.linear import Add, Expand, Linear, MatMul, Permute, Reshape
from derivations.normalization import LayerNorm, RMSNorm
from derivations.primitive import Primitive
from hessiankit.engine.jacobians import GainJacobian, IndexJacobian, ParameterJacobian, WeightJacobian
from hessiankit.tracing.trace import Application, Trace

SELECTING = (Embedding, Expand, Permute, Reshape, Select, Slice, Take)
SITES = (Add, Embedding, LayerNorm, Linear, MatMul, RMSNorm)


@dataclass
class Site:
    """A value (rows..., p) that is linear in some parameters, row by row.

    Attributes:
        value: Its id.
        jacobians: Its Jacobian in each parameter.
        covered: Positions of the application's inputs that these parameters are.
        weight_jacobian: That of the weight or gain that multiplies the application's first input, if there is one.
    """

    value: int
    jacobians: list[ParameterJacobian]
    covered: tuple[int, ...]
    weight_jacobian: ParameterJacobian | None = field(default=None)


@dataclass(frozen=True)
class EntrySelection:
    """A value whose entries are entries of one parameter: ``at`` holds their positions, None where it is the parameter."""

    parameter: str
    at: Tensor | None


def selections(trace: Trace) -> dict[int, EntrySelection]:
    """Return the values that are parameters, or entries of one parameter rearranged, by id."""
    found = {at: EntrySelection(name, None) for name, at in trace.parameters.items()}
    for a in trace.applications:
        before = found.get(a.inputs[0]) if len(a.inputs) == 1 and a.inputs[0] is not None else None
        if before is None or not isinstance(a.primitive, SELECTING):
            continue
        if isinstance(a.primitive, Embedding) and a.primitive.frozen is not None:
            continue
        value = trace.values[a.inputs[0]]  # type: ignore[index]
        positions = torch.arange(value.numel(), device=value.device).reshape(value.shape) if before.at is None else before.at
        found[a.output] = EntrySelection(before.parameter, a.primitive.value(positions))
    return found


def find_sites(trace: Trace) -> dict[int, Site]:
    """Return every site of a trace, by the id of its value, in the order of the trace."""
    chosen = selections(trace)
    uses: dict[int, int] = {}
    for a in trace.applications:
        for at in a.inputs:
            if at is not None:
                uses[at] = uses.get(at, 0) + 1
    sites: dict[int, Site] = {}
    for a in trace.applications:
        site = _site(trace, a, chosen, sites, uses)
        if site is not None:
            sites[a.output] = site
    return sites


def _site(
    trace: Trace, a: Application, chosen: Mapping[int, EntrySelection], sites: dict[int, Site], uses: Mapping[int, int]
) -> Site | None:
    primitive = a.primitive
    if not isinstance(primitive, SITES):
        return None
    inputs, out = trace.gather(a), trace.values[a.output]
    x = inputs[0]
    if out.ndim < 2 or x is None or not out.is_floating_point():
        return None
    rows, width = out.shape[:-1].numel(), out.shape[-1]

    def selected(position: int) -> EntrySelection | None:
        at = a.inputs[position] if position < len(a.inputs) else None
        return None if at is None else chosen.get(at)

    def vector(position: int) -> ParameterJacobian | None:
        """The jacobian of a gain or a bias, one entry for each column."""
        s = selected(position)
        if s is None or inputs[position].shape != (width,) or not _injective(s.at):  # type: ignore[union-attr]
            return None
        return GainJacobian(s.parameter, s.at, torch.ones((), dtype=out.dtype, device=out.device).expand(rows, width))

    if isinstance(primitive, (MatMul, Linear)) and a.inputs[0] != a.inputs[1]:
        weight, transposed = inputs[1], isinstance(primitive, Linear)
        jacobians: dict[int, ParameterJacobian | None] = {2: vector(2)}
        if weight is not None and weight.ndim == 2 and (s := selected(1)) is not None and _injective(s.at):
            at = None if s.at is None else s.at.reshape(-1)
            jacobians[1] = WeightJacobian(s.parameter, at, x.reshape(-1, x.shape[-1]), width, transposed)
        return _made(a, jacobians)
    if isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1:
        jacobians = {2: vector(2)}
        if (gain := vector(1)) is not None:
            plain = primitive.value(x, *([None] * (len(inputs) - 1)))  # type: ignore[arg-type]
            jacobians[1] = GainJacobian(gain.parameter, gain.at, plain.reshape(-1, width))
        return _made(a, jacobians)
    if isinstance(primitive, Add) and primitive.alpha == 1 and a.inputs[0] != a.inputs[1]:

        def before(position: int) -> Site | None:
            at = a.inputs[position]
            return sites.get(at) if at is not None and uses[at] == 1 else None

        return _of_a_sum(a, out, selected, vector, (x.shape, inputs[1].shape), before)  # type: ignore[union-attr]
    if isinstance(primitive, Embedding) and (s := chosen.get(a.output)) is not None and s.at is not None:
        return Site(a.output, [_index(s, out)], (0,))
    return None


def _of_a_sum(
    a: Application,
    out: Tensor,
    selected: Callable[[int], EntrySelection | None],
    vector: Callable[[int], ParameterJacobian | None],
    shapes: tuple[torch.Size, torch.Size],
    before: Callable[[int], Site | None],
) -> Site | None:
    """Return the site of a bias, or of a table of positions, that is added to another value."""
    tables: dict[int, ParameterJacobian] = {}
    for mine, other in ((1, 0), (0, 1)):
        s = selected(mine)
        if s is None or (shapes[other] != out.shape and other not in tables):
            continue
        if shapes[other] == out.shape and (bias := vector(mine)) is not None:
            product = before(other)
            if product is not None and product.weight_jacobian is not None:
                product.jacobians.append(bias)  # the bias of the product just made: one site for both
                return Site(a.output, [], (mine,))
            return Site(a.output, [bias], (mine,))
        every = torch.arange(shapes[mine].numel(), device=out.device).reshape(shapes[mine])
        tables[mine] = _index(EntrySelection(s.parameter, (every if s.at is None else s.at).expand(out.shape)), out)
    return Site(a.output, list(tables.values()), tuple(tables)) if tables else None


def _made(a: Application, jacobians: Mapping[int, ParameterJacobian | None]) -> Site | None:
    found = {position: jacobian for position, jacobian in sorted(jacobians.items()) if jacobian is not None}
    return Site(a.output, list(found.values()), tuple(found), found.get(1)) if found else None


def _index(s: EntrySelection, out: Tensor) -> IndexJacobian:
    assert s.at is not None
    at, which = torch.unique(s.at, return_inverse=True)
    return IndexJacobian(s.parameter, at, which.reshape(-1, out.shape[-1]))


def _injective(at: Tensor | None) -> bool:
    return at is None or torch.unique(at).numel() == at.numel()


def is_product(primitive: Primitive) -> bool:
    """Tell whether a primitive is linear in each input, so that one moving input has no second derivative."""
    return isinstance(primitive, (MatMul, Linear))
