"""Random programs that write into views of their values, against autograd, which follows such writes by itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from curvature_reference import Formula, draw, reverse_over_reverse
from torch import Tensor

import hessiankit as hk


def assignments(seed: int) -> Callable[[Formula, Tensor], Tensor]:
    """A random program of views and of writes into them."""

    def view(t: Tensor, dice: random.Random) -> Tensor:
        if t.ndim == 0:
            return t
        row = dice.randrange(t.shape[0])
        return dice.choice([t.T if t.ndim == 2 else t[:], t[row], t[row:], t[..., ::2], t.unsqueeze(0), t.narrow(-1, 0, 1)])

    def write(t: Tensor, other: Tensor, dice: random.Random) -> None:
        new = other.clone().reshape(-1).repeat(20)[: t.numel()].reshape(t.shape)
        kind = dice.randrange(7)
        if kind == 0:
            t.add_(new)
        elif kind == 1:
            t.copy_(new)
        elif kind == 2:
            t.mul_(1.5)
        elif kind == 3:
            t.fill_(0.3)
        elif kind == 4:
            t.zero_()
        elif kind == 5:
            t.neg_()
        elif t.ndim:
            t[0] = new[0]

    def program(s: Formula, x: Tensor) -> Tensor:
        dice = random.Random(seed)
        tensors = [x @ s.W, x @ s.V, torch.zeros(4, 4, dtype=x.dtype)]
        total = (x @ s.W).sum() ** 2
        for _ in range(12):
            chosen = dice.choice(tensors)
            if dice.random() < 0.5:
                tensors.append(view(chosen, dice))
            else:
                write(chosen, dice.choice(tensors), dice)
                total = total + torch.tanh(dice.choice(tensors).clone()).sum()
        weights = (torch.arange(1, t.numel() + 1, dtype=x.dtype).reshape(t.shape) for t in tensors)
        return total + sum((torch.tanh(t.clone()) * w).sum() for t, w in zip(tensors, weights, strict=True))

    return program


@pytest.mark.parametrize("seed", range(10))
def test_random_writes_into_views(seed):
    module = Formula(assignments(seed), W=(4, 4), V=(4, 4))
    found = hk.hessian(module, draw(4, 4), loss=None)
    expected = reverse_over_reverse(module, draw(4, 4), None, None)
    assert (found.matrix - expected).abs().max() <= 1e-12 * expected.abs().max()
