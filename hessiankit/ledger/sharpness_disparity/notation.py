"""Section 3: notation and architecture."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from derivations.arrays import to_float
from derivations.matrix import Commutation, Dense
from derivations.multihead import MultiHeadAttentionAt
from derivations.multihead import split_heads as split_weights
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.token_embedding import TokenEmbeddingAt
from derivations.vecr import sandwich, vec_r
from hessiankit.blocks import Transformer, TransformerBlock, initialise
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import agrees, assumed, wrong
from hessiankit.ledger.registry import claim
from hessiankit.ledger.sharpness_disparity.points import dense, eye, ones


@claim("sharpness-disparity/vec", "Sec. 3, Notations", "HOLDS", uses=[vec_r])
def vec(seed: int) -> Evidence:
    r"""$\mathrm{vec}(A) = (a_{1,1},\dots,a_{1,n},\dots,a_{m,1},\dots,a_{m,n})$, row by row"""
    A = Draw(seed).normal(3, 4)
    entries = torch.stack([A[i, j] for i in range(3) for j in range(4)])
    return agrees(to_float(vec_r(A)).reshape(-1), entries, "the closed form against the entries one by one")


@claim("sharpness-disparity/jacobian-of-matrices", "Sec. 3, Jacobian matrix", "HOLDS", uses=[sandwich])
def jacobian_of_matrices(seed: int) -> Evidence:
    r"""$\frac{\partial A}{\partial B} := \frac{\partial\,\mathrm{vec}(A)}{\partial\,\mathrm{vec}(B)}\in\mathbb{R}^{mn\times
    pq}$; so $\frac{\partial\,(ABC)}{\partial B} = A\otimes C^\top$, the rule behind all proofs"""
    draw = Draw(seed)
    A, B, C = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    reference = jacobian_of(lambda B: A @ B @ C, B)
    found = [torch.kron(A, C.T.contiguous()), dense(sandwich(Dense(A, "A"), Dense(C, "C")))]
    return agrees(found, [reference, reference], "the Kronecker product and the closed form against autograd")


@claim("sharpness-disparity/row-mean", "Sec. 3, Notations", "HOLDS", uses=[LayerNormAt])
def row_mean(seed: int) -> Evidence:
    r"""$(\mathbb{E}_r[A])_{i,j} = \frac1n\sum_{k=1}^n A_{i,k}$"""
    A = Draw(seed).normal(3, 4)
    point = LayerNormAt(A)
    return agrees(
        A - to_float(point.M), A @ ones(4) @ ones(4).T / 4, "X - M of the chapter, M the centred rows, against A 1 1^T / n"
    )


@claim("sharpness-disparity/row-variance", "Sec. 3, Notations", "WRONG AS PRINTED", uses=[LayerNormAt])
def row_variance(seed: int) -> Evidence:
    r"""$(\mathbb{V}_r[A])_{i,j} = (A_{i,j} - \frac1n\sum_k A_{i,k})^2$, used in $X_{\mathrm{std}} = (X -
    \mathbb{E}_r[X])/\sqrt{\mathbb{V}_r[X]}$

    Correct: $\frac1n\sum_k(A_{i,k} - \frac1n\sum_l A_{i,l})^2$, the mean of the squares over the row: without it
    $X_{\mathrm{std}}$ has entries $\pm1$ only
    """
    X = Draw(seed).normal(4, 5)
    centred = X - X.mean(1, keepdim=True)
    printed = centred / centred.square().sqrt()
    signs = bool((printed.abs() - 1).abs().max() < 1e-12)
    return wrong(
        printed,
        F.layer_norm(X, (5,), eps=0.0),
        f"X_std against torch's layer_norm, all entries as printed +-1: {signs}",
        corrected=LayerNormAt(X).value,
        above=0.1,
    )


@claim("sharpness-disparity/norm", "Sec. 3.1, Norm blocks", "WRONG AS PRINTED", uses=[LayerNormAt])
def norm(seed: int) -> Evidence:
    r"""LayerNorm: $\mathrm{Norm}(x) = \frac{x - \mathbb{E}_r[x]}{\mathbb{V}_r[x]}\odot\gamma + \beta$

    Correct: $\frac{x - \mathbb{E}_r[x]}{\sqrt{\mathbb{V}_r[x]}}\odot\gamma + \beta$, as Theorems 4.1 and 4.2 have it, with
    the averaged variance
    """
    draw = Draw(seed)
    X, gamma, beta = draw.normal(4, 5), draw.normal(5), draw.normal(5)
    centred = X - X.mean(1, keepdim=True)
    printed = centred / centred.square().mean(1, keepdim=True) * gamma + beta
    reference = F.layer_norm(X, (5,), gamma, beta, eps=0.0)
    return wrong(printed, reference, "the variance averaged in both", corrected=LayerNormAt(X, gamma, beta).value, above=0.05)


@claim("sharpness-disparity/rms-norm", "Sec. 3.1, Norm blocks", "OMITTED", uses=[RMSNormAt])
def rms_norm(seed: int) -> Evidence:
    r"""RMSNorm is named and has no formula

    Correct: $x/\sqrt{\frac1D\sum_j x_j^2 + \epsilon}\odot\gamma$, without centring
    """
    draw = Draw(seed)
    X, gamma = draw.normal(4, 5), draw.normal(5)
    return agrees(RMSNormAt(X, gamma, 1e-5).value, F.rms_norm(X, (5,), gamma, 1e-5), "the closed form against torch's rms_norm")


@claim("sharpness-disparity/eps", "Sec. 3.1, Norm blocks", "OMITTED", uses=[LayerNormAt])
def eps(seed: int) -> Evidence:
    r"""the norms have no $\epsilon$; those of the models have one

    Correct: $\sqrt{\mathbb{V}_r[x] + \epsilon}$; $\|X_{\mathrm{std}}\|_F = \sqrt{nD}$ of App. B is then an upper bound
    """
    X = Draw(seed).normal(4, 5)
    found = LayerNormAt(X, eps=1e-2).value
    return wrong(LayerNormAt(X).value, F.layer_norm(X, (5,), eps=1e-2), "eps = 0.01", corrected=found, above=1e-4)


@claim("sharpness-disparity/embedding", "Sec. 3.1, Embedding layer", "HOLDS", uses=[TokenEmbeddingAt])
def embedding(seed: int) -> Evidence:
    """$x_s^{(0)} = x_s W_E + b_E$ with one-hot rows $x_s$"""
    draw = Draw(seed)
    tokens, W_E, b_E = draw.integers(0, 9, 4), draw.normal(9, 5), draw.normal(5)
    printed = F.one_hot(tokens, 9).double() @ W_E + b_E
    lookup = F.embedding(tokens, W_E) + b_E
    return agrees([printed, to_float(TokenEmbeddingAt(tokens, W_E).value) + b_E], [lookup, lookup], "against torch's embedding")


@claim("sharpness-disparity/eq2", "Sec. 3.1, Eq. 2", "HOLDS", uses=[TransformerBlock])
def eq2(seed: int) -> Evidence:
    r"""$X^{(l-\frac12)} = X^{(l-1)} + \mathrm{SA}(\mathrm{Norm}(X^{(l-1)}))$, $X^{(l)} = X^{(l-\frac12)} +
    \mathrm{FFN}(\mathrm{Norm}(X^{(l-\frac12)}))$"""
    draw = Draw(seed)
    block = TransformerBlock(6, 8, 2, "pre", causal=True).double()
    initialise(block, seed=seed)
    X = draw.normal(4, 6)
    W = {name: p.detach() for name, p in block.named_parameters()}
    N = F.layer_norm(X, (6,), eps=1e-5)
    heads = []
    for h in (slice(0, 3), slice(3, 6)):
        Q, K, V = (N[None] @ W[f"attention.{w}"][:, h] for w in ("W_Q", "W_K", "W_V"))
        heads.append(F.scaled_dot_product_attention(Q, K, V, is_causal=True)[0])
    Y = X + torch.cat(heads, 1) @ W["attention.W_O"]
    Z = Y + torch.relu(F.layer_norm(Y, (6,), eps=1e-5) @ W["feedforward.W_1"]) @ W["feedforward.W_2"]
    return agrees(block(X), Z, "hessiankit's block with placement 'pre' against Eq. 2 with torch's fused attention")


@claim("sharpness-disparity/output", "Sec. 3.1, L-layer SA-FFN blocks", "OMITTED", uses=[Transformer])
def output(seed: int) -> Evidence:
    r"""$\mathrm{TF}(X) = X^{(L)}$: no norm after the last block and no head

    Correct: GPT-2 and LLaMA have $\mathrm{Norm}(X^{(L)})W_C$; to which block type the final norm and the head belong is not
    said
    """
    model = Transformer(9, 6, 8, 2, 2, placement="pre", max_len=4, seed=seed).double()
    tokens = Draw(seed).integers(0, 9, 1, 4)
    X = model.embedding(tokens)
    for block in model.blocks:
        X = block(X)
    found = F.layer_norm(X, (6,), eps=1e-5) @ model.embedding.W_E.T
    return agrees(found, model(tokens), "a tied GPT-2-like model from its X^(L)")


@claim("sharpness-disparity/ffn", "Sec. 3.1, FFN blocks", "HOLDS UNDER ASSUMPTION", uses=[TransformerBlock])
def ffn(seed: int) -> Evidence:
    r"""$\mathrm{FFN}(x) = \sigma(xW_1)W_2$, of 'such as ReLU'

    Needs: a network without gate: GPT-2's (GELU); LLaMA's SwiGLU has a third matrix
    """
    X = Draw(seed).normal(4, 6)
    found = {}
    for activation, sigma in (("gelu", F.gelu), ("swiglu", F.silu)):
        block = TransformerBlock(6, 8, placement="pre", activation=activation).double()
        initialise(block, seed=seed)
        network = block.feedforward
        found[activation] = (network(X), sigma(X @ network.W_1) @ network.W_2)
    gated = agrees(*found["swiglu"]).number
    return assumed(agrees(*found["gelu"], "GELU"), gated or 0.0, above=0.05)


@claim("sharpness-disparity/sa", "Sec. 3.1, SA blocks", "HOLDS", uses=[MultiHeadAttentionAt])
def sa(seed: int) -> Evidence:
    r"""$\sum_h\mathrm{softmax}\left(\frac{\langle ZW_Q^h, ZW_K^h\rangle + M}{\sqrt{D/H}}\right)ZW_V^hW_O^h$, $M_{i,j} =
    -\infty$ if $i < j$, else 0; the bracket read as $ZW_Q^h(ZW_K^h)^\top$"""
    draw, n, D, H = Draw(seed), 4, 6, 2
    Z, W_Q, W_K, W_V, W_O = draw.normal(n, D), *(draw.normal(D, D) for _ in range(4))
    M = torch.zeros(n, n, dtype=torch.float64).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    parts = [slice(h * D // H, (h + 1) * D // H) for h in range(H)]
    logits = [(Z @ W_Q[:, p] @ W_K[:, p].T @ Z.T + M) / math.sqrt(D / H) for p in parts]
    printed = sum(T.softmax(-1) @ Z @ W_V[:, p] @ W_O[p] for T, p in zip(logits, parts, strict=True))
    Q, K, V = (torch.stack([(Z @ W)[:, p] for p in parts]) for W in (W_Q, W_K, W_V))
    reference = torch.cat(list(F.scaled_dot_product_attention(Q, K, V, is_causal=True)), 1) @ W_O
    closed = MultiHeadAttentionAt(Z, split_weights(W_Q, W_K, W_V, W_O, H), mask=torch.ones(n, n, dtype=torch.bool).tril())
    return agrees(
        [printed, closed.value], [reference, reference], "as printed and the closed form against torch's fused attention"
    )


@claim("sharpness-disparity/commutation", "App. B.2, footnote 5", "HOLDS", uses=[Commutation])
def commutation(seed: int) -> Evidence:
    """$K_{m,n}$ transforms column-wise into row-wise vectorisation"""
    A = Draw(seed).normal(3, 4)
    K, square = dense(Commutation(3, 4)), dense(Commutation(4, 4))
    columns, rows = A.T.reshape(-1), A.reshape(-1)
    found, expected = [K @ columns, square @ square], [rows, eye(16)]
    return agrees(found, expected, "K vec_c(A) against vec_r(A); K_{n,n}, which the proof uses, is its own inverse")
