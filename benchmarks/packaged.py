"""Peers from other packages: curvlinops, hessian-eigenthings, jax; each is optional."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import Peer
from benchmarks.problems import Case
from benchmarks.routes.torch_routes import Products

SAMPLES_AT_ONCE = 32
"""Samples of one of the batches that a package's operator loops over."""


def installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package.replace("-", "_")) is not None


class _Rows(nn.Module):
    """A module whose logits come out as rows (N, C), which the packages' losses expect."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits as rows."""
        return self.module(x).flatten(0, -2)


def parts(case: Case, *, copied: bool = True) -> tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]]:
    """Return the module or a copy, torch's loss of the same name, and the data in batches of equal size."""
    module = copy.deepcopy(case.module) if copied else case.module
    batch = case.inputs.shape[0]
    size = next(s for s in range(min(batch, SAMPLES_AT_ONCE), 0, -1) if batch % s == 0)  # equal, so that weights are equal
    pairs = list(zip(case.inputs.split(size), case.target.split(size), strict=True))
    if case.loss == "mse":
        return module, nn.MSELoss(), pairs
    return _Rows(module), nn.CrossEntropyLoss(), [(x, t.flatten()) for x, t in pairs]


def curvlinops_operator(case: Case, kind: str = "hessian", *, copied: bool = True) -> Any:
    """Return the package's Hessian ("hessian") or Gauss-Newton ("ggn") operator of a problem."""
    curvlinops = importlib.import_module("curvlinops")
    module, loss, data = parts(case, copied=copied)
    inner = module.module if isinstance(module, _Rows) else module
    wanted = [p for name, p in inner.named_parameters() if name in case.parameters]
    make = curvlinops.HessianLinearOperator if kind == "hessian" else curvlinops.GGNLinearOperator
    return make(module, loss, wanted, data, check_deterministic=False)


def eigenthings_operator(case: Case, *, copied: bool = True) -> Any:
    """Return hessian-eigenthings' operator of a problem."""
    package = importlib.import_module("hessian_eigenthings")
    module, loss, data = parts(case, copied=copied)
    prefix = "module." if isinstance(module, _Rows) else ""
    names = {prefix + name for name in case.parameters}
    return package.HessianOperator(module, data, package.supervised_loss(loss), param_filter=lambda name, *_: name in names)


def curvlinops_products(case: Case, kind: str = "hessian") -> Products:
    """Return the products of :func:`curvlinops_operator`."""
    operator = curvlinops_operator(case, kind)
    return lambda V: (operator @ V.T.contiguous()).T


def _vector_products(case: Case) -> Products:
    operator = eigenthings_operator(case)
    return lambda V: torch.stack([operator.matvec(v) for v in V])


def _unless_installed(name: str) -> Callable[[Case], str]:
    return lambda case: "" if installed(name) else f"{name} is not installed"


CURVLINOPS = Peer("curvlinops", curvlinops_products, missing=_unless_installed("curvlinops"))
EIGENTHINGS = Peer(
    "hessian-eigenthings", _vector_products, missing=_unless_installed("hessian-eigenthings"), one_by_one=True
)  # column by column, as its interface has it


def _jax_parts(case: Case) -> tuple[Any, Any, Callable[..., Any], tuple[Any, ...]]:
    """Return jax, jax.numpy, the flat loss (theta, inputs, target) re-implemented in jax, and its data."""
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)  # float32 stays float32: the arrays say what they are
    np = jax.numpy
    shapes, slices = {n: tuple(p.shape) for n, p in case.parameters.items()}, case.slices

    def norm(x: Any, prefix: str, weights: dict[str, Any]) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        out = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return out * weights[f"{prefix}.weight"] + weights[f"{prefix}.bias"] if case.affine else out

    def block(x: Any, at: str, w: dict[str, Any]) -> Any:
        q, k, v = (x @ w[f"{at}attention.W_{letter}"] for letter in "QKV")
        attention = jax.nn.softmax(q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        y = norm(x + attention, f"{at}norm_1", w)
        hidden = y @ w[f"{at}feedforward.W_1"]
        relu = np.where(hidden > 0, hidden, 0)
        return norm(y + relu @ w[f"{at}feedforward.W_2"], f"{at}norm_2", w)

    def loss(theta: Any, inputs: Any, target: Any) -> Any:
        weights = {n: theta[slices[n]].reshape(shapes[n]) for n in shapes}
        x = inputs
        for k in range(case.layers):
            x = block(x, f"{k}." if case.layers > 1 else "", weights)
        return ((x - target) ** 2).mean()

    return jax, np, loss, tuple(np.asarray(t.cpu().numpy()) for t in (case.theta, case.inputs, case.target))


def _not_in_jax(case: Case) -> str:
    """Return why the problem is not compared with jax; empty if it is."""
    if not installed("jax"):
        return "jax is not installed"
    if case.spec is None:
        return "only the block is written in jax"
    if case.theta.is_cuda:
        return "jax is compared on the CPU only"
    return ""


def jax_hessian() -> Peer:
    """Return ``jax.jit(jax.hessian(f))``, compiled once for each problem; compiling belongs to the warm-up."""

    @lru_cache(maxsize=1)
    def made(case: Case) -> tuple[Any, ...]:
        jax, _, loss, data = _jax_parts(case)
        return jax.jit(jax.hessian(loss)), data

    def matrix(case: Case) -> Tensor:
        function, data = made(case)
        return torch.from_dlpack(function(*data).block_until_ready())

    return Peer("jax.hessian", matrix=matrix, missing=_not_in_jax)


def jax_products() -> Peer:
    """Return ``jax.jit`` of ``vmap(jvp(grad))`` in chunks, which bounds the memory of ``jax.hessian``."""

    @lru_cache(maxsize=1)
    def made(case: Case) -> tuple[Any, ...]:
        jax, np, loss, data = _jax_parts(case)

        def products(theta: Any, inputs: Any, target: Any, V: Any) -> Any:
            gradient = jax.grad(lambda t: loss(t, inputs, target))
            return jax.vmap(lambda v: jax.jvp(gradient, (theta,), (v,))[1])(V)

        return jax.jit(products), data, np

    def prepare(case: Case) -> Products:
        function, data, np = made(case)
        return lambda V: torch.from_dlpack(function(*data, np.asarray(V.numpy())).block_until_ready())

    return Peer("jax vmap(jvp(grad))", prepare, missing=_not_in_jax, compiles=True)
