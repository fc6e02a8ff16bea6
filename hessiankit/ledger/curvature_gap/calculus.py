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


@claim(
    "curvature-gap/def2",
    place="App. B.1, Definition 2",
    statement=r"$\mathrm{vec}_r$ stacks rows, $(A^{\circ\alpha})_{ij} = A_{ij}^\alpha$, $\mathrm{diag}(v)$ has the diagonal $v$",
    verdict="HOLDS",
    uses=[vec_r, hadamard_power, hadamard],
)
def def2(seed: int) -> Evidence:
    A = Draw(seed).uniform(2, 3, low=0.5, high=2.0)
    by_hand = torch.tensor([A[0, 0], A[0, 1], A[0, 2], A[1, 0], A[1, 1], A[1, 2]])
    roots = torch.tensor([[float(a) ** 0.5 for a in row] for row in A], dtype=torch.float64)
    diagonal = torch.zeros(6, 6, dtype=torch.float64)
    for k in range(6):
        diagonal[k, k] = by_hand[k]
    found = [vec_r(A), hadamard_power(A, 0.5), dense(hadamard(A))]
    return agrees(found, [by_hand, roots, diagonal], "entry by entry")


@claim(
    "curvature-gap/property1",
    place="App. B.1, Property 1",
    statement=r"$\mathrm{vec}_r(A) = \mathrm{vec}(A^\top)$",
    verdict="HOLDS",
    uses=[vec_r, vec],
)
def property1(seed: int) -> Evidence:
    A = Draw(seed).normal(3, 4)
    return agrees([vec_r(A), vec(A.T)], [torch.cat(list(A)), torch.cat(list(A))], "row after row")


@claim(
    "curvature-gap/def3",
    place="App. B.1, Definition 3 and below",
    statement=r"$K_{m,n}\mathrm{vec}(A) = \mathrm{vec}(A^\top)$, $\mathrm{vec}_r(A) = K_{m,n}\mathrm{vec}(A)$, "
    r"$\mathrm{vec}(A) = K_{n,m}\mathrm{vec}_r(A)$, $K_{n,m}K_{m,n} = I_{mn}$",
    verdict="HOLDS",
    uses=[Commutation, vec_to_vec_r],
)
def def3(seed: int) -> Evidence:
    m, n = 3, 4
    A = Draw(seed).normal(m, n)
    K, back = dense(Commutation(m, n)), dense(Commutation(n, m))
    columns, rows = torch.cat(list(A.T)), torch.cat(list(A))
    return agrees([K @ columns, back @ rows, back @ K], [rows, columns, eye(m * n)], "m = 3, n = 4")


@claim(
    "curvature-gap/property2",
    place="App. B.1, Property 2",
    statement=r"$\mathrm{vec}_r(AXB) = (A\otimes B^\top)\,\mathrm{vec}_r(X)$",
    verdict="HOLDS",
    uses=[sandwich],
)
def property2(seed: int) -> Evidence:
    draw = Draw(seed)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(sandwich(Dense(A), Dense(B)) @ vec_r(X), vec_r(A @ X @ B))


@claim(
    "curvature-gap/property3",
    place="App. B.1, Property 3",
    statement=r"$\mathrm{vec}_r(A\circ B) = \mathrm{diag}(\mathrm{vec}_r A)\,\mathrm{vec}_r(B)$",
    verdict="HOLDS",
    uses=[hadamard],
)
def property3(seed: int) -> Evidence:
    draw = Draw(seed)
    A, B = draw.normal(3, 4), draw.normal(3, 4)
    return agrees(hadamard(A) @ vec_r(B), vec_r(A * B))


@claim(
    "curvature-gap/proposition1",
    place="App. B.1, Proposition 1",
    statement=r"$d\,\mathrm{vec}_r F = J\,d\,\mathrm{vec}_r X$ makes $J$ the Jacobian",
    verdict="HOLDS",
    uses=[identify],
)
def proposition1(seed: int) -> Evidence:
    X = Draw(seed).normal(2, 3)
    found = identify(lambda dX: (X.cos() * dX) @ X.T + X.sin() @ dX.T, X)
    return agrees(dense(found), jacobian_of(lambda X: X.sin() @ X.T, X), "F = sin(X) X^T, against autograd")


@claim(
    "curvature-gap/property4",
    place="App. B.1, Property 4",
    statement=r"$c_{ij} = a_{ij}/b_i$ for all $i, j$ is $C = \mathrm{diag}^{-1}(b)\,A$",
    verdict="HOLDS",
    uses=[row_scaling],
)
def property4(seed: int) -> Evidence:
    draw = Draw(seed)
    A, b = draw.normal(3, 4), draw.uniform(3, low=0.5, high=2.0)
    quotients = torch.tensor([[float(A[i, j] / b[i]) for j in range(4)] for i in range(3)], dtype=torch.float64)
    return agrees(row_scaling(b) @ A, quotients, "b without zeros, which the print does not ask for")


@claim(
    "curvature-gap/property5",
    place="App. B.2, Property 5",
    statement=r"$\partial(AXB)/\partial X = A\otimes B^\top$",
    verdict="HOLDS",
    uses=[sandwich],
)
def property5(seed: int) -> Evidence:
    draw = Draw(seed)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    return agrees(dense(sandwich(Dense(A), Dense(B))), jacobian_of(lambda X: A @ X @ B, X), AUTOGRAD)


@claim(
    "curvature-gap/property6a",
    place="App. B.2, Property 6, first half",
    statement=r"$\partial(X\otimes Y)/\partial X = (I_n\otimes K_{p,q}\otimes I_r)(I_{nq}\otimes\mathrm{vec}_r Y)$",
    verdict="HOLDS",
    uses=[kron_derivative_left],
)
def property6a(seed: int) -> Evidence:
    draw = Draw(seed)
    X, Y = draw.normal(2, 3), draw.normal(4, 2)
    return agrees(dense(kron_derivative_left((2, 3), Dense(Y))), jacobian_of(lambda X: torch.kron(X, Y), X), AUTOGRAD)


@claim(
    "curvature-gap/property6b",
    place="App. B.2, Property 6, second half",
    statement=r"$\partial(X\otimes Y)/\partial Y = (I_n\otimes K_{p,q}\otimes I_r)(\mathrm{vec}_r X\otimes I_{pr})$",
    verdict="HOLDS",
    uses=[kron_derivative_right],
)
def property6b(seed: int) -> Evidence:
    draw = Draw(seed)
    X, Y = draw.normal(2, 3), draw.normal(4, 2)
    return agrees(dense(kron_derivative_right(Dense(X), (4, 2))), jacobian_of(lambda Y: torch.kron(X, Y), Y), AUTOGRAD)


@claim(
    "curvature-gap/proposition3",
    place="App. B.2, Proposition 3",
    statement=r"$\frac{\partial AB}{\partial X} = (A\otimes I_q)\frac{\partial B}{\partial X} + "
    r"(I_p\otimes B^\top)\frac{\partial A}{\partial X}$",
    verdict="HOLDS",
    uses=[product_rule],
)
def proposition3(seed: int) -> Evidence:
    X = Draw(seed).normal(2, 3)
    A, B = X.sin(), X.T.cos()
    dA, dB = jacobian_of(torch.sin, X), jacobian_of(lambda X: X.T.cos(), X)
    found = product_rule(Dense(A), Dense(dA), Dense(B), Dense(dB))
    return agrees(dense(found), jacobian_of(lambda X: X.sin() @ X.T.cos(), X), "A = sin X, B = cos X^T, against autograd")


@claim(
    "curvature-gap/proposition4",
    place="App. B.2, Proposition 4",
    statement=r"$\frac{\partial(A\otimes B)}{\partial X} = (I_n\otimes K_{p,q}\otimes I_r)\left[(\mathrm{vec}_r A\otimes I_{pr})"
    r"\frac{\partial B}{\partial X} + (I_{nq}\otimes\mathrm{vec}_r B)\frac{\partial A}{\partial X}\right]$",
    verdict="HOLDS",
    uses=[kronecker_rule],
)
def proposition4(seed: int) -> Evidence:
    X = Draw(seed).normal(2, 3)
    dA, dB = jacobian_of(torch.sin, X), jacobian_of(lambda X: X.T.cos(), X)
    found = kronecker_rule(Dense(X.sin()), Dense(dA), Dense(X.T.cos().contiguous()), Dense(dB))
    reference = jacobian_of(lambda X: kron(X.sin(), X.T.cos()), X)
    return agrees(dense(found), reference, "A = sin X, B = cos X^T, against autograd")


@claim(
    "curvature-gap/proposition5",
    place="App. B.2, Proposition 5",
    statement=r"$\partial D^{-1}/\partial D = -D^{-1}\otimes D^{-\top}$",
    verdict="HOLDS",
    uses=[inverse_rule],
)
def proposition5(seed: int) -> Evidence:
    D = Draw(seed).normal(3, 3) + 3 * eye(3)
    return agrees(dense(inverse_rule(Dense(D.inverse()))), jacobian_of(torch.linalg.inv, D), AUTOGRAD)


@claim(
    "curvature-gap/proposition6",
    place="App. B.2, Proposition 6",
    statement=r"$\partial\,\mathrm{diag}(v)/\partial v = (e_1\otimes e_1\ \dots\ e_L\otimes e_L)$",
    verdict="HOLDS",
    uses=[diag_rule],
)
def proposition6(seed: int) -> Evidence:
    return agrees(dense(diag_rule(4)), jacobian_of(torch.diag, Draw(seed).normal(4)), AUTOGRAD)


@claim(
    "curvature-gap/proposition7",
    place="App. B.2, Proposition 7",
    statement=r"$\partial A^{\circ 2}/\partial A = 2\,\mathrm{diag}(\mathrm{vec}_r A)$",
    verdict="HOLDS",
    uses=[hadamard_square_rule],
)
def proposition7(seed: int) -> Evidence:
    A = Draw(seed).normal(2, 3)
    return agrees(dense(hadamard_square_rule(A)), jacobian_of(torch.square, A), AUTOGRAD)


@claim(
    "curvature-gap/proposition8",
    place="App. B.2, Proposition 8",
    statement=r"$\partial A^{\circ 1/2}/\partial A = \frac12\mathrm{diag}^{-1}(\mathrm{vec}_r^{\circ 1/2} A)$, entries positive",
    verdict="HOLDS",
    uses=[hadamard_sqrt_rule],
)
def proposition8(seed: int) -> Evidence:
    A = Draw(seed).uniform(2, 3, low=0.5, high=2.0)
    return agrees(dense(hadamard_sqrt_rule(A)), jacobian_of(torch.sqrt, A), AUTOGRAD)


@claim(
    "curvature-gap/proposition9",
    place="App. B.2, Proposition 9",
    statement=r"$\partial A^\top/\partial A = K_{n,m}$ for $A$ of shape $m\times n$",
    verdict="HOLDS",
    uses=[transpose_rule],
)
def proposition9(seed: int) -> Evidence:
    A = Draw(seed).normal(2, 3)
    reference = jacobian_of(lambda A: A.T, A)
    return agrees(dense(transpose_rule(2, 3)), reference, AUTOGRAD)
