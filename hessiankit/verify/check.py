"""Does the closed form agree with automatic differentiation? One call, one report, usable as a test."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.arguments import checked
from hessiankit.blocks import Transformer, TransformerBlock, VisionTransformer
from hessiankit.curvature import Hessian, hessian
from hessiankit.errors import InputError
from hessiankit.request.batches import batches
from hessiankit.request.calling import Loss, map_tensors
from hessiankit.request.selection import Params, select
from hessiankit.torch_state import one_at_a_time
from hessiankit.untouched import random_kept
from hessiankit.verify.check_report import FORMULAS, CheckReport, CheckRow
from hessiankit.verify.comparison import Blocks, probe_directions
from hessiankit.verify.exact import check_exact_blocks
from hessiankit.verify.formulas import formula_errors
from hessiankit.verify.health import Health, examine
from hessiankit.verify.identities import examine_identities
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import Outcome, Unsupported, run_references
from hessiankit.verify.route_table import Choice, choose
from hessiankit.verify.traits import traits

AGAINST = ("reverse-over-reverse", "jvp(grad)", "central-differences", "torch.func.hessian", "curvlinops")
"""What is compared with where the route table does not decide, and for hessiankit's own blocks: the wrong ones are shown too."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Relative to the largest entry of a block pair; float32 and bfloat16 lose digits in sums over tokens and samples."""
WHOLE = 400
"""Up to this many parameters every entry is compared; beyond it, generic directions on every parameter."""


@checked("check")
@one_at_a_time
def check(
    block_or_module: nn.Module,
    inputs: Any = None,
    target: Any = None,
    *,
    loss: Loss = "mse",
    against: Iterable[str] | None = None,
    rtol: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    directions: int | None = None,
    formulas: bool = True,
    exact: bool = False,
    params: Params = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CheckReport:
    """Compare the closed-form Hessian of a module with references that take other routes.

    Every reference is examined first (symmetry, agreement with the others); only healthy ones count, and at least two
    that share no differentiation path are needed. The gradient and the Hessian are also held against the exact identities
    that the module's structure implies (:func:`hessiankit.verify.identities.identities`). For a :class:`TransformerBlock` the
    vec_r formulas of the chapters are compared with the fast path too.

    Args:
        block_or_module: Any module; it is not changed.
        inputs: What it is called with, one batch as in :func:`hessiankit.hessian`; for hessiankit's own modules drawn from
            ``seed`` if omitted.
        target: What the loss compares with; drawn if omitted together with the inputs.
        loss: As in :func:`hessiankit.hessian`.
        against: Names of the references, see ``hessiankit.verify.REFERENCES``. By default two that share no path and that the
            route table (``hessiankit routes``) calls right for every operation of the module, and central differences; where
            the table is of another torch or lacks an operation, and for hessiankit's own blocks, ``AGAINST``.
        rtol: Tolerance relative to the largest entry of each block pair; 1e-10 in float64, 1e-3 in float32.
        seed: Of everything that is drawn.
        dtype: The check is made on a copy of the module in this dtype, inputs included; None keeps the module's own.
        directions: Directions a parameter to compare along; by default every entry is compared up to 400 parameters
            and 4 directions a parameter beyond; 0 for every entry at any size.
        formulas: Whether to compare the vec_r formulas as well (hessiankit's post-norm blocks only).
        exact: Whether to check the vec_r formulas of every :class:`TransformerBlock` in the module in exact arithmetic too, at
            the smallest sizes of its structure (:func:`hessiankit.verify.check_exact_blocks`): it takes seconds.
        params: The parameters to take, as in :func:`hessiankit.hessian`; all that require grad by default.
        progress: Called with (reference, directions done, directions in all).

    Returns:
        A :class:`CheckReport`; ``assert hessiankit.check(block)`` is the idiom for a test.

    Raises:
        InputError: If an argument cannot be used.

    >>> bool(check(TransformerBlock(d_model=4, d_ff=5, d_k=2)))
    True
    """
    start = time.perf_counter()
    chosen = None if params is None else list(select("check", block_or_module, params))  # names, which the copy shares
    complex_one = next((name for name, p in block_or_module.named_parameters() if p.is_complex()), None)
    if complex_one is not None:
        raise InputError(f"check: the parameter {complex_one!r} is complex; pass real ones, the Hessian is of a real function")
    module = copy.deepcopy(block_or_module) if dtype is None else copy.deepcopy(block_or_module).to(dtype)
    if inputs is None:
        inputs, target = generic_example(module, loss, seed)
    else:
        several, pairs = batches("check", inputs, target, loss)
        if several:
            raise InputError("check: several batches; the references take one, so pass one (inputs, target=...)")
        inputs, target = next(pairs)
    if dtype is not None:
        inputs, target = (_cast(x, dtype) for x in (inputs, target))
    tell = None if progress is None else lambda done, total: progress("closed form", done, total)
    found = hessian(module, inputs, target, loss=loss, params=chosen, progress=tell)
    values = {name: p.detach() for name, p in module.named_parameters() if name in found.slices}
    problem = Problem(module, inputs, target, loss, values)
    seen = traits(problem)
    precision = seen.precision  # a module may compute below the type of its parameters
    tolerance = rtol if rtol is not None else TOLERANCE.get(precision, 1e-10)
    probes = None
    if directions or (directions is None and problem.size > WHOLE):
        probes = probe_directions(problem, directions or 4, seed)
    choice = _choice(against, problem)
    results = run_references(problem, None if probes is None else probes.V, choice.names, progress=progress)
    health = examine(results, problem, probes=probes)
    method = str(precision).removeprefix("torch.")
    rows = list(_rows(found, Blocks(problem, probes, precision), results, health, tolerance, method))
    if formulas and isinstance(module, TransformerBlock):
        before = time.perf_counter()
        with random_kept(module):
            errors = formula_errors(module, seed)
        seconds = time.perf_counter() - before
        rows += [CheckRow(name, FORMULAS, error, error <= 1e-10, seconds) for name, error in errors.items()]
    with random_kept(module):
        in_fractions = check_exact_blocks(module, seed=seed) if exact else ()
    identities = examine_identities(problem, found.matrix, rtol=tolerance, precision=precision)
    comparison = "every entry" if probes is None else f"{directions or 4} generic directions a parameter"
    return CheckReport(
        tuple(rows),
        tuple(health.values()),
        found,
        tolerance,
        comparison,
        time.perf_counter() - start,
        choice.left_out,
        tuple(remark for remark in (choice.note, seen.padding) if remark),
        f"{seen.lowered_by} computes in {precision}" if rtol is None and seen.lowered_by else "",
        identities,
        in_fractions,
    )


def _choice(against: Iterable[str] | None, problem: Problem) -> Choice:
    """Return the references to run: those named, the route table's, or all for hessiankit's own blocks."""
    if against is not None:
        return Choice(tuple(against), {})
    if isinstance(problem.module, (TransformerBlock, VisionTransformer)):
        return Choice(AGAINST, {})
    return choose(problem, AGAINST)


def _rows(
    found: Hessian,
    blocks: Blocks,
    results: dict[str, Outcome | Unsupported],
    health: dict[str, Health],
    rtol: float,
    method: str,
) -> Iterator[CheckRow]:
    """Compare the closed form with every healthy reference, block pair by block pair (i, j) with i before j."""
    mine = found.matrix if blocks.probes is None else blocks.probes.V.to(found.matrix) @ found.matrix
    for name, outcome in results.items():
        if isinstance(outcome, Unsupported) or not health[name].healthy:
            continue
        theirs = outcome.value if blocks.probes is not None else outcome.value.T
        difference, scales = blocks.difference(mine, theirs)
        relative = blocks.relative(difference, scales)
        allowed = torch.full_like(relative, rtol)
        if outcome.error is not None:
            own = blocks.largest(outcome.error if blocks.probes is not None else outcome.error.T)
            allowed += own / scales.clamp_min(torch.finfo(scales.dtype).tiny)
        for a, i in enumerate(blocks.names):
            for b, j in enumerate(blocks.names):
                if b >= a:  # both orders of the pair are compared; the worse one is reported
                    error = max(float(relative[a, b]), float(relative[b, a]))
                    passed = bool(relative[a, b] <= allowed[a, b]) and bool(relative[b, a] <= allowed[b, a])
                    yield CheckRow(f"{i} x {j}", name, error, passed, outcome.seconds, method)


def generic_example(module: nn.Module, loss: Loss, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and a target for one of hessiankit's own modules, of sizes unequal to each other and to the widths.

    Raises:
        InputError: For any other module, whose input shape cannot be known, or a loss without a known target.
    """
    if not isinstance(module, (Transformer, TransformerBlock, VisionTransformer)):
        raise InputError(f"check: the inputs of a {type(module).__name__} are not known; pass inputs=... and target=...")
    if not isinstance(loss, str):
        raise InputError("check: with a loss of your own, pass inputs=... and target=...")
    first = next(module.parameters())
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(first)

    if isinstance(module, VisionTransformer):
        inputs = draw(3, *(int(n) for n in (module.embedding.P.shape[0], module.embedding.W_E.shape[0])))
        shape: tuple[int, ...] = (3, int(module.head.W_C.shape[1]))
    elif isinstance(module, Transformer):
        vocabulary, positions = module.embedding.W_E.shape[0], module.embedding.P
        length = 3 if positions is None else min(3, positions.shape[0])
        inputs = torch.randint(vocabulary, (2, length), generator=generator).to(first.device)
        with torch.no_grad():
            shape = tuple(module(inputs).shape)
    else:
        length = next(n for n in (3, 5, 7) if n not in {module.d_model, module.attention.d_k})
        inputs = draw(2, length, module.d_model)
        shape = tuple(inputs.shape)
    if loss == "mse":
        return inputs, draw(*shape)
    return inputs, torch.randint(shape[-1], shape[:-1], generator=generator).to(first.device)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    tree = dict(x) if isinstance(x, Mapping) else x
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
