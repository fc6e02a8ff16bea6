"""Peers of the closed form: torch's routes to a dense Hessian (``benchmarks.routes.torch_routes``), as a user would write them.

Some return something else than the Hessian through ``layer_norm`` with a gain: they are measured all the same, compared, and
marked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.problems import Case
from benchmarks.routes.torch_routes import ROUTES, Products


@dataclass(frozen=True)
class Peer:
    """One way to the Hessian: by products with a few directions at a time, or whole, which needs the memory for that.

    Attributes:
        name: Name in the tables.
        prepare: Returns the products with directions, one a row (k, P) -> (k, P); what it does once for all directions counts
            as the peer's time. None for a peer that returns the whole matrix.
        matrix: Returns the P x P matrix at once; None for a peer with products.
        missing: Returns why the peer cannot be tried on a problem; empty if it can.
        one_by_one: Whether it takes one direction at a time, so that there is no chunk to choose.
        compiles: Whether each shape is compiled first, so that every chunk has to have the same one.
        compiled_chunk: The only chunk that it takes.
        route: The route whose products it takes, a function of tensors only that ``torch.compile`` can take; else "".
    """

    name: str
    prepare: Callable[[Case], Products] | None = None
    matrix: Callable[[Case], Tensor] | None = None
    missing: Callable[[Case], str] = lambda case: ""
    one_by_one: bool = False
    compiles: bool = False
    compiled_chunk: int | None = None
    route: str = ""

    @property
    def products(self) -> Callable[[Case], Products]:
        """``prepare`` of a peer with products."""
        assert self.prepare is not None
        return self.prepare


def products_of(route: str, case: Case) -> Products:
    """Return the products of a route with the Hessian of a problem."""
    products = ROUTES[route].products
    assert products is not None
    return products(case.flat_loss, case.theta)


def _by_products(name: str, route: str, *, of_tensors: bool = False) -> Peer:
    return Peer(name, lambda case: products_of(route, case), route=route if of_tensors else "")


def _whole(name: str, route: str) -> Peer:
    return Peer(name, matrix=lambda case: ROUTES[route].matrix(case.flat_loss, case.theta))


REVERSE = _by_products("reverse over reverse", "grad twice (batched)")
VJP = _by_products("vmap(vjp(grad))", "jacrev(grad)")
JVP = _by_products("vmap(jvp(grad))", "jacfwd(grad)", of_tensors=True)
JACREV = _by_products("jacfwd(jacrev)", "torch.func.hessian", of_tensors=True)
FUNC_HESSIAN = _whole("torch.func.hessian", "torch.func.hessian")
AUTOGRAD_HESSIAN = _whole("autograd.functional.hessian", "autograd hessian (vectorized)")


def compiled(base: Peer, case: Case, chunk: int) -> Peer:
    """Return a peer under ``torch.compile``; compiling belongs to the warm-up and is not counted."""
    products = ROUTES[base.route].products
    assert products is not None
    run = torch.compile(lambda theta, V: products(case.flat_loss, theta)(V), dynamic=False)
    return Peer(f"compiled {base.name}", lambda case: lambda V: run(case.theta, V), compiles=True, compiled_chunk=chunk)


def plain_columns(case: Case, columns: list[int]) -> Tensor:
    """Return some columns of the Hessian, one a row, by ``torch.autograd.grad`` twice, one direction at a time: the reference.

    No batching and no transform: the one route without known defects.
    """
    return products_of("grad twice", case)(torch.eye(case.size, dtype=case.theta.dtype, device=case.theta.device)[columns])
