"""Exact products with the Hessian at real sizes: set-up and product of each method, in gradients and in bytes.

A cell is one method on one problem, in a process of its own.
"""

from __future__ import annotations

import ast
import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.architectures import InDouble
from benchmarks.charts import methods
from benchmarks.models import differences
from benchmarks.packaged import curvlinops_operator, eigenthings_operator, installed
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import DTYPES, Case
from benchmarks.real_sizes import HUGGING_FACE, make, read
from benchmarks.residence import Memory, at_most
from benchmarks.suites.common import dense
from benchmarks.tables import CELL_HEADERS, DETAILS, cell_text, markdown, mebibytes, short, with_range
from benchmarks.timing import all_rounds, finite, rounds_within, several, spread, timed
from hessiankit import bounds, frobenius_norms, hessian_operator
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.verify.reference_automatic import GradientGraph
from hessiankit.verify.reference_base import typed_line

Runner: TypeAlias = Callable[[Tensor], Any]
Row = dict[str, Any]
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.3}
GRADIENT = "gradient"
CONTEXTS, LONG = (2048, 4096, 8192), (16384, 32768, 65536)
"""Tokens of the layers of attention, everywhere and on a GPU only."""
MODELS = ("gpt2-124M-L256", "gpt2-124M-L1024", "llama-134M-L128", "bert-base-L128", "vit-b16")
QUICK = ("attention-causal-L64",)
EIGENVALUE = "decoder-L8192"
EVERYDAY = dict.fromkeys((*(f"L{n}d16f64" for n in (64, 96, 128, 192, 256)), "paper-mnist"), ("hessian",))
EVERYDAY["paper-mnist"] += ("bounds", "frobenius_norms")


def _operator(case: Case, **options: Any) -> Runner:
    operator = hessian_operator(case.module, case.inputs, case.target, loss=case.loss, **options)
    return lambda v: operator @ v.to(operator.torch_dtype)


def _double(case: Case) -> Runner:
    parameters = list(case.module.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        graph = GradientGraph(case.loss_of(case.module(case.inputs)), parameters)
    return lambda v: graph.product(_pieces(v, parameters))


def _packaged(operator_of: Callable[..., Any], case: Case) -> Runner:
    with sdpa_kernel(SDPBackend.MATH):
        product = operator_of(case)

    def run(v: Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return product(v)

    return run


def _pieces(v: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return a vector as pieces of the parameters' shapes, which share its memory."""
    parts = v.split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def _flat(found: Any) -> Tensor:
    return found.detach() if isinstance(found, Tensor) else torch.cat([x.detach().reshape(-1) for x in found])


def _gradient(case: Case) -> tuple[Tensor, ...]:
    return torch.autograd.grad(case.loss_of(case.module(case.inputs)), list(case.module.parameters()), materialize_grads=True)


def _differences(case: Case, v: Tensor) -> tuple[Tensor, str]:
    """Return H v by central differences of the module's own gradient, in the widest dtype that fits, and which that is.

    The module is left in that dtype.
    """
    for dtype in (torch.float64, torch.float32):
        module = case.module.to(dtype)
        data = {k: x.to(dtype) if x.is_floating_point() else x for k, x in (("inputs", case.inputs), ("target", case.target))}
        wide = replace(case, module=InDouble(module) if dtype == torch.float64 else module, **data)
        size = float(torch.stack([p.detach().norm() for p in module.parameters()]).norm())
        step = torch.finfo(dtype).eps ** (1 / 3) * size / float(v.norm())
        try:
            found = differences(list(module.parameters()), lambda: _flat(_gradient(wide)), v.to(dtype), step)  # noqa: B023
        except Exception as error:
            if dtype == torch.float32 or not _lacks_memory(error):
                raise
        else:
            return found, str(dtype).removeprefix("torch.")
    raise AssertionError


def _lacks_memory(error: Exception) -> bool:
    """Tell whether an allocation failed, which torch has no class for on a CPU; a refusal beforehand is something else."""
    failed = isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not isinstance(error, HessiankitError)
    cause = error.__cause__
    return failed or "can't allocate memory" in str(error) or (isinstance(cause, Exception) and _lacks_memory(cause))


@dataclass(frozen=True)
class Method:
    """The set-up of a method, and its reference.

    Attributes:
        prepare: Makes of a problem a function of one vector.
        package: The package that it needs.
        expected: From the dense Hessian, for work that is no product.
    """

    prepare: Callable[..., Runner]
    package: str = ""
    expected: Callable[[Tensor], Tensor] | None = None


def _found(function: Callable[..., Any], case: Case, number: Callable[[Any], float]) -> Tensor:
    return torch.tensor([number(function(case.module, case.inputs, case.target, loss=case.loss))], dtype=torch.float64)


PRODUCTS = {
    "hessian_operator": Method(_operator),
    "double": Method(_double),
    "curvlinops": Method(partial(_packaged, lambda case: curvlinops_operator(case, copied=False).__matmul__), "curvlinops"),
    "hessian-eigenthings": Method(
        partial(_packaged, lambda case: eigenthings_operator(case, copied=False).matvec), "hessian_eigenthings"
    ),
}
WORK = {
    "hessian": Method(lambda case: lambda v: dense(case) @ v),
    "bounds": Method(
        lambda case: lambda _: _found(bounds, case, lambda report: report.values["whole"]["true"]),
        expected=lambda H: torch.linalg.eigvalsh(H).abs().max(),
    ),
    "frobenius_norms": Method(
        lambda case: lambda _: _found(frobenius_norms, case, lambda norms: norms.whole), expected=torch.linalg.matrix_norm
    ),
}
"""Of everyday sizes: one call does it all."""
METHODS = {**PRODUCTS, **WORK}
USUAL = ("hessian_operator", "hessian_operator:recompute=layers", "double", "curvlinops", "hessian-eigenthings")


def options_of(method: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a method and the arguments that it is given besides.

    Raises:
        InputError: There is no such method.

    >>> options_of("hessian_operator:recompute=layers,micro_batch=1")
    ('hessian_operator', {'recompute': 'layers', 'micro_batch': 1})
    """
    name, _, given = method.partition(":")
    if name not in METHODS:
        raise InputError(f"benchmarks: no method is called {name!r}; there are: {', '.join(METHODS)}")
    return name, {key: _value(text) for key, _, text in (item.partition("=") for item in given.split(",") if item)}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def missing(method: str) -> str:
    """Return why a method cannot be measured here; empty if it can."""
    name, options = options_of(method)
    if METHODS[name].package and not installed(METHODS[name].package):
        return f"{name} is not installed"
    unknown = [key for key in options if name != "hessian_operator" or key not in inspect.signature(hessian_operator).parameters]
    return f"{name} has no argument {', '.join(unknown)}" if unknown else ""


def cells(plan: Plan) -> list[Cell]:
    """Return a cell for every problem, method and dtype, on one thread unless the plan has another number first."""
    lengths = (*CONTEXTS, *(LONG if plan.device == "cuda" else ()))
    layers = tuple(f"{layer}-L{n}" for n in lengths for layer in ("attention-causal", "attention"))
    found: list[Cell] = []
    for problem in plan.sizes or (QUICK if plan.quick else (*MODELS, *layers, EIGENVALUE, *EVERYDAY)):
        real = read(problem) is not None
        usual = USUAL if real else EVERYDAY.get(problem, ("hessian",))
        methods = [m for m in plan.methods or usual if options_of(m)[0] in (PRODUCTS if real else WORK)]
        dtypes = [dtype for dtype in plan.dtypes if (dtype == "float64") != real] or plan.dtypes
        found += [
            {"problem": problem, "method": method, "batch": batch, "dtype": dtype, "threads": plan.threads[0]}
            for dtype in dtypes
            for method in methods
            for batch in plan.batches or (1,)
        ]
    return found


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    """Measure one method on one problem, in the process that was made for it."""
    name, options = options_of(cell["method"])
    method, ours = METHODS[name], name in WORK or name == "hessian_operator"
    row: Row = {"name": cell["method"], "ours": ours, "status": "right", "why": "", "error": None, "time": None, "ratio": None}
    row |= dict.fromkeys(("reference", "setup_seconds", "setup_ratio", "setup_bytes", "bytes", "eigenvalue"))
    if why := missing(cell["method"]):
        return {"parameters": None, "rows": [{**row, "status": "missing", "why": why}]}
    real, dtype = read(cell["problem"]), DTYPES[cell["dtype"]]
    small = "tiny" if real is None else "gpt2-0.1M-L8" if real[0] in HUGGING_FACE else "attention-causal-L8"
    warm = make(small, 1, dtype, plan.device)
    method.prepare(warm, **options)(_vector(warm))  # imports what is imported late, and starts the threads
    case = make(cell["problem"], cell["batch"], dtype, plan.device)
    v, alone = _vector(case), cell["threads"] == 1
    found, gradient = None, None
    try:
        with at_most(plan.memory_gib) if plan.device == "cpu" else nullcontext():
            found, gradient = _measured(row, method, options, case, v, plan, time.process_time if alone else time.perf_counter)
    except Exception as error:
        lacks = _lacks_memory(error)
        limit = f"{plan.memory_gib:g} GiB" if plan.device == "cpu" else "the device has"
        why = f"more than {limit}" if lacks else typed_line(error)
        row.update(status="out of memory" if lacks else "failed", why=f"{'product' if row['setup_bytes'] else 'set-up'}: {why}")
    if found is not None:
        tell("reference", 0, 1)
        if method.expected is None:
            expected, row["reference"] = _differences(case, v)
        else:
            expected, row["reference"] = method.expected(dense(case)), "the dense Hessian"
        row["error"] = finite(float((found.to(expected) - expected).norm() / expected.norm()))
        row["status"] = "right" if row["error"] is not None and row["error"] <= TOLERANCE[cell["dtype"]] else "wrong"
    return {"parameters": case.size, "rows": [row], "gradient": gradient}


def _vector(case: Case) -> Tensor:
    draws = torch.randn(case.size, generator=torch.Generator().manual_seed(1))
    return draws.to(next(case.module.parameters()))


def _measured(
    row: Row, method: Method, options: dict[str, Any], case: Case, v: Tensor, plan: Plan, clock: Callable[[], float]
) -> tuple[Tensor, dict[str, float] | None]:
    """Fill in a row; return the first product, and the seconds of a gradient."""

    def prepare() -> tuple[Runner, float]:
        return timed(plan.device, lambda: method.prepare(case, **options), clock)

    memory = Memory(plan.device)
    (runner, first), row["setup_bytes"] = memory.peak(prepare)
    product, row["bytes"] = memory.peak(lambda: runner(v))
    product = _flat(product)
    calls: dict[str, Callable[[int], float]] = {
        GRADIENT: lambda _: several(plan.device, lambda: _gradient(case), clock=clock),
        row["name"]: lambda _: several(plan.device, lambda: runner(v), clock=clock),
    }
    seconds = all_rounds(calls, plan.repeats, plan.limit_seconds)
    own, gradients = seconds[row["name"]], seconds[GRADIENT]
    row["seconds"], row["time"] = own, spread(own)
    row["ratio"] = spread([a / b for a, b in zip(own, gradients, strict=True)])
    gradient = spread(gradients)
    assert gradient is not None
    if row["name"] not in WORK:
        if case.name.startswith("decoder"):
            row["eigenvalue"] = _eigenvalue(case, runner, memory, plan, clock)
        calls.clear()
        runner = None  # type: ignore[assignment]
        again = rounds_within(plan.limit_seconds, first, plan.repeats - 1)
        row["setup_seconds"] = spread([first, *(prepare()[1] for _ in range(again))])
        assert row["setup_seconds"] is not None
        row["setup_ratio"] = row["setup_seconds"]["median"] / gradient["median"]
    else:
        row["setup_bytes"] = None
    return product, gradient


def _eigenvalue(case: Case, runner: Runner, memory: Memory, plan: Plan, clock: Callable[[], float]) -> dict[str, Any]:
    """Return the eigenvalue of largest magnitude by SciPy's Lanczos iteration, and what it took."""
    count, like = 0, _vector(case)

    def product(x: Any) -> Any:
        nonlocal count
        count += 1
        return _flat(runner(torch.from_numpy(np.asarray(x).reshape(-1)).to(like))).float().cpu().numpy()

    operator = LinearOperator((case.size, case.size), matvec=product, dtype=np.float32)
    start = like.float().cpu().numpy()
    work = partial(eigsh, operator, k=1, v0=start)
    ((values, vectors), seconds), taken = memory.peak(lambda: timed(plan.device, work, clock))
    products, vector = count, vectors[:, 0]
    residual = float(np.linalg.norm(product(vector) - values[0] * vector) / abs(values[0]))
    return {"value": float(values[0]), "residual": residual, "products": products, "seconds": seconds, "bytes": taken}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the tables of products, of top eigenvalues, and of everyday sizes."""
    products, eigenvalues, everyday = [], [], []
    for record in records:
        names, result = [*cell_text(record), record["cell"]["method"]], record["result"]
        (row,) = result.get("rows", [{"status": "skipped", "why": result.get("skipped")}])
        real = options_of(record["cell"]["method"])[0] in PRODUCTS
        bad = row["status"] not in ("right", "wrong")
        if bad:
            numbers = [f"{row['status']}: {row['why']}", *[""] * (5 if real else 4)]
        else:
            error = f"{row['error']:.1e}" + (" **wrong**" if row["status"] == "wrong" else "")
            if row["reference"] == "float32":
                error += " (differences in float32)"
            seconds, held = short(result["gradient"]["median"]), mebibytes(row["bytes"])
            if real:
                held_before = mebibytes(row["setup_bytes"])
                numbers = [short(row["setup_ratio"]), with_range(row["ratio"]), held_before, held, seconds, error]
            else:
                numbers = [with_range(row["time"]), short(row["ratio"]["median"]), held, seconds, error]
        (products if real else everyday).append([*names, *numbers])
        if not bad and (top := row["eigenvalue"]) is not None:
            cost = [str(top["products"]), short(top["seconds"]), mebibytes(top["bytes"])]
            eigenvalues.append([*names, f"{top['value']:.6g}", f"{top['residual']:.1e}", *cost])
    head = (*CELL_HEADERS, "method")
    memory = ("set-up (MiB)", "product (MiB)")
    of_products = (*head, "set-up", "product", *memory, "gradient (s)", "error")
    parts = []
    top_head = (*head, "value", "residual", "products", "time (s)", "peak (MiB)")
    parts += [("The eigenvalue of largest magnitude:\n\n", top_head, eigenvalues)]
    parts += [("Everyday sizes:\n\n", (*head, "time (s)", "in gradients", "peak (MiB)", "gradient (s)", "error"), everyday)]
    others = [title + markdown(headers, rows) for title, headers, rows in parts if rows]
    if not products:
        return "\n\n".join(others)
    return "\n\n".join([_beside_double(products), *others, DETAILS, markdown(of_products, products)])


def _beside_double(products: Sequence[Sequence[str]]) -> str:
    """Return a line a problem: the operator's set-up, product and memory, and a double backward's."""
    names = len(CELL_HEADERS)
    numbers = {(*row[: names + 1],): row[names + 1 :] for row in products}
    rows = []
    for row in products:
        if row[names] == "hessian_operator":
            double = numbers.get((*row[:names], "double"), [""] * 4)
            rows.append([*row[:names], *row[names + 1 : names + 5], double[1] or double[0], double[3]])
    memory = ("set-up (MiB)", "product (MiB)")
    return markdown((*CELL_HEADERS, "set-up", "product", *memory, "double backward", "its product (MiB)"), rows)


def plot(records: Sequence[dict[str, Any]]) -> Any:
    """Draw time and memory of the products, a row a problem."""
    real = [record for record in records if options_of(record["cell"]["method"])[0] in PRODUCTS]
    return methods(
        real,
        "Products at real sizes",
        ("product, in gradients of the module", lambda row: row["ratio"] and row["ratio"]["median"]),
        ("peak (MiB)", lambda row: row["bytes"] and max(row["setup_bytes"], row["bytes"]) / 2**20),
    )


BENCHMARK = Benchmark(
    "scale",
    "Exact products with the Hessian at real sizes, in gradients and in bytes.",
    cells,
    run,
    table,
    plot,
    "- Each row is a process of its own. *set-up* (done once) and *product* are in units of a gradient of the module, timed in\n"
    "  the same process, in turn with products: median, quartiles in brackets. With one thread these are process times.\n"
    "- MiB: the highest resident size during the set-up, and during a product, less the size with model and data before it\n"
    "  (on a GPU, of the allocator). *out of memory*: an allocation beyond the limit failed (`--memory-gib`; on a GPU its own).\n"
    "- `double`: the set-up is the gradient with `create_graph=True`, a product is `torch.autograd.grad` of it. It and other\n"
    "  packages run attention on `SDPBackend.MATH`, because the fused kernels have no second derivative.\n"
    "- error: |difference| / |H v| from central differences of the module's gradient in float64, or (then said) float32 where\n"
    "  float64 does not fit. For `bounds` and `frobenius_norms` it is the error of the norm, from the dense Hessian.",
    title="Real sizes",
)
