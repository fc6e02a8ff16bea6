"""Panels of the Hessian of several batches: in any order, each of them rows of the whole."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse

from hessiankit.curvature.planning import Chunk
from hessiankit.curvature.streaming import PanelSum
from hessiankit.engine import parts as traced_parts
from hessiankit.engine.problem.own_call import make_task

MODULE = Formula(lambda s, x: torch.tanh(torch.tanh(x @ s.A + s.b) @ s.C), A=(4, 3), b=(3,), C=(3, 2))
X, T = draw(3, 2, 4), draw(3, 2, 2, seed=2)
PARTS = ((range(0, 1), range(0, 3)), (range(1, 2), range(1, 2)), (range(1, 2), range(2, 3)), (range(2, 3), range(2, 3)))
CHUNKS = (Chunk(0, 0, 2, False), Chunk(0, 2, 3, False), Chunk(1, 0, 1, True))
SHARES = (0.75, 2.0)


def test_panels_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, inner = [], traced_parts.loss_trace
    monkeypatch.setattr(traced_parts, "loss_trace", lambda task, n: traces.append(task.batch) or inner(task, n))
    tasks = [make_task("test", MODULE, X, T, "mse"), make_task("test", MODULE, X[:1], T[:1], "mse")]
    expected = 0.75 * reverse_over_reverse(MODULE, X, T, mse) + 2 * reverse_over_reverse(MODULE, X[:1], T[:1], mse)
    steps: list[tuple[int, int]] = []
    with torch.no_grad():
        total = PanelSum(tasks, SHARES, CHUNKS, PARTS, lambda done, of: steps.append((done, of)))
        for n in (2, 0, 3, 1):
            panel, asymmetry = total.panel(n)
            assert asymmetry <= 1e-14
            names = list(tasks[0].slices)
            for i in PARTS[n][0]:
                for j in PARTS[n][1]:
                    theirs = expected[tasks[0].slices[names[i]], tasks[0].slices[names[j]]]
                    assert (panel.block(names[i], names[j]) - theirs).abs().max() <= 1e-12 * theirs.abs().max()
        assert total.loss() == pytest.approx(float(0.75 * mse(MODULE(X), T) + 2 * mse(MODULE(X[:1]), T[:1])), rel=1e-13)
    assert len(traces) == 3 * 4
    assert steps[:4] == [(10, 16), (11, 16), (12, 16), (2, 16)]


def test_a_batch_without_chunks_counts_in_the_loss() -> None:
    tasks = [make_task("test", MODULE, X, T, "mse"), make_task("test", MODULE, X[:1], T[:1], "mse")]
    with torch.no_grad():
        total = PanelSum(tasks, SHARES, CHUNKS[:2], PARTS)
        total.panel(1)
        assert total.loss() == pytest.approx(float(0.75 * mse(MODULE(X), T) + 2 * mse(MODULE(X[:1]), T[:1])), rel=1e-13)


def test_gauss_newton_part() -> None:
    linear = Formula(lambda s, x: x @ s.A, A=(4, 2))
    bent = Formula(lambda s, x: x @ torch.tanh(s.A), A=(4, 2))
    bent.A.data = linear.A.data.clone()
    x, t = draw(3, 4), draw(3, 2)
    (slope,) = torch.autograd.grad(torch.tanh(bent.A).sum(), bent.A)
    weights = slope.reshape(-1)
    parts, chunks = ((range(0, 1), range(0, 1)),), (Chunk(0, 0, 3, True),)
    with torch.no_grad():
        total = PanelSum([make_task("test", bent, x, t, "mse")], (1.0,), chunks, parts, outer=True)
        found = total.panel(0)[0].data
    expected = weights[:, None] * reverse_over_reverse(linear, x, t, mse) * weights
    assert (found - expected).abs().max() <= 1e-13


def test_what_is_not_finite_is_named() -> None:
    module = Formula(lambda s, x: torch.sqrt(x @ s.W) + s.b.square(), b=(2,), W=(4, 2))
    module.W.data.zero_()
    task = make_task("test", module, X, T, "mse")
    parts = ((range(0, 1), range(0, 1)), (range(1, 2), range(1, 2)))
    with torch.no_grad(), pytest.raises(ValueError, match=r"hessian: the block \('W', 'W'\) is NaN or infinite"):
        PanelSum([task], (1.0,), (Chunk(0, 0, 3, True),), parts).panel(1)
