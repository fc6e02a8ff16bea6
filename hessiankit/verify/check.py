"""Does the closed form agree with automatic differentiation? One call, one report, usable as a test."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import TransformerBlock, VisionTransformer
from hessiankit.curvature import Hessian, hessian
from hessiankit.errors import InputError
from hessiankit.request.batches import batches
from hessiankit.request.calling import Loss, map_tensors
from hessiankit.request.selection import Params, select
from hessiankit.tables import as_html, as_text, table
from hessiankit.torch_state import one_at_a_time
from hessiankit.verify.comparison import Blocks, probe_directions
from hessiankit.verify.formulas import formula_errors
from hessiankit.verify.health import Health, examine
from hessiankit.verify.identities import IdentityReport, examine_identities
from hessiankit.verify.problem import Problem
from hessiankit.verify.references import Outcome, Unsupported, run_references
from hessiankit.verify.route_table import Choice, choose
from hessiankit.verify.traits import traits

AGAINST = ("reverse-over-reverse", "jvp(grad)", "central-differences", "torch.func.hessian", "curvlinops")
"""What is compared with where the route table does not decide, and for hessiankit's own blocks: the wrong ones are shown too."""

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Relative to the largest entry of a block pair; float32 and bfloat16 lose digits in sums over tokens and samples."""
WHOLE = 400
"""Up to this many parameters every entry is compared; beyond it, generic directions on every parameter."""
FORMULAS = "vec_r"


@dataclass(frozen=True)
class CheckRow:
    """One comparison: a block pair of the closed form against one healthy reference.

    Attributes:
        name: The block pair, "row parameter x column parameter".
        reference: What it was compared with.
        max_rel_error: Largest difference, relative to the largest entry of the block pair.
        passed: Whether it lies within the tolerance, plus what the reference says of its own error.
        seconds: What the reference cost for all block pairs together.
    """

    name: str
    reference: str
    max_rel_error: float
    passed: bool
    seconds: float


@dataclass(frozen=True, repr=False)
class CheckReport:
    """What :func:`check` found. True when every row passed and at least two independent references are healthy.

    Attributes:
        rows: One for each block pair and healthy reference, and for each vec_r formula.
        health: What was found about each reference, healthy or not.
        hessian: The closed form under test.
        rtol: The tolerance.
        comparison: "every entry", or how many directions a parameter.
        seconds: Time taken by everything.
        left_out: References that were not run, and why: by the route table they are wrong, or no independent witnesses.
        remarks: What a reader should know: what breaks the references, why the route table did not decide.
        lowered: Why the tolerance is wider than the dtype needs: the operation that computes in a lower precision; else "".
        identities: Exact identities of the gradient and the Hessian that the module's structure implies.
    """

    rows: tuple[CheckRow, ...]
    health: tuple[Health, ...]
    hessian: Hessian
    rtol: float
    comparison: str
    seconds: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    lowered: str = ""
    identities: IdentityReport = field(default_factory=IdentityReport)

    @property
    def healthy_groups(self) -> tuple[str, ...]:
        """The independent differentiation paths that agree among each other."""
        return tuple(dict.fromkeys(h.group for h in self.health if h.healthy))

    @property
    def passed(self) -> bool:
        """Whether the closed form agrees with two healthy, independent references everywhere, and fulfils every identity."""
        return len(self.healthy_groups) >= 2 and all(row.passed for row in self.rows) and self.identities.passed

    def __bool__(self) -> bool:
        return self.passed

    @property
    def references(self) -> tuple[str, ...]:
        """The references that the rows compare with."""
        return tuple(dict.fromkeys(row.reference for row in self.rows))

    @property
    def max_rel_error(self) -> float:
        """The largest error of all rows."""
        return max((row.max_rel_error for row in self.rows), default=float("nan"))

    @property
    def verdict(self) -> str:
        """One line that says what was found."""
        if len(self.healthy_groups) < 2:
            return (
                f"NOT VERIFIED: only {len(self.healthy_groups)} independent healthy reference(s), two are needed. "
                "Name more references in against=..., or see their health for what broke them."
                + "".join(f" Note: {r}." for r in self.remarks)
            )
        failed = [row for row in self.rows if not row.passed]
        if failed:
            worst = max(failed, key=lambda row: row.max_rel_error)
            where = f"{worst.name} against {worst.reference}: {worst.max_rel_error:.1e}"
            return f"FAILED: {len(failed)} of {len(self.rows)} rows disagree; the worst is {where} (tolerance {self._tolerance})"
        if not self.identities:
            return f"FAILED: the references agree, but an exact identity does not hold. {self.identities.verdict}"
        return (
            f"PASSED: {len(self.rows)} rows; largest error {self._agreement()} (tolerance {self._tolerance}, {self.comparison})"
            + (f"; {len(self.identities.rows)} identities to {self.identities.max_rel_error:.1e}" if self.identities.rows else "")
        )

    @property
    def _tolerance(self) -> str:
        return f"{self.rtol:.0e}{f', as {self.lowered}' if self.lowered else ''}"

    def _agreement(self) -> str:
        """Say how far each reference agrees, and which of them resolve less than the tolerance by their own estimate."""
        parts = []
        for reference in self.references:
            rows = [row for row in self.rows if row.reference == reference]
            worst = max(row.max_rel_error for row in rows)
            within = " within its own error" if worst > self.rtol else ""
            parts.append(f"{reference} {worst:.1e}{within}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain Python data, ready for JSON."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "rtol": self.rtol,
            "comparison": self.comparison,
            "left_out": dict(self.left_out),
            "remarks": list(self.remarks),
            "lowered": self.lowered,
            "seconds": self.seconds,
            "rows": [asdict(row) for row in self.rows],
            "health": [asdict(h) for h in self.health],
            "identities": self.identities.to_dict(),
            "hessian": self.hessian.to_dict(),
        }

    def table_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield one line a block pair: name, size, spectral norm, Frobenius norm, error by reference."""
        errors: dict[str, dict[str, CheckRow]] = {}
        for row in self.rows:
            errors.setdefault(row.name, {})[row.reference] = row
        references = [r for r in self.references if r != FORMULAS]
        H = self.hessian
        short = dict(zip(H.names, H.short_names, strict=True))
        for i, j in H.pairs():
            cells = [errors.get(f"{i} x {j}", {}).get(r) for r in references]
            shown = ["" if c is None else f"{c.max_rel_error:.1e}" + ("" if c.passed else " FAIL") for c in cells]
            size = "{} x {}".format(*H.block(i, j).shape)
            yield f"{short[i]} x {short[j]}", size, f"{H.spectral_norm(i, j):.4g}", f"{H.frobenius_norm(i, j):.4g}", *shown

    @property
    def headers(self) -> tuple[str, ...]:
        """Column names of :meth:`table_rows`."""
        return ("block pair", "size", "||.||_2", "||.||_F", *(r for r in self.references if r != FORMULAS))

    def health_lines(self) -> list[str]:
        """Return one line a reference: healthy or not, why, and what it cost."""
        lines = [f"{h.reference}: {'healthy' if h.healthy else 'UNHEALTHY'}: {h.reason} ({h.seconds:.1f} s)" for h in self.health]
        lines += [f"{name}: left out: {why}" for name, why in self.left_out.items()]
        lines += [f"note: {remark}" for remark in self.remarks]
        formulas = [row.max_rel_error for row in self.rows if row.reference == FORMULAS]
        if formulas:
            pairs = f"{len(formulas)} block pairs at tiny unequal sizes"
            lines.append(f"vec_r formulas of the chapters against the fast path: {pairs} agree to {max(formulas):.1e}")
        return lines

    def __repr__(self) -> str:
        title = f"closed form: {self.hessian.matrix.shape[0]} parameters, {self.hessian.seconds:.2f} s"
        if self.hessian.fallbacks:
            title += f"; differentiated automatically one by one: {', '.join(self.hessian.fallbacks)}"
        if self.hessian.unused:
            title += f"; no effect on the loss: {', '.join(map(repr, self.hessian.unused))}"
        lines = ["  " + line for line in self.health_lines()]
        own = [] if not self.identities.rows else [table(self.identities.headers, self.identities.table_rows(), left=3)]
        return as_text(table(self.headers, self.table_rows(), left=2), *own, title, "references:", *lines, self.verdict)

    def _repr_html_(self) -> str:
        own = self.identities._repr_html_() if self.identities.rows else ""
        return as_html(self.headers, self.table_rows(), caption=self.verdict) + own


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
    rows = list(_rows(found, problem, Blocks(problem, probes, precision), results, health, tolerance))
    if formulas and isinstance(module, TransformerBlock):
        before = time.perf_counter()
        errors = formula_errors(module, seed)
        seconds = time.perf_counter() - before
        rows += [CheckRow(name, FORMULAS, error, error <= 1e-10, seconds) for name, error in errors.items()]
    exact = examine_identities(problem, found.matrix, rtol=tolerance, precision=precision)
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
        exact,
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
    problem: Problem,
    blocks: Blocks,
    results: dict[str, Outcome | Unsupported],
    health: dict[str, Health],
    rtol: float,
) -> Iterator[CheckRow]:
    """Compare the closed form with every healthy reference, block pair by block pair (i, j) with i before j."""
    mine = found.matrix if blocks.probes is None else blocks.probes.V @ found.matrix
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
                    yield CheckRow(f"{i} x {j}", name, error, passed, outcome.seconds)


def generic_example(module: nn.Module, loss: Loss, seed: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and a target for one of hessiankit's own modules, of sizes unequal to each other and to the widths.

    Raises:
        InputError: For any other module, whose input shape cannot be known, or a loss without a known target.
    """
    if not isinstance(module, (TransformerBlock, VisionTransformer)):
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
