"""Choices of the engine, each forced: where paths are cut, how many directions are swept together, what is kept."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import pytest
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from engine_cases import CASES
from torch import Tensor, nn

from hessiankit.engine import block_rows, contractions, jacobians, matrix_rows, parts, sections, sweep
from hessiankit.engine.paths import Paths
from hessiankit.request.loss_trace import loss_trace
from hessiankit.request.read import read_request


class Choice(NamedTuple):
    """What is forced.

    Attributes:
        cut: As for sections(); None: where it pays.
        work_space: Numbers of one sweep.
        joined: Numbers below which two sweeps are one.
        kept: Numbers of curvature that are collected.
        chunk: Entries that sums and rows treat at once.
    """

    cut: bool | None
    work_space: int = 2**23
    joined: int = 2**20
    kept: int = 2**25
    chunk: int | None = None


CHOICES = {
    "cuts": Choice(True),
    "cuts, few directions at a time": Choice(True, 100, 0, 20, 10),
    "no cuts, each place by itself": Choice(False, joined=0),
    "no cuts, few directions at a time": Choice(False, 60, 0, 20, 10),
    "no cuts, places together": Choice(False, 100, 2**40, 2**25, 50),
}


def with_choices(cases: Iterable[Any]) -> list[Any]:
    """Cases with every choice; all but three of them, which take turns, are tried by ``-m ""`` alone."""
    return [
        pytest.param(case, choice, marks=() if (k + j) % len(CHOICES) < 3 else pytest.mark.exhaustive)
        for k, case in enumerate(cases)
        for j, choice in enumerate(CHOICES)
    ]


def force_cuts(patch: pytest.MonkeyPatch, *, cut: bool | None) -> None:
    """Let the engine cut wherever a single value passes, nowhere, or with None where the sweeps take least."""
    sectioned = sections.sections
    if cut is not None:
        for module in (parts, sections):
            patch.setattr(
                module,
                "sections",
                lambda paths, is_diagonal=False: sectioned(paths, sections.stream(paths) if cut else (), is_diagonal=is_diagonal),
            )


def force(patch: pytest.MonkeyPatch, choice: Choice) -> None:
    """Let the engine take a choice."""
    force_cuts(patch, cut=choice.cut)
    for module, name, value in (
        (sweep, "WORK_SPACE", choice.work_space),
        (sections, "JOIN_SIZE", choice.joined),
        (block_rows, "TAIL_SIZE", choice.kept),
        (block_rows, "TILE", choice.chunk),
        (contractions, "CACHE", choice.chunk),
        (contractions, "OUTER", choice.chunk),
        (jacobians, "SCRATCH", choice.chunk),
        (contractions, "SCRATCH", choice.chunk),
        (matrix_rows, "SCRATCH", choice.chunk),
        (matrix_rows, "DIRECT", choice.chunk),
    ):
        if value is not None:
            patch.setattr(module, name, value)


def paths_of(module: nn.Module, x: Any, target: Tensor | None = None, loss: Any = None, *, by_column: bool = False) -> Paths:
    """Return the paths of a module's loss."""
    batch = read_request(module, x, target, loss=loss).only()
    return Paths(loss_trace(batch).trace, by_column=by_column)


@cache
def case(name: str) -> tuple[Formula, Tensor, Tensor, Tensor]:
    """A module of a list, an input, a target, and the Hessian of the mean squared error."""
    module, x = CASES[name].module(), draw(*CASES[name].x)
    target = draw(*module(x).shape, seed=7)
    return module, x, target, reverse_over_reverse(module, x, target, mse)
