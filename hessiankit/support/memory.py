"""Free memory of a device, and the error for an allocation that does not fit."""

from __future__ import annotations

import os
import re
import sys

import torch

from hessiankit.support.errors import OutOfMemoryError


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device, with those that torch's allocator keeps for later.

    A device that shares the host's memory (mps) has what is free there; one that does not tell is taken to have room.
    """
    if device.type not in ("cpu", "mps", "meta"):
        module = torch.get_device_module(device)
        if not hasattr(module, "mem_get_info"):
            return sys.maxsize
        free = int(module.mem_get_info(device)[0])
        if hasattr(module, "memory_reserved"):
            free += int(module.memory_reserved(device)) - int(module.memory_allocated(device))
        return free
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:  # the third line of many
            line = re.search(rb"MemAvailable:\s*(\d+) kB", file.read(512))
    except OSError:
        line = None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if line is None else int(line[1]) * 1024


def check_room(caller: str, need: int, subject: str, device: torch.device, remedy: str, *, free: int | None = None) -> None:
    """Refuse an allocation larger than ``free`` bytes, by default the bytes that are free on the device now.

    Raises:
        OutOfMemoryError: It says what takes how much, what is free, and the ``remedy``.
    """
    free = available_memory(device) if free is None else free
    if need > free:
        raise OutOfMemoryError(
            f"{caller}: {subject} take {byte_size(need)}, but only {byte_size(free)} are free on {device}; {remedy}"
        )


def check_matrix(caller: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, workspace: int = 0) -> None:
    """Refuse a matrix that does not fit beside its work space, in bytes; see :func:`check_room`."""
    subject = f"a {rows:,} x {columns:,} {dtype} matrix and its work space"
    remedy = "select parameters with params=[...], let hessian write it to disk with out=..., or use a smaller model"
    check_room(caller, rows * columns * dtype.itemsize + workspace, subject, device, remedy)


def byte_size(n: float) -> str:
    """Return a number of bytes as readable text.

    >>> byte_size(1010), byte_size(1536), byte_size(3 * 2**40)
    ('1010 B', '1.5 KiB', '3.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:,.1f} TiB"
