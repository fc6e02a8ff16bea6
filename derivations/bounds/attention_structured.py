r"""The Hessian norm of softmax attention at a point, block by block, without forming the Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from derivations.arrays import Array, as_array, to_float
from derivations.bounds.attention_rows import AttentionRows, joint_factors, joint_pairs, split_heads
from derivations.bounds.block_norms import BlockNorms, in_row_space, spectral_norm


def attention_structured(
    X: Array,
    W_Q: Array,
    W_K: Array,
    W_V: Array,
    target: Array,
    *,
    W_O: Array | None = None,
    mask: Array | None = None,
    heads: int = 1,
    scale: float | None = None,
) -> BlockNorms:
    r"""Return bounds on the blocks of the Hessian of ||F - target||_F^2 / (L d_out) by the weights of attention.

    With the notation of ``derivations.bounds.attention_rows`` and R = F - target a block is 2/(L d_out) times

        || sum_i u_i v_i^T (x) [N_i P_i^T + third cumulant]  +  the crossed products of <R, d2F> ||

    Diagonal blocks are exact; so are the others up to a size, beyond which sequences shorter than d are taken in the space of
    their rows (``block_norms.pair_norm``). The whole is bounded through both ends of the spectrum of the diagonal blocks
    (``Pairs.bounds``), or by ||Gauss-Newton|| + the bound on <R, d2F>, whichever is less. C_i and M_i enter as
    matrices, and not by their norms, row by row. All is float64, not rounded outwards.

    Args:
        X: L x d.
        W_Q, W_K: d x d_K, or d x heads d_K.
        W_V: d x d_v, or d x heads d_v.
        target: L x d_out.
        W_O: d_v x d_out, or heads d_v x d_out; needed for several heads.
        mask: L x L, boolean, True where a token may look.
        heads: their number. Names are then "W_Q.0", "W_Q.1", ...
        scale: of the logits; None for 1/sqrt(d_K).

    Raises:
        ValueError: if shapes do not conform. Biases and normalised queries or keys are not covered.

    One token attends to itself: F = x W_V, whose loss has the Hessian 2/d_out x^T x (x) I in W_V and none elsewhere.

    >>> I = torch.eye(2, dtype=torch.float64)
    >>> attention_structured(torch.tensor([[3.0, 0.0]]), I, I, I, torch.zeros(1, 2)).matrix.tolist()
    [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 9.0]]
    """
    x, q, k, v, t = (to_float(as_array(a)).double() for a in (X, W_Q, W_K, W_V, target))
    o = None if W_O is None else to_float(as_array(W_O)).double()
    rows = split_heads(x, q, k, v, o, None if mask is None else as_mask(mask), heads, scale)
    out = torch.stack([one.value for one in rows]).sum(0)
    if t.shape != out.shape:
        raise ValueError(
            f"attention_structured: the target has shape {tuple(t.shape)}; expected that of the output, {tuple(out.shape)}"
        )
    factor = 2 / out.numel()
    residual = out - t
    identity = torch.eye(out.shape[1], dtype=out.dtype, device=out.device).expand(out.shape[0], -1, -1)
    names = tuple(joint_factors(rows))
    bounds = joint_pairs(rows, identity, residual).bounds(names, factor)
    gauss_newton = factor * output_jacobian_norm(rows) ** 2
    rest = joint_pairs(rows, 0 * identity, residual).bounds(names, factor).whole
    parts = {
        "residual_F": float(residual.norm()),
        "covariance": max(spectral_norm(C) for one in rows for C in one.covariances),
        "gauss_newton": gauss_newton,
        "functional": rest,
    }
    return BlockNorms(names, bounds.matrix, parts, min(bounds.spectral, gauss_newton + rest))


def output_jacobian_norm(rows: list[AttentionRows]) -> float:
    """Return ||dF/d(all weights)||_2 exactly, from factors in the space of the output or of the weights."""
    blocks = []
    for u, N in joint_factors(rows).values():
        small = in_row_space(u)
        blocks.append(torch.einsum("im,ipe->iemp", small, N).reshape(u.shape[0] * N.shape[2], -1))
    return spectral_norm(torch.cat(blocks, 1))


def as_mask(mask: Array) -> Tensor:
    """Return a boolean mask as a tensor.

    Raises:
        ValueError: if it is not boolean.
    """
    tensor = mask if isinstance(mask, Tensor) else torch.as_tensor(mask, device="cpu")
    if tensor.dtype != torch.bool:
        raise ValueError(f"attention: the bounds take a boolean mask, True where a token may look; got {tensor.dtype}")
    return tensor
