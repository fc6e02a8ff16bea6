"""Attention and the cross entropy of a head as functions of torch: double backward and gradient, beside torch's own paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit
from benchmarks.charts import methods
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import DTYPES
from benchmarks.residence import Memory
from benchmarks.tables import CELL_HEADERS, DETAILS, cell_rows, markdown, mebibytes, quantities, ratio_text, time_text
from benchmarks.timing import add_rounds, all_rounds, rounds_within, timed

LENGTHS, VOCABULARIES = (1024, 2048, 4096, 8192), (1000, 50_257, 150_000)
PROBLEMS = (
    *(f"attention-{kind}L{length}" for length in LENGTHS for kind in ("", "causal-")),
    *(f"head-C{classes}" for classes in VOCABULARIES),
)
HEADS, HEAD_DIM = 4, 64
TOKENS, WIDTH = 512, 256
ARRAYS = 12
"""Arrays of heads x tokens x tokens, or of tokens x classes, that a double backward through torch's own operations holds."""

Function = Callable[..., Tensor]


def _by_matrices(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _by_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def problem_of(name: str, device: str) -> tuple[list[tuple[int, ...]], dict[str, Function], int]:
    """Return shapes of inputs, functions of them (ours, torch's with two derivatives, with one), and entries of an array."""
    generator = torch.Generator().manual_seed(0)
    if found := re.fullmatch(r"head-C(\d+)", name):
        labels = torch.randint(int(found[1]), (TOKENS,), generator=generator).to(device)
        ours, torchs = partial(hessiankit.linear_cross_entropy, labels=labels), partial(_by_logits, labels=labels)
        return [(TOKENS, WIDTH), (int(found[1]), WIDTH)], {"ours": ours, "twice": torchs, "once": torchs}, TOKENS * int(found[1])
    causal, length = "causal" in name, int(name.rpartition("L")[2])
    kinds: dict[str, Function] = {
        "ours": hessiankit.scaled_dot_product_attention,
        "twice": _by_matrices,
        "once": F.scaled_dot_product_attention,
    }
    chosen: dict[str, Function] = {kind: partial(f, is_causal=causal) for kind, f in kinds.items()}
    return [(1, HEADS, length, HEAD_DIM)] * 3, chosen, HEADS * length**2


def gradient(function: Function, x: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Return the gradient of the sum of a function's squares, with adjoints that move."""
    return torch.autograd.grad(function(*x).square().sum(), x, **options)


def double_backward(function: Function, x: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a product with the Hessian of the same."""
    return torch.autograd.grad(gradient(function, x, create_graph=True), x, v)


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    shapes, functions, entries = problem_of(cell["problem"], plan.device)
    generator, dtype = torch.Generator().manual_seed(1), DTYPES[cell["dtype"]]
    x, v = ([torch.randn(s, generator=generator).to(plan.device, dtype) for s in shapes] for _ in range(2))
    if len(x) == 2:
        x[1] *= WIDTH**-0.5  # logits of size one
    x = [t.requires_grad_() for t in x]
    forecast = ARRAYS * entries * dtype.itemsize
    exact = [t.detach().double().requires_grad_() for t in x]
    reference = double_backward(functions["ours"], exact, [t.double() for t in v])
    once = gradient(functions["ours"], exact)
    work: dict[tuple[str, str], tuple[Callable[[], tuple[Tensor, ...]], tuple[Tensor, ...]]] = {
        ("double backward", "hessiankit"): (lambda: double_backward(functions["ours"], x, v), reference),
        ("double backward", "torch"): (lambda: double_backward(functions["twice"], x, v), reference),
        ("gradient", "hessiankit"): (lambda: gradient(functions["ours"], x), once),
        ("gradient", "torch"): (lambda: gradient(functions["once"], x), once),
    }
    rows = []
    for k, (quantity, name) in enumerate(work):
        tell(f"{quantity}, {name}", k, len(work) + 1)
        method, right = work[quantity, name]
        row: dict[str, Any] = {"quantity": quantity, "name": name, "status": "right", "why": "", "error": None, "time": None}
        rows.append(row | {"bytes": None, "chunk": None})
        if (quantity, name) == ("double backward", "torch") and forecast > plan.memory_gib * 2**30:
            rows[-1].update(status="skipped", why=f"forecast {forecast / 2**30:.1f} GiB")
            continue
        found, rows[-1]["bytes"] = Memory(plan.device).peak(method)
        rows[-1]["error"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))
        del found
    for quantity in ("double backward", "gradient"):
        own = {row["name"]: row for row in rows if row["quantity"] == quantity and row["status"] == "right"}
        calls = {name: lambda _, f=work[quantity, name][0]: timed(plan.device, f)[1] for name in own}
        first = sum(call(0) for call in calls.values())  # type: ignore[call-arg, misc]
        add_rounds(own, all_rounds(calls, max(1, rounds_within(plan.limit_seconds, first, plan.repeats))), "hessiankit")  # type: ignore[arg-type]
    return {"parameters": sum(t.numel() for t in x), "rows": rows}


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return a line a quantity, ours beside torch's, then a line a method."""

    def rows(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        for row in result["rows"]:
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            yield row["quantity"], row["name"], time_text(row), ratio_text(row), mebibytes(row["bytes"]), error

    def pairs(_: dict[str, Any], result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        for quantity in quantities(result):
            ours, torchs = [row for row in result["rows"] if row["quantity"] == quantity]
            yield str(quantity), time_text(ours), ratio_text(torchs), mebibytes(ours["bytes"]), mebibytes(torchs["bytes"])

    brief = [*CELL_HEADERS, "quantity", "hessiankit (s)", "torch / hessiankit", "peak (MiB)", "torch's"]
    headers = [*CELL_HEADERS, "quantity", "method", "time (s)", "of hessiankit's", "peak (MiB)", "error"]
    first, every = cell_rows(records, pairs, 4), cell_rows(records, rows, 5)
    return f"{markdown(brief, first)}\n\n{DETAILS}\n\n{markdown(headers, every)}"


BENCHMARK = Benchmark(
    "attention",
    "Attention, and a head with its cross entropy, as functions of torch: double backward and gradient beside torch's own.",
    lambda plan: plan.grid(PROBLEMS, (1,)),
    run,
    table,
    lambda records: methods(records, "Double backward and gradient"),
    f"- attention-L: {HEADS} heads of {HEAD_DIM}. torch's double backward is that of its math path, its gradient that of its\n"
    "  fused kernel.\n"
    f"- head-C: {TOKENS} tokens of width {WIDTH}, C classes. In torch this is\n"
    "  `F.cross_entropy(F.linear(hidden, weight), labels)`.\n"
    "- peak: highest resident size less the one before, results included (for head-C the gradient of the weight, C x 256).\n"
    "- error: largest difference from hessiankit's result in float64, relative to the largest entry.",
    title="Attention and the loss as functions of torch",
)
