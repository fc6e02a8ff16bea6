r"""Second derivatives of single-head attention: Lemma 2's Phi_kl, corrected and completed, and those in the input X.

All sixteen Phi blocks (nine without W_O) are here; "Closing the Curvature Gap" prints four, of which each non-zero one
keeps a loss factor 2/(L d_V) that belongs outside (curvature-gap/phi_qq, curvature-gap/phi_vq, curvature-gap/phi_qk). W stands
for W_V W_O, or for W_V where there is no W_O.
"""

from __future__ import annotations

from derivations.attention_point import AttentionPoint, shuffle
from derivations.matrix import Commutation, Dense, Identity, Matrix, Zero, kron
from derivations.operation import size
from derivations.vecr import kron_derivative_left, kron_derivative_right


def weight_hessian(at: AttentionPoint, name_i: str, name_j: str) -> Matrix:
    """Return Phi_ij = d2F/dW_i dW_j for two weights, of shape (L d_out n_i) x n_j."""
    pairs = {("W_Q", "W_Q"): phi_qq, ("W_Q", "W_K"): phi_qk, ("W_K", "W_Q"): phi_kq, ("W_K", "W_K"): phi_kk}
    if (name_i, name_j) in pairs:
        return pairs[name_i, name_j](at)
    if name_i in ("W_V", "W_O"):
        return by_value_weight(at, name_i, name_j)
    return by_query_or_key(at, name_i, name_j)


def phi_qq(at: AttentionPoint) -> Matrix:
    """Return Phi_QQ = c^2 (I_L (x) W^T (x) I (x) W_K^T) Z_2 (I (x) W_K).

    Corrected (curvature-gap/phi_qq): the print keeps the loss factor 2/(L d_V).
    """
    return at.c**2 * (_pull(at, at.key) @ at.Z_2 @ kron(_eye(at), at.key))


def phi_qk(at: AttentionPoint) -> Matrix:
    """Return Phi_QK = c^2 (I_L (x) W^T (x) I (x) W_K^T) Z_2 (W_Q (x) I) K + c [(I_L (x) W^T (x) I) (Z_1 (x) I) S] (x) I.

    K = K_{d_K,d_V}. Corrected (curvature-gap/phi_qk): the print keeps the loss factor, has I_{d_V} for I_L, and lacks the
    brackets around the product in front of (x) I_{d_K}.
    """
    through_logits = _pull(at, at.key) @ at.Z_2 @ kron(at.query, _eye(at)) @ _turn(at)
    return at.c**2 * through_logits + _bilinear(at, at.Z_1)


def phi_kq(at: AttentionPoint) -> Matrix:
    """Return Phi_KQ: Phi_QK with W_Q, W_K exchanged, Z_1 replaced by Z_1 K, Z_2 by (I (x) K) Z_2 K, K = K_{d_V,d_V}.

    Corrected (curvature-gap/phi_kq): the print exchanges the weights only, but row softmax and transposition do not commute.
    """
    through_logits = _pull(at, at.query) @ _turned_Z_2(at) @ kron(at.key, _eye(at)) @ _turn(at)
    return at.c**2 * through_logits + _bilinear(at, at.Z_1 @ _swap(at))


def phi_kk(at: AttentionPoint) -> Matrix:
    """Return Phi_KK = c^2 (I_L (x) W^T (x) I (x) W_Q^T) (I (x) K) Z_2 K (I (x) W_Q), K = K_{d_V,d_V}.

    The paper does not give it (curvature-gap/phi_kk).
    """
    return at.c**2 * (_pull(at, at.query) @ _turned_Z_2(at) @ kron(_eye(at), at.query))


def by_value_weight(at: AttentionPoint, name_i: str, name_j: str) -> Matrix:
    r"""Return d2F/dW_i dW_j for W_i one of W_V and W_O, and W_j any argument, X included.

    With R_j = d(A X)/dW_j, which vanishes for W_V and W_O,

    ```math
    W_V:\ \frac{\partial(AX\otimes W_O^\top)}{\partial(AX)}\,R_j + [j = O]\,\frac{\partial(AX\otimes W_O^\top)}{\partial W_O}
    \qquad W_O:\ \frac{\partial(AXW_V\otimes I)}{\partial(AXW_V)}\,\{(I_L\otimes W_V^\top)R_j + [j = V]\,AX\otimes I\}
    ```

    Without W_O the first is Phi_VQ = c (I_L (x) S) Z_1 (I (x) W_K), and likewise Phi_VK (not printed) and Phi_VV = 0.
    Corrected (curvature-gap/phi_vq): the print keeps the loss factor. The blocks of W_O are new.
    """
    (length, d), (d_v, d_out), R = at.tokens.shape, at.projection.shape, at.averaged_jacobian(name_j)
    if name_i == "W_O":
        inner = kron(Identity(length), at.values.T) @ R
        if name_j == "W_V":
            inner = inner + kron(at.AX, Identity(d_v))
        return kron_derivative_left((length, d_v), Identity(d_out)) @ inner
    if at.W_O is None:
        return kron(Identity(length), shuffle(d, d_v)) @ R
    block = kron_derivative_left((length, d), at.projection.T) @ R
    if name_j == "W_O":
        block = block + kron_derivative_right(at.AX, (d_out, d_v)) @ Commutation(d_out, d_v)
    return block


def by_query_or_key(at: AttentionPoint, name_i: str, name_j: str) -> Matrix:
    """Return Phi_ij = (I (x) R_i^T) d(I_L (x) W^T)/dW dW/dW_j for W_i one of W_Q, W_K and W_j one of W_V, W_O.

    R_i = d(A X)/dW_i. The paper gives neither Phi_QV nor Phi_KV (claims of these names).
    """
    length, d = at.tokens.shape
    pull = kron(Identity(length * at.projection.shape[1]), at.averaged_jacobian(name_i).T)
    return pull @ _lifted(at, d) @ _mixed_value_weight(at, name_j)


def input_hessian(at: AttentionPoint, name_i: str, name_j: str) -> Matrix:
    r"""Return d2F where at least one argument is X, of shape (L d_out n_i) x n_j.

    For i in {X, Q, K} the first derivative is U A' T_i, to which X adds A (x) W^T, so that by the product rule

    ```math
    \partial_j(UA'T_i) = (I\otimes(A'T_i)^\top)\,\partial_jU + (U\otimes T_i^\top)A''T_j + (UA'\otimes I)\,\partial_jT_i
    \qquad \partial_j(A\otimes W^\top) = \frac{\partial(A\otimes W^\top)}{\partial A}A'T_j
    + \frac{\partial(A\otimes W^\top)}{\partial W}\,\partial_jW
    ```
    """
    if name_i in ("W_V", "W_O"):
        return by_value_weight(at, name_i, name_j)
    (length, d), d_out, n_i = at.tokens.shape, at.projection.shape[1], size(at.arguments[name_i])
    T_i, T_j = at.logits_jacobian(name_i), at.logits_jacobian(name_j)
    W, dW = at.values @ at.projection, _mixed_value_weight(at, name_j)
    dXW = kron(Identity(length), W.T) if name_j == "X" else kron(at.tokens, Identity(d_out)) @ dW
    block = kron(Identity(length * d_out), (at.dA @ T_i).T) @ _lifted(at, length) @ dXW
    block = block + kron(at.U, T_i.T) @ at.d2A @ T_j
    block = block + kron(at.U @ at.dA, Identity(n_i)) @ _logits_hessian(at, name_i, name_j)
    if name_i == "X":
        by_A = kron_derivative_left((length, length), W.T) @ at.dA @ T_j
        by_W = kron_derivative_right(Dense(at.A, "A"), (d_out, d)) @ Commutation(d_out, d) @ dW
        block = block + by_A + by_W
    return block


def _logits_hessian(at: AttentionPoint, name_i: str, name_j: str) -> Matrix:
    """d2T for i in {X, Q, K}, where at least one argument is X; the logits do not read W_V and W_O."""
    (length, d), d_K, X = at.tokens.shape, at.key.shape[1], at.tokens
    if name_j in ("W_V", "W_O"):
        return Zero(length**2 * size(at.arguments[name_i]), size(at.arguments[name_j]))
    if name_i == "W_Q":
        by_left = kron_derivative_left((length, d), X @ at.key)
        return at.c * (by_left + kron_derivative_right(X, (length, d_K)) @ kron(Identity(length), at.key.T))
    if name_i == "W_K":
        by_left = kron_derivative_left((length, d_K), X) @ kron(Identity(length), at.query.T)
        both = by_left + kron_derivative_right(X @ at.query, (length, d))
        return at.c * (kron(Identity(length**2), Commutation(d, d_K)) @ both)
    first = kron_derivative_right(Identity(length), (length, d)) @ _scores(at, "W_K", "W_Q", name_j)
    second = kron_derivative_left((length, d), Identity(length)) @ _scores(at, "W_Q", "W_K", name_j)
    return at.c * (first + kron(Identity(length**2), Commutation(length, d)) @ second)


def _scores(at: AttentionPoint, first: str, second: str, name: str) -> Matrix:
    """d(X B C^T) with respect to B = ``first``, C = ``second`` or X."""
    letters, X = {"W_Q": at.query, "W_K": at.key}, at.tokens
    B, C = letters[first], letters[second]
    if name == "X":
        return kron(Identity(X.shape[0]), C @ B.T)
    return kron(X, C) if name == first else kron(X @ B, Identity(X.shape[1])) @ _turn(at)


def _lifted(at: AttentionPoint, rows: int) -> Matrix:
    """d(I_L (x) N^T)/dN for N of shape rows x d_out."""
    length, d_out = at.tokens.shape[0], at.projection.shape[1]
    return kron_derivative_right(Identity(length), (d_out, rows)) @ Commutation(d_out, rows)


def _mixed_value_weight(at: AttentionPoint, name: str) -> Matrix:
    """dW/dW_name for W = W_V W_O (or W_V)."""
    d, d_out = at.tokens.shape[1], at.projection.shape[1]
    if name == "W_V":
        return kron(Identity(d), at.projection.T)
    return kron(at.values, Identity(d_out)) if name == "W_O" else Zero(d * d_out, size(at.arguments[name]))


def _pull(at: AttentionPoint, weight: Matrix) -> Matrix:
    return kron(Identity(at.tokens.shape[0]), (at.values @ at.projection).T, _eye(at), weight.T)


def _bilinear(at: AttentionPoint, Z_1: Matrix) -> Matrix:
    """c [(I_L (x) W^T (x) I) (Z_1 (x) I) S] (x) I_{d_K}: W_Q and W_K meet in one product W_Q W_K^T."""
    W = kron(Identity(at.tokens.shape[0]), (at.values @ at.projection).T, _eye(at))
    return at.c * kron(W @ kron(Z_1, _eye(at)) @ at.S, Identity(at.key.shape[1]))


def _turned_Z_2(at: AttentionPoint) -> Matrix:
    (length, d) = at.tokens.shape
    return kron(Identity(length * d), _swap(at)) @ at.Z_2 @ _swap(at)


def _eye(at: AttentionPoint) -> Matrix:
    return Identity(at.tokens.shape[1])


def _swap(at: AttentionPoint) -> Matrix:
    return Commutation(at.tokens.shape[1], at.tokens.shape[1])


def _turn(at: AttentionPoint) -> Matrix:
    return Commutation(at.key.shape[1], at.key.shape[0])
