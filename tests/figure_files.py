"""What the tests of figures share: rows of a written file, second derivatives by reverse over reverse, a small language model's run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from figures._runs import ByteRun, ByteSpec

SMALL = ByteSpec(
    "small", layers=1, d_model=8, heads=2, length=8, batch_size=2, steps=12, every=5, windows=4, evaluations=3, lr=0.01, kept=(5,)
)  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def second_derivatives(loss: Tensor, parameters: Sequence[Tensor], chunk: int = 64) -> Tensor:
    """Return the Hessian of a loss by reverse over reverse."""
    first = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [
        torch.autograd.grad(first, parameters, d, True, is_grads_batched=True)
        for d in torch.eye(len(first)).to(first).split(chunk)
    ]
    return torch.cat([torch.cat([g.flatten(1) for g in row], 1) for row in rows]).detach()


def measured(run: ByteRun) -> list[dict[str, Any]]:
    """Return what the monitor of a run measured, without the times."""
    assert run.log is not None
    return [{key: value for key, value in record.items() if key != "seconds"} for record in run.log.records]
