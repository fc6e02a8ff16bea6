"""Products of the Hessian and of the Gauss-Newton matrix with one vector and with a block of 16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from benchmarks.charts import methods
from benchmarks.entries import MEMORY_SHARE, TOLERANCE
from benchmarks.packaged import CURVLINOPS, curvlinops_products, jax_products
from benchmarks.peers import Peer, products_of
from benchmarks.plan import Benchmark, Cell, Plan, Tell
from benchmarks.problems import Case, make
from benchmarks.routes.torch_routes import Products
from benchmarks.suites.common import BLOCK_SIZES, case_of, race
from benchmarks.tables import NOTES, contest_tables
from benchmarks.timing import rounds_within, timed
from hessiankit import hessian_operator
from hessiankit.support.memory import available_memory
from hessiankit.verify.reference_automatic import GradientGraph
from hessiankit.verify.reference_base import bytes_per_direction

BLOCK = 16
CHECKED = 2
"""Vectors of a block that are compared with the reference."""


def ggn_reference(case: Case, V: Tensor) -> Tensor:
    """Return J^T L'' J V row by row, by reverse mode only: J v is the derivative of u -> J^T u, transposed."""
    theta = case.theta.clone().requires_grad_()
    z = case.outputs(theta)
    u = torch.zeros_like(z, requires_grad=True)
    (pulled,) = torch.autograd.grad(z, theta, u, create_graph=True)
    leaf = z.detach().requires_grad_()
    (slope,) = torch.autograd.grad(case.loss_of(leaf), leaf, create_graph=True)
    rows = []
    for v in V:
        (pushed,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
        (bent,) = torch.autograd.grad(slope, leaf, pushed, retain_graph=True)
        rows.append(torch.autograd.grad(z, theta, bent, retain_graph=True)[0])
    return torch.stack(rows)


def _reverse(case: Case) -> Products:
    """Return products by ``torch.autograd.grad`` twice, batched where there are several directions."""
    graph = GradientGraph(case.flat_loss(theta := case.theta.clone().requires_grad_()), [theta])

    def run(V: Tensor) -> Tensor:
        return graph.product([V[0]])[0].unsqueeze(0) if len(V) == 1 else graph.product([V], batched=True)[0]

    return run


def _push_bend_pull(case: Case) -> Products:
    z, pull = vjp(case.outputs, case.theta)[:2]
    slope = grad(case.loss_of)

    def one(v: Tensor) -> Tensor:
        return pull(jvp(slope, (z,), (jvp(case.outputs, (case.theta,), (v,))[1],))[1])[0]

    return lambda V: one(V[0]).unsqueeze(0) if len(V) == 1 else vmap(one)(V)


def _ours(kind: str) -> Callable[[Case], Products]:
    def prepare(case: Case) -> Products:
        operator = hessian_operator(case.module, case.inputs, case.target, loss=case.loss, kind=kind)
        return lambda V: (operator @ V.T.contiguous()).T

    return prepare


def _peer(peer: Peer) -> Callable[[Case], Products]:
    """Return what makes a peer's products, and raises where it is missing."""

    def prepare(case: Case) -> Products:
        if why := peer.missing(case):
            raise ModuleNotFoundError(why)
        return peer.products(case)

    return prepare


METHODS: dict[str, dict[str, Callable[[Case], Products]]] = {
    "Hessian": {
        "hessian_operator": _ours("hessian"),
        "reverse over reverse": _reverse,
        "vjp(grad)": partial(products_of, "jacrev(grad)"),
        "jvp(grad)": partial(products_of, "jacfwd(grad)"),
        "jitted jvp(grad) of jax": _peer(jax_products()),
        "curvlinops": _peer(CURVLINOPS),
    },
    "GGN": {
        "hessian_operator": _ours("ggn"),
        "vjp, loss'', jvp": _push_bend_pull,
        "curvlinops": _peer(replace(CURVLINOPS, prepare=partial(curvlinops_products, kind="ggn"))),
    },
}
REFERENCES = {"Hessian": lambda case, V: products_of("grad twice", case)(V), "GGN": ggn_reference}


def run(cell: Cell, plan: Plan, tell: Tell) -> dict[str, Any]:
    case = case_of(cell, plan)
    draws = torch.randn(BLOCK, case.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(case.theta)
    rows: list[dict[str, Any]] = []
    steps = len(METHODS) * 2
    one = make(cell["problem"], 1, cell["dtype"], plan.device)
    runner, vector = _ours("hessian")(one), draws[:1]
    runner(vector)
    forecast = cell["batch"] * min(timed(plan.device, lambda: runner(vector))[1] for _ in range(3))  # of our product
    graph_bytes = bytes_per_direction(one.flat_loss, one.theta) * cell["batch"]
    for matrix, methods_of in METHODS.items():
        for width in (1, BLOCK):
            V, quantity = draws[:width], f"{matrix} x {width}"
            tell(quantity, len(dict.fromkeys(row["quantity"] for row in rows)), steps)
            rounds = rounds_within(plan.limit_seconds, 2 * len(methods_of) * width * forecast, plan.repeats)
            if not rounds:
                why = f"forecast {2 * len(methods_of) * width * forecast:.3g} s, limit {plan.limit_seconds:.3g} s"
                rows.append({"quantity": quantity, "name": "hessian_operator", "status": "skipped", "why": why, "time": None})
                continue
            reference = REFERENCES[matrix](case, V[:CHECKED])
            need = graph_bytes * width
            too_large = need > MEMORY_SHARE * available_memory(case.theta.device)
            prepared = {name: lambda make=make, V=V: partial(make(case), V) for name, make in methods_of.items()}  # type: ignore[misc]
            rows += race(
                quantity, prepared, reference, TOLERANCE[case.theta.dtype], plan, rounds=rounds,
                too_large=f"would take about {need / 2**30:.0f} GiB" if too_large else "",
            )  # fmt: skip
    return {"parameters": case.size, "rows": rows, "extra": ["setup_seconds", "set-up (s)"]}


BENCHMARK = Benchmark(
    "hvp",
    f"Products of the Hessian and of the Gauss-Newton matrix with one vector and with a block of {BLOCK}.",
    lambda plan: plan.grid((*BLOCK_SIZES, "large", "gpt2-untied", "gpt2-tied")),
    run,
    lambda records: contest_tables(records, "hessian_operator"),
    lambda records: methods(records, "Hessian- and GGN-vector products"),
    NOTES + "\n- The time is that of products only; the column *set-up* is the time to make the operator.",
    title="Products",
)
