"""The device "pretended": the CPU's numbers under the rules of a GPU, see pretended_device.cpp. Importing it builds it."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

NAME = "pretended"
built: Any = load("pretended_device", [str(Path(__file__).with_name("pretended_device.cpp"))], extra_cflags=["-O0", "-std=c++20"])

_module = types.ModuleType(f"torch.{NAME}")
_module.__dict__.update(
    is_available=lambda: True,
    is_initialized=lambda: True,
    _is_in_bad_fork=lambda: False,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    device=lambda device: nullcontext(),
    synchronize=lambda device=None: torch.accelerator.synchronize(),
    empty_cache=lambda: None,
    manual_seed=lambda seed: built.default_generator().manual_seed(seed) and None,
    manual_seed_all=lambda seed: built.default_generator().manual_seed(seed) and None,
    get_rng_state=lambda device=None: built.default_generator().get_state(),
    set_rng_state=lambda state, device=None: built.default_generator().set_state(state) and None,
    get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    **{name: getattr(built, name) for name in dir(built) if "memory" in name or name == "mem_get_info"},
)
torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@contextmanager
def counted(listener: Callable[[str, str], None] | None = None) -> Iterator[Counter[str]]:
    """Count what a GPU pays for: "launch", "wait", "to host" and "to device", readable after the block."""
    counts: Counter[str] = Counter()
    built.counts()
    built.listen(listener)
    try:
        yield counts
    finally:
        built.listen(None)
        counts.update(built.counts())


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Leave the device this many bytes beyond what is in use."""
    built.set_limit(built.memory_allocated() + size)
    try:
        yield
    finally:
        built.set_limit(8 << 30)
