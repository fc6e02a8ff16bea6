"""Timing calls in turn, so that whatever slows the machine down for a while slows all of them."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import hessiankit


def in_turn(calls: Mapping[str, Callable[[int], float]], rounds: int) -> Iterator[dict[str, list[float]]]:
    """Make every call once a round and yield, after each round, the seconds of all rounds so far.

    Args:
        calls: Name -> a function that takes the number of the round, does the work once and returns the seconds that count.
        rounds: How often. The order is rotated from round to round, so that nobody always follows the same one.

    >>> [seconds["b"] for seconds in in_turn({"a": float, "b": lambda k: 2.0 * k}, 2)]
    [[0.0], [0.0, 2.0]]
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds):
        first = k % max(1, len(names))
        for name in names[first:] + names[:first]:
            gc.collect()  # the last one's garbage is not this one's
            seconds[name].append(calls[name](k))
        yield {name: list(values) for name, values in seconds.items()}


def environment() -> dict[str, Any]:
    """Return the versions, the machine and the date that times were measured with."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "curvlinops": _version("curvlinops-for-pytorch"),
        "hessiankit": hessiankit.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def processor() -> str:
    """Return the processor's name as its maker writes it, or what the platform calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    try:
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True)
        return asked.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
