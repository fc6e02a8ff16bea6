r"""Softmax attention row by row: first derivatives, covariances and third cumulants of the tokens.

For a head with y_i = W_Q^T x_i, W = W_V W_O, c = 1/sqrt(d_K), attention weights A_ij and mean xbar_i = sum_j A_ij x_j,

    C_i    = sum_j A_ij (x_j - xbar_i)(x_j - xbar_i)^T                          the covariance of the tokens that row i sees
    M_i(r) = sum_j A_ij <r, W^T (x_j - xbar_i)> (x_j - xbar_i)(x_j - xbar_i)^T  their third cumulant with W r

a change D of the weights moves the output's row i by

    c x_i^T D_Q W_K^T C_i W,   c y_i^T D_K^T C_i W,   xbar_i^T D_V W_O,   xbar_i^T W_V D_O

that is by (D^T u_i)^T N_i, or (D u_i)^T N_i for W_K: every first derivative is a row u_i and a matrix N_i. Both moments are
sums over centred tokens: the uncentred formulas lose all digits where the softmax is saturated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from derivations.attention import AttentionAt
from derivations.bounds.block_norms import Pairs, pair_norm, row_sum_ends, row_sum_norm


class AttentionRows(AttentionAt):
    """One head at a sequence X, arrays as in :class:`derivations.attention.AttentionAt`, in float64.

    >>> I = torch.eye(2, dtype=torch.float64)
    >>> AttentionRows(I, 0 * I, I, I).value  # uniform attention
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """

    @cached_property
    def c(self) -> float:
        """The scale of the logits, as a float."""
        return 1 / math.sqrt(self.W_Q.shape[1]) if self.scale is None else float(self.scale)

    @cached_property
    def means(self) -> Tensor:
        """The averages xbar_i, L x d."""
        return self.A @ self.X

    @cached_property
    def W(self) -> Tensor:
        """W_V W_O, d x d_out."""
        return self.W_V if self.W_O is None else self.W_V @ self.W_O

    @cached_property
    def centred(self) -> Tensor:
        """x_j - xbar_i, L x L x d."""
        return self.X.unsqueeze(0) - self.means.unsqueeze(1)

    @cached_property
    def covariances(self) -> Tensor:
        """C_i, L x d x d."""
        return (self.A.unsqueeze(2) * self.centred).mT @ self.centred

    def third_cumulants(self, r: Tensor) -> Tensor:
        """Return M_i(r_i), L x d x d."""
        along = torch.einsum("ijd,id->ij", self.centred, r @ self.W.mT)
        return ((self.A * along).unsqueeze(2) * self.centred).mT @ self.centred

    @cached_property
    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The first derivatives: rows u_i and matrices N_i of every weight."""
        CW = self.c * self.covariances @ self.W
        L = self.X.shape[0]
        out = _identity(self.W) if self.W_O is None else self.W_O
        factors = {
            "W_Q": (self.X, self.W_K.mT @ CW),
            "W_K": (self.X @ self.W_Q, CW),
            "W_V": (self.means, out.expand(L, *out.shape)),
        }
        if self.W_O is not None:
            factors["W_O"] = (self.means @ self.W_V, _identity(self.W).expand(L, -1, -1))
        return factors

    def pairs(self, K: Tensor, r: Tensor) -> Pairs:
        r"""Return bounds on the blocks of sum_i dF_i^T K_i dF_i + <r, d2F>, exact where ``pair_norm`` is.

        Two weights a and b meet in three ways: in K, in the third cumulant, and where b acts on the value that a makes. The
        first two are sums over u_i^a and u_i^b, the last is crossed (``pair_norm``): with c C_i W r_i for W_Q and W_K, whose
        product is a logit, with the covariance for one of them and W_V or W_O, and with the residual for W_V and W_O.

        Args:
            K: L x d_out x d_out, a row-wise Hessian after the attention.
            r: L x d_out, a row-wise gradient there.
        """
        X, y = self.X, self.X @ self.W_Q
        L, pairs = X.shape[0], Pairs()
        M = self.c**2 * self.third_cumulants(r)
        cumulants = {("W_Q", "W_Q"): self.W_K.mT @ M @ self.W_K, ("W_K", "W_K"): M, ("W_Q", "W_K"): self.W_K.mT @ M}
        back = r if self.W_O is None else r @ self.W_O.mT
        spread = {"W_Q": self.c * self.W_K.mT @ self.covariances, "W_K": self.c * self.covariances}
        pulled = torch.einsum("ide,ie->id", self.covariances, r @ self.W.mT)
        products = {("W_Q", "W_K"): (self.c * _identity(y).expand(L, -1, -1), pulled)}
        for a in ("W_Q", "W_K"):
            products[a, "W_V"] = (spread[a], back)
            products[a, "W_O"] = (spread[a] @ self.W_V, r)
        products["W_V", "W_O"] = (_identity(back).expand(L, -1, -1), r)
        names = tuple(self.factors)
        for i, a in enumerate(names):
            for b in names[i:]:
                (u, N), (v, P) = self.factors[a], self.factors[b]
                middle = N @ K @ P.mT
                middle = middle + cumulants[a, b] if (a, b) in cumulants else middle
                if a == b:
                    pairs.ends[a] = row_sum_ends(u, middle)
                else:
                    pairs.norms[a, b] = pair_norm(u, (middle, v), products[a, b])
        return pairs


def split_heads(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, W_O: Tensor | None, mask: Tensor | None, heads: int, scale: float | None
) -> list[AttentionRows]:
    """Return the heads of weights that hold them side by side: columns of W_Q, W_K, W_V and rows of W_O."""
    if heads == 1:
        return [AttentionRows(X, W_Q, W_K, W_V, W_O, mask, scale)]
    if W_O is None or any(W.shape[1] % heads for W in (W_Q, W_K, W_V)):
        raise ValueError(
            f"attention: {heads} heads need W_O and divide the columns of W_Q, W_K and W_V, got {W_V.shape[1]} columns"
        )
    parts = [W.chunk(heads, 1) for W in (W_Q, W_K, W_V)]
    return [AttentionRows(X, q, k, v, o, mask, scale) for q, k, v, o in zip(*parts, W_O.chunk(heads, 0), strict=True)]


def joint_pairs(heads: Sequence[AttentionRows], K: Tensor, r: Tensor) -> Pairs:
    """Return the blocks of several heads, numbered: "W_Q.1"."""
    if len(heads) == 1:
        return heads[0].pairs(K, r)
    pairs = Pairs()
    for h, one in enumerate(heads):
        pairs.update(one.pairs(K, r), f".{h}")
        for other in range(h + 1, len(heads)):  # two heads meet in K alone
            for a, (u, N) in one.factors.items():
                for b, (v, P) in heads[other].factors.items():
                    pairs.norms[f"{a}.{h}", f"{b}.{other}"] = row_sum_norm(u, N @ K @ P.mT, v)
    return pairs


def joint_factors(heads: Sequence[AttentionRows]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the first derivatives of all heads under the names of ``joint_pairs``."""
    if len(heads) == 1:
        return heads[0].factors
    return {f"{a}.{h}": factor for h, one in enumerate(heads) for a, factor in one.factors.items()}


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
