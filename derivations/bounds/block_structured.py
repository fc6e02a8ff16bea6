r"""The Hessian norm of a post-norm transformer block at a point, block by block, without forming the Hessian.

Everything after the attention acts on single rows, so that one backward pass gives, for every row of S, of Y and of X + F, the
exact gradient and Hessian of the loss there. The slack of bounds for this block grew with the number of rows when rows were
added by their norms: at random initialisation the row Hessians have different signs and nearly cancel in weights that all rows
share. Here a norm is taken after the sum over rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from derivations.activation_functions import derivatives
from derivations.arrays import Array, as_array, to_float
from derivations.bounds.attention_rows import AttentionRows, joint_factors, joint_pairs, split_heads
from derivations.bounds.attention_structured import as_mask
from derivations.bounds.block_norms import BlockNorms, Pairs, pair_norm, row_sum_ends, spectral_norm
from derivations.bounds.norm_rows import NormRows


class _Rows(NamedTuple):
    """The row-wise part of the block: values, derivatives, and the gradients and Hessians of the loss (times L d / 2)."""

    Y: Tensor  # L x d
    hidden: Tensor  # L x d_ff, sigma(a)
    first: Tensor  # L x d_ff, sigma'(a)
    second: Tensor  # L x d_ff, sigma''(a) times the gradient at the hidden units
    gradient_S: Tensor  # L x d
    hessian_S: Tensor  # L x d x d
    through: Tensor  # L x d x d: dY_i times it is dS_i
    into: Tensor  # L x d x d: d(X + F)_i times it is dY_i
    gradient: Tensor  # L x d, at X + F
    hessian: Tensor  # L x d x d, at X + F


def post_block_structured(
    X: Array,
    W_Q: Array,
    W_K: Array,
    W_V: Array,
    W_1: Array,
    W_2: Array,
    target: Array,
    *,
    W_O: Array | None = None,
    b_1: Array | None = None,
    b_2: Array | None = None,
    gamma_1: Array | None = None,
    beta_1: Array | None = None,
    gamma_2: Array | None = None,
    beta_2: Array | None = None,
    eps: float = 0.0,
    norm: str = "layernorm",
    activation: str = "relu",
    mask: Array | None = None,
    heads: int = 1,
    scale: float | None = None,
) -> BlockNorms:
    r"""Return bounds on the Hessian blocks of ||Z - target||_F^2 / (L d) for the post-norm block.

    Z = N(S), S = Y + sigma(Y W_1 + b_1) W_2 + b_2, Y = N(X + F). Replaces Theorem 6 of Closing the Curvature Gap.
    Diagonal blocks are exact, and the others up to a size, as in ``attention_structured``. The whole
    is bounded through both ends of the spectrum of the diagonal blocks (``Pairs.bounds``).
    In the notation of ``derivations.bounds.attention_rows``, with the row Hessians K of the loss at S, and K_0 at X + F:

        W_1 W_1   sum_i y_i y_i^T (x) (D_i W_2 K_i W_2^T D_i + diag(sigma''))
        W_2 W_2   sum_i h_i h_i^T (x) K_i
        W_1 W_2   sum_i y_i h_i^T (x) D_i W_2 K_i,  and crossed  sum_i y_i r_i^T (x) D_i
        a, W_1    sum_i u_i y_i^T (x) N_i J_i (A_i K_i W_2^T D_i + W_1 diag(sigma'')),  and crossed  sum_i u_i g_i^T (x) N_i J_i
        a, W_2    sum_i u_i h_i^T (x) N_i J_i A_i K_i,  and crossed  sum_i u_i r_i^T (x) N_i J_i W_1 D_i
        a, b      attention's own, with K_0

    Gains, shifts and biases are taken as they are, but are no parameters here: only the weights are.

    Args:
        X, target: L x d.
        W_Q, W_K, W_V, W_O, mask, heads, scale: as in ``attention_structured``.
        W_1: d x d_ff.
        W_2: d_ff x d.
        b_1: d_ff entries.
        b_2: d entries.
        gamma_1, beta_1: d entries, of the norm after attention.
        gamma_2, beta_2: d entries, of the last norm.
        eps: of both norms.
        norm: ``"layernorm"`` or ``"rmsnorm"``.
        activation: as in ``derivations.activation``.

    Raises:
        ValueError: if shapes do not conform or a norm divides by zero.

    With target 0 and eps = 0 the loss is constant, as all rows of Z have norm sqrt(d):

    >>> I = torch.eye(3, dtype=torch.float64)
    >>> post_block_structured(torch.tensor([[1.0, 2.0, 4.0]]), I, I, I, I, I, torch.zeros(1, 3)).whole
    0.0
    """

    def dense(a: Array | None) -> Tensor | None:
        return None if a is None else to_float(as_array(a)).double()

    x, q, k, v, w1, w2, t = (to_float(as_array(a)).double() for a in (X, W_Q, W_K, W_V, W_1, W_2, target))
    if t.shape != x.shape:
        raise ValueError(f"post_block_structured: the target has shape {tuple(t.shape)}; expected that of X, {tuple(x.shape)}")
    attention = split_heads(x, q, k, v, dense(W_O), None if mask is None else as_mask(mask), heads, scale)
    F = torch.stack([one.value for one in attention]).sum(0)
    first = NormRows(x + F, dense(gamma_1), dense(beta_1), eps, norm)
    a = first.value @ w1 + (0.0 if b_1 is None else to_float(as_array(b_1)).double())
    hidden, sigma_1, sigma_2 = derivatives(activation, a)
    S = first.value + hidden @ w2 + (0.0 if b_2 is None else to_float(as_array(b_2)).double())
    last = NormRows(S, dense(gamma_2), dense(beta_2), eps, norm)
    rows = _rows(first, last, hidden, sigma_1, torch.zeros_like(a) if sigma_2 is None else sigma_2, w1, w2, t)

    pairs = joint_pairs(attention, rows.hessian, rows.gradient)
    _add_feedforward(pairs, rows, w1, w2)
    _add_mixed(pairs, attention, rows, w1, w2)
    names = (*joint_factors(attention), "W_1", "W_2")
    parts = {
        "sigma_1": float(first.s.min()),
        "sigma_2": float(last.s.min()),
        "gradient_S": float(rows.gradient_S.norm(dim=1).max()),
        "hessian_S": max(spectral_norm(K) for K in rows.hessian_S),
        "hessian_attention": max(spectral_norm(K) for K in rows.hessian),
    }
    return pairs.bounds(names, 2 / x.numel(), parts)


def _rows(
    norm: NormRows, last: NormRows, hidden: Tensor, first: Tensor, second: Tensor, w1: Tensor, w2: Tensor, target: Tensor
) -> _Rows:
    gradient_S, K = last.squared_error(target)
    through = torch.eye(w1.shape[0], dtype=w1.dtype, device=w1.device) + (w1 * first.unsqueeze(1)) @ w2
    second = second * (gradient_S @ w2.mT)
    gradient_Y = torch.einsum("ide,ie->id", through, gradient_S)
    K_Y = through @ K @ through.mT + (w1 * second.unsqueeze(1)) @ w1.mT
    into = norm.jacobian
    at_input = into @ K_Y @ into.mT + norm.curvature(gradient_Y)
    return _Rows(norm.value, hidden, first, second, gradient_S, K, through, into, norm.pull(gradient_Y), at_input)


def _add_feedforward(pairs: Pairs, rows: _Rows, w1: Tensor, w2: Tensor) -> None:
    reach = rows.first.unsqueeze(2) * w2  # L x d_ff x d: d(Y W_1)_i times it is dS_i
    pairs.ends["W_1"] = row_sum_ends(rows.Y, reach @ rows.hessian_S @ reach.mT + torch.diag_embed(rows.second))
    pairs.ends["W_2"] = row_sum_ends(rows.hidden, rows.hessian_S)
    straight, crossed = (reach @ rows.hessian_S, rows.hidden), (torch.diag_embed(rows.first), rows.gradient_S)
    pairs.norms["W_1", "W_2"] = pair_norm(rows.Y, straight, crossed)


def _add_mixed(pairs: Pairs, attention: list[AttentionRows], rows: _Rows, w1: Tensor, w2: Tensor) -> None:
    reach = rows.first.unsqueeze(2) * w2
    at_W1 = rows.through @ rows.hessian_S @ reach.mT + w1 * rows.second.unsqueeze(1)
    units = rows.first * (rows.gradient_S @ w2.mT)  # the gradient at Y W_1
    at_W2 = rows.through @ rows.hessian_S
    for name, (u, N) in joint_factors(attention).items():
        to_Y = N @ rows.into
        pairs.norms[name, "W_1"] = pair_norm(u, (to_Y @ at_W1, rows.Y), (to_Y, units))
        to_hidden = to_Y @ (w1 * rows.first.unsqueeze(1))
        pairs.norms[name, "W_2"] = pair_norm(u, (to_Y @ at_W2, rows.hidden), (to_hidden, rows.gradient_S))
