"""A recorded run differentiated backwards: test losses at its end with respect to the weight of every sample in every step.

With L_t(theta, w) the loss of step t, in which sample i has the weight w_i = 1, and the step (theta', s') = U(theta, g, s) at
g = grad L_t(theta, w), the adjoints of theta' and s' give v, the adjoint of g, and

    adjoint(theta)  =  D_theta U^T adjoint(theta', s')  +  H_t v,        d(test loss)/d w_i  +=  <grad l_i, v> .

Both products come from one gradient of <grad L_t(theta, w), v>. Leaving a sample out changes its weight by -1.

Sources: Maclaurin, Duvenaud and Adams, "Gradient-based hyperparameter optimization through reversible learning", 2015; Hara,
Nitanda and Maehara, "Data cleansing for models trained with SGD", 2019; Ilyas and Engstrom, "MAGIC: near-optimal data
attribution for deep learning", 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hessiankit.functions.heads import weigh
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.data import on_device_of
from hessiankit.request.read import read_request
from hessiankit.request.state import ModuleState
from hessiankit.support.containers import samples
from hessiankit.support.errors import InputError
from hessiankit.support.progress import Tell
from hessiankit.tracing.source_line import first_line
from hessiankit.training.influence.recorded_run import RecordedRun
from hessiankit.training.influence.terms import output, weight_axes
from hessiankit.training.influence.updates import GRADIENT, THETA, Update, Values
from hessiankit.training.influence.work import Work

WHO = "influence"
Tape: TypeAlias = list[tuple[BatchLoss, Values, Update]]
"""Batch, parameters and state, and update of each step."""


class Replay:
    """The steps of a run, repeated from its checkpoints.

    Args:
        run: The record.
        model: The model at the end of the run.
        train: The data of the run: a loader over the same data set, or a pair (inputs, target) whose rows are the samples.
        asked: Arguments of the request, such as the loss.
        per_token: Whether each position of a sequence has a weight.
    """

    def __init__(self, run: RecordedRun, model: nn.Module, train: Any, asked: dict[str, Any], *, per_token: bool) -> None:
        self.run, self.model, self.train, self.per_token = run, model, train, per_token
        loss = {"loss": asked["loss"]} if "loss" in asked else {}
        self.asked = {**loss, "params": list(run.names), "handshake": False}
        is_pair = isinstance(train, (tuple, list)) and len(train) == 2 and isinstance(train[1], Tensor)
        if not is_pair and not (isinstance(train, DataLoader) and hasattr(train.dataset, "__getitem__")):
            raise InputError(
                f"{WHO}: train is a {type(train).__name__}; a replay needs a DataLoader over a data set with numbered samples, "
                "or a pair (inputs, target)"
            )
        self.count = len(train.dataset) if isinstance(train, DataLoader) else len(train[1])  # type: ignore[arg-type]
        largest = max((max(step.samples) for step in run.steps), default=-1)
        if not 0 <= largest < self.count:
            seen = f"the run has samples up to number {largest}, train has {self.count}"
            raise InputError(f"{WHO}: {seen}; pass the data of the run")

    def scores(self, adjoint: Tensor, work: Work, tell: Tell) -> Tensor:
        """Return the scores (samples, S), or (samples, tokens, S), from gradients (S, P) of test losses at the end."""
        run, state = self.run, work.state
        ends = [*sorted(run.checkpoints)[1:], len(run.steps)]
        starts = sorted(run.checkpoints)
        if "scores" not in state:
            zeros = {name: torch.zeros_like(adjoint) for name in run.rule.state}
            state |= {"scores": adjoint.new_zeros(self.count, *(0,) * self.per_token, len(adjoint)), "open": len(starts)}
            state["adjoints"] = {THETA: adjoint, **zeros}
        while state["open"]:
            k = state["open"] - 1
            tell("steps replayed", len(run.steps) - ends[k], len(run.steps))
            adjoints = state["adjoints"]
            if work.path is not None:  # the file keeps those of the last finished segment
                adjoints = {name: adjoint.clone() for name, adjoint in adjoints.items()}
            scores = self._segment(starts[k], ends[k], state["scores"], adjoints)
            work.keep(scores=scores, adjoints=adjoints, open=k)
        tell("steps replayed", len(run.steps), len(run.steps))
        return state["scores"]

    def _segment(self, start: int, end: int, scores: Tensor, adjoints: Values) -> Tensor:
        """Replay some steps: pull the adjoints back in place, and return the scores with those of these steps."""
        run, x = self.run, self.run.checkpoints[start]
        tape: Tape = []
        for t in range(start, end):
            batch = self._batch(run.steps[t].samples)
            gradient, moves = _own_gradient(batch, x[THETA])
            tape.append((batch, x, run.update(run.steps[t], moves)))
            x = tape[-1][2].applied({**x, GRADIENT: gradient})
            del gradient  # that of a step is computed anew with its graph: a vector less for each step
        self._compare(start, end, x[THETA])
        del x
        scores = scores.clone()
        while tape:
            inner = pulled(tape, adjoints, per_token=self.per_token)
            if self.per_token and inner.shape[1] > scores.shape[1]:
                scores = torch.nn.functional.pad(scores, (0, 0, 0, inner.shape[1] - scores.shape[1]))
            at = torch.tensor(run.steps[start + len(tape)].samples, device=scores.device)
            (scores[:, : inner.shape[1]] if self.per_token else scores).index_add_(0, at, inner, alpha=-1)
        return scores

    def _batch(self, numbers: tuple[int, ...]) -> BatchLoss:
        if isinstance(self.train, DataLoader):
            data = self.train.collate_fn([self.train.dataset[k] for k in numbers])
            data = tuple(data) if isinstance(data, list) else data
        else:
            data = samples(tuple(self.train), torch.tensor(numbers, device=self.train[1].device), self.count)
        data, state = on_device_of(self.model, data), partial(ModuleState, share=True)
        batch = read_request(self.model, data, state=state, **self.asked).only()
        if batch.n_samples != len(numbers):
            raise InputError(f"{WHO}: a batch of {len(numbers)} samples has {batch.n_samples} rows; samples are the first axis")
        return batch

    def _compare(self, start: int, end: int, theta: Tensor) -> None:
        """Refuse steps that do not lead to the next checkpoint, or at last to the model's parameters."""
        run = self.run
        if end in run.checkpoints:
            expected = run.checkpoints[end][THETA]
        else:
            parameters = dict(self.model.named_parameters())
            expected = torch.cat([parameters[name].detach().reshape(-1) for name in run.names])
        distance = float((expected - run.checkpoints[start][THETA]).norm())
        eps = torch.finfo(theta.dtype).eps
        # rounding grows from step to step: a quarter of the digits is far above it, and far below another loss
        if not float((theta - expected).norm()) <= eps**0.25 * distance + eps**0.75 * float(expected.norm()):
            off = float((theta - expected).norm()) / (distance or 1.0)
            raise InputError(
                f"{WHO}: steps {start} to {end} of the run, made again, end elsewhere, off by {off:.1e} of the distance; pass "
                "loss, data and model of the run, without dropout, clipping or steps that were not recorded"
            )


def _own_gradient(batch: BatchLoss, theta: Tensor) -> tuple[Tensor, list[bool]]:
    """Return the gradient of a batch's loss (P,), and whether each parameter has one."""
    slopes = batch.own_gradient(_named(batch, theta)).gradient
    gradient = torch.zeros_like(theta)
    for name, rows in batch.slices.items():
        slope = slopes[name]
        if slope is not None:
            gradient[rows] = slope.reshape(-1)
    return gradient, [slopes[name] is not None for name in batch.parameters]


def _named(batch: BatchLoss, theta: Tensor) -> dict[str, Tensor]:
    return {name: theta[rows].reshape(batch.shapes[name]) for name, rows in batch.slices.items()}


def pulled(tape: Tape, adjoints: Values, *, per_token: bool) -> Tensor:
    """Pull adjoints (S, P) back through the last step of a tape, which loses it, and return <grad l_i, v>.

    The adjoints change in place. The inner products are (samples, S), or (samples, tokens, S).

    In the gradient, the slope of the loss with respect to the output of each sample has a weight w_i = 1: the inner product of
    the gradient and v has H v as its derivative with respect to the parameters, and <grad l_i, v> with respect to w_i.
    """
    batch, x, update = tape.pop()  # here, so that no caller keeps the state of the step
    with batch.at(_named(batch, x[THETA])):
        leaves = list(batch.leaves.values())
        result, z = output(batch)
        axes = weight_axes(z, per_token=per_token)
        w = torch.ones(z.shape[:axes], dtype=z.dtype, device=z.device, requires_grad=True)
        weigh(z, w)
        loss = batch.loss.value(result, batch.target)
        del result, z
        G = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        gradient = torch.cat([slope.detach().reshape(-1) for slope in G])
        V = update.pulled({**x, GRADIENT: gradient}, adjoints)
        del x, loss, gradient
        inner = []
        for k, (v, total) in enumerate(zip(V, adjoints[THETA], strict=True)):
            inner.append(_pulled_twice(G, leaves, w, v, total, is_last=k + 1 == len(V)))
        return torch.stack(inner, -1)


def _pulled_twice(G: Sequence[Tensor], leaves: Sequence[Tensor], w: Tensor, v: Tensor, total: Tensor, *, is_last: bool) -> Tensor:
    """Add the derivative of <G, v> with respect to the parameters to a total (P,); return that with respect to the weights.

    Torch adds to ``grad`` what it finds there, a parameter at a time, so that no sum needs a vector of its own.
    """
    sizes, slopes = [p.numel() for p in leaves], [p.grad for p in leaves]
    cotangents = [part.reshape(p.shape) for part, p in zip(v.split(sizes), leaves, strict=True)]
    try:
        for p, part in zip(leaves, total.split(sizes), strict=True):
            p.grad = part.view(p.shape)
        w.grad = None
        torch.autograd.backward(G, cotangents, retain_graph=not is_last, inputs=[*leaves, w])
        return torch.zeros_like(w) if w.grad is None else w.grad
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        raise InputError(
            f"{WHO}: a replay differentiates twice, and torch says: {first_line(error)}; run the call inside "
            "hessiankit.twice_differentiable(), or load the model with eager attention"
        ) from error
    finally:
        for p, slope in zip(leaves, slopes, strict=True):
            p.grad = slope
