r"""How block-diagonal a curvature matrix A is, for a partition of the parameters with the diagonal blocks D:

    share       |D|_F^2 / |A|_F^2               the share of the squares of all entries; ``area`` is that of equal entries
    kept        v^T D v / v^T A v               the curvature that D keeps along the top eigenvector v of A (of the Gauss-Newton
                                                matrix also along the gradient)
    step        cosine of (D + damping I)^-1 g with (A + damping I)^-1 g, A the Gauss-Newton matrix, and its relative error

Damping is 1 % of the largest eigenvalue of A. In AdamW's metric A is P^(-1/2) A P^(-1/2), P the optimizer's diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import cg, eigsh
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

import hessiankit as hk
from hessiankit.curvature.frobenius import FrobeniusNorms
from hessiankit.curvature.suboperators import groups_of, labels
from hessiankit.landscape.preconditioner import optimizer_preconditioner
from hessiankit.support.errors import InputError
from hessiankit.training.by_partition.partitions import heads, layers, neurons
from papers.block_diagonal.models import cross_entropy
from papers.block_diagonal.words import rows_of, word_shares, words_of

PARTITIONS: Mapping[str, Any] = {"neuron": neurons, "head": heads, "tensor": "parameter", "layer": layers}
DENSE = 10_000  # parameters up to which the matrix is formed: 800 MB; above it is streamed
LARGE = 50_000  # parameters above which the rows of words that only the head reads are not computed: hours of them
TOGETHER = 64  # vectors of a product: as fast as more
PANEL_BYTES = 2**31  # of a streamed matrix: a run needs 4 GB, and two fit beside each other in 16
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


def top_pair(A: Any) -> tuple[float, Tensor]:
    """Return the eigenvalue of the largest magnitude and its eigenvector, of a matrix or an operator.

    >>> round(top_pair(torch.diag(torch.tensor([1.0, -3.0, 2.0]).double()))[0], 9)
    -3.0
    """
    values, vectors = eigsh(A.numpy() if isinstance(A, Tensor) else A, k=1, which="LM", v0=np.ones(A.shape[0]))
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


def sampled_rows(model: nn.Module, seed: int) -> list[int]:
    """Return positions of entries of random tensors; of a large vocabulary most entries are of words that a batch lacks."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([p.numel() for p in model.parameters()])
    tensors = torch.randint(len(sizes), (SAMPLED,), generator=generator)
    within_tensor = (torch.rand(SAMPLED, generator=generator) * sizes[tensors]).long()
    return (sizes.cumsum(0)[tensors] - sizes[tensors] + within_tensor).tolist()


def exact_rows(model: nn.Module, x: Tensor, y: Tensor, kind: str, rows: Sequence[int]) -> Tensor:
    """Return rows of the Hessian by jvp(grad), or of the Gauss-Newton matrix by jvp and vjp of the logits, (rows, P)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    sizes, shapes = [p.numel() for p in parameters.values()], [p.shape for p in parameters.values()]
    flat = torch.cat([p.reshape(-1) for p in parameters.values()])

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

    route, units = {"hessian": hessian_row, "ggn": outer_row}[kind], torch.zeros(len(rows), len(flat), dtype=flat.dtype)
    units[torch.arange(len(rows)), torch.tensor(rows)] = 1.0
    with sdpa_kernel(SDPBackend.MATH):
        return torch.stack([route(e) for e in units])


def checked_error(found: Tensor, expected: Tensor, scale: float) -> float:
    """Return the largest difference over ``scale``.

    Raises:
        InputError: It is above :data:`TOLERANCE`.
    """
    error = float((found - expected).abs().max()) / scale
    if not error <= TOLERANCE:
        raise InputError(f"block-diagonal: rows differ from jvp(grad) by {error:.1e} of the largest entry, above {TOLERANCE:g}")
    return error


def metric_scale(model: nn.Module, optimizer: Any) -> Tensor | None:
    """Return the diagonal of P^(-1/2), P AdamW's diagonal, (P,); None before the first step."""
    if not any(state for state in optimizer.state.values()):
        return None
    parameters, device = dict(model.named_parameters()), torch.device("cpu")
    root = optimizer_preconditioner("block-diagonal", optimizer, parameters, dtype=torch.float64, device=device).root
    return root.structures[0].values


def measured(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, *, seed: int) -> dict[str, Any]:
    """Return all measures of a model at one point; of one above :data:`DENSE` parameters those that need no matrix."""
    operator, scale = hk.hessian_operator(model, x, y, loss="cross_entropy"), metric_scale(model, optimizer)
    partitions, rows = partition_labels(operator, model), sampled_rows(model, seed)
    about = {"parameters": operator.shape[0], "loss": operator.loss, "area": areas(partitions)}
    if operator.shape[0] > LARGE:
        return about | without_words(operator, model, x, y, partitions, rows, scale)
    if operator.shape[0] > DENSE:
        return about | streamed(model, x, y, partitions, rows, scale)
    H = hk.hessian(model, x, y, loss="cross_entropy")
    dense = {"hessian": H.matrix, "ggn": H.outer()}
    errors = [checked_error(A[rows], exact_rows(model, x, y, kind, rows), float(A.abs().max())) for kind, A in dense.items()]
    if scale is not None:
        dense |= {f"{kind} in AdamW's metric": A * scale * scale.unsqueeze(1) for kind, A in dense.items()}
    found = {}
    for kind, A in dense.items():
        largest, v = top_pair(A)
        found[kind] = {"share": shares(A, partitions), "top": kept(A, v, partitions)}
        if kind == "ggn":  # g^T A g of an indefinite A may vanish, and a ratio to it says nothing
            gradient = {"gradient": kept(A, operator.gradient, partitions)}
            found[kind] |= gradient | step_errors(A, operator.gradient, partitions, largest)
    return {**about, "row_error": max(errors), "matrices": found}


def streamed(
    model: nn.Module, x: Tensor, y: Tensor, partitions: Mapping[str, Tensor], rows: Sequence[int], scale: Tensor | None
) -> dict[str, Any]:
    """Return the measures that need no matrix, from one pass for each matrix and its metric, and products.

    Groups of the pass are the sets of parameters that every partition has in one block, and each sampled row by itself, so that
    the norms of its entries in all groups can be compared.
    """
    sampled = torch.zeros_like(next(iter(partitions.values())))
    sampled[rows] = 1 + torch.arange(len(rows))
    _, sets = torch.stack([*partitions.values(), sampled]).unique(dim=1, return_inverse=True)
    names = [f"{name}[{', '.join(map(str, at))}]" for name, p in model.named_parameters() for at in _indices(p.shape)]
    by: dict[str, list[str]] = {}
    for name, number in zip(names, sets.tolist(), strict=True):
        by.setdefault(str(number), []).append(name)
    place = {name: n for n, name in enumerate(by)}
    numbers = torch.tensor([place[str(number)] for number in sets.tolist()])
    matrices, errors = {}, []
    for kind in ("hessian", "ggn"):
        norms = hk.frobenius_norms(model, x, y, loss="cross_entropy", kind=kind, by=by, scale=scale, panel_bytes=PANEL_BYTES)
        exact = exact_rows(model, x, y, kind, rows)
        errors.append(norms_error(norms, numbers, rows, exact))
        matrices[kind] = {"share": norm_shares(norms, numbers, partitions)}
        if scale is not None and norms.scaled is not None:
            errors.append(norms_error(norms.scaled, numbers, rows, exact * scale * scale[rows].unsqueeze(1)))
            matrices[f"{kind} in AdamW's metric"] = {"share": norm_shares(norms.scaled, numbers, partitions)}
        operator = hk.hessian_operator(model, x, y, loss="cross_entropy", kind=kind)
        matrices[kind]["top"] = kept_by_products(operator, top_pair(operator)[1], partitions)
    return {"row_error": max(errors), "matrices": matrices}


def without_words(
    operator: Any, model: Any, x: Tensor, y: Tensor, partitions: Mapping[str, Tensor], rows: Sequence[int], scale: Tensor | None
) -> dict[str, Any]:
    """Return the shares of the Hessian, also in a metric, by :mod:`~papers.block_diagonal.words`, and the error of rows."""
    words, one = words_of(model, x, operator.slices), torch.ones(operator.shape[0], dtype=torch.float64)
    shares_of, largest = word_shares(operator, words, partitions, [one] if scale is None else [one, scale])
    errors = [checked_error(rows_of(operator, torch.tensor(rows)), exact_rows(model, x, y, "hessian", rows), largest)]
    for n, c in ((0, 0), (len(words.at) // 2, words.at.shape[1] - 1)):
        (exact,) = exact_rows(model, x, y, "hessian", [int(words.at[n, c])])
        errors.append(checked_error(words.row(n, c), exact[words.at], largest))
    names = ("hessian", "hessian in AdamW's metric")
    matrices = {name: {"share": found} for name, found in zip(names, shares_of, strict=False)}
    return {"row_error": max(errors), "matrices": matrices}


def norm_shares(norms: FrobeniusNorms, numbers: Tensor, partitions: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the share in the diagonal blocks by partition, from norms by sets that every partition keeps whole."""
    squares, found = norms.matrix.square(), {}
    for name, labels_of_entries in partitions.items():
        of_set = labels_of_entries.new_zeros(len(squares))
        of_set[numbers] = labels_of_entries
        found[name] = float(squares[of_set.unsqueeze(1) == of_set].sum()) / norms.whole**2
    return found


def norms_error(norms: FrobeniusNorms, numbers: Tensor, rows: Sequence[int], exact: Tensor) -> float:
    """Return the largest error of the norms of sampled rows by sets, of the largest root mean square of a block.

    That is at most the largest entry of the matrix. Each sampled row is a set by itself.
    """
    by_set = exact.new_zeros(len(rows), len(norms.matrix)).index_add_(1, numbers, exact.square()).sqrt()
    sizes = torch.tensor([*norms.groups.values()], dtype=exact.dtype)
    scale = float((norms.matrix / (sizes * sizes.unsqueeze(1)).sqrt()).max())
    return checked_error(norms.matrix[numbers[rows]], by_set, scale)


def kept_by_products(operator: hk.HessianOperator, v: Tensor, partitions: Mapping[str, Tensor]) -> dict[str, float]:
    """Return v^T D v / v^T A v by partition: v^T D v is the sum over blocks of w^T A w, w the entries of v in the block."""
    whole, found = float(v @ (operator @ v)), {}
    for name, numbers in partitions.items():
        total = 0.0
        for first in range(0, int(numbers.max()) + 1, TOGETHER):
            at = ((numbers >= first) & (numbers < first + TOGETHER)).nonzero()[:, 0]
            pieces = v.new_zeros(TOGETHER, len(v))
            pieces[numbers[at] - first, at] = v[at]
            total += float((pieces * (operator @ pieces.T).T).sum())
        found[name] = total / whole
    return found


def _indices(shape: torch.Size) -> list[list[int]]:
    return torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(math.prod(shape), -1).tolist()
