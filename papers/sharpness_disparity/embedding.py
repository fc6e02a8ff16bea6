"""Theorem 4.3: gradients and sharpness of the embedding and its norm, and their bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.embedding import TokenEmbeddingAt
from derivations.normalization import LayerNormAt
from papers import second as again
from papers.ascent import worst
from papers.autodiff import jacobian_of
from papers.claim import Evidence
from papers.drawing import Draw
from papers.evidence import agrees, assumed, bounded, loose, relative_error, violated, wrong
from papers.norms import matrix_norm
from papers.notation import dense, eye, ones
from papers.registry import claim
from papers.sharpness_disparity.embedding_bounds import EmbeddingNorms, theorem_4_3


@dataclass(frozen=True)
class EmbeddingPoint:
    """Y = Norm(X W_E; gamma): X the one-hot rows of n tokens, n x d; W_E d x D; gamma 1 x D; q = dQ/dY 1 x nD."""

    tokens: Tensor
    W_E: Tensor
    gamma: Tensor
    q: Tensor

    @staticmethod
    def draw(seed: int, n: int = 6, d: int = 9, D: int = 5) -> EmbeddingPoint:
        """Return a generic point."""
        draw = Draw(seed)
        return EmbeddingPoint(draw.integers(0, d, n), draw.normal(d, D), draw.normal(1, D), draw.normal(1, n * D))

    @property
    def X(self) -> Tensor:
        """The one-hot rows."""
        return F.one_hot(self.tokens, len(self.W_E)).double()

    @property
    def Z(self) -> Tensor:
        """X W_E."""
        return self.W_E[self.tokens]

    def Y(self, W_E: Tensor, gamma: Tensor) -> Tensor:
        """The theorem's Y."""
        return F.layer_norm(F.embedding(self.tokens, W_E), W_E.shape[1:], gamma[0], eps=0.0)

    def jacobian(self, letter: str) -> Tensor:
        """dY/dW_E or dY/dgamma by automatic differentiation."""
        return jacobian_of(self.Y, self.W_E, self.gamma, wrt=("W_E", "gamma").index(letter))

    def closed_jacobian(self, letter: str) -> Tensor:
        """The same from the closed forms of the chapters."""
        norm = LayerNormAt(self.Z, self.gamma[0])
        if letter == "gamma":
            return dense(norm.jacobian("gamma"))
        return dense(norm.jacobian("X") @ TokenEmbeddingAt(self.tokens, self.W_E).jacobian("E"))

    def gradient(self, letter: str) -> Tensor:
        """dQ/dW_E or dQ/dgamma."""
        return self.q @ self.jacobian(letter)

    @property
    def least_row(self) -> float:
        """The least norm of a centred row of W_E, over all tokens of the vocabulary."""
        return float(centred(self.W_E).norm(dim=1).min())

    @property
    def bound(self) -> float:
        """N sqrt(D) ||gamma||_F, the printed Psi."""
        n, D = self.Z.shape
        return n * math.sqrt(D) * float(self.gamma.norm())


def centred(X: Tensor) -> Tensor:
    """Return X minus the mean of each row."""
    return X - X.mean(-1, keepdim=True)


def row_jacobian(x: Tensor, *, mean: float) -> Tensor:
    """Return sqrt(D) / ||x~|| (I - x~^T x~ / ||x~||^2)(I - mean 1^T 1) for a row x."""
    t, D = centred(x)[None], len(x)
    return math.sqrt(D) / t.norm() * (eye(D) - t.T @ t / t.square().sum()) @ (eye(D) - mean * ones(D) @ ones(D).T)


@claim("b3-gamma-norm", "App. B.3, norm of dY/dgamma", "LOOSE", uses=[LayerNormAt])
def gamma_norm(seed: int) -> Evidence:
    r"""$\|\frac{\partial Y}{\partial\gamma}\|_F\le n\sqrt D$
    Correct: it is $\sqrt{nD}$"""
    point = EmbeddingPoint.draw(seed, n=9)
    return loose(float(point.jacobian("gamma").norm()) / (9 * math.sqrt(5)), "n = 9", factor=3)


@claim("b3-row-jacobian", "App. B.3, the Jacobian of Xiong et al.", "WRONG AS PRINTED", uses=[LayerNormAt])
def row(seed: int) -> Evidence:
    r"""for $x\in\mathbb{R}^{1\times D}$: $\frac{\partial x_{\mathrm{std}}}{\partial x} = \frac{\sqrt D}{\|\tilde
    x\|_2}\left(I - \frac{\tilde x\tilde x^\top}{\|\tilde x\|_2^2}\right)\left(I - \frac1d1_{1\times D}1_{1\times
    D}^\top\right)$
    Correct: $\tilde x^\top\tilde x$, $1_{1\times D}^\top1_{1\times D}$ and $\frac1D$: for rows the printed products are
    scalars, and $d$ is the vocabulary size
    Severity: slip of print"""
    draw, D, d = Draw(seed), 5, 9
    x = draw.normal(D)
    t = centred(x)[None]
    reference = jacobian_of(lambda x: F.layer_norm(x, (D,), eps=0.0), x)
    as_rows = math.sqrt(D) / t.norm() * (eye(D) - t @ t.T / t.square().sum()) @ (eye(D) - ones(D).T @ ones(D) / d)
    as_columns = row_jacobian(x, mean=1 / d)
    corrected = [row_jacobian(x, mean=1 / D), dense(LayerNormAt(x[None]).jacobian("X"))]
    detail = "read with rows and with columns; D = 5, d = 9"
    return wrong([as_rows, as_columns], [reference] * 2, detail, corrected=corrected, above=0.01, at={"x": x})


@claim("b3-we", "App. B.3, dY/dW_E", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt, TokenEmbeddingAt.jacobian])
def w_e(seed: int) -> Evidence:
    r"""$\frac{\partial Y}{\partial W_E} =
    (I_n\otimes\mathrm{diag}(\mathrm{vec}(\gamma)))\,\mathrm{diag}\left(\left\{\frac{\sqrt D}{\|\tilde z_i\|_2}\left(I -
    \frac{\tilde z_i\tilde z_i^\top}{\|\tilde z_i\|_2^2}\right)\left(I - \frac1D1_{1\times D}1_{1\times
    D}^\top\right)\right\}_i\right)(X\otimes I_D)$
    Needs: $\tilde z_i$ and $1$ are columns; the text declares rows, whose products are scalars"""
    point, D = EmbeddingPoint.draw(seed), 5
    reference = point.jacobian("W_E")
    blocks = torch.block_diag(*[row_jacobian(z, mean=1 / D) for z in point.Z])
    gain, inner = torch.kron(eye(6), point.gamma[0].diag()), torch.kron(point.X, eye(D))
    numbers = torch.block_diag(*[math.sqrt(D) / centred(z).norm() * (eye(D) - 1) @ (eye(D) - 1) for z in point.Z])
    holds = agrees([gain @ blocks @ inner, point.closed_jacobian("W_E")], [reference, reference], "against autograd")
    return assumed(holds, relative_error(gain @ numbers @ inner, reference), above=0.1)


@claim("b3-shape-of-z", "App. B.3, definition of Z", "WRONG AS PRINTED", uses=[TokenEmbeddingAt])
def shape_of_z(seed: int) -> Evidence:
    r"""$\mathbf{Z} = (\tilde z_1;\ldots;\tilde z_d)\in\mathbb{R}^{d\times D}$
    Correct: $\tilde{\mathbf{Z}} = (\tilde z_1;\ldots;\tilde z_n)\in\mathbb{R}^{n\times D}$: $Z = XW_E$ has a row for each
    token, and its centred rows are $\tilde Z$
    Severity: slip of print"""
    point = EmbeddingPoint.draw(seed)
    tilde = centred(point.X @ point.W_E)
    found = torch.stack([centred(z) for z in point.W_E[point.tokens]])
    printed = centred(point.W_E)  # d rows
    second = [again.standardised(point.Z) * point.Z.std(1, correction=0, keepdim=True)]
    return wrong([printed], [tilde], "n = 6 rows, d = 9", corrected=[found], second=second, by="rational numbers")


@claim("b3-least-row", "App. B.3", "HOLDS UNDER ASSUMPTION", uses=[TokenEmbeddingAt])
def least_row(seed: int) -> Evidence:
    r"""$\min_{i\in[n]}\|\tilde z_i\|_2\ge\min_{k\in[d]}\|\tilde w_k\|_2$
    Needs: one-hot rows and nothing added to the embedding. It can fail for GPT-2, which adds learned positions"""
    draw = Draw(seed)
    points = [EmbeddingPoint.draw(100 * seed + k) for k in range(20)]
    holds = bounded([p.least_row / float(centred(p.Z).norm(dim=1).min()) for p in points], "20 points")
    p = points[0]
    positions = 0.01 * draw.normal(*p.Z.shape) - 0.9 * p.Z  # positions that nearly cancel the embedding
    return assumed(holds, p.least_row / float(centred(p.Z + positions).norm(dim=1).min()), above=1.5)


@claim("b3-norm-of-x", "App. B.3", "WRONG AS PRINTED", uses=[TokenEmbeddingAt])
def norm_of_x(seed: int) -> Evidence:
    r"""$\|X\|_F = \left(\sum_{i=1}^nx_{i,j}^2\right)^{1/2} = \sqrt n$
    Correct: the sum is over $i$ and $j$: $\left(\sum_{i,j}x_{i,j}^2\right)^{1/2} = \sqrt n$
    Severity: slip of print"""
    X = EmbeddingPoint.draw(seed).X
    columns = X.square().sum(0).sqrt()
    printed, second = [float(c) for c in columns], math.sqrt(sum(x == 1 for row in X.tolist() for x in row))
    detail = "every column j; the sum over both"
    return wrong(printed, math.sqrt(len(X)), detail, corrected=X.norm(), second=second, by="the number of ones")


# Theorem 4.3: bounds on the gradients and on the sharpness of the embedding and its norm
@claim("b3-bound", "App. B.3, bound on dY/dW_E", "LOOSE", uses=[LayerNormAt])
def bound(seed: int) -> Evidence:
    r"""$\|\frac{\partial Y}{\partial W_E}\|_F\le n\sqrt D\,\frac{\|\gamma\|_F}{\min_{i\in[d]}\|\tilde w_i\|_2}$
    Correct: $\|\frac{\partial Y}{\partial W_E}\|_F\le\sqrt{nD}\,\frac{\|\gamma\|_F}{\min_i\|\tilde z_i\|_2}$, the least over
    the tokens that occur"""

    def ratio(point: EmbeddingPoint) -> float:
        of_tokens = float(centred(point.Z).norm(dim=1).min())  # the sharp bound has this in place of the least row of W_E
        return float(point.jacobian("W_E").norm()) * max(point.least_row, of_tokens) / point.bound

    found = worst(ratio, [EmbeddingPoint.draw(100 * seed + k, n=9) for k in range(10)])
    return loose(found, "10 points of 9 tokens and an ascent, with the larger of the two minima", factor=3)


@claim("b3-factor-norm", "App. B.3, bound on dY/dW_E, second line", "HOLDS", uses=[matrix_norm])
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


@claim("thm4.3-s-we", "Theorem 4.3; App. B.3", "OMITTED")
def s_we(seed: int) -> Evidence:
    r"""$\mathcal{S}(W_E) = O\left(\frac{\Psi^2}{Dd\,\min_i\|\tilde w_{E_i}\|_2^2}\right)$ with $\Psi := n\sqrt
    D\,\|\gamma\|_F$: the norm of the loss's gradient, which Theorem 4.1 has in its $\Psi$
    Correct: $\Psi := n\sqrt D\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|\gamma\|_F$, unless the $O$ is to hide it: the
    printed one bounds $Y$, and scaling $\mathcal{Q}$ exceeds it"""
    point = EmbeddingPoint.draw(seed)
    point = replace(point, q=1e4 * point.q)
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


@claim("thm4.3-s-gamma", "Theorem 4.3; App. B.3", "OMITTED")
def s_gamma(seed: int) -> Evidence:
    r"""$\mathcal{S}(\gamma) = O\left(\frac{\Psi^2}{D\,\|\gamma\|_F^2}\right)$ with the same $\Psi$
    Correct: $\Psi := n\sqrt D\,\|\frac{\partial\mathcal{Q}}{\partial Y}\|_F\|\gamma\|_F$, unless the $O$ is to hide it"""
    point = EmbeddingPoint.draw(seed)
    point = replace(point, q=1e4 * point.q)
    left = float(point.gradient("gamma").square().sum()) / 5
    printed = point.bound**2 / (5 * float(point.gamma.norm()) ** 2)
    detail = "S(gamma), Q scaled by 10^4, constant 1"
    return violated(left, printed, detail, corrected=printed * float(point.q.norm()) ** 2, above=100)


@claim("thm4.3-bypass", "Theorem 4.3", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt, TokenEmbeddingAt.jacobian])
def bypass(seed: int) -> Evidence:
    r"""$Y := \mathrm{Norm}(XW_{\mathrm{emb}};\gamma)$: all of $\nabla_{W_E}\mathcal{Q}$ flows through this norm
    Needs: no residual stream around the norm and no tied head. Eq. 2 has a residual stream, GPT-2 has both"""
    point = EmbeddingPoint.draw(seed)
    holds = agrees(point.q @ point.closed_jacobian("W_E"), point.gradient("W_E"), "without the stream")

    def with_stream(W_E: Tensor) -> Tensor:
        return point.q @ (F.embedding(point.tokens, W_E) + point.Y(W_E, point.gamma)).reshape(-1)

    return assumed(holds, relative_error(point.gradient("W_E"), jacobian_of(with_stream, point.W_E)), above=0.1)


@claim("ours/embedding-dilution", "Sharpness Disparity, Eqs. 1 and 4", "HOLDS", uses=[TokenEmbeddingAt])
def dilution(seed: int) -> Evidence:
    r"""rows of $W_E$ for tokens that never occur leave the loss as it is and divide $\mathcal{S}(\mathrm{Emb})$ by the factor
    by which they lengthen the table"""
    point = EmbeddingPoint.draw(seed)
    longer = replace(point, W_E=torch.cat([point.W_E, Draw(seed + 1).normal(81, 5)]))
    S = [float(p.gradient("W_E").square().sum()) / p.W_E.numel() for p in (point, longer)]
    return agrees(S[0] / S[1], 10.0, "9 and 90 rows")
