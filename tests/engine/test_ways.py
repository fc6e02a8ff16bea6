"""Everyday ways to reach, change or hide a parameter or a state: each is right, or refused by an error that names the cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import ways_parameters  # noqa: F401  (they enter their ways into the table)
import ways_state  # noqa: F401
from curvature_reference import sample
from readings import READINGS
from torch import Tensor
from ways import WAYS, Case, Way, hessian_of, leaves_of, picture

from hessiankit import check
from hessiankit.support.errors import InputError, TraceError

TOLERANCE = 1e-10
"""Of the largest entry."""


@cache
def reference(name: str) -> Tensor | None:
    """Return the Hessian by central differences of what the user calls, or None where there is none."""
    return hessian_of(WAYS[name]) if WAYS[name].right else None


def called(function: Callable[[Case], Any], this: Case) -> tuple[Any, str | None, bool]:
    """Return what a function makes of a case, the message it refuses it with, and whether all is as it was before."""
    before = picture(this.module, this.loss, this.inputs, this.target)
    found = message = None
    with this.around():
        try:
            found = function(this)
        except (InputError, TraceError) as error:
            message = str(error)
    return found, message, picture(this.module, this.loss, this.inputs, this.target) == before


def complaint(this: Way, right: Tensor | None, found: Tensor | None, message: str | None) -> str | None:
    """Return what is wrong with a result or a refusal."""
    if message is not None:
        if this.refused is None:
            return f"refused: {message}"
        return None if re.search(this.refused, message) else f"refused without {this.refused!r}: {message}"
    assert found is not None
    if right is None:
        return f"taken, but to be refused with {this.refused!r}"
    error = float((found - right).abs().max() / right.abs().max()) if found.shape == right.shape else float("inf")
    return None if error <= TOLERANCE else f"wrong by {error:.1e}"


@pytest.mark.parametrize(("k", "name"), enumerate(WAYS))
def test_right_or_refused_by_name(k: int, name: str) -> None:
    """By the matrix, products, the diagonal or norms, in turn, as all of them take the same way to the engine."""
    this = WAYS[name].make()
    call, of, _ = list(READINGS.values())[k % 4]
    found, message, untouched = called(lambda c: call(c.module, c.inputs, c.target, loss=c.loss, params=c.params)[1], this)
    matrix = reference(name)
    right = None if matrix is None else of(matrix, [p.numel() for p in leaves_of(this)])
    wrong = complaint(WAYS[name], right, found, message)
    assert wrong is None, wrong
    assert untouched, "the call left something changed"


@pytest.mark.parametrize("name", sample(WAYS, 8))
def test_check_passes_only_what_is_right(name: str) -> None:
    this = WAYS[name].make()
    report, message, untouched = called(lambda c: check(c.module, c.inputs, c.target, loss=c.loss, params=c.params), this)
    plain = WAYS[name].refused is None and WAYS[name].reference is None and WAYS[name].verified
    if message is None and report:
        wrong = complaint(WAYS[name], reference(name), report.hessian.matrix, None)
        assert wrong is None, f"passed, but {wrong}"
    elif message is None:
        assert not plain, f"not passed: {report}"
    else:
        assert not plain, f"refused: {message}"
    assert untouched, "the call left something changed"
