"""torch's database of operators, differentiated twice: by ``hessiankit.hessian``, and by four routes of torch.

The database (``op_db`` of torch's own tests) has sample inputs for every operator. The parameters of a sample are all its
differentiable tensors, so that blocks between an input and a weight are part of its Hessian. Products with the Hessian along two
generic directions are compared with central differences of torch's gradient.
"""

from __future__ import annotations

import math
import re
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from statistics import median_low
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from benchmarks.routes.torch_routes import ROUTES, Scalar, gradient
from hessiankit.curvature.dense import hessian
from hessiankit.request.loss import mean_square
from hessiankit.support.errors import HessiankitError, InputError, unknown
from hessiankit.support.files import WithDict
from hessiankit.support.tables import Detail, Piece, Printed, as_markdown, table
from hessiankit.support.torch_state import one_thread
from hessiankit.verify.problem import Problem
from hessiankit.verify.reference_base import Unsupported, typed_line
from hessiankit.verify.references import REFERENCES

AUDITED = ("grad twice", "jvp(grad)", "torch.func.hessian", "grad(jvp)")
"""Routes of the table: the four orders of forward and reverse mode that users meet."""

MOST_SAMPLES, MOST_PARAMETERS = 48, 2000
"""Samples of one operator, evenly spaced (max_pool2d has 1440), and parameters of a sample: all samples would take an hour."""

TOLERANCE = 1e-7
"""Relative to the products' largest entry, beside the estimated error of the differences: torch's hardsigmoid has constants in
float32, which is an error of 3e-8, and lost terms are above 1e-6."""

CLOSE = 1e-9
"""The same between ``hessiankit.hessian`` and double backward, where that is right: both only round."""

SMOOTH = 1e-5
"""Largest estimated error of the differences, relative to their largest entry, with which they judge."""

RIGHT, REFUSED, RAISED, SILENT = "right", "refused", "raw error", "silent"
ROUGH, NO_GRADIENT, SKIPPED = "not smooth", "torch's gradient wrong", "skipped"
VERDICTS = (RIGHT, REFUSED, RAISED, SILENT, ROUGH, NO_GRADIENT, SKIPPED)
"""On one sample; no route is judged where the function is not smooth, or torch's gradient is not the gradient of any function."""


class Verdict(NamedTuple):
    """Verdict on ``hessiankit.hessian`` for one sample, its kind of message, and the error of each route that torch can run."""

    status: str
    message: str = ""
    errors: Mapping[str, float] = MappingProxyType({})
    wrong: frozenset[str] = frozenset()


class Sample(nn.Module):
    """One sample of an operator as a module: its differentiable tensors are the parameters, its input is ignored."""

    def __init__(self, entry: Any, sample: Any) -> None:
        super().__init__()
        leaves, self.tree = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.entry, self.readout = entry, sample.output_process_fn_grad
        self.leaves = dict(enumerate(leaves))
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.requires_grad and x.dtype == torch.float64 and x.numel():
                self.register_parameter(f"x{k}", nn.Parameter(x.detach().clone()))
        outputs = self.outputs()  # under torch.func they no longer say whether they require a gradient
        self.moving = [k for k, y in enumerate(outputs) if isinstance(y, Tensor) and y.requires_grad and y.numel()]

    def outputs(self) -> list[Any]:
        """Return all outputs, with the symmetric or triangular arguments that torch's own tests of gradients pass."""
        values = {**self.leaves, **{int(name[1:]): p for name, p in self.named_parameters()}}
        first, args, kwargs = tree_unflatten([values[k] for k in sorted(values)], self.tree)
        return tree_leaves(self.readout(self.entry.gradcheck_wrapper(self.entry.op, first, *args, **kwargs)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the differentiable outputs as one vector, complex ones as pairs of real numbers."""
        outputs = self.outputs()
        parts = [torch.view_as_real(y.resolve_conj()) if y.is_complex() else y for y in (outputs[k] for k in self.moving)]
        return torch.cat([y.reshape(-1) for y in parts]) if len(parts) != 1 else parts[0].reshape(-1)


@dataclass(frozen=True)
class OperatorRow:
    """Results of one operator of the database.

    Attributes:
        name: Its name, with its variant in the database.
        verdicts: Verdict on ``hessiankit.hessian`` -> number of samples.
        messages: Kind of message of a refusal or raw error -> number of samples.
        wrong: Route of torch -> median over the samples where it is wrong of its error, relative to the products' largest entry.
        missing: Routes that torch can run for no sample.
    """

    name: str
    verdicts: dict[str, int]
    messages: dict[str, int]
    wrong: dict[str, float]
    missing: tuple[str, ...]

    @property
    def cells(self) -> tuple[str, ...]:
        """The name, the number of judged samples, and of each route its error, or "no" where torch cannot run it."""
        judged = sum(self.verdicts.get(status, 0) for status in (RIGHT, REFUSED, RAISED, SILENT))
        words = [f"{self.wrong[r]:.2g}" if r in self.wrong else "no" if r in self.missing else "right" for r in AUDITED]
        return self.name, str(judged), *words


@dataclass(frozen=True, repr=False)
class OperatorTable(Printed, WithDict):
    """Result of :func:`operators`; prints as tables.

    Attributes:
        rows: One for each operator that has samples.
        torch_version: Version of the installed torch.
        seconds: Time taken.
    """

    rows: tuple[OperatorRow, ...]
    torch_version: str
    seconds: float

    def _headline(self) -> str:
        counts: Counter[str] = sum((Counter(row.verdicts) for row in self.rows), Counter())
        verdicts = ", ".join(f"{counts[status]:,} {status}" for status in VERDICTS)
        return f"torch {self.torch_version}: {len(self.rows)} operators, {counts.total():,} samples; hessiankit: {verdicts}"

    def wrong_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the operators through which a route of torch is wrong."""
        return [row.cells for row in self.rows if row.wrong]

    def message_rows(self) -> list[tuple[str, str, str]]:
        """Return (kind of message, samples, operators) of the refusals and raw errors, the most frequent first."""
        counts: Counter[str] = sum((Counter(row.messages) for row in self.rows), Counter())
        names = {message: [row.name for row in self.rows if message in row.messages] for message in counts}
        return [(message, str(count), ", ".join(names[message])) for message, count in counts.most_common()]

    def markdown(self) -> str:
        """Return counts, wrong routes, refusals and silent errors as Markdown (without the time taken)."""
        wrong = as_markdown(("operator", "samples", *AUDITED), self.wrong_rows())
        messages = [(f"`{message}`", count, names) for message, count, names in self.message_rows()]
        refusals = as_markdown(("message", "samples", "operators"), messages)
        silent, false = (", ".join(r.name for r in self.rows if v in r.verdicts) or "none" for v in (SILENT, NO_GRADIENT))
        words = f"{self._headline()}. Silent errors of hessiankit: {silent}. Operators with a wrong gradient of torch: {false}."
        return f"{words}\n\n{wrong}\n\n{refusals}"

    def _parts(self) -> Iterator[Piece]:
        yield f"{self._headline()}; {self.seconds:.0f} s"
        yield table(("operator", "samples", *AUDITED), self.wrong_rows(), title="Through these operators torch is wrong")
        refusals = self.message_rows()
        yield table(
            ("message", "samples", "operators"), refusals, title="Refusals and raw errors", prose=("message", "operators")
        )
        whole = [(row.name, *(str(row.verdicts.get(status, "")) for status in VERDICTS), *row.cells[2:]) for row in self.rows]
        yield Detail(table(("operator", *VERDICTS, *AUDITED), whole))


def operators(names: Iterable[str] | None = None) -> OperatorTable:
    """Differentiate the samples of torch's database of operators twice, by ``hessiankit.hessian`` and by four routes of torch.

    Args:
        names: Names of operators, e.g. ``nn.functional.layer_norm``; all of them by default, which takes five minutes.

    Raises:
        InputError: An unknown operator, or a package that torch's tests import is missing.
    """
    start, entries = time.perf_counter(), database()
    chosen = list({entry.name: None for entry in entries} if names is None else names)
    for name in chosen:
        if name not in {entry.name for entry in entries}:
            raise unknown("routes", "operator", name, {entry.name: None for entry in entries}, "torch's op_db")
    with torch.enable_grad(), warnings.catch_warnings(), one_thread():
        warnings.simplefilter("ignore")
        rows = [audited(entry) for entry in entries if entry.name in chosen]
    return OperatorTable(tuple(row for row in rows if row.verdicts), torch.__version__, time.perf_counter() - start)


def database() -> list[Any]:
    """Return the entries of torch's database that it differentiates in float64 on the CPU."""
    try:
        with patch.object(torch.backends, "disable_global_flags", lambda: None):  # torch's tests freeze the process's flags
            from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        raise InputError(f"routes: torch's database of operators needs a package: {error}; pip install expecttest") from error
    return [entry for entry in op_db if entry.supports_autograd and entry.supports_dtype(torch.float64, "cpu")]


def audited(entry: Any) -> OperatorRow:
    """Return the results of one entry of the database."""
    torch.manual_seed(0)
    samples = list(entry.sample_inputs("cpu", torch.float64, requires_grad=True))
    step = max(1, math.ceil(len(samples) / MOST_SAMPLES))
    verdicts = [differentiated(entry, sample) for sample in samples[::step]]
    ran = set(chain.from_iterable(verdict.errors for verdict in verdicts))
    wrong = {route: [verdict.errors[route] for verdict in verdicts if route in verdict.wrong] for route in AUDITED}
    return OperatorRow(
        f"{entry.name} ({entry.variant_test_name})" if entry.variant_test_name else entry.name,
        dict(Counter(verdict.status for verdict in verdicts)),
        dict(Counter(verdict.message for verdict in verdicts if verdict.message)),
        {route: median_low(sizes) for route, sizes in wrong.items() if sizes},
        tuple(route for route in AUDITED if route not in ran),
    )


def differentiated(entry: Any, sample: Any) -> Verdict:
    """Compare the products of one sample."""
    generator, x = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.float64)
    try:
        module = Sample(entry, sample)
        if not module.moving:
            return Verdict(SKIPPED)
        y = module(x)
        target = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        problem = Problem(module, x, target)
        if problem.size > MOST_PARAMETERS or y.dtype != torch.float64:
            return Verdict(SKIPPED)
        V = torch.randn(2, problem.size, generator=generator, dtype=torch.float64)
        judge = REFERENCES["central-differences"].measure(problem, V)
    except (RuntimeError, InputError, Unsupported):  # torch's own error, a random value
        return Verdict(SKIPPED)
    assert judge.error is not None
    scale = float(judge.value.abs().max()) or 1.0
    uncertain, bend = float(judge.error.max()) / scale, V @ judge.value.T
    if not uncertain <= SMOOTH:
        return Verdict(ROUGH)
    if float((bend - bend.T).abs().max()) > 10 * (TOLERANCE + uncertain) * scale * float(V.abs().sum(1).max()):
        return Verdict(NO_GRADIENT)

    def error(products: Tensor, reference: Tensor = judge.value) -> float:
        largest = float((products - reference).abs().max()) / scale
        return largest if largest == largest else math.inf

    def loss(theta: Tensor) -> Tensor:
        return mean_square(functional_call(module, problem.unflatten(theta), (x,)), target)

    products: dict[str, Tensor] = {}
    for name in AUDITED:
        route = ROUTES[name].products
        assert route is not None
        try:
            products[name] = route(loss, problem.theta)(V)
        except Exception:  # whatever torch raises: it does not have this route
            continue
    errors = {name: error(value) for name, value in products.items()}
    wrong = frozenset(name for name, off in errors.items() if off > TOLERANCE + uncertain)
    status, message = RIGHT, ""
    try:
        own = V @ hessian(module, x, target).matrix
    except HessiankitError as reason:
        status, message = REFUSED, kind(str(reason))
    except Exception as reason:
        status, message = RAISED, kind(typed_line(reason))
    else:
        twice = "grad twice" in products and "grad twice" not in wrong
        if error(own) > TOLERANCE + uncertain or (twice and error(own, products["grad twice"]) > CLOSE):
            status = SILENT
    if (wrong or status == SILENT) and kinked(loss, problem.theta, V):
        return Verdict(ROUGH)
    return Verdict(status, message, errors, wrong)


def kinked(loss: Scalar, theta: Tensor, V: Tensor) -> bool:
    """Tell whether the second derivatives on the two sides of theta differ: central differences see the mean of both.

    >>> x, V = torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    >>> kinked(lambda x: x.relu().square().sum(), x, V), kinked(lambda x: (x**2 + x**3).sum(), x, V)
    (True, False)
    """

    def jump(v: Tensor, h: float) -> float:
        return float((gradient(loss, theta + h * v) + gradient(loss, theta - h * v) - 2 * gradient(loss, theta)).abs().max()) / h

    # 16 times less at a step 16 times smaller, if the third derivative exists; rounding is below 1e-7
    return any(jump(v, 2.0**-16) > max(jump(v, 2.0**-12) / 4, 1e-7) for v in V)


def kind(message: str) -> str:
    """Return the first sentence of a message without names and numbers.

    >>> kind("hessian: aten.cdist.default of 'x0' has shape (2, 3). Drop it.")
    'hessian: OPERATION of NAME has shape (n, n)'
    """
    line = re.sub(r"(?<!\w)'[^']*'", "NAME", message.splitlines()[0].split(". ")[0])
    line = re.sub(r"(aten|torch_nn)\.\w+\.\w+", "OPERATION", line)
    return textwrap.shorten(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "n", line), 160, placeholder=" ...")
