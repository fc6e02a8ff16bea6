"""Provenance of numbers: versions, machine, threads, date."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import time
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hessiankit.support.kernels import kernels


def environment(*names: str) -> dict[str, Any]:
    """Return the versions, the machine and the date that numbers were obtained with; all of it, or the entries of some names."""
    found = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "curvlinops": _version("curvlinops-for-pytorch"),
        "hessiankit": _version("hessiankit"),
        "sympy": _version("sympy"),
        "kernels": "compiled" if kernels() is not None else "plain torch",
        "threads": torch.get_num_threads(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
    }
    return {name: found[name] for name in found if not names or name in names}


@cache
def code_version(*names: str) -> str:
    """Return torch's version and a digest of the code that a kept number depends on.

    Args:
        *names: Files and folders of the repository, such as ``"hessiankit/blocks"``; of a folder all its Python files count.
    """
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for name in names:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return f"torch {torch.__version__}, code {digest.hexdigest()[:12]}"


def take_free_cores() -> None:
    """Let torch use the cores that are idle now, one at least, unless OMP_NUM_THREADS says how many.

    Threads on cores that other programs hold wait for each other at every operation.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), _idle_cores())))


def _idle_cores() -> int:
    """Return how many cores of this process were idle for most of a fifth of a second; by the load average where none tells."""
    try:
        before = _ticks()
        time.sleep(0.2)
        after = _ticks()
        mine = os.sched_getaffinity(0) & before.keys() & after.keys()
        return sum(2 * (after[k][0] - before[k][0]) > after[k][1] - before[k][1] for k in mine)
    except (OSError, AttributeError):
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        return (os.cpu_count() or 1) - round(load)


def _ticks() -> dict[int, tuple[int, int]]:
    """Return for every core its idle time and all its time so far."""
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    cores = (line.split() for line in lines if line.startswith("cpu") and line[3].isdigit())
    return {int(name[3:]): (int(times[3]) + int(times[4]), sum(map(int, times))) for name, *times in cores}


def processor() -> str:
    """Return the processor's name as its maker writes it, or what the platform calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    try:
        run = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=True)
        return run.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
