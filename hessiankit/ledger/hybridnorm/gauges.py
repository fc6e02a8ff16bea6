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


def compare_nullities(seed: int, sets: tuple[str, ...], widths: tuple[int, ...], *, rotary: bool) -> Evidence:
    """Compare the nullity of the generators with the formula, for sets of norms and widths of a head."""
    cases = [(normed, d_k) for normed in sets for d_k in widths]
    found = [gauge_nullity(seed, normed, d_k, rotary=rotary) for normed, d_k in cases]
    expected = [gauge_dimension(d_k, normed=normed, rotary=rotary) for normed, d_k in cases]
    right = sum(a == b for a, b in zip(found, expected, strict=True))
    return counts(right, len(cases), f"nullities of the generators: {', '.join(map(str, found))}")


@claim("ours/gauge", "HybridNorm, Eqs. 1, 7, 35-39", "HOLDS", uses=[gauge_dimension])
def gauge(seed: int) -> Evidence:
    r"""linear maps of $W_Q, W_K, W_V, W_O$ of a head that leave its function unchanged have dimension $2d_k^2$ without norms;
    with $r = \frac{d_k(d_k-1)}{2}$, $(r + 2) + d_k^2$ for QK, $(r + 2) + (r + 1)$ for QKV, QKVC and QKC, $(r + 1) + (r + 1)$
    for KV and KC"""
    return compare_nullities(seed, ("", "qk", "qkv", "qkvc", "qkc", "kv", "kc"), (2, 3), rotary=False)


@claim("ours/gauge-rotary", "HybridNorm, Eqs. 1, 7, 35-39, rotary", "HOLDS", uses=[gauge_dimension])
def gauge_rotary(seed: int) -> Evidence:
    r"""with rotary positions: $d_k + d_k^2$ without norms, $(\frac{d_k}{2} + 2) + d_k^2$ for QK, $(\frac{d_k}{2} + 1) +
    d_k^2$ for K"""
    return compare_nullities(seed, ("", "qk", "k"), (2, 4), rotary=True)


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
