"""Every public function answers wrong arguments with one line of its own, and leaves the module and the random state as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from curvature_reference import sample
from malformed import complaint, plainly_wrong, pool
from public_calls import CALLS, PATIENT

import hessiankit as hk
from hessiankit.training import depth, distributed, monitoring, optim
from hessiankit.training import partition as parts

RESULTS = {
    "BlockTypes", "BoundsReport", "CheckReport", "CheckRow", "ConvergenceError", "CurvatureDiagonal", "DepthReport", "Derivation", "Estimate", "Forecast",
    "FrobeniusNorms", "Hessian", "HessianOperator", "HessiankitError", "InputError", "JacobianOperator", "Ledger", "LedgerReport", "OutOfMemoryError",
    "ScalarEstimates", "SharpnessReport", "Trace", "TraceError",
}  # fmt: skip
"""Public names that are made by the library, not by its user."""
STRUCTURE = {"NaN weight"}
UNREAD = {
    ("block_types", "model"): STRUCTURE, ("model_parts", "model"): STRUCTURE, ("named_slices", "module"): STRUCTURE,
    ("blockwise_lr", "model"): STRUCTURE, ("Monitor", "model"): STRUCTURE,
    ("angular_distance", "x"): {"NaN"}, ("angular_distance", "y"): {"NaN"},
    ("blockwise_lr", "power"): {"nan"}, ("blockwise_lr", "cap"): {"nan"},
    ("from_function", "params"): {"NaN", "no entries"},
    ("TransformerBlock", "rotary_theta"): {"nan"}, ("growth_laws", "theory"): {"number", "object"},
}  # fmt: skip
"""(function, argument) -> wrong values that are taken: values of a model whose structure alone is read, data that are read at the
first step, NaN that comes out as NaN, numbers for something that is not asked for, and words that are printed only."""


@pytest.mark.parametrize("name", CALLS)
def test_right_arguments_are_taken(name):
    assert complaint(CALLS[name], CALLS[name].right()) is None


@pytest.mark.slow
@pytest.mark.parametrize("part", sample(range(3), 3))
@pytest.mark.parametrize("name", CALLS)
def test_one_wrong_argument(name, part):
    call = CALLS[name]
    found = []
    for argument, what in list(wrong(name))[part::3]:
        arguments = call.right()
        arguments[argument] = pool(arguments[argument])[what]()
        if answer := complaint(call, arguments):
            found.append(f"{argument} = {what}: {answer}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_plainly_wrong_is_refused(name):
    call = CALLS[name]
    found = []
    for argument, right in call.right().items():
        spared = call.spared.get(argument, ())
        for what in plainly_wrong(right):
            if what not in spared and "*" not in spared:
                arguments = call.right()
                arguments[argument] = pool(arguments[argument])[what]()
                answer = complaint(call, arguments, refused=True)
                taken = what in UNREAD.get((name, argument), ())
                if answer != ("it is taken" if taken else None):
                    found.append(f"{argument} = {what}: {answer or 'it is refused, and UNREAD says that it is taken'}")
    assert not found, "\n".join(found)


def wrong(name: str) -> Iterator[tuple[str, str]]:
    """Yield (argument, wrong value) of a function, without those that are right but slow."""
    call = CALLS[name]
    for argument, right in call.right().items():
        spared = call.spared.get(argument, ())
        if argument in PATIENT:
            spared = (*spared, "class", "identity", "no parameters")  # functions too: what they raise is their own
        yield from ((argument, what) for what in pool(right) if what not in spared and "*" not in spared)


def test_every_public_function_is_called():
    called = {name.partition("(")[0] for name in CALLS}
    assert set(hk.__all__) - RESULTS - called == set()
    functions = {n for room in (optim, depth, monitoring, parts) for n in room.__all__ if n[0].islower()}
    assert functions - called == set()
    assert distributed.__all__  # needs processes: tests/training/test_distributed.py
