"""Section 3: notation and architecture."""

from __future__ import annotations

import torch.nn.functional as F

from derivations.normalization import LayerNormAt
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import wrong
from hessiankit.ledger.registry import claim


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


@claim("sharpness-disparity/eps", "Sec. 3.1, Norm blocks", "OMITTED", uses=[LayerNormAt])
def eps(seed: int) -> Evidence:
    r"""the norms have no $\epsilon$; those of the models have one

    Correct: $\sqrt{\mathbb{V}_r[x] + \epsilon}$; $\|X_{\mathrm{std}}\|_F = \sqrt{nD}$ of App. B is then an upper bound
    """
    X = Draw(seed).normal(4, 5)
    found = LayerNormAt(X, eps=1e-2).value
    return wrong(LayerNormAt(X).value, F.layer_norm(X, (5,), eps=1e-2), "eps = 0.01", corrected=found, above=1e-4)
