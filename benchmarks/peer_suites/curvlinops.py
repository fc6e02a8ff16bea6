"""curvlinops' own tests on hessiankit's matrices: a pytest plugin that replaces the products of its operators.

Run from the source of curvlinops 3.0.1, whose tests are not in its wheel::

    PYTHONPATH=HESSIANKIT python -m pytest -p benchmarks.peer_suites.curvlinops test/test_ggn.py test/test_kfac.py

Models and data are in float64: of a small entry, the tests' relative tolerance of 1e-5 is below the rounding of float32.
What hessiankit does not offer is skipped with the reason: KFAC-reduce, weight and bias as one, FOOF, inverses that damp factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import curvlinops as peer
import pytest
import torch
from torch import Tensor, nn

import hessiankit as hk

KINDS = {
    peer.HessianLinearOperator: "hessian",
    peer.GGNLinearOperator: "ggn",
    peer.EFLinearOperator: "fisher-empirical",
    peer.FisherMCLinearOperator: "fisher-mc",
}
torch.set_default_dtype(torch.float64)
FISHERS = {"type-2": "ggn", "mc": "fisher-mc", "empirical": "fisher-empirical"}


class ClassesLast(nn.Module):
    """A model whose classes are on axis 1, as torch's cross entropy reads them, with classes on the last axis."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        """Return the output with classes last."""
        return self.model(*inputs).movedim(1, -1)


def batches(op: Any) -> list[tuple[Any, Tensor]]:
    return [((X,) if isinstance(X, Mapping) else X, y) for X, y in op._data]


def names(op: Any, module: nn.Module) -> list[str]:
    """The names of the peer's parameters, in the peer's order."""
    known = {id(p): name for name, p in module.named_parameters()}
    return [known[id(p)] for p in op._params]


def operator(op: Any, kind: str, draws: int = 1) -> tuple[hk.HessianOperator, list[str]]:
    """Return hessiankit's operator of the same matrix, and the names of its parameters in the peer's order."""
    key, kept = (kind, draws, *(p._version for p in op._params)), op.__dict__.setdefault("_hessiankit", {})
    if key in kept:
        return kept[key]  # type: ignore[no-any-return]
    module, loss = op._model_func, op._loss_func
    named: Any = {nn.MSELoss: "mse", nn.CrossEntropyLoss: "cross_entropy"}.get(type(loss), loss)
    if named is loss and kind.startswith("fisher"):
        pytest.skip("Fisher matrices of hessiankit are of 'mse' and 'cross_entropy'")
    if named == "cross_entropy":
        module = ClassesLast(module)
    order = names(op, module)
    options = {
        "loss": named,
        "params": order,
        "kind": kind,
        "reduction": loss.reduction,
        "draws": draws,
        "seed": op.__dict__.get("_seed", 0),
    }
    kept[key] = hk.hessian_operator(module, batches(op), **options), order
    return kept[key]  # type: ignore[no-any-return]


def factored(op: Any) -> tuple[Any, hk.HessianOperator, list[str]]:
    """Return hessiankit's KFAC or EKFAC, the operator that it approximates, and the names in the peer's order."""
    if str(getattr(op._fisher_type, "value", op._fisher_type)) not in FISHERS:
        pytest.skip("hessiankit has no KFAC from inputs alone (FOOF)")
    if getattr(op._kfac_approx, "value", op._kfac_approx) != "expand":
        pytest.skip("hessiankit has KFAC-expand, not KFAC-reduce")
    if not op._separate_weight_and_bias and any("bias" in name for name in names(op, op._model_func)):
        pytest.skip("hessiankit's KFAC treats weight and bias apart")
    if not isinstance(op._loss_func, (nn.MSELoss, nn.CrossEntropyLoss)):
        pytest.skip("hessiankit's KFAC is of 'mse' and 'cross_entropy'")
    exact, order = operator(op, FISHERS[str(getattr(op._fisher_type, "value", op._fisher_type))], op._mc_samples)
    return exact.approximation("ekfac" if isinstance(op, peer.EKFACLinearOperator) else "kfac"), exact, order


def times(A: Any, M: list[Tensor], rows: list[Tensor], columns: list[Tensor], shapes: Any) -> list[Tensor]:
    """Return A times a matrix in the peer's list format; ``columns`` and ``rows`` are its positions in the order of A."""
    flat = torch.cat([m.reshape(-1, m.shape[-1]) for m in M])
    inside = torch.empty_like(flat)
    inside[torch.cat(columns)] = flat
    out = (A @ inside)[torch.cat(rows)]
    return [x.reshape(*s, -1) for x, s in zip(out.split([s.numel() for s in map(torch.Size, shapes)]), shapes, strict=True)]


def at(slices: Mapping[str, slice], order: list[str]) -> list[Tensor]:
    return [torch.arange(slices[name].start, slices[name].stop) for name in order]


def symmetric(op: Any, M: list[Tensor]) -> list[Tensor]:
    A, order = operator(op, KINDS[type(op)], getattr(op, "_mc_samples", 1))
    places = at(A.slices, order)
    if len(op._block_sizes) > 1:
        split = iter(order)
        A = A.block_diagonal({str(n): [next(split) for _ in range(size)] for n, size in enumerate(op._block_sizes)})
    return times(A, M, places, places, op._out_shape)


def kronecker(op: Any, M: list[Tensor]) -> list[Tensor]:
    C, exact, order = factored(op)
    places = at(exact.slices, order)
    return times(C, M, places, places, op._out_shape)


def inverse(op: Any, M: list[Tensor]) -> list[Tensor]:
    if not op._use_exact_damping:
        pytest.skip("hessiankit's inverses damp the matrix, not its factors")
    C, exact, order = factored(op._A)
    places = at(exact.slices, order)
    return times(C.inverse(op._damping), M, places, places, op._out_shape)


def jacobian(op: Any, M: list[Tensor]) -> list[Tensor]:
    found, is_transposed = [], isinstance(op, peer.TransposedJacobianLinearOperator)

    for inputs, y in batches(op):
        samples = len(y)
        J = hk.jacobian_operator(op._model_func, inputs, params=names(op, op._model_func))
        places = at(J.slices, names(op, op._model_func))
        every = [torch.arange(J.shape[0])]
        if is_transposed:
            part, M = [M[0][:samples]], [M[0][samples:]]
            found.append(times(J.T, part, places, every, op._out_shape))
        else:
            found.append(times(J, M, every, places, [(samples, *op._out_shape[0][1:])])[0])
    return [sum(parts) for parts in zip(*found, strict=True)] if is_transposed else [torch.cat(found)]


for cls in KINDS:
    cls._matmat = symmetric
for cls in (peer.KFACLinearOperator, peer.EKFACLinearOperator):
    cls._matmat = kronecker
for cls in (peer.JacobianLinearOperator, peer.TransposedJacobianLinearOperator):
    cls._matmat = jacobian
peer.KFACInverseLinearOperator._matmat = inverse
