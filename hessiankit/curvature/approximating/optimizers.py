"""The curvature that optimizers assume: Adam's second moment, Shampoo's and Muon's Kronecker factors, from gradients of samples.

For mini-batches of b samples drawn with replacement, whose loss gradient has mean g and, for one sample, second moment E,

    E[g_b g_b^T] = E / b + (1 - 1/b) g g^T,

so that moments over mini-batches follow from the gradients of single samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hessiankit.curvature.jacobian import JacobianOperator
from hessiankit.curvature.structures import Structure, dense_block, diagonal, kronecker_block
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.fisher import counted_samples


def sample_gradients(batches: Sequence[BatchLoss]) -> Tensor:
    """Return the gradients of the losses of the B samples that count, scaled so that their mean is that of the whole: (B, P)."""
    rows = []
    for batch in batches:
        is_scalar = isinstance(batch.target, Tensor) and batch.target.ndim == 0  # logits without an axis of samples
        J = JacobianOperator(batch.unchecked())
        with batch.at():
            Z = batch.read().detach().requires_grad_()
            (slope,) = torch.autograd.grad(batch.loss.value(Z, batch.target), Z)
        c = slope.detach().to(J.torch_dtype)
        rows.append(batch.share * (J.pull(c.reshape(1, -1)) if is_scalar else J.sample_gradients(c)[counted_samples(batch)]))
    gradients = torch.cat(rows)
    return len(gradients) * gradients


class MiniBatchMoments:
    """Second moments of the gradients of mini-batches of b samples, from the gradients of single samples, (B, P)."""

    def __init__(self, gradients: Tensor, minibatch: int, shapes: dict[str, tuple[int, ...]], slices: dict[str, slice]) -> None:
        mean = gradients.mean(0, keepdim=True)
        scaled = gradients * (1.0 / (len(gradients) * minibatch)) ** 0.5
        self.rows = torch.cat([scaled, (1.0 - 1.0 / minibatch) ** 0.5 * mean]) if minibatch > 1 else scaled
        self.mean, self.shapes, self.slices = mean[0], shapes, slices

    def adam(self) -> list[Structure]:
        """Return diag(v), v = E[g_b^2]: the stationary second moment of Adam (Kingma and Ba 2015), whose root it divides by."""
        return [diagonal(torch.arange(self.rows.shape[1], device=self.rows.device), self.rows.square().sum(0))]

    def shampoo(self) -> list[Structure]:
        """Return L^(1/2) (x) R^(1/2), L = E[G_b G_b^T], R = E[G_b^T G_b], for matrices (Gupta, Koren and Singer 2018).

        Its root is what Shampoo divides by: L^(-1/4) G R^(-1/4). For vectors it is E[g_b g_b^T].
        """
        structures: list[Structure] = []
        for name, rows in self.slices.items():
            at = torch.arange(rows.start, rows.stop, device=self.rows.device)
            G = self.rows[:, rows]
            if len(self.shapes[name]) < 2:
                structures.append(dense_block(at, G.T @ G))
                continue
            G = G.reshape(len(G), self.shapes[name][0], -1)
            left, right = torch.einsum("bij,bkj->ik", G, G), torch.einsum("bij,bik->jk", G, G)
            structures.append(kronecker_block(at, left, right).root())
        return structures

    def muon(self) -> list[Structure]:
        """Return G G^T (x) I of the mean gradient G of each matrix, whose root turns G into its orthogonal factor U V^T.

        Jordan et al., Muon, 2024. On the smaller side: I (x) G^T G where there are fewer columns. Vectors, which Muon leaves to
        Adam, have Adam's second moment.
        """
        structures: list[Structure] = []
        for name, rows in self.slices.items():
            at = torch.arange(rows.start, rows.stop, device=self.rows.device)
            if len(self.shapes[name]) < 2:
                structures.append(diagonal(at, self.rows[:, rows].square().sum(0)))
                continue
            G = self.mean[rows].reshape(self.shapes[name][0], -1)
            m, n = G.shape
            identity = torch.eye(max(m, n), dtype=G.dtype, device=G.device)
            pair = (G @ G.T, identity) if m <= n else (identity, G.T @ G)
            structures.append(replace(kronecker_block(at, *pair), numbers=min(m, n) * (min(m, n) + 1) // 2))
        return structures
