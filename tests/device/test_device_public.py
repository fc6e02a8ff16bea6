"""Every public call with its own arguments, moved to the device: the numbers are the CPU's, in float64 and in float32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from device_cases import DEVICE, default_device
from robustness.public_calls import CALLS
from torch import Tensor, nn
from torch.utils._pytree import tree_map

HOST = ("bounds", "TransformerBlock", "Transformer", "VisionTransformer")
"""What makes modules, which a user moves."""
DRAWN = ("sharpness", "blockwise_lr")
"""What draws on the device, whose numbers are not those that the CPU draws from the same seed."""
if DEVICE != "pretended":  # which has the CPU's generator
    DRAWN += ("spectrum",)
TIMES = ("seconds", "environment", "memory")


def moved(x: Any, device: str, dtype: torch.dtype) -> Any:
    """Return tensors, modules and operators' arguments on a device; other things as they are."""
    if isinstance(x, Tensor):
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)
    return x.to(device, dtype) if isinstance(x, nn.Module) else x


def numbers(x: Any) -> Iterator[float]:
    """Yield the numbers of a result, in its order."""
    if isinstance(x, Tensor):
        yield from x.detach().cpu().double().flatten().tolist()
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from () if key in TIMES else numbers(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from numbers(value)
    elif isinstance(x, float):
        yield x
    elif hasattr(x, "to_dict"):
        yield from numbers(x.to_dict())


def functions() -> list[str]:
    """The calls that take a tensor or a module."""
    taken = []
    for name, call in CALLS.items():
        leaves = torch.utils._pytree.tree_leaves(call.right())
        if name not in HOST and any(isinstance(x, (Tensor, nn.Module)) for x in leaves):
            taken.append(name)
    return taken


@pytest.mark.parametrize(
    ("dtype", "default"),
    [(torch.float64, None), (torch.float64, DEVICE), (torch.float32, None)],
    ids=["float64", "float64 on the default device", "float32"],
)
@pytest.mark.parametrize("name", functions())
def test_a_public_call_equals_the_cpu(name: str, dtype: torch.dtype, default: str | None) -> None:
    call = CALLS[name]
    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        arguments = tree_map(lambda x, device=device: moved(x, device, dtype), call.right())
        if isinstance(arguments.get("optimizer"), torch.optim.Optimizer):  # moving makes new parameters
            arguments["optimizer"] = torch.optim.SGD(arguments["module"].parameters(), lr=0.1)
        with default_device(default if device == DEVICE else None):
            results.append(list(numbers(call.function(**arguments))))
    here, there = results
    if name in DRAWN:
        assert there
        assert all(map(math.isfinite, there))
        return
    assert len(here) == len(there)
    tolerance = 1e-7 if dtype == torch.float64 else 2e-3
    scale = max((abs(x) for x in here if math.isfinite(x)), default=0.0)
    apart = [(a, b) for a, b in zip(here, there, strict=True) if not (a == b or (a != a and b != b))]
    assert all(abs(a - b) <= tolerance * scale for a, b in apart), apart[:3]
