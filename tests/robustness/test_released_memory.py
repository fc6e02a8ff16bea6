"""Tensors of a call are released with its result: none waits in a cycle of references for a garbage collection."""

from __future__ import annotations

import gc

import pytest
from public_calls import CALLS
from torch import Tensor


def tensors() -> int:
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("name", ["hessian", "hessian_operator", "hessian_diagonal", "influence", "sharpness"])
def test_nothing_is_left_for_a_collection(name: str) -> None:
    call = CALLS[name]
    call.function(**call.right())  # what is kept for later calls is made
    arguments = call.right()
    gc.collect()
    gc.disable()
    try:
        call.function(**arguments)
        count = tensors()
        gc.collect()
        assert tensors() == count
    finally:
        gc.enable()
