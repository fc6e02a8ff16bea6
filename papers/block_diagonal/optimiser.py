"""Damped Gauss-Newton steps with the whole matrix, and with its diagonal blocks by layer, tensor or neuron, on one model.

Every arm starts from one initial model and sees the same batches. A step is (D + damping I)^-1 g, D the diagonal blocks of the
batch's exact Gauss-Newton matrix. Its damping is the one of :data:`DAMPINGS`, times the mean of the diagonal, after which the
loss of another training batch is lowest: with its own batch the step with the most freedom would overfit. Where none lowers it
the parameters stay. AdamW has the best of :data:`RATES`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hessiankit as hk
from hessiankit.blocks import Transformer
from papers.block_diagonal.measures import block_solve, partition_labels
from papers.block_diagonal.models import BATCH, Case, batch, cross_entropy, model_of

ARMS = ("full", "layer", "tensor", "neuron", "AdamW")
DAMPINGS = (1e-1, 1.0, 1e1, 1e2)
RATES = (3e-3, 1e-2, 3e-2, 1e-1)
HELD_OUT = 64  # sequences, of files that no batch is from


@torch.no_grad()
def loss_of(model: Transformer, x: Tensor, y: Tensor) -> float:
    """Return the mean cross entropy, infinite where it is no number."""
    value = float(cross_entropy(model(x), y))
    return value if math.isfinite(value) else math.inf


def gauss_newton_step(model: Transformer, x: Tensor, y: Tensor, other: tuple[Tensor, Tensor], arm: str) -> None:
    """Take one step in place, with the damping that serves the ``other`` batch best."""
    operator = hk.hessian_operator(model, x, y, loss="cross_entropy", kind="ggn")
    G, gradient = hk.hessian(model, x, y, loss="cross_entropy", lazy=True).outer(), operator.gradient
    numbers = torch.zeros(len(G), dtype=torch.int64) if arm == "full" else partition_labels(operator, model)[arm]
    start, size = parameters_to_vector(model.parameters()).detach(), float(G.diagonal().mean())
    trials = [(loss_of(model, *other), start)]
    for damping in DAMPINGS:
        end = start - block_solve(G, numbers, gradient, damping * size)
        vector_to_parameters(end, model.parameters())
        trials.append((loss_of(model, *other), end))
    vector_to_parameters(min(trials, key=lambda trial: trial[0])[1], model.parameters())


def adamw_step(model: Transformer, x: Tensor, y: Tensor, other: tuple[Tensor, Tensor], optimizer: torch.optim.AdamW) -> None:
    """Take one step in place on both batches, all the data that a Gauss-Newton step reads."""
    optimizer.zero_grad()
    cross_entropy(model(torch.cat([x, other[0]])), torch.cat([y, other[1]])).backward()
    optimizer.step()


def losses(case: Case, arms: Sequence[str] = ARMS) -> dict[str, list[float]]:
    """Return the held-out loss before the first step and after each, by arm."""
    held_out = batch(case, HELD_OUT, torch.Generator().manual_seed(1), "validation")
    start = model_of(case)

    def run(update: Callable[[Transformer, Tensor, Tensor, tuple[Tensor, Tensor]], None], model: Transformer) -> list[float]:
        generator, found = torch.Generator().manual_seed(case.seed), [loss_of(model, *held_out)]
        for _ in range(case.steps):
            update(model, *batch(case, BATCH, generator), batch(case, BATCH, generator))
            found.append(loss_of(model, *held_out))
        return found

    found = {}
    for arm in arms:
        if arm != "AdamW":
            found[arm] = run(partial(gauss_newton_step, arm=arm), copy.deepcopy(start))
            continue
        tried = []
        for rate in RATES:
            model = copy.deepcopy(start)
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
            tried.append(run(partial(adamw_step, optimizer=optimizer), model))
        found[arm] = min(tried, key=lambda values: values[-1])
    return found
