"""Every public function answers wrong arguments with one line of its own, and leaves the module and the random state as they were."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from malformed import complaint, pool
from public_calls import CALLS, PATIENT

import hessiankit as hk
from hessiankit import depth, distributed, monitoring, optim, parts

PAIRS = int(os.environ.get("FUZZ_PAIRS", "4"))
"""Random calls with two wrong arguments, for each function; more in a longer search."""
RESULTS = {
    "BlockTypes", "BoundsReport", "CheckReport", "CheckRow", "CurvatureDiagonal", "DepthReport", "Derivation", "Forecast", "FrobeniusNorms",
    "Hessian", "HessianOperator", "HessiankitError", "InputError", "Ledger", "LedgerReport", "OutOfMemoryError", "SharpnessReport",
    "Trace", "TraceError",
}  # fmt: skip
"""Public names that are made by the library, not by its user."""


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    assert complaint(CALLS[name], CALLS[name].right()) is None


@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument(name):
    call = CALLS[name]
    found = []
    for argument, what in wrong(name):
        arguments = call.right()
        arguments[argument] = pool(arguments[argument])[what]()
        if answer := complaint(call, arguments):
            found.append(f"{argument} = {what}: {answer}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CALLS)
def test_two_wrong_arguments(name):
    call, drawn = CALLS[name], random.Random(name)
    choices = list(wrong(name))
    found = []
    for _ in range(PAIRS):
        pair = drawn.sample(choices, min(2, len(choices)))
        arguments = call.right()
        pools = {argument: pool(arguments[argument]) for argument, _ in pair}
        arguments |= {argument: pools[argument][what]() for argument, what in pair}
        if answer := complaint(call, arguments):
            found.append(f"{pair}: {answer}")
    assert not found, "\n".join(found)


def wrong(name: str) -> Iterator[tuple[str, str]]:
    """Yield (argument, wrong value) of a function, without those that are right but slow."""
    call = CALLS[name]
    for argument, right in call.right().items():
        spared = call.spared.get(argument, ())
        if argument in PATIENT:
            spared = (*spared, "class", "identity", "no parameters")  # functions too: what they raise is their own
        yield from ((argument, what) for what in pool(right) if what not in spared and "*" not in spared)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_does_not_fit_the_signature_is_a_type_error(name):
    with pytest.raises(TypeError, match=r"unexpected keyword argument|no_such_option"):
        CALLS[name].function(**CALLS[name].right(), no_such_option=1)


def test_every_public_function_is_called():
    called = {name.partition("(")[0] for name in CALLS}
    assert set(hk.__all__) - RESULTS - called == set()
    functions = {n for room in (optim, depth, monitoring, parts) for n in room.__all__ if n[0].islower()}
    assert functions - called == set()
    assert distributed.__all__  # needs processes: tests/test_distributed_failures.py
