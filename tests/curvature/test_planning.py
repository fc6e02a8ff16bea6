"""Panels cover every pair of parameters once, and are no larger than they must be."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, draw, randomised
from torch import nn

from hessiankit.curvature.planning import make_plan, panels
from hessiankit.engine.problem.batches import requests


@pytest.mark.parametrize("limit", [1, 40, 64, 200, 10**6])
@pytest.mark.parametrize("sizes", [[3], [2, 5, 1, 1, 7, 3], [1, 1, 1, 9], [12, 1, 2], [4, 0, 3]])
def test_every_pair_once(sizes: list[int], limit: int) -> None:
    found = panels(sizes, 2, limit)
    pairs = [(i, j) for rows, columns in found.parts for i in rows for j in columns if i <= j]
    assert sorted(pairs) == [(i, j) for i in range(len(sizes)) for j in range(i, len(sizes))]
    for rows, columns in found.parts:
        height, width = (sum(sizes[k] for k in part) for part in (rows, columns))
        assert columns[0] >= rows[0]
        assert 2 * height * width <= found.largest
        assert 2 * height * width <= limit or len(rows) == len(columns) == 1
    assert found.largest <= limit or found.largest <= 2 * max(sizes) ** 2


def test_chunks_cover_every_sample_once() -> None:
    module = randomised(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)))
    batches = [(draw(5, 3, 4), draw(5, 3, 4)), (draw(1, 2, 4), draw(1, 2, 4)), (draw(4, 3, 4), draw(4, 3, 4))]
    tasks = [task for task, _ in requests("test", module, batches, None, "mse", None)]
    for batch_size, count in ((None, 3), (1, 10), (2, 6)):
        plan = make_plan(tasks, batch_size, 2000)
        seen = [(chunk.batch, k) for chunk in plan.chunks for k in range(chunk.start, chunk.stop)]
        assert seen == [(n, k) for n, samples in enumerate((5, 1, 4)) for k in range(samples)]
        assert len(plan.chunks) == len(plan.costs) == count
        assert len(plan.panels.parts) > 1


def test_samples_that_the_loss_ties_together_stay_together() -> None:
    module, x = randomised(nn.Linear(3, 2)), draw(4, 3)

    def spread(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((z - z.mean(0)) * target).square().sum()

    [(task, _)] = requests("test", module, x, draw(4, 2), spread, None)
    [chunk] = make_plan([task], 1, None).chunks
    assert (chunk.start, chunk.stop, chunk.whole) == (0, 4, True)


def test_batch_without_effect_has_no_chunk() -> None:
    module = Formula(lambda m, x: x * m.w if x.shape[0] == 2 else x, w=(3,))
    batches = [(draw(1, 3), draw(1, 3, seed=3)), (draw(2, 3), draw(2, 3, seed=2))]
    tasks = [task for task, _ in requests("test", module, batches, None, "mse", None)]
    assert [chunk.batch for chunk in make_plan(tasks, None, None).chunks] == [1]
