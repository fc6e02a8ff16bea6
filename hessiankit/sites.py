"""Where parameters enter: a site is a value that is linear in some parameters, row by row.

At a site z = X W + b (or z = x_hat o gamma + beta) a perturbation of the parameters is a perturbation delta of z,

    delta[n, o] = sum_i X[n, i] dW[i, o] + db[o]        (a Kronecker lift, X (x) I)
    delta[n, o] = x_hat[n, o] dgamma[o] + dbeta[o]      (a diagonal lift)

As long as what follows treats rows one by one, derivatives are kept with respect to delta: o columns a row in place
of d_in * d_out columns for the whole weight. As soon as rows mix, the lift turns them into parameter coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from derivations.linear import Add, Linear, MatMul
from derivations.normalization import LayerNorm, RMSNorm
from hessiankit.trace import Application, Trace


@dataclass(frozen=True)
class Lift:
    """How one parameter moves a site: ``weights`` is (rows, d_in) for a Kronecker lift, (rows, d_out) for a diagonal one.

    ``order`` is "io" for a weight stored as (d_in, d_out), "oi" for (d_out, d_in), "o" for a gain or a bias.
    """

    parameter: str
    weights: Tensor
    order: str

    def expand(self, t: Tensor) -> Tensor:
        """Turn (d_out, rows, f), derivatives by delta, into (parameters, rows, f), derivatives by the parameter."""
        a = self.weights.T.unsqueeze(-1).to(t.dtype)  # (d_in, rows, 1); a module may cast between the site and here
        if self.order == "o":
            return t * a
        pairs = t.unsqueeze(0) * a.unsqueeze(1) if self.order == "io" else t.unsqueeze(1) * a.unsqueeze(0)
        return pairs.flatten(0, 1)

    def reduce(self, per_row: Tensor) -> Tensor:
        """Turn (rows, d_out, c), covectors of delta row by row, into (parameters, c), summed over the rows."""
        if self.order == "o":
            return (self.weights.unsqueeze(-1) * per_row).sum(0)
        rows, width, c = per_row.shape
        out = (self.weights.T @ per_row.reshape(rows, width * c)).reshape(-1, width, c)  # (d_in, d_out, c)
        return (out if self.order == "io" else out.transpose(0, 1)).reshape(-1, c)


@dataclass
class Site:
    """A value (rows..., d_out) that some parameters move linearly, with their lifts."""

    value: int
    axes: int
    width: int
    lifts: list[Lift] = field(default_factory=list)

    def expand(self, t: Tensor) -> Tensor:
        """Turn a tangent (d_out, *rows, *rest) by delta into one by the parameters, (columns, *rows, *rest)."""
        flat = t.flatten(1, self.axes).flatten(2) if t.ndim > self.axes + 1 else t.flatten(1, self.axes).unsqueeze(-1)
        parts = [lift.expand(flat) for lift in self.lifts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1, *t.shape[1:])

    def reduce(self, per_row: Tensor) -> Tensor:
        """Turn row-wise covectors (rows, d_out, c) into (columns, c)."""
        parts = [lift.reduce(per_row) for lift in self.lifts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def pair(left: Site, right: Site, per_row: Tensor) -> Tensor:
    """Lift row-wise curvature (rows, d_left, d_right) between two sites to their parameters: sum_n (a_n a_n'^T) (x) K_n."""
    return torch.cat([torch.cat([_pair(u, v, per_row) for v in right.lifts], 1) for u in left.lifts])


def _pair(u: Lift, v: Lift, per_row: Tensor) -> Tensor:
    rows, p, q = per_row.shape
    if v.order == "o":
        return u.reduce(per_row * v.weights.unsqueeze(1))
    if u.order == "o":
        return v.reduce((per_row * u.weights.unsqueeze(-1)).transpose(1, 2)).T
    i, j = u.weights.shape[1], v.weights.shape[1]
    outer = (u.weights.unsqueeze(2) * v.weights.unsqueeze(1)).reshape(rows, i * j)
    block = (outer.T @ per_row.reshape(rows, p * q)).reshape(i, j, p, q)
    left = (0, 2) if u.order == "io" else (2, 0)
    right = (1, 3) if v.order == "io" else (3, 1)
    return block.permute(*left, *right).reshape(i * p, j * q)


def find_site(
    trace: Trace, application: Application, names: dict[int, str], sites: dict[int, Site], uses: Mapping[int, int]
) -> tuple[int, ...]:
    """Register the site, if any, that an application makes of its parameters; return the inputs it accounts for."""
    primitive, inputs = application.primitive, trace.gather(application)
    ids = application.inputs
    out = trace.values[application.output]

    def named(position: int) -> str | None:
        at = ids[position] if position < len(ids) else None
        return None if at is None else names.get(at)

    lifts: list[tuple[int, Lift]] = []
    axes = out.ndim - 1
    first = inputs[0]
    if first is None or axes < 1:
        return ()
    ones = torch.ones((), dtype=out.dtype, device=out.device).expand(out[..., 0].numel(), out.shape[-1])
    if isinstance(primitive, (MatMul, Linear)) and ids[0] != ids[1]:
        weight = inputs[1]
        assert weight is not None
        if weight.ndim == 2 and (name := named(1)) is not None:
            order = "io" if isinstance(primitive, MatMul) else "oi"
            lifts.append((1, Lift(name, first.reshape(-1, first.shape[-1]), order)))
        if (name := named(2)) is not None:
            lifts.append((2, Lift(name, ones, "o")))
    elif isinstance(primitive, (LayerNorm, RMSNorm)) and primitive.dims == 1:
        if (name := named(1)) is not None:
            plain = primitive.value(first, *([None] * (len(inputs) - 1)))  # type: ignore[arg-type]
            lifts.append((1, Lift(name, plain.reshape(-1, plain.shape[-1]), "o")))
        if (name := named(2)) is not None:
            lifts.append((2, Lift(name, ones, "o")))
    elif isinstance(primitive, Add) and primitive.alpha == 1 and (name := named(1)) is not None:
        bias = inputs[1]
        if bias is not None and bias.ndim == 1 and first.shape == out.shape and bias.shape[0] == out.shape[-1]:
            before = sites.get(ids[0]) if ids[0] is not None else None
            if before is not None and uses[before.value] == 1:  # the bias of the product just made: one site for both
                before.lifts.append(Lift(name, ones, "o"))
                return (1,)
            lifts.append((1, Lift(name, ones, "o")))
    if lifts:
        sites[application.output] = Site(application.output, axes, out.shape[-1], [lift for _, lift in lifts])
    return tuple(position for position, _ in lifts)
