"""Products with matrices by torch.autograd, and estimates from products, each with its error."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.functions.twice_differentiable import twice_differentiable
from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.lanczos import Product, RitzValue, lanczos
from hessiankit.training.depth.blocks import WHO
from hessiankit.training.sharpness.batches import BatchedLoss, MicroBatch

T = TypeVar("T")
BlockProduct: TypeAlias = "Callable[[int, Sequence[Tensor]], Sequence[Tensor]]"
"""(k, tangents of the parameters of block k) -> the product with the k-th diagonal block, one tensor a parameter."""


@contextmanager
def double_backward() -> Iterator[None]:
    """Give attention a second derivative: in memory linear in the length where a model looks torch's function up, else by its
    math path.
    """
    with twice_differentiable(), sdpa_kernel(SDPBackend.MATH):
        yield


class JacobianProducts:
    """Products with J = dy / dx from both sides; the graph is made once, and a product is one pass through it.

    J^T u is linear in u, so that J v is its derivative in u along v: two reverse passes make a forward one (Townsend 2017), and
    no operation needs a forward rule.
    """

    def __init__(self, y: Tensor, *x: Tensor) -> None:
        self.y, self.x = y, x
        self.u = torch.zeros_like(y, requires_grad=True)
        self.back = _vjp((y,), x, (self.u,), create_graph=True)

    def forward(self, *v: Tensor) -> Tensor:
        """Return J v."""
        return _vjp(self.back, (self.u,), v)[0]

    def adjoint(self, w: Tensor) -> tuple[Tensor, ...]:
        """Return J^T w."""
        return _vjp((self.y,), self.x, (w,))

    def gram(self, v: Tensor) -> Tensor:
        """Return J^T J v of a flat vector, for a single x."""
        return self.adjoint(self.forward(v.view_as(self.x[0])))[0].reshape(-1)


class HessianProducts:
    """Products with the diagonal blocks H_kk of the Hessian of the mean loss over all data, or (``"ggn"``) its Gauss-Newton part.

    H v = d/dtheta <g, v>, reverse over reverse. The Gauss-Newton part is J^T (L'' (J v)). The graph of a single micro-batch is
    cached; with several, every product recomputes them. The parameters of ``blocks`` require gradients.
    """

    def __init__(self, data: BatchedLoss, blocks: Sequence[Sequence[nn.Parameter]], kind: str) -> None:
        self.data, self.blocks, self.kind = data, blocks, kind
        self.terms = sum(data.count(target) for _, target in data.pairs())
        self.cached = self._linearised(data.batches[0]) if len(data.batches) == 1 else None

    def of(self, k: int) -> Callable[[Tensor], Tensor]:
        """Return the function v (P_k,) -> H_kk v."""
        parameters = self.blocks[k]

        def product(v: Tensor) -> Tensor:
            flat = v.split([p.numel() for p in parameters])
            tangents = [part.view_as(p) for part, p in zip(flat, parameters, strict=True)]
            total = torch.zeros_like(v)
            for batch in self.data.batches:
                multiply = self.cached or self._linearised(batch)
                total += torch.cat([x.reshape(-1) for x in multiply(k, tangents)]).detach()
            return total / self.terms

        return product

    def _linearised(self, batch: MicroBatch) -> BlockProduct:
        out = self.data.output(batch)
        target = self.data.target(batch, out)
        return self._hessian(self.data.summed(out, target)) if self.kind == "hessian" else self._gauss_newton(out, target)

    def _hessian(self, loss: Tensor) -> BlockProduct:
        parameters = {id(p): p for block in self.blocks for p in block}
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
        of_parameter = dict(zip(parameters, gradients, strict=True))

        def multiply(k: int, v: Sequence[Tensor]) -> Sequence[Tensor]:
            block = self.blocks[k]
            return _vjp([of_parameter[id(p)] for p in block], block, v)

        return multiply

    def _gauss_newton(self, out: Tensor, target: Tensor) -> BlockProduct:
        z = out.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.data.summed(z, target), z, create_graph=True)
        jacobians: dict[int, JacobianProducts] = {}

        def multiply(k: int, v: Sequence[Tensor]) -> Sequence[Tensor]:
            if k not in jacobians:
                jacobians.clear()  # one block after the other
                jacobians[k] = JacobianProducts(out, *self.blocks[k])
            (curvature,) = torch.autograd.grad(slope, z, jacobians[k].forward(*v), retain_graph=True)
            return jacobians[k].adjoint(curvature)

        return multiply


def _vjp(
    y: Sequence[Tensor | None], x: Sequence[Tensor], u: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Tensor, ...]:
    """Return sum_k (dy_k / dx)^T u_k for each x, zeros where no y depends on it."""
    pairs = [(a, b) for a, b in zip(y, u, strict=True) if a is not None and a.requires_grad]
    if not pairs:
        return tuple(map(torch.zeros_like, x))
    outputs, adjoints = zip(*pairs, strict=True)
    options = {"create_graph": create_graph, "retain_graph": True, "materialize_grads": True}
    return torch.autograd.grad(outputs, x, adjoints, **options)


def by_route(
    route: str, size: int, limit: int, closed_forms: tuple[str, Callable[[], T]], autograd: Callable[[], T]
) -> tuple[T, str, str]:
    """Return the result by closed forms or autograd, the name of that route, and the reason if the caller did not choose it.

    ``route`` is the name of the ``closed_forms``, ``"autograd"`` or ``"auto"``: closed forms up to ``limit`` parameters, unless
    they raise one of the library's errors.
    """
    name, exact = closed_forms
    why = ""
    if route == "auto" and size > limit:
        why = f"{size:,} parameters, more than {limit:,}"
    elif route != "autograd":
        try:
            return exact(), name, ""
        except HessiankitError as error:
            if route == name:
                raise
            why = f"{type(error).__name__}: {error}"
    return autograd(), "autograd", why


@dataclass(frozen=True)
class Measured:
    """A number with the standard error of its estimate: 0 where it is exact, NaN for a single probe.

    >>> print(Measured(2.0), Measured(2.0, 0.5))
    2 2 ±0.5
    """

    value: float
    standard_error: float = 0.0

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ±{self.standard_error:.1g}" if self.standard_error != 0 else "")


@dataclass(frozen=True)
class Estimator:
    """Lanczos for largest eigenvalues, random signs for traces and norms; the options of :func:`depth_diagnostics`."""

    draws: int = 8
    exact_below: int = 256
    tol: float = 1e-3
    products: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draws < 1 or self.exact_below < 0 or self.products < 2 or not self.tol > 0:
            raise InputError(
                f"{WHO}: draws={self.draws}, exact_below={self.exact_below}, products={self.products}, tol={self.tol}; expected "
                "at least 1, 0 and 2, and a positive tolerance"
            )

    def draws_for(self, size: int) -> int | None:
        """Return the number of probes of a matrix of that size; None for all unit vectors."""
        return None if size <= self.exact_below else self.draws

    def largest_eigenvalue(self, product: Product, like: Tensor, shift: int = 0) -> RitzValue:
        """Return the largest eigenvalue of H from the products v -> H v, v like ``like`` (P,), first v by seed + shift."""
        generator = torch.Generator().manual_seed(self.seed + shift)
        start = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like)
        return replace(lanczos(product, start, tol=self.tol, most=self.products), vector=None)

    def largest_singular_value(self, gram: Product, like: Tensor, shift: int = 0) -> RitzValue:
        """Return the largest singular value of A from the products v -> A^T A v."""
        square = self.largest_eigenvalue(gram, like, shift)
        value = math.sqrt(max(square.value, 0.0))
        return replace(square, value=value, residual=square.residual / value if value else 0.0)


def probes(like: Tensor, draws: int | None, seed: int) -> Iterator[Tensor]:
    """Yield the unit vectors (draws=None), or vectors of random signs, the same on every device, in the form of ``like``."""
    if draws is None:
        for k in range(like.numel()):
            unit = torch.zeros_like(like)
            unit.view(-1)[k] = 1.0
            yield unit
        return
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        signs = torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
        yield signs.to(like)


def mean_of(values: list[float], *, exact: bool) -> Measured:
    """Return the sum of the exact values, one a unit vector, or the mean of the probes' with its standard error.

    >>> mean_of([3.0, 5.0], exact=False), mean_of([3.0, 5.0], exact=True)
    (Measured(value=4.0, standard_error=1.0), Measured(value=8.0, standard_error=0.0))
    """
    if exact:
        return Measured(math.fsum(values))
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    return Measured(statistics.fmean(values), spread / math.sqrt(len(values)))


def trace_of(product: Product, like: Tensor, draws: int | None, seed: int) -> Measured:
    """Return tr A from products with A: the sum of e_k^T A e_k, or the mean of z^T A z over random signs z (Hutchinson 1990)."""
    values = [float((z * product(z)).double().sum()) for z in probes(like, draws, seed)]
    return mean_of(values, exact=draws is None)


def root(square: Measured, size: float) -> Measured:
    """Return sqrt(square / size) with its standard error to first order.

    >>> root(Measured(8.0, 0.8), 2.0)
    Measured(value=2.0, standard_error=0.1)
    """
    value = math.sqrt(square.value / size)
    return Measured(value, square.standard_error / (2 * size * value) if value else square.standard_error)
