"""Theorem 4.3: the embedding and its norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from derivations.normalization import LayerNormAt
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
    wrong,
)
from hessiankit.ledger.registry import claim
from hessiankit.ledger.sharpness_disparity.points import dense, eye, ones


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

    def with_(self, **changes: Tensor) -> EmbeddingPoint:
        """Return the point with some of its arrays replaced."""
        return replace(self, **changes)

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


@claim("sharpness-disparity/b3-gamma-norm", "App. B.3, norm of dY/dgamma", "LOOSE", uses=[LayerNormAt])
def gamma_norm(seed: int) -> Evidence:
    r"""$\|\frac{\partial Y}{\partial\gamma}\|_F\le n\sqrt D$

    Correct: it is $\sqrt{nD}$
    """
    point = EmbeddingPoint.draw(seed, n=9)
    return loose(float(point.jacobian("gamma").norm()) / (9 * math.sqrt(5)), "n = 9", factor=3)


@claim("sharpness-disparity/b3-row-jacobian", "App. B.3, the Jacobian of Xiong et al.", "WRONG AS PRINTED", uses=[LayerNormAt])
def row(seed: int) -> Evidence:
    r"""for $x\in\mathbb{R}^{1\times D}$: $\frac{\partial x_{\mathrm{std}}}{\partial x} = \frac{\sqrt D}{\|\tilde
    x\|_2}\left(I - \frac{\tilde x\tilde x^\top}{\|\tilde x\|_2^2}\right)\left(I - \frac1d1_{1\times D}1_{1\times
    D}^\top\right)$

    Correct: $\tilde x^\top\tilde x$, $1_{1\times D}^\top1_{1\times D}$ and $\frac1D$: for rows the printed products are
    numbers, and $d$ is the vocabulary size
    """
    draw, D, d = Draw(seed), 5, 9
    x = draw.normal(D)
    t = centred(x)[None]
    reference = jacobian_of(lambda x: F.layer_norm(x, (D,), eps=0.0), x)
    as_rows = math.sqrt(D) / t.norm() * (eye(D) - t @ t.T / t.square().sum()) @ (eye(D) - ones(D).T @ ones(D) / d)
    as_columns = row_jacobian(x, mean=1 / d)
    corrected = [row_jacobian(x, mean=1 / D), dense(LayerNormAt(x[None]).jacobian("X"))]
    detail = "read with rows and with columns; D = 5, d = 9"
    return wrong([as_rows, as_columns], [reference] * 2, detail, corrected=corrected, above=0.01, at={"x": x})


@claim("sharpness-disparity/b3-we", "App. B.3, dY/dW_E", "HOLDS UNDER ASSUMPTION", uses=[LayerNormAt, TokenEmbeddingAt.jacobian])
def w_e(seed: int) -> Evidence:
    r"""$\frac{\partial Y}{\partial W_E} =
    (I_n\otimes\mathrm{diag}(\mathrm{vec}(\gamma)))\,\mathrm{diag}\left(\left\{\frac{\sqrt D}{\|\tilde z_i\|_2}\left(I -
    \frac{\tilde z_i\tilde z_i^\top}{\|\tilde z_i\|_2^2}\right)\left(I - \frac1D1_{1\times D}1_{1\times
    D}^\top\right)\right\}_i\right)(X\otimes I_D)$

    Needs: $\tilde z_i$ and $1$ are columns; the text declares rows, of which the products are numbers
    """
    point, D = EmbeddingPoint.draw(seed), 5
    reference = point.jacobian("W_E")
    blocks = torch.block_diag(*[row_jacobian(z, mean=1 / D) for z in point.Z])
    gain, inner = torch.kron(eye(6), point.gamma[0].diag()), torch.kron(point.X, eye(D))
    numbers = torch.block_diag(*[math.sqrt(D) / centred(z).norm() * (eye(D) - 1) @ (eye(D) - 1) for z in point.Z])
    holds = agrees([gain @ blocks @ inner, point.closed_jacobian("W_E")], [reference, reference], "against autograd")
    return assumed(holds, relative_error(gain @ numbers @ inner, reference), above=0.1)


@claim("sharpness-disparity/b3-shape-of-z", "App. B.3, definition of Z", "WRONG AS PRINTED", uses=[TokenEmbeddingAt])
def shape_of_z(seed: int) -> Evidence:
    r"""$\mathbf{Z} = (\tilde z_1;\ldots;\tilde z_d)\in\mathbb{R}^{d\times D}$

    Correct: $\tilde{\mathbf{Z}} = (\tilde z_1;\ldots;\tilde z_n)\in\mathbb{R}^{n\times D}$: $Z = XW_E$ has a row for each
    token, and its centred rows are $\tilde Z$
    """
    point = EmbeddingPoint.draw(seed)
    tilde = centred(point.X @ point.W_E)
    found = torch.stack([centred(z) for z in point.W_E[point.tokens]])
    printed = centred(point.W_E)  # d rows
    return wrong([printed], [tilde], "n = 6 rows, d = 9", corrected=[found])


@claim("sharpness-disparity/b3-least-row", "App. B.3", "HOLDS UNDER ASSUMPTION", uses=[TokenEmbeddingAt])
def least_row(seed: int) -> Evidence:
    r"""$\min_{i\in[n]}\|\tilde z_i\|_2\ge\min_{k\in[d]}\|\tilde w_k\|_2$

    Needs: one-hot rows and nothing added to the embedding: GPT-2 adds learned positions, and then it can fail
    """
    draw = Draw(seed)
    points = [EmbeddingPoint.draw(100 * seed + k) for k in range(20)]
    holds = bounded([p.least_row / float(centred(p.Z).norm(dim=1).min()) for p in points], "20 points")
    p = points[0]
    positions = 0.01 * draw.normal(*p.Z.shape) - 0.9 * p.Z  # positions that nearly cancel the embedding
    return assumed(holds, p.least_row / float(centred(p.Z + positions).norm(dim=1).min()), above=1.5)


@claim("sharpness-disparity/b3-norm-of-x", "App. B.3", "WRONG AS PRINTED", uses=[TokenEmbeddingAt])
def norm_of_x(seed: int) -> Evidence:
    r"""$\|X\|_F = \left(\sum_{i=1}^nx_{i,j}^2\right)^{1/2} = \sqrt n$

    Correct: the sum is over $i$ and $j$: $\left(\sum_{i,j}x_{i,j}^2\right)^{1/2} = \sqrt n$
    """
    X = EmbeddingPoint.draw(seed).X
    columns = X.square().sum(0).sqrt()
    return wrong([float(c) for c in columns], math.sqrt(6), "every column j; the sum over both", corrected=X.norm())
