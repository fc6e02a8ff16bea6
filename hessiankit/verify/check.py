"""``check``: compare the closed form of a module with automatic differentiation, in one report that a test can assert."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hessiankit.blocks import Transformer, TransformerBlock, VisionTransformer
from hessiankit.curvature.dense import Hessian, hessian_of
from hessiankit.curvature.evaluation import Evaluation
from hessiankit.curvature.operator import HessianOperator
from hessiankit.request.data import AUTO, ordinary, read_data
from hessiankit.request.loss import LossArgument
from hessiankit.request.read import read_request
from hessiankit.request.selection import Params, check_surroundings, select
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.support.tables import sizes
from hessiankit.support.torch_state import one_at_a_time, one_thread, preserved_random_states
from hessiankit.theory.exact.check import ExactRow, check_exact_blocks
from hessiankit.verify.analytic import Blocks, analytic_rows, completed, read_analytic
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import (
    ANALYTIC,
    HESSIANKIT,
    CheckRow,
    Judge,
    cells_of_groups,
    cells_of_pairs,
    closed_form,
    method_of,
)
from hessiankit.verify.health import AGREEMENT, SideBySide, rounding_noise
from hessiankit.verify.identities import identities
from hessiankit.verify.in_place import converted, preserved
from hessiankit.verify.probes import Direction, Probes, directions, normal, probe_directions, roles
from hessiankit.verify.problem import Problem, cast
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported, run_references
from hessiankit.verify.same_call import SameCall, by_operator
from hessiankit.verify.small_blocks import formula_rows, twin_rows
from hessiankit.verify.traits import traits

INDEPENDENT = ("reverse-over-reverse", "jvp(grad)", "central-differences")
"""Three references that share nothing."""
REFERENCES_OF_BLOCKS = (*INDEPENDENT, "torch.func.hessian", "curvlinops")
"""References for hessiankit's own blocks: those that torch has wrong are shown too."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Tolerances relative to the largest entry of a block pair; float32 and bfloat16 lose digits in sums over tokens and samples."""
ENTRYWISE = 400
"""Number of parameters up to which every entry is compared; beyond it, generic directions on every parameter."""
PRODUCTS = 5000
"""Number of parameters beyond which no matrix is formed: products are compared, along directions on groups of parameters."""
MATRIX = 20000
"""Limit in place of ``PRODUCTS`` where ``directions`` are given."""
ENTRIES = 2**15
"""Number of entries up to which inputs are small: torch cuts an operation into as many for a thread (its grain size)."""


@checked("check")
@one_at_a_time
def check(
    block_or_module: nn.Module,
    inputs: Any = None,
    target: Any = None,
    *,
    loss: LossArgument = AUTO,
    against: Iterable[str] | None = None,
    rtol: float | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = torch.float64,
    directions: int | None = None,
    formulas: bool = True,
    exact: bool = False,
    params: Params = None,
    analytic: Any = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CheckReport:
    """Compare the closed-form Hessian of a module with references that take other routes.

    Every reference is examined first (symmetry, agreement with the others); only healthy ones count, and at least two
    that share no differentiation path are needed. The gradient and the Hessian are also tested for the exact identities that
    the module's structure implies (:func:`hessiankit.verify.identities.identities`). For a :class:`TransformerBlock` the vec_r
    formulas of the chapters are compared with the fast path too.

    Args:
        block_or_module: Any module; it is not changed.
        inputs: Inputs of the call, one batch as in :func:`hessiankit.hessian`; for hessiankit's own modules drawn from
            ``seed`` if omitted.
        target: Target of the loss; drawn if omitted together with the inputs.
        loss: Loss as in :func:`hessiankit.hessian`.
        against: Names of the references, see ``hessiankit.verify.REFERENCES``. By default three that share nothing, reverse over
            reverse, forward over reverse and central differences; ``torch.func.hessian`` where torch has no forward mode of the
            gradient, and for hessiankit's own blocks, with curvlinops, to show where they are wrong.
        rtol: Tolerance relative to the largest entry of each block pair; 1e-10 in float64, 1e-3 in float32.
        seed: Seed of all random numbers.
        dtype: The dtype of the check: the module's own tensors are converted in place and restored bit for bit, inputs are
            cast; None keeps the module's own. If the loss is finite in the module's own dtype only, that dtype is kept, and
            the report says so.
        directions: Directions a parameter to compare along; by default every entry is compared up to 400 parameters
            and 4 directions a parameter beyond; 0 for every entry at any size. Beyond 5,000 parameters (20,000 where
            ``directions`` is given) no matrix is formed: products of ``hessian_operator`` are compared along that many
            directions (1) on each group of parameters of the same role, and along one on all parameters.
        formulas: Whether to check, for a :class:`TransformerBlock`, a wide twin of it too (the same structure at widths above
            16, four heads, W_O, gelu) and, of post-norm blocks, the vec_r formulas at tiny sizes.
        exact: Whether to check the vec_r formulas of every :class:`TransformerBlock` in the module in exact arithmetic too, at
            the smallest sizes of its structure (:func:`hessiankit.verify.check_exact_blocks`): it takes seconds.
        params: The parameters to take, as in :func:`hessiankit.hessian`; all that require grad by default.
        analytic: Your own closed form, compared with hessiankit's and with every healthy reference, where products are compared
            by products: a matrix (P, P), parameters in the order of ``named_parameters()`` and entries in row-major order
            (vec_r); or some of its blocks, ``{(name, name): (n_i, n_j)}``; or a function of a dict name -> tensor, the
            parameters in the dtype of the check, that returns either. A matrix in float32 is compared to float32's tolerance.
            For a wrong block the report says where it differs, and whether it would be right transposed, doubled, with another
            sign or factor, or taken out of column-stacking order (vec_c).
        progress: Function called with (what, items done, items in all): of a reference, directions. By default a terminal's bar.

    Up to 5,000 parameters and 32,768 entries of the inputs torch computes in one thread, which is faster for operations as
    small as these; its number of threads is restored afterwards.

    Returns:
        A :class:`CheckReport`; ``assert hessiankit.check(block)`` is the idiom for a test.

    Raises:
        InputError: If an argument cannot be used.

    >>> bool(check(TransformerBlock(d_model=4, d_ff=5, d_k=2)))
    True

    The Hessian of a linear map under squared error, 2/(N d_out) I (x) X^T X for a weight (d_out, d_in), with a factor forgotten:

    >>> X, Y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    >>> report = check(nn.Linear(3, 2, bias=False), X, Y, analytic=torch.kron(torch.eye(2).double(), X.T @ X / Y.numel()))
    >>> report.passed, next(row.note for row in report.rows if row.name.startswith("analytic"))[:30]
    (False, 'your block is right if doubled')
    """
    check_surroundings("check", block_or_module)
    if directions is not None and directions < 0:
        raise InputError(f"check: directions={directions} is negative; pass 1 or more, 0 for every entry, or None")
    names = None if params is None else list(select("check", block_or_module, params))
    origin = " and inputs and target drawn from it" if inputs is None else ""
    if inputs is not None:
        is_many, pairs, loss = read_data(inputs, target, loss, block_or_module)
        if is_many:
            raise InputError("check: several batches; the references take one, so pass one (inputs, target=...)")
        inputs, target = (ordinary(part) for part in next(pairs))

    elif loss == AUTO:
        loss = "mse"

    def report_in(dtype: torch.dtype | None) -> CheckReport:
        start, bar = time.perf_counter(), progress_bar() if progress is None else nullcontext(progress)
        with bar as tell, preserved(block_or_module, loss), converted((block_or_module, loss), dtype):
            data, labels = generic_example(block_or_module, loss, seed) if inputs is None else (inputs, target)
            data, labels = (cast(x, dtype) for x in (data, labels))
            options = _Options(loss, names, analytic, against, rtol, seed, directions, formulas, exact, tell)
            report = _report(block_or_module, data, labels, options)  # refuses a module without parameters
            kinds = f"{type(block_or_module).__name__}, loss {_loss_name(loss)}, inputs {_shapes(data)}"
            call = f"{kinds}, {method_of(next(block_or_module.parameters()).dtype)}, seed {seed}{origin}"
        return replace(report, asked=call, seconds=time.perf_counter() - start)

    try:
        return report_in(dtype)
    except InputError as error:
        if "NaN or infinite" not in str(error) or dtype is None or inputs is None:
            raise
        if [_has_finite_loss(block_or_module, inputs, target, loss, kind) for kind in (None, dtype)] != [True, False]:
            raise
        kind = next(block_or_module.parameters()).dtype
        note = f"the loss is not finite in {dtype}, as where a mask of finfo.min is cast to a narrower type: compared in {kind}"
        report = report_in(None)
        return replace(report, remarks=(*report.remarks, note))


def _has_finite_loss(module: nn.Module, inputs: Any, target: Any, loss: LossArgument, dtype: torch.dtype | None) -> bool | None:
    """Tell whether a module's loss is finite in a dtype (None: its own); None where there is no loss."""
    with preserved(module, loss), converted((module, loss), dtype):
        try:
            problem = Problem(module, cast(inputs, dtype), cast(target, dtype), loss)
            with problem.at():
                return bool(problem.call().isfinite())
        except Exception:  # whatever a module may raise: the first error is the one to report
            return None


class _Options(NamedTuple):
    """The options of :func:`check`."""

    loss: LossArgument
    params: list[str] | None
    analytic: Any
    references: Iterable[str] | None
    rtol: float | None
    seed: int
    directions: int | None
    formulas: bool
    exact: bool
    progress: Tell


def _report(module: nn.Module, inputs: Any, target: Any, options: _Options) -> CheckReport:
    """Compare the closed form of a module in the dtype of the check: its matrix, or products where P x P is too large."""
    size = sum(p.numel() for p in select("check", module, options.params).values())
    by_products = size > (PRODUCTS if options.directions is None else MATRIX) and options.directions != 0
    entries = sum(x.numel() for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, Tensor))
    with one_thread() if size <= PRODUCTS and entries <= ENTRIES else nullcontext():
        return _compared(module, inputs, target, options, by_products=by_products)


def _compared(module: nn.Module, inputs: Any, target: Any, options: _Options, *, by_products: bool) -> CheckReport:
    """Compare the matrix, or products; record why a reference stopped or the tolerance was lowered."""
    batch = read_request(
        module,
        inputs,
        target,
        loss=options.loss,
        params=options.params,
        handshake=False,  # loss and gradient are rows
    ).only()
    hessian: Hessian | HessianOperator
    if by_products:
        hessian = HessianOperator.of([batch], block_size=1)
    else:
        hessian = hessian_of(Evaluation([batch], None, partial(options.progress, "closed form")))
    problem = Problem(module, inputs, target, options.loss, batch.parameters, batch)
    blocks = {} if options.analytic is None else read_analytic(options.analytic, problem)
    module_traits = traits(problem)
    precision = module_traits.precision
    rtol = options.rtol if options.rtol is not None else TOLERANCE.get(precision, 1e-10)
    is_block = isinstance(module, (TransformerBlock, VisionTransformer)) and not by_products
    defaults = REFERENCES_OF_BLOCKS if is_block else INDEPENDENT
    names = list(defaults if options.references is None else options.references)
    probes = None
    if isinstance(hessian, HessianOperator):
        groups, per_group = roles(problem.params), options.directions or 1
        test_directions = [Direction(j, (j,), options.seed) for j in dict.fromkeys(j for _, j in blocks)]
        test_directions += directions(groups, per_group, options.seed)
        comparison = f"products in {per_group} generic direction(s) on each of {len(groups)} groups of parameters, and on all"
        labels = {direction.label: direction for direction in reversed(test_directions)}
        routes = SideBySide(Judge(rounding_noise(problem, names, precision, by_operator, labels)), module_traits, rtol)
        results = _along_each(problem, hessian, blocks, names, test_directions, routes, options.progress)
    else:
        groups, comparison = {name: (name,) for name in problem.params}, "every entry"
        if options.directions or (options.directions is None and problem.size > ENTRYWISE):
            probes = probe_directions(problem, options.directions or 4, options.seed)
            comparison = f"{options.directions or 4} generic directions a parameter"
        substitutes = ["torch.func.hessian"] if options.references is None and not is_block else []
        results = _all_at_once(problem, names, substitutes, probes, options)
        judge = Judge(rounding_noise(problem, results, precision, closed_form))
        routes = SideBySide(judge, module_traits, AGREEMENT[precision])
        options.progress("agreement of the references", 0, 1)
        matrices = {ANALYTIC: completed(blocks, hessian.matrix, problem.slices)} if blocks else {}
        matrices |= {HESSIANKIT: hessian.matrix}
        outcomes = {n: Outcome(A if probes is None else probes.V.to(A) @ A.T) for n, A in matrices.items()}
        routes.add({**outcomes, **results}, probes)
    judge, health = routes.judge, routes.health(results)
    healthy = [name for name in results if health[name].healthy]
    rows: list[CheckRow] = []
    for count, name in enumerate(healthy):
        options.progress(f"errors beside {name}", count, len(healthy))
        gaps = routes.gaps(HESSIANKIT, name)
        cells = cells_of_groups(gaps, groups, judge.names) if by_products else cells_of_pairs(judge.names)
        rows += judge.rows(gaps, rtol, name, health[name].seconds, cells)
    options.progress("operator and diagonal", 0, 2)
    exact = {n: x for n in healthy if isinstance(x := results[n], Outcome) and not REFERENCES[n].many_calls}
    same_call = SameCall(judge, rtol, groups, exact)
    of_matrix: dict[str, Any] = {}
    if isinstance(hessian, HessianOperator):
        same_call.of_operator(hessian)
        remarks = [f"dense blocks and identities: not compared beyond {PRODUCTS:,} parameters{''.join(same_call.remarks)}"]
    else:
        same_call.of_matrix(hessian, probes, options.seed)
        remarks, of_matrix["identities"] = same_call.remarks, identities(problem, hessian.matrix, rtol=rtol)
        formulas, of_matrix["exact"] = _formulas(module, options)
        same_call.rows += formulas
    if blocks:
        kind = max((block.dtype for block in blocks.values()), key=lambda dtype: TOLERANCE.get(dtype, 0.0))
        tolerance = rtol if options.rtol is not None else max(rtol, TOLERANCE.get(kind, 0.0))
        if tolerance > rtol:
            remarks.append(f"analytic, in {kind}, is compared to {tolerance:.0e}; a function has all digits")
        # central differences take no products along the directions on single parameters
        same_call.rows += analytic_rows(blocks, routes, (HESSIANKIT, *(exact if by_products else healthy)), hessian, tolerance)
    notes = tuple(remark for remark in (module_traits.padding, *remarks) if remark)
    lowered_by = module_traits.lowered_by if options.rtol is None else ""
    lowered = f"{lowered_by} computes in {precision}" if lowered_by else ""
    all_rows = (*rows, *same_call.rows)
    return CheckReport(all_rows, tuple(health.values()), hessian, rtol, comparison, remarks=notes, lowered=lowered, **of_matrix)


def _all_at_once(
    problem: Problem, names: list[str], substitutes: list[str], probes: Probes | None, options: _Options
) -> dict[str, Outcome | Unsupported]:
    """Return matrices, or products along ``probes``; those of central differences along a direction on each parameter.

    The references ``substitutes`` take part where torch has no forward mode of the gradient.
    """
    difference_probes = None  # each of their directions costs dozens of calls
    if options.directions is None:
        difference_probes = probe_directions(problem, 1, options.seed) if probes is None else probes.first()
    V = None if probes is None else probes.V
    results = run_references(problem, V, names, probes=difference_probes, progress=options.progress)
    if substitutes and isinstance(results["jvp(grad)"], Unsupported):
        results |= run_references(problem, V, substitutes, progress=options.progress)
    return results


def _along_each(
    problem: Problem,
    operator: HessianOperator,
    blocks: Blocks,
    names: list[str],
    test_directions: list[Direction],
    routes: SideBySide,
    progress: Tell,
) -> dict[str, Outcome | Unsupported]:
    """Compare products of the operator and the references one direction at a time; return the last of each reference.

    Only what one direction needs is in memory: a vector of the parameters' size for each result, and a graph. The last direction
    is the one that central differences, which call the module many times, take as well.
    """
    results, failures = dict[str, Outcome | Unsupported](), set[str]()
    for count, direction in enumerate(test_directions, 1):
        V = direction.vector(problem)[None]
        subset = [n for n in names if n not in failures and (count == len(test_directions) or not REFERENCES[n].many_calls)]
        outcomes = run_references(problem, V, subset)
        failures |= {name for name, result in outcomes.items() if isinstance(result, Unsupported)}
        subject, probes = {HESSIANKIT: Outcome((operator @ V[0])[None])}, Probes(V, (direction.label,))
        column = {pair: block for pair, block in blocks.items() if pair[1] == direction.label}
        user_form = {ANALYTIC: Outcome(completed(column, subject[HESSIANKIT].value, problem.slices, probes))} if column else {}
        routes.add({**user_form, **subject, **outcomes}, probes)
        results |= outcomes
        progress("products", count, len(test_directions))
    return {name: results[name] for name in names}


def _formulas(module: nn.Module, options: _Options) -> tuple[list[CheckRow], tuple[ExactRow, ...]]:
    """Return the rows of the vec_r formulas and of a wider block, and those of exact arithmetic, where they are asked for."""
    rows: list[CheckRow] = []
    with preserved_random_states(module):
        if options.formulas and isinstance(module, TransformerBlock):
            options.progress("formulas, and a wider block", 1, 2)
            rows += [*twin_rows(module, options.seed), *formula_rows(module, options.seed)]
        return rows, check_exact_blocks(module, seed=options.seed) if options.exact else ()


def _loss_name(loss: LossArgument) -> str:
    return str(loss) if loss is None or isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def _shapes(inputs: Any) -> str:
    """Return the shapes of a tensor, or of all tensors of a tuple or a mapping.

    >>> _shapes(torch.ones(2, 3)), _shapes({"ids": torch.ones(4), "use_cache": False})
    ('2 x 3', 'ids 4, use_cache False')
    """
    if isinstance(inputs, Tensor):
        return sizes(inputs.shape)
    if isinstance(inputs, Mapping):
        return ", ".join(f"{name} {_shapes(x)}" for name, x in inputs.items())
    return ", ".join(map(_shapes, inputs)) if isinstance(inputs, (tuple, list)) else str(inputs)


def generic_example(module: nn.Module, loss: LossArgument, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and a target for one of hessiankit's own modules, of sizes that differ from each other and from the widths.

    Raises:
        InputError: For any other module, whose input shape cannot be known, or a loss without a known target.
    """
    if not isinstance(module, (Transformer, TransformerBlock, VisionTransformer)):
        raise InputError(f"check: the inputs of a {type(module).__name__} are not known; pass inputs=... and target=...")
    if not isinstance(loss, str):
        raise InputError("check: with a loss of your own, pass inputs=... and target=...")
    first, generator = next(module.parameters()), torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return normal(shape, generator, first)

    def integers(high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(high, shape, generator=generator, device="cpu").to(first.device)

    if isinstance(module, VisionTransformer):
        inputs = draw(3, module.embedding.P.shape[0], module.embedding.W_E.shape[0])
    elif isinstance(module, Transformer):
        vocabulary, positions = module.embedding.W_E.shape[0], module.embedding.P
        inputs = integers(vocabulary, (2, 3 if positions is None else min(3, positions.shape[0])))
    else:
        inputs = draw(2, next(n for n in (3, 5, 7) if n not in {module.d_model, module.attention.d_k}), module.d_model)
    with torch.no_grad():
        shape = tuple(module(inputs).shape)
    return inputs, draw(*shape) if loss == "mse" else integers(shape[-1], shape[:-1])
