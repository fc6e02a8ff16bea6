"""References: routes to Hessian-vector products, the group of each, and their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hessiankit.support.errors import HessiankitError, InputError
from hessiankit.support.progress import silent
from hessiankit.support.torch_state import load_forward_mode
from hessiankit.verify.probes import Probes
from hessiankit.verify.problem import Problem, plain_formulas

Progress: TypeAlias = Callable[[int, int], None]
"""Function called with (directions done, directions in all)."""

FAILURES = (RuntimeError, NotImplementedError, TypeError)
"""Exceptions of differentiation that cannot take an operation."""

MEMORY_BUDGET = 2**30
"""Bytes that the directions pushed together may take."""

CHUNK_LIMIT = 48
"""Most directions pushed together: wider batches leave the caches and run slower."""


class Unsupported(HessiankitError):
    """A reference cannot be computed for this problem; ``reason`` says why. It is a result as well as an exception.

    >>> print(Unsupported("curvlinops", "the package is not installed"))
    curvlinops: unsupported: the package is not installed
    """

    def __init__(self, reference: str, reason: str) -> None:
        super().__init__(f"{reference}: unsupported: {reason}")
        self.reference, self.reason = reference, reason


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a reference: H V, one product a row (k, P); the matrix H itself (P, P) where no directions were given."""

    value: Tensor
    error: Tensor | None = None  # the route's own estimate, in the layout of ``value``; None: its only error is rounding
    seconds: float = 0.0
    note: str = ""  # directions taken one at a time, steps shrunk at a kink
    probes: Probes | None = None  # the directions of ``value``, where they are the route's own

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Outcome:
        """Return the outcome with a function applied to value and error."""
        return replace(self, value=function(self.value), error=None if self.error is None else function(self.error))


RouteFunction: TypeAlias = "Callable[[Problem, Tensor, int, Progress], tuple[Tensor, Tensor | None, str]]"
"""(problem, directions (k, P), how many are pushed together, progress) -> H V (k, P), the route's own estimate of its error, of
the same shape or None, and a note; ``FAILURES`` may be raised."""


@dataclass(frozen=True)
class Reference:
    """A route to the exact Hessian, by its name in ``against=``: products H V for a batch of directions, or all columns.

    Two references of one independent group share a differentiation path and hence its defects: they count as one witness.
    """

    name: str
    independent_group: str
    route: RouteFunction
    many_calls: bool = False  # a direction costs dozens of calls of the module, so that a few directions have to do

    def measure(self, problem: Problem, V: Tensor | None = None, *, progress: Progress = silent) -> Outcome:
        """Return H V for directions V, one a row (k, P), or H where V is None; raise Unsupported where the route does not exist.

        As many directions are pushed together as ``MEMORY_BUDGET`` allows; ``progress`` is called with (done, in all) after each.
        """
        directions = torch.eye(problem.size, dtype=problem.dtype, device=problem.device) if V is None else V
        if directions.ndim != 2 or directions.shape[1] != problem.size:
            raise InputError(f"{self.name}: directions have shape {tuple(directions.shape)}; expected (k, {problem.size}).")
        directions = directions.to(problem.theta)
        try:
            _ = problem.value  # refuses a loss that is random or not finite, before any work
            chunk = directions_at_once(problem) if len(directions) > 1 else 1
            load_forward_mode()
            start = time.perf_counter()
            with torch.enable_grad():
                value, error, note = self.route(problem, directions, chunk, progress)
        except FAILURES as failure:
            hint = next((f"; {hint}" for text, hint in _HINTS.items() if text in str(failure)), "")
            raise Unsupported(self.name, typed_line(failure) + hint) from failure
        if value.is_cuda:
            torch.cuda.synchronize(value.device)
        outcome = Outcome(value.detach(), error, time.perf_counter() - start, note)
        return outcome.mapped(torch.t) if V is None else outcome

    def products(self, problem: Problem, V: Tensor) -> Tensor:
        """Return H v for every row v of ``V``: (k, P) -> (k, P)."""
        return self.measure(problem, V).value


_HINTS = {
    "ZeroTensors are immutable": "torch cannot take jvp(grad) of this loss; write it as (z - t).square().mean()",
    "dispatch_sdpa": "use attn_implementation='eager'",
}


def in_chunks(
    of_batch: Callable[[Tensor], Tensor], of_row: Callable[[Tensor], Tensor], V: Tensor, chunk: int, progress: Progress
) -> tuple[Tensor, str]:
    """Apply ``of_batch`` to chunks of rows of ``V``; where it cannot take a batch, apply ``of_row`` to each row.

    Both are the same mathematics; the second is slower, and the returned note says that it was needed and why. A chunk
    that does not fit on the accelerator is halved.
    """
    results, count, note = [], 0, ""
    while count < len(V):
        rows = V[count : count + chunk]
        try:
            by_row = bool(note) or len(rows) == 1
            results.append(torch.stack([of_row(row) for row in rows]) if by_row else of_batch(rows))
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
            chunk = max(1, chunk // 2)
            continue
        except Exception as error:
            if by_row or isinstance(error, HessiankitError):
                raise
            # The loop raises the route's own error, if there is one; only the batching's error is dropped here.
            note = f"one direction at a time ({typed_line(error)})"
            continue
        count += len(rows)
        progress(count, len(V))
    return torch.cat(results) if results else torch.zeros_like(V), note


def typed_line(error: Exception) -> str:
    """Return the type and the first line of an exception, short enough for a table.

    >>> typed_line(ValueError("wrong\\nmore")), typed_line(ValueError("wrong " * 50))[-9:]
    ('ValueError: wrong', 'wrong ...')
    """
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line if len(line) <= 200 else line[:200].rsplit(' ', 1)[0] + ' ...'}"


def directions_at_once(problem: Problem) -> int:
    """Return how many directions fit together."""
    with problem.at(), plain_formulas():
        need = _pushed_bytes(problem.call, list(problem.own.values()))
    return max(1, min(CHUNK_LIMIT, MEMORY_BUDGET // need))


def bytes_per_direction(loss: Callable[[Tensor], Tensor], theta: Tensor) -> int:
    """Return about how many bytes a direction takes while it is pushed: twice what the loss and its gradient compute.

    >>> bytes_per_direction(lambda x: (x**3).sum(), torch.zeros(2)) % (2 * 4)  # whole copies of two float32 numbers
    0
    """
    theta = theta.clone().requires_grad_()
    return _pushed_bytes(lambda: loss(theta), [theta])


def _pushed_bytes(loss: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    with _Allocations() as allocations:
        value = loss()
        if value.requires_grad:
            torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    return max(1, 2 * allocations.bytes)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of what operations return, views left out; also beneath transforms of torch.func, which allow no hooks."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        tensors = () if func.is_view else (x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, Tensor))
        self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return result
