"""References for primitives: torch.func on a hand-written function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from second_order_reference import relative_error
from torch import Tensor

from hessiankit.primitives.primitive import CovectorSum, Primitive


def check_actions(
    primitive: Primitive,
    f: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    subsets: Sequence[Sequence[int]],
    tolerance: float = 1e-12,
    directions: int = 2,
) -> None:
    """Compare value, jvp, vjp, curvature and the linearised actions with those of f, a function of the inputs that are not None.

    Of each subset of inputs that move these get tangents, the others None; the derivatives of f are linear in the tangents, and
    are added up. The curvature's reference is jvp(grad) of <adjoint, f>, which is the order of differentiation that torch gets
    right, on functions that do without fused kernels.
    """
    generator = torch.Generator().manual_seed(0)
    present = [k for k, x in enumerate(inputs) if x is not None]
    floating = [k for k in present if inputs[k].is_floating_point()]
    primals = tuple(inputs[k] for k in floating)

    def run(*moved: Tensor) -> Tensor:
        full = {**{k: inputs[k] for k in present}, **dict(zip(floating, moved, strict=True))}
        return f(*(full[k] for k in present))

    def draw(x: Tensor) -> Tensor:
        return torch.randn(directions, *x.shape, generator=generator, dtype=torch.float64).to(x.dtype)

    value = run(*primals)
    assert relative_error(primitive.value(*inputs), value) <= tolerance
    tangents, adjoints = {k: draw(inputs[k]) for k in floating}, draw(value)
    pull = torch.func.vjp(run, *primals)[1]
    first = {k: torch.stack(rows) for k, *rows in zip(floating, *(pull(a) for a in adjoints), strict=True)}
    seen = primitive.vjp(inputs, adjoints)
    assert len(seen) == len(inputs)
    compare(seen, first, tolerance)

    gradient = torch.func.grad(lambda *moved: (adjoints[0] * run(*moved)).sum(), argnums=tuple(range(len(primals))))
    pushed, bent = {}, {}
    for k in {k for moving in subsets for k in moving}:
        alone = [tuple(tangents[j][s] if j == k else torch.zeros_like(inputs[j]) for j in floating) for s in range(directions)]
        pushed[k] = torch.stack([torch.func.jvp(run, primals, t)[1] for t in alone])
        columns = [torch.func.jvp(gradient, primals, t)[1] for t in alone]
        bent[k] = {j: torch.stack(rows) for j, *rows in zip(floating, *columns, strict=True)}
    for moving in subsets:
        second = {j: sum(bent[k][j] for k in moving) for j in floating}
        given = [tangents[k] if k in moving else None for k in range(len(inputs))]
        kept = [None if t is None else t.clone() for t in given]
        along = sum(pushed[k] for k in moving)
        assert relative_error(primitive.jvp(inputs, given), along) <= tolerance
        compare(primitive.curvature(inputs, adjoints[0], given), second, tolerance)
        both = {k: first[k] + second[k] for k in moving}
        check_linearised(primitive, inputs, adjoints, given, along, both, tolerance)
        assert all(a is b or torch.equal(a, b) for a, b in zip(given, kept, strict=True)), "a tangent was written to"


def check_linearised(
    primitive: Primitive,
    inputs: Sequence[Tensor | None],
    adjoints: Tensor,
    tangents: Sequence[Tensor | None],
    pushed: Tensor,
    both: dict[int, Tensor],
    tolerance: float,
) -> None:
    """Compare push and pull at a linearised point; ``both`` is the vjp and the curvature together, of the inputs that move."""
    at = primitive.linearise(inputs, adjoints[0], [k in both for k in range(len(inputs))])
    for count in (len(adjoints), len(adjoints), 1):  # twice, as what is kept may not be written into
        some = [None if t is None else t[:count] for t in tangents]
        total = {k: v[:count] for k, v in both.items()}
        assert relative_error(at.push(some), pushed[:count]) <= tolerance
        largest = max(float(v.abs().max()) for v in total.values()) or 1.0
        for k, covector in enumerate(at.pull(adjoints[:count], some)):
            if k in both:
                found = torch.zeros_like(total[k]) if covector is None else covector
                assert float((found - total[k]).abs().max()) <= tolerance * largest, f"input {k}, linearised"
        memory = {k: torch.full((count, inputs[k].numel() + 3), torch.nan, dtype=pushed.dtype) for k in both}  # a part of a row
        sums = [CovectorSum(memory[k][:, 3:].view(count, *inputs[k].shape)) if k in both else None for k in range(len(inputs))]
        for times in (1, 2):
            rest = at.pull_into(adjoints[:count], some if at.is_nonlinear else None, sums)
            assert all(rest[k] is None for k in both)
            for k in both:
                off = sums[k].close() - times * total[k]
                assert float(off.abs().max()) <= tolerance * times * largest, f"input {k}, summed"
        assert all(m[:, :3].isnan().all() for m in memory.values())
        at.forget()


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
