"""The memory of this process: how much is resident, and how much was at the highest."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path


def give_back() -> None:
    """Hand freed memory back to the system, so that it does not hide what is taken next (glibc only)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def reset_peak() -> str:
    """Forget the peak of the imports where the system can; where it cannot, a small rise hides below it. Return how."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return "VmHWM, reset after imports and inputs"
    return "ru_maxrss"


def highest() -> int:
    """Return the peak of the resident size in bytes; ru_maxrss alone also holds what the parent had when this process started."""
    known = _status("VmHWM:")
    return (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) if known is None else known
    )


def resident() -> int:
    """Return the resident size in bytes, or the peak where the system does not tell it."""
    known = _status("VmRSS:")
    return highest() if known is None else known


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None
