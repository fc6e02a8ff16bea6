"""``check``: compare the closed form of a module with automatic differentiation, in one report that a test can assert."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import Transformer, TransformerBlock, VisionTransformer
from hessiankit.curvature.dense import Hessian, hessian
from hessiankit.curvature.operator import HessianOperator, hessian_operator
from hessiankit.engine.problem.batches import batches
from hessiankit.engine.problem.calling import Loss, ordinary
from hessiankit.engine.problem.selection import Params, check_surroundings, select
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.support.tables import sizes
from hessiankit.support.torch_state import one_at_a_time, one_thread, preserved_random_states
from hessiankit.verify.check_report import CheckReport
from hessiankit.verify.comparison import Judge, RoundingNoise, Route, cells_of_groups, cells_of_pairs, closed_form
from hessiankit.verify.exact import check_exact_blocks
from hessiankit.verify.health import SideBySide, examine, rounding_noise
from hessiankit.verify.identities import examine_identities
from hessiankit.verify.in_place import converted, preserved
from hessiankit.verify.probes import Probes, directions, probe_directions, roles
from hessiankit.verify.problem import Problem, cast
from hessiankit.verify.products import CLOSED, Products
from hessiankit.verify.references import REFERENCES, Outcome, Unsupported, run_references
from hessiankit.verify.rows import FORMULAS, CheckRow
from hessiankit.verify.same_call import SameCall, by_operator, operator_of
from hessiankit.verify.small_blocks import formula_errors, twin_rows
from hessiankit.verify.traits import STOPPED, Traits, traits

INDEPENDENT = ("reverse-over-reverse", "jvp(grad)", "central-differences")
"""Three references that share nothing."""
AGAINST = (*INDEPENDENT, "torch.func.hessian", "curvlinops")
"""The references for hessiankit's own blocks: those that torch has wrong are shown too."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.3}
"""Relative to the largest entry of a block pair; float32 and bfloat16 lose digits in sums over tokens and samples."""
WHOLE = 400
"""Up to this many parameters every entry is compared; beyond it, generic directions on every parameter."""
PRODUCTS = 5000
"""Beyond this many parameters no matrix is formed: products are compared, along generic directions on groups of parameters."""
MATRIX = 20000
"""The same where ``directions`` are given."""
DIAGONAL = 100_000
"""Beyond this many parameters the exact diagonal, which forms the curvature between activations, is left alone."""
ENTRIES = 2**15
"""Inputs of at most so many entries are small: torch cuts an operation into as many for a thread (its grain size)."""


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
        against: Names of the references, see ``hessiankit.verify.REFERENCES``. By default three that share nothing, reverse over
            reverse, forward over reverse and central differences; ``torch.func.hessian`` where torch has no forward mode of the
            gradient, and for hessiankit's own blocks, with curvlinops, to show where they are wrong.
        rtol: Tolerance relative to the largest entry of each block pair; 1e-10 in float64, 1e-3 in float32.
        seed: Seed of all random numbers.
        dtype: The dtype of the check: the module's own tensors are converted where they lie and put back bit for bit, inputs
            are cast; None keeps the module's own. Where the loss is finite in the module's own dtype only, that one is kept, and
            the report says so.
        directions: Directions a parameter to compare along; by default every entry is compared up to 400 parameters
            and 4 directions a parameter beyond; 0 for every entry at any size. Beyond 5,000 parameters (20,000 where
            ``directions`` is given) no matrix is formed: products of ``hessian_operator`` are compared along that many
            directions (1) on each group of parameters of the same role, and along one on all parameters.
        formulas: For a :class:`TransformerBlock`, whether to check as well a wide twin of it (the same structure at widths above
            16, four heads, W_O, gelu) and, of post-norm blocks, the vec_r formulas at tiny sizes.
        exact: Whether to check the vec_r formulas of every :class:`TransformerBlock` in the module in exact arithmetic too, at
            the smallest sizes of its structure (:func:`hessiankit.verify.check_exact_blocks`): it takes seconds.
        params: The parameters to take, as in :func:`hessiankit.hessian`; all that require grad by default.
        progress: Called with (what, items done, items in all): of a reference, directions. By default a bar in a terminal.

    Up to 5,000 parameters and 32,768 entries of the inputs torch computes in one thread, which is faster for operations as
    small as these; its number of threads is restored afterwards.

    Returns:
        A :class:`CheckReport`; ``assert hessiankit.check(block)`` is the idiom for a test.

    Raises:
        InputError: If an argument cannot be used.

    >>> bool(check(TransformerBlock(d_model=4, d_ff=5, d_k=2)))
    True
    """
    check_surroundings("check", block_or_module)
    complex_one = next((name for name, p in block_or_module.named_parameters() if p.is_complex()), None)
    if complex_one is not None:
        raise InputError(f"check: the parameter {complex_one!r} is complex; pass real ones, the Hessian is of a real function")
    names = None if params is None else list(select("check", block_or_module, params))
    drawn = " and inputs and target drawn from it" if inputs is None else ""
    if inputs is not None:
        several, pairs = batches("check", inputs, target, loss, block_or_module)
        if several:
            raise InputError("check: several batches; the references take one, so pass one (inputs, target=...)")
        inputs, target = (ordinary(part) for part in next(pairs))

    def report_in(dtype: torch.dtype | None) -> CheckReport:
        bar = progress_bar() if progress is None else nullcontext(progress)
        with bar as tell, preserved(block_or_module, loss), converted((block_or_module, loss), dtype):
            given, labels = generic_example(block_or_module, loss, seed) if inputs is None else (inputs, target)
            if dtype is not None:
                given, labels = (cast(x, dtype) for x in (given, labels))
            options = _Options(loss, names, against, rtol, seed, directions, formulas, exact, tell)
            report = _report(block_or_module, given, labels, options)  # refuses a module without parameters
            kinds = f"{type(block_or_module).__name__}, loss {_named(loss)}, inputs {_shapes(given)}"
            return replace(report, asked=f"{kinds}, {_dtype(block_or_module)}, seed {seed}{drawn}")

    try:
        return report_in(dtype)
    except InputError as error:
        if "NaN or infinite" not in str(error) or dtype is None or inputs is None:
            raise
        if not _finite_as_it_is_only(block_or_module, inputs, target, loss, dtype):
            raise
        kind = next(block_or_module.parameters()).dtype
        note = f"the loss is not finite in {dtype}, as where a mask of finfo.min is cast to a narrower type: compared in {kind}"
        report = report_in(None)
        return replace(report, remarks=(*report.remarks, note))


def _finite_as_it_is_only(module: nn.Module, inputs: Any, target: Any, loss: Loss, dtype: torch.dtype) -> bool:
    """Tell whether a module's loss is finite in its own dtype, and not in another."""
    finite = []
    for kind in (None, dtype):
        with preserved(module, loss), converted((module, loss), kind):
            given, labels = (x if kind is None else cast(x, kind) for x in (inputs, target))
            try:
                problem = Problem(module, given, labels, loss)
                with problem.at():
                    finite.append(bool(problem.call().isfinite()))
            except Exception:  # whatever a module may raise: the first error is the one to report
                return False
    return finite == [True, False]


@dataclass(frozen=True)
class _Options:
    """The options of :func:`check`."""

    loss: Loss
    params: list[str] | None
    against: Iterable[str] | None
    rtol: float | None
    seed: int
    directions: int | None
    formulas: bool
    exact: bool
    progress: Tell


def _report(module: nn.Module, inputs: Any, target: Any, options: _Options) -> CheckReport:
    """Compare the closed form of a module in the dtype of the check: its matrix, or products where P x P is too large."""
    start = time.perf_counter()
    params = list(select("check", module, options.params))
    known: dict[str, Tensor] = dict(module.named_parameters())
    size = sum(known[name].numel() for name in params)
    by_products = size > (PRODUCTS if options.directions is None else MATRIX) and options.directions != 0
    entries = sum(x.numel() for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, Tensor))
    with one_thread() if size <= PRODUCTS and entries <= ENTRIES else nullcontext():
        report = _compared(module, inputs, target, params, options, by_products=by_products)
    return replace(report, seconds=time.perf_counter() - start)


def _compared(
    module: nn.Module, inputs: Any, target: Any, params: list[str], options: _Options, *, by_products: bool
) -> CheckReport:
    """Compare the matrix, or products; say what stopped a reference or lowered the tolerance."""
    common: dict[str, Any] = {"loss": options.loss, "handshake": False}  # loss and gradient are rows of the report
    closed: Hessian | HessianOperator
    if by_products:
        closed = hessian_operator(module, inputs, target, params=params, block_size=1, **common)
    else:
        tell = partial(options.progress, "closed form")
        closed = hessian(module, inputs, target, params=options.params, progress=tell, **common)
    known = dict(module.named_parameters())
    problem = Problem(module, inputs, target, options.loss, {name: p for name, p in known.items() if name in closed.slices})
    found = traits(problem)
    rtol = options.rtol if options.rtol is not None else TOLERANCE.get(found.precision, 1e-10)
    if isinstance(closed, HessianOperator):
        report = _compared_products(problem, closed, found, rtol, options)
    else:
        report = _compared_matrix(problem, closed, found, rtol, options)
    moves = any(REFERENCES[h.reference].many_calls and not h.healthy for h in report.health)
    stopped = STOPPED.format(found.stopped_by) if found.stopped_by and moves else ""
    return replace(
        report,
        remarks=tuple(remark for remark in (found.padding, stopped, *report.remarks) if remark),
        lowered=f"{found.lowered_by} computes in {found.precision}" if options.rtol is None and found.lowered_by else "",
    )


def _compared_matrix(problem: Problem, closed: Hessian, found: Traits, rtol: float, options: _Options) -> CheckReport:
    """Compare the matrix with the references, every entry or along directions on each parameter."""
    module, seed = problem.module, options.seed
    probes, few = None, None  # few: of central differences, each of whose directions costs dozens of calls
    if options.directions or (options.directions is None and problem.size > WHOLE):
        probes = probe_directions(problem, options.directions or 4, seed)
    if options.directions is None:
        few = probe_directions(problem, 1, seed) if probes is None else probes.first()
    own = isinstance(module, (TransformerBlock, VisionTransformer))
    names = tuple(options.against) if options.against is not None else AGAINST if own else INDEPENDENT
    V = None if probes is None else probes.V
    results = run_references(problem, V, names, probes=few, progress=options.progress)
    if options.against is None and not own and isinstance(results["jvp(grad)"], Unsupported):
        results |= run_references(problem, V, ["torch.func.hessian"], progress=options.progress)
    noise = rounding_noise(results, problem, found.precision, {CLOSED: closed_form})
    options.progress("agreement of the references", 0, 1)
    health = examine(results, problem, probes=probes, noise=noise)
    judge = Judge(tuple(problem.params), found.precision, noise)
    healthy = {n: x for n, x in results.items() if isinstance(x, Outcome) and health[n].healthy}
    along = closed.matrix if probes is None else probes.V.to(closed.matrix) @ closed.matrix
    beside = SideBySide(problem, {CLOSED: Outcome(along, None, 0.0), **results}, probes)
    rows: list[CheckRow] = []
    for done, (name, outcome) in enumerate(healthy.items()):
        options.progress(f"errors beside {name}", done, len(healthy))
        rows += judge.rows(beside.gaps(CLOSED, name), rtol, name, outcome.seconds, cells_of_pairs(judge.names))
    options.progress("operator and diagonal", 0, 2)
    others, remarks = _same_call(problem, closed, judge, healthy, probes, rtol, seed)
    rows += others
    with preserved_random_states(module):
        if options.formulas and isinstance(module, TransformerBlock):
            options.progress("formulas, and a wider block", 1, 2)
            before = time.perf_counter()
            errors = formula_errors(module, seed)
            rows += twin_rows(module, seed)
            seconds = time.perf_counter() - before
            rows += [CheckRow(name, FORMULAS, error, error <= 1e-10, seconds) for name, error in errors.items()]
        exact = check_exact_blocks(module, seed=seed) if options.exact else ()
    return CheckReport(
        tuple(rows),
        tuple(health.values()),
        closed,
        rtol,
        "every entry" if probes is None else f"{options.directions or 4} generic directions a parameter",
        remarks=tuple(remarks),
        identities=examine_identities(problem, closed.matrix, rtol=rtol),
        exact=exact,
    )


def _same_call(
    problem: Problem,
    closed: Hessian,
    judge: Judge,
    healthy: Mapping[str, Outcome],
    probes: Probes | None,
    rtol: float,
    seed: int,
) -> tuple[list[CheckRow], list[str]]:
    """Compare loss, gradient, operator and diagonal of the same call; return the rows, and why some are missing or failed."""
    same = SameCall(problem, judge, rtol, {name: (name,) for name in problem.params}, lambda: operator_of(problem))
    reference, exact = next(((n, x.value) for n, x in healthy.items() if x.error is None), ("", None))
    notes: list[str] = []

    def symmetric_operator() -> HessianOperator:
        operator = operator_of(problem)
        _ = operator.symmetry_error  # refuses what is not symmetric
        return operator

    def of_operator(operator: HessianOperator, seconds: float) -> Iterator[CheckRow]:
        gradients = list(same.gradient(operator.gradient, seconds))
        if not all(row.passed for row in gradients):
            notes.extend(same.wrong_slope(operator.gradient))
        yield from gradients
        if exact is not None:
            few = probes or probe_directions(problem, 1, seed)
            products = (operator @ few.V.T.to(operator.torch_dtype)).T
            yield from same.products(products, exact if probes else few.V.to(exact) @ exact.T, few.owners, reference, seconds)

    def of_diagonal(diagonal: Tensor, seconds: float) -> Iterator[CheckRow]:
        """Compare with a healthy reference; with the dense closed form where references gave products."""
        if exact is not None:
            name, matrix = (reference, exact) if probes is None else ("hessian", closed.matrix)
            yield from same.whole_diagonal(diagonal, matrix, name, seconds)

    operator_rows, why = same.attempt("operator", "gradient and operator", symmetric_operator, of_operator)
    diagonal_rows, why_not = same.attempt("diagonal", "the diagonal", same.exact_diagonal, of_diagonal)
    return [same.loss(closed.loss), *operator_rows, *diagonal_rows], [*notes, *why, *why_not]


def _compared_products(problem: Problem, operator: HessianOperator, found: Traits, rtol: float, options: _Options) -> CheckReport:
    """Compare products with those of the references, along directions on groups of parameters."""
    groups, per_group = roles(problem.params), options.directions or 1
    names, along = tuple(options.against or INDEPENDENT), directions(groups, per_group, options.seed)
    remake = lambda: operator_of(problem, block_size=1)  # noqa: E731
    routes: dict[str, Route] = {n: REFERENCES[n].products for n in names if n in REFERENCES and not REFERENCES[n].many_calls}
    routes[CLOSED] = by_operator
    noise = RoundingNoise(problem, routes, torch.finfo(found.precision).eps, {d.label: d for d in reversed(along)})
    judge = Judge(tuple(problem.params), found.precision, noise)
    compare = Products(problem, operator, names, along, rtol, judge, options.progress)
    compare.run()
    health = compare.health(found)
    rows: list[CheckRow] = []
    for name in (name for name in names if health[name].healthy):
        gaps = compare.gaps(CLOSED, name)
        rows += judge.rows(gaps, rtol, name, health[name].seconds, cells_of_groups(gaps, groups, judge.names))
    same = SameCall(problem, judge, rtol, groups, remake)
    rows += [same.loss(operator.loss), *same.gradient(operator.gradient, 0.0)]
    left_out = f"dense blocks and identities: not compared beyond {PRODUCTS:,} parameters"
    exact = next((n for n in names if health[n].healthy and not REFERENCES[n].many_calls), None)
    if problem.size > DIAGONAL:
        left_out += f", hessian_diagonal not beyond {DIAGONAL:,}"
    elif exact is not None:
        before = time.perf_counter()
        diagonal = same.exact_diagonal()
        rows += same.few_of_diagonal(diagonal, exact, time.perf_counter() - before)
    comparison = f"products in {per_group} generic direction(s) on each of {len(groups)} groups of parameters, and on all"
    return CheckReport(tuple(rows), tuple(health.values()), operator, rtol, comparison, remarks=(left_out,))


def _named(loss: Loss) -> str:
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


def _dtype(module: nn.Module) -> str:
    return str(next(module.parameters()).dtype).removeprefix("torch.")


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
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(first)

    if isinstance(module, VisionTransformer):
        inputs = draw(3, *(int(n) for n in (module.embedding.P.shape[0], module.embedding.W_E.shape[0])))
        shape: tuple[int, ...] = (3, int(module.head.W_C.shape[1]))
    elif isinstance(module, Transformer):
        vocabulary, positions = module.embedding.W_E.shape[0], module.embedding.P
        length = 3 if positions is None else min(3, positions.shape[0])
        inputs = torch.randint(vocabulary, (2, length), generator=generator, device="cpu").to(first.device)
        with torch.no_grad():
            shape = tuple(module(inputs).shape)
    else:
        length = next(n for n in (3, 5, 7) if n not in {module.d_model, module.attention.d_k})
        inputs = draw(2, length, module.d_model)
        shape = tuple(inputs.shape)
    if loss == "mse":
        return inputs, draw(*shape)
    return inputs, torch.randint(shape[-1], shape[:-1], generator=generator, device="cpu").to(first.device)
