"""Row-wise calculus: App. B.1 and B.2."""

from __future__ import annotations

import torch

from derivations.matrix import Commutation, Dense
from derivations.vecr import (
    diag_rule,
    hadamard,
    hadamard_power,
    hadamard_sqrt_rule,
    hadamard_square_rule,
    identify,
    inverse_rule,
    kron_derivative_left,
    kron_derivative_right,
    kronecker_rule,
    product_rule,
    row_scaling,
    sandwich,
    transpose_rule,
    vec,
    vec_r,
    vec_to_vec_r,
)
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.curvature_gap.derivatives import jacobian_of
from hessiankit.ledger.curvature_gap.notation import dense, eye, kron
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees
from hessiankit.ledger.registry import claim

AUTOGRAD = "against autograd"


@claim("curvature-gap/def2", "App. B.1, Definition 2", "HOLDS", uses=[vec_r, hadamard_power, hadamard])
def def2(seed: int) -> Evidence:
    r"""$\mathrm{vec}_r$ stacks rows, $(A^{\circ\alpha})_{ij} = A_{ij}^\alpha$, $\mathrm{diag}(v)$ has the diagonal $v$"""
    A = Draw(seed).uniform(2, 3, low=0.5, high=2.0)
    by_hand = torch.tensor([A[0, 0], A[0, 1], A[0, 2], A[1, 0], A[1, 1], A[1, 2]])
    roots = torch.tensor([[float(a) ** 0.5 for a in row] for row in A], dtype=torch.float64)
    diagonal = torch.zeros(6, 6, dtype=torch.float64)
    for k in range(6):
        diagonal[k, k] = by_hand[k]
    found = [vec_r(A), hadamard_power(A, 0.5), dense(hadamard(A))]
    return agrees(found, [by_hand, roots, diagonal], "entry by entry")


@claim("curvature-gap/property1", "App. B.1, Property 1", "HOLDS", uses=[vec_r, vec])
def property1(seed: int) -> Evidence:
    r"""$\mathrm{vec}_r(A) = \mathrm{vec}(A^\top)$"""
    A = Draw(seed).normal(3, 4)
    return agrees([vec_r(A), vec(A.T)], [torch.cat(list(A)), torch.cat(list(A))], "row after row")


@claim("curvature-gap/def3", "App. B.1, Definition 3 and below", "HOLDS", uses=[Commutation, vec_to_vec_r])
def def3(seed: int) -> Evidence:
    r"""$K_{m,n}\mathrm{vec}(A) = \mathrm{vec}(A^\top)$, $\mathrm{vec}_r(A) = K_{m,n}\mathrm{vec}(A)$, $\mathrm{vec}(A) =
    K_{n,m}\mathrm{vec}_r(A)$, $K_{n,m}K_{m,n} = I_{mn}$"""
    m, n = 3, 4
    A = Draw(seed).normal(m, n)
    K, back = dense(Commutation(m, n)), dense(Commutation(n, m))
    columns, rows = torch.cat(list(A.T)), torch.cat(list(A))
    return agrees([K @ columns, back @ rows, back @ K], [rows, columns, eye(m * n)], "m = 3, n = 4")


@claim("curvature-gap/property2", "App. B.1, Property 2", "HOLDS", uses=[sandwich])
def property2(seed: int) -> Evidence:
    r"""$\mathrm{vec}_r(AXB) = (A\otimes B^\top)\,\mathrm{vec}_r(X)$"""
    draw = Draw(seed)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(sandwich(Dense(A), Dense(B)) @ vec_r(X), vec_r(A @ X @ B))


@claim("curvature-gap/property3", "App. B.1, Property 3", "HOLDS", uses=[hadamard])
def property3(seed: int) -> Evidence:
    r"""$\mathrm{vec}_r(A\circ B) = \mathrm{diag}(\mathrm{vec}_r A)\,\mathrm{vec}_r(B)$"""
    draw = Draw(seed)
    A, B = draw.normal(3, 4), draw.normal(3, 4)
    return agrees(hadamard(A) @ vec_r(B), vec_r(A * B))


@claim("curvature-gap/proposition1", "App. B.1, Proposition 1", "HOLDS", uses=[identify])
def proposition1(seed: int) -> Evidence:
    r"""$d\,\mathrm{vec}_r F = J\,d\,\mathrm{vec}_r X$ makes $J$ the Jacobian"""
    X = Draw(seed).normal(2, 3)
    found = identify(lambda dX: (X.cos() * dX) @ X.T + X.sin() @ dX.T, X)
    return agrees(dense(found), jacobian_of(lambda X: X.sin() @ X.T, X), "F = sin(X) X^T, against autograd")


@claim("curvature-gap/property4", "App. B.1, Property 4", "HOLDS", uses=[row_scaling])
def property4(seed: int) -> Evidence:
    r"""$c_{ij} = a_{ij}/b_i$ for all $i, j$ is $C = \mathrm{diag}^{-1}(b)\,A$"""
    draw = Draw(seed)
    A, b = draw.normal(3, 4), draw.uniform(3, low=0.5, high=2.0)
    quotients = torch.tensor([[float(A[i, j] / b[i]) for j in range(4)] for i in range(3)], dtype=torch.float64)
    return agrees(row_scaling(b) @ A, quotients, "b without zeros, which the print does not ask for")


@claim("curvature-gap/property5", "App. B.2, Property 5", "HOLDS", uses=[sandwich])
def property5(seed: int) -> Evidence:
    r"""$\partial(AXB)/\partial X = A\otimes B^\top$"""
    draw = Draw(seed)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(dense(sandwich(Dense(A), Dense(B))), jacobian_of(lambda X: A @ X @ B, X), AUTOGRAD)


@claim("curvature-gap/property6a", "App. B.2, Property 6, first half", "HOLDS", uses=[kron_derivative_left])
def property6a(seed: int) -> Evidence:
    r"""$\partial(X\otimes Y)/\partial X = (I_n\otimes K_{p,q}\otimes I_r)(I_{nq}\otimes\mathrm{vec}_r Y)$"""
    draw = Draw(seed)
    X, Y = draw.normal(2, 3), draw.normal(4, 2)
    return agrees(dense(kron_derivative_left((2, 3), Dense(Y))), jacobian_of(lambda X: torch.kron(X, Y), X), AUTOGRAD)


@claim("curvature-gap/property6b", "App. B.2, Property 6, second half", "HOLDS", uses=[kron_derivative_right])
def property6b(seed: int) -> Evidence:
    r"""$\partial(X\otimes Y)/\partial Y = (I_n\otimes K_{p,q}\otimes I_r)(\mathrm{vec}_r X\otimes I_{pr})$"""
    draw = Draw(seed)
    X, Y = draw.normal(2, 3), draw.normal(4, 2)
    return agrees(dense(kron_derivative_right(Dense(X), (4, 2))), jacobian_of(lambda Y: torch.kron(X, Y), Y), AUTOGRAD)


@claim("curvature-gap/proposition3", "App. B.2, Proposition 3", "HOLDS", uses=[product_rule])
def proposition3(seed: int) -> Evidence:
    r"""$\frac{\partial AB}{\partial X} = (A\otimes I_q)\frac{\partial B}{\partial X} + (I_p\otimes B^\top)\frac{\partial
    A}{\partial X}$"""
    X = Draw(seed).normal(2, 3)
    A, B = X.sin(), X.T.cos()
    dA, dB = jacobian_of(torch.sin, X), jacobian_of(lambda X: X.T.cos(), X)
    found = product_rule(Dense(A), Dense(dA), Dense(B), Dense(dB))
    return agrees(dense(found), jacobian_of(lambda X: X.sin() @ X.T.cos(), X), "A = sin X, B = cos X^T, against autograd")


@claim("curvature-gap/proposition4", "App. B.2, Proposition 4", "HOLDS", uses=[kronecker_rule])
def proposition4(seed: int) -> Evidence:
    r"""$\frac{\partial(A\otimes B)}{\partial X} = (I_n\otimes K_{p,q}\otimes I_r)\left[(\mathrm{vec}_r A\otimes
    I_{pr})\frac{\partial B}{\partial X} + (I_{nq}\otimes\mathrm{vec}_r B)\frac{\partial A}{\partial X}\right]$"""
    X = Draw(seed).normal(2, 3)
    dA, dB = jacobian_of(torch.sin, X), jacobian_of(lambda X: X.T.cos(), X)
    found = kronecker_rule(Dense(X.sin()), Dense(dA), Dense(X.T.cos().contiguous()), Dense(dB))
    reference = jacobian_of(lambda X: kron(X.sin(), X.T.cos()), X)
    return agrees(dense(found), reference, "A = sin X, B = cos X^T, against autograd")


@claim("curvature-gap/proposition5", "App. B.2, Proposition 5", "HOLDS", uses=[inverse_rule])
def proposition5(seed: int) -> Evidence:
    r"""$\partial D^{-1}/\partial D = -D^{-1}\otimes D^{-\top}$"""
    D = Draw(seed).normal(3, 3) + 3 * eye(3)
    return agrees(dense(inverse_rule(Dense(D.inverse()))), jacobian_of(torch.linalg.inv, D), AUTOGRAD)


@claim("curvature-gap/proposition6", "App. B.2, Proposition 6", "HOLDS", uses=[diag_rule])
def proposition6(seed: int) -> Evidence:
    r"""$\partial\,\mathrm{diag}(v)/\partial v = (e_1\otimes e_1\ \dots\ e_L\otimes e_L)$"""
    return agrees(dense(diag_rule(4)), jacobian_of(torch.diag, Draw(seed).normal(4)), AUTOGRAD)


@claim("curvature-gap/proposition7", "App. B.2, Proposition 7", "HOLDS", uses=[hadamard_square_rule])
def proposition7(seed: int) -> Evidence:
    r"""$\partial A^{\circ 2}/\partial A = 2\,\mathrm{diag}(\mathrm{vec}_r A)$"""
    A = Draw(seed).normal(2, 3)
    return agrees(dense(hadamard_square_rule(A)), jacobian_of(torch.square, A), AUTOGRAD)


@claim("curvature-gap/proposition8", "App. B.2, Proposition 8", "HOLDS", uses=[hadamard_sqrt_rule])
def proposition8(seed: int) -> Evidence:
    r"""$\partial A^{\circ 1/2}/\partial A = \frac12\mathrm{diag}^{-1}(\mathrm{vec}_r^{\circ 1/2} A)$, entries positive"""
    A = Draw(seed).uniform(2, 3, low=0.5, high=2.0)
    return agrees(dense(hadamard_sqrt_rule(A)), jacobian_of(torch.sqrt, A), AUTOGRAD)


@claim("curvature-gap/proposition9", "App. B.2, Proposition 9", "HOLDS", uses=[transpose_rule])
def proposition9(seed: int) -> Evidence:
    r"""$\partial A^\top/\partial A = K_{n,m}$ for $A$ of shape $m\times n$"""
    A = Draw(seed).normal(2, 3)
    reference = jacobian_of(lambda A: A.T, A)
    return agrees(dense(transpose_rule(2, 3)), reference, AUTOGRAD)
