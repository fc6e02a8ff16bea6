"""Gauges: linear maps of the weights of one head that leave its function unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hessiankit.blocks import TransformerBlock
from hessiankit.blocks.attention import rotate
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import counts, relative_error
from hessiankit.ledger.hybridnorm.definitions import LETTERS, attn, rms_norm
from hessiankit.ledger.registry import claim
from hessiankit.verify.identities import gauge_dimension


def gauge_nullity(seed: int, normed: str, d_k: int = 3, *, rotary: bool = False) -> int:
    """Count the generators of gl(d_k)^4 that move no output, at several inputs and weights at once."""
    draw = Draw(seed)
    d, s = 2 * d_k, d_k + 1
    weights = [draw.normal(d, d_k), draw.normal(d, d_k), draw.normal(d, d_k), draw.normal(d_k, d)]
    X = draw.normal(6, s, d)

    def outputs(B: Tensor) -> Tensor:
        Q, K, V = (X @ W @ (torch.eye(d_k, dtype=B.dtype) + b) for W, b in zip(weights[:3], B[:3], strict=True))
        if rotary:  # after the norms of queries and keys
            Q, K = (rotate(rms_norm(Y) if letter in normed else Y) for letter, Y in (("q", Q), ("k", K)))
        C = attn(Q, K, V, normed.strip("qk") if rotary else normed)
        return C @ (torch.eye(d_k, dtype=B.dtype) + B[3]) @ weights[3]

    J = torch.func.jacfwd(outputs)(torch.zeros(4, d_k, d_k, dtype=torch.float64)).reshape(-1, 4 * d_k**2)
    values = torch.linalg.svdvals(J)
    return int((values < 1e-9 * values[0]).sum())


def gauge_row(normed: str, formula: str, *, rotary: bool = False) -> None:
    """Enter the row of one set of norms."""
    widths = (2, 4) if rotary else (2, 3)

    @claim(
        f"ours/gauge-{normed or 'none'}{'-rotary' if rotary else ''}",
        f"HybridNorm, Eqs. 1, 7, 35-39, norms of {normed.upper() or 'nothing'}{', rotary' if rotary else ''}",
        "HOLDS",
        statement=f"linear maps of $W_Q, W_K, W_V, W_O$ of a head that leave its function unchanged: dimension {formula}",
        uses=[gauge_dimension],
    )
    def row(seed: int) -> Evidence:
        found = [gauge_nullity(seed, normed, d_k, rotary=rotary) for d_k in widths]
        expected = [gauge_dimension(d_k, normed=normed, rotary=rotary) for d_k in widths]
        k = 0 if found[0] != expected[0] else 1
        return counts(found[k], expected[k], f"nullity of the generators at d_k = {widths[k]}")


ROTATIONS = r"\frac{d_k(d_k-1)}{2}"
for _normed, _formula in (
    ("", "$2d_k^2$"),
    ("qk", rf"$({ROTATIONS} + 2) + d_k^2$"),
    ("qkv", rf"$({ROTATIONS} + 2) + ({ROTATIONS} + 1)$"),
    ("qkvc", rf"$({ROTATIONS} + 2) + ({ROTATIONS} + 1)$"),
    ("qkc", rf"$({ROTATIONS} + 2) + ({ROTATIONS} + 1)$"),
    ("kv", rf"$({ROTATIONS} + 1) + ({ROTATIONS} + 1)$"),
    ("kc", rf"$({ROTATIONS} + 1) + ({ROTATIONS} + 1)$"),
):
    gauge_row(_normed, _formula)
for _normed, _formula in (
    ("", "$d_k + d_k^2$"),
    ("qk", r"$(\frac{d_k}{2} + 2) + d_k^2$"),
    ("k", r"$(\frac{d_k}{2} + 1) + d_k^2$"),
):
    gauge_row(_normed, _formula, rotary=True)


@claim("ours/qkv-head-scales", "HybridNorm, Eq. 40 and Algorithm 1", "HOLDS")
def head_scales(seed: int) -> Evidence:
    """norms of each head give $3h$ separate scale symmetries a layer, norms over all heads side by side give 3"""
    X, found = Draw(seed).normal(4, 6), {}
    for scope in ("head", "full"):
        options: dict[str, Any] = {"norm": "rmsnorm", "eps": 0.0, "norm_scope": scope, "activation": "gelu"}
        block = TransformerBlock(6, 4, 3, "hybridnorm", **options).double()
        columns = [slice(2 * h, 2 * h + 2) for h in range(3)] if scope == "head" else [slice(0, 6)]
        found[scope] = sum(_is_free(block, X, letter, part) for letter in LETTERS[:3] for part in columns)
        found[f"one head of {scope}"] = sum(_is_free(block, X, letter, slice(0, 2)) for letter in LETTERS[:3])
    if (found["full"], found["one head of full"]) != (3, 0):
        return counts(found["full"], 3, "scales with norms over all heads")
    return counts(found["head"], 9, "W_Q, W_K, W_V of 3 heads that may be scaled alone; 3 with norms over all heads")


def _is_free(block: TransformerBlock, X: Tensor, letter: str, columns: slice) -> bool:
    """Whether the block does not feel these columns of a weight times 2.5."""
    W = getattr(block.attention, letter)
    with torch.no_grad():
        before = block(X)
        W[:, columns] *= 2.5
        after = block(X)
        W[:, columns] /= 2.5
    return relative_error(after, before) < 1e-12
