"""The innermost frame of the user's own code."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.tracing.source_line import source_line


def test_innermost_frame_outside_torch() -> None:
    layer = nn.Linear(2, 3)
    with pytest.raises(RuntimeError) as caught:
        layer(torch.ones(5))  # here
    assert source_line(caught.value).endswith("layer(torch.ones(5))  # here")
    assert "test_source_line.py:" in source_line(caught.value)


def test_an_exception_that_led_to_another() -> None:
    def fail() -> None:
        raise ValueError("no")  # cause

    class Elsewhere(Exception):
        pass

    error = Elsewhere()
    try:
        fail()
    except ValueError as cause:
        error.__cause__ = cause
    assert source_line(error).endswith('in fail: raise ValueError("no")  # cause')
    assert source_line(ValueError("never raised")) == ""


def test_trace_error_names_the_line() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 3).double(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:
                raise ValueError("one call is enough")
            return self.layer(x)

    with pytest.raises(hk.InputError, match=r'at .*test_source_line.py:\d+ in forward: raise ValueError\("one call') as caught:
        hk.hessian(Stubborn(), draw(2, 4), draw(2, 3))
    assert "\n" not in str(caught.value)
