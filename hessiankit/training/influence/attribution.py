"""Scores of training samples, by solutions with a curvature matrix or by replay of a recorded run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from hessiankit.curvature.operator import HessianOperator
from hessiankit.engine.linearisation import linearise
from hessiankit.request.batch_loss import BatchLoss
from hessiankit.request.read import read_request
from hessiankit.request.signature import RequestArguments, asks
from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError, check_count, check_name
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.support.torch_state import one_at_a_time
from hessiankit.training.digest import digest
from hessiankit.training.influence.recorded_run import RecordedRun
from hessiankit.training.influence.replay import Replay
from hessiankit.training.influence.scores import Influence, joined
from hessiankit.training.influence.terms import inner_products
from hessiankit.training.influence.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

WHO = "influence"
METHODS = {
    "ggn": "the Gauss-Newton matrix",
    "hessian": "the Hessian",
    "kfac": "KFAC",
    "ekfac": "EKFAC",
}


@checked(WHO)
@one_at_a_time
@asks(RequestArguments)
def influence(
    model: nn.Module,
    train: Any,
    test: Any,
    *,
    method: str | RecordedRun,
    damping: float | None = None,
    draws: int | None = None,
    per_token: bool = False,
    micro_batch: int | None = None,
    out: Path | None = None,
    **asked: Unpack[RequestArguments],
) -> Influence:
    """Return how much leaving out each training sample changes the loss of each test sample, to first order.

    At a minimum of the mean loss, leaving out sample i moves the parameters by C^-1 g_i, g_i its share of the gradient and C the
    curvature matrix, and the loss of a test sample by <g_test, C^-1 g_i> (Koh and Liang 2017; Grosse et al. 2023). One solution
    for each test sample serves all training samples, whose inner products with it take one forward sweep for each batch. A
    :class:`RecordedRun` in place of a matrix is differentiated backwards, step by step through its optimizer: the scores are
    the derivatives of what the run itself would return, at a minimum or not (Ilyas and Engstrom 2025).

    Training data are treated a batch at a time, so that the batches of a loader are the chunks. Rows of the scores are in the
    order in which they are drawn, or for a replay in that of the data set.

    Args:
        model: The trained model, in evaluation mode.
        train: Training data as in :func:`hessiankit.hessian`: a pair (inputs, target), a loader, batches of Hugging Face. For a
            replay the loader of the run, or a pair whose rows are its samples.
        test: Test data, likewise.
        method: ``"ggn"``, ``"hessian"``, ``"kfac"`` or ``"ekfac"``: the matrix C; or a record of the run.
        damping: Number added to the diagonal of C, on which scores depend; None for a replay only.
        draws: Labels drawn for each term, for ``"ggn"``, ``"kfac"`` and ``"ekfac"``; None: the expectation over labels.
        per_token: Whether positions of a sequence have scores of their own, which add up to those of the samples.
        micro_batch: Samples treated at once by products with C, as in :func:`hessiankit.hessian_operator`.
        out: File that keeps what is done: the same call goes on from there after an interruption.
        **asked: Arguments of :class:`~hessiankit.request.signature.RequestArguments`.

    Raises:
        InputError: An argument cannot be used, or the run made again does not lead to the model.
        TraceError: If torch cannot trace the model.

    Targets 0 and 2 of one parameter, which is their mean 1. The loss 1 of a test sample at 0 has the gradient 2; leaving out the
    first target takes the parameter to 2, by C^-1 g_1 = 1/2 to first order at a fixed divisor:

    >>> layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> _ = nn.init.ones_(layer.weight)
    >>> x, y = torch.ones(2, 1, dtype=torch.float64), torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    >>> found = influence(layer, (x, y), (x[:1], y[:1]), method="ggn", damping=0.0)
    >>> [round(score, 9) for score in found.scores[:, 0].tolist()]
    [1.0, -1.0]
    """
    start = time.perf_counter()
    is_replay = isinstance(method, RecordedRun)
    if not is_replay:
        check_name(WHO, "method", method, METHODS)
    if is_replay != (damping is None):
        advice = "a replay has none; leave it out" if is_replay else "scores depend on it; pass a number, such as 1e-3"
        raise InputError(f"{WHO}: damping={damping}: {advice}")
    if damping is not None and not damping >= 0:
        raise InputError(f"{WHO}: damping={damping}; pass 0 or more")
    check_count("draws", draws, "label")
    check_count("micro_batch", micro_batch, "sample")
    if isinstance(method, RecordedRun):
        asked = {**asked, "params": list(method.names)}
    notes: list[str] = []
    with progress_bar(f"{WHO}: ") as tell:
        gradients = _test_gradients(model, test, asked, tell)
        words = [str(method) if not is_replay else "replay", damping, draws, per_token]
        if isinstance(method, RecordedRun):
            replay = Replay(method, model, train, dict(asked), per_token=per_token)
            steps = [step.samples for step in method.steps]
            work = Work(out, digest([*words, gradients, [list(s) for s in steps], method.checkpoints[0]["theta"]]))
            try:
                scores = replay.scores(gradients, work, tell)
            finally:
                work.write()
            name = f"replay of {len(method.steps)} steps of {method.kind}"
        else:
            _check_order(train)
            kind = "hessian" if method == "hessian" else "ggn" if draws is None else "fisher-mc"
            batches = read_request(model, train, kind=kind, draws=draws or 1, **asked).together()
            ask = digest([*words, gradients, [(b.args, b.kwargs, b.target, b.parameters) for b in batches]])
            work = Work(out, ask)
            try:
                solutions = _solutions(batches, gradients, str(method), kind, float(damping or 0), micro_batch, work, notes)
                scores = _by_batch(batches, solutions, work, tell, per_token=per_token)
            finally:
                work.write()
            name = METHODS[str(method)] + (f" of {draws} drawn labels a term" if draws else "")
    return Influence(scores, name, damping, gradients.shape[1], tuple(notes), time.perf_counter() - start)


def _check_order(train: Any) -> None:
    """Refuse a loader that shuffles: rows of the scores would belong to unknown samples."""
    if isinstance(train, DataLoader) and isinstance(train.sampler, RandomSampler):
        raise InputError(
            f"{WHO}: train shuffles, so that rows of the scores would have no numbers; pass a loader without shuffle"
        )


def _test_gradients(model: nn.Module, test: Any, asked: RequestArguments, tell: Tell) -> Tensor:
    """Return the gradient of the loss of each test sample by itself, (S, P)."""
    own = {name: value for name, value in asked.items() if name in ("loss", "params")}
    gradients: list[Tensor] = []
    for batch in read_request(model, test, handshake=False, **own).batches():  # type: ignore[arg-type]
        for k in range(batch.n_samples):
            slopes = batch.part(slice(k, k + 1)).own_gradient().gradient
            parts = [torch.zeros_like(p) if slopes[n] is None else slopes[n] for n, p in batch.parameters.items()]
            gradients.append(torch.cat([part.reshape(-1) for part in parts]).to(batch.dtype))  # type: ignore[union-attr]
            tell("gradients of test samples", len(gradients), len(gradients))
    return torch.stack(gradients)


def _solutions(
    batches: Sequence[BatchLoss],
    gradients: Tensor,
    method: str,
    kind: str,
    damping: float,
    micro_batch: int | None,
    work: Work,
    notes: list[str],
) -> Tensor:
    """Return (C + damping I)^-1 of the gradients, (S, P)."""
    if "solutions" not in work.state:
        linearised = [linearise(batch, gauss_newton=kind != "hessian", micro_batch=micro_batch) for batch in batches]
        operator = HessianOperator(batches, linearised, kind, None)
        if method in ("kfac", "ekfac"):
            solutions, note = operator.approximation(method).inverse(damping) @ gradients.T, ""
        else:
            solution = operator.solve(gradients.T, damping=damping)
            solutions = solution.x
            note = "" if solution.converged else f"not converged: {solution}"
        work.keep(solutions=solutions.T.contiguous(), note=note)
    notes += [work.state["note"]] if work.state["note"] else []
    return work.state["solutions"]  # type: ignore[no-any-return]


def _by_batch(batches: Sequence[BatchLoss], solutions: Tensor, work: Work, tell: Tell, *, per_token: bool) -> Tensor:
    rows: list[Tensor] = work.state.get("rows", [])
    for k in range(len(rows), len(batches)):
        tell("batches of training samples", k, len(batches))
        rows.append(batches[k].share * inner_products(batches[k], solutions, per_token=per_token))
        work.keep(rows=rows)
    return joined(rows)
