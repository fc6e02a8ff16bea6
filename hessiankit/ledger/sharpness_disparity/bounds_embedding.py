"""Theorem 4.3: bounds on the gradients and on the sharpness of the embedding and its norm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.bounds import EmbeddingNorms, theorem_4_3
from derivations.normalization import LayerNormAt
from derivations.norms import matrix_norm
from derivations.token_embedding import TokenEmbeddingAt
from hessiankit.ledger.autodiff import jacobian_of
from hessiankit.ledger.claim import Evidence
from hessiankit.ledger.drawing import Draw
from hessiankit.ledger.evidence import (
    agrees,
    assumed,
    bounded,
    loose,
    relative_error,
    violated,
    wrong,
)
from hessiankit.ledger.registry import claim
from hessiankit.ledger.sharpness_disparity.points import eye, ones
from hessiankit.ledger.sharpness_disparity.theorem_embedding import EmbeddingPoint, centred, row_jacobian


@claim("sharpness-disparity/b3-bound", "App. B.3, bound on dY/dW_E", "LOOSE", uses=[LayerNormAt])
def bound(seed: int) -> Evidence:
    r"""$\|\frac{\partial Y}{\partial W_E}\|_F\le n\sqrt D\,\frac{\|\gamma\|_F}{\min_{i\in[d]}\|\tilde w_i\|_2}$

    Correct: $\|\frac{\partial Y}{\partial W_E}\|_F\le\sqrt{nD}\,\frac{\|\gamma\|_F}{\min_i\|\tilde z_i\|_2}$, the least over
    the tokens that occur
    """
    found = []
    for point in (EmbeddingPoint.draw(100 * seed + k, n=9) for k in range(10)):
        of_tokens = float(centred(point.Z).norm(dim=1).min())  # the sharp bound has this in place of the least row of W_E
        found.append(float(point.jacobian("W_E").norm()) * max(point.least_row, of_tokens) / point.bound)
    return loose(found, "10 points of 9 tokens, with the larger of the two minima", factor=3)


@claim("sharpness-disparity/b3-factor-norm", "App. B.3, bound on dY/dW_E, second line", "HOLDS", uses=[matrix_norm])
def factor_norm(seed: int) -> Evidence:
    r"""$\|\mathrm{diag}_i(\ldots)\|_2\,\|X\otimes I_D\|_2\le\frac{\sqrt D}{\min_i\|\tilde z_i\|_2}\|X\|_2$, and
    $\|I_n\otimes\mathrm{diag}(\gamma)\|_F\le\sqrt n\,\|\gamma\|_F$"""
    spectral, frobenius = [], []
    for k in range(10):
        p = EmbeddingPoint.draw(100 * seed + k)
        blocks = torch.block_diag(*[row_jacobian(z, mean=1 / 5) for z in p.Z])
        right = math.sqrt(5) / float(centred(p.Z).norm(dim=1).min()) * matrix_norm(p.X)
        spectral.append(matrix_norm(blocks) * matrix_norm(torch.kron(p.X, eye(5))) / right)
        frobenius.append(float(torch.kron(eye(6), p.gamma[0].diag()).norm()) / (math.sqrt(6) * float(p.gamma.norm())))
    return bounded([spectral, frobenius], "10 points; the first, the second")


@claim("sharpness-disparity/thm4.3-s-we", "Theorem 4.3; App. B.3", "WRONG AS PRINTED")
def s_we(seed: int) -> Evidence:
    r"""$\mathcal{S}(W_E) = O\left(\frac{\Psi^2}{Dd\,\min_i\|\tilde w_{E_i}\|_2^2}\right)$ with $\Psi := n\sqrt
    D\,\|\gamma\|_F$

    Correct: $\Psi := n\sqrt D\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|\gamma\|_F$: the printed one bounds $Y$, and
    scaling $\mathcal{Q}$ breaks it
    """
    point = EmbeddingPoint.draw(seed)
    point = point.with_(q=1e4 * point.q)
    left = float(point.gradient("W_E").square().sum()) / 45
    printed = point.bound**2 / (45 * point.least_row**2)
    detail = "S(W_E), Q scaled by 10^4, constant 1"
    return violated(left, printed, detail, corrected=printed * float(point.q.norm()) ** 2, above=100)


@claim("ours/thm4.3-sharper", "Sharpness Disparity, Theorem 4.3", "HOLDS", uses=[theorem_4_3])
def sharper(seed: int) -> Evidence:
    r"""$\|\frac{\partial\mathcal{Q}}{\partial W_E}\|_F\le\max_k\frac{\sqrt{c_kD}}{\|\tilde
    w_k\|}\,\max_j|\gamma_j|\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F$ over the tokens $k$ that occur, $c_k$ times each;
    attained"""
    points = [EmbeddingPoint.draw(100 * seed + k, n=9) for k in range(10)]
    row = Draw(seed).normal(5)
    across = torch.linalg.qr(torch.stack([ones(5)[:, 0], row, Draw(seed + 1).normal(5)], 1))[0][:, 2]
    q = torch.zeros(4, 5, dtype=torch.float64)
    q[1:] = across  # at the three places of token 0, orthogonal to its row and to 1
    tokens, W_E = torch.tensor([1, 0, 0, 0]), torch.stack([row, 9 * row + torch.arange(5.0)])
    points.append(EmbeddingPoint(tokens, W_E, ones(5).T, q.reshape(1, -1)))
    found = []
    for p in points:
        norms = EmbeddingNorms.measured(p.tokens, p.W_E, p.gamma[0], p.q.reshape(-1, 5))
        found.append(float(p.gradient("W_E").norm()) / theorem_4_3(norms).upper["W_E"])
    return bounded(found, "10 generic points and the attaining one", attained=1 - 1e-9)


@claim("sharpness-disparity/thm4.3-s-gamma", "Theorem 4.3; App. B.3", "WRONG AS PRINTED")
def s_gamma(seed: int) -> Evidence:
    r"""$\mathcal{S}(\gamma) = O\left(\frac{\Psi^2}{D\,\|\gamma\|_F^2}\right)$ with the same $\Psi$

    Correct: $\Psi := n\sqrt D\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|\gamma\|_F$
    """
    point = EmbeddingPoint.draw(seed)
    point = point.with_(q=1e4 * point.q)
    left = float(point.gradient("gamma").square().sum()) / 5
    printed = point.bound**2 / (5 * float(point.gamma.norm()) ** 2)
    detail = "S(gamma), Q scaled by 10^4, constant 1"
    return violated(left, printed, detail, corrected=printed * float(point.q.norm()) ** 2, above=100)


@claim(
    "sharpness-disparity/thm4.3-bypass", "Theorem 4.3", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt, TokenEmbeddingAt.jacobian]
)
def bypass(seed: int) -> Evidence:
    r"""$Y := \mathrm{Norm}(XW_{\mathrm{emb}};\gamma)$: all of $\nabla_{W_E}\mathcal{Q}$ flows through this norm

    Needs: no residual stream around the norm and no tied head; Eq. 2 has the first, GPT-2 both
    """
    point = EmbeddingPoint.draw(seed)
    holds = agrees(point.q @ point.closed_jacobian("W_E"), point.gradient("W_E"), "without the stream")

    def with_stream(W_E: Tensor) -> Tensor:
        return point.q @ (F.embedding(point.tokens, W_E) + point.Y(W_E, point.gamma)).reshape(-1)

    return assumed(holds, relative_error(point.gradient("W_E"), jacobian_of(with_stream, point.W_E)), above=0.1)


@claim("sharpness-disparity/thm4.3-vocabulary", "Sec. 4.2, after Theorem 4.3", "WRONG AS PRINTED")
def vocabulary(seed: int) -> Evidence:
    """$d$ is 50304 'for the GPT tokenizer'

    Correct: 50257 tokens; nanoGPT pads to 50304, a multiple of 64
    """
    merges, byte_tokens, special = 50000, 256, 1
    tokens = merges + byte_tokens + special
    detail = "50000 merges, 256 bytes, 1 end of text; padded to a multiple of 64 they are 50304"
    unpadded = 50304 - (-tokens) % 64
    return wrong(50304.0, float(tokens), detail, corrected=float(unpadded), above=5e-4)


@claim("ours/embedding-dilution", "Sharpness Disparity, Eqs. 1 and 4", "HOLDS", uses=[TokenEmbeddingAt])
def dilution(seed: int) -> Evidence:
    r"""rows of $W_E$ for tokens that never occur leave the loss as it is and divide $\mathcal{S}(\mathrm{Emb})$ by the factor
    by which they lengthen the table"""
    point = EmbeddingPoint.draw(seed)
    longer = point.with_(W_E=torch.cat([point.W_E, Draw(seed + 1).normal(81, 5)]))
    S = [float(p.gradient("W_E").square().sum()) / p.W_E.numel() for p in (point, longer)]
    return agrees(S[0] / S[1], 10.0, "9 and 90 rows")
