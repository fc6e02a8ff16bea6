"""One problem, the closed form and its peers: compared, tuned, then timed in turn in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.entries import Part, Ring
from benchmarks.packaged import CURVLINOPS, EIGENTHINGS, jax_hessian, jax_products
from benchmarks.peers import AUTOGRAD_HESSIAN, FUNC_HESSIAN, JACREV, JVP, REVERSE, VJP, Peer
from benchmarks.plan import Plan, Tell
from benchmarks.problems import Case
from benchmarks.timing import CLOCKS, add_rounds, in_turn, rounds_within, spread, timed
from hessiankit.engine.storage import zeros
from hessiankit.support.kernels import kernels, plain

CLOSED = "closed form"
PLAIN = "closed form, plain torch"
"""The same without the compiled kernels, where they are used."""
TRIALS = 0.8
"""Part of a cell's budget after which no round is begun; the trials have to be over before, by what the rounds may take."""


def contestants() -> list[Peer]:
    """Return the peers of the dense Hessian; the one under ``torch.compile`` is chosen from these, later."""
    torch_routes = [REVERSE, VJP, JVP, JACREV, FUNC_HESSIAN, AUTOGRAD_HESSIAN]
    return [*torch_routes, CURVLINOPS, EIGENTHINGS, jax_hessian(), jax_products()]


def contest(
    case: Case,
    part: Part,
    closed: Callable[[], Tensor],
    peers: Sequence[Peer],
    plan: Plan,
    tell: Tell,
) -> dict[str, Any]:
    """Return a row for each contestant, in plain data.

    Args:
        case: The problem.
        part: The part of the Hessian to compute.
        closed: Returns it by closed form, rows x columns.
        peers: The other methods.
        plan: Repeats, limits and the device.
        tell: Progress.
    """
    steps = len(peers) + 3 + plan.repeats
    # Each contestant gets the same share of the cell's time for each of its runs: the trial, the rounds, and one to spare.
    end = time.perf_counter() + TRIALS * plan.budget
    clock, share = CLOCKS[plan.clock], plan.limit_seconds / ((len(peers) + 2) * (plan.repeats + 2))
    ring = Ring(case, part, share, plan.device, end - plan.limit_seconds, clock)
    tell(f"{CLOSED}, first call", 0, steps)

    def off(columns: Tensor) -> float:
        return ring.error(columns[:, [j - part.columns.start for j in ring.picks]].T)

    def in_plain_torch() -> Tensor:
        with plain():
            return closed()

    found, first_seconds = timed(plan.device, closed, clock)
    rounds = max(1, rounds_within(plan.limit_seconds - first_seconds, first_seconds, plan.repeats))
    variants = {PLAIN: in_plain_torch} if kernels() is not None and found.is_cpu else {}
    ours = {CLOSED: {**ring.verdict_row(CLOSED, off(found)), "first_seconds": first_seconds}}
    ours |= {name: {**ring.verdict_row(name, off(call())), "ours": True} for name, call in variants.items()}
    side = math.isqrt(found.numel() - 1) + 1
    blank = partial(_written, side, found.dtype, found.device)
    del found
    entries = []
    for k, peer in enumerate(peers):
        tell(f"{peer.name}, trial", 1 + k, steps)
        entries.append(ring.enter(peer))
    if plan.compile:
        tell("torch.compile", 1 + len(peers), steps)
        entries.append(ring.compiled(entries))
    writing: list[float] = []

    def own_turn(_: int) -> float:
        writing.append(timed(plan.device, blank, clock)[1])  # first, for it pays for memory that the others gave back
        return timed(plan.device, closed, clock)[1]

    calls: dict[str, Callable[[int], float]] = {CLOSED: own_turn}
    calls |= {name: lambda _, call=call: timed(plan.device, call, clock)[1] for name, call in variants.items()}  # type: ignore[misc]
    for entry in entries:
        if entry.runs:
            calls[entry.peer.name] = lambda _, e=entry: ring.run(e)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {}
    tell("round 1", 2 + len(peers), steps)
    for k, so_far in enumerate(in_turn(calls, rounds)):
        seconds = so_far
        tell(f"round {k + 2}", 3 + len(peers) + k, steps)
        if time.perf_counter() > end:
            break
    own = seconds[CLOSED]
    add_rounds(ours, {name: seconds[name] for name in ours}, CLOSED)
    rows = list(ours.values())
    for entry in entries:
        entry.seconds = seconds.get(entry.peer.name, [])
        rows.append(entry.row(own, part.width))
    return {
        "parameters": case.size,
        "rows": rows,
        "writing": spread(writing),
        "compared_columns": len(ring.picks),
        "rounds": len(own),
    }


def _written(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a square matrix in memory of the kind that the closed form writes its result into, every entry touched."""
    return zeros((side, side), dtype, device).fill_(1.0)
