r"""How block-diagonal a curvature matrix A is, for a partition of the parameters with the diagonal blocks D:

    share       |D|_F^2 / |A|_F^2               the share of the squares of all entries; ``area`` is that of equal entries
    kept        v^T D v / v^T A v               the curvature that D keeps along the top eigenvector v of A (of the Gauss-Newton
                                                matrix also along the gradient)
    step        cosine of (D + damping I)^-1 g with (A + damping I)^-1 g, A the Gauss-Newton matrix, and its relative error

Damping is 1 % of the largest eigenvalue of A. In AdamW's metric A is P^(-1/2) A P^(-1/2), P the optimizer's diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from scipy.sparse.linalg import cg, eigsh
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from hessiankit.curvature.suboperators import groups_of, labels
from hessiankit.landscape.preconditioner import optimizer_preconditioner
from hessiankit.support.errors import InputError
from hessiankit.training.by_partition.partitions import heads, layers, neurons
from papers.block_diagonal.models import cross_entropy

PARTITIONS: Mapping[str, Any] = {"neuron": neurons, "head": heads, "tensor": "parameter", "layer": layers}
DENSE = 10_000  # parameters up to which the matrix is formed: 800 MB; above it is streamed
SAMPLED, TOLERANCE = 3, 1e-10  # rows that are compared with jvp(grad), and the error, of the matrix's largest entry
DAMPING = 0.01  # of the largest eigenvalue, as hessiankit.approximations has it


def partition_labels(operator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return the number of each parameter's group by partition, (P,) each."""
    found = {}
    for name, by in PARTITIONS.items():
        found[name] = labels("block-diagonal", groups_of("block-diagonal", by, operator, model), operator.shape[0])
    return found


def within(A: Tensor, numbers: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """Return by column the sum of the weighted entries whose row is in the column's group, (P,).

    >>> within(torch.ones(3, 3), torch.tensor([0, 0, 1])).tolist()
    [2.0, 2.0, 1.0]
    """
    weighted = A if row_weights is None else A * row_weights.unsqueeze(1)
    by_group = A.new_zeros(int(numbers.max()) + 1, A.shape[1]).index_add_(0, numbers, weighted)
    return by_group[numbers, torch.arange(A.shape[1])]


def shares(A: Tensor, partitions: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of the squares in the diagonal blocks by partition."""
    squares = A.square()
    total = float(squares.sum())
    return {name: float(within(squares, numbers).sum()) / total for name, numbers in partitions.items()}


def areas(partitions: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share of the entries in the diagonal blocks by partition.

    >>> areas({"a": torch.tensor([0, 0, 1])})
    {'a': 0.5555555555555556}
    """
    return {name: float(x.bincount().double().square().sum()) / len(x) ** 2 for name, x in partitions.items()}


def kept(A: Tensor, v: Tensor, partitions: Mapping[str, Tensor]) -> dict[str, float]:
    """Return v^T D v / v^T A v by partition."""
    whole = float(v @ A @ v)
    return {name: float(within(A, numbers, v) @ v) / whole for name, numbers in partitions.items()}


def top_pair(A: Tensor) -> tuple[float, Tensor]:
    """Return the eigenvalue of the largest magnitude and its eigenvector.

    >>> round(top_pair(torch.diag(torch.tensor([1.0, -3.0, 2.0]).double()))[0], 9)
    -3.0
    """
    values, vectors = eigsh(A.numpy(), k=1, which="LM", v0=torch.ones(len(A), dtype=A.dtype).numpy())
    return float(values[0]), torch.from_numpy(vectors[:, 0].copy())


def block_solve(A: Tensor, numbers: Tensor, b: Tensor, damping: float) -> Tensor:
    """Return (D + damping I)^-1 b, block by block.

    >>> A = torch.tensor([[2.0, 1.0], [1.0, 4.0]])
    >>> block_solve(A, torch.tensor([0, 1]), torch.ones(2), 0.0).tolist()
    [0.5, 0.25]
    """
    x = torch.zeros_like(b)
    for group in range(int(numbers.max()) + 1):
        at = (numbers == group).nonzero()[:, 0]
        block = A[at[:, None], at]
        block.diagonal().add_(damping)
        x[at] = torch.cholesky_solve(b[at, None], torch.linalg.cholesky(block))[:, 0]
    return x


def step_errors(G: Tensor, g: Tensor, partitions: Mapping[str, Tensor], largest: float) -> dict[str, dict[str, float]]:
    """Return cosine and relative error of the block-diagonal damped Gauss-Newton step by partition."""
    damping = DAMPING * largest
    damped = G.clone()
    damped.diagonal().add_(damping)
    exact = torch.from_numpy(cg(damped.numpy(), g.numpy(), rtol=1e-10)[0])
    found: dict[str, dict[str, float]] = {"cosine": {}, "error": {}}
    for name, numbers in partitions.items():
        x = block_solve(G, numbers, g, damping)
        found["cosine"][name] = float(x @ exact / (x.norm() * exact.norm()))
        found["error"][name] = float((x - exact).norm() / exact.norm())
    return found


def check_rows(model: nn.Module, x: Tensor, y: Tensor, matrices: Mapping[str, Tensor], seed: int) -> float:
    """Return the largest error of sampled rows against jvp(grad), of the matrix's largest entry.

    Raises:
        InputError: It is above :data:`TOLERANCE`.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sizes, shapes = [p.numel() for p in parameters.values()], [p.shape for p in parameters.values()]
    flat, worst = torch.cat([p.reshape(-1) for p in parameters.values()]), 0.0

    def logits(theta: Tensor) -> Tensor:
        pieces = (piece.reshape(shape) for piece, shape in zip(theta.split(sizes), shapes, strict=True))
        return functional_call(model, dict(zip(parameters, pieces, strict=True)), (x,))

    def loss(z: Tensor) -> Tensor:
        return cross_entropy(z, y)

    def composed(theta: Tensor) -> Tensor:
        return loss(logits(theta))

    def derivative(function: Callable[[Tensor], Any], at: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
        value, tangent, *_ = jvp(function, (at,), (along,))
        return value, tangent

    def hessian_row(e: Tensor) -> Tensor:
        return derivative(grad(composed), flat, e)[1]

    def outer_row(e: Tensor) -> Tensor:
        z, tangent = derivative(logits, flat, e)
        pulled: Any = vjp(logits, flat)[1](derivative(grad(loss), z, tangent)[1])
        return pulled[0]

    routes = {"hessian": hessian_row, "ggn": outer_row}
    generator = torch.Generator().manual_seed(seed)
    with sdpa_kernel(SDPBackend.MATH):
        for kind, matrix in matrices.items():
            scale = float(matrix.abs().max())
            for row in torch.randint(len(flat), (SAMPLED,), generator=generator).tolist():
                e = torch.zeros_like(flat)
                e[row] = 1.0
                worst = max(worst, float((routes[kind](e) - matrix[row]).abs().max()) / scale)
    if not worst <= TOLERANCE:
        raise InputError(f"block-diagonal: rows differ from jvp(grad) by {worst:.1e} of the largest entry, above {TOLERANCE:g}")
    return worst


def measured(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, *, seed: int) -> dict[str, Any]:
    """Return all measures of a model at one point; of one above :data:`DENSE` parameters the shares, without a metric."""
    operator = hk.hessian_operator(model, x, y, loss="cross_entropy")
    partitions = partition_labels(operator, model)
    about = {"parameters": operator.shape[0], "loss": operator.loss, "area": areas(partitions)}
    if operator.shape[0] > DENSE:
        return {**about, "matrices": {kind: {"share": streamed(model, x, y, kind, partitions)} for kind in ("hessian", "ggn")}}
    H = hk.hessian(model, x, y, loss="cross_entropy")
    dense = {"hessian": H.matrix, "ggn": H.outer()}
    about["row_error"] = check_rows(model, x, y, dense, seed)
    if any(state for state in optimizer.state.values()):
        parameters = dict(model.named_parameters())
        device = torch.device("cpu")
        root = optimizer_preconditioner("block-diagonal", optimizer, parameters, dtype=torch.float64, device=device).root
        scale = root.structures[0].values
        dense |= {f"{kind} in AdamW's metric": A * scale * scale.unsqueeze(1) for kind, A in dense.items()}
    found = {}
    for kind, A in dense.items():
        largest, v = top_pair(A)
        found[kind] = {"share": shares(A, partitions), "top": kept(A, v, partitions)}
        if kind == "ggn":  # g^T A g of an indefinite A may vanish, and a ratio to it says nothing
            gradient = {"gradient": kept(A, operator.gradient, partitions)}
            found[kind] |= gradient | step_errors(A, operator.gradient, partitions, largest)
    return {**about, "matrices": found}


def streamed(model: nn.Module, x: Tensor, y: Tensor, kind: str, partitions: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the shares by all partitions from one pass, by the groups in which no two partitions differ."""
    stacked = torch.stack(list(partitions.values()))
    atoms, inverse = stacked.unique(dim=1, return_inverse=True)
    names = [f"{name}[{', '.join(map(str, at))}]" for name, p in model.named_parameters() for at in _indices(p.shape)]
    by: dict[str, list[str]] = {}
    for name, atom in zip(names, inverse.tolist(), strict=True):
        by.setdefault(str(atom), []).append(name)
    norms = hk.frobenius_norms(model, x, y, loss="cross_entropy", kind=kind, by=by)
    squares, order = norms.matrix.square(), torch.tensor([int(name) for name in norms.groups])
    found = {}
    for name, groups in zip(partitions, atoms, strict=True):
        numbers = groups[order]
        found[name] = float(squares[numbers[:, None] == numbers].sum()) / norms.whole**2
    return found


def _indices(shape: torch.Size) -> list[list[int]]:
    return torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(math.prod(shape), -1).tolist()
