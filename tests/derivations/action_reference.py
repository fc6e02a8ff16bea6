"""References for primitives: torch.func on a hand-written function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from second_order_reference import relative_error
from torch import Tensor

from derivations.primitive import CovectorSum, Primitive


def check_actions(
    primitive: Primitive,
    f: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    moving: Sequence[int],
    tolerance: float = 1e-12,
    directions: int = 2,
    seed: int = 0,
) -> None:
    """Compare value, jvp, vjp, curvature and the linearised actions with those of f, a function of the inputs that are not None.

    The moving inputs get tangents, the others None. The curvature's reference is jvp(grad) of <adjoint, f>, which is the
    order of differentiation that torch gets right, on functions that do without fused kernels.
    """
    generator = torch.Generator().manual_seed(seed)
    present = [k for k, x in enumerate(inputs) if x is not None]
    floating = [k for k in present if inputs[k].is_floating_point()]
    points = {k: inputs[k] for k in floating}

    def run(*moved: Tensor) -> Tensor:
        full = {**{k: inputs[k] for k in present}, **dict(zip(floating, moved, strict=True))}
        return f(*(full[k] for k in present))

    def draw(x: Tensor, *leading: int) -> Tensor:
        return torch.randn(*leading, *x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    primals = tuple(points.values())
    value = run(*primals)
    assert relative_error(primitive.value(*inputs), value) <= tolerance
    tangents = [draw(x, directions) if k in moving else None for k, x in enumerate(inputs)]
    padded = tuple(
        tangents[k] if tangents[k] is not None else torch.zeros(directions, *points[k].shape).to(value) for k in floating
    )
    kept = [None if t is None else t.clone() for t in tangents]

    pushed = torch.stack([torch.func.jvp(run, primals, tuple(t[s] for t in padded))[1] for s in range(directions)])
    assert relative_error(primitive.jvp(inputs, tangents), pushed) <= tolerance

    adjoints = draw(value, directions)
    seen = primitive.vjp(inputs, adjoints)
    assert len(seen) == len(inputs)
    pull = torch.func.vjp(run, *primals)[1]
    expected = [torch.stack(rows) for rows in zip(*(pull(a) for a in adjoints), strict=True)]
    compare(seen, dict(zip(floating, expected, strict=True)), tolerance)

    adjoint, first = adjoints[0], expected
    gradient = torch.func.grad(lambda *moved: (adjoint * run(*moved)).sum(), argnums=tuple(range(len(primals))))
    columns = [torch.func.jvp(gradient, primals, tuple(t[s] for t in padded))[1] for s in range(directions)]
    second = [torch.stack(rows) for rows in zip(*columns, strict=True)]
    compare(primitive.curvature(inputs, adjoint, tangents), dict(zip(floating, second, strict=True)), tolerance)

    wanted = [k in moving for k in range(len(inputs))]
    both = {k: a + b for k, a, b in zip(floating, first, second, strict=True) if k in moving}
    at = primitive.linearise(inputs, adjoint, wanted)
    for count in (directions, directions, 1):  # twice, as what is kept may not be written into
        some = [None if t is None else t[:count] for t in tangents]
        total = {k: v[:count] for k, v in both.items()}
        assert relative_error(at.push(some), pushed[:count]) <= tolerance
        largest = max(float(v.abs().max()) for v in total.values()) if total else 0.0
        for k, covector in enumerate(at.pull(adjoints[:count], some)):
            if k in moving:
                found = torch.zeros_like(total[k]) if covector is None else covector
                assert float((found - total[k]).abs().max()) <= tolerance * (largest or 1.0), f"input {k}, linearised"
        memory = {k: torch.full((count, inputs[k].numel() + 3), torch.nan, dtype=value.dtype) for k in moving}  # a part of a row
        parts = {k: m[:, 3:].view(count, *inputs[k].shape) for k, m in memory.items()}
        sums = [CovectorSum(parts[k]) if k in moving else None for k in range(len(inputs))]
        for times in (1, 2):
            rest = at.pull_into(adjoints[:count], some if at.is_nonlinear else None, sums)
            assert all(rest[k] is None for k in moving)
            for k in moving:
                seen_sum = sums[k].close()
                assert float((seen_sum - times * total[k]).abs().max()) <= tolerance * times * (largest or 1.0), (
                    f"input {k}, summed"
                )
        assert all(m[:, :3].isnan().all() for m in memory.values())
        at.forget()

    assert all(a is b or torch.equal(a, b) for a, b in zip(tangents, kept, strict=True)), "a tangent was written to"


def compare(seen: Sequence[Tensor | None], expected: dict[int, Tensor], tolerance: float) -> None:
    """Compare covectors, with None standing for zero."""
    largest = max((float(e.abs().max()) for e in expected.values()), default=0.0)
    for k, covector in enumerate(seen):
        if covector is None:
            assert k not in expected or float(expected[k].abs().max()) <= tolerance * largest, f"input {k} is not zero"
        else:
            assert relative_error(covector, expected[k]) <= tolerance, f"input {k}"


def couples(block: Tensor, out: torch.Size, into: torch.Size, axes: int) -> bool:
    """Tell whether a Jacobian (out x into) has entries off the block diagonal over the first axes of both."""
    if out[:axes] != into[:axes]:
        return True
    rows = out[:axes].numel()
    entries = block.reshape(rows, -1, rows, into[axes:].numel()).abs().amax((1, 3))
    return bool((entries - entries.diagonal().diag()).any())
