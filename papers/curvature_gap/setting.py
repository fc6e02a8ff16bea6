"""The setting (Sec. 3), row-wise calculus and matrix norms (App. B), and norms with gains and eps."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.bounds import norm_hessian_norm, norm_jacobian_norm
from derivations.composition import gauss_newton
from derivations.loss import MeanSquaredErrorAt
from derivations.matrix import Dense
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.vecr import kronecker_rule, sandwich, vec_r
from papers.autodiff import hessian_of, jacobian_of
from papers.claim import Evidence
from papers.curvature_gap.point import PAIRS, point
from papers.drawing import Draw
from papers.evidence import agrees, assumed, bounded, relative_error, small, wrong
from papers.norms import NORMS, block_norm_bound, block_norm_bound_printed, block_norms, norm_inequality
from papers.notation import dense, eye, if_it_conforms, kron, ones, spectral
from papers.registry import claim


def printed_statistics(U: Tensor) -> Tensor:
    """Return LayerNorm as Sec. 3 prints it for U of shape m x n: sums over j = 1..m, divided by m."""
    m = U.shape[0]
    first = U[:, :m]
    mean = first.sum(1, keepdim=True) / m
    return (U - mean) / ((first - mean).square().sum(1, keepdim=True) / m).sqrt()


@claim("sec3-ln", "Sec. 3, below Eq. 2", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt])
def sec3_ln(seed: int) -> Evidence:
    r"""for $U$ of shape $m\times n$: $\mu_i = \frac1m\sum_{j\le m}U_{ij}$, $\sigma_i^2 = \frac1m\sum_{j\le
    m}(U_{ij}-\mu_i)^2$
    Needs: $m = n$
    Correct: the sums run over the $n$ features of a row and are divided by $n$"""
    draw = Draw(seed)
    square, wide = draw.normal(3, 3), draw.normal(3, 4)
    found = [printed_statistics(square), LayerNormAt(square).value, LayerNormAt(wide).value]
    holds = agrees(found, [F.layer_norm(square, (3,), eps=0.0)] * 2 + [F.layer_norm(wide, (4,), eps=0.0)], "m = n = 3, torch")
    return assumed(holds, relative_error(printed_statistics(wide), F.layer_norm(wide, (4,), eps=0.0)), above=1e-2)


@claim("sec4.2-gb", "Sec. 4.2, item 2", "WRONG AS PRINTED", uses=[LayerNormAt])
def sec42_gb(seed: int) -> Evidence:
    r"""$\gamma,\beta\in\mathbb{R}^m$, with $m$ the number of rows in Sec. 3
    Correct: $\gamma,\beta\in\mathbb{R}^{d_V}$
    Severity: slip of print"""
    X = Draw(seed).normal(3, 4)
    fits = []
    for n in range(1, 7):
        try:
            F.layer_norm(X, (4,), torch.ones(n, dtype=X.dtype))
        except RuntimeError:
            continue
        fits.append(n)
    detail = "entries of gamma that torch takes for three rows of four features: m as printed, d_V"
    second = [float(n) for n in range(1, 7) if if_it_conforms(torch.matmul, X, eye(n)).numel()]
    corrected, by = [float(X.shape[1])], "the sizes of diag(gamma) that conform with X"
    return wrong([float(X.shape[0])], list(map(float, fits)), detail, corrected=corrected, second=second, by=by)


@claim("eq3", "Sec. 3, Eq. 3", "HOLDS", uses=[gauss_newton])
def eq3(seed: int) -> Evidence:
    r"""$\frac{\partial^2 l(f)}{\partial W_i\partial W_j} = J_i^\top l'' J_j + (l'\otimes I_{p_iq_i})\frac{\partial^2
    f}{\partial W_i\partial W_j}$, $l'$ a row"""
    p = point(seed)
    loss = MeanSquaredErrorAt(p.block.Z, p.target)
    found = [dense(gauss_newton(loss, p.block, f"W_{i}", f"W_{j}").total) for i, j in PAIRS]
    return agrees(found, [p.second("loss", i, j) for i, j in PAIRS], "all 25 blocks of the transformer, against autograd")


@claim("samples", "Sec. 3, empirical loss over 'L = k samples', with Eq. 1", "INCONSISTENT", uses=[AttentionAt])
def samples(seed: int) -> Evidence:
    r"""$L$ is the number of samples $k$ (Sec. 3; 'longer sequence lengths (i.e., a larger number of samples)', App. A.2) and the
    number of tokens of one sequence (Eq. 1)
    Correct: the latter; $H^{(k)} = \frac1k\sum_i H_i$ is a mean over sequences, not that of the formulas with $L = k$ rows"""
    draw = Draw(seed)
    k, d = 3, 4
    X, W_Q, W_K, W_V = draw.normal(k, 1, d), draw.normal(d, 2), draw.normal(d, 2), draw.normal(d, d)  # k samples of one token

    def one_by_one(W_V: Tensor) -> Tensor:
        return torch.stack([(x @ W_Q @ W_K.T @ x.T / math.sqrt(2)).softmax(1) @ x @ W_V for x in X]).square().mean()

    def rows(W_V: Tensor) -> Tensor:
        x = X[:, 0]
        return ((x @ W_Q @ W_K.T @ x.T / math.sqrt(2)).softmax(1) @ x @ W_V).square().mean()

    by_sample = [dense(AttentionAt(x, W_Q, W_K, W_V).jacobian("W_V")) for x in X]
    mean = sum(2 / d * G.T @ G for G in by_sample) / k
    reference = hessian_of(one_by_one, W_V)
    detail = "three samples of one token, as three rows of one sequence"
    return wrong(hessian_of(rows, W_V), reference, detail, corrected=mean)


# Row-wise calculus: App. B.1 and B.2
@claim("property2", "App. B.1, Property 2", "HOLDS", uses=[sandwich])
def property2(seed: int) -> Evidence:
    r"""$\mathrm{vec}_r(AXB) = (A\otimes B^\top)\,\mathrm{vec}_r(X)$"""
    draw = Draw(seed)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(sandwich(Dense(A), Dense(B)) @ vec_r(X), vec_r(A @ X @ B))


@claim("proposition4", "App. B.2, Proposition 4", "HOLDS", uses=[kronecker_rule])
def proposition4(seed: int) -> Evidence:
    r"""$\frac{\partial(A\otimes B)}{\partial X} = (I_n\otimes K_{p,q}\otimes I_r)\left[(\mathrm{vec}_r A\otimes
    I_{pr})\frac{\partial B}{\partial X} + (I_{nq}\otimes\mathrm{vec}_r B)\frac{\partial A}{\partial X}\right]$"""
    X = Draw(seed).normal(2, 3)
    dA, dB = jacobian_of(torch.sin, X), jacobian_of(lambda X: X.T.cos(), X)
    found = kronecker_rule(Dense(X.sin()), Dense(dA), Dense(X.T.cos().contiguous()), Dense(dB))
    reference = jacobian_of(lambda X: kron(X.sin(), X.T.cos()), X)
    return agrees(dense(found), reference, "A = sin X, B = cos X^T, against autograd")


# Matrix norms: App. B.1 (Definition 1, Proposition 2) and B.3
@claim("property7", "App. B.3, Property 7", "HOLDS", uses=[norm_inequality])
def property7(seed: int) -> Evidence:
    r"""$\|A\|_X\le c_{XY}\|A\|_Y$ with the 20 constants of the table (the diagonal is left out)"""
    draw = Draw(seed)
    m, n = 3, 4
    single = torch.zeros(m, n, dtype=torch.float64)
    single[0, 0] = 1
    column, row = ones(m, n) * single[:1], ones(m, n) * single[:, :1]
    attaining = [single, ones(m, n), column, row, torch.eye(m, n, dtype=torch.float64)]
    matrices = [*(draw.normal(m, n) for _ in range(20)), *attaining]
    cells = [(x, y) for x in NORMS for y in NORMS if x != y]
    largest = {cell: max(norm_inequality(A, *cell).ratio for A in matrices) for cell in cells}
    errors = [abs(ratio - 1) for ratio in largest.values()]
    return small(errors, f"the largest of 25 ratios, from 1, in each of {len(cells)} cells: every constant is attained")


@claim("property11", "App. B.3, Property 11", "HOLDS", uses=[block_norm_bound_printed, block_norm_bound])
def property11(seed: int) -> Evidence:
    r"""$\|A\|_2\le\sqrt{mn}\,\max_{ij}\|B_{ij}\|_2$ for a matrix of blocks $B_{ij}$
    Correct: $m, n$ are the numbers of blocks; the print says that they are the sizes of $A$, which is weaker. The last step
    of C.1 cites Property 7 and needs this one"""
    draw = Draw(seed)
    rows, columns = [1, 2, 3], [2, 3]
    ratios = []
    for k in range(31):
        A = draw.normal(6, 5)
        if k == 30:  # equal blocks attain it
            A, rows, columns = ones(6, 4), [2, 2, 2], [2, 2]
        norms = block_norms(A, rows, columns)
        sharper = block_norm_bound(norms)
        ratios += [
            spectral(A) / block_norm_bound_printed(norms),
            sharper / block_norm_bound_printed(norms),
            spectral(A) / sharper,
        ]
    return bounded(ratios, "30 matrices of 3 x 2 unequal blocks, attained by equal blocks", attained=1 - 1e-12)


# What the paper leaves out: gains, shifts, eps, biases, W_O, masks, heads, other activations and losses, depth
@claim("ours/norm-norms", "Closing the Curvature Gap, in place of Lemma 4", "HOLDS", uses=[norm_jacobian_norm, norm_hessian_norm])
def norm_norms(seed: int) -> Evidence:
    r"""$\|J\|_2 = 1/\min_is_i$ and $\|H\|_2 = \max_i\frac{\rho_i}{\sqrt d\,s_i^2}\sqrt{\max(d-2+9(1-\rho_i^2)^2, 2)}$,
    $\rho_i^2 = \|\hat x_i\|^2/d$; for RMSNorm $d - 1$ in place of $d - 2$"""
    draw = Draw(seed)
    found, references = [], []
    for eps in (0.0, 0.3):
        X = draw.normal(3, 5)
        for kind, at in (("layernorm", LayerNormAt(X, eps=eps)), ("rmsnorm", RMSNormAt(X, eps=eps))):
            found += [norm_jacobian_norm(X, eps, norm=kind), norm_hessian_norm(X, eps, norm=kind)]
            references += [spectral(dense(at.jacobian("X"))), spectral(dense(at.hessian("X", "X")))]
    return agrees(found, references, "eps = 0 and 0.3, by singular values of the closed forms")
