r"""The vec_r calculus: how the row-wise vectorisation of a matrix is moved and differentiated.

vec_r stacks the rows of a matrix, and dF/dX = d vec_r(F) / d vec_r(X)^T. The definitions and rules are those of
"Closing the Curvature Gap", Appendix B.1 and B.2, in the order of the paper; all of them hold as printed. A rule takes
and returns matrix expressions, so what it builds keeps its Kronecker structure and can be read in any arithmetic.

>>> import torch
>>> W = Dense(torch.randn(4, 2), "W")
>>> product_rule(W, Identity(8), W.T, transpose_rule(4, 2)).latex()  # d(W W^T)/dW
'\\left(W\\otimes I_{4}\\right)\\,K_{2,4}+I_{4}\\otimes W'
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from derivations.arrays import Array, Scalar, concatenate, eye, reciprocal, sqrt
from derivations.matrix import (
    Commutation,
    Dense,
    Diagonal,
    DiagonalLift,
    Identity,
    Matrix,
    Ones,
    Scaled,
    SliceTranspose,
    Vec,
    VecIdentity,
    Zero,
    kron,
    scaled,
)

# Definitions 1-3 and Properties 1-4: vectors and products ------------------------------------------------------------


def vec_r(A: Array) -> Array:
    """Return vec_r(A), the rows of A one after the other, of shape (mn,) for A of shape (m, n) (Definition 2).

    >>> vec_r(torch.tensor([[1, 2], [3, 4]])).tolist()
    [1, 2, 3, 4]
    """
    return A.reshape(-1)


def vec(A: Array) -> Array:
    """Return vec(A), the columns of A one after the other, of shape (mn,); vec_r(A) = vec(A^T) (Property 1).

    >>> vec(torch.tensor([[1, 2], [3, 4]])).tolist()
    [1, 3, 2, 4]
    """
    return A.T.reshape(-1)


def unvec_r(v: Array, m: int, n: int) -> Array:
    """Return the m x n matrix A with vec_r(A) = v, an array of mn entries.

    Raises:
        ValueError: if v does not have mn entries.

    >>> unvec_r(torch.tensor([1, 2, 3, 4, 5, 6]), 2, 3).tolist()
    [[1, 2, 3], [4, 5, 6]]
    """
    if v.reshape(-1).shape[0] != m * n:
        raise ValueError(f"unvec_r: a {m} x {n} matrix has {m * n} entries, got an array of shape {tuple(v.shape)}")
    return v.reshape(m, n)


def vec_r_column(Y: Matrix) -> Matrix:
    r"""Return vec_r(Y) as an mn x 1 expression, keeping the structure of identities, ones and zeros.

    >>> vec_r_column(Identity(3)), vec_r_column(2 * Ones(2, 3))
    (VecIdentity(9x1: \operatorname{vec}_r(I_{3})), Scaled(6x1: 2\,\mathbf{1}_{6}))
    """
    m, n = Y.shape
    if n == 1:
        return Y
    if isinstance(Y, Scaled):
        return scaled(Y.c, vec_r_column(Y.matrix))
    if isinstance(Y, Identity):
        return VecIdentity(n)
    if isinstance(Y, Ones):
        return Ones(m * n)
    return Zero(m * n, 1) if isinstance(Y, Zero) else Vec(Y)


def vec_to_vec_r(m: int, n: int) -> Matrix:
    """Return K_{m,n}, with vec_r(A) = K_{m,n} vec(A) for A in R^{m x n} (below Definition 3); its inverse is K_{n,m}.

    >>> A = torch.arange(6.0).reshape(2, 3)
    >>> torch.equal(vec_to_vec_r(2, 3) @ vec(A), vec_r(A))
    True
    """
    return Commutation(m, n)


def hadamard_power(A: Array, alpha: Scalar) -> Array:
    """Return the entrywise power A^{o alpha} (Definition 2); on exact entries alpha is an integer or half-integer.

    >>> hadamard_power(torch.tensor([4.0, 16.0]), Fraction(-1, 2)).tolist()
    [0.5, 0.25]
    """
    alpha = Fraction(alpha)
    if alpha.denominator > 2:
        if isinstance(A, torch.Tensor):
            return A ** float(alpha)
        raise ValueError(f"hadamard_power: exact numbers take integer and half-integer powers, got {alpha}")
    power = (A if alpha.denominator == 1 else sqrt(A)) ** abs(alpha.numerator)
    return power if alpha >= 0 else reciprocal(power)


def sandwich(A: Matrix, B: Matrix) -> Matrix:
    r"""Return A (x) B^T, pq x mn: vec_r(A X B) = (A (x) B^T) vec_r(X) (Property 2), hence d(A X B)/dX (Property 5).

    Args:
        A: p x m.
        B: n x q, for X in R^{m x n}.

    >>> sandwich(Identity(2), Dense(torch.ones(3, 4), "B"))
    Kronecker(8x6: I_{2}\otimes B^\top)
    """
    return kron(A, B.T)


def hadamard(A: Matrix | Array, symbol: str = "A") -> Matrix:
    r"""Return diag(vec_r A), with vec_r(A o X) = diag(vec_r A) vec_r(X) (Property 3).

    Args:
        A: m x n, an array or an expression (which is written out).
        symbol: LaTeX of an array; an expression has its own symbol.

    >>> hadamard(torch.ones(2, 3))
    Diagonal(6x6: \operatorname{diag}(\operatorname{vec}_r(A)))
    """
    entries, symbol = _entries(A, symbol)
    return Diagonal(entries, rf"\operatorname{{vec}}_r({symbol})")


def row_scaling(b: Array, symbol: str = "b") -> Matrix:
    r"""Return diag^{-1}(b), m x m, for m entries b: C = diag^{-1}(b) A has the entries c_ij = a_ij / b_i (Property 4).

    Raises:
        ValueError: if an entry of b is zero (the paper does not say that it must not be).

    >>> row_scaling(torch.tensor([2.0, 4.0])) @ torch.tensor([[2.0], [2.0]])
    tensor([[1.0000],
            [0.5000]])
    """
    if any(v == 0 for v in b.reshape(-1).tolist()):
        raise ValueError(f"row_scaling: {symbol} has a zero entry, so the rows cannot be divided by it")
    return Diagonal(reciprocal(b), rf"{symbol}^{{-1}}")


# Proposition 1 and Properties 5-6: differentials and derivatives of linear maps --------------------------------------


def identify(differential: Callable[[Array], Array], X: Array) -> Matrix:
    """Return the derivative J, pq x mn, that a differential dX -> dF(X)[dX] holds: vec_r(dF) = J vec_r(dX) (Proposition 1).

    Column k of J is the differential in the direction of the k-th entry of X, so this is the rule to check a closed
    form with, and not one to compute with.

    Args:
        differential: a linear map of arrays shaped like X, for instance ``lambda dX: A @ dX @ B``.
        X: array of shape (m, n), read for its shape and its arithmetic.

    >>> identify(lambda dX: dX.T, torch.zeros(1, 2)).dense().tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    directions = eye(X.reshape(-1).shape[0], X)
    columns = [vec_r(differential(direction.reshape(X.shape))).reshape(-1, 1) for direction in directions]
    return Dense(concatenate(columns, 1), r"\partial F/\partial X")


def kron_derivative_left(X_shape: tuple[int, int], Y: Matrix) -> Matrix:
    r"""Return d(X (x) Y)/dX = (I_n (x) K_{p,q} (x) I_r) (I_{nq} (x) vec_r Y) (Property 6, first half).

    It is npqr x nq, for X of shape (n, q) and Y of shape p x r.

    >>> kron_derivative_left((2, 3), Identity(4)).latex()
    '\\left(I_{2}\\otimes K_{4,3}\\otimes I_{4}\\right)\\,\\left(I_{6}\\otimes \\operatorname{vec}_r(I_{4})\\right)'
    """
    (n, q), (p, r) = X_shape, Y.shape
    return kron(Identity(n), Commutation(p, q), Identity(r)) @ kron(Identity(n * q), vec_r_column(Y))


def kron_derivative_right(X: Matrix, Y_shape: tuple[int, int]) -> Matrix:
    r"""Return d(X (x) Y)/dY = (I_n (x) K_{p,q} (x) I_r) (vec_r X (x) I_{pr}) (Property 6, second half).

    It is npqr x pr, for X of shape n x q and Y of shape (p, r).

    >>> kron_derivative_right(Identity(3), (4, 2)).latex()
    '\\left(I_{3}\\otimes K_{4,3}\\otimes I_{2}\\right)\\,\\left(\\operatorname{vec}_r(I_{3})\\otimes I_{8}\\right)'
    """
    (n, q), (p, r) = X.shape, Y_shape
    return kron(Identity(n), Commutation(p, q), Identity(r)) @ kron(vec_r_column(X), Identity(p * r))


# Propositions 3-9: derivative rules ----------------------------------------------------------------------------------


def product_rule(A: Matrix, dA: Matrix, B: Matrix, dB: Matrix) -> Matrix:
    r"""Return d(A B)/dX = (A (x) I_q) dB/dX + (I_p (x) B^T) dA/dX, pq x n (Proposition 3).

    Args:
        A: p x r.
        dA: dA/dX, pr x n; a Zero if A does not depend on X.
        B: r x q.
        dB: dB/dX, rq x n; a Zero if B does not depend on X.

    >>> A, B = Dense(torch.ones(2, 3), "A"), Dense(torch.ones(3, 4), "B")
    >>> product_rule(A, Identity(6), B, Zero(12, 6))  # d(A B)/dA
    Kronecker(8x6: I_{2}\otimes B^\top)
    """
    _require_derivative("product_rule", "A", A, dA)
    _require_derivative("product_rule", "B", B, dB)
    if A.shape[1] != B.shape[0]:
        raise ValueError(f"product_rule: A B does not conform for shapes {A.shape} and {B.shape}: {A!r}, {B!r}")
    return kron(A, Identity(B.shape[1])) @ dB + kron(Identity(A.shape[0]), B.T) @ dA


def kronecker_rule(A: Matrix, dA: Matrix, B: Matrix, dB: Matrix) -> Matrix:
    r"""Return d(A (x) B)/dX = (I_n (x) K_{p,q} (x) I_r) [(vec_r A (x) I_{pr}) dB + (I_{nq} (x) vec_r B) dA] (Prop. 4).

    Args:
        A: n x q; the result is npqr x k.
        dA: dA/dX, nq x k; a Zero if A does not depend on X.
        B: p x r.
        dB: dB/dX, pr x k; a Zero if B does not depend on X.

    >>> Y = Dense(torch.ones(3, 2), "Y")
    >>> kronecker_rule(Y, Identity(6), Identity(4), Zero(16, 6)).latex()  # d(Y (x) I_4)/dY
    '\\left(I_{3}\\otimes K_{4,2}\\otimes I_{4}\\right)\\,\\left(I_{6}\\otimes \\operatorname{vec}_r(I_{4})\\right)'
    """
    _require_derivative("kronecker_rule", "A", A, dA)
    _require_derivative("kronecker_rule", "B", B, dB)
    (n, q), (p, r) = A.shape, B.shape
    inner = kron(vec_r_column(A), Identity(p * r)) @ dB + kron(Identity(n * q), vec_r_column(B)) @ dA
    return kron(Identity(n), Commutation(p, q), Identity(r)) @ inner


def inverse_rule(D_inverse: Matrix) -> Matrix:
    r"""Return dD^{-1}/dD = -D^{-1} (x) D^{-T}, n^2 x n^2 (Proposition 5).

    Args:
        D_inverse: the inverse itself, n x n (a chapter holds P = D^{-1}, and an exact inverse has no one spelling).

    >>> inverse_rule(Diagonal(torch.tensor([0.5, 0.25]), r"\sigma^{-1}")).latex()
    '-\\operatorname{diag}(\\sigma^{-1})\\otimes \\operatorname{diag}(\\sigma^{-1})'
    """
    if D_inverse.shape[0] != D_inverse.shape[1]:
        raise ValueError(f"inverse_rule: expected the inverse of a square matrix, got shape {D_inverse.shape}: {D_inverse!r}")
    return -kron(D_inverse, D_inverse.T)


def diag_rule(n: int) -> Matrix:
    r"""Return d diag(v)/dv = E_n = (e_1 (x) e_1, ..., e_n (x) e_n), n^2 x n, for v in R^n (Proposition 6).

    >>> diag_rule(2).dense().tolist()
    [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    """
    return DiagonalLift(n)


def hadamard_square_rule(A: Matrix | Array, symbol: str = "A") -> Matrix:
    r"""Return dA^{o2}/dA = 2 diag(vec_r A), mn x mn, for an array or expression A, m x n (Proposition 7).

    >>> hadamard_square_rule(torch.tensor([[3.0, 5.0]])).dense().tolist()
    [[6.0, 0.0], [0.0, 10.0]]
    """
    return 2 * hadamard(A, symbol)


def hadamard_sqrt_rule(A: Matrix | Array, symbol: str = "A") -> Matrix:
    r"""Return dA^{o1/2}/dA = 1/2 diag^{-1}(vec_r^{o1/2} A), mn x mn, for an array or expression A, m x n (Proposition 8).

    Raises:
        ValueError: if an entry of A is known to be zero or negative.

    >>> hadamard_sqrt_rule(torch.tensor([[4.0, 16.0]])).dense().tolist()
    [[0.25, 0.0], [0.0, 0.125]]
    """
    entries, symbol = _entries(A, symbol)
    if any(_is_nonpositive(v) for v in entries.tolist()):
        raise ValueError(f"hadamard_sqrt_rule: the square root is differentiable at positive entries only, {symbol} has others")
    inverse_root = Diagonal(hadamard_power(entries, Fraction(-1, 2)), rf"\operatorname{{vec}}_r^{{\circ -1/2}}({symbol})")
    return Fraction(1, 2) * inverse_root


def transpose_rule(m: int, n: int) -> Matrix:
    """Return dA^T/dA = K_{n,m} for A in R^{m x n} (Proposition 9); on vectors, vec_r(A^T) = K_{n,m} vec_r(A).

    >>> transpose_rule(2, 3)
    Commutation(6x6: K_{3,2})
    """
    return Commutation(n, m)


# Second derivatives --------------------------------------------------------------------------------------------------


def slice_transpose(H: Matrix, out: int, n_i: int, n_j: int) -> Matrix:
    r"""Return d2N/dW_j dW_i, (out n_j) x n_i, from H = d2N/dW_i dW_j: each output entry's slice is transposed.

    vec_r H^{(j,i)} = (I_out (x) K_{n_j,n_i}) vec_r H^{(i,j)}. Corrected (claims sym-agree, sym-claim): the print has
    H^{(i,j)} = H^{(j,i)}, which is true slice by slice only; the two have different shapes unless n_i = n_j.

    Args:
        H: (out n_i) x n_j, with rows ordered (output entry, entry of W_i).

    Raises:
        ValueError: if H does not have that shape.

    >>> H = Dense(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "H")  # one output, n_i = 3, n_j = 2
    >>> slice_transpose(H, 1, 3, 2).dense().tolist()
    [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    """
    if H.shape != (out * n_i, n_j):
        raise ValueError(f"slice_transpose: expected ({out} * {n_i}) x {n_j}, got shape {H.shape}: {H!r}")
    if isinstance(H, Zero):
        return Zero(out * n_j, n_i)
    if isinstance(H, Scaled):
        return scaled(H.c, slice_transpose(H.matrix, out, n_i, n_j))
    if isinstance(H, SliceTranspose) and H.slices == out and not H.transposed:
        return H.matrix
    return H.T if out == 1 else SliceTranspose(H, out)


def contract(adjoint_row: Any, H: Matrix, n_i: int) -> Matrix:
    r"""Return (lambda^T (x) I_{n_i}) H, n_i x n_j, the block d2<lambda, vec_r N>/dW_i dW_j of a scalar (Eq. 3, functional part).

    Args:
        adjoint_row: lambda, an array of out entries, or an expression of shape 1 x out.
        H: d2N/dW_i dW_j, (out n_i) x n_j.

    Raises:
        ValueError: if the adjoint, H and n_i do not conform.

    >>> contract(torch.tensor([1.0, 10.0]), Dense(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), "H"), 2).dense().tolist()
    [[31.0], [42.0]]
    """
    row = adjoint_row if isinstance(adjoint_row, Matrix) else Dense(adjoint_row.reshape(1, -1), r"\lambda^\top")
    if row.shape[0] != 1 or row.shape[1] * n_i != H.shape[0]:
        raise ValueError(
            f"contract: expected a 1 x out adjoint with out * {n_i} = {H.shape[0]} rows of the second derivative, "
            f"got an adjoint of shape {row.shape}"
        )
    return kron(row, Identity(n_i)) @ H


def _entries(A: Matrix | Array, symbol: str) -> tuple[Array, str]:
    return (vec_r(A.dense()), A.latex()) if isinstance(A, Matrix) else (vec_r(A), symbol)


def _require_derivative(rule: str, name: str, value: Matrix, derivative: Matrix) -> None:
    entries = value.shape[0] * value.shape[1]
    if derivative.shape[0] != entries:
        raise ValueError(
            f"{rule}: d{name}/dX must have one row for each of the {entries} entries of {name} {value.shape}, "
            f"got shape {derivative.shape}: {derivative!r}"
        )


def _is_nonpositive(v: Any) -> bool:
    return v.is_nonpositive is True if hasattr(v, "is_nonpositive") else bool(v <= 0)
