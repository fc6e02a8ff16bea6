"""Provenance of numbers: versions, machine, threads, date."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hessiankit.support.kernels import kernels, processor_line


def environment(*names: str) -> dict[str, Any]:
    """Return the versions, the machine and the date that numbers were obtained with; all entries, or those of some names."""
    facts = {
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
    return {name: facts[name] for name in facts if not names or name in names}


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


def processor() -> str:
    """Return the processor's name as its maker writes it, or what the platform calls it."""
    name = processor_line("model name").partition(":")[2].strip()
    if name:
        return name
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
