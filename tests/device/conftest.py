"""Tests on a device: a GPU where torch has one, or HESSIANKIT_DEVICE=pretended, which is built at the first use."""

from __future__ import annotations

import os

import torch

DEVICE = os.environ.get("HESSIANKIT_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
collect_ignore_glob = [
    "conftest.py",
    "pretended.py",
    *([] if DEVICE else ["test_*.py", "device_cases.py"]),
]  # a doctest imports what it is in
if DEVICE == "pretended":
    import pretended  # noqa: F401
